"""Schedules of simulated runs, drawn by a seed: what the run does, what strikes it, and what must come of that."""

import math
from dataclasses import dataclass
from random import Random

from autodist_py.cluster.coordinator.liveness import HEARTBEAT_SECONDS
from autodist_py.cluster.server_probe import STILL_SECONDS
from autodist_py.cluster.step_status import LEAST_SILENCE_SECONDS, STOPPING_SECONDS
from tests.support.simulation import (
    DELAY_SECONDS,
    JOIN_SECONDS,
    RESENT_SECONDS,
    WORKERS_SECONDS,
    Fault,
    Member,
    Plan,
    Run,
    W,
)

CHIEF_LOST = "worker 0 (127.0.0.1), the chief, is lost"

NETWORK_SECONDS = 3 * (DELAY_SECONDS + RESENT_SECONDS)
"""For a heartbeat's answer, what follows from it, and the answer to that."""

NEED_SECONDS = 2.0
"""At most so long after a fault of one the others come to a place where they need it."""

JUDGED_SECONDS = STOPPING_SECONDS + NETWORK_SECONDS + 0.5
"""From a suspicion to the cause on all workers, with what runs slower on one than on another."""

RAISED_SECONDS = 2.0
"""So much later than a worker is noticed to be missing a step raises."""

SLOW_SECONDS = 3.0
"""So long some collectives take to say that they were stopped."""

KINDS = {
    "none": 3,
    "kill": 3,
    "stop": 2,
    "still": 2,
    "cut": 3,
    "raise": 2,
    "exit": 2,
    "early": 2,
    "late": 2,
    "pause": 2,
    "hold": 2,
    "blip": 2,
    "back": 2,
    "heal": 2,
    "hang": 2,
    "linger": 2,
}
"""How many of the schedules are of each kind, among all.

A worker is killed; it is stopped for ever, or goes on after its time (`still`); its host is cut off; its script raises,
exits with a code, or ends too early; it does not come to a step (`late`). It comes back after the others have given it
up, from a stop (`back`, where nobody can end it) or from a cut (`heal`); its Python stands still for ever (`hang`); or
its process does not end with its script (`linger`). Harmless are a short stop (`pause`), a Python that stands still for
a while (`hold`), and a short cut (`blip`).
"""


APART = ("none", "kill", "stop", "cut", "raise", "exit", "early", "back", "heal", "linger")
"""The kinds that also strike runs whose workers take their steps by themselves, and go on without one."""


def plan_of(choose: Random, kind: str) -> Plan:
    """A run for a fault of this kind."""
    is_apart = kind in APART and choose.random() < (0.5 if kind == "back" else 0.2)
    limit = choose.choice((0.0, 2.0, 3.0))
    if is_apart or kind == "hold":
        limit = 0.0
    elif kind == "late":
        limit = choose.choice((2.0, 3.0))
    ops = ["compare"]  # As workers do when their servers have started.
    for _ in range(choose.randint(2, 5)):
        if choose.random() < 0.5:
            ops.append("work")
        if choose.random() < 0.4:
            ops.append(choose.choice(("announce", "broadcast")))
        ops.append("step" if choose.random() < 0.7 else "compare")
    ops.append("step")
    workers = choose.choice((2, 3, 3, 4))
    return Plan(
        workers,
        tuple(ops),
        heartbeat_timeout=choose.choice((4.0, 5.0, 8.0)),
        limit=limit,
        is_apart=is_apart,
        loss=choose.choice((0.0, 0.03)),
        duplicates=choose.choice((0.0, 0.1)),
        rates=tuple(choose.uniform(0.98, 1.02) for _ in range(workers)),
        breaks_peers=choose.random() < 0.5,
        by_hand=kind == "back",
    )


