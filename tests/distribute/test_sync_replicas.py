"""SyncReplicasOptimizer on workers of real processes, against TensorFlow's own ops and an oracle in NumPy."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, CaptureError, SessionError, StrategyError, WorkerFailedError
from autodist_py.distribute import SessionCreator, SyncReplicasOptimizer
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from tests.support.cluster_pool import ONE_DEVICE, THREE_WORKERS, Cluster
from tests.support.oracle import assert_close
from tests.support.processes import ROOT

v1 = tf.compat.v1
pytestmark = pytest.mark.alone
on_three = pytest.mark.parametrize("cluster", [THREE_WORKERS], ids=lambda s: s.name, indirect=True, scope="module")

RATE, CLIP, LAST = 0.125, 0.5, 8  # The rate is a float32.
SIZES = (2, 4, 3)
ROWS = np.random.default_rng(2).normal(size=(9, 2))


def own_rows(rank: int) -> np.ndarray:
    begin = sum(SIZES[:rank])
    return ROWS[begin : begin + SIZES[rank]]


def clipped(rank: int, weights: np.ndarray) -> np.ndarray:
    """The gradient that a worker hands to apply_gradients."""
    rows = own_rows(rank)
    gradient = 2 * rows.T @ (rows @ weights - 1.0) / len(rows)
    return gradient * min(1.0, CLIP / np.linalg.norm(gradient))


def train(
    wanted: int, *, slow: int | None, tokens: int, pauses: tuple[tuple[float, ...], ...] = ((), (), ())
) -> dict[str, Any]:
    """Steps of rows of one's own; `slow` pauses before each step, and each worker before its first ones."""
    with AutoDist(batch="local") as autodist, tf.Graph().as_default():
        with autodist.scope():
            x = v1.placeholder(tf.float64, [None, 2])
            weights = v1.get_variable("weights", initializer=np.ones([2, 1]))
            loss = tf.reduce_mean(tf.square(x @ weights - 1.0))
            steps = v1.train.get_or_create_global_step()
            opt = SyncReplicasOptimizer(v1.train.GradientDescentOptimizer(RATE), wanted, autodist.num_workers)
            pairs = [(tf.clip_by_norm(one, CLIP), variable) for one, variable in opt.compute_gradients(loss)]
            step = opt.apply_gradients(pairs, global_step=steps)
        hooks = [opt.make_session_run_hook(autodist.is_chief, tokens), v1.train.StopAtStepHook(last_step=LAST)]
        own, sent, losses = own_rows(autodist.rank), 0, []
        session = v1.train.MonitoredSession(session_creator=SessionCreator(autodist), hooks=hooks)
        while not session.should_stop():
            time.sleep(0.3 if autodist.rank == slow else dict(enumerate(pauses[autodist.rank])).get(sent, 0.0))
            losses.append(session.run([step, loss], {x: own})[1])
            sent += 1
        raw = session._tf_sess()
        autodist.sync()
        result = {"sent": sent, "losses": losses, "values": raw.run([weights, steps])}
        if autodist.is_chief:
            result |= {"accepted": autodist.accepted_gradients(), "dropped": autodist.dropped_gradients()}
        session.close()
        return result


def check(results: list[dict[str, Any]], wanted: int) -> dict[int, list[int]]:
    """Weights are those of the accepted gradients, and every gradient was accepted or dropped."""
    chief = results[0]
    updates: dict[int, list[int]] = {}
    for step, worker in chief["accepted"]:
        updates.setdefault(step, []).append(worker)
    counted = Counter(worker for _, worker in chief["accepted"])
    for rank, result in enumerate(results):
        assert counted[rank] + chief["dropped"].get(rank, 0) == result["sent"]
    weights = np.ones([2, 1])
    for step in sorted(updates):
        assert len(updates[step]) == wanted or step >= LAST
        weights = weights - RATE * np.mean([clipped(worker, weights) for worker in updates[step]], axis=0)
    assert_close(chief["values"][0], weights, "weights")  # They live there; others have what they read last.
    assert chief["values"][1] == len(updates)
    return updates


@on_three
def test_weights_are_those_of_the_accepted_gradients_where_one_worker_is_slow(cluster: Cluster):
    results = cluster.run(train, wanted=2, slow=2, tokens=0)
    updates = check(results, 2)
    assert len(updates) >= LAST
    assert results[0]["dropped"][2] > 0


@on_three
def test_a_late_gradient_is_gone_also_where_its_worker_waits_for_a_token(cluster: Cluster):
    """The last token is the chief's, which sends half of an update, and pauses. Worker 2 comes late meanwhile."""
    results = cluster.run(train, wanted=2, slow=None, tokens=0, pauses=((0, 0, 0, 2.4), (0, 0, 3.6), (0, 1.2)))
    check(results, 2)
    assert results[0]["dropped"][2] > 0


