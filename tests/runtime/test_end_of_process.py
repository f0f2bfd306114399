"""What happens in a process at its end beside its script: nothing is printed beside the cause, and nothing crashes."""

import threading
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from autodist_py.kernel.program import Channel
from autodist_py.proto.errors import WorkerFailedError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.synchronizers import Pace
from autodist_py.runtime import parameter_server, tf_adapter, worker_cluster
from autodist_py.runtime.cluster import SoloCluster
from autodist_py.runtime.held import Held
from autodist_py.runtime.parameter_server import Messages
from autodist_py.runtime.worker_cluster import WorkerCluster
from autodist_py.settings import Settings

CAUSE = "worker 0 (127.0.0.1) ended: killed by SIGKILL"
SECONDS = 60.0


class Failing(SoloCluster):
    """A cluster whose run may have failed."""

    has_failed = False

    def failure(self, *, wait: float = 0.0) -> WorkerFailedError | None:
        return WorkerFailedError(CAUSE) if self.has_failed else None


class Served(Messages):
    """The messages of a program whose steps this worker, its own server, takes by itself."""

    def __init__(self, cluster: SoloCluster):
        nothing: Any = None
        channels = [Channel(0, f"end-{uuid.uuid4()}", 0, nothing, nothing)]
        program: Any = SimpleNamespace(pace=Pace(sync=False), channels=channels, servers=[])
        super().__init__(cluster, program, nothing, Held())


@pytest.fixture
def cluster() -> Failing:
    return Failing()


@pytest.fixture
def messages(cluster: Failing) -> Iterator[Served]:
    made = Served(cluster)
    yield made
    made.close()


def carried(messages: Served, error: Exception, before: Callable[[], None]) -> None:
    """`messages` pauses where other servers cannot be told, as their queues or the session are closed."""

    def pause() -> None:
        before()
        raise error

    carrier: Any = SimpleNamespace(pause=pause)
    messages._carrier = carrier
    messages.pause()


CANCELLED = tf.errors.CancelledError(None, None, "FIFOQueue 'bell' is closed.")
CLOSED = RuntimeError("Attempted to use a closed Session.")


@pytest.mark.parametrize("error", [CANCELLED, CLOSED], ids=["queue", "session"])
def test_who_pauses_after_the_run_has_failed_tells_nobody(cluster: Failing, messages: Served, error: Exception) -> None:
    cluster.has_failed = True
    carried(messages, error, lambda: None)


@pytest.mark.parametrize("error", [CANCELLED, CLOSED], ids=["queue", "session"])
def test_who_pauses_while_the_queues_are_being_closed_tells_nobody(messages: Served, error: Exception) -> None:
    carried(messages, error, messages.close)


def test_what_a_pause_raises_in_a_run_that_goes_on_is_shown(messages: Served) -> None:
    with pytest.raises(tf.errors.CancelledError, match="is closed"):
        carried(messages, CANCELLED, lambda: None)


def test_a_mistake_in_a_pause_is_shown_though_the_run_has_failed(cluster: Failing, messages: Served) -> None:
    cluster.has_failed = True
    with pytest.raises(KeyError):
        carried(messages, KeyError("bell"), lambda: None)


def test_the_process_ends_after_the_threads_that_closed_their_messages(
    cluster: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    registry = SimpleNamespace(register=at_exit.append, unregister=at_exit.remove)
    monkeypatch.setattr(parameter_server, "atexit", registry)
    messages = Served(cluster)
    closed, may_end, is_over = threading.Event(), threading.Event(), threading.Event()

    def carry() -> None:
        messages.close()
        closed.set()
        assert may_end.wait(SECONDS)  # As a thread does that closes its session.

    def end() -> None:
        for callback in reversed(at_exit.copy()):
            callback()
        is_over.set()

    messages._start("carry", carry)
    assert closed.wait(SECONDS)
    threading.Thread(target=end, daemon=True).start()
    assert not is_over.wait(0.2)
    may_end.set()
    assert is_over.wait(SECONDS)
    assert not at_exit


class Ending:
    """A worker whose script has raised as the run failed, and of which a thread tells so until it may end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, margin: float):
        monkeypatch.setattr(worker_cluster, "_MARGIN_SECONDS", margin)
        monkeypatch.setattr(tf_adapter, "abort_collectives", lambda cause: None)
        self.exits: list[bool] = []
        nodes = (NodeSpec("127.0.0.1", chief=True), NodeSpec("127.0.0.2"))
        calls: Any = None
        self.worker = WorkerCluster(1, ResourceSpec(nodes), calls, Settings(exit_grace=1000.0))
        monkeypatch.setattr(self.worker, "_exit", lambda: self.exits.append(True))
        self.may_end, self.is_over, told = threading.Event(), threading.Event(), threading.Event()

        def tell(cause: str) -> None:
            told.set()
            self.may_end.wait(SECONDS)

        self.worker.on_failure(tell)
        threading.Thread(target=self.worker._fail, args=[CAUSE], daemon=True).start()
        assert told.wait(SECONDS)
        assert not self.worker.raised(WorkerFailedError(CAUSE))

    def end(self) -> None:
        self.worker.ended()
        self.is_over.set()


def test_the_process_ends_after_what_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, margin=SECONDS)
    threading.Thread(target=ending.end, daemon=True).start()
    assert not ending.is_over.wait(0.2)
    ending.may_end.set()
    assert ending.is_over.wait(SECONDS)
    assert not ending.exits


def test_python_does_not_end_while_a_thread_of_ours_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, margin=0.01)
    ending.end()
    ending.may_end.set()
    assert ending.exits
