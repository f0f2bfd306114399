"""`GraphItem`: what is trained. A captured single-device graph and what capture knows about it.

It owns the value, its invariants, its wire and text forms. It does not look inside the graph: the GraphDef, the
VariableDefs and the SaverDefs are bytes here, so that this module works without TensorFlow. It is long, as all
parts of the value stand here: their invariants are about one another.
"""

import math
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from google.protobuf.any_pb2 import Any

from autodist_py.proto import graphitem_pb2 as pb
from autodist_py.proto import wire
from autodist_py.proto.arguments import check_fields, checked
from autodist_py.proto.checks import require_member, require_not_negative, require_unique
from autodist_py.proto.dtypes import ITEM_SIZES
from autodist_py.proto.errors import GraphItemError
from autodist_py.proto.text import count, known_names, short, table

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
INPUT_KINDS = ("feed", "state", "part")
LOSS_REDUCTIONS = ("mean", "sum")
GRADIENT_REDUCTIONS = ("", *LOSS_REDUCTIONS, "add", "average")
OUTPUT_REDUCTIONS = ("", *LOSS_REDUCTIONS, "rows", "same")
INDICES = ("", "distinct", "same")
STATISTIC_REDUCTIONS = ("sum", "mean", "add", "rows", "share", "same", "part", "own", "cut", "moments", "count")

GRAPH_DEF_URL = "type.googleapis.com/tensorflow.GraphDef"
VARIABLE_DEF_URL = "type.googleapis.com/tensorflow.VariableDef"
SAVER_DEF_URL = "type.googleapis.com/tensorflow.SaverDef"

_MOST_AXES, _MOST_ELEMENTS = 254, 2**63 - 1
"""Of a tensor of TensorFlow's."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A captured variable; `definition` is its serialized tensorflow.VariableDef, if it has one.

    Of one that is `per_replica` each replica has its own value. It is never combined, and need not be equal.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool = True
    aggregation: str = "NONE"
    update_ops: tuple[str, ...] = ()
    definition: bytes = b""
    per_replica: bool = False

    def __post_init__(self) -> None:
        check_fields(self, error=GraphItemError)
        _require_name(self.name, "a variable's name")
        require_member(self.aggregation, AGGREGATIONS, f"aggregation of variable {self.name!r}", error=GraphItemError)
        if len(self.shape) > _MOST_AXES or any(size < 0 for size in self.shape) or self.num_elements > _MOST_ELEMENTS:
            raise GraphItemError(
                f"variable {self.name!r} needs a static shape, of {_MOST_AXES} axes and {_MOST_ELEMENTS} elements at "
                f"most; got {reprlib.repr(self.shape)}"
            )

    @property
    def num_elements(self) -> int:
        """The product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the value in bytes; 0 for element types without a fixed size, such as `string`."""
        return self.num_elements * ITEM_SIZES.get(self.dtype, 0)


@dataclass(frozen=True, slots=True)
class Gradient:
    """The raw gradient of a variable: one tensor name (dense), or indices, values and dense shape (sparse).

    `reduction` is how the loss that it is of combines examples, "mean" or "sum"; "": not known. "add": it is not of
    examples; replicas' values are added up, each as it is, as `tf.distribute.ReduceOp.SUM` does. "average": each counts
    once among those that an update is made of, whatever its examples.
    `indices` says what the indices of a sparse one are for the whole batch: "", the replicas' one after the other;
    "distinct", likewise, but each once; "same", those of each replica, so values are added up. Of the last, `rows` is
    how many there are; None: that depends on the batch.
    `in_parts`: what a replica computes is its part of the gradient of a mean, as its share of the examples counts where
    back-propagation begins (a statistic "part").
    """

    variable: str
    tensors: tuple[str, ...]
    reduction: str = ""
    indices: str = ""
    rows: int | None = None
    in_parts: bool = False

    def __post_init__(self) -> None:
        check_fields(self, error=GraphItemError)
        require_member(self.indices, INDICES, f"indices of the gradient of {self.variable!r}", error=GraphItemError)
        if (self.indices and not self.is_sparse) or (self.rows is not None and self.indices != "same"):
            raise GraphItemError(
                "only a sparse gradient has indices, and a number of rows where these are the same on all replicas; "
                f"got indices {self.indices!r} and rows {self.rows} for {self.tensors} of variable {self.variable!r}"
            )
        require_member(
            self.reduction,
            GRADIENT_REDUCTIONS,
            f"reduction of the gradient of {self.variable!r}",
            error=GraphItemError,
        )
        if self.in_parts and self.reduction in ("sum", "add"):
            raise GraphItemError(
                f"what a replica computes of a sum is its part already; the gradient of variable {self.variable!r} has "
                f"the reduction {self.reduction!r}, and is in_parts"
            )
        if len(self.tensors) not in (1, 3) or not all(self.tensors):
            raise GraphItemError(
                f"a gradient is one tensor (dense), or indices, values and dense shape (sparse); "
                f"got {self.tensors} for variable {self.variable!r}"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether it is (indices, values, dense shape)."""
        return len(self.tensors) == 3

    @property
    def key(self) -> str:
        """The tensor names joined by `;`, as the wire format's `grad_target_pairs` names a gradient."""
        return ";".join(self.tensors)


