"""Random small programs: expressions over a batch, with losses, updates, a write and results among them.

An expression is a list of operations, each on values made before; one that TensorFlow refuses is left out. So every
list is a program, and hypothesis can make it shorter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autodist_py import AutoDist, CaptureError
from autodist_py.comparison import Comparison
from autodist_py.testing import compare

FEATURES = 3
CLASSES = 4
SIZES = ((7, 5, 8), (1, 4, 2), (6, 6, 3))
"""Numbers of examples of the steps: uneven, with empty replicas, even."""
MAX_RANK = 3
TOLERANCE = 1e-8
SINGLE = 1e-5
"""Of programs with a value in single precision: parts of a sum are rounded before they are added, or the sum is."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`name` of the values number `first` and `second` (counted from the last one made), and a choice it may need."""

    name: str
    first: int
    second: int
    choice: int

    def __str__(self) -> str:
        return f"{self.name}(-{self.first}, -{self.second}, {self.choice})"


@dataclass(frozen=True, slots=True)
class RandomProgram:
    """The operations, and what is made of their values.

    Attributes:
        operations: one after the other.
        loss: how the loss reduces the last value.
        second_loss: as `loss`, of the value before, with gradients of its own; "": there is none.
        update: how gradients change the variables.
        write: how a value changes a variable that is not trained.
        builder: the strategy.
        sizes: which of `SIZES`.
        result: of which type a result is, beside those of the values' own.
    """

    operations: tuple[Operation, ...]
    loss: str
    second_loss: str
    update: str
    write: str
    builder: str
    sizes: int
    result: str

    @property
    def tolerance(self) -> float:
        """How far it may be from one device, relative."""
        return SINGLE if any(operation.name == "single" for operation in self.operations) else TOLERANCE

    def __str__(self) -> str:
        facts = [
            f"{name} {getattr(self, name)}" for name in ("loss", "second_loss", "update", "write", "builder", "result")
        ]
        return "; ".join([*map(str, self.operations), *facts, f"sizes {SIZES[self.sizes]}"])


def _axis(choice: int, rank: int) -> Any:
    return [None, 0, -1, [0, rank - 1], rank - 1][choice % 5]


def _reduce(reduction: Callable[..., Any]) -> Callable[..., Any]:
    def operation(a: tf.Tensor, b: tf.Tensor, choice: int) -> tf.Tensor:
        return reduction(a, axis=_axis(choice, a.shape.rank), keepdims=choice % 2 == 0)

    return operation


