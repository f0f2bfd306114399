"""Real runs of two workers: real processes, gRPC and TensorFlow servers. Each run is a script of its own.

Over 400 lines, as the scripts stand beside the tests that run them.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.runtime.chief import Chief
from autodist_py.runtime.cluster import join_cluster
from autodist_py.settings import Settings
from tests.processes import ROOT, is_running

pytestmark = pytest.mark.alone

END_SECONDS = 10.0

PREAMBLE = """
import json, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.runtime.cluster import join_cluster
from autodist_py.settings import Settings

SPEC = ResourceSpec((NodeSpec("127.0.0.1", cpus=(0, 1), chief=True), NodeSpec("127.0.0.2")))
print("pid", os.getpid(), flush=True)


def join(**timeout):
    global tf, cluster
    cluster = join_cluster(SPEC, Settings.from_environment(), **timeout)
    import tensorflow as tf
    return cluster


def ring(group_key):
    from tensorflow.python.ops import collective_ops, gen_resource_variable_ops
    devices = [f"/job:worker/replica:0/task:{cluster.rank}/device:CPU:{i}" for i in range([2, 1][cluster.rank])]
    tokens = []
    for device in devices:
        with tf.device(device):
            tokens.append(gen_resource_variable_ops.var_handle_op(dtype=tf.float32, shape=[], shared_name=device))

    @tf.function(input_signature=[tf.TensorSpec([None])] * len(devices))
    def reduce(*values):
        results = []
        for device, value, token in zip(devices, values, tokens):
            with tf.device(device):
                results.append(collective_ops.all_reduce_v2(
                    value, 3, group_key, tf.size(value), communication_hint="ring", ordering_token=token))
        return results

    def call(size):
        first = 1 + 2 * cluster.rank
        return [v.numpy().tolist() for v in reduce(*[tf.fill([size], float(first + i)) for i in range(len(devices))])]

    return call


def ready():
    cluster.barrier("ready")
    print("ready", time.time(), flush=True)


def wait_for_ever():
    while True:
        cluster.check()
        time.sleep(0.05)
"""


class Run:
    """A script as the chief's process, in a session of its own, and what all its workers print."""

    def __init__(self, folder, body, **environment):
        script = folder / "train.py"
        script.write_text(PREAMBLE + textwrap.dedent(body))
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(script)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, text, count=1, seconds=90.0):
        deadline = time.monotonic() + seconds
        while sum(text in line for line in list(self.lines)) < count:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.text}"
            assert self.process.poll() is None or self._reader.is_alive(), self.text
            time.sleep(0.02)

    def end(self, seconds):
        """Waits for the end of all of its processes; its exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the chief still runs after {seconds} s:\n{self.text}")
        deadline = time.monotonic() + seconds
        while running := [pid for pid in self.pids.values() if is_running(pid)]:
            assert time.monotonic() < deadline, f"{running} still run:\n{self.text}"
            time.sleep(0.02)
        self._reader.join(5)
        return code

    @property
    def text(self):
        return "\n".join(self.lines)

    @property
    def pids(self):
        """Process ids by rank."""
        matches = [re.fullmatch(r"(?:\[(\d)\] )?pid (\d+)", line) for line in list(self.lines)]
        return {int(match[1] or 0): int(match[2]) for match in matches if match}

    @property
    def causes(self):
        """The cause that each process printed, by rank."""
        matches = [re.fullmatch(r"(?:\[(\d)\] )?autodist: (.*)", line) for line in list(self.lines)]
        return {int(match[1] or 0): match[2] for match in matches if match}

    def close(self):
        for pid in [self.process.pid, *self.pids.values()]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def start(tmp_path):
    runs = []

    def start_run(body, **environment):
        runs.append(Run(tmp_path, body, **environment))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


def assert_ends_with(run, cause, *, code=1):
    """Once they are ready, every process ends in time with this cause, and none is left."""
    run.wait_for("ready", 2)
    assert run.end(END_SECONDS) == code, run.text
    assert len(set(run.causes.values())) == 1 and set(run.causes) == {0, 1}, run.text
    assert re.fullmatch(cause, run.causes[0]), run.text


# -- One healthy run, looked at from several sides ---------------------------------------------------------------------

HEALTHY = """
join()
seen = {"run": [cluster.run_id, cluster.seed], "agreed": cluster.agree("a", b"from %d" % cluster.rank).decode()}
seen["compared"] = {rank: value.decode() for rank, value in cluster.compare("c", b"%d" % cluster.rank).items()}
seen["devices"] = [device.name for device in tf.config.list_logical_devices("CPU")]
sums, means = ring(1), ring(2)
seen["reduced"] = [[sums(n), means(n)] for n in (3, 1, 4, 3)]
for number in range(300):
    sums(3)
before = threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
for number in range(50):
    assert join() is cluster
    cluster.barrier("again")
    sums(3)
after = threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
seen["growth"] = [late - early for early, late in zip(before, after)]
try:
    join_cluster(ResourceSpec((NodeSpec("127.0.0.1"),)), Settings.from_environment())