def fault_of(choose: Random, kind: str, plan: Plan) -> Fault:
    rank = choose.randrange(1 if plan.is_apart or kind in ("late", "back", "linger") else 0, plan.workers)
    waits_for_joining = plan.is_apart or kind in (
        "still",
        "hold",
        "back",
        "heal",
        "hang",
    )  # Else who joins may be late, or is needed.
    time = 1000.0 + choose.uniform(1.2 if waits_for_joining else 0.0, 2.5)
    place = choose.choice([number for number, op in enumerate(plan.ops) if kind != "late" or op == "step"])
    match kind:
        case "none":
            return Fault()
        case "still":
            return Fault("stop", 0, time, seconds=plan.heartbeat_timeout + choose.uniform(2.0, 8.0), is_harmless=False)
        case "pause":
            return Fault("stop", rank, time, seconds=choose.uniform(0.0, 0.8))
        case "hold":
            return Fault("hold", rank, time, seconds=choose.uniform(0.0, STILL_SECONDS / 8))
        case "blip":
            return Fault("cut", rank, time, seconds=choose.uniform(0.0, 0.8))
        case "back" | "heal":
            seconds = plan.heartbeat_timeout + choose.uniform(2.0, 8.0)
            does = "stop" if kind == "back" else "cut"
            return Fault(does, rank, time, seconds=seconds, is_harmless=plan.is_apart)
        case "hang":
            return Fault("hold", rank, time, seconds=math.inf, is_harmless=False)
        case "linger":
            return Fault("linger", rank, is_harmless=plan.is_apart)
        case "raise" | "exit" | "early" | "late":
            return Fault(kind, rank, place=place, seconds=math.inf, is_harmless=plan.is_apart)
        case _:
            return Fault(kind, rank, time, seconds=math.inf, is_harmless=plan.is_apart)


@dataclass(frozen=True)
class Played:
    """A run that has been played, and what is wrong with it."""

    kind: str
    run: Run
    wrong: list[str]


def play(seed: int, *, trace: bool = False) -> Played:
    """The run that the seed draws."""
    choose = Random(seed)
    kind = choose.choices(list(KINDS), list(KINDS.values()))[0]
    plan = plan_of(choose, kind)
    run = Run(plan, fault_of(choose, kind, plan), choose, trace=trace)
    try:
        run.play(10 * STILL_SECONDS)
        wrong = complaints(run, kind)
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    return Played(kind, run, wrong)


def complaints(run: Run, kind: str) -> list[str]:
    """What is wrong with a run that has been played."""
    found = [f"worker {member.rank} does not end" for member in run.running()]
    if found:
        return found
    is_late = run.fault.is_late(run.members[run.fault.rank])
    if run.fault.is_harmless or is_late:
        return wrong_in_good_run(run, kind, is_late=is_late)
    return wrong_causes(run, kind) + wrong_failure(run, kind) + wrong_codes(run, kind) + long_waits(run)


def wrong_in_good_run(run: Run, kind: str, *, is_late: bool) -> list[str]:
    """What is wrong where the run must go on: whom it goes on without learns that, and ends by it."""
    fault, struck = run.fault, run.members[run.fault.rank]
    spared = {struck} if is_late or run.plan.is_apart else set()
    found = [
        f"worker {member.rank} ended with {member.exit_code}: {member.cause}"
        for member in run.members
        if (member.cause is not None or member.exit_code != 0)
        and not (member in spared or (is_late and names(str(member.cause), fault.rank)))
    ]
    if kind == "back" and not is_late and struck.rank in run.state.lost:
        is_told = struck.cause is not None and struck.cause.endswith("; the others go on without it")
        is_left = run.chief.exit_code is not None and str(struck.cause).startswith(CHIEF_LOST)
        if not (is_told or is_left) or struck.exit_code != 1:
            found.append(f"worker {struck.rank}, which is lost, ended with {struck.exit_code}: {struck.cause}")
    if run.state.failure is None and not is_late and run.kept:
        found.append(f"the chief's state keeps {run.kept}")
    return found


def wrong_causes(run: Run, kind: str) -> list[str]:
    """Who must know the cause, and does not, or not in time, or knows another."""
    fault = run.fault
    live = [member for member in run.members if is_live(member, run, kind)]
    found = [f"worker {member.rank} ends without a cause" for member in live if member.cause is None]
    found += [
        f"worker {member.rank} names another than worker {fault.rank}: {member.cause}"
        for member in live
        if member.cause is not None and not any(names(member.cause, rank) for rank in blamed(member, run, kind))
    ]
    causes = {member.cause for member in live if not str(member.cause).startswith(CHIEF_LOST)}
    if len(causes) > 1:
        found.append(f"there are several causes: {sorted(map(str, causes))}")
    found += [
        f"worker {member.rank} ends {member.cause_at - bound(member, run, kind):.2f} s too late"
        for member in live
        if member.cause_at > bound(member, run, kind)
    ]
    return found


