"""Workers that start with the chief: `autodist run` owns their processes, and the chief tells them what they wait for.

All scripts begin at once, so a start takes as long as one worker's, not as two workers' one after the other. In its
`AutoDist(...)` a worker waits until the chief, in its own, knows who it is. What a worker prints before is shown then;
of one that nobody asks for it is not.

The command and the chief have one Unix socket, with a JSON list on each line. The command says first for which resource
spec it has started workers, and later how each has ended. The chief tells a worker something, or asks for its end.
"""

import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress

from autodist_py.cluster.launch.local import (
    Command,
    ExitReport,
    LaunchedWorker,
    LineOutput,
    stop_workers,
)
from autodist_py.cluster.launch.ssh import launcher_on
from autodist_py.cluster.launch.told import Told
from autodist_py.config.resource_spec import spec_lines
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec

_GREETING = b'["autodist workers", '
_TELL, _TERMINATE, _KILL, _DISMISS = "tell", "terminate", "kill", "dismiss"


class EarlyWorkers:
    """What `autodist run` has: the processes of all workers but the chief.

    Attributes:
        descriptor: of the chief's end of the socket.
        is_asked_for: whether the chief has asked for them, or said that it has others.
    """

    def __init__(self, resources: ResourceSpec, command: Command, settings: Settings, *, output: int):
        """All are started; what they print goes to the descriptor `output`.

        Raises:
            ClusterError: one cannot be, and none is running: the chief meets that, too, and says so.
            OSError: likewise.
        """
        self.is_asked_for = False
        self._own, self._chiefs = socket.socketpair()
        self.descriptor = self._chiefs.fileno()
        self._lock = threading.RLock()
        self._told: set[int] = set()
        self._ends: dict[int, tuple[int, str]] = {}
        """Of workers that nobody has asked for yet: their exit codes, and the reasons."""
        self._workers: dict[int, LaunchedWorker] = {}
        self._is_over = threading.Event()
        self._output = LineOutput(output, brief=settings.output == "brief")
        self._send("autodist workers", spec_lines(resources))
        launcher = launcher_on(resources, settings, command, self._output, last_words_descriptor=output)
        try:
            for rank, node in enumerate(resources.workers):
                if rank:
                    self._output.hold(rank)
                    self._workers[rank] = launcher.launch(rank, node, on_exit=self._ended)
        except (ClusterError, OSError):
            self.close()
            raise
        threading.Thread(target=self._obey, name="autodist-early", daemon=True).start()

    def __len__(self) -> int:
        return len(self._workers)

    def handed_over(self) -> None:
        """The chief's process has its end of the socket."""
        self._chiefs.close()

    def chief_ended(self, seconds: float) -> None:
        """The chief's process has ended: so do all others, those that it knew within so many seconds by themselves."""
        threading.Thread(target=self._end, args=[seconds], name="autodist-early", daemon=True).start()

    @property
    def are_over(self) -> bool:
        """Whether all have ended since the chief has."""
        return self._is_over.is_set()

    def close(self) -> None:
        """All have ended."""
        stop_workers(list(self._workers.values()), grace=0.0)
        self._chiefs.close()
        with suppress(OSError):
            self._own.shutdown(socket.SHUT_RDWR)
        self._own.close()

    def _end(self, seconds: float) -> None:
        with self._lock:
            told = set(self._told)
        stop_workers([worker for rank, worker in self._workers.items() if rank not in told], grace=0.0)
        stop_workers([worker for rank, worker in self._workers.items() if rank in told], grace=seconds)
        self._is_over.set()

    def _obey(self) -> None:
        """Does what the chief asks for, until its end of the socket is closed."""
        with suppress(OSError), self._own.makefile("r") as asked:
            for line in asked:
                what, *arguments = json.loads(line)
                self.is_asked_for = True
                if what == _DISMISS:
                    stop_workers(list(self._workers.values()), grace=0.0)
                elif what == _TELL:
                    self._tell(*arguments)
                elif what == _TERMINATE:
                    self._workers[arguments[0]].terminate()
                else:
                    self._workers[arguments[0]].kill()

    def _tell(self, rank: int, line: str) -> None:
        with self._lock:
            self._told.add(rank)
            self._output.release(rank)
            end = self._ends.pop(rank, None)
        if end is None:
            self._workers[rank].tell(Told.parse(line.encode()))
        else:
            code, reason = end
            self._send("ended", rank, code, reason, self._output.ended(rank, code))

    def _ended(self, rank: int, code: int, reason: str, is_shown: bool) -> None:
        with self._lock:
            if rank not in self._told:
                self._ends[rank] = code, reason
                return
        self._send("ended", rank, code, reason, is_shown)

    def _send(self, *message: object) -> None:
        _send(self._own, self._lock, message)


