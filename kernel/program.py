"""The value that passes map: a graph being rewritten, with what it was made from and where it will run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from autodist_py.kernel.analysis import Analysis
from autodist_py.kernel.device import Place
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import on_replica, op_of
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.strategy import Strategy


class Promise(Enum):
    """What holds of a program's graph from some pass on."""

    COMBINED = "gradients and statistics are combined over all replicas before anything reads them"
    PLACED = "every op has a device, and an update that of its variable"
    ORDERED = "each launch waits for the one before it"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose beside the strategy.

    Attributes:
        batch: "global": every worker is given the whole batch; "local": each its own part.
        fetch_reduction: how a scalar or fixed-shape float that differs between replicas is fetched, "mean" or "sum".
        sum_duplicates: sum duplicate rows of sparse gradients before the update sees them.
        first_instance_key: the key of the program's first collective, the same on every worker; others follow.
    """

    batch: str = "global"
    fetch_reduction: str = "mean"
    sum_duplicates: bool = False
    first_instance_key: int = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors that say how the step's examples are spread: all scalars, made once per worker.

    Attributes:
        rows: number of examples (int64) of each local replica.
        total: number of examples (int64) of the step, over all workers.
    """

    rows: tuple[str, ...]
    total: str


@dataclass(frozen=True, slots=True)
class Launch:
    """One collective.

    Attributes:
        ops: the ops by which this worker's devices take part in it.
        rank: where it stands among the others; made from the captured graph alone, so it is the same on every worker.
        what: what it combines, in words.
    """

    ops: tuple[str, ...]
    rank: tuple[int, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Program:
    """A graph between two passes.

    Attributes:
        item: the captured single-device program.
        analysis: facts about its graph.
        strategy: how its variables are synchronized.
        place: the replicas, and which worker this is.
        options: what the user chose beside the strategy.
        graph: the graph as rewritten so far; passes make a new one, they never edit it.
        fetches: for each of the item's outputs, the tensor that now stands for it.
        run_ops: ops to run each step beside the fetches.
        shared: ops of the captured graph that stand once per worker, not once per replica.
        batch: how examples are spread over replicas; None while, or where, nothing is split.
        launches: the collectives; after the pass that orders them, in the order in which every worker launches them.
        holds: what passes have brought about and later ones keep; `verify` checks it.
        next_instance_key: the key of the next collective that a pass adds.
    """

    item: GraphItem
    analysis: Analysis
    strategy: Strategy
    place: Place
    options: Options
    graph: GraphView
    fetches: tuple[str, ...]
    run_ops: tuple[str, ...]
    shared: frozenset[str] = frozenset()
    batch: Batch | None = None
    launches: tuple[Launch, ...] = ()
    holds: frozenset[Promise] = frozenset()
    next_instance_key: int = 1

    def promising(self, promise: Promise, graph: GraphView) -> "Program":
        """This program with another graph, of which `promise` holds."""
        return replace(self, graph=graph, holds=self.holds | {promise})

    @property
    def num_local_replicas(self) -> int:
        return len(self.place.local_replicas)

    @property
    def is_single(self) -> bool:
        """Whether one replica does the whole step: nothing to split, nothing to combine."""
        return self.place.num_replicas == 1

    def copies(self, tensor: str) -> Iterator[str]:
        """Where `tensor` of the captured graph stands now: on each local replica, or once if it is shared."""
        if op_of(tensor) in self.shared:
            yield tensor
            return
        for replica in range(self.num_local_replicas):
            yield on_replica(replica, tensor)