@on_three
def test_the_first_gradients_after_a_start_are_stale_once(cluster: Cluster):
    """Three tokens at the start let workers send six gradients for the first update, which takes three."""
    results = cluster.run(train, wanted=3, slow=None, tokens=-1)
    updates = check(results, 3)
    assert len(updates[0]) == 3
    assert sum(results[0]["dropped"].values()) >= 3


@on_three
def test_workers_send_several_gradients_for_an_update_of_more(cluster: Cluster):
    updates = check(cluster.run(train, wanted=5, slow=None, tokens=2), 5)
    assert max(Counter(updates[0]).values()) > 1


def average_weights() -> dict[str, Any]:
    """Adam and moving averages on the server; the chief's hooks fetch now and then, and see its own loss."""
    logged: list[float] = []

    def note(values: Any) -> str:
        logged.append(float(values["loss"]))
        return ""

    with AutoDist(strategy_builder=PS(), batch="local") as autodist, tf.Graph().as_default() as graph:
        with autodist.scope():
            x = v1.placeholder(tf.float64, [None, 2])
            weights = v1.get_variable("weights", initializer=np.ones([2, 1]))
            idle = v1.get_variable("idle", initializer=np.ones([2]))
            loss = tf.reduce_mean(tf.square(x @ weights - 1.0))
            steps = v1.train.get_or_create_global_step()
            adam, averages = v1.train.AdamOptimizer(RATE), v1.train.ExponentialMovingAverage(0.5)
            opt = SyncReplicasOptimizer(adam, 3, variable_averages=averages, variables_to_average=[weights])
            step = opt.minimize(loss, global_step=steps, var_list=[weights, idle])
        assert opt.get_slot_names() == adam.get_slot_names()
        assert opt.get_slot(weights, "m") is adam.get_slot(weights, "m")
        assert [one.name for one in opt.variables()] == [one.name for one in adam.variables()]
        assert opt.get_name() == "sync_replicas"
        assert graph.get_operation_by_name("sync_token_q").type == "FIFOQueueV2"
        assert [one.op.name for one in v1.local_variables()] == ["sync_rep_local_step"]
        assert opt.get_chief_queue_runner().create_threads(None) == []
        hooks = [opt.make_session_run_hook(autodist.is_chief, 0), v1.train.StopAtStepHook(last_step=4)]
        if autodist.is_chief:
            hooks.append(v1.train.LoggingTensorHook({"loss": loss}, every_n_iter=2, formatter=note))
        session = v1.train.MonitoredSession(session_creator=SessionCreator(autodist), hooks=hooks)
        losses, own_steps = [], []
        while not session.should_stop():
            losses.append(session.run([loss, step], {x: own_rows(autodist.rank)})[0])
            own_steps.append(session._tf_sess().run(v1.local_variables()[0]))
        with pytest.raises(SessionError, match=r"all steps are of one program.*Fetch in the first step what any"):
            session._tf_sess().run([step, idle], {x: own_rows(autodist.rank)})
        values = session._tf_sess().run([weights, averages.average(weights), opt.get_slot(weights, "v"), steps])
        session.close()
    assert own_steps == sorted(own_steps)
    return {"values": values, "losses": losses, "logged": logged}


def averaged_by_numpy() -> tuple[list[np.ndarray], list[list[float]]]:
    with tf.Graph().as_default(), v1.Session() as session:
        weights = v1.get_variable("weights", initializer=np.ones([2, 1]))
        given = v1.placeholder(tf.float64, [2, 1])
        adam, averages = v1.train.AdamOptimizer(RATE), v1.train.ExponentialMovingAverage(0.5)
        with tf.control_dependencies([adam.apply_gradients([(given, weights)])]):
            step = averages.apply([weights])
        fetches = [weights, averages.average(weights), adam.get_slot(weights, "v")]
        session.run(v1.global_variables_initializer())
        losses = []
        for _ in range(4):
            now = session.run(weights)
            errors = [own_rows(rank) @ now - 1.0 for rank in range(3)]
            losses.append([float(np.mean(each**2)) for each in errors])
            own = [2 * own_rows(rank).T @ each / len(each) for rank, each in enumerate(errors)]
            session.run(step, {given: np.mean(own, axis=0)})
        return session.run(fetches), losses


