"""What happens in a process at its end beside its script: nothing is printed beside the cause, and nothing crashes."""

import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.cluster import script_end, tf_adapter
from autodist_py.cluster.chief import Chief
from autodist_py.cluster.cluster import SoloCluster
from autodist_py.cluster.coordinator.service import serve
from autodist_py.cluster.coordinator.shell import Coordinator
from autodist_py.cluster.exit_hooks import one_line
from autodist_py.cluster.exit_stack import ExitStack
from autodist_py.cluster.launch.told import Told
from autodist_py.cluster.member import WorkerCluster
from autodist_py.cluster.seat import Seat
from autodist_py.cluster.server_probe import STILL_SECONDS
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.config.settings import Settings
from autodist_py.kernel.program import Channel
from autodist_py.proto.errors import WorkerFailedError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.synchronizers import Consistency
from autodist_py.servers import loops
from autodist_py.servers.loops import Messages
from autodist_py.servers.store import ServerStore
from autodist_py.servers.values import ServerValues
from tests.support.coordinators import ADDRESSES, joined, make_coordinator

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
        program: Any = SimpleNamespace(consistency=Consistency(sync=False), channels=channels, servers=[])
        super().__init__(cluster, program, nothing, ServerStore())


@pytest.fixture
def cluster() -> Failing:
    return Failing(local_resource_spec(1))


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
    stack = ExitStack()
    monkeypatch.setattr(ExitStack, "_of_process", stack)
    messages = Served(cluster)
    closed, may_end, is_over = threading.Event(), threading.Event(), threading.Event()

    def carry() -> None:
        messages.close()
        closed.set()
        assert may_end.wait(SECONDS)  # As a thread does that closes its session.

    def end() -> None:
        stack.run()
        is_over.set()

    messages._start("carry", carry)
    assert closed.wait(SECONDS)
    threading.Thread(target=end, daemon=True).start()
    assert not is_over.wait(0.2)
    may_end.set()
    assert is_over.wait(SECONDS)


@pytest.mark.parametrize(
    ("thread", "told"),
    [("serve", ["CancelledError: FIFOQueue 'bell' is closed."]), ("carry", [])],
)
def test_a_server_that_nobody_closed_tells_why_it_ends_and_a_carrier_leaves_it_to_the_server(
    cluster: Failing, messages: Served, monkeypatch: pytest.MonkeyPatch, thread: str, told: list[str]
) -> None:
    causes: list[str] = []
    monkeypatch.setattr(cluster, "abort", causes.append)

    def end() -> None:
        raise CANCELLED

    messages._start(thread, end, told_elsewhere=loops._CLOSED if thread == "carry" else ())
    messages._threads[-1].join(SECONDS)
    assert causes == told
    assert messages.is_closed
    assert messages.error is CANCELLED


class Ending:
    """A worker whose script has raised as the run failed, and of which a thread tells so until it may end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, margin: float):
        monkeypatch.setattr(script_end, "MARGIN_SECONDS", margin)
        monkeypatch.setattr(tf_adapter, "abort_collectives", lambda cause: None)
        self.exits: list[bool] = []
        nodes = (NodeSpec("127.0.0.1", chief=True), NodeSpec("127.0.0.2"))
        calls: Any = None
        worker = WorkerCluster(Seat(1, ResourceSpec(nodes)), calls, Settings(exit_grace=1000.0))
        self.script_end = worker._script_end
        monkeypatch.setattr(self.script_end, "_exit", lambda: self.exits.append(True))
        self.may_end, self.is_over, told = threading.Event(), threading.Event(), threading.Event()

        def tell(cause: str) -> None:
            told.set()
            self.may_end.wait(SECONDS)

        worker.on_failure(tell)
        threading.Thread(target=worker._failure.fail, args=[CAUSE], daemon=True).start()
        assert told.wait(SECONDS)
        assert not self.script_end.raised(WorkerFailedError(CAUSE))

    def end(self) -> None:
        self.script_end.ended()
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


def test_python_does_not_end_while_a_thread_closes_a_session_that_waits_for_a_lost_server(
    cluster: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, messages = Ending(monkeypatch, margin=SECONDS), Served(cluster)
    ending.may_end.set()
    monkeypatch.setattr(loops, "_END_SECONDS", 0.01)
    may_end = threading.Event()

    def close_session() -> None:
        may_end.wait(SECONDS)

    messages._start("carry", close_session)
    messages.close()
    ending.end()
    may_end.set()
    assert ending.exits


def test_python_does_not_end_while_values_are_served(cluster: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, values = Ending(monkeypatch, margin=SECONDS), ServerValues(cluster, f"end-{uuid.uuid4()}", ServerStore())
    ending.may_end.set()
    ending.end()
    values.close()
    assert ending.exits


class Late:
    """A worker whose process ends so many seconds after its script. Nobody waits for them: they are counted."""

    rank = 1

    def __init__(self, seconds: float):
        self.left = seconds
        self.waited = self.terminated_after = 0.0
        self.exit_code = 0

    def tell(self, told: Told) -> None:
        """See LaunchedWorker."""

    def wait(self, timeout: float) -> int | None:
        self.left -= timeout
        self.waited += timeout
        return self.exit_code if self.left <= 0 else None

    def terminate(self) -> None:
        self.left, self.exit_code, self.terminated_after = 0, -15, self.waited

    kill = terminate


def end_together(worker: Late) -> Chief:
    """The chief of a run in which both workers have left, after it has waited for that worker's process."""
    coordinator = joined()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: coordinator.leave(rank, 38), (0, 1)))
    chief = chief_of(coordinator, worker)
    chief.wait_for_workers()
    return chief


