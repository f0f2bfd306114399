"""Simulated runs, drawn by seeds: each worker ends in time, with the one cause, which names the one that was struck.

Exit codes are judged, too, and what the cause says of steps and of who waited, how long collectives waited, and what
the chief's state keeps.

`SIMULATION_SEED=N pytest -s` plays one run again, and prints what happens in it.
"""

import os
import time
from collections import Counter

from tests.support.schedules import KINDS, play

HARMLESS = {"none", "pause", "hold", "blip"}
SEED = os.environ.get("SIMULATION_SEED")
RUNS = 20_000


def test_every_worker_of_a_run_ends_in_time_with_the_one_cause() -> None:
    begun = time.process_time()
    failures: dict[int, list[str]] = {}
    for seed in range(RUNS) if SEED is None else [int(SEED)]:
        played = play(seed, trace=SEED is not None)
        if played.wrong:
            failures[seed] = played.wrong
        if SEED is not None:
            print("", played.run.plan, played.run.fault, *(played.run.world.trace or ()), sep="\n")
    print(f"\n{RUNS} runs in {time.process_time() - begun:.1f} s of the processor")
    shown = "\n".join(
        f"{'; '.join(wrong)}\n    again: SIMULATION_SEED={seed} pytest -s tests/cluster/coordinator/test_simulation.py"
        for seed, wrong in list(failures.items())[:5]
    )
    assert not failures, f"{len(failures)} runs of {RUNS} are wrong, of which the first are:\n{shown}"


def test_a_seed_draws_the_same_run_again() -> None:
    for seed in range(40):
        one, other = play(seed, trace=True), play(seed, trace=True)
        assert one.run.world.trace == other.run.world.trace


def test_faults_of_each_kind_strike_runs_that_are_under_way() -> None:
    struck: Counter[str] = Counter()
    for seed in range(1000):
        played = play(seed)
        fault = played.run.fault
        if not fault.is_late(played.run.members[fault.rank]):
            struck[played.kind] += 1
            has_failed = any(member.cause is not None for member in played.run.members)
            assert has_failed or played.kind in HARMLESS or fault.is_harmless, seed
    assert {kind for kind, count in struck.items() if count >= 10} == KINDS.keys() - {"none"}
