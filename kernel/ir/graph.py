"""A graph as passes see it, immutable and indexed: producers, consumers, reachability, writers of variables.

It owns knowledge about op types (which read a variable, which are sources of batches, which are random): tables, never
substrings of an op's name. It is long, as its indices are made of one another.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import networkx as nx
import numpy as np
import tensorflow as tf

from autodist_py.kernel.ir.control_flow import BACK_EDGE, ControlFlow, control_flow
from autodist_py.kernel.ir.names import op_of, parse, producers_of
from autodist_py.proto.errors import InvalidGraphError

VARIABLE_OP = "VarHandleOp"

READS_VARIABLE = frozenset(
    {
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "VariableShape",
        "VarIsInitializedOp",
        "_ReadVariablesOp",
        "DisableCopyOnRead",
    }
)
"""Op types that take a variable's handle and leave its value as it is; every other one writes it."""

RUNS_BRANCH = frozenset({"Case", "If", "StatelessCase", "StatelessIf"})
"""Op types that run one of several functions, by their first input."""

PASSES_HANDLE = frozenset({"Identity", "IdentityN", "Switch", "Merge", "Enter", "Exit", "NextIteration"})
"""Op types whose outputs are the handles they are given."""

ITERATOR_NEXT = frozenset({"IteratorGetNext", "IteratorGetNextSync"})

SHARED_BY_NAME = frozenset(
    {"FIFOQueueV2", "IteratorV2", "PaddingFIFOQueueV2", "PriorityQueueV2", "RandomShuffleQueueV2"}
)
"""Op types that make an iterator or a queue of a plain graph, which several programs may use, by its shared name."""

INPUTS = frozenset({"Placeholder", "PlaceholderWithDefault"})

TABLES = frozenset(
    {
        "AnonymousHashTable",
        "HashTableV2",
        "InitializeTableFromTextFileV2",
        "InitializeTableV2",
        "LookupTableImportV2",
        "MutableDenseHashTableV2",
        "MutableHashTableOfTensorsV2",
        "MutableHashTableV2",
    }
)

WRITES_RESOURCE = frozenset(
    {
        "LookupTableImportV2",
        "LookupTableInsertV2",
        "LookupTableRemoveV2",
        "QueueEnqueueManyV2",
        "QueueEnqueueV2",
    }
)
"""Op types that write a resource other than a variable."""

COLLECTIVES = frozenset(
    {
        "CollectiveBcastRecvV2",
        "CollectiveBcastSendV2",
        "CollectiveGatherV2",
        "CollectiveReduceV2",
        "HorovodAllreduce",
    }
)
"""Op types by which workers take part in a collective."""
TAKES_ELEMENTS = frozenset({"QueueDequeueManyV2", "QueueDequeueUpToV2", "QueueDequeueV2", "Unstage"})
"""Op types that take elements out of a queue, which all replicas of a worker would share."""

SHOWS = frozenset(
    {
        "PrintV2",
        "WriteAudioSummary",
        "WriteHistogramSummary",
        "WriteImageSummary",
        "WriteRawProtoSummary",
        "WriteScalarSummary",
        "WriteSummary",
    }
)
"""Op types that show something to the user, and have no result."""

STANDS_ONCE = INPUTS | ITERATOR_NEXT | TABLES
"""Op types that stand once on a worker, with all that they are computed from."""

