"""What a branch writes of one variable: the same on all replicas, or what differs between them.

Before → after, of a branch that all replicas take or none, and that is given `own`, which differs between them:

    weights.assign_sub(total); sums.assign(own * 0.0) → `weights` is written alike, `sums` is not
"""

from collections.abc import Collection, Set
from typing import Any

from autodist_py.kernel.ir.functions import reached_in, sources
from autodist_py.kernel.ir.graph import PASSES_HANDLE, READS_VARIABLE, RUNS_BRANCH, GraphView, functions_of
from autodist_py.kernel.ir.names import op_of


def writes_alike(
    view: GraphView, writer: str, handle: str, varying: Collection[str], draws: Collection[str], drawing: Set[str]
) -> bool:
    """Whether the op `writer` is a branch which is seen to write the variable of `handle` alike on all replicas.

    Args:
        view: the graph.
        writer: an op that depends on what differs between replicas.
        handle: the op of the variable's handle.
        varying: the ops whose results differ between replicas.
        draws: the types of ops that give each replica another result of equal inputs.
        drawing: the library functions in which such an op stands.
    """
    node = view.nodes[writer]
    condition, *given = (op_of(name) for name in node.input if not name.startswith("^"))
    if node.op not in RUNS_BRANCH or condition in varying or handle not in given:
        return False
    written = {index for index, op in enumerate(given) if op == handle}
    own = {index for index, op in enumerate(given) if op in varying}
    functions = [view.library[name] for name in _called(node)]
    return not written & own and all(_are_alike(one, written, own, draws, drawing) for one in functions)


def _are_alike(
    function: Any, written: Collection[int], own: Collection[int], draws: Collection[str], drawing: Set[str]
) -> bool:
    """Whether what a FunctionDef writes to its arguments `written` depends on none of `own`, nor on what is drawn."""
    arguments = [one.name for one in function.signature.input_arg]
    drawn = [node.name for node in function.node_def if node.op in draws or not drawing.isdisjoint(_called(node))]
    reached = reached_in(function, [*(arguments[index] for index in own), *drawn])
    handles = {arguments[index] for index in written}
    writers = (
        node for node in function.node_def if node.op not in READS_VARIABLE and not handles.isdisjoint(sources(node))
    )
    # What passes the handle on is not looked into.
    return not any(node.name in reached or node.op in PASSES_HANDLE or _called(node) for node in writers)


def _called(node: Any) -> list[str]:
    return [name for _, name in functions_of(node)]