@on_three
def test_averages_slots_and_each_workers_results_are_those_of_plain_averages(cluster: Cluster):
    results = cluster.run(average_weights)
    values, losses = averaged_by_numpy()
    for rank, result in enumerate(results):
        for mine, theirs, what in zip(
            result["values"], [*values, 4], ["weights", "average", "v", "steps"], strict=True
        ):
            assert_close(mine, theirs, what)
        assert_close(result["losses"], [each[rank] for each in losses], f"what worker {rank} fetches")
    assert_close(results[0]["logged"], [losses[0][0], losses[2][0]], "what the chief's hook logs")


def refuse() -> None:
    with AutoDist() as autodist, tf.Graph().as_default():
        opt = SyncReplicasOptimizer(v1.train.GradientDescentOptimizer(RATE), 1, 2)
        with pytest.raises(CaptureError, match=r"outside of scope\(\).*Build the graph"):
            opt.compute_gradients(tf.constant(1.0))
        for early in (opt.get_chief_queue_runner, opt.get_init_tokens_op, opt.make_session_run_hook(True).begin):
            with pytest.raises(ValueError, match=r"should be called after apply_gradients"):
                early()
        with autodist.scope():
            weights = v1.get_variable("weights", initializer=np.ones([2, 1]))
            table = v1.get_variable("table", initializer=np.ones([2, 1]))
            steps = v1.train.get_or_create_global_step()
            loss = tf.reduce_sum(weights)
            pairs = opt.compute_gradients(loss, [weights])
            with pytest.raises(ValueError, match=r"Must supply at least one variable"):
                opt.apply_gradients([], steps)
            with pytest.raises(ValueError, match=r"Global step is required to check staleness: give global_step="):
                opt.apply_gradients(pairs)
            with pytest.raises(ValueError, match=r"Unknown grad type!.*received str"):
                opt.apply_gradients([("none", weights)], steps)
            sparse = opt.compute_gradients(tf.reduce_sum(tf.gather(table, [1])), [table])
            with pytest.raises(CaptureError, match=r"'table:0' is sparse.*tf.convert_to_tensor"):
                opt.apply_gradients(sparse, steps)
            opt.apply_gradients(pairs, steps)
            with pytest.raises(CaptureError, match=r"has one SyncReplicasOptimizer"):
                opt.apply_gradients(pairs, steps)
        with pytest.raises(
            SessionError, match=r"total_num_replicas=2, and the run has 1 workers.*total_num_replicas=1"
        ):
            autodist.create_distributed_session()
    _refused(SessionError, r"at least 1 at the start, and there are 0. Use the hook", replicas=(2, 1))
    _refused(StrategyError, r"the strategy says sync=False", builder=PS(sync=False))
    _refused(StrategyError, r"the strategy says sync=True, .*replicas_to_agg.*=3", builder=PS(replicas_to_aggregate=3))
    _refused(
        StrategyError, r"'weights' has the compressor 'Horovod", builder="AllReduce(compressor='HorovodCompressor')"
    )
    _refused(CaptureError, r"'weights' trains .* beside SyncReplicasOptimizer", beside=True)
    with AutoDist() as autodist, tf.Graph().as_default(), autodist.scope():
        opt, _ = _small(autodist, replicas=(3, 1))
        with pytest.raises(
            ValueError, match=r"Too few tokens to finish the first step: 1 \(given\) vs 2 \(needed\); g"
        ):
            opt.get_init_tokens_op(1)


def _small(autodist: AutoDist, replicas: tuple[int, int] = (1, 1), *, beside: bool = False) -> tuple[Any, Any]:
    weights = v1.get_variable("weights", initializer=np.ones([2, 1]))
    loss = tf.reduce_sum(weights)
    if beside:
        v1.train.GradientDescentOptimizer(RATE).minimize(loss)
    opt = SyncReplicasOptimizer(v1.train.GradientDescentOptimizer(RATE), *replicas)
    return opt, opt.minimize(loss, global_step=v1.train.get_or_create_global_step())


def _refused(kind: type[Exception], words: str, *, builder: Any = None, **options: Any) -> None:
    with AutoDist(strategy_builder=builder) as autodist, tf.Graph().as_default():
        with autodist.scope():
            _small(autodist, **options)
        with pytest.raises(kind, match=words):
            autodist.create_distributed_session()


@pytest.mark.parametrize("cluster", [ONE_DEVICE], ids=lambda s: s.name, indirect=True, scope="module")
def test_what_tensorflow_refuses_and_what_is_not_done_here_is_refused(cluster: Cluster):
    cluster.run(refuse)


