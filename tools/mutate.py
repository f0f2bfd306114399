"""Makes each deliberate fault of tests/mutations.md in a copy of this repository, and checks that its test fails.

Usage: tools/mutate.py [NUMBER ...]    (default: all)
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests/mutations.md"
SECONDS = 300.0

_ENTRY = re.compile(
    r"^## (?P<number>\d+)\. (?P<title>[^\n]+)\n\n`(?P<file>[^`]+)`, caught by `(?P<test>[^`]+)`\n\n"
    r"```diff\n(?P<diff>.*?)```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Mutation:
    """A fault: lines `old` of `file` become `new`, and `test` (arguments of pytest) fails."""

    number: int
    title: str
    file: str
    test: str
    old: str
    new: str

    def make(self, root: Path) -> None:
        """Make the fault in the repository at `root`."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.number}. {self.title}: {self.file} must have these lines once:\n{self.old}")
        path.write_text(text.replace(self.old, self.new))


def mutations() -> Iterator[Mutation]:
    """The faults of the list."""
    for entry in _ENTRY.finditer(LIST.read_text()):
        lines = entry["diff"].splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in "- ")
        new = "".join(line[1:] for line in lines if line[0] in "+ ")
        yield Mutation(int(entry["number"]), entry["title"], entry["file"], entry["test"], old, new)


def is_caught(mutation: Mutation, folder: Path) -> bool:
    """Whether the test passes in a copy of the repository and, with the fault in it, fails."""
    copy = folder / "repository"
    shutil.copytree(
        ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache")
    )
    mutation.make(copy)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *shlex.split(mutation.test)],
        cwd=copy,
        env={"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "3", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    shutil.rmtree(copy)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutation.number}. {mutation.title}: pytest could not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 1


def main() -> None:
    """Make the faults asked for, one at a time."""
    wanted = {int(number) for number in sys.argv[1:]}
    missed = []
    for mutation in mutations():
        if wanted and mutation.number not in wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            caught = is_caught(mutation, Path(folder))
        print(f"{mutation.number:>3}. {'caught' if caught else 'MISSED'}  {mutation.title}", flush=True)
        if not caught:
            missed.append(mutation.number)
    if missed:
        raise SystemExit(f"not caught: {', '.join(map(str, missed))}")


if __name__ == "__main__":
    main()