def _send(to: socket.socket, lock: threading.RLock, message: object) -> None:
    """Sends the message, if anybody is there to read it."""
    with lock, suppress(OSError):
        to.sendall(json.dumps(message).encode() + b"\n")


def early_launcher(descriptor: int | None, resources: ResourceSpec) -> "EarlyLauncher | None":
    """What has the workers of these nodes, which `autodist run` has started with this process, the chief.

    None: there are none. Those of other nodes are told to end.

    Args:
        descriptor: of a socket, if it is one: a script closes descriptors, and what it starts has others.
        resources: where the chief trains.
    """
    found = None if descriptor is None else _socket(descriptor)
    if found is None:
        return None
    launcher = EarlyLauncher(found)
    if launcher.spec == spec_lines(resources):
        return launcher
    launcher.dismiss()
    return None


def _socket(descriptor: int) -> socket.socket | None:
    """The socket of the descriptor, if `EarlyWorkers` has its other end, and nobody has read from it."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return None
    with suppress(OSError):
        if found.recv(len(_GREETING), socket.MSG_PEEK | socket.MSG_DONTWAIT) == _GREETING:
            found.set_inheritable(False)
            return found
    found.detach()
    return None


class EarlyLauncher:
    """What the chief has of workers that started with it. It implements Launcher: it launches none, it asks for them.

    Attributes:
        spec: the `spec_lines` of the nodes that they were started on.
    """

    def __init__(self, found: socket.socket):
        self._socket, self._lock = found, threading.RLock()
        self._said = found.makefile("r")
        _, self.spec = json.loads(self._said.readline())
        self._registered = threading.Condition()
        self._workers: dict[int, _EarlyWorker] = {}

    def launch(self, rank: int, node: NodeSpec, *, on_exit: ExitReport) -> LaunchedWorker:
        """See Launcher."""
        worker = _EarlyWorker(rank, self, on_exit)
        with self._registered:
            if not self._workers:
                threading.Thread(target=self._listen, name="autodist-early", daemon=True).start()
            self._workers[rank] = worker
            self._registered.notify_all()
        return worker

    def dismiss(self) -> None:
        """None of them is asked for."""
        self.send(_DISMISS)
        self._said.close()
        self._socket.close()

    def send(self, *message: object) -> None:
        """Tells the command something."""
        _send(self._socket, self._lock, message)

    def _listen(self) -> None:
        """Notes how workers have ended. Of one whose command has ended nobody knows: it ends as the chief does."""
        with suppress(OSError):
            for line in self._said:
                _, rank, code, reason, is_shown = json.loads(line)
                with self._registered:
                    self._registered.wait_for(lambda rank=rank: rank in self._workers)
                self._workers[rank].ended(code, reason, is_shown)
        for worker in list(self._workers.values()):
            worker.ended(None, "", False)


class _EarlyWorker:
    """It implements LaunchedWorker."""

    def __init__(self, rank: int, launcher: EarlyLauncher, on_exit: ExitReport):
        self.rank = rank
        self._launcher, self._on_exit = launcher, on_exit
        self._code: int | None = None
        self._has_ended = threading.Event()

    def tell(self, told: Told) -> None:
        """See LaunchedWorker."""
        self._launcher.send(_TELL, self.rank, told.line().decode().rstrip("\n"))

    def wait(self, timeout: float) -> int | None:
        """See LaunchedWorker."""
        return self._code if self._has_ended.wait(timeout) else None

    def terminate(self) -> None:
        """See LaunchedWorker."""
        self._launcher.send(_TERMINATE, self.rank)

    def kill(self) -> None:
        """See LaunchedWorker."""
        self._launcher.send(_KILL, self.rank)

    def ended(self, code: int | None, reason: str, is_shown: bool) -> None:
        """Its process has ended; or nobody knows any more, without a code."""
        if self._has_ended.is_set():
            return
        if code is not None:
            self._on_exit(self.rank, code, reason, is_shown)
        self._code = code or 0
        self._has_ended.set()
