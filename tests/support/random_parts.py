"""What random programs are drawn from: operations, losses, results, updates, writes and builders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer


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


def _turned(a: tf.Tensor, b: tf.Tensor, choice: int) -> tf.Tensor:
    """Of what goes round, each turn makes something with `b`; a sum goes round beside."""

    def turn(i: tf.Tensor, v: tf.Tensor, s: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return i + 1, tf.ensure_shape(tf.tanh(v * b), a.shape), s + tf.reduce_sum(v, axis=_axis(choice, a.shape.rank))

    zero = tf.zeros_like(tf.reduce_sum(a, axis=_axis(choice, a.shape.rank)))
    return tf.while_loop(lambda i, v, s: i < 2, turn, [0, a, zero])[1 + choice % 2]


def _listed(a: tf.Tensor, b: tf.Tensor, choice: int) -> tf.Tensor:
    """Two values one after the other, as a list, that a loop fills."""
    turn = lambda i, v, rows: (i + 1, tf.sin(v), rows.write(i, v))  # noqa: E731
    rows = tf.TensorArray(a.dtype, 2, element_shape=a.shape)
    return tf.while_loop(lambda i, v, rows: i < 2, turn, [0, a, rows])[2].stack()


def _scanned(a: tf.Tensor, b: tf.Tensor, choice: int) -> tf.Tensor:
    """Over the first axis, or the last one."""
    if not a.shape.rank:
        raise ValueError("a number has no axis to scan")
    over = tf.transpose(a) if choice % 2 else a
    return tf.scan(lambda state, element: tf.tanh(state + element), over)


def _chosen(a: tf.Tensor, b: tf.Tensor, choice: int) -> tf.Tensor:
    """Of two ways, by what all replicas have, or by a mean over examples."""
    way = tf.reduce_mean(b) > 0.1 if choice % 2 else tf.size(tf.shape(b)) > choice % 3
    return tf.cond(way, lambda: tf.tanh(a) - tf.reduce_sum(b), lambda: a * 0.5)


@tf.function(autograph=False)
def _called(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.tanh(a) + b * 0.5


DRAWN = "draw"
"""An operation whose numbers are one device's with `random="global"` only."""

OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "tanh": _unary(tf.tanh),
    "square": _unary(tf.square),
    "root": _unary(lambda a: tf.sqrt(tf.abs(a) + 1.0)),
    DRAWN: lambda a, b, choice: a * tf.random.stateless_uniform(tf.shape(a), [choice, 7], dtype=tf.float64),
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
    "concat both ways": lambda a, b, choice: tf.concat([a, b], 0) * tf.concat([b, a] if choice % 2 else [a, b], 0),
    "rows of a concat": lambda a, b, choice: tf.concat([a, b], 0)[: tf.shape(b if choice % 2 else a)[0]],
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
    # Multiplied, as TensorFlow's optimizer takes the argmax of floor(x) for that of x, where other elements are equal.
    "largest": lambda a, b, choice: tf.cast(tf.argmax(1.5 * a, axis=choice % 2), tf.float64),
    "sort": lambda a, b, choice: tf.sort(a, axis=[0, -1][choice % 2]),
    "gather_columns": lambda a, b, choice: tf.gather(a, [0, 1, 0], axis=1),
    "one_hot": _unary(lambda a: tf.one_hot(tf.cast(tf.abs(a), tf.int32), 3, dtype=tf.float64)),
    "moments": lambda a, b, choice: tf.nn.moments(a, axes=[0])[choice % 2],
    "loop": _unary(lambda a: tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, tf.tanh(v) + 0.5), [0, a])[1]),
    "turned": _turned,
    "listed": _listed,
    "scanned": _scanned,
    "chosen": _chosen,
    "called": lambda a, b, choice: _called(a, b),
    "normalized": _unary(lambda a: (a - tf.reduce_mean(a, 0)) / tf.sqrt(tf.math.reduce_variance(a, 0) + 0.1)),
    # Not over 0: the sum of what is normalized is nothing but rounding.
    "branch": _binary(lambda a, b: tf.cond(tf.reduce_sum(a) > 0.123, lambda: a * 2.0, lambda: a - 1.0)),
}

