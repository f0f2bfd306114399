"""Partition: variables in shards, each synchronized by itself."""

import zlib
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist_py.kernel.analysis.shard_plan import CannotBeCutError, Captured, Cut, cut_of
from autodist_py.kernel.ir.editor import Editor
from autodist_py.kernel.program import Invariant, Program, Shards
from autodist_py.kernel.runner import Contract
from autodist_py.kernel.sharding.gradients import cut_gradient
from autodist_py.kernel.sharding.variables import cut_variable
from autodist_py.proto.graph_item import Gradient, Variable
from autodist_py.proto.strategy import VariableStrategy


@dataclass(frozen=True, slots=True)
class Partition:
    """Variables that the strategy cuts into shards are cut.

    Ensures: the program's item is one for one device, too, that computes the same, in which every shard that lives on
        a server is a variable by itself, with its own part of the gradient, of the update and of the optimizer's state.
        Rows are looked up in the shards that have them; whatever else reads the variable reads it whole, as it is given
        its new value at the end of the step, and between two writes where the step reads it there. Where all shards are
        reduced by collectives every worker has all of them, so that the gradient alone is cut; a sparse one is not. Of
        the ops all are needed.

    Example, on worker 0 of two: `w -= mean(x)`, where `w` is cut in two.

        - gradient/w = Identity(mean)
        - update = AssignSubVariableOp(w, gradient/w)
        + Shards/1 = ops(mean)
        + gradient/w/part_0 = Identity(Shards/1)
        + update/part_0 = AssignSubVariableOp(w/part_0, gradient/w/part_0)
        + gradient/w/part_1 = Identity(Shards/1)
        + update/part_1 = AssignSubVariableOp(w/part_1, gradient/w/part_1)
        + update = NoOp(^update/part_0, ^update/part_1)
        ...
    """

    name: ClassVar[str] = "partition"
    contract: ClassVar[Contract] = Contract(
        requires={Invariant.CAPTURED, Invariant.UNBRANCHED}, ensures={Invariant.CUT}
    )

    def __call__(self, program: Program) -> Program:
        nodes = [node for node in program.strategy.node_config if node.shards]
        if not nodes or program.is_single:
            return program
        captured = Captured.of(program)
        cuts: dict[str, Cut] = {}
        left: dict[str, VariableStrategy] = {}
        sparse = {variable.name for variable in program.item.sparse_variables}
        reasons: dict[str, str] = {}
        for node in nodes:
            if not program.analysis.writes.get(node.var_name):
                left[node.var_name] = _whole(node)  # Its gradient alone is asked for.
                continue
            if _is_reduced(node):
                if node.var_name in sparse:  # Rows are gathered from all workers, and their order may count.
                    left[node.var_name] = _whole(node)
                continue
            try:
                cuts[node.var_name] = _cut(captured, node, cuts)
            except CannotBeCutError as error:
                if node.synchronizer is None and program.options.strict:
                    raise
                left[node.var_name] = _whole(node)
                reasons[node.var_name] = error.reason
        strategy = replace(
            program.strategy, node_config=tuple(left.get(node.var_name, node) for node in program.strategy.node_config)
        )
        known = replace(program.cuts, left_whole=reasons)
        return _partitioned(replace(program, strategy=strategy, cuts=known), cuts)


def _is_reduced(node: VariableStrategy) -> bool:
    return all(one.as_all_reduce for one in node.synchronizers)


def _whole(node: VariableStrategy) -> VariableStrategy:
    """How the variable is trained where it is not cut."""
    one = zlib.crc32(node.var_name.encode()) % node.num_shards  # Not all on one server.
    return VariableStrategy(node.var_name, node.synchronizer or node.shards[one].synchronizer)


def _cut(captured: Captured, node: VariableStrategy, others: dict[str, Cut]) -> Cut:
    cut = cut_of(captured, node)
    for name, other in others.items():
        shared = cut.handles & other.handles or cut.rules.keys() & other.rules.keys()
        if shared:
            why = f"'{min(shared)}' belongs to its update, and to that of '{name}', which is cut, too"
            raise CannotBeCutError(node.var_name, why)
    return cut


def _partitioned(program: Program, cuts: dict[str, Cut]) -> Program:
    item, editor = program.item, Editor(program.analysis.captured)
    nodes: list[VariableStrategy] = []
    gradients: dict[Gradient, list[Gradient]] = {}
    variables: dict[str, list[Variable]] = {variable.name: [variable] for variable in item.variables}
    shards: list[Shards] = []
    part_of: dict[str, str] = {}
    for node in program.strategy.node_config:
        nodes += node.shards or [node]
        if not node.shards:
            continue
        part_of |= {part.var_name: node.var_name for part in node.shards}
        variable = item.variable(node.var_name)
        for gradient in item.gradients_of(node.var_name):
            gradients[gradient] = cut_gradient(editor, gradient, variable, node)
        cut = cuts.get(node.var_name)
        if cut is None:
            parts = zip(node.shards, node.shapes(variable.shape), strict=True)
            variables[variable.name] += [Variable(part.var_name, variable.dtype, shape) for part, shape in parts]
            continue
        variables |= cut_variable(editor, cut)
        shapes = node.shapes(variable.shape)
        shards += [Shards(one.name, cut.axis, shapes, is_whole=one.name in cut.whole) for one in cut.variables]
    joined = [op for one in shards if one.is_whole for op in variables[one.variable][0].update_ops]
    rewritten = editor.rewritten(
        replace(
            item,
            variables=tuple(each for variable in item.variables for each in variables[variable.name]),
            gradients=tuple(each for gradient in item.gradients for each in gradients.get(gradient, [gradient])),
            run_ops=(*item.run_ops, *joined),
        )
    )
    return replace(
        program.of_item(rewritten),
        strategy=replace(program.strategy, node_config=tuple(nodes)),
        cuts=replace(program.cuts, shards=tuple(shards), part_of=part_of),
    )
