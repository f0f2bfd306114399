"""What is known of a program's values for the whole batch, and which of them its ops read combined."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from autodist_py.capture.batch.layouts.blocks import Blocks
from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.layouts.loops import Function, Functions
from autodist_py.capture.batch.layouts.regions import Sources
from autodist_py.capture.batch.whole_batch.bodies import Bodies
from autodist_py.capture.batch.whole_batch.elsewhere import Elsewhere
from autodist_py.capture.batch.whole_batch.held import Held
from autodist_py.capture.batch.whole_batch.known_shapes import KnownShapes
from autodist_py.capture.batch.whole_batch.shapes import Shapes
from autodist_py.capture.recording.user_code import line_of
from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    REPLICATED,
    SHAPE,
    SHARDED,
    BatchLayout,
)
from autodist_py.kernel.collectives.reductions import SUMMED
from autodist_py.kernel.collectives.rows import TRAVELS
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse

Edge = tuple[str, int]
"""An op, and the position of one of its inputs."""

REDUCTIONS = {PARTIAL_SUM: "sum", PARTIAL_MEAN: "mean", COUNT: "count", SHARDED: "rows", SHAPE: "shape"}
"""How what differs between replicas becomes what one device has."""


class NotFollowedError(Exception):
    """An op of which it is not known how it could be computed of the whole batch; the message says which, and why."""


@dataclass
class Values(ABC):
    """The layouts of a program, or of a function that it runs, and what its ops read combined.

    Attributes:
        graph: the program's, or the function's.
        sources: what a replica is given.
        tensor_of: a tensor by its name; only its shape and type are used.
        writers: the ops that write variables, or show something.
        given_shapes: of tensors whose shape is known though the graph does not say it.
        results: what is computed: gradients and results of the program, or what the function returns.
        draws_of_all: whether each replica draws the numbers of all examples, and takes those of its own.
        arguments: what the function is given, by the names of its ops; in it nothing is combined. None: of a program.
        functions: those that ops run.
        of_replicas: the ops of layers whose statistics are each replica's own.
        found: the layouts of what each op returns.
        whole: the ops that are computed from rows, or numbers, of the whole batch.
        edges: the inputs that are not read as they are, and how.
        drawn: the random ops that draw the same on all replicas.
        own: the ops of these layers that make a number of a replica's own examples alone.
    """

    graph: GraphView
    sources: Sources
    tensor_of: Callable[[str], tf.Tensor]
    writers: Iterable[str]
    given_shapes: Mapping[str, tf.TensorShape]
    results: Iterable[str]
    draws_of_all: bool = False
    arguments: Mapping[str, Held] | None = None
    functions: Functions = field(default_factory=Functions)
    of_replicas: frozenset[str] = frozenset()
    found: dict[str, tuple[BatchLayout, ...]] = field(default_factory=dict, init=False)
    whole: set[str] = field(default_factory=set, init=False)
    edges: dict[Edge, str] = field(default_factory=dict, init=False)
    drawn: set[str] = field(default_factory=set, init=False)
    own: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._constants = Constants(self.graph, self.tensor_of)
        self.shapes = KnownShapes(self.graph, self.tensor_of, self._constants, self.given_shapes)
        self._blocks = Blocks(self.tensor_of, self.sources, self, self._constants)
        self._sizes = Shapes(self.graph, self.shapes, self, self._constants)
        bodies = Bodies(self.functions, self.of_function)
        self._elsewhere = Elsewhere(
            self.graph,
            self.tensor_of,
            self._blocks,
            self._sizes,
            self._constants,
            bodies,
            is_function=self.arguments is not None,
        )
        self._ends = set(map(op_of, self.results))

    @property
    def values(self) -> Mapping[str, np.ndarray]:
        """What ops compute from shapes, whatever the number of rows."""
        return self._constants.given

    def constant(self, tensor: str) -> np.ndarray | None:
        """The value of `tensor`; None where it is not known."""
        return self._constants.value(tensor)

    def layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`."""
        name = parse(tensor)
        layouts = self.found.get(name.op, (REPLICATED,))
        return layouts[name.output if len(layouts) > 1 else 0]

    def is_whole(self, tensor: str) -> bool:
        """Whether `tensor`, which is the same on all replicas, may have a size that depends on the batch, or tell one.

        A number of fixed shape that is computed of the whole batch is as any other; a list may hold anything.
        """
        if op_of(tensor) not in self.whole or self.layout(tensor) is not REPLICATED:
            return False
        shape, dtype = self.shapes.of(tensor), self.tensor_of(tensor).dtype
        return not shape.is_fully_defined() or dtype == tf.variant or (dtype.is_integer and shape.rank != 0)

    def has_whole_rows(self, tensor: str) -> bool:
        """Whether `tensor` may be rows of the whole batch, of which a replica may take its own."""
        shape = self.shapes.of(tensor)
        return self.is_whole(tensor) and bool(shape.rank) and shape[0] is None

    def combine(self, op: str, index: int, tensor: str) -> None:
        """Let `op` read its `index`-th input as one device has it.

        Raises:
            NotFollowedError: replicas cannot exchange it.
        """
        layout, symbol, shape = self.layout(tensor), self.tensor_of(tensor), self.shapes.of(tensor)
        if layout is REPLICATED:
            return
        if self.arguments is not None:
            self.refuse(op, f"needs '{tensor}' of the whole batch, in a function")
        is_row = layout is SHARDED
        carried = symbol.dtype in (TRAVELS if is_row else SUMMED)
        is_known = shape.rank is not None and (shape[1:] if is_row else shape).is_fully_defined()
        if layout not in REDUCTIONS or not carried or not is_known:
            self.refuse(op, f"needs '{tensor}' of the whole batch, of type {symbol.dtype.name}, shape {shape}")
        flow = self.graph.control_flow
        if not flow.runs_once(op_of(tensor)) or not (flow.runs_once(op) or self.graph.nodes[op].op == "Enter"):
            self.refuse(op, f"needs '{tensor}' of the whole batch, inside TensorFlow 1's control flow")
        is_sum = layout is COUNT and symbol.dtype.is_integer  # It may have wrapped, and be no multiple any more.
        self.edges[op, index] = "sum" if is_sum else REDUCTIONS[layout]

    def refuse(self, op: str, reason: str) -> None:
        """What is known of `op` is not enough.

        Raises:
            NotFollowedError: always.
        """
        has_results = bool(self.graph.dataflow_consumers([op]))
        line = line_of(self.tensor_of(f"{op}:0").op) if has_results else ""
        raise NotFollowedError(f"'{op}'{f' ({line})' if line else ''} {reason}")

    def held(self, tensor: str) -> Held:
        """What is known of `tensor`."""
        return self._elsewhere.of(tensor, self.layout(tensor))

    def axis(self, tensor: str) -> int | None:
        """The axis of `tensor` along which there is one entry for each of a replica's rows; None: it is not known."""
        if self.layout(tensor) is SHARDED:
            return 0
        along = self.held(tensor).along
        if along is None or not along.keeps_apart or along.others or along.joined or len(along.axes) > 1:
            return None
        (axis,) = along.axes
        return axis

    @abstractmethod
    def of_function(self, function: Function, arguments: Sequence[Held]) -> list[Held] | None:
        """What a function returns, given these arguments; None: some op of it needs values of the whole batch."""
