"""Workers' output on the launcher's own streams: line by line, each with the rank it came from.

Owns how lines look. It starts no process and reads no pipe (`foreground.py` does).
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

_RANK_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
_LABELLED = re.compile(r"\[(\d+)\] ?(.*)", re.DOTALL)
_CLEAR_LINE = "\r\x1b[2K"


@dataclass(slots=True)
class LineSplitter:
    """The bytes of one pipe, as lines.

    A carriage return begins the line anew, as on a terminal: of a progress bar only its last state is kept.
    """

    _unfinished: bytes = b""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` finishes."""
        *lines, unfinished = (self._unfinished + chunk).split(b"\n")
        self._unfinished = _last_state(unfinished) + (b"\r" if unfinished.endswith(b"\r") else b"")
        return [_last_state(line).decode(errors="replace") for line in lines]

    @property
    def unfinished(self) -> str:
        """The line that no newline has ended yet."""
        return _last_state(self._unfinished).decode(errors="replace")


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


@dataclass(slots=True)
class Screen:
    """One output stream. On a terminal ranks have colours, and the chief's unfinished line (a progress bar) is last.

    Lines that it `hides` are not shown.
    """

    console: Console
    hides: Callable[[str], bool] = lambda line: False
    _tail: str = field(default="", init=False)
    _tail_owner: object = field(default=None, init=False)

    def write(self, splitter: LineSplitter, chunk: bytes, *, rank: int | None) -> None:
        """Show what `chunk` adds to the pipe of `splitter`; lines of `rank` None carry their label already."""
        with self._above_tail():
            for line in splitter.feed(chunk):
                if not self.hides(line):
                    self._show_line(line, rank)
            if rank is not None and (splitter.unfinished or self._tail_owner is splitter):
                self._tail, self._tail_owner = splitter.unfinished, splitter

    def show(self, line: str) -> None:
        """Show a line of ours, which is of no worker."""
        with self._above_tail():
            self._show_line(line, None)

    def close(self, splitter: LineSplitter, *, rank: int | None) -> None:
        """Show the pipe's last line, if no newline ended it."""
        if splitter.unfinished:
            self.write(splitter, b"\n", rank=rank)

    @contextmanager
    def _above_tail(self) -> Iterator[None]:
        """What is shown inside comes above the chief's unfinished line."""
        self._clear_tail()
        yield
        self._draw_tail()
        self.console.file.flush()

    def _show_line(self, line: str, rank: int | None) -> None:
        labelled = _LABELLED.fullmatch(line) if rank is None else None
        if labelled:
            rank, line = int(labelled[1]), labelled[2]
        if not self.console.is_terminal:
            self.console.file.write(line + "\n" if rank is None else f"[{rank}] {line}\n")
            return
        self.console.print(_label(rank), Text.from_ansi(line), sep="", soft_wrap=True, highlight=False)

    def _clear_tail(self) -> None:
        if self._tail and self.console.file.isatty():
            self.console.file.write(_CLEAR_LINE)

    def _draw_tail(self) -> None:
        if self._tail and self.console.file.isatty():
            shown = Text.assemble(_label(0), Text.from_ansi(self._tail))
            shown.truncate(self.console.width - 1)
            self.console.print(shown, end="", soft_wrap=True, highlight=False)


def _label(rank: int | None) -> Text:
    return Text() if rank is None else Text(f"[{rank}] ", _RANK_STYLES[rank % len(_RANK_STYLES)])


def screens(new_filter: Callable[[], Callable[[str], bool]]) -> tuple[Screen, Screen]:
    """Screens for standard output and standard error, each with a new filter; one when both are the terminal."""
    output = Screen(Console(), new_filter())
    if sys.stdout.isatty() and sys.stderr.isatty():
        return output, output
    return Screen(Console()), Screen(Console(stderr=True), new_filter())
