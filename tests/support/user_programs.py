"""Programs as AutoDist's users write them. Each is given an AutoDist, or `OneDevice`, and returns what it trained.

They train for a few steps on data that every worker makes alike.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

Values = dict[str, Any]
BATCH, WORDS = 6, 9


class OneDevice:
    """In the place of an AutoDist: the program as it is."""

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def function(self, step: Callable[..., Any]) -> Any:
        return tf.function(step)

    def create_distributed_session(self) -> tf.compat.v1.Session:
        return tf.compat.v1.Session()

    def sync(self) -> None:
        pass


def data(*widths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=(4 * BATCH, width)) for width in widths]


def batches(*arrays: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Four of them, of which the last one is smaller."""
    starts = range(0, len(arrays[0]) - 1, BATCH)
    return [tuple(array[start : min(start + BATCH, len(array) - 1)] for array in arrays) for start in starts]


def trained(session: Any, graph: tf.Graph, results: list[Any]) -> Values:
    variables = {variable.op.name: variable for variable in graph.get_collection("variables")}
    return {**session.run(variables), **{f"result {number}": value for number, value in enumerate(results)}}


def linear_regression(autodist: Any) -> Values:
    """Fed placeholders, and a learning rate that is fed."""
    x_data, y_data = data(1, 1)
    with tf.Graph().as_default() as graph, autodist.scope():
        x, y = (tf.compat.v1.placeholder(tf.float64, [None, 1]) for _ in range(2))
        rate = tf.compat.v1.placeholder(tf.float64, [])
        slope = tf.compat.v1.get_variable("slope", initializer=np.array([[5.0]]))
        offset = tf.compat.v1.get_variable("offset", initializer=np.array([0.5]))
        before = offset.read_value()  # A read of its own, which nothing uses, might come after the update as well.
        loss = tf.reduce_mean(tf.square(x @ slope + before - y))
        gradients = tf.compat.v1.gradients(loss, [slope, offset])
        train = tf.compat.v1.train.GradientDescentOptimizer(rate).apply_gradients(
            zip(gradients, [slope, offset], strict=True)
        )
        with autodist.create_distributed_session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            fed = ({x: one, y: other, rate: 0.1 / (n + 1)} for n, (one, other) in enumerate(batches(x_data, y_data)))
            results = [session.run([loss, train, before], feed)[::2] for feed in fed]
            return trained(session, graph, [part for result in results for part in result])


def a_keras_model_with_an_input_iterator(autodist: Any) -> Values:
    x_data, y_data = data(4, 1)
    with tf.Graph().as_default() as graph, autodist.scope():
        tf_keras.backend.set_floatx("float64")
        tf.compat.v1.set_random_seed(1)  # Else every AutoDist on several workers draws one.
        dataset = tf.data.Dataset.from_tensor_slices((x_data, y_data)).shuffle(30, seed=3).batch(BATCH)
        iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        x, y = iterator.get_next()
        model = tf_keras.Sequential([tf_keras.layers.Dense(3, activation="tanh"), tf_keras.layers.Dense(1)])
        for layer, seed in zip(model.layers, (1, 2), strict=True):
            layer.kernel_initializer = tf_keras.initializers.GlorotUniform(seed)
        loss = tf.reduce_mean(tf.square(model(x) - y))
        train = tf.compat.v1.train.AdamOptimizer(0.05).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run([tf.compat.v1.global_variables_initializer(), iterator.initializer])
            results = []
            try:
                while True:
                    results.append(session.run([loss, train])[0])
            except tf.errors.OutOfRangeError:
                assert len(results) == 4
            return trained(session, graph, results)


def two_embeddings_one_under_a_condition(autodist: Any) -> Values:
    rng = np.random.default_rng(5)
    words, y_data = rng.integers(0, WORDS, (4 * BATCH, 3)), data(2)[0]
    with tf.Graph().as_default() as graph, autodist.scope():
        ids = tf.compat.v1.placeholder(tf.int64, [None, 3])
        y = tf.compat.v1.placeholder(tf.float64, [None, 2])
        both = tf.compat.v1.placeholder(tf.bool, [])
        first, second = (
            tf.compat.v1.get_variable(name, initializer=rng.normal(size=(WORDS, 2))) for name in ("first", "second")
        )
        looked_up = tf.reduce_sum(tf.nn.embedding_lookup(first, ids), axis=1)
        more = tf.cond(
            both,
            lambda: tf.reduce_sum(tf.nn.embedding_lookup(second, ids), axis=1),
            lambda: tf.zeros_like(looked_up),
        )
        loss = tf.reduce_mean(tf.square(looked_up + more - y))
        train = tf.compat.v1.train.AdamOptimizer(0.1).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            fed = (
                {ids: one, y: other, both: number % 2 == 0}
                for number, (one, other) in enumerate(batches(words, y_data))
            )
            return trained(session, graph, [session.run([loss, train], feed)[0] for feed in fed])