FACTORED = "AllReduce(factors=True)"
"""It refuses programs none of whose gradients is a product."""
BUILDERS = (
    "AllReduce",
    FACTORED,
    "AllReduce(chunk_size=1)",
    "AllReduce(all_reduce_spec='RING')",
    "AllReduce(chunk_size=2, all_reduce_spec='RING')",
)
SERVING = (
    "PS",
    "PSLoadBalancing(local_proxy_variable=True)",
    "Parallax",
    "PartitionedPS(min_shard_bytes=1)",
    f"{__name__}:Alternating(first=0)",
    f"{__name__}:Alternating(first=1)",
)
"""Builders with servers."""


@dataclass(frozen=True, slots=True)
class Alternating:
    """Every other variable lives on a server, one after the other on all workers; AllReduce for the rest.

    Attributes:
        first: the position of the first one on a server, 0 or 1.
    """

    first: int

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """The variables' strategies."""
        nodes = []
        for position, variable in enumerate(item.trainable_variables):
            server = resources.workers[position // 2 % len(resources.workers)]
            is_served = position % 2 == self.first
            synchronizer = PSSynchronizer(f"{server.address}:CPU:0") if is_served else AllReduceSynchronizer()
            nodes.append(VariableStrategy(variable.name, synchronizer))
        return Strategy(tuple(nodes), tuple(device for node in resources.workers for device in node.replica_devices))


LOSSES: Mapping[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "mean": tf.reduce_mean,
    "sum": lambda value: 0.01 * tf.reduce_sum(value),
    "each": lambda value: 0.01 * value,
}


RESULTS: Mapping[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "float": lambda value: value,
    # Of what is normalized a sum is nothing but rounding: it is not to be the largest part.
    "complex": lambda value: tf.reduce_sum(tf.complex(value, 1.0 - value), axis=0),
    "unsigned": lambda value: tf.cumsum(tf.cast(tf.minimum(tf.abs(value), 1e6), tf.uint64)),
    "long": lambda value: tf.reduce_sum(tf.cast(tf.clip_by_value(value, -1e6, 1e6), tf.int64), axis=0),
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
    "adam unclipped": _keras(lambda: keras.optimizers.Adam(0.01)),
    "adagrad": _keras(lambda: keras.optimizers.Adagrad(0.05)),
}
"""What makes the update of the variables of one program."""


class Writes:
    """The state beside what is trained: a number that a step writes, and a metric; and how it does."""

    KINDS = ("nothing", "add", "decay", "largest", "loss", "twice", "between", "metric")

    def __init__(self, kind: str):
        self._kind = kind
        self.value = tf.Variable(0.0, dtype=tf.float64, shape=tf.TensorShape([]), trainable=False, name="written")
        self._metric = keras.metrics.Mean(dtype="float64")

    def write(self, values: Sequence[tf.Tensor], loss: tf.Tensor) -> list[tf.Tensor]:
        """Write, in a step, what its values and loss are; returns what was read in between."""
        written, value = self.value, tf.reduce_mean(values[-2])
        if self._kind == "add":
            written.assign_add(value)
        elif self._kind == "decay":
            written.assign(0.9 * written + tf.reduce_sum(values[-2]))
        elif self._kind == "loss":
            written.assign_add(tf.reduce_mean(loss))
        elif self._kind == "twice":
            written.assign_add(value)
            written.assign(0.5 * written.read_value() + tf.reduce_sum(values[-1]))
        elif self._kind == "between":
            written.assign_add(value)
            between = written.read_value()
            written.assign(tf.tanh(written.read_value()) + tf.reduce_sum(values[-1]))
            return [between]
        elif self._kind == "largest":
            written.assign(tf.maximum(written, tf.reduce_max(values[-2])))
        elif self._kind == "metric":
            self._metric.update_state(values[-1])
            return [self._metric.result()]
        return []