@dataclass(frozen=True, slots=True)
class Input:
    """A placeholder op: fed with each step's data (`feed`), or with read-only state (`state`).

    A `part` is data of which each local replica is fed its own value; only their types and shapes are alike.
    The shape is None where the rank is unknown. A batched input's first dimension counts examples of the `batch`-th
    batch: inputs of one batch have as many rows each.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    batched: bool
    kind: str = "feed"
    batch: int = 0

    def __post_init__(self) -> None:
        check_fields(self, error=GraphItemError)
        _require_name(self.name, "an input's name")
        require_member(self.kind, INPUT_KINDS, f"kind of input {self.name!r}", error=GraphItemError)
        if self.batched and self.kind == "part":
            raise GraphItemError(
                f"input {self.name!r} is each replica's own part, which is not split; got batched=True"
            )
        if self.batched and self.shape == ():
            raise GraphItemError(f"input {self.name!r} is batched, so it needs a first dimension; it is a scalar")
        if self.batch < 0 or (self.batch and not self.batched):
            raise GraphItemError(
                f"input {self.name!r}: batches are numbered from 0, and only a batched input is of another than the "
                f"first; got batch={self.batch}, batched={self.batched}"
            )


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a step returns, such as `loss:0`; the shape is None where the rank is unknown.

    `reduction` is what it does with examples: "mean" or "sum"; "rows", it has one for each; "same", it does not depend
    on a replica's own ones; "": not known. One that is `per_replica` has a value for each local replica.
    """

    tensor: str
    dtype: str
    shape: tuple[int | None, ...] | None
    reduction: str = ""
    per_replica: bool = False

    def __post_init__(self) -> None:
        check_fields(self, error=GraphItemError)
        _require_name(self.tensor, "an output's tensor name")
        require_member(self.reduction, OUTPUT_REDUCTIONS, f"reduction of output {self.tensor!r}", error=GraphItemError)
        if self.per_replica and self.reduction:
            raise GraphItemError(
                f"output {self.tensor!r} is per_replica, so it is not combined; got reduction {self.reduction!r}"
            )