def _unary(function: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    return lambda a, b, choice: function(a)


def _binary(function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
    return lambda a, b, choice: function(a, b)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "tanh": _unary(tf.tanh),
    "square": _unary(tf.square),
    "root": _unary(lambda a: tf.sqrt(tf.abs(a) + 1.0)),
    "negative": _unary(tf.negative),
    "stop": _unary(tf.stop_gradient),
    "softmax": _unary(tf.nn.softmax),
    "single": _unary(lambda a: tf.cast(tf.cast(a, tf.float32), tf.float64)),
    "floor": _unary(tf.floor),
    "sign": _unary(lambda a: tf.cast(a > 0.1, tf.float64)),
    "add": _binary(tf.add),
    "subtract": _binary(tf.subtract),
    "multiply": _binary(tf.multiply),
    "divide": _binary(lambda a, b: a / (1.0 + tf.square(b))),
    "ratio": _binary(tf.math.divide_no_nan),
    "maximum": _binary(tf.maximum),
    "where": _binary(lambda a, b: tf.where(a > 0.0, a, b)),
    "matmul": _binary(tf.matmul),
    "matmul_turned": _binary(lambda a, b: tf.matmul(a, b, transpose_b=True)),
    "covariance": _binary(lambda a, b: tf.matmul(a, b, transpose_a=True)),
    "concat": lambda a, b, choice: tf.concat([a, b], axis=choice % 2),
    "stack": lambda a, b, choice: tf.stack([a, b], axis=choice % 2),
    "sum": _reduce(tf.reduce_sum),
    "mean": _reduce(tf.reduce_mean),
    "max": _reduce(tf.reduce_max),
    "product": _reduce(lambda a, **options: tf.reduce_prod(tf.tanh(a), **options)),
    "half_square": _unary(tf.nn.l2_loss),
    "transpose": _unary(tf.transpose),
    "expand": lambda a, b, choice: tf.expand_dims(a, [0, 1, -1][choice % 3]),
    "squeeze": lambda a, b, choice: tf.squeeze(a, [0, 1, -1][choice % 3]),
    "flatten": _unary(lambda a: tf.reshape(a, [-1])),
    "reshape": lambda a, b, choice: tf.reshape(a, [-1, choice % 3 + 1]),
    "fold": lambda a, b, choice: tf.reshape(a, [tf.shape(a)[0], -1]),
    "first_column": _unary(lambda a: a[:, :1]),
    "last": _unary(lambda a: a[..., -1]),
    "tail": _unary(lambda a: a[1:]),
    "rows": _unary(lambda a: tf.cast(tf.shape(a)[0], tf.float64)),
    "size": _unary(lambda a: tf.cast(tf.size(a), tf.float64)),
    "ones_like": _unary(tf.ones_like),
    "zeros_of_shape": _unary(lambda a: tf.zeros(tf.shape(a), tf.float64)),
    "broadcast": _binary(lambda a, b: tf.broadcast_to(a, tf.shape(b))),
    "tile": lambda a, b, choice: tf.tile(a, [1, choice % 3 + 1]),
    "reverse": lambda a, b, choice: tf.reverse(a, [choice % 2]),
    "cumulate": lambda a, b, choice: tf.cumsum(a, axis=choice % 2),
    "largest": lambda a, b, choice: tf.cast(tf.argmax(a, axis=choice % 2), tf.float64),
    "sort": lambda a, b, choice: tf.sort(a, axis=[0, -1][choice % 2]),
    "gather_columns": lambda a, b, choice: tf.gather(a, [0, 1, 0], axis=1),
    "one_hot": _unary(lambda a: tf.one_hot(tf.cast(tf.abs(a), tf.int32), 3, dtype=tf.float64)),
    "moments": lambda a, b, choice: tf.nn.moments(a, axes=[0])[choice % 2],
    "loop": _unary(lambda a: tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, tf.tanh(v) + 0.5), [0, a])[1]),
    "branch": _binary(lambda a, b: tf.cond(tf.reduce_sum(a) > 0.0, lambda: a * 2.0, lambda: a - 1.0)),
}

BUILDERS = (
    "AllReduce",
    "AllReduce(chunk_size=1)",
    "AllReduce(all_reduce_spec='RING')",
    "AllReduce(chunk_size=2, all_reduce_spec='RING')",
)

LOSSES: Mapping[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "mean": tf.reduce_mean,
    "sum": lambda value: 0.01 * tf.reduce_sum(value),
    "each": lambda value: 0.01 * value,
}


RESULTS: Mapping[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "float": lambda value: value,
    "complex": lambda value: tf.reduce_sum(tf.complex(value, -value), axis=0),
    "unsigned": lambda value: tf.cumsum(tf.cast(tf.minimum(tf.abs(value), 1e6), tf.uint64)),
    "text": lambda value: tf.strings.as_string(tf.cast(tf.clip_by_value(value, -1e6, 1e6), tf.int64)),
}
"""What is made of a value to be returned: types that collectives do not carry are among them."""

Gradients = Sequence[tuple[tf.Variable, Any]]


def _descend(gradients: Gradients) -> None:
    for variable, gradient in gradients:
        variable.assign_sub(0.05 * tf.convert_to_tensor(gradient))


def _clip_each(gradients: Gradients) -> None:
    _descend([(variable, tf.clip_by_norm(tf.convert_to_tensor(gradient), 1.0)) for variable, gradient in gradients])


