"""Random samples of single ops, with inputs for the whole batch and for each replica of it.

What an op type needs is read from TensorFlow's registry. Its inputs are drawn by their names (`axis`, `perm`), and a
sample that TensorFlow refuses is drawn again.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    MIXED,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    REPLICATED,
    SHAPE,
    SHARDED,
    BatchLayout,
    Block,
)
from autodist_py.kernel.ir.node import node
from tests.support.rule_inputs import ATTRIBUTES, ATTRIBUTES_BY_OP, BY_NAME, BY_OP, EXAMPLES, OTHERS, ROWS, Drawn

PARTS = ((3, 2), (1, 4), (2, 0, 3), (5, 0))
"""The examples of each replica, drawn for each sample."""


@dataclass(frozen=True)
class Sample:
    """One op in a graph of its own, its inputs for the whole batch, and their layouts.

    Attributes:
        op: the op.
        values: its inputs, in order.
        layouts: of each.
        axes: along which the examples of each stand that has rows, or is MIXED: as SHARDED, along another axis than 0.
        blocks: of each that has rows, or tells their number: how many each example has.
        constant: which are known to the rules.
        parts: how many examples each replica has.
    """

    op: tf.Operation
    values: tuple[np.ndarray, ...]
    layouts: tuple[BatchLayout, ...]
    axes: tuple[int, ...]
    blocks: tuple[Block | None, ...]
    constant: tuple[bool, ...]
    parts: tuple[int, ...]

    def __str__(self) -> str:
        inputs = zip(self.layouts, self.axes, self.values, self.constant, strict=True)
        told = [(one.name, axis, value, known) for one, axis, value, known in inputs]
        return f"{self.parts} of {told} by {self.op.node_def}"

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results, given these inputs."""
        feeds = {
            tensor: value
            for tensor, value, known in zip(self.op.inputs, inputs, self.constant, strict=True)
            if not known
        }
        with tf.compat.v1.Session(graph=self.op.graph) as session:
            return [np.asarray(result) for result in session.run(list(self.op.outputs), feeds)]

    def of_replicas(self, rng: np.random.Generator, combined: Collection[int]) -> Iterator[list[np.ndarray]]:
        """The inputs of each replica; those `combined` are the whole batch's."""
        own = [
            [value] * len(self.parts)
            if index in combined
            else _parts(rng, value, layout, axis, block.rows if block else 1, self.parts)
            for index, (value, layout, axis, block) in enumerate(
                zip(self.values, self.layouts, self.axes, self.blocks, strict=True)
            )
        ]
        return ([inputs[replica] for inputs in own] for replica in range(len(self.parts)))

    def run_parts(self, rng: np.random.Generator, combined: Collection[int]) -> list[list[np.ndarray]] | None:
        """The results of each replica; None: the op fails on no examples, as it may."""
        own = []
        for inputs, part in zip(self.of_replicas(rng, combined), self.parts, strict=True):
            try:
                own.append(self.run(inputs))
            except (tf.errors.OpError, ValueError):
                if part:
                    raise
                return None
        return own


