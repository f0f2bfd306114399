"""Names in graphs: tensors, operations, control inputs, and the scopes the kernel writes into."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

KERNEL_SCOPE = "AutoDist"
REPLICA_SCOPE = "AutoDist-Replica-"
ASSIGNED = "/AutoDist-Assign-"
"""What stands between a captured op's name and a number in the name of one of the assignments made in its place."""


def is_reserved(name: str) -> bool:
    """Whether an operation of this name would be taken for one of the kernel's own."""
    return name.startswith((f"{KERNEL_SCOPE}/", REPLICA_SCOPE)) or ASSIGNED in name


class TensorName(NamedTuple):
    """A tensor's name as NodeDefs write it, taken apart: `op`, `op:1`, or `^op` for a control edge."""

    op: str
    output: int

    @property
    def is_control(self) -> bool:
        """Whether this is a control edge."""
        return self.output < 0

    def __str__(self) -> str:
        if self.is_control:
            return f"^{self.op}"
        return f"{self.op}:{self.output}" if self.output else self.op


def parse(name: str) -> TensorName:
    """The parts of `op`, `op:index` or `^op`."""
    if name.startswith("^"):
        return TensorName(name[1:], -1)
    op, _, index = name.partition(":")
    return TensorName(op, int(index) if index else 0)


def op_of(name: str) -> str:
    """The operation that makes the tensor (or ends the control edge) `name`."""
    return name[1:] if name.startswith("^") else name.partition(":")[0]


def producers_of(inputs: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """By op, as `op_of` says of each of its inputs; of a whole graph at once, as there are many."""
    return {
        op: tuple([name[1:] if name[0] == "^" else name.partition(":")[0] for name in names])
        for op, names in inputs.items()
    }


def replica_scope(index: int) -> str:
    """The scope of the `index`-th local replica's copy of the step."""
    return f"{REPLICA_SCOPE}{index}"


def on_replica(index: int, name: str) -> str:
    """`name`, an operation, tensor or control input, as it stands in local replica `index`."""
    if name.startswith("^"):
        return f"^{REPLICA_SCOPE}{index}/{name[1:]}"
    return f"{REPLICA_SCOPE}{index}/{name}"


def replica_of(name: str) -> int | None:
    """Which local replica the operation `name` belongs to; None for one that stands once on its worker."""
    if not name.startswith(REPLICA_SCOPE):
        return None
    return int(name[len(REPLICA_SCOPE) :].partition("/")[0])


def captured_name(name: str) -> str:
    """The name that the operation `name` has, or the one it is a replica's copy of, in the captured graph."""
    return name.partition("/")[2] if name.startswith(REPLICA_SCOPE) else name


def unique_names(wanted: Sequence[str], taken: Iterable[str]) -> list[str]:
    """`wanted` with `_1`, `_2`, ... after names that were there before, so that all differ, and from `taken` too."""
    used = set(taken)
    result = []
    for name in wanted:
        candidate, count = name, 0
        while candidate in used:
            count += 1
            candidate = f"{name}_{count}"
        used.add(candidate)
        result.append(candidate)
    return result