def _clip_together(gradients: Gradients) -> None:
    clipped, _ = tf.clip_by_global_norm([tf.convert_to_tensor(gradient) for _, gradient in gradients], 1.0)
    _descend([(variable, gradient) for (variable, _), gradient in zip(gradients, clipped, strict=True)])


def _change_rows(gradients: Gradients) -> None:
    for variable, gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            clipped = tf.clip_by_value(gradient.values, -1.0, 1.0)
            variable.scatter_sub(tf.IndexedSlices(0.05 * clipped, gradient.indices))
        else:
            variable.assign_sub(0.05 * tf.tanh(gradient))


def _keras(make: Callable[[], keras.Optimizer]) -> Callable[[Sequence[tf.Variable]], Callable[[Gradients], None]]:
    def updater(variables: Sequence[tf.Variable]) -> Callable[[Gradients], None]:
        optimizer = make()
        optimizer.build(variables)

        def update(gradients: Gradients) -> None:
            if gradients:
                optimizer.apply_gradients([(gradient, variable) for variable, gradient in gradients])

        return update

    return updater


UPDATES: Mapping[str, Callable[[Sequence[tf.Variable]], Callable[[Gradients], None]]] = {
    "descend": lambda variables: _descend,
    "clip each": lambda variables: _clip_each,
    "clip together": lambda variables: _clip_together,
    "change rows": lambda variables: _change_rows,
    "momentum": _keras(lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True, clipnorm=2.0)),
    "adam": _keras(lambda: keras.optimizers.Adam(0.01, global_clipnorm=1.0)),
}
"""What makes the update of the variables of one program."""


def _evaluate(
    operations: Sequence[Operation],
    inputs: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    *,
    kept: list[Operation] | None = None,
) -> list[tf.Tensor]:
    """The values that `operations` make; those that cannot be made of the static shapes are left out.

    Where `kept` is given it is filled with the others.
    """
    x, ids, w = inputs
    table, kernel, scale = variables
    values = [
        tf.constant([[0.5, -1.0, 2.0]], tf.float64),
        scale * 1.0,
        w,
        tf.gather(table, ids),
        tf.tanh(tf.matmul(x, kernel)),
        x,
    ]
    for operation in operations:
        first, second = (values[-1 - index % len(values)] for index in (operation.first, operation.second))
        try:
            made = OPERATIONS[operation.name](first, second, operation.choice)
        except (ValueError, tf.errors.InvalidArgumentError):
            continue
        if made.shape.rank is not None and made.shape.rank <= MAX_RANK:
            values.append(made)
            if kept is not None:
                kept.append(operation)
    return values


def _is_valid(
    program: RandomProgram, batches: Sequence[Sequence[np.ndarray]], variables: Sequence[tf.Variable]
) -> bool:
    """Whether one device can make all values of `program`, also those that no result needs.

    It is asked eagerly: of a value that a function does not need TensorFlow trusts the shape, and is wrong then.
    """
    kept: list[Operation] = []
    signature = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in batches[0]]
    tf.function(
        lambda *inputs: _evaluate(program.operations, inputs, variables, kept=kept), autograph=False
    ).get_concrete_function(*signature)
    made: list[Operation] = []
    for batch in batches:
        _evaluate(kept, [tf.constant(array) for array in batch], variables, kept=made)
    return made == kept * len(batches)


def _tensors(gradients: Sequence[Gradients]) -> list[Any]:
    return [tf.convert_to_tensor(gradient) for pairs in gradients for _, gradient in pairs]


