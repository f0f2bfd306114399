"""What a strategy means for a graph on some nodes: who has which variable, and what a step sends over which link.

It works without TensorFlow: it counts from the three values.
"""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from autodist_py.capture.inexact import inexact
from autodist_py.kernel.collectives.engines import automatic_engine, has_automatic
from autodist_py.proto import strategy_pb2 as pb
from autodist_py.proto import wire
from autodist_py.proto.compressors import Compressor, text_of
from autodist_py.proto.dtypes import ITEM_SIZES
from autodist_py.proto.errors import AutoDistError, StrategyError
from autodist_py.proto.graph_item import GraphItem, Variable
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from autodist_py.proto.text import count, short, table
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy

_INDEX_BYTES = 8
_WORD_BYTES = 4
_HEADER = ("variable", "shape", "bytes", "gradient", "synchronizer", "group", "shards", "compressor", "a step sends")
_PLAN, _STRATEGY, _FAILURE = "plan.txt", "strategy.pb", "failure.json"


class Traffic(NamedTuple):
    """Bytes that a step sends.

    Attributes:
        nbytes: whatever the batch.
        per_row: for each row of a table that a worker's batch uses, however often.
        per_use: for each time that it uses one.
    """

    nbytes: float = 0.0
    per_row: float = 0.0
    per_use: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":  # type: ignore[override]
        return Traffic(self.nbytes + other.nbytes, self.per_row + other.per_row, self.per_use + other.per_use)

    def share(self, share: float) -> "Traffic":
        """What a shard of that share of the variable has of it, if the rows that are used are spread evenly."""
        return Traffic(self.nbytes * share, self.per_row * share, self.per_use * share)

    def __str__(self) -> str:
        sizes = zip(self, ("", " a row", " a use"), strict=True)
        parts = [f"{decimal(round(size))}{what}" for size, what in sizes if size]
        return " + ".join(parts) or decimal(0)


class Link(NamedTuple):
    """One direction between two workers, by rank."""

    source: int
    target: int


class Part(NamedTuple):
    """A shard of a variable, or all of it, and what its gradient is."""

    variable: Variable
    shape: tuple[int, ...]
    is_sparse: bool

    @property
    def share(self) -> float:
        """How much of the variable it is."""
        elements = math.prod(self.variable.shape)
        return math.prod(self.shape) / elements if elements else 1.0

    @property
    def item(self) -> int:
        """The bytes of a number."""
        return ITEM_SIZES.get(self.variable.dtype, 0)

    @property
    def row_bytes(self) -> float:
        """The bytes of a row of the variable."""
        rows = self.variable.shape[0] if self.variable.shape else 1
        return self.variable.nbytes / rows if rows else self.item


