"""Fixtures that several test modules of the runtime share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runs import Run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs, in the test's folder; they are ended with the test."""
    runs = []

    def start_run(body: str, **environment: str) -> Run:
        runs.append(Run(tmp_path, body, **environment))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()
