"""For tests of your own: whether a step does, distributed, what it does on one device.

from autodist_py.testing import assert_equivalent

def test_my_step():
    model, optimizer = make_model()
    assert_equivalent(lambda x, y: train_step(model, optimizer, x, y), batches)

A strategy builder of your own is given as `strategy_builder=`, and passes of your own as `passes=`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions, require_choices
from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.diagnostics.comparison import Comparison, magnitude_of
from autodist_py.kernel.pipeline import compile
from autodist_py.kernel.runner import AddedPass
from autodist_py.kernel.topology import resolve
from autodist_py.program.build import require_no_mixture
from autodist_py.program.executor import Executor
from autodist_py.program.replica_variables import ReplicaVariables
from autodist_py.program.step_function import DistributedFunction
from autodist_py.proto.arguments import checked
from autodist_py.proto.errors import CaptureError, StrategyError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy, resolve_builder

CPU = "/device:CPU:0"


class NotEquivalentError(AssertionError):
    """A step does, distributed, something else than on one device; the message says what, and by how much."""


def compare(
    step: Callable[..., Any],
    distributed: DistributedFunction,
    inputs: Sequence[Sequence[Any]],
    *,
    tolerance: float | None = None,
) -> Comparison:
    """Train `step` on one device and distributed, from the same state on the same inputs, and compare after each step.

    The variables that it uses are those of the distributed run at the end.

    Args:
        step: a step of one device.
        distributed: what `autodist.function` made of it.
        inputs: for each step its arguments, with the whole batch.
        tolerance: the largest relative difference that is no difference; None: by type, see `comparison.TOLERANCES`.
    """
    variables = distributed.captured(*inputs[0]).variables
    is_function = isinstance(step, tf.types.experimental.PolymorphicFunction)
    single = step if is_function else tf.function(step, reduce_retracing=True)
    initial = _values(variables)
    expected = []
    for arguments in inputs:
        results = single(*tf.nest.map_structure(_as_tensor, list(arguments)))
        expected.append((_plain(results), _values(variables)))
    for name, value in initial.items():
        variables[name].assign(value)
    comparison = Comparison()
    for number, (arguments, (results, values)) in enumerate(zip(inputs, expected, strict=True), start=1):
        actual = _plain(distributed(*arguments))
        magnitude = magnitude_of([*map(np.asarray, tf.nest.flatten(results)), *values.values()])
        for position, (got, wanted) in enumerate(zip(tf.nest.flatten(actual), tf.nest.flatten(results), strict=True)):
            if wanted is not None:
                comparison.note(f"result {position}", number, got, wanted, tolerance, magnitude=magnitude)
        for name, value in _values(variables).items():
            comparison.note(name, number, value, values[name], tolerance, magnitude=magnitude)
    return comparison


@checked(
    *("step", "inputs", "replicas", "batched", "tolerance", "loss_reduction", "batch_statistics", "random"),
    error=CaptureError,
)
def assert_equivalent(
    step: Callable[..., Any],
    inputs: Sequence[Sequence[Any]],
    *,
    replicas: int = 2,
    batched: Sequence[str] | set[str] | frozenset[str] | None = None,
    tolerance: float | None = None,
    loss_reduction: str = "mean",
    batch_statistics: str | Mapping[str, str] = "global",
    random: str = "replica",
    strategy_builder: StrategyBuilder | str = "AllReduce",
    passes: Sequence[AddedPass] = (),
) -> Comparison:
    """`step` does the same on one device and as `replicas` in this process, which share its CPU.

    Args:
        step: a step as `autodist.function` takes it, not yet distributed.
        inputs: for each step (three or more) its arguments, with the whole batch. Use float64 where you can: there a
            mistake cannot hide behind rounding.
        replicas: how many.
        batched: see `AutoDist.function`.
        tolerance: the largest relative difference that is no difference; None: by type, see `comparison.TOLERANCES`.
        loss_reduction: see `AutoDist`.
        batch_statistics: see `AutoDist`.
        random: see `AutoDist`.
        strategy_builder: see `AutoDist`.
        passes: see `AutoDist`.

    Raises:
        NotEquivalentError: a variable or result differs.
        AutoDistError: no such loss_reduction, batch_statistics or random.
        CaptureError: an op cannot be computed of the whole batch, with batch_statistics="global".
        StrategyError: the builder cannot serve this step on one worker, or uses another number of replicas.
    """
    require_choices({"loss_reduction": loss_reduction, "batch_statistics": batch_statistics, "random": random})
    builder = resolve_builder(strategy_builder)
    distributed = DistributedFunction(
        step,
        lambda name, captured: _Replicas(captured, replicas, name, builder, passes),
        name="step",
        options=CaptureOptions(loss_reduction, batch_statistics=batch_statistics, random=random, num_replicas=replicas),
        batched=batched,
    )
    if batch_statistics == "global" and inputs:
        require_no_mixture(distributed.captured(*inputs[0]).item, "step")
    comparison = compare(step, distributed, inputs, tolerance=tolerance)
    if comparison.first is not None:
        raise NotEquivalentError(
            f"distributed over {replicas} replicas, the step does not do what it does on one device. The largest "
            f"relative differences:\n{comparison}"
        )
    return comparison


class _Replicas:
    """A captured step as several replicas on this process's CPU."""

    goes_among = ""

    def __init__(
        self,
        captured: CapturedFunction,
        count: int,
        name: str,
        builder: StrategyBuilder,
        passes: Sequence[AddedPass],
    ):
        resources = ResourceSpec((NodeSpec("127.0.0.1", cpus=tuple(range(count))),))
        strategy = build_strategy(builder, captured.item, resources)
        if len(strategy.replicas) != count:
            raise StrategyError(
                f"a step is compared on {count} replicas, and the strategy of {type(builder).__name__} has "
                f"{len(strategy.replicas)}. Let it use resources.replica_devices, or give `replicas=`"
            )
        topology = resolve(strategy.replicas, resources, worker=0)
        topology = replace(topology, replicas=tuple(replace(one, device=CPU) for one in topology.replicas))
        self._copies = ReplicaVariables()
        variables = {(variable_name, 0): variable for variable_name, variable in captured.variables.items()} | {
            (variable_name, position): self._copies.of(variable, position, CPU)
            for variable_name, variable in captured.variables.items()
            for position in range(1, count)
        }
        program = compile(captured.item, strategy, topology, added=passes)
        self._executor = Executor(program, variables, captured.state, name=name.replace("/", "_"))

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One step."""
        return self._executor.run(feeds)


def _values(variables: Mapping[str, tf.Variable]) -> dict[str, np.ndarray]:
    return {name: np.array(variable.numpy()) for name, variable in variables.items()}


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def _plain(results: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, results)