def _parts(
    rng: np.random.Generator, value: np.ndarray, layout: BatchLayout, axis: int, block: int, parts: Sequence[int]
) -> list[np.ndarray]:
    if layout is REPLICATED:
        return [value] * len(parts)
    if layout in (SHARDED, MIXED):
        return np.split(value, np.cumsum(parts)[:-1] * block, axis)
    if layout is COUNT:
        return [np.asarray(value // EXAMPLES * own, value.dtype) for own in parts]
    if layout is SHAPE:
        return [np.array([value[0] // EXAMPLES * own, *value[1:]], value.dtype) for own in parts]
    weights = [own / EXAMPLES if layout is PARTIAL_MEAN else 1.0 for own in parts]
    drawn = [rng.normal(size=value.shape) for _ in parts]
    last = max(position for position, own in enumerate(parts) if own)
    others = sum(weights[position] * one for position, one in enumerate(drawn) if position != last)
    drawn[last] = (value - others) / weights[last]
    return [np.asarray(one, value.dtype) for one in drawn]


# -- Drawing -----------------------------------------------------------------------------------------------------------

_TYPES = ("float64", "float64", "float64", "int32", "bool", "float32", "complex128", "int64")


def samples(op_type: str, seed: int, tries: int, *, turned: bool = False) -> Iterator[Sample]:
    """Samples of `op_type` that TensorFlow computes, of so many that are tried.

    Args:
        op_type: of the op.
        seed: for another one other samples are drawn.
        tries: how many are drawn.
        turned: whether the examples may stand along any axis that is as long as they are many; else along axis 0.
    """
    rng = np.random.default_rng(seed)
    definition = op_def_registry.get(op_type)
    for _ in range(tries):
        drawn = _drawn(rng, definition)
        if drawn is None:
            continue
        if turned:
            _turn(rng, drawn)
        try:
            sample = _built(rng, definition, drawn, turned=turned)
            sample.run(sample.values)
        except (tf.errors.OpError, ValueError, TypeError):
            continue
        yield sample


def _drawn(rng: np.random.Generator, definition: Any) -> Drawn | None:
    """Inputs and attributes of the op; None: there are no such."""
    drawn = Drawn()
    given = {**ATTRIBUTES, **ATTRIBUTES_BY_OP.get(definition.name, {})}
    of_inputs = {one.type_attr for one in definition.input_arg}
    for attribute in definition.attr:
        if attribute.name in of_inputs:
            continue
        names = [tf.as_dtype(one).name for one in attribute.allowed_values.list.type] or ["int32"]
        choices = given.get(attribute.name, names if attribute.type == "type" else ())
        if choices:
            choice = choices[int(rng.integers(len(choices)))]
            drawn.attributes[attribute.name] = tf.as_dtype(choice) if attribute.type == "type" else choice
    hints = {**BY_NAME, **BY_OP.get(definition.name, {})}
    for argument in definition.input_arg:
        made: list[np.ndarray] = []
        for _ in range(drawn.attributes[argument.number_attr] if argument.number_attr else 1):
            hint = hints.get(argument.name)
            value = _at_random(rng, drawn, made) if hint is None else hint(rng, drawn)
            dtype = _type_of(rng, argument, value, drawn.types, definition)
            if dtype is None:
                return None
            made.append(_cast(value, dtype))
            if argument.type_attr:
                drawn.types[argument.type_attr] = dtype
        drawn.inputs[argument.name] = made if argument.number_attr else made[0]
    return drawn


def _turn(rng: np.random.Generator, drawn: Drawn) -> None:
    """Let most inputs of most samples have their first axis elsewhere."""
    axis = int(rng.integers(4))
    for name, value in drawn.inputs.items():
        if isinstance(value, np.ndarray) and value.ndim > axis and name not in BY_NAME and rng.integers(8):
            drawn.inputs[name] = np.moveaxis(value, 0, axis)


def _at_random(rng: np.random.Generator, drawn: Drawn, beside: Sequence[np.ndarray]) -> np.ndarray:
    before = [one for one in (*drawn.inputs.values(), *beside) if not isinstance(one, list)]
    if before and rng.integers(5) < 3:
        return rng.normal(size=np.shape(before[rng.integers(len(before))])) * 2.0
    shapes = ROWS if not before and rng.integers(3) else [*ROWS, *OTHERS]
    shape = shapes[rng.integers(len(shapes))]
    return np.asarray(float(EXAMPLES * rng.integers(1, 3))) if not shape else rng.normal(size=shape) * 2.0


def _type_of(
    rng: np.random.Generator, argument: Any, value: np.ndarray, types: Mapping[str, tf.DType], definition: Any
) -> tf.DType | None:
    """The type of an input; None: the op takes none of those that are drawn."""
    if not argument.type_attr:
        return tf.as_dtype(argument.type)
    if argument.type_attr in types:
        return types[argument.type_attr]
    if value.dtype != np.float64:
        return tf.as_dtype("string" if value.dtype == object else value.dtype)
    (allowed,) = (one.allowed_values.list.type for one in definition.attr if one.name == argument.type_attr)
    choices = [one for one in map(tf.as_dtype, _TYPES) if not allowed or one.as_datatype_enum in allowed]
    return choices[rng.integers(len(choices))] if choices else None


def _cast(value: np.ndarray, dtype: tf.DType) -> np.ndarray:
    return value if dtype == tf.string else np.asarray(value).astype(dtype.as_numpy_dtype)


def _built(rng: np.random.Generator, definition: Any, drawn: Drawn, *, turned: bool) -> Sample:
    """The op in a graph.

    Raises:
        ValueError: TensorFlow refuses it. So does a TypeError.
    """
    values: list[np.ndarray] = []
    layouts: list[BatchLayout] = []
    axes: list[int] = []
    constant: list[bool] = []

    def placed(name: str, value: np.ndarray) -> tf.Tensor:
        layout, axis = _layout_anywhere(rng, value, name) if turned else (_layout(rng, value, name), 0)
        values.append(value)
        layouts.append(layout)
        axes.append(axis)
        constant.append(layout is REPLICATED and (value.dtype.kind in "iu" or bool(rng.integers(2))))
        if constant[-1]:
            return tf.constant(value)
        dtype = tf.string if value.dtype == object else tf.as_dtype(value.dtype)
        has_examples = layout in (SHARDED, MIXED)
        sizes = [None if has_examples and at == axis else size for at, size in enumerate(value.shape)]
        return tf.compat.v1.placeholder(dtype, sizes)

    with tf.Graph().as_default() as graph:
        given = [
            (argument.name, value)
            for argument in definition.input_arg
            for value in (drawn.inputs[argument.name] if argument.number_attr else [drawn.inputs[argument.name]])
        ]
        inputs = {f"in_{position}:0": placed(*one) for position, one in enumerate(given)}
        attributes = {name: _attribute(value) for name, value in drawn.attributes.items()}
        made = node(definition.name, "op", list(inputs), **attributes, **drawn.types)
        tf.graph_util.import_graph_def(tf.compat.v1.GraphDef(node=[made]), inputs, name="")
    return Sample(
        op=graph.get_operation_by_name("op"),
        values=tuple(values),
        layouts=tuple(layouts),
        axes=tuple(axes),
        blocks=tuple(_block(value, layout) for value, layout in zip(values, layouts, strict=True)),
        constant=tuple(constant),
        parts=PARTS[rng.integers(len(PARTS))],
    )


def _attribute(value: Any) -> tf.compat.v1.AttrValue | tf.DType:
    kinds = {bool: "b", int: "i", float: "f", str: "s"}
    if isinstance(value, tf.DType):
        return value
    if isinstance(value, list) and (None in value or value == []):
        return tf.compat.v1.AttrValue(shape=tf.TensorShape(value).as_proto())
    if not isinstance(value, list):
        return tf.compat.v1.AttrValue(**{kinds[type(value)]: value.encode() if isinstance(value, str) else value})
    return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(**{kinds[type(value[0])]: value}))


def _layout(rng: np.random.Generator, value: np.ndarray, name: str) -> BatchLayout:
    choice = rng.integers(10)
    is_number = value.dtype.kind in "iuf"
    first = value[0] if value.ndim == 1 and value.size and value.dtype.kind in "iu" else 0
    if first > 0 and not first % EXAMPLES and choice < 7:
        return SHAPE
    if value.ndim and not value.shape[0] % EXAMPLES and value.shape[0] and name not in BY_NAME:
        return SHARDED if choice < 8 else REPLICATED
    if value.ndim == 0 and is_number and value > 0 and value % EXAMPLES == 0 and choice < 5:
        return COUNT
    if value.dtype.kind == "f" and choice < 4:
        return PARTIAL_SUM if choice < 2 else PARTIAL_MEAN
    return REPLICATED


def _layout_anywhere(rng: np.random.Generator, value: np.ndarray, name: str) -> tuple[BatchLayout, int]:
    """A layout, and the axis of the examples."""
    axes = [axis for axis, size in enumerate(value.shape) if size == EXAMPLES]
    layout = _layout(rng, value, name)
    if not axes or name in BY_NAME or layout in (SHAPE, COUNT):
        return (REPLICATED if layout is SHARDED else layout), 0
    axis = axes[rng.integers(len(axes))]
    return (REPLICATED, 0) if not rng.integers(5) else ((MIXED, axis) if axis else (SHARDED, 0))


def _block(value: np.ndarray, layout: BatchLayout) -> Block | None:
    if layout is SHARDED:
        return Block(value.shape[0] // EXAMPLES)
    if layout is COUNT:
        return Block(int(value) // EXAMPLES)
    return Block(int(value[0]) // EXAMPLES) if layout is SHAPE else None