def wrong_failure(run: Run, kind: str) -> list[str]:
    """What the chief's one failure says that is not so: a step, or who waited where."""
    failure = run.state.failure
    if failure is None:
        return []
    failed, found = run.members[failure.worker.rank], []
    begun = [time for time in failed.began if time <= run.failed_at]
    known = [time for time in begun if time < run.failed_at - 2 * HEARTBEAT_SECONDS - NETWORK_SECONDS]
    if kind in ("kill", "stop", "cut", "back", "heal", "hang"):  # It said nothing after that.
        known = [time for time in known if time < run.fault.struck_at - HEARTBEAT_SECONDS - NETWORK_SECONDS]
    if failure.step is not None and not len(known) <= failure.step <= len(begun):
        found.append(f"worker {failed.rank} had begun {len(begun)} steps, not {failure.step}")
    if begun if failure.step is None else failed.rank not in run.state.joined:
        found.append(f"worker {failed.rank} had joined, or not: {failure}")
    if failure.waiter is None:
        return found
    waits, waiter = failure.waits, run.members[failure.waiter.rank]
    if waiter is failed or not {waits.what, waits.stopped_in} <= {"", W} or not waits.is_under_way:
        found.append(f"worker {waiter.rank} did not wait as it says: {failure}")
    if not 0 < waits.step <= len(waiter.began) or len(begun) > waits.step + 1:
        found.append(f"worker {waiter.rank} had begun {len(waiter.began)} steps: {failure}")
    return found


def wrong_codes(run: Run, kind: str) -> list[str]:
    """Who ends by the cause ends with 1, unless its script chose another code; who was killed, by the signal."""
    own = {"kill": -9, "exit": 3}.get(kind)
    found = []
    for member in run.members:
        killed = member.exit_code in (-9, -15) and member.rank > 0  # By the chief, as it did not end in time.
        is_struck = member.rank == run.fault.rank
        allowed: set[int | None] = {1} if member.cause is not None else {0}
        if is_struck:
            allowed |= {own} if own is not None else set()
            allowed |= {None} if member.process.is_over or kind in ("cut", "heal") else set()
        if member.exit_code not in allowed and not (killed and is_struck):
            found.append(f"worker {member.rank} ended with {member.exit_code}, not {allowed}: {member.cause}")
    return found


def long_waits(run: Run) -> list[str]:
    """Which collectives took longer to raise than the manual says (docs/design/runtime.md).

    A worker that is missing is noticed within the limit, or two seconds if that is less, and at most the heartbeat's
    timeout; then every worker raises within two seconds more, and the network's.
    """
    plan, found = run.plan, []
    noticed = plan.heartbeat_timeout + 2 * HEARTBEAT_SECONDS
    if plan.limit:
        noticed = min(max(plan.limit, LEAST_SILENCE_SECONDS), plan.heartbeat_timeout)
    if run.fault.kind == "hold" or run.members_joined < plan.workers:
        return []
    for member in run.members:
        longest = max((end - begun for begun, end in member.waits), default=0.0)
        most = noticed + RAISED_SECONDS + NETWORK_SECONDS + (SLOW_SECONDS if member.was_slow else 0.0)
        if longest > most and member.rank != run.fault.rank:
            found.append(f"worker {member.rank} waited {longest:.2f} s in a step, not {most:.2f} s at most")
    return found


def is_live(member: Member, run: Run, kind: str) -> bool:
    """Whether the worker must learn of the cause."""
    if kind == "linger":
        return member.rank == 0  # All others have ended well.
    return member.rank != run.fault.rank or kind in ("cut", "heal", "still", "back", "raise", "late")


def blamed(member: Member, run: Run, kind: str) -> set[int | None]:
    """Whom the worker's cause may name; None: anybody, as the worker itself is the chief that is cut off."""
    if kind in ("cut", "heal") and member.rank == run.fault.rank:
        return {0 if member.rank else None}
    return {run.fault.rank, 0} if kind == "back" and member.rank == run.fault.rank else {run.fault.rank}


def names(cause: str, rank: int | None) -> bool:
    """Whether the cause names the worker, as the one that failed, or that others have waited for."""
    return rank is None or cause.startswith(f"worker {rank} (") or f": ClusterError: worker {rank} (" in cause


def bound(member: Member, run: Run, kind: str) -> float:
    """When the worker must know the cause."""
    fault, plan = run.fault, run.plan
    begun = fault.struck_at
    if kind in ("still", "back") and member.rank == fault.rank:
        begun += fault.seconds
    if run.members_joined < plan.workers:
        return begun + 2 * JOIN_SECONDS + JUDGED_SECONDS + 2.0
    silence = plan.heartbeat_timeout + 2 * HEARTBEAT_SECONDS
    noticed = dict.fromkeys(("stop", "cut", "heal", "back", "still"), silence)
    noticed |= {"late": NEED_SECONDS + plan.limit + 1.0, "hang": silence + STILL_SECONDS, "linger": WORKERS_SECONDS}
    noticed |= dict.fromkeys(("exit", "early"), NEED_SECONDS + HEARTBEAT_SECONDS)
    return begun + noticed.get(kind, 0.0) + JUDGED_SECONDS
