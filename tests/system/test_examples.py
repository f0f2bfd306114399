"""The examples train: run as their docstrings say, on fewer epochs. README's trains as README shows."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import AUTODIST, ROOT


def run(example: str, *arguments: str, folder: Path = ROOT / "examples") -> str:
    """What the example prints on two workers."""
    command = [*AUTODIST, "run", "--local", "2", str(folder / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logged(said: str, name: str) -> list[float]:
    """The values of one of Keras's logs, an epoch each."""
    return [float(value) for value in re.findall(rf" {name}: ([0-9.e+-]+)", said)]


def test_digits_by_fit(tmp_path: Path) -> None:
    said = run("keras_digits.py", "--epochs", "4", "--folder", str(tmp_path))
    losses = logged(said, "loss")
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    assert {"digits.keras", "digits.png"} <= {path.name for path in tmp_path.iterdir()}


def test_text_by_fit() -> None:
    said = run("keras_text.py", "--epochs", "1", "--units", "32", "--length", "128", "--batch-size", "128")
    assert len(logged(said, "loss")) == 1
    assert logged(said, "val_loss")[0] < 3.5  # Were all hundred characters as likely: 4.6.
    assert "def __init__(self" in said


def test_the_hook_logs_the_time_of_each_step_on_each_worker(tmp_path: Path) -> None:
    said = run("step_times.py", str(tmp_path))
    assert "the times of 50 steps are in" in said
    for rank in range(2):
        lines = [line.split() for line in (tmp_path / f"steps-{rank}.txt").read_text().splitlines()]
        assert [int(number) for number, _ in lines] == list(range(1, 51))
        assert all(0 < float(seconds) < 60 for _, seconds in lines)


def test_readmes_example_prints_what_readme_shows(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (script,) = re.findall(r"Save this as `train.py`.*?```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    said = run("train.py", folder=tmp_path)
    for name in ("loss", "accuracy"):
        shown = logged(readme, name)
        assert len(shown) == 3
        # All workers' lines are shown to tests; the last digit is another one on another processor.
        assert logged(chiefs(said), name) == pytest.approx(shown, abs=2e-3)


def chiefs(said: str) -> str:
    """The chief's lines of a run's output."""
    return "\n".join(line for line in said.splitlines() if line.startswith("[0]"))


def test_readme_names_each_page_of_the_documentation() -> None:
    linked = set(re.findall(r"\]\((docs/[\w.-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


def test_readme_can_be_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1100
