"""What ends a run whose variables live on servers, and what cannot be served."""

import os
import re
import signal
import textwrap
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.proto.errors import ClusterError, StrategyError
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from tests.support.cluster_pool import THREE_WORKERS, CaseFailedError, Cluster
from tests.support.fit_oracle import X, Y, compiled
from tests.support.scripts import run_script
from tests.support.served import Spread, descending

pytestmark = pytest.mark.own_cluster

on_three = pytest.mark.parametrize(
    "cluster", [THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)


BUILDERS = {
    "worker": PS(),
    "server": Spread((1,)),
    "asynchronous": PS(sync=False),
    "stale": PS(staleness=1),
}


def killed(builder: StrategyBuilder, victim: int, folder: str) -> None:
    """Trains until a worker kills itself; the others note when they were told."""
    with AutoDist(strategy_builder=builder) as autodist:
        step, _ = descending(autodist)
        clock = Path(folder, f"worker-{autodist.rank}")
        for number in range(100_000):
            if number == 5 and autodist.rank == victim:
                clock.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                step()
            except Exception:
                clock.write_text(str(time.monotonic()))
                raise


@pytest.mark.alone
@on_three
@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_a_killed_worker_or_server_ends_the_run_with_its_cause(
    cluster: Cluster, builder: StrategyBuilder, tmp_path: Path
) -> None:
    with pytest.raises(CaseFailedError, match=r"worker 1 \(127.0.0.2\) ended, .*: killed by SIGKILL"):
        cluster.run(killed, builder=builder, victim=1, folder=str(tmp_path))
    at = {path.name: float(path.read_text()) for path in tmp_path.iterdir()}
    assert at.keys() == {"worker-0", "worker-1", "worker-2"}
    assert max(at.values()) - at["worker-1"] < 10.0


SERVING = {"autodist-serve", "autodist-carry", "autodist-values"}


def closed() -> list[str]:
    """The names of the threads that serve a program, and are left when its AutoDist is closed."""
    before = set(threading.enumerate())
    with AutoDist(strategy_builder=PS()) as autodist:
        step, _ = descending(autodist)
        for _ in range(3):
            step()
        started = [thread for thread in threading.enumerate() if thread not in before and thread.name in SERVING]
        assert started
    return [thread.name for thread in started if thread.is_alive()]


@on_three
def test_threads_end_with_their_program(cluster: Cluster) -> None:
    assert cluster.run(closed) == [[], [], []]


def refused(builder: StrategyBuilder, words: str) -> None:
    """A branch that may fail updates two variables."""
    with AutoDist(strategy_builder=builder) as autodist:
        first, second = tf.Variable(np.ones((3, 2)), name="first"), tf.Variable(np.ones((2, 2)), name="second")

        @autodist.function
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ first @ second))
            of_first, of_second = tape.gradient(loss, [first, second])
            if tf.norm(of_first) < 1.0:
                first.assign_sub(tf.debugging.check_numerics(of_first, "too large"))
                second.assign_sub(of_second)

        with pytest.raises(StrategyError, match=words):
            step(np.ones((6, 3)))


@on_three
@pytest.mark.parametrize(
    ("builder", "words"),
    [
        (
            Spread((0, 1)),
            r"one op, .*\(If\), writes variables that live apart.*on worker 0.*server on worker 1.*"
            r"cannot be taken apart.*CheckNumerics.*PSLoadBalancing",
        ),
        (Spread((None, 1)), r"writes variables that live apart.*\(workers\).*Give its variables one synchronizer"),
    ],
    ids=["two-servers", "server-and-collectives"],
)
def test_what_cannot_be_served_is_refused(cluster: Cluster, builder: StrategyBuilder, words: str) -> None:
    cluster.run(refused, builder=builder, words=words)


def clipped_by_all(builder: StrategyBuilder) -> None:
    with AutoDist(strategy_builder=builder) as autodist:
        with autodist.scope():
            model = compiled(keras.optimizers.SGD(0.05, global_clipnorm=1.0))
        with pytest.raises(StrategyError, match=r"replicas_to_aggregate.*asks a server again.*Use one server"):
            model.fit(X, Y, batch_size=8, verbose=0)


@on_three
def test_backup_workers_need_one_message_a_step(cluster: Cluster) -> None:
    cluster.run(clipped_by_all, builder=PSLoadBalancing(replicas_to_aggregate=2))


def asked_elsewhere() -> None:
    with AutoDist(strategy_builder=PS(replicas_to_aggregate=2)) as autodist:
        step, _ = descending(autodist)
        step()
        if autodist.rank == 0:
            assert len(autodist.accepted_gradients()) % 2 == 0
        else:
            with pytest.raises(ClusterError, match=r"on a server with replicas_to_aggregate; worker \d is none"):
                autodist.accepted_gradients()
        autodist.sync()


@on_three
def test_what_was_accepted_is_known_on_the_server(cluster: Cluster) -> None:
    cluster.run(asked_elsewhere)


