"""How the outputs of a program that differ between replicas become what one device would have returned."""

from collections.abc import Iterator

import tensorflow as tf

from autodist_py.kernel.ir.dataflow import standing_once
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.program import Program
from autodist_py.proto.graph_item import Output


def differing(program: Program) -> Iterator[Output]:
    """The outputs that depend on a replica's own examples, and are combined."""
    once = standing_once(program.item, program.analysis.captured)
    for output in program.item.outputs:
        op = op_of(output.tensor)
        if op in program.analysis.varying and op not in once and not output.per_replica:
            yield output


def output_reduction(program: Program, output: Output) -> str:
    """How an output that differs is combined, as `reductions.Part` says; passes/lower_collectives.py has the cases."""
    known = {"mean": "mean", "sum": "sum", "same": "first"}
    if output.reduction in known:
        return known[output.reduction]
    if output.shape is not None and output.shape[:1] == (None,):
        return "local rows" if program.options.batch == "local" else "rows"
    return program.options.fetch_reduction if tf.as_dtype(output.dtype).is_floating else "first"
