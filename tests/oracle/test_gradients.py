"""Gradients of every kind that a step may compute, each against one device on the whole batch.

One module, though long: its clusters start once.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.proto.errors import CaptureError
from tests.corpus.header import STRATEGIES
from tests.support import data_of_losses
from tests.support.cluster_pool import THREE_WORKERS, TWO_REPLICAS, TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import Batch, Training, Values, assert_close, compare_function

pytestmark = pytest.mark.parametrize(
    "cluster",
    [TWO_REPLICAS, TWO_WORKERS, THREE_WORKERS],
    ids=lambda shape: shape.name,
    indirect=True,
    scope="module",
)

SIZES = (6, 5, 1, 7)
ROWS = 5


def batches() -> list[Batch]:
    """Features, ids with duplicates, and targets."""
    rng = np.random.default_rng(11)
    return [
        (rng.normal(size=(size, 3)), rng.integers(0, ROWS, size=(size, 4)), rng.normal(size=(size, 3)))
        for size in SIZES
    ]


class Weights:
    """Two dense layers, an embedding table, and state for updates; `case` is the step."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.all = {
            "first": tf.Variable(rng.normal(size=(3, 4)), name="first"),
            "second": tf.Variable(rng.normal(size=(4, 3)), name="second"),
            "table": tf.Variable(rng.normal(size=(ROWS, 3)), name="table"),
            "unused": tf.Variable(np.ones(2), name="unused"),
            "gathered": tf.Variable(np.zeros((3, 4)), trainable=False, name="gathered"),
            "steps": tf.Variable(0, dtype=tf.int64, trainable=False, name="steps"),
        }

        self.used: set[str] = set()
        """What the step touches: other variables are not made the chief's."""

    def __getattr__(self, name: str) -> tf.Variable:
        self.used.add(name)
        return vars(self)["all"][name]

    def predict(self, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(tf.tanh(tf.matmul(x, self.first)), self.second)

    def loss(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(self.predict(x) - y))

    def descend(self, tape: tf.GradientTape, loss: tf.Tensor, *names: str, rate: float = 0.1) -> None:
        self.used.update(names)
        for name, gradient in zip(names, tape.gradient(loss, [self.all[name] for name in names]), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                self.all[name].scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))
            elif gradient is not None:
                self.all[name].assign_sub(rate * gradient)


