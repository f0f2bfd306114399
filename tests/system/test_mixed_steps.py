"""Steps of which one part is combined by collectives and another one on servers: the contract of the two halves."""

import itertools
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.mixed import Parallax, PerVariable
from autodist_py.strategy_builders.parameter_server import PS
from tests.support.cluster_pool import THREE_WORKERS, TWO_WORKERS, CaseFailedError, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import Values, assert_close
from tests.support.scripts import run_script
from tests.support.served import InShards, Spread
from tests.support.sessions import evaluate_alone
from tests.support.two_kinds import LAST_TOGETHER, two_steps

MIXED: dict[str, StrategyBuilder] = {
    "ring-and-servers": PerVariable({"*first": "AllReduce(all_reduce_spec='RING')"}, default=Spread((1, 0))),
    "shards": PerVariable({"*first": "AllReduce(all_reduce_spec='RING')"}, default=InShards((0, None, 1))),
}
X, Y = np.random.default_rng(3).normal(size=(12, 4)), np.random.default_rng(4).normal(size=(12, 1))

on_each = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)
mixed = pytest.mark.parametrize("builder", MIXED.values(), ids=MIXED)


class Network:
    """Two layers, trained with momentum."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        shapes = {"first": (4, 5), "second": (5, 3), "third": (3, 1)}
        self.weights = [tf.Variable(rng.normal(size=shape), name=name) for name, shape in shapes.items()]
        self.momenta = [tf.Variable(tf.zeros_like(one), trainable=False) for one in self.weights]

    def loss(self, x: Any, y: Any) -> tf.Tensor:
        first, second, third = self.weights
        return tf.reduce_mean(tf.square(tf.tanh(tf.tanh(x @ first) @ second) @ third - y))

    def step(self, x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self.loss(x, y)
        gradients = tape.gradient(loss, self.weights)
        for weight, momentum, gradient in zip(self.weights, self.momenta, gradients, strict=True):
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(0.002 * momentum)
        return loss

    def values(self) -> Values:
        return {f"{index}": one.numpy() for index, one in enumerate((*self.weights, *self.momenta))}


def long_run(builder: StrategyBuilder, steps: int) -> Values:
    alone = Network()
    plain = tf.function(alone.step)
    with AutoDist(strategy_builder=builder) as autodist:
        network = Network()
        step = autodist.function(network.step)
        for number in range(steps):
            rows = slice(number % 5, 7 + number % 6)
            assert_close(step(X[rows], Y[rows]), plain(tf.constant(X[rows]), tf.constant(Y[rows])), "loss", 1e-7)
    for name, wanted in alone.values().items():
        assert_close(network.values()[name], wanted, name, 1e-7)
    return network.values()


@on_each
@mixed
def test_500_steps_are_those_of_one_device(cluster: Cluster, builder: StrategyBuilder) -> None:
    same(cluster.run(long_run, builder=builder, steps=500))


def epochs(builder: StrategyBuilder) -> Values:
    """Data that end within an epoch, and a second epoch, of batches of other sizes."""
    alone = Network()
    plain = tf.function(alone.step)
    with AutoDist(strategy_builder=builder) as autodist:
        network = Network()
        step = autodist.function(lambda examples: network.step(*next(examples)))
        for size in (5, 7):
            data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)
            examples = iter(data)
            with pytest.raises(tf.errors.OutOfRangeError):
                for _ in itertools.repeat(None):
                    step(examples)
            for batch in data:
                plain(*batch)
            for name, wanted in alone.values().items():
                assert_close(network.values()[name], wanted, name)
    return network.values()


@pytest.mark.on(1)
@on_each
@mixed
def test_data_may_end_and_a_second_epoch_begin(cluster: Cluster, builder: StrategyBuilder) -> None:
    same(cluster.run(epochs, builder=builder))


RAISING = """
import threading
first, second = tf.Variable(np.ones((2, 2)), name="first"), tf.Variable(np.ones((2, 2)), name="second")

@autodist.function
def mixed_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ first @ second))
    of_first, of_second = tape.gradient(loss, [first, second])
    if os.environ["HALF"] == "local":
        tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), tf.constant(1e3, tf.float64), message="too large")
    else:
        of_second = tf.debugging.check_numerics(of_second, "too large")
    first.assign_sub(0.1 * of_first)
    second.assign_sub(0.1 * of_second)
    return loss

def serving():
    return [one.name for one in threading.enumerate() if one.name in ("autodist-serve", "autodist-carry")]

mixed_step(np.ones((4, 2)))
assert serving()
try:
    mixed_step(np.full((4, 2), 1e4 if os.environ["HALF"] == "local" else np.inf))
