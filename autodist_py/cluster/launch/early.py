"""Workers that start with the chief: `autodist run` owns their processes, and the chief tells them what they wait for.

All scripts begin at once, so a start takes as long as one worker's, not as two workers' one after the other. In its
`AutoDist(...)` a worker waits until the chief, in its own, knows who it is. What a worker prints before is shown then;
of one that nobody asks for it is not.

The command and the chief have one Unix socket, with a JSON list on each line. The command says first for which resource
spec it has started workers, and later how each has ended. The chief tells a worker something, or asks for its end.
Where either process ends, the other sees the end of the socket, and ends the run.
"""

import hashlib
import json
import os
import socket
import stat
import threading
from contextlib import suppress

from autodist_py.cluster.launch.local import Command, ExitReport, LaunchedWorker, LineOutput, stop_workers
from autodist_py.cluster.launch.ssh import launcher_on
from autodist_py.cluster.launch.told import Told
from autodist_py.config.resource_spec import spec_lines
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec

_GREETING = b'["autodist workers", '
_TELL, _TERMINATE, _KILL, _DISMISS = "tell", "terminate", "kill", "dismiss"
_COMMAND_ENDED = "`autodist run`, whose process it was, has ended"


class EarlyWorkers:
    """What `autodist run` has: the processes of all workers but the chief.

    Attributes:
        descriptor: of the chief's end of the socket.
        is_asked_for: whether the chief has asked for them, or said that it has others.
        are_dismissed: whether it has said that it has others; what they print goes nowhere then.
    """

    def __init__(self, resources: ResourceSpec, command: Command, settings: Settings, *, output: int):
        """All are started; what they print goes to the descriptor `output`, which is closed in the end.

        Raises:
            ClusterError: one cannot be, and none is running: the chief meets that, too, and says so.
            OSError: likewise.
        """
        self.is_asked_for = self.are_dismissed = False
        self._own, self._chiefs = socket.socketpair()
        self.descriptor = self._chiefs.fileno()
        self._lock = threading.RLock()
        self._told: set[int] = set()
        """Whose lines are shown, and whose ends are reported."""
        self._ends: dict[int, tuple[int, str]] = {}
        """Of workers that nobody has asked for yet: their exit codes, and the reasons."""
        self._workers: dict[int, LaunchedWorker] = {}
        self._is_over = threading.Event()
        self._output = LineOutput(output, brief=settings.output == "brief")
        self._send("autodist workers", _digest(resources))
        launcher = launcher_on(resources, settings, command, self._output, last_words_descriptor=output)
        try:
            for rank, node in enumerate(resources.workers):
                if rank:
                    self._output.hold(rank)
                    self._workers[rank] = launcher.launch(rank, node, on_exit=self._ended)
        except (ClusterError, OSError):
            self._end_all()  # The descriptor is the caller's again.
            raise
        threading.Thread(target=self._obey, name="autodist-early", daemon=True).start()

    def __len__(self) -> int:
        return len(self._workers)

    def handed_over(self) -> None:
        """The chief's process has its end of the socket."""
        self._chiefs.close()

    def chief_ended(self, seconds: float, *, shows_failed: bool) -> None:
        """The chief's process has ended: so do all others, those that it knew within so many seconds by themselves.

        With `shows_failed` the lines of those that failed before anybody asked for them are shown, or how they did.
        """
        threading.Thread(target=self._end, args=[seconds, shows_failed], name="autodist-early", daemon=True).start()

    @property
    def are_over(self) -> bool:
        """Whether all have ended since the chief has."""
        return self._is_over.is_set()

    def close(self) -> None:
        """All have ended. Nobody reads what they print any more: what waits to be read is let go."""
        self._end_all()
        self._output.close()

    def _end_all(self) -> None:
        stop_workers(list(self._workers.values()), grace=0.0)
        self._chiefs.close()
        with suppress(OSError):
            self._own.shutdown(socket.SHUT_RDWR)
        self._own.close()

    def _end(self, seconds: float, shows_failed: bool) -> None:
        try:
            with self._lock:
                told = set(self._told)
                failed = {rank: end for rank, end in self._ends.items() if end[0] and shows_failed}
            for rank, (code, reason) in failed.items():
                self._output.release(rank)
                if not self._output.ended(rank, code):
                    self._output.show(rank, f"autodist: it has ended: {reason or f'exit code {code}'}\n".encode())
            stop_workers([worker for rank, worker in self._workers.items() if rank not in told], grace=0.0)
            stop_workers([worker for rank, worker in self._workers.items() if rank in told], grace=seconds)
        finally:
            self._is_over.set()

    def _obey(self) -> None:
        """Does what the chief asks for, until its end of the socket is closed."""
        with suppress(OSError), self._own.makefile("r") as asked:
            for line in asked:
                if line.endswith("\n"):  # Else the chief was killed as it wrote.
                    self._do(*json.loads(line))

    def _do(self, what: str, rank: int = 0, line: str = "") -> None:
        self.is_asked_for = True
        if what == _TELL:
            self._tell(rank, line)
        elif what == _TERMINATE:
            self._workers[rank].terminate()
        elif what == _KILL:
            self._workers[rank].kill()
        else:
            self.are_dismissed = True
            stop_workers(list(self._workers.values()), grace=0.0)
            self._output.close()

    def _tell(self, rank: int, line: str) -> None:
        self._workers[rank].tell(Told.parse(line.encode()))  # Nothing, if it has ended.
        # What it has printed may be much, and nobody may read it now.
        threading.Thread(target=self._release, args=[rank], name="autodist-early", daemon=True).start()

    def _release(self, rank: int) -> None:
        self._output.release(rank)
        with self._lock:
            self._told.add(rank)
            end = self._ends.pop(rank, None)
        if end is not None:
            self._report(rank, *end)

    def _ended(self, rank: int, code: int, reason: str, is_shown: bool) -> None:
        with self._lock:
            if rank not in self._told:
                self._ends[rank] = code, reason
                return
        self._report(rank, code, reason)

    def _report(self, rank: int, code: int, reason: str) -> None:
        # What was said of its lines may be of the time when they were held.
        self._send("ended", rank, code, reason, self._output.ended(rank, code))

    def _send(self, *message: object) -> None:
        _send(self._own, self._lock, message)


