"""Hostile inputs of every kind: each is taken, or refused by an error of ours, in little time and memory.

`make fuzz-inputs` runs many more than the usual tests do. What fails is printed with what runs it again.
"""

import gc
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from autodist_py import cli
from autodist_py.proto.errors import AutoDistError
from tests.support.hostile_kinds import ITEM, KINDS, RESOURCES, Hostile, strategies

pytestmark = [pytest.mark.timeout(120 if "FUZZ_INPUTS" not in os.environ else 6 * 3600), pytest.mark.turns(1)]

INPUTS = int(os.environ.get("FUZZ_INPUTS", "2000"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
NUMBER = os.environ.get("FUZZ_NUMBER")
"""Of the one input that is tried; None: all."""
SECONDS = float(os.environ.get("FUZZ_SECONDS", "1.0"))
"""Of the processor, for an input: in the usual tests more than is promised, as the machine may be busy."""
FREE_BYTES = 8_192
"""An input that is longer may take longer, in proportion: PyYAML reads some 300 kB a second."""
BYTES = 50_000_000
ENOUGH = 1_000
"""Of fewer inputs those that are taken are no share: one of 50 may be."""
ENDLESS_SECONDS = 20.0
BOMB_BYTES = 2 << 30
"""What the process may take more than it has: beyond that there is no memory."""


class EndlessError(BaseException):
    """An input has taken the processor for so long that it may not end."""


@contextmanager
def bounded() -> Iterator[None]:
    """What takes too much time or memory within fails, and takes no more."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise EndlessError(f"more than {ENDLESS_SECONDS:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + BOMB_BYTES, hard))
    gc.collect()
    gc.freeze()  # Else to collect takes long, wherever it happens.
    try:
        yield
    finally:
        gc.unfreeze()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def _status(field: str) -> int:
    """A field of this process's status in /proc, in bytes."""
    with open("/proc/self/status", "rb") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field.encode()))


def measured(read: Callable[[], object]) -> tuple[BaseException | None, float, int]:
    """What left it, its seconds of the processor, and the bytes that it took at most."""
    Path("/proc/self/clear_refs").write_text("5")  # From now on VmHWM is the most since now.
    before, error = _status("VmRSS"), None
    signal.setitimer(signal.ITIMER_VIRTUAL, ENDLESS_SECONDS)
    begin = time.thread_time()
    try:
        read()
    except (Exception, EndlessError) as raised:
        error = raised
    seconds = time.thread_time() - begin
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return error, seconds, _status("VmHWM") - before


def tried(hostile: Hostile, seconds: float) -> tuple[str, float, int]:
    """Whether the input is taken or refused, and else what is wrong with that; its seconds and bytes."""
    seconds *= max(1.0, hostile.size / FREE_BYTES)
    error, took, nbytes = measured(hostile.read)
    for _ in range(2):  # Another process may have been in the way.
        if isinstance(error, EndlessError) or took <= seconds:
            break
        _, again, _ = measured(hostile.read)
        took = min(took, again)
    if error is not None and not isinstance(error, AutoDistError):
        return f"{type(error).__name__}: {error!r:.300} at {_topology(error)}", took, nbytes
    if error is not None and not _can_be_printed(str(error)):
        return f"what it says cannot be printed: {str(error)!r:.300} at {_topology(error)}", took, nbytes
    if took > seconds:
        return f"{took:.3f} s of the processor", took, nbytes
    if nbytes > BYTES:
        return f"{nbytes / 1e6:.0f} MB", took, nbytes
    return "refused" if error else "taken", took, nbytes


def _can_be_printed(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _topology(error: BaseException) -> str:
    trace = error.__traceback__
    found = ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if "autodist_py" in path.parts or path.parent.name in ("proto", "kernel", "strategy_builders"):
            found = f"{path.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the arguments' files are; what commands would start is not started."""
    (tmp_path / "train.py").write_text("")
    RESOURCES.save(tmp_path / "good.yaml")
    (tmp_path / "wrong.yaml").write_text("nodes: 1")
    ITEM.save(tmp_path / "item.pb")
    strategies()[0].save(tmp_path / "strategy.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTODIST_OUTPUT", "all")  # `run --all-output` sets it.
    monkeypatch.setattr(cli, "run_chief", lambda *given, **named: 0)
    monkeypatch.setattr(cli, "run_quietly", lambda *given: (0, ""))
    monkeypatch.setattr(cli, "compare_runs", lambda *given: True)
    return tmp_path


def number_of(kind: str) -> int:
    return max(1, INPUTS * KINDS[kind].share // 1000)


OTHERS = [kind for kind in KINDS if kind != "graph"]
COMPILED = pytest.param(
    "graph", marks=pytest.mark.slow
)  # Of the usual tests, tests/kernel/test_flaws.py compiles some.


@pytest.mark.parametrize("kind", [*OTHERS, COMPILED])
def test_hostile_inputs_are_taken_or_refused(kind: str, folder: Path) -> None:
    make, _, slowness = KINDS[kind]
    limit = SECONDS * slowness
    outcomes: Counter[str] = Counter()
    failures: dict[str, str] = {}
    worst, most = (0.0, -1), (0, -1)
    with bounded():
        warm_up(make, folder)
        for number in range(number_of(kind)) if NUMBER is None else [int(NUMBER)]:
            hostile = make(Random(f"{SEED} {kind} {number}"), folder)
            outcome, seconds, nbytes = tried(hostile, limit)
            worst, most = max(worst, (seconds, number)), max(most, (nbytes, number))
            if outcome not in ("taken", "refused"):
                test = f"{__name__.replace('.', '/')}.py::{test_hostile_inputs_are_taken_or_refused.__name__}[{kind}]"
                again = f"FUZZ_SEED={SEED} FUZZ_NUMBER={number} pytest '{test}'"
                failures.setdefault(outcome[:80], f"{outcome}\n    {hostile.shown!r:.2000}\n    again: {again}")
                outcome = "failed"
            outcomes[outcome] += 1
    print(
        f"\n{kind}: {dict(outcomes)}; at most {worst[0] * 1e3:.1f} ms (number {worst[1]}), "
        f"{most[0] / 1e6:.1f} MB (number {most[1]})"
    )
    assert not failures, "\n".join(["", *failures.values()])
    if outcomes.total() > ENOUGH:
        assert outcomes["taken"] > 0.01 * outcomes.total() < outcomes["refused"], outcomes


def warm_up(make: Callable[[Random, Path], Hostile], folder: Path) -> None:
    """What is imported or cached at the first time belongs to no input."""
    for number in range(10):
        measured(make(Random(number), folder).read)


@pytest.mark.parametrize("kind", OTHERS)
def test_hostile_inputs_that_hypothesis_finds_are_taken_or_refused(kind: str, folder: Path) -> None:
    make, limit = KINDS[kind].make, SECONDS * 2

    @seed(SEED)
    @settings(
        max_examples=max(1, number_of(kind) // 10),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(st.randoms(use_true_random=False))
    def trial(choose: Random) -> None:
        hostile = make(choose, folder)
        outcome, _, _ = tried(hostile, limit)
        assert outcome in ("taken", "refused"), f"{outcome}\n    {hostile.shown!r:.2000}\n    FUZZ_SEED={SEED}"

    with bounded():
        warm_up(make, folder)
        trial()
