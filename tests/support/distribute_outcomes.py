"""What programs of `tf.distribute` give under several strategies, each in processes of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autodist_py.cluster.ports import HeldPort
from tests.support.cluster_pool import Shape
from tests.support.processes import ROOT

MODULE = "tests.support.distribute_worker"
SECONDS = 400.0


class Outcomes:
    """Of the cases under each of some kinds of strategy, with so many replicas on each worker: they run at once.

    Args:
        folder: a new one.
        kinds: "tensorflow" and "ours" are on one machine, and so are "tensorflow-central" and "central", and
            "autodist PS()", by that builder; "tensorflow-workers" and "ours-workers" are on two workers, and so are
            "autodist-workers PS()", and "ours-tasks", which find one another by TF_CONFIG.
        replicas: of each worker.
        only: the cases; none: all.
    """

    def __init__(self, folder: Path, kinds: Sequence[str], replicas: int, *only: str):
        self.replicas, self._folder = replicas, folder
        with ExitStack() as ended:
            started = [process for kind in kinds for process in self._started(kind, ended, only)]
            self.codes = [process.wait(SECONDS) for process in started]

    def _started(self, kind: str, ended: ExitStack, only: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
        results = self._folder / kind
        results.mkdir()
        arguments = [kind, str(self.replicas), str(results), *only]
        command = [sys.executable, "-m", MODULE, *arguments]
        environments: list[dict[str, str]] = [{}]
        if kind in ("tensorflow-workers", "ours-tasks"):
            environments = [{"TF_CONFIG": json.dumps(config)} for config in two_tasks()]
        if kind.startswith(("ours-workers", "autodist-workers")):
            spec = self._folder / "two_workers.yml"
            spec.write_text(Shape("", (self.replicas, self.replicas)).resource_spec())
            command = [sys.executable, "-m", "autodist_py", "run", "--spec", str(spec)]
            command += [str(ROOT / f"{MODULE.replace('.', '/')}.py"), *arguments]
        for environment in environments:
            with open(self._folder / f"{kind}.log", "a") as log:
                own = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT), **environment}
                process = subprocess.Popen(command, stdout=log, stderr=log, env=own)
            ended.callback(process.wait, 30)
            ended.callback(process.terminate)
            yield process

    def arrays(self, kind: str, case: str, worker: int = 0) -> list[np.ndarray]:
        """What a case gave on a worker, an array for each value."""
        error = self._folder / kind / str(worker) / f"{case}.error"
        assert not error.exists(), f"{case} under {kind}: {error.read_text()}"
        found = error.with_suffix(".npz")
        assert found.exists(), (self._folder / f"{kind}.log").read_text()[-3000:]
        with np.load(found) as loaded:
            return [loaded[name] for name in loaded.files]


def asked(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The parameters of the tests that are run and use the fixture, with its own parameter where it has some."""
    own = getattr(request, "param", None)
    for item in request.session.items:
        if not isinstance(item, pytest.Function) or item.path != request.path:
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if request.fixturename in item.fixturenames and parameters.get(str(request.fixturename)) == own:
            yield parameters


def cases_asked(request: pytest.FixtureRequest) -> list[str]:
    """The cases of these tests."""
    return list(dict.fromkeys(parameters["case"] for parameters in asked(request)))


def require_equal(theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], *, exactly: bool) -> None:
    """The arrays are the same bits; or, where floats were added up in another order, they are close."""
    assert len(theirs) == len(ours)
    for expected, found in zip(theirs, ours, strict=True):
        assert expected.dtype == found.dtype
        if not exactly and expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, expected, strict=True)


def two_tasks() -> Iterator[dict[str, Any]]:
    """TF_CONFIG of two workers on this machine."""
    held = [HeldPort(0), HeldPort(0)]
    workers = [f"127.0.0.1:{port.number}" for port in held]
    for port in held:
        port.release()
    for index in range(len(workers)):
        yield {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
