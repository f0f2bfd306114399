"""`Progress`: the step that the chief is at, for whoever started it: a process that is killed can say nothing itself.

`autodist run` makes a small file in memory and gives the chief its descriptor. The chief maps it, so a step costs one
write to memory, and it is there when the process has ended, however it did.
"""

import mmap
import os
import struct
from contextlib import suppress

_MARK = b"autodist progress\n"
_STEP = struct.Struct("<q")
_BYTES = len(_MARK) + _STEP.size


class Progress:
    """The steps of this process's script, and where the chief notes them.

    Attributes:
        step: the last step begun, 0 before the first.
    """

    def __init__(self, descriptor: int | None) -> None:
        """With no descriptor, or that of another file, nothing is noted: scripts close and inherit descriptors."""
        self.step = 0
        self._memory = None if descriptor is None else _mapped(descriptor)

    def note(self, step: int) -> None:
        """The step has begun."""
        self.step = step
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