@dataclass(frozen=True, slots=True)
class Statistic:
    """A value computed from a replica's own examples that is combined over replicas before it is used.

    It is used by a write (a metric, a moving average), or as a normalizer of the loss. `tensor` passes it on: the
    result of an op of its own. `reduction` is "sum", "mean" (weighted by examples), "add" (replicas' values added up,
    whatever examples they have), "rows" (one after the other),
    "share" (the sum, times the replica's share of the examples), "same" (equal already, as the number of features
    is), "part" (the replica's own value, times its share; not combined: see `Gradient.in_parts`), "own" (of rows of the
    whole batch, which all replicas have, those of the replica's own examples), or "cut" (likewise, but any part of the
    rows, as they are no examples'), "moments" (a mean over examples, and the variance about it, one after the other
    along axis 0), or "count" (the sum, of what is so many times the number of the replica's examples on each). Of the
    shape, only the first dimension of rows, and those of "same", "own" and "cut", may be unknown.
    """

    tensor: str
    dtype: str
    shape: tuple[int | None, ...]
    reduction: str

    def __post_init__(self) -> None:
        check_fields(self, error=GraphItemError)
        _require_name(self.tensor, "a statistic's tensor name")
        require_member(
            self.reduction, STATISTIC_REDUCTIONS, f"reduction of statistic {self.tensor!r}", error=GraphItemError
        )