def run(program: RandomProgram) -> str:
    """Compare `program` with one device.

    Returns:
        "equal"; "refused: ..." by a CaptureError; "invalid" where one device cannot run it, "invalid on nothing" where
        it cannot run it on a batch of no examples, which a replica has; or where nothing is promised: "unknown result",
        "unknown loss", or "local", which mixes the examples of a replica.

    Raises:
        AssertionError: it differs; the message has the program.
    """
    rng = np.random.default_rng(1)
    inputs = [
        (rng.normal(size=(n, FEATURES)), rng.integers(0, CLASSES, n), rng.integers(0, 3, n).astype(np.float64))
        for n in SIZES[program.sizes]
    ]
    variables = [
        tf.Variable(rng.normal(size=(CLASSES, FEATURES)), name="table"),
        tf.Variable(rng.normal(size=(FEATURES, 2)), name="kernel"),
        tf.Variable(rng.normal(size=FEATURES), name="scale"),
    ]
    written = tf.Variable(0.0, dtype=tf.float64, shape=tf.TensorShape([]), trainable=False, name="written")

    update = UPDATES[program.update](variables)

    signature = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in inputs[0]]

    def differentiate(*batch: tf.Tensor) -> tuple[list[tf.Tensor], list[Gradients], tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            values = _evaluate(program.operations, batch, variables)
            kinds = [kind for kind in (program.loss, program.second_loss) if kind]
            losses = [LOSSES[kind](values[-1 - position]) for position, kind in enumerate(kinds)]
        gradients = [zip(variables, tape.gradient(loss, variables), strict=True) for loss in losses]
        kept: list[Gradients] = [
            [(v, gradient) for v, gradient in pairs if gradient is not None] for pairs in gradients
        ]
        return values, kept, losses[0]

    @tf.function(input_signature=signature, autograph=False)  # It has nothing to convert, which takes half the time.
    def step(x: tf.Tensor, ids: tf.Tensor, w: tf.Tensor) -> Any:
        values, gradients, loss = differentiate(x, ids, w)
        for pairs in gradients:
            update(pairs)
        value = tf.reduce_mean(values[-2])
        if program.write == "add":
            written.assign_add(value)
        elif program.write == "decay":
            written.assign(0.9 * written + tf.reduce_sum(values[-2]))
        elif program.write == "loss":
            written.assign_add(tf.reduce_mean(loss))
        elif program.write == "twice":
            written.assign_add(value)
            written.assign(0.5 * written.read_value() + tf.reduce_sum(values[-1]))
        elif program.write == "largest":
            written.assign(tf.maximum(written, tf.reduce_max(values[-2])))
        shown = [one for one in values[-3:] if one.shape[1:].is_fully_defined()]
        if program.result != "float":
            shown += [RESULTS[program.result](one) for one in shown[-1:] if one.shape.rank]
        return shown, written.read_value()

    def runs_on_nothing() -> bool:
        """Whether TensorFlow can run it on a replica without examples."""
        try:
            tf.function(lambda *batch: _tensors(differentiate(*batch)[1]), input_signature=signature, autograph=False)(
                *[tf.constant(array[:0]) for array in inputs[0]]
            )
        except tf.errors.InvalidArgumentError:
            return False
        return True

    if not _is_valid(program, inputs, variables):
        return "invalid"
    try:
        for arguments in inputs:
            step(*map(tf.constant, arguments))
    except (tf.errors.InvalidArgumentError, ValueError):
        return "invalid"
    with AutoDist(strategy_builder=program.builder) as autodist:
        if len(autodist.resources.replica_devices) > min(SIZES[program.sizes]) and not runs_on_nothing():
            return "invalid on nothing"
        distributed = autodist.function(step)
        try:
            item = distributed.captured(*inputs[0]).item
            if item.local_ops or item.mixtures:
                return "local"
            if any(not output.reduction for output in item.outputs):
                return "unknown result"
            if any(not gradient.reduction for gradient in item.gradients):
                return "unknown loss"
            comparison: Comparison = compare(step, distributed, inputs, tolerance=program.tolerance)
        except CaptureError as error:
            return f"refused: {error}"
    assert comparison.first is None, f"{program}\n{comparison}\n{item}"
    return "equal"
