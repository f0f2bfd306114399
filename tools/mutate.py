"""Makes each deliberate fault of tests/mutations.md in a copy of this repository, and checks that its test fails.

The test must pass without the fault, and fail with it: what cannot be collected or set up, or does not end, shows
nothing.

Usage: tools/mutate.py [NUMBER ...]    (default: all)
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests/mutations.md"
SECONDS = 280.0
"""For one run of a test: less than pytest's own limit, by which a test that hangs would count as one that fails."""

_ENTRY = re.compile(
    r"^## (?P<number>\d+)\. (?P<title>[^\n]+)\n\n`(?P<file>[^`]+)`, caught by `(?P<test>[^`]+)`\n\n"
    r"```diff\n(?P<diff>.*?)```",
    re.MULTILINE | re.DOTALL,
)
_TEXT_LINES = 15


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


class Verdict(Enum):
    """What a run of tests says."""

    PASSES = "passes"
    FAILS = "fails"
    IS_NOT_RUN = "cannot be run"
    DOES_NOT_END = f"does not end in {SECONDS:.0f} s"


@dataclass(frozen=True)
class Run:
    """What came of running a test, and pytest's last lines."""

    verdict: Verdict
    text: str


@dataclass
class Bench:
    """Copies of a repository, in which tests are run.

    Attributes:
        root: the repository.
        seconds: how long a run may take.
        sound: what tests say of the repository as it is, by their arguments.
    """

    root: Path
    seconds: float = SECONDS
    sound: dict[str, Run] = field(default_factory=dict)

    def objection(self, mutation: Mutation) -> str:
        """Why it is not shown that the test catches the fault; "": it does."""
        if mutation.test not in self.sound:
            self.sound[mutation.test] = self._run(mutation.test, None)
        sound = self.sound[mutation.test]
        if sound.verdict is not Verdict.PASSES:
            return f"without the fault the test {sound.verdict.value}:\n{sound.text}"
        faulty = self._run(mutation.test, mutation)
        if faulty.verdict is Verdict.FAILS:
            return ""
        details = "" if faulty.verdict is Verdict.PASSES else f":\n{faulty.text}"
        return f"with the fault the test {faulty.verdict.value}{details}"

    def _run(self, test: str, mutation: Mutation | None) -> Run:
        """Run a test in a copy of the repository, with the fault in it, if there is one."""
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            copy, report = Path(folder) / "repository", Path(folder) / "report.xml"
            unused = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache")
            shutil.copytree(self.root, copy, symlinks=True, ignore=unused)
            if mutation is not None:
                mutation.make(copy)
            options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", f"--junitxml={report}"]
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *shlex.split(test)],
                cwd=copy,
                env={"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "3", "HOME": folder},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # So that what the test starts can be ended with it.
            )
            try:
                output, _ = process.communicate(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                return Run(Verdict.DOES_NOT_END, _end(output))
            return Run(_verdict(report), _end(output))


def _verdict(report: Path) -> Verdict:
    """What pytest's report says: a failure counts; an error of collection or a fixture, or a skipped test, does not."""
    if not report.exists():
        return Verdict.IS_NOT_RUN
    counted = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite"):
        for what in counted:
            counted[what] += int(suite.get(what, 0))
    if counted["failures"]:
        return Verdict.FAILS
    if counted["errors"] or counted["tests"] == counted["skipped"]:
        return Verdict.IS_NOT_RUN
    return Verdict.PASSES


def _end(output: str) -> str:
    return "\n".join(f"     {line}" for line in output.splitlines()[-_TEXT_LINES:])


def mutations() -> Iterator[Mutation]:
    """The faults of the list."""
    for entry in _ENTRY.finditer(LIST.read_text()):
        lines = entry["diff"].splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in "- ")
        new = "".join(line[1:] for line in lines if line[0] in "+ ")
        yield Mutation(int(entry["number"]), entry["title"], entry["file"], entry["test"], old, new)


def main() -> None:
    """Make the faults asked for, one at a time."""
    wanted = {int(number) for number in sys.argv[1:]}
    listed = list(mutations())
    if unknown := wanted - {mutation.number for mutation in listed}:
        raise SystemExit(f"no fault of {LIST.name} has number {', '.join(map(str, sorted(unknown)))}")
    bench, missed = Bench(ROOT), []
    for mutation in listed:
        if wanted and mutation.number not in wanted:
            continue
        objection = bench.objection(mutation)
        print(f"{mutation.number:>3}. {'MISSED' if objection else 'caught'}  {mutation.title}", flush=True)
        if objection:
            print(f"     {objection}", flush=True)
            missed.append(mutation.number)
    if missed:
        raise SystemExit(f"not caught: {', '.join(map(str, missed))}")


if __name__ == "__main__":
    main()
