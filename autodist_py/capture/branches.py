"""Branches without the arguments that neither of their sides needs: an op that runs a branch reads nothing in vain.

What replicas combine before a branch leaves ops behind in it, whose results nobody reads. Through what those ops read
the branch, and all that it writes, would seem to be each replica's own.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from autodist_py.kernel.ir.graph import READS_VARIABLE, functions_of
from autodist_py.kernel.ir.node import node
from autodist_py.kernel.ir.tf_adapter import is_stateful

_BRANCHES = frozenset({"If", "StatelessIf"})
_JOINT = "IdentityN"


def drop_unused_arguments(graph: tf.compat.v1.GraphDef) -> None:
    """Give each op of `graph`, and of its functions, that runs one of two branches only what one of them needs.

    An op is needed for a result, or because it does something. A read of a variable does nothing by itself.
    """
    functions = {function.signature.name: function for function in graph.library.function}
    nodes = [*graph.node, *(each for function in functions.values() for each in function.node_def)]
    callers = Counter(name for each in nodes for _, name in functions_of(each))
    _drop(graph.node, {name: function for name, function in functions.items() if callers[name] == 1})


def _drop(nodes: Iterable[tf.compat.v1.NodeDef], functions: Mapping[str, tf.compat.v1.NodeDef]) -> None:
    """Drop what the branches among `nodes` do not need, if their sides are `functions`, which nothing else calls."""
    for each in nodes:
        sides = [functions[name] for _, name in functions_of(each) if name in functions]
        if each.op not in _BRANCHES or len(sides) != 2:
            continue
        used: set[int] = set()
        for side in sides:
            _take_joints_apart(side)
            _drop(side.node_def, functions)
            needed = _needed(side)
            _replace(side.node_def, [one for one in side.node_def if one.name in needed])
            used |= {at for at, argument in enumerate(side.signature.input_arg) if argument.name in needed}
        unused = set(range(len(sides[0].signature.input_arg))) - used
        _drop_arguments(each, sides, sorted(unused, reverse=True))


def _drop_arguments(branch: tf.compat.v1.NodeDef, sides: Sequence[tf.compat.v1.NodeDef], unused: Sequence[int]) -> None:
    for at in unused:
        del branch.input[at + 1]  # The first is the predicate.
        del branch.attr["Tin"].list.type[at]
        for side in sides:
            del side.signature.input_arg[at]
    if unused:  # What else is known of arguments stands under their numbers; nothing here reads it.
        branch.attr.pop("_read_only_resource_inputs", None)
        for side in sides:
            side.arg_attr.clear()
            side.resource_arg_unique_id.clear()


def _needed(function: tf.compat.v1.NodeDef) -> set[str]:
    """The ops and the arguments that the function needs."""
    nodes = {each.name: each for each in function.node_def}
    waiting = [*function.ret.values(), *function.control_ret.values()]
    waiting += [each.name for each in nodes.values() if is_stateful(each) and each.op not in READS_VARIABLE]
    found: set[str] = set()
    while waiting:
        name = _op_of(waiting.pop())
        if name not in found:
            found.add(name)
            waiting += nodes[name].input if name in nodes else ()
    return found


def _take_joints_apart(function: tf.compat.v1.NodeDef) -> None:
    """Let each tensor that a joint of the function passes on pass by itself: who reads one waits for no other."""
    joints = {each.name: each for each in function.node_def if each.op == _JOINT}
    if not joints:
        return

    def passed(name: str) -> str:
        op, _, rest = name.partition(":")
        return f"{op}/{rest.rpartition(':')[2]}:output:0" if op in joints else name

    for each in function.node_def:
        for at, name in enumerate(each.input):
            each.input[at] = passed(name)
    for result, name in list(function.ret.items()):
        function.ret[result] = passed(name)
    _replace(
        function.node_def,
        [part for each in function.node_def for part in (_parts(each) if each.name in joints else [each])],
    )


def _parts(joint: tf.compat.v1.NodeDef) -> Iterator[tf.compat.v1.NodeDef]:
    """An op for each tensor that the joint passes on, and one for those that wait for it."""
    controls = [name for name in joint.input if name.startswith("^")]
    for at, dtype in enumerate(joint.attr["T"].list.type):
        yield node("Identity", f"{joint.name}/{at}", [joint.input[at]], controls=controls, T=tf.as_dtype(dtype))
    yield node("NoOp", joint.name, controls=controls)


def _op_of(name: str) -> str:
    """The op, or the argument, that an input of an op in a function stands for."""
    return name.removeprefix("^").partition(":")[0]


def _replace(nodes: list[tf.compat.v1.NodeDef], by: Iterable[tf.compat.v1.NodeDef]) -> None:
    """Let the ops of a function be others, among which may be its own."""
    kept = [copy.deepcopy(each) for each in by]
    del nodes[:]
    nodes.extend(kept)
