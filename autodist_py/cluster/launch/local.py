"""Starting the other workers, and their output, for the chief or `autodist run`. It knows no coordinator.

It owns what every launcher needs, and the one of local processes; `ssh.py` has that of other hosts. Workers
that are already there need none.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Protocol, cast

from autodist_py.cluster.launch.brief import Brief
from autodist_py.cluster.launch.told import Told
from autodist_py.config.settings import (
    COORDINATOR_IS_TOLD,
    COORDINATOR_VARIABLE,
    EARLY_WORKERS_VARIABLE,
    PROGRESS_VARIABLE,
    RANK_VARIABLE,
    WORKER_OUTPUT_VARIABLE,
)
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec

_NOT_PASSED = (WORKER_OUTPUT_VARIABLE, PROGRESS_VARIABLE, EARLY_WORKERS_VARIABLE)
_COLORS = (36, 35, 32, 33, 34, 31)
_DRAIN_SECONDS = 2.0
_HELD_LINES = 10_000
TERMINATE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Command:
    """What every worker runs: a command line, in a folder, with these environment variables beside its own."""

    line: Sequence[str]
    folder: str
    environment: Mapping[str, str]

    @classmethod
    def of_process(cls) -> "Command":
        """This process's own command.

        Raises:
            ClusterError: it names no program that another process could run.
        """
        return cls(own_command(), own_folder(), os.environ)


ExitReport = Callable[[int, int, str, bool], None]
"""What is told of a worker's end: its rank, its exit code, the reason, and whether any line of its output was shown.

The reason is given where the launcher knows more than the exit code. An exit code that is negative is the number of
the signal that ended it.
"""


class LaunchedWorker(Protocol):
    """A worker that was started."""

    rank: int

    def tell(self, told: Told) -> None:
        """Tells it what its `AutoDist(...)` waits for; once, and nothing if it has ended."""
        ...

    def wait(self, timeout: float) -> int | None:
        """Its exit code once it has ended and its output is shown. None: it still runs."""
        ...

    def terminate(self) -> None:
        """Asks it to end."""
        ...

    def kill(self) -> None:
        """Ends it."""
        ...


class Launcher(Protocol):
    """How workers are started on their nodes."""

    def launch(self, rank: int, node: NodeSpec, *, on_exit: ExitReport) -> LaunchedWorker:
        """The worker of that rank, started; `on_exit` is called, in another thread, when its process has ended."""
        ...


class LocalLauncher:
    """Workers as processes of this machine.

    Each is a session of its own: Ctrl-C at a terminal reaches the chief alone, which ends the run with one cause. A
    worker learns of the chief's death by its broken connection; a death signal (PR_SET_PDEATHSIG) would need code
    between fork and exec, which is unsafe beside other threads, and is sent when the starting *thread* ends.
    """

    def __init__(self, command: Command, output: "LineOutput", *, last_words_descriptor: int | None = None) -> None:
        """Show what workers print; to the descriptor they may write when the chief is lost."""
        self._command, self._output = command, output
        self._last_words_descriptor = last_words_descriptor

    def launch(self, rank: int, node: NodeSpec, *, on_exit: ExitReport) -> "LocalWorker":
        """See Launcher. Standard input is at its end after what the worker is told."""
        process = subprocess.Popen(
            self._command.line,
            cwd=self._command.folder,
            env=_environment(self._command.environment, rank, self._last_words_descriptor),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=() if self._last_words_descriptor is None else (self._last_words_descriptor,),
        )
        return LocalWorker(rank, process, self._output, on_exit)


class LocalWorker:
    """One local process. It implements LaunchedWorker."""

    def __init__(
        self, rank: int, process: "subprocess.Popen[bytes]", output: "LineOutput", on_exit: ExitReport
    ) -> None:
        self.rank = rank
        self._process = process
        self._watched = WatchedProcess(
            process,
            name=f"autodist-worker-{rank}",
            readers=[lambda: output.relay(rank, cast(IO[bytes], process.stdout))],
            on_exit=lambda code: self._report(code, output, on_exit),
        )

    def _report(self, code: int, output: "LineOutput", on_exit: ExitReport) -> None:
        on_exit(self.rank, code, "", output.ended(self.rank, code))

    def tell(self, told: Told) -> None:
        """See LaunchedWorker."""
        with suppress(BrokenPipeError), cast(IO[bytes], self._process.stdin) as stdin:
            stdin.write(told.line())

    def wait(self, timeout: float) -> int | None:
        """See LaunchedWorker."""
        return self._watched.wait(timeout)

    def terminate(self) -> None:
        """See LaunchedWorker. The process's group is signalled, so what the script started itself ends too."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """See LaunchedWorker. As with `terminate`, for the group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


