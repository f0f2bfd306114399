"""`autodist verify`: a script's first steps on one device, by its own code, and distributed; how far they are apart.

Each run is a process of its own that writes what its steps saw to a folder (`recording.py`); nothing but values is
compared. Where they part, both are run again with the values of their ops, to find the first op.
"""

import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autodist_py.cluster.launch.console import Screen
from autodist_py.cluster.launch.foreground import run_chief
from autodist_py.config.settings import (
    RECORD_DIR_VARIABLE,
    RECORD_STEPS_VARIABLE,
    RECORDED_RUN_VARIABLE,
    RESOURCE_SPEC_VARIABLE,
)
from autodist_py.diagnostics.comparison import Comparison, magnitude_of
from autodist_py.diagnostics.recording import Step, recorded_steps
from autodist_py.proto.errors import AutoDistError

_KINDS = ("inputs", "ops", "results", "variables")
"""What of a step is compared, in the order in which it comes to be."""


class RunFailedError(AutoDistError):
    """A run of the script failed; `code` is its exit code, `output` what it printed."""

    def __init__(self, message: str, code: int, output: str):
        super().__init__(message)
        self.code, self.output = code, output


@dataclass(frozen=True, slots=True)
class Script:
    """A script to verify, and what its runs have in common.

    Attributes:
        command: the process to start.
        environment: of all runs.
        folder: an empty folder for what they record.
        steps: how many training steps are recorded.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    steps: int

    def record(self, what: str, spec_file: Path, name: str) -> dict[int, list[Step]]:
        """Run the script on the workers of `spec_file`; the steps that each worker recorded, by rank.

        Raises:
            RunFailedError: it failed, or trained no step.
        """
        folder = self.folder / what
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        environment = {
            **self.environment,
            RESOURCE_SPEC_VARIABLE: str(spec_file),
            RECORD_DIR_VARIABLE: str(folder),
            RECORD_STEPS_VARIABLE: str(self.steps),
            RECORDED_RUN_VARIABLE: what,
        }
        code, printed = run_quietly(self.command, environment)
        if code:
            raise RunFailedError(f"the script failed {name} (exit code {code})", code, printed)
        steps = recorded_steps(folder)
        if not any(steps.values()):
            raise RunFailedError(
                f"the script trained no step {name}: nothing that AutoDist made computed gradients and was run",
                1,
                printed,
            )
        return steps


def run_quietly(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit code of `command`, as a chief, and what it and the other workers printed."""
    printed = io.StringIO()
    screen = Screen(Console(file=printed, width=200))
    code = run_chief(command, environment, output=screen, errors=screen)
    return code, printed.getvalue()


def compare_steps(
    expected: Sequence[Step], actual: Mapping[int, Sequence[Step]], tolerance: float | None, *, with_zeros: bool = True
) -> dict[str, Comparison]:
    """How far all workers' steps are from those of one device, by the kind of value; inputs must be equal.

    Args:
        expected: the steps of one device.
        actual: those of each worker.
        tolerance: see `Comparison.note`.
        with_zeros: whether a tensor is zero whose values are no more than the step's largest leave by rounding.

    Raises:
        AutoDistError: the runs did not train as many steps, or not the same variables.
    """
    comparisons = {kind: Comparison() for kind in _KINDS}
    for rank, steps in actual.items():
        if len(steps) != len(expected):
            raise AutoDistError(
                f"the runs must train the same number of steps. One device: {len(expected)}; worker {rank}: "
                f"{len(steps)}. Look for a number of steps that depends on the number of workers"
            )
        for number, (wanted, got) in enumerate(zip(expected, steps, strict=True), start=1):
            magnitude = magnitude_of([*wanted.results.values(), *wanted.variables.values()])
            for kind, comparison in comparisons.items():
                one, other = getattr(wanted, kind), getattr(got, kind)
                if one.keys() != other.keys():
                    raise AutoDistError(
                        f"the runs must train the same, but {kind} differ at step {number}: "
                        f"{', '.join(sorted(one.keys() ^ other.keys()))}"
                    )
                for name, value in other.items():
                    allowed = 0.0 if kind == "inputs" else tolerance
                    scale = magnitude if with_zeros and kind != "inputs" else 0.0
                    comparison.note(
                        name, number, value, one[name], allowed, magnitude=scale, computed_in=wanted.computed_in
                    )
    return comparisons


