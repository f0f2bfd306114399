"""What of a library function depends on what."""

from collections.abc import Collection
from typing import Any


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


def sources(node: Any) -> list[str]:
    """The arguments and ops of a library function whose values its op `node` reads."""
    return [name.partition(":")[0] for name in node.input if not name.startswith("^")]
