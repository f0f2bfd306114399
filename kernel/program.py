"""The value that passes map: a graph being rewritten, with what it was made from and where it will run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

from autodist_py.kernel.events import Collective, Schedule
from autodist_py.kernel.ir.dataflow import Analysis, analyse
from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.message_layout import MessageLayout
from autodist_py.kernel.ir.names import on_replica, op_of
from autodist_py.kernel.ir.state import CompressorState
from autodist_py.kernel.topology import Topology
from autodist_py.proto.graph_item import GraphItem, Output
from autodist_py.proto.strategy import Strategy, shard_name

UNDER_WAY = 2
"""How many collectives a worker has under way at once: benchmarks/step_time.py, docs/performance.md."""


class Invariant(Enum):
    """What holds of a program between two passes. Passes require some, and bring others about; `verify` checks them."""

    CAPTURED = "the graph is for one device, and is the one that has been analysed"
    UNBRANCHED = "a branch that updates variables which live apart stays whole for a reason that the program states"
    CUT = "the strategy cuts no variable: its shards are variables themselves"
    SCHEDULED = "the schedule's events are of tensors of the captured graph"
    REPLICATED = "every op is of one local replica, of the kernel, or shared by all"
    REFRESHED = "a further replica's variable is assigned the first one's value"
    READ = "no iterator is read but by the kernel, where workers tell one another whether they have data"
    SPLIT = "no op of a replica reads a whole batch"
    REDUCED = "each event that travels by collectives has some"
    COMBINED = "gradients and statistics are combined over all replicas before anything reads them"
    WRITTEN = "each write of the captured step is done once, where the variable lives, and is run"
    PLACED = "every op has a device, and an update that of its variable"
    ORDERED = "collectives are issued in the schedule's order, and variables are read and written in the captured one"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose beside the strategy.

    Attributes:
        batch: "global": every worker is given the whole batch; "local": each its own part.
        fetch_reduction: how a scalar or fixed-shape float that differs between replicas is fetched, "mean" or "sum".
        sum_duplicates: sum duplicate rows of sparse gradients before the update sees them.
        strict: refuse to train a variable whole that the strategy cuts.
        refuses_mixtures: refuse losses that mix examples, each replica having its own.
        first_instance_key: the key of the program's first collective, the same on every worker; others follow.
        channel: what the names of the program's queues begin with: the same on every worker, and of no other program.
        examples: how many the chief is given in the step that the program is compiled for: the same on every worker;
            None: not known.
        bandwidth: of the slowest node's link, in bit/s; None: nothing leaves the host.
        keeps_copies: whether further replicas' variables are the user's own, and keep their values from step to step;
            else those that are `per_replica` are, and each step begins with the first replica's of others.
        folds_seeds: whether each replica draws numbers of its own where the program gives a seed.
    """

    batch: str = "global"
    fetch_reduction: str = "mean"
    sum_duplicates: bool = False
    strict: bool = True
    refuses_mixtures: bool = True
    first_instance_key: int = 1
    channel: str = "channel"
    examples: int | None = None
    bandwidth: float | None = None
    keeps_copies: bool = False
    folds_seeds: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors that say how the step's examples are spread: all scalars, made once per worker.

    Attributes:
        rows: number of examples (int64) that each local replica counts for: its own, or 1 where the step has none.
        total: their sum (int64) over all workers.
        places: where the local replicas' examples stand among those of the step, if that is asked for: the number
            (int64) of all, of those before each replica's, and of each replica's. Several batches may have several
            numbers of rows, cut in the same proportions: these are counted then.
    """

    rows: tuple[str, ...]
    total: str
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Channel:
    """How workers and a server exchange messages: by queues, named alike in every process.

    Attributes:
        server: the server's rank.
        service: what the names of the queues of all its exchanges begin with.
        number: which of the server's exchanges in a step it is for.
        sent: what a worker's message brings.
        answered: what the server's answer brings.
        counts: whether the last that a message brings is how much it counts among others.
    """

    server: int
    service: str
    number: int
    sent: MessageLayout
    answered: MessageLayout
    counts: bool = False

    @property
    def name(self) -> str:
        """What the names of its own queues begin with."""
        return f"{self.service}/{self.number}"

    @property
    def bell(self) -> str:
        """The queue that says which messages have come."""
        return f"{self.service}/bell"

    def push(self, worker: int) -> str:
        """The queue of the worker's messages."""
        return f"{self.name}/push-{worker}"

    def answer(self, worker: int) -> str:
        """The queue of the answers to the worker."""
        return f"{self.name}/answer-{worker}"


