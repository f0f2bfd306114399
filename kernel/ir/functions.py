"""What of a library function depends on what."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from autodist_py.kernel.ir.graph import functions_of


def reached_in(function: Any, begins: Collection[str], *, but: Collection[str] = ()) -> set[str]:
    """Of a FunctionDef, the arguments and ops `begins`, and all ops that depend on them along data edges.

    Args:
        function: the FunctionDef.
        begins: names of arguments and ops.
        but: types of ops that are taken to depend on nothing.
    """
    reads = {node.name: sources(node) for node in function.node_def if node.op not in but}
    reached = set(begins)
    while more := {name for name, read in reads.items() if not reached.isdisjoint(read)} - reached:
        reached |= more
    return reached


def with_called(node: Any, library: Mapping[str, Any]) -> Iterator[Any]:
    """`node`, and all nodes of the library functions that it runs, and that these run.

    An op runs the functions among its attributes, or the one that it has its type from.

    Args:
        node: a NodeDef.
        library: FunctionDefs by name.
    """
    yield node
    pending, seen = [node], set[str]()
    while pending:
        caller = pending.pop()
        called = ({name for _, name in functions_of(caller)} | {caller.op} & library.keys()) - seen
        seen |= called
        for name in sorted(called):
            yield from library[name].node_def
            pending += library[name].node_def


def sources(node: Any) -> list[str]:
    """The arguments and ops of a library function whose values its op `node` reads."""
    return [name.partition(":")[0] for name in node.input if not name.startswith("^")]
