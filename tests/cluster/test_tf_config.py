"""Which worker a process is, and on which machines the others are, by the addresses of a TensorFlow cluster."""

import pytest

from autodist_py.cluster import tf_config
from autodist_py.cluster.tf_config import Task
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec

MACHINE = NodeSpec("127.0.0.1", gpus=(0, 1))


def test_ranks_are_the_chief_s_and_then_those_of_workers() -> None:
    jobs = {"worker": ["b:1", "c:2"], "chief": ["a:3"], "evaluator": ["d:4"]}
    task = Task.of(jobs, "worker", 1)

    assert task == Task((("a", 3), ("b", 1), ("c", 2)), 2)
    assert [node.address for node in task.resources(MACHINE).workers] == ["a", "b", "c"]
    assert {node.gpus for node in task.resources(MACHINE).nodes} == {(0, 1)}


def test_a_cluster_of_machines_may_be_large() -> None:
    task = Task.of({"worker": [f"worker-{rank}:2222" for rank in range(300)]}, "worker", 299)

    assert len(task.resources(MACHINE).workers) == 300


def test_local_workers_have_an_address_each() -> None:
    task = Task.of({"worker": ["localhost:1", "[::1]:2", "127.0.0.1:3"]}, "worker", 0)

    assert task.addresses == (("localhost", 1), ("::1", 2), ("127.0.0.1", 3))
    assert [node.address for node in task.resources(MACHINE).workers] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


def test_what_stands_for_the_secret_is_made_of_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[tuple[Settings, str]] = []
    monkeypatch.setattr(
        tf_config, "join_cluster", lambda resources, settings, *, secret: joined.append((settings, secret))
    )
    same, other, local = ["a:2000", "b:3000"], ["a:2000", "c:3000"], ["localhost:2000", "127.0.0.1:3000"]
    for workers, index in ((same, 0), (same, 1), (other, 1), (local, 0), (["127.0.0.1:2000", "[::1]:3000"], 0)):
        Task.of({"worker": workers}, "worker", index).join(MACHINE, Settings())

    (chief, first), (worker, second), (_, third), *others = joined
    assert first == second != third
    assert len({word for _, word in others}) == 1  # However a local host is written.
    assert chief == Settings(launch="none", coordinator_port=2000)
    assert worker == Settings(launch="none", rank=1, coordinator="a:2000", server_port=2999)


def test_an_evaluator_is_alone() -> None:
    assert len(Task.of({"worker": ["a:1", "b:2"]}, "evaluator", 0).resources(MACHINE).nodes) == 1


@pytest.mark.parametrize(
    ("jobs", "job", "index", "expected"),
    [
        ({"worker": ["a:1", "b:2"]}, "worker", 2, r"one of its workers: worker 0, worker 1\. Received: worker 2"),
        ({"worker": ["a:1", "b:2"]}, None, None, r"Received: None None"),
        ({"worker": ["a:1"], "ps": ["b:2"]}, "ps", 0, r"one of its workers: worker 0\. Received: ps 0"),
        ({"ps": ["b:2"]}, "worker", 0, r"it has none"),
        ({"worker": ["a:1", "b"]}, "worker", 0, r"host:port.*Received: 'b'"),
        ({"worker": ["a:1", None]}, "worker", 0, r"host:port.*Received: None"),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, r"one chief at most\. Received: a:1, b:1"),
        ({"worker": ["a:1", "b:0"]}, "worker", 0, r"host:port.*Received: 'b:0'"),
        ({"worker": ["a:1", "b:65536"]}, "worker", 0, r"host:port.*Received: 'b:65536'"),
        ({"worker": ["a:1", "a:2"]}, "worker", 0, r"a machine of its own.*with a in several of its addresses"),
    ],
)
def test_what_is_no_worker_is_refused(
    jobs: dict[str, list[str | None]], job: str | None, index: int | None, expected: str
) -> None:
    with pytest.raises(ClusterError, match=expected):
        Task.of(jobs, job, index)
