"""The ops of a captured program by what they are for, and what a replica is given: found before any layout is."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from autodist_py.capture.recording.layers import LayerCall
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout, Block
from autodist_py.kernel.ir.batched import batched_tensors
from autodist_py.kernel.ir.dataflow import CLOCK, random_ops
from autodist_py.kernel.ir.graph import ITERATOR_NEXT, SHOWS, VARIABLE_OP, GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.graph_item import GraphItem, Variable


@dataclass(frozen=True)
class Regions:
    """The ops of a program by what they are for.

    Attributes:
        graph: all that was captured, the losses too.
        tensor_of: a tensor by its name; only its shape and type are used.
        markers: of the gradients.
        targets: the losses that each gradient was asked for.
        assumed: what each loss is taken for where it cannot be followed.
        shown: the losses and results.
        writers: the ops that write variables, and what they write.
        ends: these, those that show something, and those that compute results.
        losses: the ops that losses are computed by.
        region: the ops that losses and ends are computed by.
        trained: the ops that depend on trained variables, and that a gradient flows through.
        trains: the ops that losses and raw gradients are computed by.
    """

    graph: GraphView
    tensor_of: Callable[[str], tf.Tensor]
    markers: Set[str]
    targets: Sequence[Sequence[str]]
    assumed: Mapping[str, BatchLayout]
    shown: Set[str]
    writers: Mapping[str, Variable]
    ends: Set[str]
    losses: Set[str]
    region: Set[str]
    trained: Set[str]
    trains: Set[str]

    def is_read(self, tensor: str, by: Set[str]) -> bool:
        """Whether `tensor` is a loss or result, or one of the ops `by` reads it."""
        name = parse(tensor)
        readers = self.graph.dataflow_consumers([name.op]) & by
        reads = (read for reader in readers for read in self.graph.nodes[reader].input if not read.startswith("^"))
        return str(name) in self.shown or any(parse(read) == name for read in reads)

    @classmethod
    def of(
        cls, item: GraphItem, whole: GraphView, targets: Sequence[Sequence[str]], tensor_of: Callable[[str], tf.Tensor]
    ) -> "Regions":
        """Sort the ops of what was captured."""
        markers = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
        losses = whole.dataflow_ancestors({op_of(name) for names in targets for name in names}, blocked=markers)
        writers = {
            writer: variable for variable in item.variables for writer in variable.update_ops if writer in whole.nodes
        }
        ends = {
            *writers,
            *(node.name for node in whole.of_type(SHOWS)),
            *(op_of(output.tensor) for output in item.outputs),
        }
        raw = {op_of(name) for marker in markers for name in whole.nodes[marker].input if not name.startswith("^")}
        kind = BatchLayout.PARTIAL_SUM if item.loss_reduction == "sum" else BatchLayout.PARTIAL_MEAN
        assumed = {str(parse(name)): kind for names in targets for name in names}
        return cls(
            graph=whole,
            tensor_of=tensor_of,
            markers=markers,
            targets=targets,
            assumed=assumed,
            shown=assumed.keys() | {str(parse(output.tensor)) for output in item.outputs},
            writers=writers,
            ends=ends,
            losses=losses,
            region=losses | whole.dataflow_ancestors(ends, blocked=markers),
            trained=_trained({gradient.variable for gradient in item.gradients}, whole, markers, tensor_of),
            trains=losses | whole.dataflow_ancestors(raw, blocked=markers),
        )


def _trained(
    variables: Set[str], graph: GraphView, markers: Set[str], tensor_of: Callable[[str], tf.Tensor]
) -> set[str]:
    """The ops that depend on the variables, and that a gradient flows through: not so through a comparison."""
    found = graph.dataflow_descendants(variables & graph.nodes.keys(), blocked=markers)
    discrete = {op for op in found if _is_discrete(op, graph, tensor_of)}
    return graph.dataflow_descendants(variables & graph.nodes.keys(), blocked=markers | discrete) - discrete


def _is_discrete(op: str, graph: GraphView, tensor_of: Callable[[str], tf.Tensor]) -> bool:
    """Whether all that `op` returns are integers, truth values or texts."""
    if graph.nodes[op].op == VARIABLE_OP or not graph.dataflow_consumers([op]):
        return False
    types = [one.dtype for one in tensor_of(f"{op}:0").op.outputs]
    return all(dtype.is_integer or dtype.is_bool or dtype == tf.string for dtype in types)


@dataclass(frozen=True)
class Sources:
    """What a replica is given that may be another one's, too.

    Attributes:
        graph: all that was captured.
        markers: of the gradients.
        rows: tensors that have a row for each example of a batch, and of which one.
        random: ops that give another result on each replica though what they read is equal.
        unknown: ops that give each worker something of its own, of which it is not known what.
        is_local: whether each worker is given its own part of the batch.
    """

    graph: GraphView
    markers: Set[str]
    rows: Mapping[str, int]
    random: Set[str]
    unknown: Set[str]
    is_local: bool

    @classmethod
    def of(cls, item: GraphItem, whole: GraphView, markers: Set[str], batch: str) -> "Sources":
        """Find what a replica is given; workers are given the same batch ("global"), or their own part ("local")."""
        unknown: set[str] = set()
        if batch == "local":
            unknown |= {one.name for one in item.inputs if one.kind == "feed" and not one.batched}
            unknown |= {node.name for node in whole.of_type(ITERATOR_NEXT)}
        rows = {str(parse(tensor.name)): tensor.batch for tensor in batched_tensors(item, whole)}
        return cls(whole, markers, rows, random_ops(whole), unknown, batch == "local")

    @cached_property
    def ops(self) -> Set[str]:
        """The ops that return what differs between replicas, whatever they read."""
        return {op_of(tensor) for tensor in self.rows} | self.random | self.unknown

    @cached_property
    def of_examples(self) -> Set[str]:
        """The ops that are computed from what differs otherwise than by being drawn."""
        return self.graph.dataflow_descendants(self.ops - self.random, blocked=self.markers)

    def block_of(self, op: str, given: Iterable[Block | None]) -> Block | None:
        """How many rows each example has in what this source returns, whose inputs have those that are `given`.

        What is random has a row for each example of that batch of which it is told the number, where there are several.
        """
        if op not in self.random or len(set(self.rows.values())) <= 1:
            return Block(1)
        return next((Block(1, block.batch) for block in given if block is not None), None)

    def of_source(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...] | None:
        """The layouts of what a replica is given, as its part of the batch; None: `node` computes what it returns."""
        own_rows = [str(parse(f"{node.name}:{index}")) in self.rows for index in range(_num_outputs(node))]
        if any(own_rows):
            rest = BatchLayout.MIXED if node.name in self.unknown else BatchLayout.REPLICATED
            return tuple(BatchLayout.SHARDED if has_rows else rest for has_rows in own_rows)
        if node.name in self.unknown:
            return (BatchLayout.MIXED,)
        if node.op == CLOCK:
            return (BatchLayout.PARTIAL_MEAN,)  # Of the times of all replicas: a time of the step, as one device's.
        return (BatchLayout.REPLICATED,) if node.name in self.markers else None


def _num_outputs(node: tf.compat.v1.NodeDef) -> int:
    """The number of results, as far as they can be rows of different inputs."""
    return len(node.attr["output_types"].list.type) if node.op in ITERATOR_NEXT else 1


@dataclass(frozen=True)
class Layers:
    """Calls of Keras's layers.

    Attributes:
        results: the calls whose results these tensors are.
        inside: the calls that these ops are a part of.
    """

    results: Mapping[str, LayerCall]
    inside: Mapping[str, LayerCall]

    @classmethod
    def of(cls, calls: Sequence[LayerCall], whole: GraphView) -> "Layers":
        """Those of the calls, in order."""
        results: dict[str, LayerCall] = {}
        inside: dict[str, LayerCall] = {}
        for call in calls:
            ends = {op_of(tensor) for tensor in (*call.reads, *call.shared)}
            results |= dict.fromkeys(call.outputs, call)
            parts = whole.dataflow_ancestors(map(op_of, call.outputs), blocked=ends) - ends
            inside |= dict.fromkeys(parts, call)
        return cls(results, inside)