class WatchedProcess:
    """A process that is waited for while `readers` read its pipes, a thread each; then `on_exit` gets its exit code."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        *,
        name: str,
        readers: Sequence[Callable[[], None]],
        on_exit: Callable[[int], None],
    ) -> None:
        self._process = process
        self._on_exit = on_exit
        self._readers = [threading.Thread(target=reader, name=name, daemon=True) for reader in readers]
        self._watch = threading.Thread(target=self._report_exit, name=name, daemon=True)
        for thread in (*self._readers, self._watch):
            thread.start()

    def wait(self, timeout: float) -> int | None:
        """The exit code once the process has ended and its output is read. None: it still runs."""
        self._watch.join(timeout)
        return None if self._watch.is_alive() else self._process.returncode

    def _report_exit(self) -> None:
        code = self._process.wait()
        deadline = time.monotonic() + _DRAIN_SECONDS
        for reader in self._readers:  # Bounded: a process that the worker left behind may hold a pipe open.
            reader.join(max(0.0, deadline - time.monotonic()))
        self._on_exit(code)


def stop_workers(workers: Sequence[LaunchedWorker], *, grace: float) -> None:
    """All have ended: by themselves within `grace` seconds, or else because they were made to."""
    running = still_running(workers, grace)
    for worker in running:
        worker.terminate()
    for worker in still_running(running, TERMINATE_SECONDS):
        worker.kill()
    still_running(running, TERMINATE_SECONDS)


def still_running(workers: Sequence[LaunchedWorker], seconds: float) -> list[LaunchedWorker]:
    """The workers whose processes have not ended within so many seconds, all of them together."""
    deadline = time.monotonic() + seconds
    return [worker for worker in workers if worker.wait(max(0.0, deadline - time.monotonic())) is None]


@dataclass(slots=True)
class _Held:
    """What a worker that is held has written: how many lines, and the last of them."""

    number: int = 0
    lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=_HELD_LINES))


class LineOutput:
    """A file descriptor that several workers write to, in whole lines that begin with `[rank] `.

    On a terminal the rank has a colour. A line that is rewritten by carriage returns (a progress bar) is shown once, in
    its last state. If it is `brief`, only what went wrong is shown. What a worker writes that is held is shown when it
    is released.
    """

    def __init__(self, descriptor: int, *, brief: bool = False) -> None:
        self._descriptor = descriptor
        self._briefs: defaultdict[int, Brief] | None = defaultdict(Brief) if brief else None
        self._colored = os.isatty(descriptor) and "NO_COLOR" not in os.environ
        self._lock = threading.RLock()
        self._shown: set[int] = set()
        """The ranks of which a line was shown."""
        self._held: dict[int, _Held] = {}

    def hold(self, rank: int) -> None:
        """The worker's next lines are kept, the last ones where they are very many."""
        self._held[rank] = _Held()

    def release(self, rank: int) -> None:
        """What was kept is shown, and the worker's next lines as they come."""
        with self._lock:
            held = self._held.pop(rank, _Held())
            if left_out := held.number - len(held.lines):
                self._show(rank, f"... {left_out} lines that it printed before are left out".encode())
            for line in held.lines:
                self.show(rank, line)

    def close(self) -> None:
        """The descriptor is closed; nothing is shown any more."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        with suppress(OSError):
            os.close(descriptor)

    def relay(self, rank: int, source: IO[bytes]) -> None:
        """Shows all that comes from `source`, until it ends."""
        with source:
            for line in source:
                self.show(rank, line)

    def show(self, rank: int, line: bytes) -> None:
        """Shows one line, if it is to be shown."""
        with self._lock:
            if rank in self._held:
                self._held[rank].lines.append(line)
                self._held[rank].number += 1
                return
            text = line.rstrip(b"\r\n").rpartition(b"\r")[2]
            if self._briefs is None or self._briefs[rank].shows(text.decode(errors="replace")):
                self._show(rank, text)

    def ended(self, rank: int, exit_code: int) -> bool:
        """The worker has ended: its last lines are shown if it failed without a word. Returns whether any line was.

        Of one that is held nothing is shown, and nothing noted.
        """
        with self._lock:
            if rank in self._held:
                return False
            brief = None if self._briefs is None else self._briefs[rank]
            if brief is not None and exit_code and not brief.is_open:
                while brief.hidden:
                    self._show(rank, brief.hidden.popleft().encode())
            return rank in self._shown

    def _show(self, rank: int, text: bytes) -> None:
        self._shown.add(rank)
        color = _COLORS[rank % len(_COLORS)]
        label = f"\x1b[{color}m[{rank}]\x1b[0m " if self._colored else f"[{rank}] "
        self._write(label.encode() + text + b"\n")

    def _write(self, line: bytes) -> None:
        with self._lock, suppress(OSError):  # Whoever read our output may be gone; workers go on.
            while line:
                line = line[os.write(self._descriptor, line) :]


def chief_output(worker_output: int | None, *, brief: bool = False) -> LineOutput:
    """Where the other workers' lines go: the descriptor given, or standard output.

    The chief's own standard output is then written line by line, so that its lines stay whole among theirs.
    """
    if worker_output is not None:
        try:
            os.fstat(worker_output)
        except OSError as error:
            raise ClusterError(
                f"{WORKER_OUTPUT_VARIABLE} is an open file descriptor. Received: {worker_output}, which is not open. "
                "Unset it; `autodist run` sets it."
            ) from error
        return LineOutput(worker_output, brief=brief)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True, write_through=False)  # `python -u` writes a line in two halves.
    try:
        return LineOutput(sys.stdout.fileno(), brief=brief)
    except (OSError, AttributeError, ValueError):  # Replaced by a notebook, or closed.
        return LineOutput(1, brief=brief)


def own_command() -> list[str]:
    """The command line that started this process, options of Python included.

    Raises:
        ClusterError: it names no program that another process could run.
    """
    options = sys.orig_argv[1:]
    main = sys.modules["__main__"]
    if "-c" not in options and getattr(main, "__file__", None) is None:
        raise ClusterError(
            "every worker runs the same script, so a run of several workers starts from one: `python train.py`. "
            f"Received: {' '.join(sys.orig_argv)!r}, an interactive session. Save the code as a file and run that."
        )
    return [sys.executable, *options]


def own_folder() -> str:
    """Where the command line that started this process means the same again, also when the script has left it since.

    That is the folder from which a relative path leads to the script. For a script that was named by an absolute path,
    or as a module, it is not known, and this is the working folder.
    """
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    for option in sys.orig_argv[1:]:
        if option == file:
            break  # What follows are the script's own arguments.
        if not os.path.isabs(option) and file.endswith(f"{os.sep}{option}"):
            return file.removesuffix(option)
    return os.getcwd()


def own_variables(rank: int) -> dict[str, str]:
    """The environment variables that make a process this worker."""
    # Unbuffered: what a worker has printed when it dies is seen.
    return {RANK_VARIABLE: str(rank), COORDINATOR_VARIABLE: COORDINATOR_IS_TOLD, "PYTHONUNBUFFERED": "1"}


def _environment(environment: Mapping[str, str], rank: int, last_words_descriptor: int | None) -> dict[str, str]:
    own = {name: value for name, value in environment.items() if name not in _NOT_PASSED} | own_variables(rank)
    return own if last_words_descriptor is None else own | {WORKER_OUTPUT_VARIABLE: str(last_words_descriptor)}
