"""The schedule of a step that is planned, as text: what workers would tell one another, in order."""

from autodist_py.kernel.collectives.engines import automatic_engine, with_engine
from autodist_py.kernel.pipeline import planned
from autodist_py.kernel.printer import format_schedule
from autodist_py.kernel.program import Options
from autodist_py.kernel.topology import resolve
from autodist_py.proto.errors import AutoDistError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy


def schedule_text(item: GraphItem, strategy: Strategy, resources: ResourceSpec, options: Options) -> str:
    """The events of a step under a heading; or why the program would be refused."""
    chosen = with_engine(strategy, item, automatic_engine(item, strategy, resources))
    try:
        schedule = planned(item, chosen, resolve(strategy.replicas, resources, worker=0), options)
    except AutoDistError as error:
        return f"a step has no schedule, as the program is refused: {error}"
    if not schedule.events:
        return "a step has no communication: there is one replica"
    return f"Schedule: the communication of a step, in order\n{format_schedule(schedule)}"