SEEDED_RANDOM = frozenset(
    {
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "FractionalAvgPool",
        "FractionalMaxPool",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomCrop",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)
"""Random op types that keep a stream, which their attributes `seed` and `seed2` set."""

SEED_INPUT = {
    **dict.fromkeys(
        (
            "StatelessRandomNormal",
            "StatelessRandomUniform",
            "StatelessRandomUniformFullInt",
            "StatelessRandomUniformInt",
            "StatelessTruncatedNormal",
            "StatelessRandomNormalV2",
            "StatelessRandomUniformFullIntV2",
            "StatelessRandomUniformIntV2",
            "StatelessRandomUniformV2",
            "StatelessTruncatedNormalV2",
            "StatelessRandomGammaV2",
            "StatelessRandomGammaV3",
            "StatelessRandomBinomial",
            "StatelessRandomPoisson",
            "StatelessParameterizedTruncatedNormal",
            "StatelessShuffle",
        ),
        1,
    ),
    "StatelessMultinomial": 2,
    "StatelessSampleDistortedBoundingBox": 3,
}
"""Stateless random op types, and which of their inputs is the seed (or, of the newer ones, the key)."""

DRAWN_ALIKE = "_autodist_drawn_alike"
"""The attribute of a random op that draws the same on all replicas: numbers of the whole batch, or of no example."""


def functions_of(node: tf.compat.v1.NodeDef) -> Iterator[tuple[str, str]]:
    """(attribute, function name) for every library function that `node` calls."""
    for key, value in sorted(node.attr.items()):
        if value.HasField("func"):
            yield key, value.func.name
        elif value.HasField("list"):
            for function in value.list.func:
                yield key, function.name


def has_function_attribute(node: tf.compat.v1.NodeDef) -> bool:
    """Whether ops of `node`'s type have attributes that may hold functions."""
    return any(value.HasField("func") or value.HasField("list") for value in node.attr.values())


def rename_functions(node: tf.compat.v1.NodeDef, renamed: Mapping[str, str]) -> None:
    """Make `node` call `renamed[name]` wherever it calls the library function `name`; others stay."""
    for value in node.attr.values():
        if value.HasField("func"):
            value.func.name = renamed.get(value.func.name, value.func.name)
        elif value.HasField("list"):
            for function in value.list.func:
                function.name = renamed.get(function.name, function.name)


def _not_waiting(node: tf.compat.v1.NodeDef, ops: Collection[str]) -> tf.compat.v1.NodeDef:
    """`node`, or a copy of it that does not wait for any of `ops`."""
    gone = [name for name in node.input if name[0] == "^" and name[1:] in ops]
    if not gone:
        return node
    edited = copy.deepcopy(node)
    for name in gone:
        edited.input.remove(name)
    return edited


class GraphView:
    """A graph as passes see it: immutable, and indexed.

    Graphs that passes make of one another share the ops (`NodeDef`s) that no pass touched, with what is known of them;
    so a pass costs what it changes, and its verification too. Nobody may edit a `NodeDef` that is in a view.
    """

    def __init__(self, graph: tf.compat.v1.GraphDef):
        """Index `graph`, which must not be edited while the view is in use.

        Raises:
            InvalidGraphError: two ops have the same name.
        """
        self.versions = graph.versions
        self.functions: tuple[tf.compat.v1.NodeDef, ...] = tuple(graph.library.function)
        self.nodes: dict[str, tf.compat.v1.NodeDef] = {}
        self.producers: dict[str, tuple[str, ...]] = {}
        """For each op, those that it reads or waits for: one for each input, whether it is in the graph or not."""
        self._put(self._named(graph.node))

    def made_of(self, nodes: Iterable[tf.compat.v1.NodeDef], functions: Iterable[tf.compat.v1.NodeDef]) -> "GraphView":
        """A new graph of other `nodes`, with this one's library and more `functions`."""
        result = GraphView(tf.compat.v1.GraphDef(versions=self.versions))
        result.functions = (*self.functions, *functions)
        result._put(result._named(nodes))
        return result

    def changed(
        self, *, added: Iterable[tf.compat.v1.NodeDef], replaced: Iterable[tf.compat.v1.NodeDef]
    ) -> "GraphView":
        """A new graph: this one with `added` ops, and others in the place of those that are `replaced`."""
        result = self.made_of((), ())
        result.nodes, result.producers = dict(self.nodes), dict(self.producers)
        new = result._named(added)
        new |= {node.name: node for node in replaced}
        result._put(new)
        return result

    def without(self, ops: Collection[str]) -> "GraphView":
        """A new graph: this one without `ops`, and without waiting for them; what reads them still names them."""
        return self.made_of([_not_waiting(node, ops) for name, node in self.nodes.items() if name not in ops], ())

    def _named(self, nodes: Iterable[tf.compat.v1.NodeDef]) -> dict[str, tf.compat.v1.NodeDef]:
        """New ops by name."""
        named: dict[str, tf.compat.v1.NodeDef] = {}
        for node in nodes:
            name = node.name
            other = named.setdefault(name, self.nodes.get(name, node))
            if other is not node:
                raise InvalidGraphError(f"two ops have the name '{name}': {other.op} and {node.op}")
        return named

    def _put(self, nodes: Mapping[str, tf.compat.v1.NodeDef]) -> None:
        """The ops stand under their names, whatever did."""
        if nodes:
            self.nodes |= nodes
            self.producers |= producers_of({name: node.input for name, node in nodes.items()})

    def graph_def(self) -> tf.compat.v1.GraphDef:
        """The graph as TensorFlow's message, a copy."""
        graph = tf.compat.v1.GraphDef(versions=self.versions, node=self.nodes.values())
        graph.library.function.extend(self.functions)
        return graph

    def constant(self, tensor: str) -> np.ndarray | None:
        """The value of `tensor` where it is a constant; None for every other tensor."""
        node = self.nodes[op_of(tensor)]
        while node.op == "Identity":
            node = self.nodes[op_of(node.input[0])]
        return np.asarray(tf.make_ndarray(node.attr["value"].tensor)) if node.op == "Const" else None

    def is_within(self, other: "GraphView") -> bool:
        """Whether `other` has all names of ops and functions that this graph has."""
        return self.nodes.keys() <= other.nodes.keys() and self.library.keys() <= other.library.keys()

    @cached_property
    def library(self) -> dict[str, tf.compat.v1.NodeDef]:
        """Library functions by name."""
        return {function.signature.name: function for function in self.functions}

    @cached_property
    def shapes(self) -> Mapping[str, Sequence[tf.TensorShape]]:
        """For each op the shapes of its results, as far as TensorFlow infers them; it takes 0.1 ms an op."""
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(self.graph_def(), name="")
        return {op.name: [result.shape for result in op.outputs] for op in graph.get_operations()}

    @cached_property
    def scalars(self) -> frozenset[str]:
        """Ops whose results are scalars, as far as TensorFlow infers it; handles of variables are none."""
        return frozenset(
            op
            for op, shapes in self.shapes.items()
            if self.nodes[op].op != VARIABLE_OP and shapes and all(shape.rank == 0 for shape in shapes)
        )

    @cached_property
    def digraph(self) -> "nx.DiGraph[str]":
        """Ops as vertices, data and control edges from producer to consumer; back edges of loops are left out."""
        digraph: nx.DiGraph[str] = nx.DiGraph()
        digraph.add_nodes_from(self.nodes)
        digraph.add_edges_from(
            (producer, name)
            for name, producers in self.producers.items()
            for producer in producers
            if producer in self.nodes and self.nodes[producer].op not in BACK_EDGE
        )
        return digraph

    def order(self) -> Iterator[str]:
        """The ops, each after all that it reads or waits for."""
        return nx.topological_sort(self.digraph)

    def of_type(self, types: Collection[str]) -> Iterator[tf.compat.v1.NodeDef]:
        """The nodes whose op type is among `types`, in graph order."""
        return (node for node in self.nodes.values() if node.op in types)

    def users(self, ops: Collection[str]) -> dict[str, list[str]]:
        """For each of `ops`, the ops that read it or wait for it, in graph order; one scan, without the whole index."""
        found: dict[str, list[str]] = {op: [] for op in ops}
        for name, producers in self.producers.items():
            for producer in producers:
                if producer in found and found[producer][-1:] != [name]:
                    found[producer].append(name)
        return found

    def ancestors(self, sinks: Iterable[str], *, blocked: Collection[str] = ()) -> set[str]:
        """All ops that reach `sinks` (included) without going through an op of `blocked`."""
        return self._reach(sinks, self.producers, blocked)

    def dataflow_descendants(self, sources: Iterable[str], *, blocked: Collection[str] = ()) -> set[str]:
        """All ops reached from `sources` (included) along data edges, without going through an op of `blocked`."""
        return self._reach(sources, self._readers, blocked)

    def dataflow_ancestors(self, sinks: Iterable[str], *, blocked: Collection[str] = ()) -> set[str]:
        """As `ancestors`, along data edges only."""
        return self._reach(sinks, self._read_by, blocked)

    def dataflow_consumers(self, ops: Iterable[str]) -> set[str]:
        """The ops that read a result of one of `ops`."""
        return {consumer for op in ops for consumer in self._readers[op]}

    def dataflow_order(self, ops: Collection[str]) -> Iterator[str]:
        """`ops`, each after those of them that it reads; loops of TensorFlow 1 are entered where they begin."""
        seen: set[str] = set()
        for end in sorted(ops, key=self._positions.__getitem__):
            pending = [(end, False)]
            while pending:
                name, ready = pending.pop()
                if ready:
                    yield name
                elif name not in seen:
                    seen.add(name)
                    pending.append((name, True))
                    pending += [
                        (other, False)
                        for other in self._read_by[name]
                        if other in ops and other not in seen and self.nodes[other].op not in BACK_EDGE
                    ]

    def waits(self, op: str, other: str) -> Iterator[tuple[str, str]]:
        """The control edges by which `op` waits for `other`, each from the first of a pair to the second.

        No edge may lead into a loop of TensorFlow 1 or out of one, so what enters it waits, or what leaves it is waited
        for. An op that is not in the graph stands in no loop.

        Raises:
            InvalidGraphError: nothing leaves the loop of `other` after it, or it runs in a branch only.
        """
        flow = self.control_flow
        deciding = flow.predicates.get(other, frozenset()) - flow.predicates.get(op, frozenset())
        if any(self.nodes[one].op != "LoopCond" for one in deciding):
            raise InvalidGraphError(
                f"'{op}' must wait for '{other}', which runs in a branch of TensorFlow 1's control flow only, and "
                "so would not run in each step. Call tf.compat.v1.enable_control_flow_v2() before the graph is built"
            )
        node = self.nodes.get(op)
        begins = flow.ways_in(op if node is None or node.op != "Exit" else op_of(node.input[0]))
        if node is not None and node.op == "Enter":
            begins = begins[:-1]
        ends = flow.ways_in(other)
        depth = 0
        while depth < min(len(begins), len(ends)) and begins[depth] == ends[depth]:
            depth += 1
        waiting = [op] if len(begins) == depth else self._entering(begins[depth])
        awaited = [other] if len(ends) == depth else self._leaving(ends[depth], other)
        if not awaited:
            raise InvalidGraphError(
                f"'{op}' must wait for '{other}', but nothing leaves the loop '{ends[depth]}' after that"
            )
        yield from ((one, before) for before in awaited for one in waiting)

    def ends_of_branch(self, op: str) -> set[str]:
        """What ends branches and loops of TensorFlow 1 in which `op` stands, waits for it, and runs in each step.

        Of an op in no branch it is the op itself; `waits` says by which ops a loop in no branch is left.
        """
        flow = self.control_flow
        if all(self.nodes[one].op == "LoopCond" for one in flow.predicates.get(op, ())):
            return {op}
        ends = [node.name for node in self.of_type({"Exit", "Merge"}) if flow.runs_once(node.name)]
        return {one for one in ends if op in self.ancestors([one])}  # By way of a loop's next turn, too.

    def _entering(self, frame: str) -> list[str]:
        """The ops that lead into a frame."""
        return [node.name for node in self.of_type({"Enter"}) if node.attr["frame_name"].s.decode() == frame]

    def _leaving(self, frame: str, op: str) -> list[str]:
        """The ops that lead out of a frame, and wait for its op `op`."""
        of_frame = [node for node in self.of_type({"Exit"}) if frame in self.control_flow.ways_in(op_of(node.input[0]))]
        around = self.control_flow.around[frame]
        exits = [node.name for node in of_frame if self.control_flow.frames.get(node.name, "") == around]
        return [name for name in exits if op in self.ancestors([name])]

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        """For each op, where it stands in the graph."""
        return {name: position for position, name in enumerate(self.nodes)}

    @cached_property
    def control_flow(self) -> ControlFlow:
        """Where ops stand in loops and branches of TensorFlow 1."""
        is_there = any(node.op in ("Enter", "Switch") for node in self.nodes.values())
        return control_flow(self.nodes, self.order()) if is_there else ControlFlow()

    @cached_property
    def _read_by(self) -> Mapping[str, Sequence[str]]:
        """For each op, those whose results it reads, and those that decide whether it runs."""
        unread = self.control_flow.unread
        return {
            name: [
                *(producer for producer, read in zip(self.producers[name], node.input, strict=True) if read[0] != "^"),
                *sorted(unread.get(name, ())),
            ]
            for name, node in self.nodes.items()
        }

    @cached_property
    def _readers(self) -> Mapping[str, Sequence[str]]:
        """For each op, those that read its results."""
        readers: dict[str, list[str]] = {name: [] for name in self.nodes}
        for name, producers in self._read_by.items():
            for producer in producers:
                if producer in readers:
                    readers[producer].append(name)
        return readers

    @staticmethod
    def _reach(starts: Iterable[str], neighbours: Mapping[str, Iterable[str]], blocked: Collection[str]) -> set[str]:
        seen = set(starts) - set(blocked)
        pending = list(seen)
        while pending:
            for other in neighbours[pending.pop()]:
                if other not in seen and other not in blocked:
                    seen.add(other)
                    pending.append(other)
        return seen

    @cached_property
    def writes(self) -> dict[str, tuple[str, ...]]:
        """Variable handle op -> the ops that write the variable, in graph order."""
        writers: dict[str, list[str]] = {node.name: [] for node in self.of_type({VARIABLE_OP})}
        handles = {name: name for name in writers}
        passing = {node.name for node in self.of_type(PASSES_HANDLE)} if writers else set()
        for name in self.dataflow_order(passing):  # Which is not always that of the graph: see `tf.compat.v1.cond`.
            given = [handles[producer] for producer in self._read_by[name] if producer in handles]
            if given:
                handles[name] = given[0]
        for node in self.nodes.values():
            if node.name in passing:
                continue
            for position, tensor in enumerate(parse(name) for name in node.input):
                handle = None if tensor.is_control else handles.get(tensor.op)
                if handle is not None and self._input_is_written(node, position):
                    writers[handle].append(node.name)
        return {handle: tuple(dict.fromkeys(names)) for handle, names in writers.items()}

    def _input_is_written(self, node: tf.compat.v1.NodeDef, position: int) -> bool:
        if node.op in READS_VARIABLE:
            return False
        called = [name for _, name in functions_of(node) if name in self.library]
        if not called:
            return True
        offset = 1 if node.op in RUNS_BRANCH else 0
        return any(self._argument_is_written(name, position - offset) for name in called)

    def _argument_is_written(self, function_name: str, position: int) -> bool:
        function = self.library[function_name]
        if not 0 <= position < len(function.signature.input_arg):
            return True
        handles = {function.signature.input_arg[position].name}
        for node in function.node_def:
            for index, name in enumerate(node.input):
                if name.startswith("^") or name.partition(":")[0] not in handles:
                    continue
                if node.op in PASSES_HANDLE:
                    handles.add(node.name)
                elif self._input_is_written(node, index):
                    return True
        return False