def _send(to: socket.socket, lock: threading.RLock, message: object) -> bool:
    """Sends the message; whether anybody is there to read it."""
    try:
        with lock:
            to.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def _digest(resources: ResourceSpec) -> str:
    """What tells one spec from another, and is short however many nodes it has."""
    return hashlib.sha256(spec_lines(resources).encode()).hexdigest()


def early_launcher(descriptor: int | None, resources: ResourceSpec | None) -> "EarlyLauncher | None":
    """What has the workers of these nodes, which `autodist run` has started with this process, the chief.

    None: there are none. Those of other nodes are told to end.

    Args:
        descriptor: of a socket, if it is one: a script closes descriptors, and what it starts has others.
        resources: where the chief trains; None: others start its workers.
    """
    found = None if descriptor is None else _socket(descriptor)
    if found is None:
        return None
    launcher = EarlyLauncher(found)
    if resources is not None and launcher.spec == _digest(resources):
        return launcher
    launcher.dismiss()
    return None


def _socket(descriptor: int) -> socket.socket | None:
    """The socket of the descriptor, if `EarlyWorkers` has its other end, and nobody has read from it."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        is_blocking = os.get_blocking(descriptor)
        found = socket.socket(fileno=descriptor)
    except OSError:
        return None
    with suppress(OSError):
        if found.recv(len(_GREETING), socket.MSG_PEEK | socket.MSG_DONTWAIT) == _GREETING:
            found.settimeout(None)  # A script may have set another default.
            found.set_inheritable(False)
            return found
    found.detach()
    os.set_blocking(descriptor, is_blocking)
    return None


class EarlyLauncher:
    """What the chief has of workers that started with it. It implements Launcher: it launches none, it asks for them.

    Attributes:
        spec: which nodes they were started on.
    """

    def __init__(self, found: socket.socket):
        self._socket, self._lock = found, threading.RLock()
        self._said = found.makefile("r")
        _, self.spec = json.loads(self._said.readline())
        self._workers: dict[int, _EarlyWorker] = {}

    def launch(self, rank: int, node: NodeSpec, *, on_exit: ExitReport) -> LaunchedWorker:
        """See Launcher. It is told next, and its end is heard of from then on."""
        if not self._workers:
            threading.Thread(target=self._listen, name="autodist-early", daemon=True).start()
        self._workers[rank] = _EarlyWorker(rank, self, on_exit)
        return self._workers[rank]

    def dismiss(self) -> None:
        """None of them is asked for."""
        self.send(_DISMISS)
        self._said.close()
        self._socket.close()

    def send(self, *message: object) -> bool:
        """Tells the command something; whether it is there."""
        return _send(self._socket, self._lock, message)

    def _listen(self) -> None:
        """Notes how workers have ended. Those of a command that has ended itself are lost with it."""
        with suppress(OSError):
            for line in self._said:
                if line.endswith("\n"):  # Else the command was killed as it wrote.
                    _, rank, code, reason, is_shown = json.loads(line)
                    self._workers[rank].ended(code, reason, is_shown)
        for worker in list(self._workers.values()):
            worker.lose()


class _EarlyWorker:
    """It implements LaunchedWorker."""

    def __init__(self, rank: int, launcher: EarlyLauncher, on_exit: ExitReport):
        self.rank = rank
        self._launcher, self._on_exit = launcher, on_exit
        self._code: int | None = None
        self._lock = threading.Lock()
        self._has_ended = threading.Event()

    def tell(self, told: Told) -> None:
        """See LaunchedWorker."""
        if not self._launcher.send(_TELL, self.rank, told.line().decode().rstrip("\n")):
            threading.Thread(target=self.lose, name="autodist-early", daemon=True).start()

    def wait(self, timeout: float) -> int | None:
        """See LaunchedWorker."""
        return self._code if self._has_ended.wait(timeout) else None

    def terminate(self) -> None:
        """See LaunchedWorker."""
        self._launcher.send(_TERMINATE, self.rank)

    def kill(self) -> None:
        """See LaunchedWorker."""
        self._launcher.send(_KILL, self.rank)

    def lose(self) -> None:
        """Nobody tells any more how its process ends."""
        self.ended(1, _COMMAND_ENDED, False)

    def ended(self, code: int, reason: str, is_shown: bool) -> None:
        """Its process has ended."""
        with self._lock:
            is_news, self._code = self._code is None, code if self._code is None else self._code
        if is_news:
            self._on_exit(self.rank, code, reason, is_shown)
            self._has_ended.set()