@dataclass(frozen=True, slots=True)
class PlannedSchedule:
    """What is known of a step's communication.

    Attributes:
        text: its events, in order, or why there are none; "": not known.
        factors: for each variable whose gradient is gathered by its factors, their bytes on a replica.
        of_all_examples: what ops read of all examples, and which ones; "": nothing.
    """

    text: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)
    of_all_examples: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A strategy for an item on some nodes.

    Attributes:
        item: what is trained.
        resources: on what.
        strategy: how.
        schedule: the step's communication.
    """

    item: GraphItem
    resources: ResourceSpec
    strategy: Strategy
    schedule: PlannedSchedule = field(default_factory=PlannedSchedule)

    def traffic(self, name: str) -> dict[Link, Traffic]:
        """What a step sends for one variable, by link; nothing within a worker.

        Collectives are rings (each of n workers sends 2 (n - 1) / n of the bytes; of rows that are gathered, those of
        n - 1 workers, and so of factors, by the first batch). A server is sent gradients, and sends values; of a table
        that is not brought whole, the rows that are asked for by their indices, each once. Gradients of rows are
        counted as if none were added up, and as dense ones only where the strategy says that they travel so.
        """
        found: dict[Link, Traffic] = defaultdict(Traffic)
        variable, is_sparse = self.item.variable(name), name in self._sparse
        node = self.strategy.node(name)
        for synchronizer, shape in node.parts(variable.shape):
            part = Part(variable, shape, is_sparse)
            if synchronizer.as_all_reduce:
                flows = self._ring(part, synchronizer.as_all_reduce)
            elif synchronizer.as_ps:
                flows = self._served(part, synchronizer.as_ps)
            for link, traffic in flows:
                found[link] += traffic
        return dict(found)

    def links(self) -> dict[Link, Traffic]:
        """What a step sends for all variables, by link, in order."""
        total: dict[Link, Traffic] = defaultdict(Traffic)
        for node in self.strategy.node_config:
            for link, traffic in self.traffic(node.var_name).items():
                total[link] += traffic
        return dict(sorted(total.items()))

    @property
    def _sparse(self) -> frozenset[str]:
        return frozenset(variable.name for variable in self.item.sparse_variables)

    @property
    def _engine(self) -> str:
        """What AUTO stands for, in words."""
        engine = automatic_engine(self.item, self.strategy, self.resources)
        return f"{engine}, if every worker has it, else RING" if engine == "HOROVOD" else engine

    def _ring(self, part: "Part", synchronizer: AllReduceSynchronizer) -> Iterator[tuple[Link, Traffic]]:
        workers = len(self.resources.workers)
        if workers == 1:
            return
        idle = {node.address for node in self.resources.workers} - set(map(_address, self.strategy.replicas))
        compressor = synchronizer.compressor
        # What is compressed is a worker's, of all its replicas.
        is_one_ring = synchronizer.spec == "RING" and compressor.passes_through
        members = len(self.strategy.replicas) + len(idle) if is_one_ring else workers
        times = workers - 1 if compressor.gathers else 2 * (members - 1) / members
        traffic = Traffic(times * compressor.wire_bytes(part.shape, part.item))
        if part.variable.name in self.schedule.factors:
            replicas = max(Counter(map(_address, self.strategy.replicas)).values())
            traffic = Traffic((workers - 1) * replicas * self.schedule.factors[part.variable.name])
        if part.is_sparse and not synchronizer.sparse_as_dense:
            row_bytes = part.row_bytes * _rows_carried(part, compressor)
            traffic = Traffic(per_use=(workers - 1) * (row_bytes + _INDEX_BYTES)).share(part.share)
        for rank in range(workers):
            yield Link(rank, (rank + 1) % workers), traffic

    def _served(self, part: "Part", synchronizer: PSSynchronizer) -> Iterator[tuple[Link, Traffic]]:
        addresses = [node.address for node in self.resources.workers]
        server = addresses.index(_address(synchronizer.reduction_destination))
        compressor = synchronizer.compressor
        whole = Traffic(part.variable.nbytes).share(part.share)
        rows = Traffic(per_use=part.row_bytes * _rows_carried(part, compressor) + _INDEX_BYTES).share(part.share)
        gradient = rows if part.is_sparse else Traffic(compressor.wire_bytes(part.shape, part.item))
        asked, answered = (
            (Traffic(per_row=_INDEX_BYTES).share(part.share), Traffic(per_row=part.row_bytes).share(part.share))
            if part.is_sparse and not synchronizer.local_replication
            else (Traffic(), whole)
        )
        for rank in set(range(len(addresses))) - {server}:
            yield Link(rank, server), gradient + asked
            yield Link(server, rank), answered

    def __str__(self) -> str:
        links = self.links()
        rows = [self._row(node) for node in self.strategy.node_config]
        names = [node.address for node in self.resources.workers]
        nodes = ((name, _total(links, source=rank), _total(links, target=rank)) for rank, name in enumerate(names))
        pairs = ((f"{names[link.source]} -> {names[link.target]}", traffic) for link, traffic in links.items())
        title = (
            f"Plan: {count(len(rows), 'variable')}, {count(len(self.strategy.replicas), 'replica')} on "
            f"{count(len(names), 'node')}, strategy {short(self.strategy.id)}"
        )
        parts = [title, table(_HEADER, rows), table(("node", "sends", "receives"), nodes)]
        if links:
            parts.append(table(("link", "carries"), pairs))
        if any(traffic.per_use for traffic in links.values()):
            parts.append(
                "a use: for each time that a worker's batch uses a row of a table; a row: for each such row, once. "
                "Where an update adds rows up by itself, as SGD's does, the gradient of each row is sent once; by "
                "AllReduce that of a table of which a batch uses nearly all may be a dense one, if that is less."
            )
        parts += [text for text in (self.schedule.text, self.schedule.of_all_examples) if text]
        parts += [f"instead: {one}" for one in self.strategy.replaced]
        parts += [f"all_reduce_spec AUTO: {self._engine}"] if links and has_automatic(self.strategy) else []
        parts += [self.strategy.given_up, *(f"warning: {one}" for one in inexact(self.item))]
        return "\n\n".join(parts)

    def _row(self, node: VariableStrategy) -> tuple[object, ...]:
        variable = self.item.variable(node.var_name)
        groups = {str(one.group) for one in node.synchronizers if one.as_all_reduce}
        compressors = {text_of(one.compressor) for one in node.synchronizers if not one.compressor.passes_through}
        return (
            variable.name,
            "x".join(map(str, variable.shape)) or "scalar",
            decimal(variable.nbytes),
            "sparse" if variable.name in self._sparse else "dense",
            " ".join(dict.fromkeys(map(str, node.synchronizers))),
            " ".join(sorted(groups)),
            f"{node.num_shards} ({', '.join(map(str, node.part_sizes))})" if node.part_sizes else node.num_shards,
            " ".join(sorted(compressors)),
            sum(self.traffic(variable.name).values(), Traffic()),
        )


def _address(device: str) -> str:
    return device.rsplit(":", 2)[0]


def _rows_carried(part: "Part", compressor: Compressor) -> float:
    """How many bytes travel of each one of the rows of a sparse gradient."""
    carried = ITEM_SIZES[compressor.travels_as(part.variable.dtype)]
    width = math.prod(part.variable.shape[1:])
    if carried == part.item or not width:
        return 1.0
    return -(-width * carried // _WORD_BYTES) * _WORD_BYTES / (width * part.item)  # Carried in whole words.


def _total(links: dict[Link, Traffic], *, source: int | None = None, target: int | None = None) -> Traffic:
    chosen = (one for link, one in links.items() if source in (None, link.source) and target in (None, link.target))
    return sum(chosen, Traffic())


# -- A script that is planned -----------------------------------------------------------------------------------------


class PlanMade(SystemExit):
    """Ends the script: what it trains is known."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)


