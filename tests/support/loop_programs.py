"""Training programs with the loops and branches of TensorFlow 1, as its users write them, for the oracle."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.oracle import Batch, GraphTraining

v1 = tf.compat.v1
LENGTH, WIDTH, UNITS, KINDS = 4, 3, 4, 3


@contextmanager
def control_flow_of_tensorflow_1() -> Iterator[None]:
    """Loops and branches become `Enter`, `Switch` and their like within; the switch is the process's."""
    was_on = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if was_on:
            v1.enable_control_flow_v2()


@contextmanager
def behaviour_of_tensorflow_1() -> Iterator[None]:
    """As after `disable_v2_behavior()`, but that eager execution, which cannot be put back, stays on."""
    with control_flow_of_tensorflow_1():
        v1.disable_resource_variables()
        v1.disable_v2_tensorshape()
        v1.disable_tensor_equality()
        try:
            yield
        finally:
            v1.enable_resource_variables()
            v1.enable_v2_tensorshape()
            v1.enable_tensor_equality()


def sequences(sizes: Sequence[int] = (6, 5, 7)) -> list[Batch]:
    """For each size, sequences, their kinds and their lengths."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.normal(size=(size, LENGTH, WIDTH)),
            rng.integers(0, KINDS, size=size),
            rng.integers(1, LENGTH + 1, size=size).astype(np.int32),
        )
        for size in sizes
    ]


def _feeds() -> list[tf.Tensor]:
    shapes = ([None, LENGTH, WIDTH], tf.float64), ([None], tf.int64), ([None], tf.int32)
    return [v1.placeholder(dtype, shape) for shape, dtype in shapes]


def _matrix(name: str, *shape: int) -> tf.Variable:
    return v1.get_variable(name, shape, tf.float64, v1.glorot_uniform_initializer(seed=5))


def _counter(name: str) -> tf.Variable:
    return v1.get_variable(name, [], tf.float64, v1.zeros_initializer(), trainable=False)


def _entropy(states: tf.Tensor, kinds: tf.Tensor) -> tf.Tensor:
    """One for each example."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=kinds, logits=states)


def _trained(loss: tf.Tensor, optimizer: Any = None) -> Any:
    return (optimizer or v1.train.MomentumOptimizer(0.05, 0.9)).minimize(loss)


class LstmCell:
    """What `dynamic_rnn` calls in its loop."""

    state_size = (UNITS, UNITS)
    output_size = UNITS

    def __init__(self, name: str):
        self._name = name

    def zero_state(self, size: Any, dtype: tf.DType) -> Any:
        return tuple(tf.zeros([size, UNITS], dtype) for _ in range(2))

    def __call__(self, inputs: tf.Tensor, state: Any, scope: Any = None) -> Any:
        memory, output = state
        with v1.variable_scope(self._name, reuse=v1.AUTO_REUSE):
            kernel = _matrix("kernel", WIDTH + UNITS, 4 * UNITS)
            bias = v1.get_variable("bias", [4 * UNITS], tf.float64, v1.zeros_initializer())
        gates = tf.concat([inputs, output], axis=1) @ kernel + bias
        into, new, forget, out = tf.split(gates, 4, axis=1)
        memory = tf.sigmoid(forget + 1.0) * memory + tf.sigmoid(into) * tf.tanh(new)
        output = tf.sigmoid(out) * tf.tanh(memory)
        return output, (memory, output)


def classifier() -> GraphTraining:
    """`dynamic_rnn` over sequences of several lengths, and Adam."""
    x, kinds, lengths = feeds = _feeds()
    outputs, (_, state) = v1.nn.dynamic_rnn(LstmCell("cell"), x, lengths, dtype=tf.float64)
    loss = tf.reduce_mean(_entropy(state @ _matrix("out", UNITS, KINDS), kinds))
    return GraphTraining(feeds, _trained(loss, v1.train.AdamOptimizer(0.05)), [loss, outputs, state])


def both_ways() -> GraphTraining:
    """`bidirectional_dynamic_rnn`, with gradients that are clipped by their global norm, and a decayed rate."""
    x, kinds, lengths = feeds = _feeds()
    cells = (LstmCell("forward"), LstmCell("backward"))
    _, states = v1.nn.bidirectional_dynamic_rnn(*cells, x, lengths, dtype=tf.float64)
    last = tf.concat([state[1] for state in states], axis=1)
    loss = tf.reduce_mean(_entropy(last @ _matrix("out", 2 * UNITS, KINDS), kinds))
    steps = v1.train.get_or_create_global_step()
    rate = tf.cast(v1.train.exponential_decay(0.1, steps, 2, 0.5), tf.float64)
    variables = v1.trainable_variables()
    gradients, norm = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.3)
    train = v1.train.GradientDescentOptimizer(rate).apply_gradients(zip(gradients, variables, strict=True), steps)
    return GraphTraining(feeds, train, [loss, norm])


