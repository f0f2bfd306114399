"""`Progress`: the step that the chief is at, for whoever started it: a process that is killed can say nothing itself.

`autodist run` makes a small file in memory and gives the chief its descriptor. The chief maps it, so a step costs one
write to memory, and it is there when the process has ended, however it did. Steps that graphs begin are written when
somebody asks for the step, as heartbeats do.
"""

import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress

_MARK = b"autodist progress\n"
_STEP = struct.Struct("<q")
_BYTES = len(_MARK) + _STEP.size


class Progress:
    """The steps of this process's script, and where the chief notes them."""

    def __init__(self, descriptor: int | None) -> None:
        """With no descriptor, or that of another file, nothing is noted: scripts close and inherit descriptors."""
        self._noted = 0
        self._counters: list[Callable[[], int]] = []
        self._memory = None if descriptor is None else _mapped(descriptor)

    @property
    def step(self) -> int:
        """The last step begun, 0 before the first."""
        if not self._counters:
            return self._noted
        step = self._noted + self._counted
        self._write(step)
        return step

    def note(self, step: int) -> None:
        """The step has begun."""
        self._noted = step - self._counted
        self._write(step)

    def add(self, counter: Callable[[], int]) -> None:
        """The steps that `counter` tells are begun, too, by graphs. It is asked from any thread, and begins at 0."""
        self._counters.append(counter)

    @property
    def _counted(self) -> int:
        return sum(counter() for counter in self._counters)

    def _write(self, step: int) -> None:
        if self._memory is not None:
            _STEP.pack_into(self._memory, len(_MARK), step)


def new_progress() -> int:
    """The descriptor of a new file for `Progress`, at step 0."""
    descriptor = os.memfd_create("autodist-progress")
    os.write(descriptor, _MARK + _STEP.pack(0))
    return descriptor


def step_of(descriptor: int) -> int:
    """The last step that was noted, 0 before the first."""
    (step,) = _STEP.unpack(os.pread(descriptor, _STEP.size, len(_MARK)))
    return int(step)


def _mapped(descriptor: int) -> mmap.mmap | None:
    with suppress(OSError, ValueError):
        if os.fstat(descriptor).st_size == _BYTES and os.pread(descriptor, len(_MARK), 0) == _MARK:
            return mmap.mmap(descriptor, _BYTES)
    return None
