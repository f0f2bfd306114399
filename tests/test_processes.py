"""What tests end by an id is the process that noted it, and not another that has the id since."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import is_running, kill, noted


def test_a_process_that_noted_its_id_is_found_while_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        file.write_text(str(process.pid))
        assert [found.pid for found in noted(file)] == [process.pid]
        (found,) = noted(file)
        kill([found])
    assert not is_running(found)
    assert noted(file) == []
    assert noted(tmp_path / "none") == []


def test_a_process_that_began_after_the_note_is_another(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        file.write_text(str(process.pid))
        before = file.stat().st_mtime - 5
        os.utime(file, (before, before))
        assert noted(file) == []
        process.kill()
