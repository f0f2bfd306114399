"""The chief's process in the foreground: its output is relayed, stop signals are forwarded, its exit code is returned.

The other workers are started with it (`early.py`), or by it; their output comes over a pipe. Where somebody else kills
the chief, as the kernel does for lack of memory, nobody but us can say so.
"""

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from autodist_py.cluster.launch.console import LineSplitter, Screen
from autodist_py.cluster.launch.early import EarlyWorkers
from autodist_py.cluster.launch.oom import killed_for_memory
from autodist_py.cluster.progress import new_progress, step_of
from autodist_py.config.settings import EARLY_WORKERS_VARIABLE, PROGRESS_VARIABLE, WORKER_OUTPUT_VARIABLE
from autodist_py.proto.text import count

GRACE_SECONDS = 15.0
"""How long the chief may take to end after a stop signal, before it is killed."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.1
_LAST_WORDS_SECONDS = 12.0
"""How long other workers may take to end, and to say why, when the chief was killed, or left them."""

_STOP_SECONDS = 6.0
"""How long those that have started with the chief, and do not end by themselves, may take to be ended, and be read."""

_CHUNK_BYTES = 1 << 16
_UNUSED = "autodist: the script has ended without an AutoDist(...) for its {}, so they have not trained together"


@dataclass(frozen=True, slots=True)
class _Source:
    """One pipe and where its lines go; `rank` None: the lines are labelled already."""

    splitter: LineSplitter
    screen: Screen
    rank: int | None


def run_chief(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: Screen,
    errors: Screen,
    start_others: Callable[[int], EarlyWorkers | None] = lambda output: None,
) -> int:
    """The exit code of `command`, 128 + n when signal n ended it.

    The command's input is empty. It gets file descriptors for the other workers' labelled lines and for its step; their
    numbers are in its environment. It is a process group of its own, so that Ctrl-C at a terminal reaches it once,
    through us. If a signal ends it that we did not send, that is said, after what other workers say.

    Args:
        command: the command line.
        environment: the chief's.
        output: where lines go.
        errors: where lines of standard error go.
        start_others: starts the workers that start with the chief, if any; their lines go to a descriptor.
    """
    begin, killed_before = time.monotonic(), killed_for_memory()
    read_end, write_end = os.pipe()
    with (
        _stop_signals() as signals,
        _others(start_others, write_end) as others,  # Closed last: what they print waits for nobody then.
        open(read_end, "rb", buffering=0) as worker_lines,
        open(new_progress(), "rb", buffering=0) as progress,
    ):
        descriptors = {WORKER_OUTPUT_VARIABLE: write_end, PROGRESS_VARIABLE: progress.fileno()}
        if others is not None:
            descriptors[EARLY_WORKERS_VARIABLE] = others.descriptor
        try:
            process = subprocess.Popen(
                command,
                env={**environment, **{name: str(descriptor) for name, descriptor in descriptors.items()}},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=list(descriptors.values()),
                process_group=0,
            )
        finally:
            if others is None:
                os.close(write_end)
        if others is not None:
            others.handed_over()
        with process, _ended(process), selectors.DefaultSelector() as selector:
            _register(selector, process.stdout, _Source(LineSplitter(), output, 0))
            _register(selector, process.stderr, _Source(LineSplitter(), errors, 0))
            _register(selector, worker_lines, _Source(LineSplitter(), output, None))
            sent, ended_at = _relay_until_exit(process, selector, signals, others)
            said = ""
            if process.returncode < 0 and -process.returncode not in sent:
                seconds, step = ended_at - begin, step_of(progress.fileno())
                said = _end_of_chief(process, seconds, step, killed_before)
            mine = None if others is None or others.are_dismissed else others
            if mine is not None:
                mine.chief_ended(_LAST_WORDS_SECONDS, shows_failed=process.returncode <= 0 or bool(sent))
            if said or mine is not None:
                _show_last_words(selector, worker_lines, signals, mine)
            _show_unfinished(_registered(selector))
            if said and -process.returncode not in signals:  # Else it was sent to both of us, and the chief was first.
                errors.show(said)
            if others is not None and not process.returncode and not others.is_asked_for:
                errors.show(_UNUSED.format(count(len(others) + 1, "worker")))
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def _register(selector: selectors.BaseSelector, pipe: IO[bytes] | None, source: _Source) -> None:
    if pipe is not None:
        selector.register(pipe, selectors.EVENT_READ, source)


def _relay_until_exit(
    process: subprocess.Popen[bytes],
    selector: selectors.BaseSelector,
    signals: deque[int],
    others: EarlyWorkers | None,
) -> tuple[set[int], float]:
    """Relay until the process has exited and its pipes are closed or silent (a process it left may hold them open).

    A stop signal that comes when it has exited ends that, and stays in `signals`. The pipe of `others`, which go on, is
    none of the process's.

    Returns:
        The signals that we have sent it, and those that came to us when it had exited; and when it had.
    """
    deadline = ended_at = float("inf")
    sent: set[int] = set()
    while True:
        exited = process.poll() is not None
        ended_at = min(ended_at, time.monotonic()) if exited else ended_at
        is_over = exited and bool(signals)
        ready = selector.select(_POLL_SECONDS if selector.get_map() and not is_over else 0)
        for key, _ in ready:
            _relay_chunk(selector, key)
        go_on = others is not None and not others.are_dismissed
        is_silent = not any(key.data.rank is not None or not go_on for key, _ in ready)
        if is_over or (exited and is_silent and not signals):
            break
        if not selector.get_map():
            time.sleep(_POLL_SECONDS)
        while signals and not exited:
            sent.add(signals[0])
            process.send_signal(signals.popleft())
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            sent.add(signal.SIGKILL)
            process.kill()
    _show_unfinished(key for key in _registered(selector) if key.data.rank is not None)
    return sent.union(signals), ended_at


def _show_last_words(
    selector: selectors.BaseSelector, worker_lines: IO[bytes], signals: deque[int], others: EarlyWorkers | None
) -> None:
    """What other workers say before they end; a stop signal ends the wait.

    Those that the chief has started hold the pipe open, those that started with it are known.
    """
    deadline = time.monotonic() + _LAST_WORDS_SECONDS + (0.0 if others is None else _STOP_SECONDS)
    is_over = False
    while not is_over and worker_lines in {key.fileobj for key in _registered(selector)}:
        are_over = others is not None and others.are_over
        is_late = time.monotonic() > deadline
        ready = selector.select(0 if are_over or signals or is_late else _POLL_SECONDS)
        for key, _ in ready:
            _relay_chunk(selector, key)
        is_over = bool(signals) or is_late or (are_over and not ready)


@contextmanager
def _others(start: Callable[[int], EarlyWorkers | None], output: int) -> Iterator[EarlyWorkers | None]:
    """The workers that start with the chief; none is left in the end."""
    others = start(output)
    try:
        yield others
    finally:
        if others is not None:
            others.close()


def _show_unfinished(keys: Iterable[selectors.SelectorKey]) -> None:
    for key in keys:
        key.data.screen.close(key.data.splitter, rank=key.data.rank)


def _registered(selector: selectors.BaseSelector) -> list[selectors.SelectorKey]:
    return list(selector.get_map().values())


def _end_of_chief(process: subprocess.Popen[bytes], seconds: float, step: int, killed_before: int | None) -> str:
    """Which signal has ended the chief, when, at which step, and what the system says of a lack of memory."""
    number = -process.returncode
    name = signal.Signals(number).name if number in list(signal.Signals) else "a real-time signal"
    said = f"worker 0, the chief (process {process.pid}), was ended by signal {number} ({name})"
    said += f" at {time.strftime('%H:%M:%S')}, {seconds:.1f} s after its start, "
    said += f"at step {step}" if step else "before its first step"
    if number != signal.SIGKILL:
        return f"autodist: {said}"
    killed = killed_for_memory()
    if killed is None or killed_before is None:
        memory = "whether the kernel did it for lack of memory is not seen from here; `dmesg` tells"
    elif killed > killed_before:
        processes = "1 process" if killed - killed_before == 1 else f"{killed - killed_before} processes"
        memory = f"since its start the kernel has killed {processes} here for lack of memory (oom_kill)"
    else:
        memory = "since its start the kernel counts no end for lack of memory in its control group (oom_kill)"
    return f"autodist: {said}; {memory}"


def _relay_chunk(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    source: _Source = key.data
    chunk = os.read(key.fd, _CHUNK_BYTES)
    if chunk:
        source.screen.write(source.splitter, chunk, rank=source.rank)
        return
    source.screen.close(source.splitter, rank=source.rank)
    selector.unregister(key.fileobj)


@contextmanager
def _stop_signals() -> Iterator[deque[int]]:
    """The stop signals received inside the context, instead of their effect; what was ignored stays ignored."""
    received: deque[int] = deque()
    caught = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda number, _: received.append(number)) for number in caught}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the process on the way out, where an error of ours (such as closed output) comes before its end."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
