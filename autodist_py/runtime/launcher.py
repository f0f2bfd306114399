"""Starting the other workers, and their output. The chief uses it; it knows no coordinator and no TensorFlow.

Today workers are local processes. SSH is to be another Launcher; workers that are already there are none at all.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol

from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec
from autodist_py.settings import COORDINATOR_VARIABLE, RANK_VARIABLE, WORKER_OUTPUT_VARIABLE

_COLORS = (36, 35, 32, 33, 34, 31)
_DRAIN_SECONDS = 2.0
_TERMINATE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker runs: its rank, its node, the coordinator (host:port), and the run's secret."""

    rank: int
    node: NodeSpec
    coordinator: str
    secret: str


class Worker(Protocol):
    """A worker that was started."""

    rank: int

    def wait(self, timeout: float) -> int | None:
        """Its exit code once it has ended and its output is shown; negative: a signal's. None: it still runs."""
        ...

    def terminate(self) -> None:
        """Asks it to end."""
        ...

    def kill(self) -> None:
        """Ends it."""
        ...


class Launcher(Protocol):
    """How workers are started on their nodes."""

    def launch(self, job: Job, *, on_exit: Callable[[int, int], None]) -> Worker:
        """The worker, started; `on_exit(rank, exit code)` is called, in another thread, when its process ends."""
        ...


class LocalLauncher:
    """Workers as processes of this machine, running this process's own command.

    Each is a session of its own: Ctrl-C at a terminal reaches the chief alone, which ends the run with one cause. A
    worker learns of the chief's death by its broken connection; a death signal (PR_SET_PDEATHSIG) would need code
    between fork and exec, which is unsafe beside other threads, and is sent when the starting *thread* ends.
    """

    def __init__(self, output: "LineOutput") -> None:
        self._output = output
        self._command = own_command()

    def launch(self, job: Job, *, on_exit: Callable[[int, int], None]) -> "LocalWorker":
        """See Launcher. The secret goes over standard input, which is then at its end."""
        process = subprocess.Popen(
            self._command,
            env=_environment(os.environ, job),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        worker = LocalWorker(job.rank, process, self._output, on_exit)
        with suppress(BrokenPipeError):
            if process.stdin is not None:
                process.stdin.write(f"{job.secret}\n".encode())
                process.stdin.close()
        return worker


class LocalWorker:
    """One local process. It implements Worker."""

    def __init__(
        self,
        rank: int,
        process: "subprocess.Popen[bytes]",
        output: "LineOutput",
        on_exit: Callable[[int, int], None],
    ) -> None:
        self.rank = rank
        self._process = process
        self._on_exit = on_exit
        name = f"autodist-worker-{rank}"
        self._pump = threading.Thread(target=output.relay, args=(rank, process.stdout), name=name, daemon=True)
        self._watch = threading.Thread(target=self._report_exit, name=name, daemon=True)
        self._pump.start()
        self._watch.start()

    def wait(self, timeout: float) -> int | None:
        """See Worker."""
        self._watch.join(timeout)
        if self._watch.is_alive():
            return None
        return self._process.returncode

    def terminate(self) -> None:
        """See Worker. The process's group is signalled, so what the script started itself ends too."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """See Worker. As with `terminate`, for the group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _report_exit(self) -> None:
        code = self._process.wait()
        self._pump.join(_DRAIN_SECONDS)  # Bounded: a process that the worker left behind may hold the pipe open.
        self._on_exit(self.rank, code)


def stop_workers(workers: Sequence[Worker], *, grace: float) -> None:
    """All have ended: by themselves within `grace` seconds, or else because they were made to."""
    running = _still_running(workers, grace)
    for worker in running:
        worker.terminate()
    for worker in _still_running(running, _TERMINATE_SECONDS):
        worker.kill()
    _still_running(running, _TERMINATE_SECONDS)


def _still_running(workers: Sequence[Worker], seconds: float) -> list[Worker]:
    deadline = time.monotonic() + seconds
    return [worker for worker in workers if worker.wait(max(0.0, deadline - time.monotonic())) is None]


class LineOutput:
    """A file descriptor that several workers write to, in whole lines that begin with `[rank] `.

    On a terminal the rank has a colour. A line that is rewritten by carriage returns (a progress bar) is shown once, in
    its last state.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._colored = os.isatty(descriptor) and "NO_COLOR" not in os.environ
        self._lock = threading.Lock()

    def relay(self, rank: int, source: IO[bytes]) -> None:
        """Shows all that comes from `source`, until it ends."""
        color = _COLORS[rank % len(_COLORS)]
        label = f"\x1b[{color}m[{rank}]\x1b[0m " if self._colored else f"[{rank}] "
        with source:
            for line in source:
                self._write(label.encode() + line.rstrip(b"\r\n").rpartition(b"\r")[2] + b"\n")

    def _write(self, line: bytes) -> None:
        with self._lock, suppress(OSError):  # Whoever read our output may be gone; workers go on.
            while line:
                line = line[os.write(self._descriptor, line) :]


def chief_output(worker_output: int | None) -> LineOutput:
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
        return LineOutput(worker_output)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True, write_through=False)  # `python -u` writes a line in two halves.
    try:
        return LineOutput(sys.stdout.fileno())
    except (OSError, AttributeError, ValueError):  # Replaced by a notebook, or closed.
        return LineOutput(1)


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


def _environment(environment: Mapping[str, str], job: Job) -> dict[str, str]:
    own = {name: value for name, value in environment.items() if name != WORKER_OUTPUT_VARIABLE}
    # Unbuffered: what a worker has printed when it dies is seen.
    return own | {RANK_VARIABLE: str(job.rank), COORDINATOR_VARIABLE: job.coordinator, "PYTHONUNBUFFERED": "1"}
