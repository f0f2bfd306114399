"""Programs of `tf.distribute` do under our strategies what they do under TensorFlow's, bit for bit.

Of three replicas TensorFlow adds up values in no fixed order: then the last bits of floats may differ.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import distribute_training
from tests.support.distribute_cases import CASES

pytestmark = [pytest.mark.first]
assert distribute_training  # It adds its cases.
KINDS = ("tensorflow", "ours")


class Outcomes:
    """What the cases gave under TensorFlow's strategy and under ours, each kind in a process of its own."""

    def __init__(self, folder: Path, replicas: int):
        self.replicas, self._folder = replicas, folder
        started = []
        for kind in KINDS:
            (folder / kind).mkdir()
            command = [sys.executable, "-m", "tests.support.distribute_worker", kind, str(replicas), str(folder / kind)]
            with open(folder / f"{kind}.log", "w") as log:
                environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        try:
            self.codes = [process.wait(400) for process in started]
        finally:
            for process in started:
                process.kill()

    def arrays(self, kind: str, case: str) -> list[np.ndarray]:
        error = self._folder / kind / f"{case}.error"
        assert not error.exists(), f"{case} under {kind}: {error.read_text()}"
        found = self._folder / kind / f"{case}.npz"
        assert found.exists(), (self._folder / f"{kind}.log").read_text()[-3000:]
        with np.load(found) as loaded:
            return [loaded[name] for name in loaded.files]


@pytest.fixture(scope="module", params=[2, 3], ids=["2-replicas", "3-replicas"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield Outcomes(tmp_path_factory.mktemp("mirrored"), request.param)


@pytest.mark.parametrize("case", CASES)
def test_a_program_gives_what_it_gives_under_tensorflows_strategy(outcomes: Outcomes, case: str) -> None:
    theirs, ours = (outcomes.arrays(kind, case) for kind in KINDS)
    assert len(theirs) == len(ours)
    for expected, found in zip(theirs, ours, strict=True):
        assert expected.dtype == found.dtype
        if outcomes.replicas > 2 and expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("replica_functions_are_traced_once", [1, 2]),
        ("random_numbers_of_a_seed", [False, True]),
        ("what_a_merge_call_returns_is_one_value", [True, False]),
        ("gradients_are_seen_as_such", [6, 6, 1, 1, 1]),
    ],
)
def test_what_only_ours_has(outcomes: Outcomes, case: str, expected: list[int]) -> None:
    assert [array.item() for array in outcomes.arrays("ours", case)] == expected