except Exception as error:
    raised = time.monotonic()
    while serving() and time.monotonic() < raised + 10:
        time.sleep(0.02)
    seconds, why = time.monotonic() - raised, " ".join(str(error).split())
    print(f"worker {autodist.rank} ended in {seconds:.1f} s of {why}", flush=True)
    raise
"""


@pytest.mark.alone
@pytest.mark.parametrize("half", ["local", "remote"])
def test_an_exception_in_either_half_leaves_no_thread_behind(tmp_path: Path, half: str) -> None:
    builder = "PerVariable(builders={'first': 'AllReduce'}, default='PS')"
    ended = run_script(tmp_path, RAISING, BUILDER=builder, HALF=half)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    found = re.findall(r"worker ([012]) ended in ([0-9.]+) s of (.*)", output)
    assert {rank for rank, _, _ in found} == {"0", "1", "2"}, output
    assert max(float(seconds) for _, seconds, _ in found) < 5.0
    # A worker that is behind may find its queues closed before its own half raises.
    whys = [why for _, _, why in found]
    assert any("too large" in why for why in whys), output
    assert all("too large" in why or "servers have ended" in why for why in whys), output


LIMIT = 2.0


def one_goes_its_own_way(builder: StrategyBuilder, victim: int, folder: str) -> None:
    """One worker leaves out the steps of all, and goes on with its own."""
    autodist = AutoDist(strategy_builder=builder)
    mixed, own = two_steps(autodist)
    for number in range(100_000):
        own()
        if number == LAST_TOGETHER and autodist.rank == victim:
            Path(folder, "begun").write_text(str(time.time()))
        if number >= LAST_TOGETHER and autodist.rank == victim:
            time.sleep(0.05)
            continue
        try:
            mixed()
        except Exception:
            Path(folder, f"ended-{autodist.rank}").write_text(str(time.time()))
            raise


@pytest.mark.alone
@pytest.mark.parametrize("cluster", [THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2], ids=["server", "worker"])
def test_who_takes_only_its_own_steps_keeps_a_mixed_step_waiting_no_longer_than_the_timeout(
    cluster: Cluster, victim: int, tmp_path: Path
) -> None:
    builder = Parallax(timeout_seconds=LIMIT)
    with pytest.raises(CaseFailedError) as raised:
        cluster.run(one_goes_its_own_way, builder=builder, victim=victim, folder=str(tmp_path))
    (cause,) = set(re.findall(r"WorkerFailedError: (worker .*)", str(raised.value)))
    assert re.fullmatch(
        rf"worker {victim} \(.*\) kept others waiting at step \d+( of its \d+ AutoDist objects)?: "
        r"2 s after another it has not begun step "
        r"\d+ of all workers, with timeout_seconds 2, while worker [012] \(.*\) "
        r"(waited for it to combine|was in a step that combines) dense gradients of matrix.*",
        cause,
    )
    begun = float((tmp_path / "begun").read_text())
    took = {int(path.name[-1]): float(path.read_text()) - begun for path in tmp_path.glob("ended-*")}
    assert took.keys() == {0, 1, 2} - {victim}
    assert min(took.values()) >= LIMIT and max(took.values()) < LIMIT + 6.0


LOSING = """
from tests.support.two_kinds import LAST_TOGETHER, two_steps
mixed, own = two_steps(autodist)
for number in range(LAST_TOGETHER):
    own()
    mixed()
for number in range(40):
    if autodist.rank == 2 and number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    own()
    time.sleep(0.05)
print(f"worker {autodist.rank} went on", flush=True)
mixed()
"""


@pytest.mark.alone
def test_a_run_that_goes_on_without_a_worker_ends_at_the_next_mixed_step(tmp_path: Path) -> None:
    ended = run_script(tmp_path, LOSING, BUILDER="Parallax(timeout_seconds=30)", AUTODIST_LOST_WORKERS="continue")
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    assert sorted(re.findall(r"worker (\d) went on", output)) == ["0", "1"], output
    (cause,) = set(re.findall(r"autodist: (worker .*)", output))
    assert re.fullmatch(
        r"worker 2 \(127.0.0.3\) ended, "
        r"last heard of (at step \d+( of its \d+ AutoDist objects)?|before its first step)"  # A heartbeat a second.
        r"(, when the chief is at step \d+)?: killed by SIGKILL(; see its output above)?; the others went on "
        r"without it, and now need it, while worker [01] \(.*\) (waited for it to combine|was in a step that combines) "
        r"dense gradients of matrix.*",
        cause,
    )


@pytest.mark.on(1)
@on_each
@pytest.mark.parametrize("builder", [PerVariable({"kernel": "AllReduce"}, default=PS()), InShards((0, None, 1))])
def test_one_worker_may_fetch_by_itself_while_others_wait(cluster: Cluster, builder: StrategyBuilder) -> None:
    same(cluster.run(evaluate_alone, builder=builder))
