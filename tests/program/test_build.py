"""The kernel as one AutoDist object calls it, and what is said of steps. The oracle judges the programs."""

import pytest

from autodist_py.kernel.pipeline import PASSES
from autodist_py.kernel.program import Options, Program
from autodist_py.program.build import Kernel, StepWarnings
from tests.support import kernel_programs


def test_a_warning_of_a_step_is_said_once_for_all_its_signatures(caplog: pytest.LogCaptureFixture) -> None:
    warnings = StepWarnings(is_heard=True)
    for name in ("autodist-0/function-0/0", "autodist-0/function-0/1", "autodist-0/function-1/0"):
        warnings.say(name, ["it mixes examples"])
    warnings.say("autodist-0/function-0/0", ["it mixes examples", "another"])
    assert [record.getMessage() for record in caplog.records] == [
        "autodist-0/function-0/0: it mixes examples",
        "autodist-0/function-1/0: it mixes examples",
        "autodist-0/function-0/0: another",
    ]


def test_a_worker_that_nobody_reads_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    StepWarnings(is_heard=False).say("autodist-0/function-0/0", ["it mixes examples"])
    assert not caplog.records


def test_a_programs_own_options_are_beside_those_of_all() -> None:
    item = kernel_programs.linear_regression()
    seen: list[str] = []

    def observe(position: int, name: str, program: Program) -> None:
        seen.append(name)

    kernel = Kernel(Options(batch="local"), [observe])
    made = kernel.compiled(
        item, kernel_programs.all_reduce(item), kernel_programs.topology(1, 1), first_instance_key=40
    )
    assert made.next_instance_key > 40
    assert seen == [one.name for one in PASSES]
    assert kernel.options == Options(batch="local")
