"""What is logged, and where: in processes of their own, as logging is a process's."""

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

BEFORE = "logging.basicConfig(format='script %(message)s')"
AFTER = "log.info('told'); log.warning('warned')"


@pytest.mark.parametrize(
    ("level", "before", "shown"),
    [
        ("None", "", ["WARNING:autodist_py.of:warned"]),
        ("'INFO'", "", ["INFO:autodist_py.of:told", "WARNING:autodist_py.of:warned"]),
        ("'ERROR'", "", []),
        ("None", BEFORE, ["script warned"]),
        ("'INFO'", BEFORE, ["script told", "script warned"]),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_what_is_logged_is_shown_once(level: str, before: str, shown: list[str], late: bool) -> None:
    calls = [f"show_logs({level}); show_logs({level})", before]
    lines = ["import logging", "from autodist_py.config.logs import show_logs", *(calls if late else calls[::-1])]
    code = "\n".join([*lines, "log = logging.getLogger('autodist_py.of')", AFTER])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stderr.splitlines() == shown
