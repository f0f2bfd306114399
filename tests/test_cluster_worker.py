"""What a test cluster's workers do between the cases that they run."""

import os
import sys
from typing import Any

from tests.cluster_worker import put_back


def test_of_the_environment_only_what_was_changed_is_put_back(monkeypatch):
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("CHANGED", "before")
    environment = dict(os.environ)
    os.environ["CHANGED"], os.environ["ADDED"] = "after", "added"
    written: list[Any] = []
    recording = True

    def record(event: str, arguments: Any) -> None:
        if recording and event in ("os.putenv", "os.unsetenv"):
            written.append(arguments)

    sys.addaudithook(record)  # It stays, as no hook can be taken away.
    put_back(environment)
    recording = False
    assert dict(os.environ) == environment
    assert sorted(written) == [(b"ADDED",), (b"CHANGED", b"before")]