def serve_twice() -> None:
    for builder in (PSLoadBalancing(), "PartitionedPS()"):
        with AutoDist(strategy_builder=builder, batch="local") as autodist, tf.Graph().as_default():
            with autodist.scope():
                x = v1.placeholder(tf.float64, [None, 2])
                one, two = (v1.get_variable(name, initializer=np.ones([2, 1])) for name in "ab")
                opt = SyncReplicasOptimizer(v1.train.GradientDescentOptimizer(RATE), 2, 3)
                steps = v1.train.get_or_create_global_step()
                step = opt.minimize(tf.reduce_mean(x @ one + x @ two), global_step=steps)
            with pytest.raises(
                (StrategyError, WorkerFailedError), match=r"strategy has 2. Use PS|'a' is cut into shard"
            ):
                autodist.create_distributed_session().run(step, {x: ROWS})


@on_three
def test_servers_with_tokens_of_their_own_are_refused(cluster: Cluster):
    cluster.run(serve_twice)


def share_out() -> None:
    with AutoDist() as autodist, tf.Graph().as_default():
        with autodist.scope():
            x = v1.placeholder(tf.float64, [None, 2])
            weights = v1.get_variable("weights", initializer=np.ones([2, 1]))
            opt = SyncReplicasOptimizer(v1.train.GradientDescentOptimizer(RATE), 3, 3)
            step = opt.minimize(tf.reduce_mean(x @ weights), global_step=v1.train.get_or_create_global_step())
        with pytest.raises(SessionError, match=r"would share it out, .* Use AutoDist\(batch='local'\)"):
            autodist.create_distributed_session().run(step, {x: ROWS})


@on_three
def test_a_batch_that_workers_share_is_refused(cluster: Cluster):
    cluster.run(share_out)


SCRIPT = """
import os, sys, time
import numpy as np
from sklearn.datasets import load_digits

from autodist_py import AutoDist
from autodist_py.distribute import SessionCreator, SyncReplicasOptimizer

autodist = AutoDist(batch="local", seed=1)
import tensorflow.compat.v1 as tf

images, labels = load_digits(return_X_y=True)
mine = np.arange(len(images)) % autodist.num_workers == autodist.rank
images, labels = images[mine] / 16, labels[mine]
with tf.Graph().as_default():
    with autodist.scope():
        x, y = tf.placeholder(tf.float32, [None, 64]), tf.placeholder(tf.int64, [None])
        weights = tf.get_variable("weights", [64, 10], initializer=tf.zeros_initializer())
        bias = tf.get_variable("bias", [10], initializer=tf.zeros_initializer())
        logits = tf.matmul(x, weights) + bias
        total_loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        global_step = tf.train.get_or_create_global_step()
        opt = tf.train.GradientDescentOptimizer(learning_rate=0.5)
        opt = SyncReplicasOptimizer(opt, replicas_to_aggregate=2, total_num_replicas=3)
        training_op = opt.minimize(total_loss, global_step=global_step)
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))
    hooks = [opt.make_session_run_hook(autodist.is_chief), tf.train.StopAtStepHook(last_step=int(sys.argv[1]))]
    if autodist.is_chief:
        hooks.append(tf.train.CheckpointSaverHook("checkpoints", save_steps=10))
    with tf.train.MonitoredSession(
        session_creator=SessionCreator(autodist, checkpoint_dir="checkpoints"), hooks=hooks
    ) as mon_sess:
        print("begins at", mon_sess.run_step_fn(lambda step_context: step_context.session.run(global_step)), flush=True)
        rng = np.random.default_rng(autodist.rank)
        while not mon_sess.should_stop():
            rows = rng.choice(len(images), 64)
            mon_sess.run(training_op, {x: images[rows], y: labels[rows]})
            raw = mon_sess._tf_sess()
            if autodist.is_chief and raw.run(global_step) >= 30 and int(sys.argv[1]) > 1000:
                os.kill(os.getpid(), 9)
        print("accuracy", raw.run(accuracy, {x: images, y: labels}), flush=True)
"""


def run_digits(folder: Path, last_step: int) -> str:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "autodist_py", "run", "--local", "3", "--all-output", "train.py", str(last_step)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("AUTODIST_")}
    own |= {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    run = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=150, check=False)
    return f"{run.stdout}{run.stderr}\nexit {run.returncode}"


@pytest.mark.slow
def test_a_run_whose_chief_was_killed_goes_on_from_its_checkpoint(tmp_path: Path):
    """The example of TensorFlow's documentation, on handwritten digits."""
    killed = run_digits(tmp_path, 10**6)
    assert killed.count("begins at 0") == 3
    assert signal.SIGKILL.name in killed and "exit 0" not in killed
    again = run_digits(tmp_path, 80)
    begun = [int(step) for step in re.findall(r"begins at (\d+)", again)]
    assert len(begun) == 3 and len(set(begun)) == 1 and begun[0] >= 20
    assert "exit 0" in again, again
    assert min(map(float, re.findall(r"accuracy ([0-9.]+)", again))) > 0.8
