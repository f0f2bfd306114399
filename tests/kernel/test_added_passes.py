"""Passes of somebody else's: where they run, what is refused, and the example that the manual shows."""

import inspect
import subprocess
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from autodist_py import AutoDist
from autodist_py.kernel.pipeline import PASSES, compile
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract, with_added
from autodist_py.proto.errors import AutoDistError, InvalidGraphError
from examples.count_bytes import CountBytes
from tests.support import kernel_programs
from tests.support.processes import AUTODIST

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Marked:
    """A pass that changes nothing."""

    name: ClassVar[str] = "marked"
    after: ClassVar[str] = "replicate"
    contract: ClassVar[Contract] = Contract(requires={Invariant.REPLICATED})

    def __call__(self, program: Program) -> Program:
        return program


class Other(Marked):
    """Another one, behind it."""

    name: ClassVar[str] = "other"


def test_it_runs_behind_the_pass_that_it_names_and_those_that_were_given_before():
    names = [step.name for step in with_added(PASSES, [Marked(), Other()])]
    at = names.index("replicate")
    assert names[at : at + 4] == ["replicate", "marked", "other", "refresh"]
    assert [name for name in names if name not in ("marked", "other")] == [step.name for step in PASSES]


class Unplaced(Marked):
    """A pass that names a pass that there is not."""

    after: ClassVar[str] = "replicat"


class Nameless:
    """What is no pass."""


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([Marked(), Marked()], "each pass has a name of its own; got another 'marked'; call it something else"),
        ([Unplaced()], "pass 'marked' is to run after 'replicat'; did you mean 'replicate'"),
        ([Nameless()], "a pass is a value whose class has name, contract, after and __call__; got <"),
        ([Marked], "a pass is a value whose class has name, contract, after and __call__; got <class"),
        (Marked(), r"passes is a list of passes; got Marked\(\); write \[Marked\(\)\]"),
    ],
)
def test_what_is_no_pass_is_refused_before_anything_runs(passes, message):
    with pytest.raises(AutoDistError, match=message):
        AutoDist(passes=passes)


def test_what_it_requires_and_does_is_checked_by_its_name():
    class Early(Marked):
        contract: ClassVar[Contract] = Contract(requires={Invariant.PLACED})

    class Undoing(Marked):
        """It takes an op away."""

        def __call__(self, program: Program) -> Program:
            return replace(program, graph=program.graph.without([program.run_ops[0]]))

    item, where = kernel_programs.linear_regression(), kernel_programs.topology(2)
    for wrong, message in (
        (Early(), "pass 'marked' requires what does not hold here"),
        (Undoing(), "is to be fetched or"),
    ):
        with pytest.raises(InvalidGraphError, match=message) as raised:
            compile(item, kernel_programs.all_reduce(item), where, added=[wrong])
        assert raised.value.__notes__[0].startswith("in pass 'marked', after unbranch, ")


# -- The example ------------------------------------------------------------------------------------------------------


def test_the_example_of_the_manual_is_the_one_that_runs():
    manual = (ROOT / "docs" / "writing-a-pass.md").read_text()
    source = textwrap.dedent(inspect.getsource(CountBytes))
    assert f"```python\n{source}```" in manual
    imports = [line for line in (ROOT / "examples" / "count_bytes.py").read_text().splitlines() if "kernel" in line]
    assert "\n".join(imports) in manual


def test_the_example_adds_one_op_to_run_where_something_travels():
    item = kernel_programs.dense_and_sparse()
    for where, more in ((kernel_programs.topology(2, 1), 1), (kernel_programs.topology(2), 0)):
        plain = compile(item, kernel_programs.all_reduce(item), where)
        counted = compile(item, kernel_programs.all_reduce(item), where, added=[CountBytes()])
        assert len(counted.run_ops) == len(plain.run_ops) + more
        assert str(counted.schedule) == str(plain.schedule)


def test_the_example_counts_what_the_schedule_says(tmp_path):
    """By the user's door: two workers, each of which prints the bytes of each step."""
    script = ROOT / "examples" / "count_bytes.py"
    ended = subprocess.run(
        [*AUTODIST, "run", "--local", "2", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    planned = subprocess.run(
        [*AUTODIST, "plan", "--local", "2", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert "event AllReduceBucket[RING, level 1, 48 bytes of each of 2] dense gradients of weight" in planned.stdout
    assert "event FetchResults[RING, level 0, 8 bytes of each of 2]" in planned.stdout
    assert ended.stdout.count("bytes of this step: 56") == 4  # Two workers, two steps.
