"""What a disk that takes no more does: files that only tell of a training end none, and destroy no file."""

import sys
from pathlib import Path

import pytest

from tests.support.processes import AUTODIST, STEP_OF_A_WEIGHT, ended

SCRIPT = f"""{STEP_OF_A_WEIGHT}
import resource, sys

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # As on a full disk, writes fail with an error.
for number in range(8):
    step(np.ones([4, 1, 3]))
autodist.close()
print("trained", weight.numpy()[0] < 1)
"""


def train(folder: Path, limit: int, **environment: str) -> str:
    (folder / "train.py").write_text(SCRIPT)
    run = ended([sys.executable, "train.py", str(limit)], folder, environment)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    assert "trained True" in output
    return output


@pytest.mark.parametrize("limit", [0, 100, 30_000], ids=lambda limit: f"{limit} bytes")
def test_a_timeline_that_cannot_be_written_is_a_warning_and_leaves_the_file_as_it_was(
    tmp_path: Path, limit: int
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of before" * 10_000)
    output = train(tmp_path, limit, AUTODIST_TIMELINE=str(path))
    assert path.read_text() == "of before" * 10_000 or (limit and '"traceEvents"' in path.read_text())
    assert "timeline" in output if path.read_text().startswith("of before") else True
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_a_dump_that_cannot_be_written_is_a_warning_for_each_pass(tmp_path: Path) -> None:
    output = train(tmp_path, 100, AUTODIST_DUMP_DIR=str(tmp_path / "dump"))
    assert "the program after pass 'order' is not in" in output and "File too large" in output
    assert [path for path in (tmp_path / "dump").rglob("*") if path.is_file()] == []


def test_a_folder_that_takes_no_files_is_a_warning_too(tmp_path: Path) -> None:
    (tmp_path / "dump").write_text("a file")
    output = train(tmp_path, 1 << 30, AUTODIST_DUMP_DIR=str(tmp_path / "dump"))
    assert "the program after pass 'order' is not in" in output
    assert (tmp_path / "dump").read_text() == "a file"


def test_a_strategy_that_cannot_be_saved_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("resource.setrlimit", "print"))
    saved = tmp_path / "no such folder" / "s.json"
    run = ended([*AUTODIST, "plan", "--local", "2", "--save", str(saved), "train.py", "0"], tmp_path)
    assert run.returncode == 1
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith(f"Error: {saved}: ") and "bytes cannot be written: No such file or directory" in line
