"""An observer of the compiler that writes the program after each pass to a folder (`AUTODIST_DUMP_DIR`)."""

from dataclasses import dataclass
from pathlib import Path

from autodist_py.kernel.printer import format_program
from autodist_py.kernel.program import Program


@dataclass(frozen=True, slots=True)
class Dump:
    """Writes `<directory>/<name>/worker-<rank>/<fingerprint>-03-synchronize.txt` and so on.

    Attributes:
        directory: where to write.
        name: what the dump is of.
    """

    directory: Path
    name: str

    def __call__(self, position: int, name: str, program: Program) -> None:
        """Write the program as it stands after the `position`-th pass."""
        base = self.directory / self.name / f"worker-{program.place.worker}"
        base.mkdir(parents=True, exist_ok=True)
        (base / f"{program.item.fingerprint[:12]}-{position:02}-{name}.txt").write_text(format_program(program) + "\n")
