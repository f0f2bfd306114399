"""Variances of which workers are told in one message with the mean that they are about.

A variance is the mean of squared differences from a mean. So one device's, of parts, takes two messages: the mean, then
the variance about it. A replica's variance about its own mean needs none before it, and what one device has follows
from all means, variances and numbers of examples (Chan, Golub and LeVeque 1979): see `reductions.combine`.

Before → after, of `mean` and `variance` as `tf.nn.moments` computes them of rows `x`:

    mean = Mean(x)                                          mean = Mean(x)
    variance = Mean(SquaredDifference(x, mean of all))      own = Mean(SquaredDifference(x, mean))
    y = reads(mean of all, variance of all)                 y = reads(Unpack([mean, own], combined as "moments"))
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autodist_py.capture.batch.insertion import Insertion
from autodist_py.capture.batch.whole_batch.solver import WholeBatch
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import reads_of

_PASSES_ON = frozenset({"Identity", "StopGradient"})


@dataclass(frozen=True, slots=True)
class Moments:
    """A mean and a variance about it, of the same rows.

    Attributes:
        mean: the op that makes it.
        variance: likewise.
    """

    mean: str
    variance: str


def told_together(found: WholeBatch) -> Iterator[Moments]:
    """The means and variances that are read combined where they are made; of several variances of a mean, one."""
    nodes = found.graph.nodes
    combined = {op_of(nodes[op].input[index]) for (op, index), how in found.edges.items() if how == "mean"}
    means: set[str] = set()
    for variance in sorted(combined):
        mean = "" if variance in found.of_replicas else _mean_of(found, variance)
        if mean in combined and mean not in means:
            means.add(mean)
            yield Moments(mean, variance)


def tell_together(found: WholeBatch, insertion: Insertion) -> dict[str, str]:
    """Let what reads these means and variances combined read them of one statistic.

    Returns:
        What one device has of each, by the op that makes it.
    """
    of_all: dict[str, str] = {}
    for one in told_together(found):
        combined = insertion.moments(one.mean, one.variance, *map(found.shapes.of, (one.mean, one.variance)))
        of_all |= dict(zip((one.mean, one.variance), combined, strict=True))
    for (op, index), reduction in list(found.edges.items()):
        made_by = op_of(found.graph.nodes[op].input[index])
        if reduction == "mean" and made_by in of_all:
            insertion.read(op, index, of_all[made_by])
            del found.edges[op, index]
    return of_all


def _mean_of(found: WholeBatch, variance: str) -> str:
    """The op that makes the mean about which `variance` is taken; "": it is none."""
    nodes = found.graph.nodes
    node = nodes[variance]
    if node.op != "Mean" or not found.tensor_of(f"{variance}:0").dtype.is_floating:
        return ""
    for values, about in _differences(found, op_of(node.input[0])):
        mean = _origin(found, about)
        is_of_values = nodes[mean].op == "Mean" and str(parse(nodes[mean].input[0])) == values
        if is_of_values and _is_alike(found, mean, variance):
            return mean
    return ""


def _is_alike(found: WholeBatch, mean: str, variance: str) -> bool:
    """Whether both are means over the same axes, and the first is paired with the numbers that it is a mean of.

    Without the axes that it is over, it is so only if these are the first ones.
    """
    nodes = [found.graph.nodes[name] for name in (mean, variance)]
    rank = found.shapes.of(nodes[0].input[0]).rank
    axes = [found.constant(node.input[1]) for node in nodes]
    if rank is None:
        return False
    known = [{int(axis) % rank for axis in one.flat} for one in axes if one is not None]
    if len(known) < len(nodes) or known[0] != known[1]:
        return False
    return nodes[0].attr["keep_dims"].b or known[0] == set(range(len(known[0])))


def _differences(found: WholeBatch, op: str) -> list[tuple[str, str]]:
    """What `op` squares the difference of, if it does, in both orders."""
    nodes = found.graph.nodes
    reads = [str(parse(read)) for read in reads_of(nodes[op])]
    if nodes[op].op == "Square" or (nodes[op].op == "Mul" and reads[0] == reads[1]):
        op = op_of(reads[0])
        if nodes[op].op != "Sub":
            return []
    elif nodes[op].op != "SquaredDifference":
        return []
    first, second = (str(parse(read)) for read in reads_of(nodes[op]))
    return [(first, second), (second, first)]


def _origin(found: WholeBatch, tensor: str) -> str:
    """The op that made `tensor`, behind those that pass it on as it is."""
    op = op_of(tensor)
    while found.graph.nodes[op].op in _PASSES_ON:
        op = op_of(found.graph.nodes[op].input[0])
    return op
