"""`tools/mutate.py`: what counts as a fault that a test catches."""

from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutate import Bench, Mutation, Verdict

LIBRARY = "VALUE = 1\n"
FAULT = Mutation(1, "A value is another", "library.py", "test_it.py", "VALUE = 1\n", "VALUE = 2\n")

CATCHES = "import library\ndef test_it(): assert library.VALUE == 1\n"
FIXTURE = """
import library, pytest

@pytest.fixture
def value():
    if library.VALUE != 1:
        raise ValueError
    return 1

def test_it(value): assert value == 1
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "library.py").write_text(LIBRARY)
    return tmp_path


@pytest.mark.parametrize(
    ("test", "objection"),
    [
        (CATCHES, ""),
        (CATCHES.replace("== 1", "> 0"), f"with the fault the test {Verdict.PASSES.value}"),
        (CATCHES.replace("== 1", "== 3"), f"without the fault the test {Verdict.FAILS.value}:"),
        ("import no_such_module\n" + CATCHES, f"without the fault the test {Verdict.IS_NOT_RUN.value}:"),
        (CATCHES.replace("test_it", "it"), f"without the fault the test {Verdict.IS_NOT_RUN.value}:"),
        (
            "import pytest\npytestmark = pytest.mark.skip\n" + CATCHES,
            f"without the fault the test {Verdict.IS_NOT_RUN.value}:",
        ),
        (
            "import library\nassert library.VALUE == 1\ndef test_it(): pass\n",
            f"with the fault the test {Verdict.IS_NOT_RUN.value}:",
        ),
        (FIXTURE, f"with the fault the test {Verdict.IS_NOT_RUN.value}:"),
    ],
    ids=["fails", "passes", "fails anyway", "no import", "no test", "skipped", "no collection", "no fixture"],
)
def test_a_fault_is_caught_by_a_test_that_passes_without_it_and_fails_with_it(
    repository: Path, test: str, objection: str
) -> None:
    (repository / "test_it.py").write_text(test)
    found = Bench(repository).objection(FAULT)
    assert found.startswith(objection)
    assert bool(found) is bool(objection)
    assert (repository / "library.py").read_text() == LIBRARY


def test_a_test_that_does_not_end_catches_nothing(repository: Path) -> None:
    (repository / "test_it.py").write_text(
        "import library, time\ndef test_it(): time.sleep(60 * (library.VALUE - 1))\n"
    )
    bench = Bench(repository, seconds=10.0)
    assert bench.objection(FAULT).startswith(f"with the fault the test {Verdict.DOES_NOT_END.value}")


def test_a_test_is_run_without_a_fault_once(repository: Path) -> None:
    (repository / "test_it.py").write_text(CATCHES)
    bench = Bench(repository)
    assert bench.objection(FAULT) == ""
    (repository / "test_it.py").write_text(CATCHES.replace("== 1", "== 3"))
    assert bench.objection(FAULT) == ""
    assert bench.objection(replace(FAULT, test="./test_it.py")).startswith("without the fault")