def chief_of(coordinator: Coordinator, worker: Late) -> Chief:
    server, port = serve(coordinator, "secret", host="127.0.0.1", port=0)
    nodes = (NodeSpec(ADDRESSES[0], chief=True), NodeSpec(ADDRESSES[1]))
    return Chief(coordinator, ResourceSpec(nodes), None, "secret", server, f"127.0.0.1:{port}", 1.0, [worker])


def test_a_worker_whose_process_destroys_its_iterators_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    worker = Late(70.0)
    assert end_together(worker).coordinator.cause is None
    assert worker.exit_code == 0
    assert "worker 1: the script has ended, the process has not; it is waited for" in caplog.text


def test_a_worker_whose_process_does_not_end_is_ended_and_named(caplog: pytest.LogCaptureFixture) -> None:
    worker = Late(2 * STILL_SECONDS)
    assert end_together(worker).coordinator.cause == (
        "worker 1 (127.0.0.2) ended its script at step 38: its process had not ended 130 s after all scripts, "
        "and was made to"
    )
    assert worker.exit_code == -15


def test_a_worker_that_ends_soon_is_waited_for_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert end_together(Late(5.0)).coordinator.cause is None
    assert not caplog.text


def test_the_cause_keeps_how_a_long_message_begins_and_how_it_ends() -> None:
    text = one_line(ValueError(f"in user code:\n{'a line ' * 99}\nindices[2] = 9 is not in [0, 6)"))
    assert text.startswith("ValueError: in user code: a line") and " ... " in text
    assert text.endswith("a line indices[2] = 9 is not in [0, 6)") and len(text) <= 300
    assert one_line(OSError("short")) == "OSError: short"


def test_the_cause_leaves_out_the_functions_that_tensorflow_names() -> None:
    @tf.function(autograph=False)
    def a_function_with_a_long_name(x: tf.Tensor) -> tf.Tensor:
        return tf.debugging.check_numerics(x, "too large", name="check")

    for wrong in (lambda: a_function_with_a_long_name(np.inf), lambda: tf.gather(tf.zeros([3]), [7])):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            wrong()
        text = one_line(raised.value)
        assert re.search(r"too large : Tensor had Inf values|indices\[0\] = 7 is not in \[0, 3\)$", text), text
        assert "a_function_with_a_long_name_" not in text and "wrapped" not in text


@pytest.mark.parametrize("has_joined", [True, False])
def test_when_a_run_fails_a_worker_that_has_not_joined_is_ended_at_once(has_joined: bool) -> None:
    worker = Late(1000.0)
    chief_of(joined() if has_joined else make_coordinator(), worker).stop_workers(grace=60.0)
    assert worker.exit_code == -15
    assert worker.terminated_after == pytest.approx(60.0 if has_joined else 0.0, abs=1.0)


TERMINATED = """
import os, signal
from autodist_py.cluster.exit_hooks import observe_script

class Observer:
    def raised(self, error):
        print("raised", type(error).__name__)
    def signalled(self, number):
        print("signalled", number.name)
    def ended(self):
        pass

read_end, write_end = os.pipe()
os.set_blocking(write_end, False)
signal.set_wakeup_fd(write_end)  # As an event loop has it: nobody else tells of the signal.
observe_script(Observer())
try:
    os.kill(os.getpid(), signal.SIGTERM)
    os.read(read_end, 1)
except SystemExit:
    raise TypeError from None  # As TensorFlow's C++ code does, in which the handler may run.
"""


def test_a_signal_is_told_before_the_error_that_c_code_made_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split("\n")[:2] == ["signalled SIGTERM", "raised TypeError"], done.stderr