@dataclass(frozen=True, slots=True)
class ServerFunction:
    """A graph that a server runs, whose variables are those of the first local replica.

    Attributes:
        graph: the graph.
        takes: what it is given, by name: what was sent, or what other functions keep.
        gives: the tensors that it returns.
        run_ops: ops to run beside.
    """

    graph: GraphView
    takes: tuple[TensorSpec, ...]
    gives: tuple[str, ...]
    run_ops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """What a server runs in one exchange.

    Attributes:
        channel: where messages come from, and answers go to.
        update: what it does with the messages of `num_messages` workers: it takes their components, in the order of
            the messages, and then `taken`.
        num_messages: how many messages become one update.
        each: whether every message is one by itself, and changes nothing.
        taken: the names of what earlier exchanges of the step kept.
        kept: how later functions of the step name what `update` gives.
        answer: it takes what is kept, by name, and gives the components of the answer.
    """

    channel: Channel
    update: ServerFunction
    num_messages: int
    each: bool
    taken: tuple[str, ...]
    kept: tuple[str, ...]
    answer: ServerFunction


@dataclass(frozen=True, slots=True)
class Shards:
    """A variable that is cut, each of whose shards is a variable by itself.

    Attributes:
        variable: its name.
        axis: along which it is cut.
        shapes: the shards'.
        is_whole: whether the program reads the variable itself, too, and gives it its new value each step.
    """

    variable: str
    axis: int
    shapes: tuple[tuple[int, ...], ...]
    is_whole: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The shards'."""
        return tuple(shard_name(self.variable, index) for index in range(len(self.shapes)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shards' sizes along the axis."""
        return tuple(shape[self.axis] for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Which variables are cut into shards, and why others stay whole.

    Attributes:
        shards: the variables that are cut.
        part_of: for each part of a variable, or of its gradient alone, the captured variable.
        left_whole: those that were to be cut and cannot be, with the reasons.
        whole_branches: the branches over variables that live apart which cannot be taken apart, with the reasons.
    """

    shards: tuple[Shards, ...] = ()
    part_of: Mapping[str, str] = field(default_factory=dict)
    left_whole: Mapping[str, str] = field(default_factory=dict)
    whole_branches: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replication:
    """What this worker's replicas share, and how they share out the examples.

    Attributes:
        shared: ops of the captured graph that stand once per worker, not once per replica.
        batch: how examples are spread over replicas; None while, or where, nothing is split.
    """

    shared: frozenset[str] = frozenset()
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class Lowered:
    """What the schedule's events have become on this worker.

    Attributes:
        collectives: those that are in the graph; once ordered, in the order of their issue.
        pieces: for each op whose result is computed in pieces instead, the ops that compute these, in order.
        next_instance_key: the key of the next collective that a pass adds.
        compressor_states: what compressors keep from step to step.
        channels: how messages are exchanged with servers.
        servers: what this worker runs as a server, in order.
    """

    collectives: tuple[Collective, ...] = ()
    pieces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    next_instance_key: int = 1
    compressor_states: tuple[CompressorState, ...] = ()
    channels: tuple[Channel, ...] = ()
    servers: tuple[ServerProgram, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A graph between two passes.

    Attributes:
        analysis: the captured single-device program, and facts about its graph.
        strategy: how its variables are synchronized.
        topology: the replicas, and which worker this is.
        options: what the user chose beside the strategy.
        graph: the graph as rewritten so far; passes make a new one, they never edit it.
        fetches: for each of the item's outputs, the tensor that now stands for it; for one that is `per_replica`, once
            replicated, those of all local replicas.
        run_ops: ops to run each step beside the fetches.
        cuts: which variables are cut into shards.
        replication: what this worker's replicas share.
        schedule: what workers tell one another; empty until the pass that plans it.
        lowered: what the schedule's events have become.
        holds: what passes have brought about and later ones keep: the runner's, by their contracts; `verify` checks it.
    """

    analysis: Analysis
    strategy: Strategy
    topology: Topology
    options: Options
    graph: GraphView
    fetches: tuple[str, ...]
    run_ops: tuple[str, ...]
    cuts: Cuts = Cuts()
    replication: Replication = Replication()
    schedule: Schedule = field(default_factory=Schedule)
    lowered: Lowered = Lowered()
    holds: frozenset[Invariant] = frozenset({Invariant.CAPTURED})

    @property
    def item(self) -> GraphItem:
        """The captured single-device program."""
        return self.analysis.item

    def of_item(self, item: GraphItem) -> "Program":
        """The program before it is replicated, where it captures `item` instead."""
        analysis = analyse(item, batch=self.options.batch, is_together=self.topology.is_together)
        return replace(
            self,
            analysis=analysis,
            graph=analysis.captured,
            fetches=tuple(output.tensor for output in item.outputs),
            run_ops=item.run_ops,
        )

    @property
    def num_local_replicas(self) -> int:
        return len(self.topology.local_replicas)

    @property
    def is_single(self) -> bool:
        """Whether there is one replica alone: nothing to split, nothing to combine."""
        return len(self.topology.everyone) == 1

    @property
    def serves_itself(self) -> bool:
        """Whether no message travels to a server: one worker, each of whose gradients is an update."""
        return len(self.topology.all_workers) == 1 and self.strategy.consistency.replicas_to_aggregate <= 1

    @property
    def held(self) -> dict[str, int]:
        """For each variable that lives on a server of several workers, the server's rank."""
        plans = self.schedule.servers.plans if self.schedule.servers and not self.serves_itself else ()
        return {handle: plan.worker for plan in plans for handle in plan.held}

    @property
    def refreshed(self) -> frozenset[str]:
        """The variables that live on a server, and whose new values the step brings to this worker."""
        plans = self.schedule.servers.plans if self.schedule.servers and not self.serves_itself else ()
        return frozenset(handle for plan in plans for exchange in plan.exchanges for handle in exchange.refreshed)

    @property
    def kept(self) -> frozenset[str]:
        """The variables of which every replica's is the user's own, and keeps its value from step to step."""
        all_are = self.options.keeps_copies
        return frozenset(variable.name for variable in self.item.variables if all_are or variable.per_replica)

    @property
    def copied(self) -> tuple[str, ...]:
        """The variables of which further replicas have copies, for the step alone."""
        apart = self.replication.shared | self.kept
        return tuple(name for name in self.analysis.writes if name not in apart)

    def fetched(self) -> Iterator[tuple[Output, tuple[str, ...]]]:
        """Each of the item's outputs with the tensors that stand for it."""
        left = iter(self.fetches)
        is_replicated = Invariant.CAPTURED not in self.holds
        for output in self.item.outputs:
            count = self.num_local_replicas if output.per_replica and is_replicated else 1
            yield output, tuple(islice(left, count))

    def issue_order(self) -> Iterator[tuple[Collective, Collective]]:
        """Of two collectives each, the one that has to be done before the other is issued.

        Rings are found by their keys, so two may be under way at once, and a small one holds no large one up. NCCL's
        must be issued in one order on all devices. Those that are found by their names need none.
        """
        ordered = [one for one in self.lowered.collectives if not one.by_name]
        ops = [self.graph.nodes[op].attr for one in ordered for op in one.ops]
        is_nccl = any("communication_hint" in attr and attr["communication_hint"].s == b"nccl" for attr in ops)
        under_way = 1 if is_nccl else UNDER_WAY
        for distance in range(under_way, 2 * under_way):  # All greater distances are sums of these.
            yield from zip(ordered, ordered[distance:], strict=False)

    def copies(self, tensor: str) -> Iterator[str]:
        """Where `tensor` of the captured graph stands now: on each local replica, or once if it is shared."""
        if op_of(tensor) in self.replication.shared:
            yield tensor
            return
        for replica in range(self.num_local_replicas):
            yield on_replica(replica, tensor)
