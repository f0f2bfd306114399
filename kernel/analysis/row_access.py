"""Tables of which a step reads rows only, and writes rows only: what need not be read, or sent, whole or twice."""

from collections.abc import Callable, Collection, Iterator

import tensorflow as tf

from autodist_py.kernel.events import Lookup
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.program import Program
from autodist_py.proto.graph_item import Gradient

_READ = "ReadVariableOp"
SHAPES = frozenset({"Shape", "VariableShape"})
"""Op types that read what every copy knows."""
_IDS = frozenset({tf.int32.as_datatype_enum, tf.int64.as_datatype_enum})
"""The types by which a variable itself can be looked up in; what is read of it, by others too."""
_SCALED = frozenset({"Identity", "Mul", "Neg", "RealDiv"})
_BY_ROWS = ("ResourceScatter", "ResourceSparseApply")
_SCATTERS = frozenset({"ResourceScatterAdd", "ResourceScatterSub"})


def lookups_of(program: Program, handle: str, ignored: Collection[str]) -> tuple[Lookup, ...]:
    """The ops by which a step reads rows of a table; none where it reads the table in another way too.

    Args:
        program: whose step it is.
        handle: the table's.
        ignored: ops that do not count, such as those that a server runs.
    """
    view = program.analysis.captured
    outputs = {op_of(output.tensor) for output in program.item.outputs}
    found: list[Lookup] = []
    for user in sorted(view.dataflow_consumers([handle]) - set(ignored)):
        lookups = _lookups(view, handle, user)
        if lookups is None or (user in outputs and view.nodes[user].op == _READ):
            return ()
        found += lookups
    written = view.ancestors([lookup.op for lookup in found]) & set(program.analysis.writes[handle])
    return () if written else tuple(found)


def _lookups(view: GraphView, handle: str, user: str) -> list[Lookup] | None:
    """The lookups by which `user` reads the table; None: it, or what reads its result, is none."""
    node = view.nodes[user]
    if node.op in SHAPES:
        return []
    if node.op == "ResourceGather" and not has_batch_dims(node):
        return [Lookup(handle, user)]
    if node.op != _READ:
        return None
    found = []
    for consumer in sorted(view.dataflow_consumers([user])):
        reader = view.nodes[consumer]
        if reader.op in SHAPES:
            continue
        if reader.op != "GatherV2" or op_of(reader.input[0]) != user or has_batch_dims(reader):
            return None
        axis, ids = view.constant(reader.input[2]), reader.attr["Tindices"].type
        if axis is None or axis != 0 or op_of(reader.input[1]) == user or ids not in _IDS:
            return None
        found.append(Lookup(handle, consumer))
    return found


def is_written_by_rows(program: Program, handle: str) -> bool:
    """Whether the step writes rows of the variable, rather than all of it.

    From then on TensorFlow copies the variable for whoever reads all of it, so that rows are better looked up in the
    variable itself. That, by itself, has the same effect: what is never written by rows is better read.
    """
    nodes = program.analysis.captured.nodes
    return any(nodes[writer].op.startswith(_BY_ROWS) for writer in program.analysis.writes[handle])


def has_batch_dims(gather: tf.compat.v1.NodeDef) -> bool:
    """Whether the gather looks up each example in rows of its own."""
    return "batch_dims" in gather.attr and gather.attr["batch_dims"].i != 0  # A look at what is not there adds it.


def adds_rows_up(program: Program, gradient: Gradient) -> bool:
    """Whether it makes no difference to what reads a sparse gradient that rows of one index are added up before.

    So it is where rows are scaled by scalars and, with their indices, added to or taken from the rows of a variable,
    and neither is used for anything else.
    """
    view = program.analysis.captured
    indices, values = _joined(program, gradient) or _markers(gradient)
    scaled = _passed_on(view, values, lambda op, source: _is_scaled(view, op, source))
    passed = _passed_on(view, indices, lambda op, source: view.nodes[op].op == "Identity")
    used = {op_of(output.tensor) for output in program.item.outputs} | set(program.item.run_ops)
    if (scaled | passed) & used:
        return False
    scatters = (view.dataflow_consumers(scaled) - scaled) | (view.dataflow_consumers(passed) - passed)
    return all(
        view.nodes[op].op in _SCATTERS
        and op_of(view.nodes[op].input[1]) in passed
        and op_of(view.nodes[op].input[2]) in scaled
        for op in scatters
    )


def _markers(gradient: Gradient) -> tuple[str, str]:
    """The ops that pass on indices and values."""
    indices, values = map(op_of, gradient.tensors[:2])
    return indices, values


def _joined(program: Program, gradient: Gradient) -> tuple[str, str] | None:
    """The ops that join its indices, and its values, with those of other gradients alike; None: there are none."""
    view = program.analysis.captured
    used = {op_of(output.tensor) for output in program.item.outputs}
    joins: list[str] = []
    for marker in _markers(gradient):
        consumers = sorted(view.dataflow_consumers([marker]))
        if len(consumers) != 1 or marker in used or view.nodes[consumers[0]].op != "ConcatV2":
            return None
        joins += consumers
    parts = [list(map(op_of, view.nodes[join].input[: view.nodes[join].attr["N"].i])) for join in joins]
    known = {_markers(one) for one in program.item.gradients if one.is_sparse}
    markers = set().union(*known)
    if len(parts[0]) != len(parts[1]) or view.constant(view.nodes[joins[0]].input[len(parts[0])]) != 0:
        return None
    pairs = list(zip(*parts, strict=True))
    alike = all(pair in known or markers.isdisjoint(pair) for pair in pairs) and _markers(gradient) in pairs
    return (joins[0], joins[1]) if alike else None


def _passed_on(view: GraphView, source: str, passes: Callable[[str, str], bool]) -> set[str]:
    """`source`, and the ops that pass on what it makes: `passes(op, producer)` says whether one does."""
    found, pending = {source}, [source]
    while pending:
        producer = pending.pop()
        for op in view.dataflow_consumers([producer]) - found:
            if passes(op, producer):
                found.add(op)
                pending.append(op)
    return found


def _is_scaled(view: GraphView, op: str, rows: str) -> bool:
    """Whether `op` scales `rows` by a scalar, or passes them on."""
    node = view.nodes[op]
    reads = [op_of(name) for name in node.input if not name.startswith("^")]
    others = [read for read in reads if read != rows]
    if node.op not in _SCALED or len(reads) - len(others) != 1 or not view.scalars.issuperset(others):
        return False
    return node.op != "RealDiv" or reads[0] == rows


def by_table(lookups: Collection[Lookup]) -> Iterator[tuple[str, list[Lookup]]]:
    """Each table's lookups, in the order of the tables' names."""
    for handle in sorted({lookup.handle for lookup in lookups}):
        yield handle, [lookup for lookup in lookups if lookup.handle == handle]
