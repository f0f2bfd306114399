"""The schedule of a step that is planned, as text: what workers would tell one another, in order."""

from collections import defaultdict
from dataclasses import replace

from autodist_py.diagnostics.plan import PlannedSchedule
from autodist_py.kernel.collectives.engines import automatic_engine, slowest_bandwidth, with_engine
from autodist_py.kernel.events import GatherFactors
from autodist_py.kernel.pipeline import planned
from autodist_py.kernel.printer import format_schedule
from autodist_py.kernel.program import Options
from autodist_py.kernel.topology import resolve
from autodist_py.proto.errors import AutoDistError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy


def planned_schedule(
    item: GraphItem, strategy: Strategy, resources: ResourceSpec, examples: int | None, options: Options
) -> PlannedSchedule:
    """The events of a step of so many examples under a heading; or why the program would be refused."""
    chosen = with_engine(strategy, item, automatic_engine(item, strategy, resources))
    options = replace(options, bandwidth=slowest_bandwidth(resources), examples=examples)
    try:
        schedule = planned(item, chosen, resolve(strategy.replicas, resources, worker=0), options)
    except AutoDistError as error:
        return PlannedSchedule(f"a step has no schedule, as the program is refused: {error}")
    if not schedule.events:
        return PlannedSchedule("a step has no communication: there is one replica")
    factors: defaultdict[str, float] = defaultdict(float)
    for event in schedule.of_kind(GatherFactors):
        for name, nbytes in event.replica_bytes.items():
            factors[name] += nbytes
    text = f"Schedule: the communication of a step, in order\n{format_schedule(schedule)}"
    return PlannedSchedule(text, factors)
