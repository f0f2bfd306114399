"""Noting the collectives that a pass makes of an event, so that they can be ordered, and checked."""

from dataclasses import replace

from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.events import Collective
from autodist_py.kernel.program import Program


def with_collectives(program: Program, collectives: Collectives, position: int) -> Program:
    """`program` with `collectives`, whose ops a pass adds to its graph; the event stands there in the schedule."""
    what = program.schedule.events[position].what
    added = (Collective(made.ops, position, what, made.nbytes, made.by_name) for made in collectives.made)
    lowered = replace(
        program.lowered,
        collectives=(*program.lowered.collectives, *added),
        next_instance_key=collectives.next_key,
    )
    return replace(program, lowered=lowered)
