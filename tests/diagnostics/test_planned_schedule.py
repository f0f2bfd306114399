"""What `autodist plan` says of a step's communication is what is compiled."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.diagnostics.planned_schedule import planned_schedule
from autodist_py.kernel.pipeline import compile
from autodist_py.kernel.printer import format_schedule
from autodist_py.kernel.program import Options
from autodist_py.kernel.topology import resolve
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from autodist_py.strategy_builders.partitioned import PartitionedAR
from tests.support import kernel_programs


@pytest.mark.parametrize(
    "builder", [AllReduce(), PSLoadBalancing(), PartitionedAR(min_shard_bytes=1), PS(staleness=1)], ids=str
)
@pytest.mark.parametrize("batch", ["global", "local"])
def test_it_is_the_schedule_of_the_compiled_program_on_every_worker(builder: StrategyBuilder, batch: str) -> None:
    item, resources = kernel_programs.dense_and_sparse(), local_resource_spec(2, 2)
    strategy, options = build_strategy(builder, item, resources), Options(batch=batch)
    for worker in range(2):
        program = compile(item, strategy, resolve(strategy.replicas, resources, worker=worker), options)
        text = planned_schedule(item, strategy, resources, None, options).text
        assert text == f"Schedule: the communication of a step, in order\n{format_schedule(program.schedule)}"
        assert len(text.splitlines()) == len(program.schedule.events) + 1 > 2


def test_the_engine_that_stands_for_auto_is_shown() -> None:
    item = kernel_programs.linear_regression()
    item = replace(item, variables=(replace(item.variable("w"), shape=(1000, 3000)),))
    strategy = build_strategy(AllReduce(), item, local_resource_spec(2))
    text = planned_schedule(item, strategy, local_resource_spec(2), None, Options()).text
    assert "event AllReduceBucket[HOROVOD, level 1, " in text


def test_what_is_refused_when_it_is_compiled_is_said() -> None:
    item, resources = kernel_programs.linear_regression(), local_resource_spec(2)
    strategy = build_strategy(AllReduce(all_reduce_spec="NCCL"), item, resources)
    text = planned_schedule(item, strategy, resources, None, Options()).text
    assert text.startswith("a step has no schedule, as the program is refused: dense gradients of w: ")
    text = planned_schedule(item, strategy, resources, None, Options(strict=False)).text
    assert "event AllReduceBucket[RING" in text


def test_one_replica_has_no_communication() -> None:
    item, resources = kernel_programs.linear_regression(), local_resource_spec(1)
    strategy = build_strategy(AllReduce(), item, resources)
    text = planned_schedule(item, strategy, resources, None, Options()).text
    assert text == "a step has no communication: there is one replica"


def test_what_ops_read_of_all_examples_is_listed() -> None:
    """The mean of a column of 4 bytes, and rows of 8 bytes, which are paired."""
    weight = tf.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], name="weight")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            z = x @ weight - tf.reduce_mean(x[:, :1], 0, name="centre")
            loss = tf.reduce_sum(tf.linalg.matmul(z, z, transpose_b=True, name="pairs"))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    resources = local_resource_spec(2)
    with AutoDist() as autodist:
        item = autodist.function(step).captured(np.ones([6, 3], np.float32)).item
    planned = planned_schedule(item, build_strategy(AllReduce(), item, resources), resources, None, Options())
    header, *rows = planned.of_all_examples.splitlines()
    assert header.split("  ")[0] == "of all examples"
    assert any(line.startswith("centre ") and "  mean  " in line and "  4 bytes  " in line for line in rows), rows
    assert any("  rows  " in line and "  8 bytes a row  " in line and "MatMul 'pairs'" in line for line in rows), rows
    sized = planned_schedule(item, build_strategy(AllReduce(), item, resources), resources, 60, Options())
    assert sized.of_all_examples.startswith(planned.of_all_examples)
    header, first, *_ = sized.of_all_examples.removeprefix(planned.of_all_examples).strip().splitlines()
    assert header.split("  ")[0] == "on each replica, of 60 examples"
    assert first.split() == ["pairs", "MatMul", "60x60", "14.4", "kB"]
    own = planned_schedule(item, build_strategy(AllReduce(), item, resources), resources, 60, Options(batch="local"))
    assert "pairs" in own.of_all_examples and " 120x120 " in own.of_all_examples
    plain = kernel_programs.linear_regression()
    strategy = build_strategy(AllReduce(), plain, resources)
    assert not planned_schedule(plain, strategy, resources, None, Options()).of_all_examples


def test_a_mean_and_the_variance_about_it_are_one_message() -> None:
    """Two columns of 4 bytes, and backward a sum for each of them; the numbers of examples take none."""
    weight = tf.Variable([[1.0], [3.0], [5.0]], name="weight")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            z = x @ weight
            mean, variance = tf.nn.moments(z, [0])
            loss = tf.reduce_mean(tf.tanh((z - mean) * tf.math.rsqrt(variance + 0.1, name="root")))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    resources = local_resource_spec(2)
    with AutoDist() as autodist:
        item = autodist.function(step).captured(np.ones([6, 3], np.float32)).item
    strategy = build_strategy(AllReduce(), item, resources)
    planned = planned_schedule(item, strategy, resources, None, Options())
    rows = planned.of_all_examples.splitlines()
    assert any("  moments  " in line and "  8 bytes  " in line and "Unpack" not in line for line in rows), rows
    statistics = [line for line in planned.text.splitlines() if "ReduceStatistics" in line]
    assert len(statistics) == 2, planned.text
    compile(item, strategy, resolve(strategy.replicas, resources, worker=1), Options())
