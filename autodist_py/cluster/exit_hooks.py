"""How a script ends, as seen from inside its process: by an exception, by a signal, or at its last line.

Python tells these in four places (sys.excepthook, threading.excepthook, signals, atexit); `observe_script` joins them.
What else ends with the process, and when, is `exit_stack.py`'s.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Protocol

from autodist_py.cluster.exit_stack import Ending, at_exit

_FUNCTIONS = re.compile(r"\{\{function_node [^}]*\}\}|\[Op:[^\]]*\]")
"""How TensorFlow says in a message which function of a graph it ran."""


_handled: list[signal.Signals] = []
"""The signals for which `_end_script` has raised SystemExit."""


class ScriptObserver(Protocol):
    """Who is told. A process that the script forks is not observed."""

    def raised(self, error: BaseException) -> bool:
        """The script, or a thread of it, ends with `error`. Whether its traceback is worth showing."""
        ...

    def signalled(self, number: signal.Signals) -> None:
        """A signal that ends the script has arrived. Called in another thread, even while the script is in C code."""
        ...

    def ended(self) -> None:
        """The script is over, well or not, and the interpreter still whole. The last of the calls."""
        ...


class TensorFlowThread(threading.Thread):
    """A daemon thread that calls TensorFlow, and may be in its code when Python ends.

    Python then ends the thread as it comes back, by unwinding it: TensorFlow's code does not bear that, and the process
    ends with "terminate called" instead.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def may_be_in_tensorflow() -> bool:
    """Whether such a thread runs."""
    return any(isinstance(thread, TensorFlowThread) for thread in threading.enumerate())


def observe_script(observer: ScriptObserver) -> None:
    """From now on `observer` is told how this process's script ends."""
    _observe_exceptions(observer, os.getpid())
    if threading.current_thread() is threading.main_thread():
        _observe_signals(observer)


def is_failing() -> bool:
    """Whether an error is on its way out of the script, or has ended it, as far as Python tells."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def one_line(error: BaseException, *, most: int = 300) -> str:
    """The type of an error and its message, on one line of at most `most` characters: else without its middle.

    Which function of a graph an error came from is left out: those names are long, and nobody chose them.
    """
    message = " ".join(_FUNCTIONS.sub("", str(error)).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    part = (most - 5) // 2  # TensorFlow's errors from within a step say last what went wrong.
    return text if len(text) <= most else f"{text[:part]} ... {text[-part:]}"


def _observe_exceptions(observer: ScriptObserver, owner: int) -> None:
    show, show_of_thread = sys.excepthook, threading.excepthook
    told: list[BaseException] = []

    def is_shown(error: BaseException) -> bool:
        if os.getpid() != owner:
            return True
        for number in _handled:  # C code makes another error of what a handler raises within it.
            observer.signalled(number)
        return observer.raised(error)

    def raised(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        told.append(error)
        if is_shown(error):
            show(kind, error, traceback)

    def raised_in_thread(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is None or is_shown(error):
            show_of_thread(arguments)

    def ended() -> None:
        last = getattr(sys, "last_value", None)  # Set before any hook runs, also one that replaced ours.
        if last is not None and last not in told:
            is_shown(last)
        observer.ended()

    sys.excepthook = raised
    threading.excepthook = raised_in_thread
    at_exit(Ending.SCRIPT, ended)


def _observe_signals(observer: ScriptObserver) -> None:
    """SIGINT and SIGTERM, where the script has no handler of its own for them.

    Python runs a handler only between two instructions of the main thread, which may wait in a collective for ever; so
    a thread listens to the file descriptor that Python writes a signal's number to as it arrives.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_script)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if previous != -1:  # An event loop has it: then signals are seen between instructions only, by their exceptions.
        signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
        os.close(read_end)
        os.close(write_end)
        return
    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _end_script}

    def listen() -> None:
        while True:
            for number in os.read(read_end, 64):
                if number in ours and signal.getsignal(number) is ours[signal.Signals(number)]:
                    observer.signalled(signal.Signals(number))

    threading.Thread(target=listen, name="autodist-signals", daemon=True).start()


def _end_script(number: int, _: FrameType | None) -> None:
    _handled.append(signal.Signals(number))
    raise SystemExit(128 + number)
