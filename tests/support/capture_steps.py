"""Steps that the capture tests capture, and, run as a script, the digests of what they are captured and compiled to.

    python -m tests.support.capture_steps [--unrelated]

prints, as JSON, a digest of the GraphItem and of the compiled graph of every step; with `--unrelated` after tracing
other functions and making other layers.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.capture.doors.graph import GraphScope, Signature
from autodist_py.kernel.pipeline import compile
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.program.step_function import DistributedFunction, Program
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer

TWO_WORKERS = Topology(
    0, (Replica(0, 0, "/device:CPU:0"), Replica(1, 0, "/device:CPU:1"), Replica(2, 1, "/device:CPU:0"))
)


def _not_compiled(name: str, captured: CapturedFunction) -> Program:
    raise NotImplementedError("the step is only captured")


def capture(step: Callable[..., Any], *args: Any, **kwargs: Any) -> CapturedFunction:
    """`step` as it is captured when it is called with these arguments."""
    return capture_with(CaptureOptions(batch_statistics="replica"), step, *args, **kwargs)


def capture_with(options: CaptureOptions, step: Callable[..., Any], *args: Any, **kwargs: Any) -> CapturedFunction:
    """`step` as it is captured with these options when it is called with these arguments."""
    distributed = DistributedFunction(step, _not_compiled, name="step", options=options, batched=None)
    return distributed.captured(*args, **kwargs)


def batch(rows: int = 4, columns: int = 3) -> tf.Tensor:
    return tf.constant(np.arange(rows * columns, dtype=np.float32).reshape(rows, columns) / 10)


def keras_mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A Keras MLP with dropout, trained by Adam with a clipped global norm."""
    import keras

    keras.utils.clear_session()  # Keras numbers what has no name, as a layer's seed generator, by process.
    layers = [
        keras.layers.Dense(4, activation="relu", name="hidden"),
        keras.layers.Dropout(0.5, seed=3, name="dropout"),
        keras.layers.Dense(1, name="out"),
    ]
    model = keras.Sequential(layers, name="mlp")
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0, name="adam")

    def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": loss}

    return step, (batch(), batch(columns=1))


def control_flow() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step with a tf.cond, a tf.while_loop, and a nested tf.function that autograph converts."""
    w = tf.Variable(tf.ones([3, 1]), name="w")
    count = tf.Variable(0, dtype=tf.int64, name="count", trainable=False)

    @tf.function
    def powers(value: tf.Tensor) -> tf.Tensor:
        total = tf.zeros_like(value)
        for _ in tf.range(3):
            if tf.reduce_sum(total) < 100.0:
                total += value
            else:
                total -= value
        return total

    def step(x: tf.Tensor) -> tuple[tf.Tensor, None]:
        with tf.GradientTape() as tape:
            value = tf.cond(count > 2, lambda: tf.matmul(x, w), lambda: tf.matmul(x, w) * 2.0)
            _, value = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, tf.tanh(v)), [0, value])
            loss = tf.reduce_mean(powers(value))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        count.assign_add(1)
        return loss, None

    return step, (batch(),)


def sparse_embedding() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An embedding table with a sparse gradient, and a dense variable."""
    table = tf.Variable(tf.ones([10, 3]), name="emb/table")
    w = tf.Variable(tf.ones([3, 1]), name="emb/w")

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(tf.gather(table, ids), w))
        table_gradient, w_gradient = tape.gradient(loss, [table, w])
        table.scatter_sub(tf.IndexedSlices(0.1 * table_gradient.values, table_gradient.indices))
        w.assign_sub(0.1 * w_gradient)
        return loss

    return step, (tf.constant([1, 2, 2, 5], tf.int64),)


def persistent_tape() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step whose tape is asked twice: of the loop under it TensorFlow makes a function, and more for its gradient."""
    w = tf.Variable(tf.ones([3, 1]), name="w")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape(persistent=True) as tape:
            _, value = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, tf.tanh(v)), [0, tf.matmul(x, w)])
            losses = [tf.reduce_mean(value), tf.reduce_mean(tf.square(value))]
        for loss in losses:
            w.assign_sub(0.1 * tape.gradient(loss, w))

    return step, (batch(),)


FUNCTION_STEPS = {
    "keras_mlp": keras_mlp,
    "control_flow": control_flow,
    "sparse_embedding": sparse_embedding,
    "persistent_tape": persistent_tape,
}


def graph_mode() -> tuple[GraphScope, Signature]:
    """TF1-style code with an Adam optimizer and a cond."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        scope = GraphScope(graph, CaptureOptions(batch_statistics="replica"), seed=None)
        with scope.recording():
            x = v1.placeholder(tf.float32, [None, 3], name="x")
            w = v1.get_variable("w", [3, 1], initializer=v1.zeros_initializer(), use_resource=True)
            value = tf.matmul(x, w)
            loss = tf.reduce_mean(tf.cond(tf.reduce_sum(value) > 1.0, lambda: tf.square(value), lambda: value))
            train = v1.train.AdamOptimizer(0.1).minimize(loss)
    return scope, Signature(("x:0",), (loss.name,), (train.name,))


def graph_mode_item() -> GraphItem:
    scope, signature = graph_mode()
    return scope.cut(signature, CaptureOptions(batch_statistics="replica"))


def all_reduce(item: GraphItem) -> Strategy:
    nodes = tuple(VariableStrategy(variable.name, AllReduceSynchronizer()) for variable in item.trainable_variables)
    return Strategy(nodes, ("127.0.0.1:CPU:0", "127.0.0.1:CPU:1", "127.0.0.2:CPU:0"))


def item_bytes(item: GraphItem) -> bytes:
    return item.to_proto().SerializeToString(deterministic=True)


def compiled_bytes(item: GraphItem) -> bytes:
    program = compile(item, all_reduce(item), TWO_WORKERS)
    facts = repr((program.fetches, program.run_ops, program.variables, program.collectives))
    return program.graph.graph_def().SerializeToString(deterministic=True) + facts.encode()


def unrelated_tracing() -> None:
    """Move every counter that tracing, Keras and TensorFlow keep in a process."""
    import keras

    noise = tf.Variable(1.0, name="noise")

    @tf.function
    def traced(value: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            result = value * noise
            while tf.reduce_sum(result) < 100.0:
                if tf.reduce_max(result) > 3.0:
                    result = result * 3.0
                result = result * 2.0
        return tape.gradient(result, noise)

    traced(tf.ones([2]))
    with tf.Graph().as_default():
        tf.cond(tf.constant(True), lambda: tf.constant(1), lambda: tf.constant(2))
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.ones([4, 3], np.float32), np.ones([4, 1], np.float32), verbose=0)


def digests() -> dict[str, dict[str, str]]:
    """A digest of the item and of the compiled graph of every step."""
    items = {name: capture(step, *args).item for name, (step, args) in ((n, b()) for n, b in FUNCTION_STEPS.items())}
    items["graph_mode"] = graph_mode_item()
    return {
        name: {
            "item": hashlib.sha256(item_bytes(item)).hexdigest(),
            "compiled": hashlib.sha256(compiled_bytes(item)).hexdigest(),
        }
        for name, item in items.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--unrelated", action="store_true", help="trace other functions first")
    if parser.parse_args().unrelated:
        unrelated_tracing()
    print(json.dumps(digests()))
