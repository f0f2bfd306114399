"""Noting the collectives that a pass adds, so that they can be ordered."""

from dataclasses import replace

from autodist_py.kernel.cross_device_ops.collective import Collectives
from autodist_py.kernel.program import Launch, Program


def with_launches(program: Program, collectives: Collectives, *, rank: tuple[int, ...], what: str) -> Program:
    """`program` with `collectives`, whose ops a pass adds to its graph, among the launches.

    `rank` says where they stand among those of other fragments, and `what` what they combine, in words.
    """
    added = (
        Launch(ops, (*rank, position), what, by_name) for position, (ops, by_name) in enumerate(collectives.launches)
    )
    return replace(program, launches=(*program.launches, *added), next_instance_key=collectives.next_key)
