"""The cluster that workers join: what one healthy run gives them, how one is refused, and one of a single worker."""

import json
import socket
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from autodist_py.cluster.chief import Chief
from autodist_py.cluster.cluster import join_cluster
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from tests.support.runs import Run

pytestmark = [pytest.mark.alone, pytest.mark.turns(3)]

# -- One healthy run, looked at from several sides ---------------------------------------------------------------------

HEALTHY = """
join()
seen = {"run": [cluster.run_id, cluster.seed], "agreed": cluster.broadcast("a", b"from %d" % cluster.rank).decode()}
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
seen["resources"] = cluster.resources == SPEC
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
        assert seen["other spec"].startswith(
            "another resource spec than before: number of nodes: 1, where it was number"
        )
        assert "A process belongs to one cluster" in seen["other spec"]


def test_every_worker_has_the_chiefs_resource_spec(healthy):
    assert [seen["resources"] for seen in healthy.seen] == [True, True]


def test_every_worker_runs_the_script_in_the_same_folder(healthy):
    assert healthy.seen[0]["argv"] == healthy.seen[1]["argv"]


def test_the_chief_waits_for_the_others_before_it_ends(healthy):
    assert healthy.code == 0, healthy.run.text
    assert "[1] late words" in healthy.run.lines
    assert healthy.run.causes == {}


# -- Refusals ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_a_chief_on_another_machine_than_its_own_is_refused(address):
    resources = ResourceSpec((NodeSpec(address, chief=True), NodeSpec("192.0.2.2")))
    with pytest.raises(ClusterError, match=rf"whose chief is {address}, which is no address of this machine \(.+\)"):
        Chief.start(resources, Settings())


def test_a_worker_whose_spec_has_one_node_is_refused():
    with pytest.raises(ClusterError, match="Received: one node, in the process of rank 1"):
        join_cluster(ResourceSpec((NodeSpec("127.0.0.1"),)), Settings(rank=1, coordinator="127.0.0.1:1"))


# -- One worker --------------------------------------------------------------------------------------------------------


def test_one_worker_starts_nothing():
    threads = threading.active_count()

    clusters = [join_cluster(ResourceSpec((NodeSpec("127.0.0.1"),)), Settings()) for _ in range(50)]

    assert threading.active_count() == threads
    first = clusters[0]
    assert (first.rank, first.num_workers, first.is_chief) == (0, 1, True)
    assert first.broadcast("k", b"v") == b"v" and first.compare("k", b"v") == {0: b"v"}
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