def tensor_arrays() -> GraphTraining:
    """A loop of the user's own that reads one TensorArray and writes another."""
    x, kinds, lengths = feeds = _feeds()
    kernel = _matrix("kernel", WIDTH + UNITS, UNITS)
    read = tf.TensorArray(tf.float64, LENGTH, element_shape=[None, WIDTH]).unstack(tf.transpose(x, [1, 0, 2]))
    written = tf.TensorArray(tf.float64, LENGTH, element_shape=[None, UNITS])

    def turn(time: tf.Tensor, state: tf.Tensor, states: Any) -> Any:
        moved = tf.tanh(tf.concat([read.read(time), state], axis=1) @ kernel)
        state = tf.where((time < lengths)[:, None], moved, state)
        return time + 1, state, states.write(time, state)

    zeros = tf.zeros([tf.shape(x)[0], UNITS], tf.float64)
    _, state, states = tf.while_loop(lambda time, *_: time < LENGTH, turn, (0, zeros, written))
    loss = tf.reduce_mean(_entropy(state @ _matrix("out", UNITS, KINDS), kinds))
    loss += 0.1 * tf.reduce_mean(tf.square(states.stack()))
    return GraphTraining(feeds, _trained(loss, v1.train.AdamOptimizer(0.05)), [loss, state])


def noisy_turns() -> GraphTraining:
    """Numbers that are drawn in a loop for none of the examples: alike by all replicas, one turn after the other."""
    x, kinds, _ = feeds = _feeds()
    kernel = _matrix("kernel", WIDTH, KINDS)

    def turn(time: tf.Tensor, state: tf.Tensor) -> Any:
        noise = tf.random.normal([WIDTH, KINDS], stddev=0.1, dtype=tf.float64, seed=3)
        return time + 1, tf.tanh(state + x[:, time] @ (kernel + noise))

    zeros = tf.zeros([tf.shape(x)[0], KINDS], tf.float64)
    _, state = tf.while_loop(lambda time, _: time < LENGTH, turn, (0, zeros), parallel_iterations=1)
    return GraphTraining(feeds, _trained(tf.reduce_mean(_entropy(state, kinds))), [state])


def regularized_turns() -> GraphTraining:
    """A loop that computes what depends on examples, and a term of the loss that depends on none."""
    x, kinds, _ = feeds = _feeds()
    kernel = _matrix("kernel", WIDTH, WIDTH)

    def turn(time: tf.Tensor, powers: tf.Tensor, state: tf.Tensor) -> Any:
        return time + 1, tf.tanh(powers @ kernel), tf.tanh(state @ powers)

    _, powers, state = tf.while_loop(lambda time, *_: time < LENGTH, turn, (0, tf.identity(kernel), x[:, 0]))
    loss = tf.reduce_sum(_entropy(state @ _matrix("out", WIDTH, KINDS), kinds)) + tf.nn.l2_loss(powers)
    return GraphTraining(feeds, _trained(loss, v1.train.GradientDescentOptimizer(0.05)), [loss])


def sum_over_steps() -> GraphTraining:
    """A loss that is added up in a loop, from 0: a sum over examples, and a regularizer behind the loop."""
    x, kinds, _ = feeds = _feeds()
    kernel = _matrix("kernel", WIDTH, KINDS)

    def turn(time: tf.Tensor, total: tf.Tensor) -> Any:
        return time + 1, total + tf.reduce_sum(_entropy(tf.tanh(x[:, time] @ kernel), kinds))

    _, total = tf.while_loop(lambda time, _: time < LENGTH, turn, (0, tf.zeros([], tf.float64)))
    return GraphTraining(feeds, _trained(total + 0.1 * tf.nn.l2_loss(kernel)), [total])


def exchanged() -> GraphTraining:
    """Two values that change places in each turn: each differs between replicas only through the other."""
    x, kinds, _ = feeds = _feeds()
    mean, kept = tf.reduce_mean(x), _counter("kept")
    zero = tf.zeros([], tf.float64)
    _, one, other = tf.while_loop(lambda i, *_: i < 4, lambda i, a, b: (i + 1, b + 1.0, a + mean), (0, zero, zero))
    loss = tf.reduce_mean(_entropy(x[:, 0] @ _matrix("kernel", WIDTH, KINDS), kinds))
    return GraphTraining(feeds, tf.group(_trained(loss), kept.assign(one)), [loss, one, other])


