"""The schedule of a step that is planned, as text: what workers would tell one another, in order, and for which ops."""

import math
from collections import defaultdict
from dataclasses import replace

import tensorflow as tf
from rich.filesize import decimal

from autodist_py.diagnostics.plan import PlannedSchedule
from autodist_py.kernel.analysis.whole_batch_sizes import gathers_rows, whole_tensors
from autodist_py.kernel.collectives.engines import automatic_engine, slowest_bandwidth, with_engine
from autodist_py.kernel.events import GatherFactors
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.pipeline import planned
from autodist_py.kernel.printer import format_schedule
from autodist_py.kernel.program import Options
from autodist_py.kernel.topology import resolve
from autodist_py.proto.errors import AutoDistError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.text import table

_MOST_TENSORS = 5
"""How many of those that are computed of the whole batch are listed."""


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
    total = examples if options.batch == "global" or examples is None else examples * len(resources.workers)
    parts = (_of_all_examples(item), _whole_tensors(item, total, len(strategy.replicas)))
    return PlannedSchedule(text, factors, "\n\n".join(filter(None, parts)))


def _whole_tensors(item: GraphItem, examples: int | None, replicas: int) -> str:
    """The largest tensors that each replica computes of a batch of so many examples; "": none, or it is not known."""
    if examples is None or not gathers_rows(item):
        return ""
    batched = (one for one in item.inputs if one.batched and one.shape)
    given = {one.name: (examples if one.batch == 0 else None, *(one.shape or ())[1:]) for one in batched}
    largest = whole_tensors(item, given, replicas=replicas)[:_MOST_TENSORS]
    rows = [(one.op, one.type, "x".join(map(str, one.shape)) or "scalar", decimal(one.nbytes)) for one in largest]
    return table((f"on each replica, of {examples} examples", "op", "shape", "bytes"), rows) if rows else ""


def _of_all_examples(item: GraphItem) -> str:
    """The values that ops of the step read of all examples, how, how large they are, and which ops; "": there are none.

    What is read so is combined within the step: see the schedule's statistics.
    """
    view = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    rows = []
    for statistic in item.statistics:
        if statistic.reduction not in ("mean", "moments", "rows", "sum"):
            continue
        marker = op_of(statistic.tensor)
        readers_of = view.dataflow_consumers([marker])
        if statistic.reduction == "moments":  # They are taken apart first.
            readers_of = view.dataflow_consumers(readers_of)
        names = sorted(readers_of, key=lambda name: (name.startswith("gradient_tape/"), name))
        readers = [f"{view.nodes[name].op} '{name}'" for name in names]
        nbytes = (
            math.prod(size for size in statistic.shape or () if size is not None) * tf.as_dtype(statistic.dtype).size
        )
        size = f"{decimal(nbytes)} a row" if statistic.reduction == "rows" else decimal(nbytes)
        more = f" and {len(readers) - 1} more" if len(readers) > 1 else ""
        rows.append((str(parse(view.nodes[marker].input[0])), statistic.reduction, size, f"{readers[0]}{more}"))
    return table(("of all examples", "combined as", "bytes", "for"), rows) if rows else ""