def several_losses_of_one_tape(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        hidden = tf.tanh(tf.matmul(x, w.first))
        one = tf.reduce_mean(tf.square(hidden))
        two = tf.reduce_sum(tf.square(tf.matmul(hidden, w.second) - y)) * 0.05
    w.descend(tape, one, "first")
    w.descend(tape, two, "first", "second", "unused")
    return one, two


def recomputed_layers(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """Clipped: else TensorFlow's optimizer lets an update on one device run before the recomputation, at times."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.recompute_grad(w.predict)(x) - y))
    weights = [w.first, w.second]
    gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.5)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(0.1 * gradient)
    return loss


@tf.custom_gradient
def reversed_gradient(x: tf.Tensor) -> Any:
    return tf.identity(x), lambda upstream: -0.5 * upstream


def custom_gradients(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(reversed_gradient(tf.tanh(tf.matmul(x, w.first))), w.second) - y))
    w.descend(tape, loss, "first", "second")
    return loss


def passing(back: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """What it is given; what it passes back goes through `back`."""

    @tf.custom_gradient
    def passed(x: tf.Tensor) -> Any:
        return tf.identity(x), back

    return passed


def clipped_on_the_way_back(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """By number, by row, and in a layer's middle; a regularizer beside it counts once."""
    with tf.GradientTape() as tape:
        hidden = passing(lambda g: tf.clip_by_norm(g, 0.02, axes=[1]))(tf.tanh(tf.matmul(x, w.first)))
        out = passing(lambda g: tf.clip_by_value(g, -0.01, 0.02))(tf.matmul(hidden, w.second))
        rows = passing(lambda g: 0.01 * tf.sign(g) + 0.001)(tf.gather(w.table, ids[:, 0]))
        loss = tf.reduce_mean(tf.square(out + rows - y)) + 0.1 * tf.nn.l2_loss(w.first)
    w.descend(tape, loss, "first", "second", "table")
    return loss


def clipped_before_the_mean(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        loss = passing(lambda g: tf.clip_by_value(g, -0.3, 0.3))(w.loss(x, y))
    w.descend(tape, loss, "first", "second")
    return loss


def clipped_in_a_loop(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    clipped = passing(lambda g: tf.clip_by_value(g, -0.01, 0.01))
    with tf.GradientTape() as tape:
        value = x
        for _ in tf.range(3):
            value = clipped(tf.tanh(tf.matmul(tf.tanh(tf.matmul(value, w.first)), w.second)))
        loss = tf.reduce_mean(tf.square(value - y))
    w.descend(tape, loss, "first", "second")
    return loss


def a_gradient_penalty(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            out = tf.reduce_sum(w.predict(x), axis=1)
        slope = tf.norm(inner.gradient(out, x), axis=1)
        loss = tf.reduce_mean(out) + 0.1 * tf.reduce_mean(tf.square(slope - 1.0))
    w.descend(tape, loss, "first", "second")
    return loss


def second_order(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner_loss = w.loss(x, y)
        slope = inner.gradient(inner_loss, w.first)
        loss = w.loss(x, y)
        loss += 0.0 * tf.stop_gradient(tf.reduce_sum(slope))
    w.descend(tape, loss, "first", "second")
    return loss


def through_a_loop(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        value = x
        for _ in tf.range(3):
            value = tf.tanh(tf.matmul(tf.tanh(tf.matmul(value, w.first)), w.second))
        loss = tf.reduce_mean(tf.square(value - y))
    w.descend(tape, loss, "first", "second")
    return loss


def through_a_branch(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.cond(w.steps % 2 == 0, lambda: w.loss(x, y), lambda: tf.reduce_mean(tf.abs(w.predict(x) - y)))
    w.descend(tape, loss, "first", "second")
    w.steps.assign_add(1)
    return loss


def accumulated_over_steps(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        loss = w.loss(x, y)
    w.gathered.assign_add(tape.gradient(loss, w.first))
    w.steps.assign_add(1)
    if w.steps % 2 == 0:
        w.first.assign_sub(0.05 * w.gathered)
        w.gathered.assign(tf.zeros_like(w.gathered))
    return loss


def a_tied_table(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        embedded = tf.reduce_mean(tf.gather(w.table, ids), axis=1)
        logits = tf.matmul(embedded * x, w.table, transpose_b=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids[:, 0], logits))
    w.descend(tape, loss, "table")
    return loss


def a_table_looked_up_twice_with_a_clip(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        rows = tf.gather(w.table, ids[:, 0]) + 2.0 * tf.nn.embedding_lookup(w.table, ids[:, 1])
        loss = tf.reduce_mean(tf.square(rows - y))
    gradient = tape.gradient(loss, w.table)
    dense = tf.convert_to_tensor(gradient)
    w.table.assign_sub(tf.clip_by_norm(dense, 0.1))
    return loss


def a_variable_of_two_losses_in_turn(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        critic = tf.reduce_mean(tf.tanh(w.predict(x)) - y)
    w.descend(tape, critic, "second")
    with tf.GradientTape() as tape:
        actor = tf.reduce_mean(tf.square(w.predict(x)))
    w.descend(tape, actor, "first")
    return critic, actor


def a_regularizer_of_a_mean(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        rows = tf.gather(w.table, ids)
        loss = tf.reduce_mean(rows) + 0.01 * tf.nn.l2_loss(w.table) + w.loss(x, y) + tf.reduce_sum(w.unused**2)
    w.descend(tape, loss, "table", "first", "second", "unused")
    return loss


def clipped_for_each_example(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """Differentially private descent: each example's gradients have a norm of 0.3 at most."""
    with tf.GradientTape(persistent=True) as tape:
        losses = tf.reduce_mean(tf.square(w.predict(x) - y), axis=1)
        with tape.stop_recording():
            of_examples = tape.jacobian(losses, [w.first, w.second])
        squares = tf.add_n([tf.reduce_sum(tf.square(one), axis=[1, 2]) for one in of_examples])
        factors = tf.minimum(tf.constant(1.0, tf.float64), 0.3 / tf.sqrt(squares))
        loss = tf.reduce_mean(tf.stop_gradient(factors) * losses)
    w.descend(tape, loss, "first", "second")
    return loss


CASES = [
    clipped_for_each_example,
    several_losses_of_one_tape,
    recomputed_layers,
    custom_gradients,
    clipped_on_the_way_back,
    clipped_before_the_mean,
    clipped_in_a_loop,
    a_gradient_penalty,
    second_order,
    through_a_loop,
    through_a_branch,
    accumulated_over_steps,
    a_tied_table,
    a_table_looked_up_twice_with_a_clip,
    a_variable_of_two_losses_in_turn,
    a_regularizer_of_a_mean,
]


@tf.function
def sorted_by_python(rows: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.py_function(tf.sort, [rows], rows.dtype), rows.shape)


def python_functions(w: Weights, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """One in the step, and one in a function that it calls."""
    with tf.GradientTape() as tape:
        rows = tf.ensure_shape(tf.py_function(tf.sin, [w.predict(x) - y], y.dtype), y.shape)
        loss = tf.reduce_mean(tf.reduce_logsumexp(sorted_by_python(rows), axis=1))
    w.descend(tape, loss, "first", "second")
    return loss


def train(what: Callable[..., Any], builder: str = "AllReduce", **options: Any) -> Values:
    def build(seed: int) -> Training:
        weights = Weights(seed)

        def step(x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
            return what(weights, x, ids, y)

        tf.function(step).get_concrete_function(*(tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in batches()[0]))
        return Training(step, lambda: {name: weights.all[name] for name in sorted(weights.used)})

    return compare_function(build, batches(), autodist={"strategy_builder": STRATEGIES[builder], **options})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.replace("_", "-"))
def test_a_gradient_is_that_of_one_device(cluster: Cluster, case: Callable[..., Any]) -> None:
    same(cluster.run(train, what=case))


def test_a_python_function_has_its_own_gradient_on_every_replica(cluster: Cluster) -> None:
    """The user says that it computes each row by itself, which cannot be known."""
    options: dict[str, Any] = {"batch_statistics": "replica", "loss_reduction": "mean", "strict": False}
    same(cluster.run(train, what=python_functions, **options))


@pytest.mark.on(1)
@pytest.mark.parametrize("builder", sorted(STRATEGIES.keys() - {"AllReduce"}))
def test_what_is_clipped_on_its_way_back_is_so_under_every_strategy(cluster: Cluster, builder: str) -> None:
    same(cluster.run(train, what=clipped_on_the_way_back, builder=builder))


def keras_optimizer(make: Callable[[], Any]) -> Values:
    def build(seed: int) -> Training:
        keras.config.set_floatx("float64")
        weights, optimizer = Weights(seed), make()
        trained = [weights.first, weights.second]
        optimizer.build(trained)

        def step(x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = weights.loss(x, y)
                scaled = optimizer.scale_loss(loss)
            optimizer.apply_gradients(zip(tape.gradient(scaled, trained), trained, strict=True))
            return loss

        slots = {f"slot_{index}": variable.value for index, variable in enumerate(optimizer.variables)}
        return Training(step, lambda: {"first": weights.first, "second": weights.second, **slots})

    return compare_function(build, batches())


def loss_scale() -> keras.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05), initial_scale=8.0, dynamic_growth_steps=2)


def accumulating() -> keras.Optimizer:
    return keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.5)


def averaging() -> keras.Optimizer:
    return keras.optimizers.AdamW(0.05, weight_decay=0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)


@pytest.mark.parametrize("make", [loss_scale, accumulating, averaging], ids=lambda make: make.__name__)
def test_a_keras_optimizer_that_updates_in_branches_does_what_it_does_on_one_device(
    cluster: Cluster, make: Callable[[], Any]
) -> None:
    same(cluster.run(keras_optimizer, make=make))


ROW_KINDS_BUILDERS = ("AllReduce", "PSLoadBalancing", "PartitionedPS", "ShardedOptimizer", "Parallax")
TOKENS = 4


def rows_of_every_kind(builder: str, reduction: str) -> Values:
    """Rows by the batch's ids, by positions, by constants, by both, and by ids that a step makes distinct."""
    keras.config.set_floatx("float64")
    reduce = {"mean": tf.reduce_mean, "sum": tf.reduce_sum}[reduction]

    def build(seed: int) -> Training:
        rng = np.random.default_rng(seed)
        shapes = {"words": (ROWS, 3), "places": (TOKENS, 3), "both": (ROWS, 3), "sets": (ROWS, 3), "out": (3, ROWS)}
        weights = {name: tf.Variable(rng.normal(size=shape), name=name) for name, shape in shapes.items()}
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(list(weights.values()))

        def step(ids: tf.Tensor, length: tf.Tensor) -> None:
            used = ids[:, :length]
            with tf.GradientTape() as tape:
                hidden = tf.gather(weights["words"], used) + tf.gather(weights["places"], tf.range(length))
                both = weights["both"]
                constants = tf.gather(both, [[1, 1, 2], [3, 0, 0]])
                hidden += tf.gather(both, used) * tf.reduce_sum(tf.square(constants), axis=[0, 1])
                hidden += tf.gather(both, tf.range(TOKENS))[:length]
                of_set = tf.nn.embedding_lookup_sparse(weights["sets"], tf.sparse.from_dense(ids + 1), None)
                hidden += tf.ensure_shape(of_set, [None, 3])[:, tf.newaxis]
                logits = tf.einsum("btd,dv->btv", tf.tanh(hidden), weights["out"])
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(used, logits)
                loss = reduce(losses) + 0.1 * tf.nn.l2_loss(tf.gather(both, [4, 4]))
            gradients = tape.gradient(loss, list(weights.values()))
            optimizer.apply_gradients(zip(gradients, weights.values(), strict=True))

        slots = {f"slot_{index}": one.value for index, one in enumerate(optimizer.variables)}
        return Training(step, lambda: weights | slots)

    rng = np.random.default_rng(5)
    batches = [
        (rng.integers(0, ROWS - 1, size=(size, TOKENS)), np.array(length)) for size, length in ((6, 4), (5, 3), (1, 4))
    ]
    autodist = {"strategy_builder": builder, "loss_reduction": reduction}
    return compare_function(build, batches, batched=["ids"], autodist=autodist)


@pytest.mark.on(1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("builder", ROW_KINDS_BUILDERS)
def test_rows_that_all_replicas_have_are_those_of_one_device(cluster: Cluster, builder: str, reduction: str) -> None:
    same(cluster.run(rows_of_every_kind, builder=builder, reduction=reduction))


def sparse_lookups(builder: str, optimizer: str) -> Values:
    """Lookups of sparse ids, which a step makes unique, some examples without any; of labels and a sample together."""
    keras.config.set_floatx("float64")

    def build(seed: int) -> Training:
        rng = np.random.default_rng(seed)
        shapes = {"safe": (ROWS, 3), "all": (ROWS, 3), "weighted": (ROWS, 3), "out": (3, 2), "classes": (ROWS, 3)}
        weights = {name: tf.Variable(rng.normal(size=shape), name=name) for name, shape in shapes.items()}
        slots: dict[str, tf.Variable] = {}
        if optimizer.startswith("v1"):
            chosen = {"v1.Adam": tf.compat.v1.train.AdamOptimizer, "v1.Adagrad": tf.compat.v1.train.AdagradOptimizer}
            updates = chosen[optimizer](0.1)
        else:
            updates = getattr(keras.optimizers, optimizer)(0.1)
            updates.build(list(weights.values()))
            slots = {f"slot_{index}": one.value for index, one in enumerate(updates.variables)}

        def step(ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            some, of_each = tf.sparse.from_dense(ids), tf.sparse.from_dense(ids + 1)
            scores = of_each.with_values(1.0 / tf.cast(of_each.values, tf.float64))
            with tf.GradientTape() as tape:
                hidden = tf.nn.safe_embedding_lookup_sparse(weights["safe"], some)
                hidden += tf.nn.embedding_lookup_sparse(weights["all"], of_each, None, combiner="sqrtn")
                hidden += tf.nn.embedding_lookup_sparse(weights["weighted"], of_each, scores, combiner="mean")
                hidden = tf.tanh(tf.ensure_shape(hidden, [None, 3]))
                loss = tf.reduce_mean((hidden @ weights["out"] - y) ** 2)
                chances = (tf.ones_like(ids[:, :1], tf.float64) / ROWS, tf.ones([3], tf.float64) / ROWS)
                sample = (tf.constant([1, 2, 4], tf.int64), *chances)
                zeros = tf.zeros([ROWS], tf.float64)
                sampled = {"num_sampled": 3, "num_classes": ROWS, "sampled_values": sample}
                loss += tf.reduce_mean(tf.nn.nce_loss(weights["classes"], zeros, ids[:, :1], hidden, **sampled))
            gradients = tape.gradient(loss, list(weights.values()))
            updates.apply_gradients(zip(gradients, weights.values(), strict=True))
            return loss

        return Training(step, lambda: weights | slots)

    rng = np.random.default_rng(6)
    ids = [rng.integers(0, ROWS - 1, size=(size, TOKENS)) for size in (6, 5, 1, 7)]
    batches = [(np.where(np.arange(len(one))[:, None] % 3 == 2, 0, one), rng.normal(size=(len(one), 2))) for one in ids]
    return compare_function(build, batches, autodist={"strategy_builder": builder})


@pytest.mark.on(1)
@pytest.mark.parametrize(
    ("builder", "optimizer"),
    [(builder, "Adam") for builder in ROW_KINDS_BUILDERS]
    + [("AllReduce", "Adagrad"), ("AllReduce", "v1.Adam"), ("PSLoadBalancing", "v1.Adagrad")],
)
def test_ids_that_a_lookup_makes_unique_are_so_for_all_replicas(cluster: Cluster, builder: str, optimizer: str) -> None:
    same(cluster.run(sparse_lookups, builder=builder, optimizer=optimizer))


def scaled_by_hand(builder: str) -> Values:
    """float16 forward, a loss scale that halves when a gradient is not finite; rows by position, and a regularizer."""

    def build(seed: int) -> Training:
        rng = np.random.default_rng(seed)
        shapes = {"first": (3, 4), "second": (4, 3), "places": (TOKENS, 3)}
        weights = {name: tf.Variable(rng.normal(size=shape).astype("float32")) for name, shape in shapes.items()}
        state = {"scale": tf.Variable(np.float32(2.0**19), trainable=False), "good": tf.Variable(0, trainable=False)}

        def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
            with tf.GradientTape() as tape:
                half = [tf.cast(weights[name], tf.float16) for name in ("first", "second")]
                places = tf.cast(tf.gather(weights["places"], tf.range(2)), tf.float16)
                hidden = tf.cast(x, tf.float16) + tf.reduce_sum(places, axis=0)
                logits = tf.cast(tf.tanh(hidden @ half[0]) @ half[1], tf.float32)
                loss = tf.reduce_mean(tf.square(logits - tf.cast(y, tf.float32)))
                scaled = (loss + 0.01 * tf.nn.l2_loss(weights["first"])) * state["scale"]
            gradients = tape.gradient(scaled, list(weights.values()))
            gradients = [tf.convert_to_tensor(gradient) / state["scale"] for gradient in gradients]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight.assign_sub(0.1 * tf.where(finite, gradient, tf.zeros_like(gradient)))
            state["good"].assign(tf.where(finite, state["good"] + 1, 0))
            state["scale"].assign(tf.where(finite, state["scale"], state["scale"] * 0.5))
            return {"loss": loss, "finite": finite}

        return Training(step, lambda: weights | state)

    halved = [(x.astype("float32"), y.astype("float32")) for x, _, y in [*batches(), *batches()]]
    values = compare_function(build, halved, tolerance=4e-3, autodist={"strategy_builder": STRATEGIES[builder]})
    assert 0 < int(values["good"]) < len(halved)
    return values


@pytest.mark.on(1)
@pytest.mark.parametrize("builder", ["AllReduce", "PSLoadBalancing", "PartitionedPS"])
def test_a_loss_scale_by_hand_falls_as_on_one_device(cluster: Cluster, builder: str) -> None:
    same(cluster.run(scaled_by_hand, builder=builder))


def batch_norm() -> dict[str, np.ndarray]:
    """One device that normalizes each replica's slice by itself, with the weighted mean of the statistics."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)

    def network() -> keras.Model:
        return keras.Sequential(
            [
                keras.layers.Input([3]),
                keras.layers.Dense(4, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3),
            ]
        )

    with AutoDist(batch_statistics="replica") as autodist:
        replicas = sum(len(node.cpus) for node in autodist.resources.workers)
        compiled, single = network(), network()
        single.set_weights(compiled.get_weights())

        def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(compiled(x, training=True) - y))
            gradients = tape.gradient(loss, compiled.trainable_variables)
            for variable, gradient in zip(compiled.trainable_variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss

        step = autodist.function(train_step)
        rng = np.random.default_rng(4)
        for size in (6, 7, 11):
            x, y = rng.normal(size=(size, 3)), rng.normal(size=(size, 3))
            actual = step(x, y)
            with tf.GradientTape() as tape:
                losses, statistics = [], []
                before = [variable.numpy() for variable in single.non_trainable_variables]
                parts = zip(np.array_split(x, replicas), np.array_split(y, replicas), strict=True)
                for part_x, part_y in parts:
                    share = len(part_x) / size
                    losses.append(share * tf.reduce_mean(tf.square(single(part_x, training=True) - part_y)))
                    statistics.append([share * variable.numpy() for variable in single.non_trainable_variables])
                    for variable, value in zip(single.non_trainable_variables, before, strict=True):
                        variable.assign(value)
                loss = tf.add_n(losses)
            gradients = tape.gradient(loss, single.trainable_variables)
            for variable, gradient in zip(single.trainable_variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
            for variable, *values in zip(single.non_trainable_variables, *statistics, strict=True):
                variable.assign(sum(values))
            assert_close(actual, loss, "loss")
            for own, other in zip(compiled.variables, single.variables, strict=True):
                assert_close(own.numpy(), other.numpy(), own.path)
        return {variable.path: variable.numpy() for variable in compiled.variables}


def test_batch_norm_normalizes_each_replica_and_averages_its_statistics(cluster: Cluster) -> None:
    same(cluster.run(batch_norm))


def meta_learning() -> None:
    weights = Weights(0)
    with AutoDist() as autodist:

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = weights.loss(x, y)
                slope = inner.gradient(loss, weights.first)
                moved = tf.reduce_mean(tf.square(tf.matmul(tf.matmul(x, weights.first - 0.1 * slope), weights.second)))
            weights.first.assign_sub(0.1 * slope)
            weights.descend(outer, moved, "second")
            return loss

        with pytest.raises(CaptureError, match=r"'first' trains it .* as in MAML"):
            step(np.ones([4, 3]), np.ones([4, 3]))


def a_gradient_in_a_loop() -> None:
    weights = Weights(0)
    with AutoDist() as autodist:

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            for _ in tf.range(2):
                with tf.GradientTape() as tape:
                    loss = weights.loss(x, y)
                weights.descend(tape, loss, "first")

        with pytest.raises(CaptureError, match=r"inside a loop body, branch or function"):
            step(np.ones([4, 3]), np.ones([4, 3]))


def refused_for_each_example(gradients: Callable[..., tf.Tensor]) -> None:
    weights = tf.Variable(np.ones((3, 2)), name="weights")
    with AutoDist() as autodist:

        @autodist.function
        def step(x: tf.Tensor) -> None:
            weights.assign_sub(tf.reduce_mean(tf.clip_by_norm(gradients(weights, x), 0.3, axes=[1, 2]), axis=0))

        with pytest.raises(CaptureError, match=r"gradients of 'weights' are computed in a vectorized loop .*stop_grad"):
            step(np.ones((6, 3)))


def by_jacobian() -> None:
    def gradients(weights: tf.Variable, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(x @ weights), axis=1)
        return tape.jacobian(losses, weights)

    refused_for_each_example(gradients)


def by_vectorized_map() -> None:
    def gradients(weights: tf.Variable, x: tf.Tensor) -> tf.Tensor:
        def of_one(row: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(row[None] @ weights))
            return tape.gradient(loss, weights)

        return tf.vectorized_map(of_one, x)

    refused_for_each_example(gradients)


def a_gradient_of_a_weight_that_is_clipped_on_its_way_back() -> None:
    weights = tf.Variable(np.ones((3, 2)), name="weights")
    with AutoDist(batch_statistics="replica") as autodist:

        @autodist.function
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                used = passing(lambda g: tf.clip_by_value(g, -0.1, 0.1))(tf.convert_to_tensor(weights))
                loss = tf.reduce_mean(tf.square(tf.matmul(x, used)))
            weights.assign_sub(tape.gradient(loss, weights))

        with pytest.raises(
            CaptureError, match=r"back-propagation for 'weights' cannot be done by replicas.*'clip_by_value/Minimum'"
        ):
            step(np.ones((6, 3)))


def a_sum_that_keras_adds_to_a_mean() -> None:
    """A sum over examples by the loss, and a mean by an activity's regularizer."""
    with AutoDist(batch_statistics="replica") as autodist, autodist.scope():
        layers = [keras.layers.Input([4]), keras.layers.Dense(3, activity_regularizer="l2"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
        with pytest.raises(CaptureError, match=r"adds a sum over examples to what is a mean"):
            model.fit(np.ones([8, 4]), np.ones([8, 1]), batch_size=8, verbose=0)


def rows_of_two_batches_as_a_result() -> None:
    weights = tf.Variable(np.ones((3, 2)), name="weights")
    with AutoDist(batch_statistics="replica") as autodist:

        @autodist.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                rows = tf.matmul(tf.concat([x, -x], axis=0), weights)
                loss = tf.reduce_mean(tf.square(rows))
            weights.assign_sub(tape.gradient(loss, weights))
            return rows

        with pytest.raises(CaptureError, match=r"rows of several inputs, one behind the other"):
            step(np.ones((6, 3)))


REFUSED = [
    a_sum_that_keras_adds_to_a_mean,
    rows_of_two_batches_as_a_result,
    a_gradient_of_a_weight_that_is_clipped_on_its_way_back,
    meta_learning,
    a_gradient_in_a_loop,
    by_jacobian,
    by_vectorized_map,
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_what_cannot_be_exact_is_refused_by_name(cluster: Cluster, case: Callable[[], None]) -> None:
    cluster.run(case)


@pytest.mark.on(1)
@pytest.mark.parametrize("builder", ["AllReduce", "PSLoadBalancing", "PartitionedPS"])
@pytest.mark.parametrize("step", data_of_losses.STEPS)
def test_a_gradient_that_is_data_of_another_loss_is_that_of_the_whole_batch(
    cluster: Cluster, step: str, builder: str
) -> None:
    same(cluster.run(data_of_losses.trained, step=step, builder=STRATEGIES[builder]))