def keras_inputs_as_placeholders(autodist: Any) -> Values:
    x_data, y_data = data(4, 1)
    with tf.Graph().as_default() as graph, autodist.scope():
        tf_keras.backend.set_floatx("float64")
        x = tf_keras.Input([4])
        hidden = tf_keras.layers.Dense(3, "tanh", kernel_initializer=tf_keras.initializers.GlorotUniform(1))(x)
        model = tf_keras.Model(x, tf_keras.layers.Dense(1, kernel_initializer="ones")(hidden))
        fed_x, fed_y = (tf.compat.v1.placeholder(tf.float64, [None, width]) for width in (4, 1))
        loss = tf.reduce_mean(tf.square(model(fed_x) - fed_y))
        train = tf.compat.v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            results = [session.run([loss, train], {fed_x: a, fed_y: b})[0] for a, b in batches(x_data, y_data)]
            return trained(session, graph, results)


def _in_steps(autodist: Any, weights: dict[str, Any], loss_of: Callable[..., tf.Tensor], fed: list[Any]) -> Values:
    """Trains `weights` by Adam, whose state is among the values."""
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(list(weights.values()))

    @autodist.function
    def step(*inputs: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(*inputs)
        optimizer.apply(tape.gradient(loss, list(weights.values())), list(weights.values()))
        return loss

    results = [step(*inputs).numpy() for inputs in fed]
    slots = {f"slot {number}": np.array(slot) for number, slot in enumerate(optimizer.variables)}
    values = {name: weight.numpy() for name, weight in weights.items()}
    return {**values, **slots, **{f"result {number}": value for number, value in enumerate(results)}}


def a_loop_in_a_function(autodist: Any) -> Values:
    with autodist.scope():
        weights = {"matrix": tf.Variable(0.3 * np.eye(4)), "out": tf.Variable(np.ones((4, 1)))}

    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        _, reached = tf.while_loop(
            lambda number, _: number < 3, lambda number, z: (number + 1, tf.tanh(z @ weights["matrix"])), (0, x)
        )
        return tf.reduce_mean(tf.square(reached @ weights["out"] - y))

    tensors = [tuple(map(tf.constant, batch)) for batch in batches(*data(4, 1))]
    return _in_steps(autodist, weights, loss_of, tensors)


def numpy_arguments(autodist: Any) -> Values:
    with autodist.scope():
        weights = {"kernel": tf.Variable(np.ones((4, 1))), "bias": tf.Variable(np.zeros(1))}

    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(tf.matmul(x, weights["kernel"]) + weights["bias"] - y))

    return _in_steps(autodist, weights, loss_of, batches(*data(4, 1)))


def a_dynamic_lstm(autodist: Any) -> Values:
    """Sequences of several lengths, through a TensorArray."""
    rng = np.random.default_rng(4)
    with autodist.scope():
        weights = {
            "cell": tf.Variable(0.5 * rng.normal(size=(2 + 3, 4 * 3))),
            "bias": tf.Variable(np.zeros(4 * 3)),
            "out": tf.Variable(rng.normal(size=(3, 1))),
        }

    def loss_of(x: tf.Tensor, lengths: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        steps = tf.shape(x)[1]
        seen = tf.TensorArray(tf.float64, size=steps)
        hidden = cell = tf.zeros([tf.shape(x)[0], 3], tf.float64)
        for time in tf.range(steps):
            gates = tf.concat([x[:, time], hidden], axis=1) @ weights["cell"] + weights["bias"]
            new, kept, added, shown = tf.split(gates, 4, axis=1)
            cell_now = tf.sigmoid(kept) * cell + tf.sigmoid(added) * tf.tanh(new)
            is_going = (tf.cast(time, lengths.dtype) < lengths)[:, tf.newaxis]
            cell = tf.where(is_going, cell_now, cell)
            hidden = tf.where(is_going, tf.sigmoid(shown) * tf.tanh(cell_now), hidden)
            seen = seen.write(time, hidden)
        outputs = tf.transpose(seen.stack(), [1, 0, 2])
        return tf.reduce_mean(tf.square(tf.reduce_mean(outputs, axis=1) @ weights["out"] - y))

    x = rng.normal(size=(4 * BATCH, 5, 2))
    lengths = rng.integers(1, 6, 4 * BATCH)
    return _in_steps(autodist, weights, loss_of, batches(x, lengths, *data(1)))


def compile_fit_and_evaluate(autodist: Any) -> Values:
    x, y = data(4, 1)
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(2)
    with autodist.scope():
        model = keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"], jit_compile=False)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    values = {f"weight {number}": weight for number, weight in enumerate(model.get_weights())}
    values |= {name: np.array(several) for name, several in history.history.items()}
    return {**values, "evaluated": np.array(model.evaluate(x, y, verbose=0)), "predicted": model.predict(x, verbose=0)}


PROGRAMS = [
    linear_regression,
    a_keras_model_with_an_input_iterator,
    two_embeddings_one_under_a_condition,
    keras_inputs_as_placeholders,
    a_loop_in_a_function,
    numpy_arguments,
    a_dynamic_lstm,
    compile_fit_and_evaluate,
]