def compare_runs(
    script: Script, one_device: Path, distributed: Path, tolerance: float | None, title: str, console: Console
) -> bool:
    """Compare the runs of `script` on the workers of two resource specs, and say how far they are apart.

    Returns:
        Whether all variables and results are equal, up to rounding.

    Raises:
        AutoDistError: a run failed, or they cannot be compared.
    """
    plain = script.record("plain", one_device, "on one device")
    trained = script.record("compiled", distributed, f"on {title}")
    comparisons = compare_steps(plain[0], trained, tolerance)
    _show(comparisons, console)
    steps = f"{len(plain[0])} step{'s' if len(plain[0]) > 1 else ''}"
    parted = _first(comparisons)
    if parted is None:
        largest = max(one.largest for one in comparisons.values())
        _say(console, f"equal: {steps} on one device and on {title}; the largest relative difference is {largest:.1e}")
        return True
    if (other := comparisons["inputs"].first) is not None:
        _say(
            console,
            f"different data: input '{other[0]}' of step {other[1]} is not what it is on one device, so there is "
            "nothing to compare. Look for a shuffle without a seed, the clock, or a shard of the data per worker",
        )
        return False
    _say(console, f"different: '{parted[0]}' is the first to part, at step {parted[1]} of {steps}")
    try:
        _find_op(script, plain[0], one_device, distributed, tolerance, console)
    except AutoDistError as error:
        _say(console, f"the first op to part was not found: {error}")
        if isinstance(error, RunFailedError) and error.output:
            _say(console, f"It printed:\n{error.output.rstrip()}")
    return False


def _find_op(
    script: Script,
    plain: Sequence[Step],
    one_device: Path,
    distributed: Path,
    tolerance: float | None,
    console: Console,
) -> None:
    """Run both again with the values of their ops, and say which is the first to part."""
    alone = script.record("ops", one_device, "on one device, with the values of its ops")
    again = compare_steps(plain, {0: [replace(step, ops={}) for step in alone[0]]}, tolerance)
    together = script.record("ops", distributed, "on all workers, with the values of its ops")
    first = compare_steps(alone[0], together, tolerance)["ops"].first
    if first is None:
        _say(
            console, "no op whose value for the whole batch is known parts: what does is a gradient's, or inside a loop"
        )
    else:
        _say(console, f"the first op to part is {first[0]}, at step {first[1]}")
    changing = _first(again)
    if changing is not None:
        twice = script.record("ops", one_device, "on one device once more, with the values of its ops")
        changing = _first(compare_steps(alone[0], twice, tolerance))
    rounded = rounded_first(alone[0], together, tolerance)
    if changing is not None:
        _say(
            console,
            f"the script does something else each time it runs on one device: '{changing[0]}' parts at step "
            f"{changing[1]}. Look for the clock, or random numbers without a seed",
        )
    elif rounded is not None:
        _say(
            console,
            f"{rounded[0]}, at step {rounded[1]}, differs too, and is small beside the step's largest values. It may "
            "be rounding alone, as the gradient of a bias before a normalization is. Optimizers that divide a gradient "
            "by its size, as Adam and LAMB do, make large numbers of it. Leave such a variable out (use_bias=False)",
        )
    else:
        _say(
            console,
            'random ops draw other numbers on each replica, but with AutoDist(random="global"), and with '
            'batch_statistics="replica" each normalizes its own examples. What a compressor or a looser consistency '
            "gives up, `autodist plan` says; docs/exactness.md lists what cannot be equal",
        )


def rounded_first(
    expected: Sequence[Step], actual: Mapping[int, Sequence[Step]], tolerance: float | None
) -> tuple[str, int] | None:
    """The first value that differs, and is zero beside its step's largest; None: what parts is none of these."""
    found, parted = (
        _first(compare_steps(expected, actual, tolerance, with_zeros=with_zeros)) for with_zeros in (False, True)
    )
    return None if found == parted else found


def _first(comparisons: Mapping[str, Comparison]) -> tuple[str, int] | None:
    """What is the first to part, in the order of steps, then of kinds; None: nothing."""
    found = [one.first for kind in _KINDS if (one := comparisons[kind]).first is not None]
    return min(found, key=lambda first: first[1], default=None)


def _show(comparisons: Mapping[str, Comparison], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("value")
    table.add_column("largest relative difference", justify="right")
    for kind in ("results", "variables"):
        for name, difference in comparisons[kind].differences.items():
            table.add_row(Text(name), f"{difference:.1e}")
    console.print(table)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
