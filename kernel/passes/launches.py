"""Adding a fragment to a program, with the collectives that stand in it."""

from dataclasses import replace

from autodist_py.kernel.cross_device_ops.collective import Collectives
from autodist_py.kernel.fragment import Fragment
from autodist_py.kernel.program import Launch, Program
from autodist_py.kernel.rewrite import Edits


def with_fragment(
    program: Program,
    edits: Edits,
    fragment: Fragment,
    collectives: Collectives,
    *,
    rank: tuple[int, ...],
    what: str,
) -> Program:
    """`program` with the ops of `fragment` and with `edits` applied, and its `collectives` among the launches.

    `rank` says where these collectives stand among those of other fragments, and `what` what they combine, in words.
    """
    edits.add(fragment.nodes)
    added = (Launch(ops, (*rank, position), what) for position, ops in enumerate(collectives.launches))
    return replace(
        program,
        graph=edits.apply(program.graph),
        launches=(*program.launches, *added),
        next_instance_key=collectives.next_key,
    )
