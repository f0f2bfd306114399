"""What a pass is, and how passes are run: one after the other, by their contracts, verified after each."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import AutoDistError, InvalidGraphError
from autodist_py.proto.text import known_names


@dataclass(frozen=True, slots=True)
class Contract:
    """What a pass asks of a program, and does to it.

    Attributes:
        requires: what must hold before.
        ensures: what holds after, and stays so.
        ends: what holds no more.
    """

    requires: Set[Invariant] = frozenset()
    ensures: Set[Invariant] = frozenset()
    ends: Set[Invariant] = frozenset()


class Pass(Protocol):
    """One rewriting step: a frozen dataclass whose fields are its options.

    Its docstring says what changes, and shows it on an example of at most ten lines, which a test runs. Its contract
    has what it requires of the program that it is given, and ensures of the one that it returns.
    """

    name: ClassVar[str]
    contract: ClassVar[Contract]

    def __call__(self, program: Program) -> Program:
        """The rewritten program; `program` itself stays as it is."""
        ...


class AddedPass(Pass, Protocol):
    """A pass of somebody else's, which `AutoDist(passes=[...])` is given.

    Attributes:
        after: the name of the pass behind which it runs.
    """

    after: ClassVar[str]


def with_added(passes: Sequence[Pass], added: Sequence[AddedPass]) -> tuple[Pass, ...]:
    """`passes`, with each of `added` behind the one that it names, and behind those that were added there before.

    Raises:
        AutoDistError: one is no pass, names none, or has the name of another.
    """
    if not isinstance(added, list | tuple):
        raise AutoDistError(f"passes is a list of passes; got {added!r}; write [{added!r}]")
    found = list(passes)
    for one in added:
        members = ("name", "contract", "after")
        lacking = [member for member in members if not hasattr(type(one), member)]
        if isinstance(one, type) or lacking or not callable(one):
            raise AutoDistError(
                f"a pass is a value whose class has {', '.join(members)} and __call__; got {one!r}; see "
                "docs/writing-a-pass.md"
            )
        names = [step.name for step in found]
        if one.name in names:
            raise AutoDistError(f"each pass has a name of its own; got another '{one.name}'; call it something else")
        if one.after not in names:
            raise AutoDistError(f"pass '{one.name}' is to run after '{one.after}'; {known_names(one.after, names)}")
        behind = [step.name for step in found if getattr(step, "after", None) == one.after]
        found.insert(names.index((one.after, *behind)[-1]) + 1, one)
    return tuple(found)


class Observer(Protocol):
    """Sees the program after each pass (a dump, a count of ops); changes nothing."""

    def __call__(self, position: int, name: str, program: Program) -> None: ...


def run_passes(program: Program, passes: Sequence[Pass], observers: Sequence[Observer] = ()) -> Program:
    """The program after all `passes`, verified after each.

    Raises:
        InvalidGraphError: a pass was given what it does not take, or left an invalid graph; the message names the pass
            and those that ran before it.
    """
    done: list[str] = []
    for position, step in enumerate(passes, start=1):
        try:
            result = _run(step, program)
        except Exception as error:
            error.add_note(f"in pass '{step.name}', after {', '.join(done) or 'no other pass'}")
            raise
        for observer in observers:
            observer(position, step.name, result)
        program = result
        done.append(step.name)
    return program


def _run(step: Pass, program: Program) -> Program:
    missing = step.contract.requires - program.holds
    if missing:
        listed = "; ".join(f"{one.name}: {one.value}" for one in Invariant if one in missing)
        raise InvalidGraphError(
            f"pass '{step.name}' requires what does not hold here ({listed}); run it after a pass that ensures it, and "
            "before one that ends it"
        )
    result = step(program)
    result = replace(result, holds=(program.holds - step.contract.ends) | step.contract.ensures)
    verify(result, program)
    return result