@dataclass(frozen=True, slots=True)
class GraphItem:
    """A captured training step.

    Attributes:
        graph_def: serialized tensorflow.GraphDef, in canonical form.
        variables: in order of creation; builders and the kernel number variables by it.
        gradients: in order of recording.
        inputs: the placeholders.
        outputs: the tensors that a step returns.
        run_ops: names of the ops to run each step.
        loss_reduction: how a loss combines examples, `mean` or `sum`, where its gradients do not say.
        table_initializers: names of the ops, in the user's graph, that fill the lookup tables which are used.
        savers: serialized tensorflow.SaverDefs, of the savers in the user's graph.
        statistics: what else is combined over replicas, beside gradients and outputs.
        local_ops: names of ops that may mix examples and are computed of each replica's own ones, so that what follows
            may differ from one device; not those of batch normalization, or of losses that `mixtures` tells of.
        inseparable_ops: names of ops in the back-propagation of a sum where terms that depend on no example (a
            regularizer's) cannot be told apart from the others, so that they count once per replica.
        normalizing_ops: names of the ops of batch normalization, which are computed of each replica's own examples.
        mixtures: of each loss that mixes examples for certain, what it is, by which ops and lines, in words.
        replicas_to_aggregate: how many gradients an update waits for, as the program says; 0: the strategy says it.
        first_tokens: with that, how many tokens for workers there are at the start.

    Raises:
        GraphItemError: parts contradict each other.
    """

    graph_def: bytes
    variables: tuple[Variable, ...]
    gradients: tuple[Gradient, ...] = ()
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    run_ops: tuple[str, ...] = ()
    loss_reduction: str = "mean"
    table_initializers: tuple[str, ...] = ()
    savers: tuple[bytes, ...] = ()
    statistics: tuple[Statistic, ...] = ()
    local_ops: tuple[str, ...] = ()
    inseparable_ops: tuple[str, ...] = ()
    normalizing_ops: tuple[str, ...] = ()
    mixtures: tuple[str, ...] = ()
    replicas_to_aggregate: int = 0
    first_tokens: int = 0
    _by_name: Mapping[str, Variable] = field(init=False, repr=False, compare=False)
    _gradients_of: Mapping[str, tuple[Gradient, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self, error=GraphItemError)
        require_member(self.loss_reduction, LOSS_REDUCTIONS, "loss_reduction", error=GraphItemError)
        for name in ("replicas_to_aggregate", "first_tokens"):
            require_not_negative(getattr(self, name), name, error=GraphItemError)
        averaged = [one.reduction == "average" for one in self.gradients]
        if any(averaged) and not (all(averaged) and self.replicas_to_aggregate):
            raise GraphItemError(
                "gradients are averaged over those that an update waits for, all or none; got reductions "
                f"{[one.reduction for one in self.gradients]}, replicas_to_aggregate={self.replicas_to_aggregate}"
            )
        _require_unique((variable.name for variable in self.variables), "variable")
        _require_unique((one.name for one in self.inputs), "input")
        _require_unique((one.tensor for one in self.statistics), "statistic")
        _require_unique((f"{gradient.key} of {gradient.variable}" for gradient in self.gradients), "gradient")
        known = {variable.name: variable for variable in self.variables}
        object.__setattr__(self, "_by_name", known)
        found: dict[str, list[Gradient]] = {}
        for gradient in self.gradients:
            found.setdefault(gradient.variable, []).append(gradient)
        object.__setattr__(self, "_gradients_of", {name: tuple(those) for name, those in found.items()})
        for gradient in self.gradients:
            if gradient.variable not in known:
                raise GraphItemError(
                    f"gradient {gradient.key!r} is of variable {gradient.variable!r}, which the graph item lacks; "
                    f"{known_names(gradient.variable, known)}"
                )
            if gradient.is_sparse and not known[gradient.variable].shape:
                raise GraphItemError(
                    f"a sparse gradient is of rows, and variable {gradient.variable!r} has none: it is a scalar; "
                    f"got {gradient.key!r}. Give it a dense one: the name of one tensor"
                )

    @property
    def fingerprint(self) -> str:
        """sha256 of the wire form, as hexadecimal digits: equal items have equal fingerprints, on every machine."""
        return wire.content_hash(self.to_proto())

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables that have a gradient, in the order of `variables`."""
        with_gradient = {gradient.variable for gradient in self.gradients}
        return tuple(variable for variable in self.variables if variable.name in with_gradient)

    @property
    def sparse_variables(self) -> tuple[Variable, ...]:
        """The variables that have a sparse gradient, in the order of `variables`."""
        sparse = {gradient.variable for gradient in self.gradients if gradient.is_sparse}
        return tuple(variable for variable in self.variables if variable.name in sparse)

    def variable(self, name: str) -> Variable:
        """The variable of that name.

        Raises:
            GraphItemError: there is none.
        """
        if name in self._by_name:
            return self._by_name[name]
        raise GraphItemError(f"the graph item has no variable {name!r}; {known_names(name, self._by_name)}")

    def gradients_of(self, name: str) -> tuple[Gradient, ...]:
        """The gradients of the variable of that name, in order of recording."""
        return self._gradients_of.get(name, ())

    def reduction_of(self, gradient: Gradient) -> str:
        """How the gradient's loss combines examples, "mean" or "sum"; or "add"."""
        return gradient.reduction or self.loss_reduction

    def weighting_of(self, gradient: Gradient) -> str:
        """How replicas' gradients are added: "mean", each times its share; "sum", or "parts" of a mean, as they are.

        "add", and "average", whose sum is divided then: as they are, also those of replicas without examples.
        """
        return "parts" if gradient.in_parts else self.reduction_of(gradient)

    def to_proto(self) -> pb.GraphItem:
        """The wire form."""
        message = pb.GraphItem(
            graph_def=Any(type_url=GRAPH_DEF_URL, value=self.graph_def),
            # Reversed, so that the first of several variables with one gradient tensor is the one that stays.
            grad_target_pairs={gradient.key: gradient.variable for gradient in reversed(self.gradients)},
            info=pb.GraphItem.Info(
                variables=[Any(type_url=VARIABLE_DEF_URL, value=variable.definition) for variable in self.variables],
                table_initializers=self.table_initializers,
                savers=[Any(type_url=SAVER_DEF_URL, value=saver) for saver in self.savers],
            ),
            run_ops=self.run_ops,
            loss_reduction=self.loss_reduction,
            local_ops=self.local_ops,
            inseparable_ops=self.inseparable_ops,
            normalizing_ops=self.normalizing_ops,
            mixtures=self.mixtures,
            replicas_to_aggregate=self.replicas_to_aggregate,
            first_tokens=self.first_tokens,
        )
        message.variables.extend(
            pb.GraphItem.VariableInfo(
                name=variable.name,
                dtype=variable.dtype,
                shape=variable.shape,
                trainable=variable.trainable,
                aggregation=variable.aggregation,
                update_ops=variable.update_ops,
                per_replica=variable.per_replica,
            )
            for variable in self.variables
        )
        message.gradients.extend(
            pb.GraphItem.Gradient(
                variable=one.variable,
                tensors=one.tensors,
                reduction=one.reduction,
                indices=one.indices,
                rows=one.rows,
                in_parts=one.in_parts,
            )
            for one in self.gradients
        )
        message.inputs.extend(
            pb.GraphItem.Input(
                name=one.name,
                dtype=one.dtype,
                shape=_shape_to_proto(one.shape),
                batched=one.batched,
                kind=one.kind,
                batch=one.batch,
            )
            for one in self.inputs
        )
        message.outputs.extend(
            pb.GraphItem.Output(
                tensor=one.tensor,
                dtype=one.dtype,
                shape=_shape_to_proto(one.shape),
                reduction=one.reduction,
                per_replica=one.per_replica,
            )
            for one in self.outputs
        )
        message.statistics.extend(
            pb.GraphItem.Statistic(
                tensor=one.tensor, dtype=one.dtype, shape=_shape_to_proto(one.shape), reduction=one.reduction
            )
            for one in self.statistics
        )
        return message

    @classmethod
    def from_proto(cls, message: pb.GraphItem) -> "GraphItem":
        """The value of a message that `to_proto` made.

        Raises:
            GraphItemError: the message is another, or its parts contradict each other.
        """
        if message.graph_def.type_url != GRAPH_DEF_URL:
            raise GraphItemError(f"a graph item holds a {GRAPH_DEF_URL}, got type {message.graph_def.type_url!r}")
        definitions = message.info.variables
        if len(definitions) != len(message.variables):
            raise GraphItemError(
                f"a graph item describes each of its variables; it has {len(definitions)} definitions "
                f"and {len(message.variables)} descriptions"
            )
        gradients = tuple(
            Gradient(
                one.variable,
                tuple(one.tensors),
                one.reduction,
                one.indices,
                one.rows if one.HasField("rows") else None,
                one.in_parts,
            )
            for one in message.gradients
        )
        if {gradient.key for gradient in gradients} != message.grad_target_pairs.keys():
            raise GraphItemError("grad_target_pairs and gradients of a graph item must name the same gradients")
        return cls(
            graph_def=message.graph_def.value,
            variables=tuple(
                Variable(
                    name=one.name,
                    dtype=one.dtype,
                    shape=tuple(one.shape),
                    trainable=one.trainable,
                    aggregation=one.aggregation,
                    update_ops=tuple(one.update_ops),
                    definition=definition.value,
                    per_replica=one.per_replica,
                )
                for one, definition in zip(message.variables, definitions, strict=True)
            ),
            gradients=gradients,
            inputs=tuple(
                Input(one.name, one.dtype, _shape_of(one), batched=one.batched, kind=one.kind, batch=one.batch)
                for one in message.inputs
            ),
            outputs=tuple(
                Output(one.tensor, one.dtype, _shape_of(one), one.reduction, one.per_replica) for one in message.outputs
            ),
            run_ops=tuple(message.run_ops),
            loss_reduction=message.loss_reduction,
            table_initializers=tuple(message.info.table_initializers),
            savers=tuple(saver.value for saver in message.info.savers),
            statistics=tuple(
                Statistic(one.tensor, one.dtype, _shape_of(one) or (), one.reduction) for one in message.statistics
            ),
            local_ops=tuple(message.local_ops),
            inseparable_ops=tuple(message.inseparable_ops),
            normalizing_ops=tuple(message.normalizing_ops),
            mixtures=tuple(message.mixtures),
            replicas_to_aggregate=message.replicas_to_aggregate,
            first_tokens=message.first_tokens,
        )

    @checked("path", error=GraphItemError)
    def save(self, path: str | os.PathLike[str]) -> None:
        """The item is in the file, binary (`.pb`) or JSON (`.json`, opaque parts in base64)."""
        wire.save(self.to_proto(), path, error=GraphItemError)

    @classmethod
    @checked("path", error=GraphItemError)
    def load(cls, path: str | os.PathLike[str]) -> "GraphItem":
        """The item that `save` wrote."""
        return cls.from_proto(wire.load(pb.GraphItem, path, error=GraphItemError))

    def __str__(self) -> str:
        gradients = {gradient.variable: gradient for gradient in self.gradients}
        sections = [
            f"GraphItem {short(self.fingerprint)}: {count(len(self.variables), 'variable')}, "
            f"{count(len(self.gradients), 'gradient')}, graph of {count(len(self.graph_def), 'byte')}, "
            f"loss_reduction {self.loss_reduction}",
            table(
                ("variable", "dtype", "shape", "gradient", "aggregation"),
                (
                    (one.name, one.dtype, _shape_text(one.shape), _kind_text(gradients.get(one.name)), _held(one))
                    for one in self.variables
                ),
            ),
            table(
                ("input", "dtype", "shape", "batched", "kind"),
                ((one.name, one.dtype, _shape_text(one.shape), _batch_text(one), one.kind) for one in self.inputs),
            ),
            table(
                ("output", "dtype", "shape", "over examples"),
                (
                    (one.tensor, one.dtype, _shape_text(one.shape), "per replica" if one.per_replica else one.reduction)
                    for one in self.outputs
                ),
            ),
            table(
                ("statistic", "dtype", "shape", "combined by"),
                ((one.tensor, one.dtype, _shape_text(one.shape), one.reduction) for one in self.statistics),
            ),
            f"runs each step: {', '.join(self.run_ops) or '-'}",
            f"mixes each replica's own examples: {'; '.join(self.mixtures) or '-'}",
            f"may mix each replica's own examples: {', '.join(self.local_ops) or '-'}",
            f"normalizes each replica's own examples: {', '.join(self.normalizing_ops) or '-'}",
            f"may count a regularizer once per replica: {', '.join(self.inseparable_ops) or '-'}",
        ]
        return "\n\n".join(sections)


def _shape_to_proto(shape: tuple[int | None, ...] | None) -> pb.GraphItem.Shape | None:
    if shape is None:
        return None
    return pb.GraphItem.Shape(dimensions=[pb.GraphItem.Dimension(size=size) for size in shape])


def _shape_of(
    message: pb.GraphItem.Input | pb.GraphItem.Output | pb.GraphItem.Statistic,
) -> tuple[int | None, ...] | None:
    if not message.HasField("shape"):
        return None
    return tuple(one.size if one.HasField("size") else None for one in message.shape.dimensions)


def _batch_text(one: Input) -> str:
    if not one.batched:
        return "no"
    return f"batch {one.batch}" if one.batch else "yes"


def _shape_text(shape: tuple[int | None, ...] | None) -> str:
    return "unknown" if shape is None else f"({', '.join('?' if size is None else str(size) for size in shape)})"


def _kind_text(gradient: Gradient | None) -> str:
    if gradient is None:
        return ""
    kind = "sparse" if gradient.is_sparse else "dense"
    if gradient.reduction == "add":
        return f"{kind}, added up"
    return f"{kind}, of a {gradient.reduction}" if gradient.reduction else kind


def _held(variable: Variable) -> str:
    return f"{variable.aggregation}, per replica" if variable.per_replica else variable.aggregation


def _require_name(name: str, what: str) -> None:
    if not name:
        raise GraphItemError(f"{what} must not be empty")


def _require_unique(names: Iterable[str], what: str) -> None:
    require_unique(names, f"each {what} of a graph item is named once", error=GraphItemError)