def turns_by_the_batch() -> GraphTraining:
    """Outside of the loss, a loop that ends by what is in the batch, with a counter of its turns."""
    x, kinds, _ = feeds = _feeds()
    turns = _counter("turns")

    def turn(time: tf.Tensor, total: tf.Tensor) -> Any:
        with tf.control_dependencies([turns.assign_add(1.0)]):
            return time + 1, total + tf.sqrt(tf.reduce_mean(tf.nn.relu(x[:, time])))

    zero = tf.zeros([], tf.float64)
    time, total = tf.while_loop(lambda time, total: (time < LENGTH) & (total < 1.2), turn, (0, zero))
    loss = tf.reduce_mean(_entropy(x[:, 0] @ _matrix("kernel", WIDTH, KINDS), kinds))
    return GraphTraining(feeds, tf.group(_trained(loss), total), [loss, time, total])


def branches() -> GraphTraining:
    """Branches of the loss, of constants and of a counter, and an update that may be skipped."""
    x, kinds, _ = feeds = _feeds()
    steps, highs = v1.train.get_or_create_global_step(), _counter("highs")
    kernel = _matrix("kernel", LENGTH * WIDTH, KINDS)
    hidden = tf.reshape(x, [-1, LENGTH * WIDTH])
    hidden = tf.cond(tf.equal(steps % 2, 0), lambda: 0.5 * hidden, lambda: hidden)
    loss = tf.reduce_mean(_entropy(hidden @ kernel, kinds))
    constant = tf.cond(tf.reduce_mean(x) > 0.0, lambda: tf.constant(1.0), lambda: tf.constant(2.0))
    counted = tf.cond(tf.reduce_max(x) > 2.5, lambda: highs.assign_add(1.0), lambda: highs.assign_add(10.0))
    (gradient,) = tf.gradients(loss, [kernel])
    is_small = tf.linalg.global_norm([gradient]) < 1.0
    update = tf.cond(is_small, lambda: tf.group(kernel.assign_sub(0.1 * gradient)), tf.no_op)
    with tf.control_dependencies([update]):
        train = tf.group(steps.assign_add(1), counted)
    return GraphTraining(feeds, train, [loss, constant])


def skipped_update() -> GraphTraining:
    """An update that every other step skips, by a rate that is counted after it."""
    x, kinds, _ = feeds = _feeds()
    kernel, count = _matrix("kernel", LENGTH * WIDTH, KINDS), _counter("count")
    loss = tf.reduce_mean(_entropy(tf.reshape(x, [-1, LENGTH * WIDTH]) @ kernel, kinds))
    (gradient,) = tf.gradients(loss, [kernel])
    rate = 0.1 / (1.0 + count)
    is_even = tf.equal(count % 2.0, 0.0)
    update = tf.cond(is_even, lambda: tf.group(kernel.assign_sub(rate * gradient)), tf.no_op)
    with tf.control_dependencies([update]):
        train = count.assign_add(1.0)
    return GraphTraining(feeds, train, [loss])


def all_in_a_loop() -> GraphTraining:
    """In a loop: a loop in a branch, a lookup, a seed, a custom gradient, something shown, an order of effects."""
    x, kinds, _ = feeds = _feeds()
    kernel, table, count = _matrix("kernel", WIDTH, WIDTH), _matrix("table", 20, WIDTH), _counter("count")
    ids = tf.cast(tf.abs(x[:, :, 0]) * 5.0, tf.int32)
    with tf.control_dependencies([count.assign_add(1.0)]):
        first = tf.identity(x[:, 0])

    @tf.custom_gradient
    def gated(one: tf.Tensor, other: tf.Tensor) -> Any:
        return one * other, lambda upstream: (upstream * other, upstream * one)

    def inner(state: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
        moved = x[:, time]
        return tf.while_loop(lambda i, _: i < 2, lambda i, s: (i + 1, tf.nn.silu(s @ kernel + moved)), (0, state))[1]

    def turn(time: tf.Tensor, state: tf.Tensor) -> Any:
        with tf.control_dependencies([tf.print("turn", time, output_stream="file:///dev/null")]):
            state = tf.cond(time % 2 > 0, lambda: inner(state, time), lambda: 0.5 * state)
        drawn = tf.random.stateless_uniform([WIDTH], tf.stack([time, 3]), dtype=tf.float64)
        state = gated(tf.tanh(state + tf.nn.embedding_lookup(table, ids[:, time])), tf.sigmoid(first))
        return time + 1, state + 0.0 * drawn

    _, state = tf.while_loop(lambda time, _: time < LENGTH, turn, (0, x[:, 0]))
    loss = tf.reduce_mean(_entropy(state @ _matrix("out", WIDTH, KINDS), kinds))
    return GraphTraining(feeds, _trained(loss, v1.train.AdagradOptimizer(0.1)), [loss, state])


PROGRAMS: Mapping[str, Callable[[], GraphTraining]] = {
    program.__name__: program
    for program in (
        classifier,
        both_ways,
        tensor_arrays,
        noisy_turns,
        regularized_turns,
        sum_over_steps,
        exchanged,
        turns_by_the_batch,
        branches,
        skipped_update,
        all_in_a_loop,
    )
}