except ClusterError as error:
    seen["other spec"] = str(error)
seen["argv"] = [sys.argv, os.getcwd()]
print("seen", json.dumps(seen))
if cluster.rank == 1:
    time.sleep(2)
    sums(3)
    print("late words")
else:
    sums(3)
"""


@dataclass(frozen=True)
class Healthy:
    """The run, its exit code, and what each worker saw."""

    run: Run
    code: int
    seen: list[dict[str, Any]]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("healthy"), HEALTHY)
    try:
        code = run.end(120)
        seen = [json.loads(line.partition("seen ")[2]) for line in sorted(run.lines) if "seen {" in line]
        assert len(seen) == 2, run.text
        yield Healthy(run, code, seen)
    finally:
        run.close()


def test_workers_share_one_run_id_and_seed(healthy):
    assert healthy.seen[0]["run"] == healthy.seen[1]["run"]


def test_the_chiefs_value_and_all_values_reach_everyone(healthy):
    for seen in healthy.seen:
        assert seen["agreed"] == "from 0"
        assert seen["compared"] == {"0": "0", "1": "1"}


def test_each_worker_has_the_devices_of_its_node(healthy):
    assert sorted(device for seen in healthy.seen for device in seen["devices"]) == [
        "/job:worker/replica:0/task:0/device:CPU:0",
        "/job:worker/replica:0/task:0/device:CPU:1",
        "/job:worker/replica:0/task:1/device:CPU:0",
    ]


def test_ring_reduces_over_two_and_one_devices_in_several_functions_and_shapes(healthy):
    for seen in healthy.seen:
        for size, reduced in zip((3, 1, 4, 3), seen["reduced"], strict=True):
            assert all(value == [6.0] * size for function in reduced for value in function)


def test_joining_again_is_the_same_cluster_and_leaves_nothing_behind(healthy):
    for seen in healthy.seen:
        assert max(seen["growth"]) <= 2, seen["growth"]


def test_another_cluster_in_the_same_process_is_refused(healthy):
    for seen in healthy.seen:
        assert "a process belongs to one cluster" in seen["other spec"]


def test_every_worker_runs_the_script_in_the_same_folder(healthy):
    assert healthy.seen[0]["argv"] == healthy.seen[1]["argv"]


def test_the_chief_waits_for_the_others_before_it_ends(healthy):
    assert healthy.code == 0, healthy.run.text
    assert "[1] late words" in healthy.run.lines
    assert healthy.run.causes == {}


# -- Failures ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_raises_frees_its_peer_from_a_collective_and_shows_its_traceback(start):
    run = start("""
        join()
        ready()
        if cluster.rank == 1:
            time.sleep(1)
            cluster.step = 12
            raise ValueError("boom")
        cluster.step = 12
        ring(1)(3)
    """)

    assert_ends_with(run, r"worker 1 \(127.0.0.2\) failed at step 12: ValueError: boom")
    assert "[1] ValueError: boom" in run.lines
    assert not any(line.startswith("Traceback") for line in run.lines)


def test_a_chief_that_raises_ends_the_others(start):
    run = start("""
        join()
        ready()
        if cluster.is_chief:
            raise ValueError("boom")
        wait_for_ever()
    """)

    assert_ends_with(run, r"worker 0 \(127.0.0.1\) failed before its first step: ValueError: boom")


def test_an_exception_in_a_thread_ends_the_run(start):
    run = start("""
        join()
        ready()
        if cluster.rank == 1:
            threading.Thread(target=lambda: 1 / 0).start()
        time.sleep(60)
    """)

    assert_ends_with(run, r"worker 1 \(127.0.0.2\) failed before its first step: ZeroDivisionError: .*")


def test_a_worker_that_exits_with_a_code_ends_the_run(start):
    run = start("""
        join()
        reduce = ring(1)
        reduce(3)
        cluster.step = 1
        ready()
        if cluster.rank == 1:
            sys.exit(3)
        cluster.step = 2
        reduce(3)
    """)

    assert run.end(END_SECONDS + 80) == 1, run.text
    assert run.causes == {0: "worker 1 (127.0.0.2) ended at step 1: exit code 3; see its output above"}


def test_a_killed_worker_ends_a_run_that_waits_in_a_collective(start):
    run = start("""
        join()
        reduce = ring(1)
        reduce(3)
        ready()
        if cluster.rank == 1:
            time.sleep(60)
        reduce(3)
    """)
    run.wait_for("ready", 2)
    os.kill(run.pids[1], signal.SIGKILL)

    assert run.end(END_SECONDS) == 1, run.text
    assert run.causes == {
        0: "worker 1 (127.0.0.2) ended before its first step: killed by SIGKILL; see its output above"
    }


def test_a_worker_that_hangs_ends_the_run(start):
    run = start("""
        join()
        ready()
        time.sleep(60)
    """)
    run.wait_for("ready", 2)
    os.kill(run.pids[1], signal.SIGSTOP)

    assert run.end(END_SECONDS) == 1, run.text
    assert run.causes == {0: "worker 1 (127.0.0.2) stopped answering before its first step: no heartbeat for 5 s"}


@pytest.mark.parametrize(
    ("number", "code", "cause"),
    [
        (signal.SIGINT, 128 + signal.SIGINT, r"worker 0 \(127.0.0.1\) was interrupted .*: KeyboardInterrupt.*"),
        (signal.SIGTERM, 128 + signal.SIGTERM, r"worker 0 \(127.0.0.1\) was terminated .*: SIGTERM"),
    ],
)
def test_a_signal_to_the_chief_ends_all_even_in_a_collective(start, number, code, cause):
    run = start("""
        join()
        reduce = ring(1)
        ready()
        if cluster.rank == 1:
            time.sleep(60)
        reduce(3)
    """)
    run.wait_for("ready", 2)
    time.sleep(0.5)
    os.killpg(run.process.pid, number)

    assert_ends_with(run, cause, code=code)
    assert "Traceback" not in run.text


def test_workers_end_when_the_chief_is_killed(start, tmp_path):
    run = start("""
        join()
        ready()
        try:
            wait_for_ever()
        except WorkerFailedError as error:
            open("cause", "w").write(str(error))
            raise
    """)
    run.wait_for("ready", 2)
    run.process.kill()

    assert run.end(END_SECONDS) == -signal.SIGKILL
    cause = "worker 0 (127.0.0.1), the chief, is lost: its coordinator does not answer"
    assert (tmp_path / "cause").read_text() == cause


def test_a_worker_whose_script_is_over_does_not_wait_for_a_chief_that_is_silent(start, tmp_path):
    run = start("""
        join()
        ready()
        if cluster.is_chief:
            time.sleep(120)
    """)
    run.wait_for("ready", 2)
    time.sleep(0.5)
    os.kill(run.pids[0], signal.SIGSTOP)

    deadline = time.monotonic() + END_SECONDS
    while is_running(run.pids[1]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(run.pids[1])


def test_a_worker_that_ends_before_joining_is_reported_at_once(start):
    run = start("""
        if "AUTODIST_RANK" in os.environ:
            sys.exit("no data here")
        join()
    """)

    assert run.end(60) == 1, run.text
    assert "[1] no data here" in run.lines
    assert run.causes == {0: "worker 1 (127.0.0.2) ended before it joined: exit code 1; see its output above"}


def test_a_worker_that_never_joins_is_named(start):
    run = start("""
        if "AUTODIST_RANK" in os.environ:
            time.sleep(60)
        join(timeout=6)
    """)

    assert run.end(30) == 1, run.text
    assert re.search(r"ClusterError: worker 1 \(127.0.0.2\) did not join within [\d.]+ s", run.causes[0]), run.text


def test_an_eager_variable_before_joining_is_refused(start):
    run = start("""
        import tensorflow as tf
        weight = tf.Variable(1.0, name="weight")
        join()
    """)

    assert run.end(60) == 1, run.text
    assert "AutoDist(...) comes before any eager variable" in run.text
    assert "Found: variable 'weight:0'. Move AutoDist(...) to the start of the script." in run.text


def test_a_port_in_use_is_refused_on_every_worker(start):
    with socket.create_server(("0.0.0.0", 0)) as server:
        run = start("join()", AUTODIST_SERVER_PORT=str(server.getsockname()[1] - 1))

        assert run.end(60) == 1, run.text
        assert "[1] autodist_py.proto.errors.ClusterError: TensorFlow's server cannot have port" in run.text
        assert run.causes == {0: "worker 1 (127.0.0.2) ended before it joined: exit code 1; see its output above"}


# -- One worker --------------------------------------------------------------------------------------------------------


def test_one_worker_starts_nothing():
    threads = threading.active_count()

    clusters = [join_cluster(ResourceSpec((NodeSpec("127.0.0.1"),)), Settings()) for _ in range(50)]

    assert threading.active_count() == threads
    first = clusters[0]
    assert (first.rank, first.num_workers, first.is_chief) == (0, 1, True)
    assert first.agree("k", b"v") == b"v" and first.compare("k", b"v") == {0: b"v"}
    assert len({cluster.run_id for cluster in clusters}) == 50
    first.barrier("k")
    first.check()
    first.leave()
    assert first.failure() is None


def test_one_worker_that_aborts_reports_it():
    cluster = join_cluster(ResourceSpec((NodeSpec("127.0.0.1"),)), Settings())

    cluster.abort("because")

    with pytest.raises(WorkerFailedError, match="because"):
        cluster.check()


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_a_chief_on_another_machine_than_its_own_is_refused(address):
    resources = ResourceSpec((NodeSpec(address, chief=True), NodeSpec("192.0.2.2")))
    with pytest.raises(ClusterError, match=rf"whose chief is {address}, which is no address of this machine \(.+\)"):
        Chief.start(resources, Settings())


def test_a_worker_whose_spec_has_one_node_is_refused():
    with pytest.raises(ClusterError, match="Received: one node, in the process of rank 1"):
        join_cluster(ResourceSpec((NodeSpec("127.0.0.1"),)), Settings(rank=1, coordinator="127.0.0.1:1"))
