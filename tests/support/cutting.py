"""Steps whose variables are cut, and the check that they compute what the step computes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.passes.partition import Partition
from autodist_py.kernel.pipeline import compile, start
from autodist_py.kernel.program import Options, Program
from autodist_py.kernel.topology import Topology
from autodist_py.kernel.verify import verify
from autodist_py.program.executor import Executor
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import kernel_programs
from tests.support.capture_steps import capture

DEVICE = "127.0.0.1:CPU:0"
SERVED, REDUCED = PSSynchronizer(DEVICE), AllReduceSynchronizer()
TWO_WORKERS = kernel_programs.topology(1, 1)


class Cutting(NamedTuple):
    """Along which axis a variable is cut, and the shards' sizes."""

    axis: int
    sizes: Sequence[int]


def node_of(
    item: GraphItem, name: str, cutting: Cutting | None, synchronizers: Sequence[Any] = (SERVED,)
) -> VariableStrategy:
    if cutting is None or len(cutting.sizes) == 1:
        return VariableStrategy(name, REDUCED)
    own = [synchronizers[index % len(synchronizers)] for index in range(len(cutting.sizes))]
    return VariableStrategy.partitioned(item.variable(name), cutting.axis, own, sizes=cutting.sizes)


def cut(
    item: GraphItem, nodes: Sequence[VariableStrategy], *, where: Topology = TWO_WORKERS, strict: bool = True
) -> Program:
    """`item` after the pass; variables without a node are whole."""
    named = {node.var_name: node for node in nodes}
    config = tuple(named.get(one.name, VariableStrategy(one.name, REDUCED)) for one in item.trainable_variables)
    program = Partition()(start(item, Strategy(config, (DEVICE,)), where, Options(strict=strict)))
    verify(program)
    if program.item != item:
        require_needed(program.item)
    return program


def require_needed(item: GraphItem) -> None:
    """Every op is read or waited for, or the item names it: what is without a use would count as one itself."""
    view = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    tensors = [output.tensor for output in item.outputs] + [source.name for source in item.inputs]
    tensors += [statistic.tensor for statistic in item.statistics]
    tensors += [tensor for gradient in item.gradients for tensor in gradient.tensors]
    named = {*map(op_of, tensors), *item.run_ops, *(op for one in item.variables for op in one.update_ops)}
    used = {producer for producers in view.producers.values() for producer in producers}
    assert not view.nodes.keys() - used - named


def shard_values(program: Program, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values, with those of the shards."""
    found = dict(values)
    for shards in program.cuts.shards:
        parts = np.split(values[shards.variable], np.cumsum(shards.sizes)[:-1], axis=shards.axis)
        found |= dict(zip(shards.names, parts, strict=True))
    return found


class Step(NamedTuple):
    """A step as it is captured."""

    item: GraphItem
    values: dict[str, np.ndarray]
    state: Mapping[str, tf.Tensor]


def run(
    item: GraphItem, state: Mapping[str, tf.Tensor], values: dict[str, np.ndarray], steps: Sequence[Any]
) -> tuple[list[Any], dict[str, np.ndarray]]:
    """What the steps return on one device, and the variables after them."""
    variables = {name: tf.Variable(value) for name, value in values.items()}
    strategy = Strategy(tuple(VariableStrategy(one.name, REDUCED) for one in item.trainable_variables), (DEVICE,))
    compiled = compile(item, strategy, kernel_programs.topology(1))
    executor = Executor(compiled, {(name, 0): variable for name, variable in variables.items()}, state)
    results = [[np.array(one) for one in executor.run(list(map(tf.constant, feeds)))] for feeds in steps]
    return results, {name: variable.numpy() for name, variable in variables.items()}


def require_same(step: Step, program: Program, steps: Sequence[Any]) -> None:
    """Both compute the same results and variables: those that are cut are what their shards make, joined."""
    item, values, state = step
    wanted, whole = run(item, state, values, steps)
    got, parts = run(program.item, state, shard_values(program, values), steps)
    for mine, theirs in zip(got, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert any(not np.array_equal(whole[one.name], values[one.name]) for one in item.trainable_variables)
    cuts = {shards.variable: shards for shards in program.cuts.shards}
    for name, value in whole.items():
        if name in cuts:
            joined = np.concatenate([parts[one] for one in cuts[name].names], axis=cuts[name].axis)
            np.testing.assert_allclose(joined, value, rtol=1e-9, atol=1e-12, err_msg=name)
        if name not in cuts or cuts[name].is_whole:
            np.testing.assert_allclose(parts[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def captured(step: Callable[..., Any], *arguments: Any) -> Step:
    found = capture(step, *map(tf.constant, arguments))
    return Step(found.item, {name: variable.numpy() for name, variable in found.variables.items()}, found.state)


class CutInTwo:
    """Each variable in two shards, both on the first server."""

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        synchronizers = [PSSynchronizer(resources.server_devices[0])] * 2
        cut = [
            VariableStrategy.partitioned(one, 0, synchronizers[: 2 if one.shape else 1])
            for one in item.trainable_variables
        ]
        return Strategy(tuple(cut), tuple(resources.replica_devices))
