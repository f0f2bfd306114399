"""The examples of tf.distribute's documentation do under our strategy what they do under TensorFlow's."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

pytestmark = [pytest.mark.first]
SECONDS = 200.0


def test_each_example_gives_what_it_gives_under_tensorflows_strategy(tmp_path: Path) -> None:
    started = {}
    for kind in ("theirs", "ours"):
        command = [sys.executable, "-m", "tests.support.distribute_documents", kind, str(tmp_path / kind)]
        started[kind] = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for process in started.values():
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors[-3000:]
    theirs, ours = ((tmp_path / kind).read_text().splitlines() for kind in started)
    assert len(theirs) > 100
    assert ours == theirs
