"""Unbranch: a branch whose variables live apart is taken apart."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist_py.kernel.ir.editor import Editor
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract
from autodist_py.kernel.sharding.branches import BRANCHES, Apart, StaysWholeError, take_apart
from autodist_py.kernel.sharding.spread import spread_branches
from autodist_py.proto.graph_item import Variable

_SCOPE = "AutoDist-Branches"


@dataclass(frozen=True, slots=True)
class Unbranch:
    """A branch that updates variables which live apart, or are cut, is taken apart.

    Gradient accumulation and loss scales make such: one op would write variables of several servers and shards.

    Ensures: the ops of both sides of such a branch are computed in each step, and each of its writes leaves what it
        writes alone where its side is not taken. A branch of which an op might then fail, or do something that one
        device would not do, stays whole, and the program says why.

    Example, on worker 0 of two: `if now: a -= mean(x); b -= mean(x)`, of variables on two servers.

        - cond = If(now, a, gradient/a, b, gradient/b)
        + Branches/cond/taken = Reshape(now, Branches/cond/one)
        + Branches/cond/then/update_a/nothing = ZerosLike(gradient/a)
        + Branches/cond/then/update_a = AssignSubVariableOp(a, Branches/cond/then/update_a/chosen)
        + cond = NoOp(^Branches/cond/then/update_a, ^Branches/cond/then/update_b)
        ...
    """

    name: ClassVar[str] = "unbranch"
    contract: ClassVar[Contract] = Contract(requires={Invariant.CAPTURED}, ensures={Invariant.UNBRANCHED})

    def __call__(self, program: Program) -> Program:
        view, item = program.analysis.captured, program.item
        if program.is_single or next(view.of_type(BRANCHES), None) is None:
            return program
        reasons: dict[str, str] = {}
        apart: dict[str, Apart] = {}
        sure = {op_of(gradient.tensors[0]) for gradient in item.gradients if gradient.is_sparse}
        read = {str(parse(output.tensor)) for output in item.outputs}
        read |= {str(parse(name)) for node in view.nodes.values() for name in node.input if not name.startswith("^")}
        for node in spread_branches(program):
            scope = f"{_SCOPE}/{node.name}"
            try:
                apart[node.name] = take_apart(view, node, scope=scope, sure=sure, read=read)
            except StaysWholeError as reason:
                reasons[node.name] = str(reason)
        program = replace(program, cuts=replace(program.cuts, whole_branches=reasons))
        return _without(program, apart) if apart else program


def _without(program: Program, apart: Mapping[str, Apart]) -> Program:
    """The program without these branches."""
    view, item = program.analysis.captured, program.item
    editor = Editor(view)
    redirected: dict[str, str] = {}
    for name, parts in apart.items():
        *nodes, end = parts.nodes
        for node in nodes:
            editor.add(node)
        editor.put(end)
        for at, result in enumerate(parts.results):
            redirected[str(parse(f"{name}:{at}"))] = result
    for tensor, replacement in redirected.items():
        editor.redirect(tensor, replacement)
    outputs = (replace(one, tensor=_instead(one.tensor, redirected)) for one in item.outputs)
    variables = (replace(one, update_ops=tuple(_writers(one, apart))) for one in item.variables)
    return program.of_item(editor.rewritten(replace(item, outputs=tuple(outputs), variables=tuple(variables))))


def _instead(tensor: str, redirected: Mapping[str, str]) -> str:
    replacement = redirected.get(str(parse(tensor)))
    return tensor if replacement is None else f"{replacement}:0"


def _writers(variable: Variable, apart: Mapping[str, Apart]) -> Iterator[str]:
    for op in variable.update_ops:
        if op not in apart:
            yield op
        else:
            yield from (use.op for use in apart[op].uses if use.writes and use.handle == variable.name)
