"""The examples train: run as their docstrings say, on fewer epochs."""

import re
import subprocess
from pathlib import Path

from tests.processes import AUTODIST, ROOT


def run(example: str, *arguments: str) -> str:
    """What the example prints on two workers."""
    command = [*AUTODIST, "run", "--local", "2", str(ROOT / "examples" / example), *arguments]
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