@dataclass(frozen=True, slots=True)
class Planner:
    """In the place of a script's builder: it says what that one would, of other nodes, and ends the script.

    Attributes:
        builder: the script's.
        resources: the nodes to plan for; the script itself runs in one process.
        folder: where the plan goes.
        schedule: the step's, for an item, a strategy, nodes and a number of examples.
        examples: how many the first step is given; None: not known.
    """

    builder: StrategyBuilder
    resources: ResourceSpec
    folder: Path
    schedule: Callable[[GraphItem, Strategy, ResourceSpec, int | None], PlannedSchedule]
    examples: int | None = None

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """Nothing is planned for a program that trains nothing.

        Raises:
            PlanMade: the plan is written, or why there is none.
        """
        if not item.gradients:
            return AllReduce().build(item, resources)
        try:
            strategy = build_strategy(self.builder, item, self.resources)
        except StrategyError as error:
            (self.folder / _FAILURE).write_text(json.dumps(str(error)))
            raise PlanMade(1) from error
        plan = Plan(item, self.resources, strategy, self.schedule(item, strategy, self.resources, self.examples))
        (self.folder / _PLAN).write_text(str(plan))  # Here, where what the script itself defines can be imported.
        strategy.save(self.folder / _STRATEGY)
        raise PlanMade


@dataclass(frozen=True, slots=True)
class Planned:
    """What a Planner wrote: the plan's text, and the strategy, which only its script may be able to read."""

    text: str
    strategy: pb.Strategy

    def save(self, path: Path) -> None:
        """The strategy is in the file, as `Strategy.save` writes it.

        Raises:
            StrategyError: the suffix is neither `.pb` nor `.json`, or the file cannot be written.
        """
        saved = pb.Strategy()
        saved.CopyFrom(self.strategy)
        saved.path = os.fspath(path)
        wire.save(saved, path, error=StrategyError)


def planned(folder: Path) -> Planned | None:
    """What a Planner wrote to `folder`; None: the script trained nothing.

    Raises:
        AutoDistError: the builder refused.
    """
    failure = folder / _FAILURE
    if failure.exists():
        raise AutoDistError(json.loads(failure.read_text()))
    if not (folder / _STRATEGY).exists():
        return None
    strategy = wire.load(pb.Strategy, folder / _STRATEGY, error=StrategyError)
    return Planned((folder / _PLAN).read_text(), strategy)
