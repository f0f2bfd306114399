"""An observer of the compiler that writes the program after each pass to a folder (`AUTODIST_DUMP_DIR`)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autodist_py.kernel.program import Program
from autodist_py.kernel.program_text import format_program
from autodist_py.proto.wire import write_atomically

_log = logging.getLogger(__name__)


def dumps(directory: Path | None, name: str) -> Sequence["Dump"]:
    """What observes the programs of that name, where `directory`, if there is one, gets their text."""
    return () if directory is None else (Dump(directory, name),)


@dataclass(frozen=True, slots=True)
class Dump:
    """Writes `<directory>/<name>/worker-<rank>/<fingerprint>-04-replicate.txt` and so on.

    Attributes:
        directory: where to write.
        name: what the dump is of.
    """

    directory: Path
    name: str

    def __call__(self, position: int, name: str, program: Program) -> None:
        """Write the program as it stands after the `position`-th pass; a disk that is full ends no training."""
        base = self.directory / self.name / f"worker-{program.topology.worker}"
        path = base / f"{program.item.fingerprint[:12]}-{position:02}-{name}.txt"
        content = (format_program(program, unfolded=True) + "\n").encode()
        try:
            base.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            _log.warning("the program after pass '%s' is not in %s: %d bytes, %s", name, path, len(content), error)
