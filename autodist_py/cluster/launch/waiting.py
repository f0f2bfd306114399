"""`Waiting`: a worker's process that was started before the chief has a job for it, and imports what the chief imports.

What it does until then is `at_start/sitecustomize.py`'s.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from autodist_py.cluster.launch import at_start

_PATH_VARIABLE = "PYTHONPATH"

Process = subprocess.Popen[bytes]


@dataclass(slots=True)
class Waiting:
    """A process that leads a group of its own.

    Attributes:
        process: the worker's, or that of its ssh client.
        environment_now: what its environment would be if it were started now.
    """

    process: Process
    environment_now: Callable[[], Mapping[str, str]]
    _environment: dict[str, str] = field(init=False)
    """What it has been told so far."""

    def __post_init__(self) -> None:
        self._environment = dict(self.environment_now())

    def imports(self, module: str) -> None:
        """The chief is about to import the module, in the environment that it has now."""
        tell(self.process, self._line(self.environment_now(), module))

    def begins(self, environment: Mapping[str, str], told: bytes) -> None:
        """Its script begins, in that environment; `told` is the rest of what it reads (see `told.py`)."""
        tell(self.process, self._line(environment, None) + told)

    def _line(self, environment: Mapping[str, str], module: str | None) -> bytes:
        changes: dict[str, str | None] = dict.fromkeys(self._environment.keys() - environment.keys())
        changes |= {name: value for name, value in environment.items() if self._environment.get(name) != value}
        self._environment = dict(environment)
        return f"{json.dumps({'changes': changes, 'imports': module})}\n".encode()

    def end(self) -> None:
        """It is not needed."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def is_told_to_wait(line: bytes) -> bool:
    """Whether more comes before the line that a worker is told last."""
    return line.startswith(b"{")


def tell(process: Process, text: bytes) -> None:
    """Writes to its standard input, if it still reads it."""
    descriptor = cast(IO[bytes], process.stdin).fileno()
    with suppress(BrokenPipeError):
        while text:
            text = text[os.write(descriptor, text) :]


def with_start(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Python runs `at_start/sitecustomize.py` first, which takes that back."""
    folders = [str(Path(at_start.__file__).resolve().parent), *filter(None, [environment.get(_PATH_VARIABLE)])]
    return {**environment, _PATH_VARIABLE: os.pathsep.join(folders)}
