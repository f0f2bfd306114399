"""What a program of the corpus says of itself: its family, its door, how near it must come, and where it is refused."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.support.oracle import EXACT

FOLDER = Path(__file__).parent / "programs"

Door = Literal["graph session", "step function", "Keras fit", "custom train_step"]

FAMILIES = (
    "convnets and residual nets",
    "attention and embeddings",
    "recurrent nets",
    "generative models",
    "recommenders",
    "losses over the whole batch",
    "contrastive and metric learning",
    "graph networks",
    "flows and physics",
    "reinforcement learning",
    "optimization methods",
    "training recipes",
    "TF1",
)


STRATEGIES: Mapping[str, str] = {
    "AllReduce": "AllReduce",
    "PSLoadBalancing": "PSLoadBalancing",
    "PartitionedPS": "PartitionedPS(min_shard_bytes=1)",
    "ShardedOptimizer": "ShardedOptimizer",
    "Parallax": "Parallax",
}


class Seen(NamedTuple):
    """What a program shows after a step: what the step returned, and all that it trains or counts in."""

    results: Any
    owners: tuple[Any, ...]


class Refusal(NamedTuple):
    """The reason that a refusal gives, as a regular expression, and the clusters' names; none named: all."""

    reason: str
    clusters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Header:
    """Of one program.

    Attributes:
        family: one of `FAMILIES`.
        door: how the training code comes in.
        tolerance: the largest difference to one device, relative to the largest value of the tensor.
        sizes: the numbers of examples of the steps.
        refused: by strategy, why it is refused; under all others it is equal to one device.
        still: parts of names of variables that rounding alone moves, as their gradient is zero in exact arithmetic
            (an attention's bias of keys): they are compared with `tolerance` as it is, not relative to themselves.
        floatx: Keras's float type.
    """

    family: str
    door: Door
    tolerance: float = EXACT
    sizes: tuple[int, ...] = (8, 5, 7)
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    still: tuple[str, ...] = ()
    floatx: str = "float64"

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"a family is one of {FAMILIES}, not {self.family!r}")

    def refusal(self, strategy: str, cluster: str) -> str | None:
        """The reason for which this program is refused there; None: it trains as on one device."""
        refusal = self.refused.get(strategy)
        if refusal is None or (refusal.clusters and cluster not in refusal.clusters):
            return None
        return refusal.reason


class Program(NamedTuple):
    """A file of `programs/`: what it says of itself, and what trains it."""

    name: str
    header: Header
    train: Callable[[Any, Header], Iterator[Seen]]


def program_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def load(name: str) -> Program:
    module = importlib.import_module(f"tests.corpus.programs.{name}")
    return Program(name, module.HEADER, module.train)