SCRIPT = """
weights = tf.Variable(np.zeros(2))

@autodist.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights)
    weights.assign_sub(tape.gradient(loss, weights))

step()
"""


LOSING = """
steps = 200
for number in range(steps):
    if autodist.rank == 2 and number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    step()
    time.sleep(0.01)
autodist.sync()
print(f"worker {autodist.rank} has {weights.numpy()[0]:.0f}")
"""


@pytest.mark.parametrize("lost_workers", ["continue", "end"])
def test_a_run_may_go_on_without_a_worker_that_serves_nothing(tmp_path: Path, lost_workers: str) -> None:
    ended = run_script(tmp_path, SCRIPT + LOSING, AUTODIST_LOST_WORKERS=lost_workers)
    output = ended.stdout + ended.stderr
    if lost_workers == "end":
        assert ended.returncode == 1
        assert "worker 2 (127.0.0.3) ended" in ended.stderr and "killed by SIGKILL" in ended.stderr
        return
    assert ended.returncode == 0, output
    (applied,) = set(re.findall(r"worker [01] has (-?\d+)", output))
    assert -int(applied) == 2 * 201 + 6, output
    assert re.search(r"worker 2 \(127.0.0.3\) ended, .*killed by SIGKILL.*The others go on without it", output)


STATEFUL = """
momentum = tf.Variable(np.zeros(2), name="momentum")

@autodist.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights)
    momentum.assign(0.9 * momentum + tape.gradient(loss, weights))
    weights.assign_sub(momentum)
"""


def test_after_a_failure_a_look_warns_and_leaves_what_is_there(tmp_path: Path) -> None:
    body = """
    from autodist_py import WorkerFailedError
    with autodist:
        try:
            for number in range(100):
                if number == 3 and autodist.rank == 0:
                    raise ValueError("enough")
                step()
        except WorkerFailedError:
            print(f"worker {autodist.rank} has {momentum.numpy()}", flush=True)
            raise
    """
    ended = run_script(tmp_path, SCRIPT + STATEFUL + textwrap.dedent(body), BUILDER="PS()")
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1
    assert "ValueError: enough" in output
    for rank in (1, 2):
        assert f"worker {rank} has [0. 0.]" in output
    lost = "'momentum:0': zeros in the place of values that are lost, as the workers where they live cannot be asked"
    assert output.count(f"{lost}: worker 0") == 2


def test_a_script_that_ends_waits_for_who_may_still_look(tmp_path: Path) -> None:
    body = """
    for _ in range(3):
        step()
    if autodist.rank == 2:
        time.sleep(2)
        print(f"worker 2 has {momentum.numpy()}")
    """
    ended = run_script(tmp_path, SCRIPT + STATEFUL + textwrap.dedent(body), BUILDER="PS()")
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert "worker 2 has [2.71 2.71]" in output


def test_what_a_script_registers_with_atexit_still_reads_every_variable(tmp_path: Path) -> None:
    body = """
    import atexit
    atexit.register(lambda: autodist.rank == 2 and print(f"worker 2 has {momentum.numpy()}"))
    for _ in range(3):
        step()
    """
    ended = run_script(tmp_path, SCRIPT + STATEFUL + textwrap.dedent(body), BUILDER="PS()")
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert "worker 2 has [2.71 2.71]" in output


def test_closing_brings_what_workers_that_step_by_themselves_have_made(tmp_path: Path) -> None:
    body = """
    with autodist:
        for _ in range(5 + 10 * autodist.rank):
            step()
            time.sleep(0.01)
    print(f"worker {autodist.rank} has {weights.numpy()[0]:.0f}")
    """
    ended = run_script(tmp_path, SCRIPT + textwrap.dedent(body))
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert sorted(re.findall(r"worker (\d) has -48", output)) == ["0", "1", "2"], output


def test_workers_that_step_by_themselves_may_end_one_after_the_other(tmp_path: Path) -> None:
    body = """
    for number in range(5 if autodist.rank == 0 else 40 * autodist.rank):
        step()
        time.sleep(0.02)
    print(f"worker {autodist.rank} ends")
    """
    ended = run_script(tmp_path, SCRIPT + textwrap.dedent(body))
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert all(f"worker {rank} ends" in output for rank in range(3))


@pytest.mark.parametrize("closing", ["", "other.close()"], ids=["at-exit", "closing"])
def test_workers_that_keep_within_a_bound_may_end_one_after_the_other_with_programs_of_two_autodists(
    tmp_path: Path, closing: str
) -> None:
    body = """
    other = AutoDist(strategy_builder=os.environ["BUILDER"])
    more = tf.Variable(np.zeros(2))

    @other.function
    def another():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(more)
        more.assign_sub(tape.gradient(loss, more))

    another()
    for number in range(5 if autodist.rank == 0 else 20 * autodist.rank):
        step()
    print(f"worker {autodist.rank} ends")
    """
    ended = run_script(tmp_path, SCRIPT + textwrap.dedent(body) + closing, BUILDER="PS(staleness=1)")
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert all(f"worker {rank} ends" in output for rank in range(3))
