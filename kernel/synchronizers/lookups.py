"""Tables of which workers read rows only: they ask the server for those of their batch, and hold no new copy."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import op_of
from autodist_py.kernel.program import Program

_READ = "ReadVariableOp"
_SHAPES = frozenset({"Shape", "VariableShape"})
"""Op types that read what every copy knows."""
_SCALED = frozenset({"Identity", "Mul", "Neg", "RealDiv"})
_SCATTERS = frozenset({"ResourceScatterAdd", "ResourceScatterSub"})


@dataclass(frozen=True, slots=True)
class Lookup:
    """An op whose result is rows of a table: its second input says which.

    Attributes:
        handle: the table's.
        op: the op.
    """

    handle: str
    op: str


def lookups_of(program: Program, handle: str, moved: Collection[str]) -> tuple[Lookup, ...]:
    """The ops by which workers read rows of a table that a server holds; none where they read it in another way too.

    Args:
        program: whose step it is.
        handle: the table's.
        moved: ops that servers run.
    """
    view = program.analysis.captured
    found: list[Lookup] = []
    for user in sorted(view.dataflow_consumers([handle]) - set(moved)):
        lookups = _lookups(view, handle, user)
        if lookups is None:
            return ()
        found += lookups
    written = view.ancestors([lookup.op for lookup in found]) & set(program.analysis.writes[handle])
    return () if written else tuple(found)


def _lookups(view: GraphView, handle: str, user: str) -> list[Lookup] | None:
    """The lookups by which `user` reads the table; None: it, or what reads its result, is none."""
    node = view.nodes[user]
    if node.op in _SHAPES:
        return []
    if node.op == "ResourceGather" and not node.attr["batch_dims"].i:
        return [Lookup(handle, user)]
    if node.op != _READ:
        return None
    found = []
    for consumer in sorted(view.dataflow_consumers([user])):
        reader = view.nodes[consumer]
        if reader.op in _SHAPES:
            continue
        if reader.op != "GatherV2" or op_of(reader.input[0]) != user or reader.attr["batch_dims"].i:
            return None
        axis = view.constant(reader.input[2])
        if axis is None or axis != 0 or op_of(reader.input[1]) == user:
            return None
        found.append(Lookup(handle, consumer))
    return found


def adds_rows_up(view: GraphView, values: str, scalars: Collection[str]) -> bool:
    """Whether it makes no difference to what reads a sparse gradient that rows of one index are added up before.

    So it is where rows are scaled by scalars and added to, or taken from, the rows of a variable, and nothing else.

    Args:
        view: the captured graph.
        values: the op whose result is the rows.
        scalars: ops whose results are scalars.
    """
    pending, seen = [values], {values}
    while pending:
        op = pending.pop()
        for consumer in view.dataflow_consumers([op]) - seen:
            node = view.nodes[consumer]
            if node.op in _SCATTERS:
                continue
            others = {op_of(name) for name in node.input if not name.startswith("^")} - seen
            if node.op not in _SCALED or others - set(scalars) or (node.op == "RealDiv" and op_of(node.input[1]) == op):
                return False
            seen.add(consumer)
            pending.append(consumer)
    return True


def by_table(lookups: Collection[Lookup]) -> Iterator[tuple[str, list[Lookup]]]:
    """Each table's lookups, in the order of the tables' names."""
    for handle in sorted({lookup.handle for lookup in lookups}):
        yield handle, [lookup for lookup in lookups if lookup.handle == handle]
