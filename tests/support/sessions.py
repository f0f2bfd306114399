"""One program in a session of TensorFlow 1 and in a distributed one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.base import StrategyBuilder
from tests.support.oracle import GraphTraining, Values, assert_close, session_values
from tests.support.oracle_programs import batches, graph_weights, placeholders, predict, squared_error


def graph_in_full() -> GraphTraining:
    """Adam with a decayed learning rate, a global step, a loop, a branch, and a rate that may be fed."""
    feeds = placeholders("both")
    weights = graph_weights("both")
    steps = tf.compat.v1.train.get_or_create_global_step()
    factor = tf.compat.v1.placeholder_with_default(np.float64(1.0), [], name="factor")
    rate = factor * tf.cast(tf.compat.v1.train.exponential_decay(0.1, steps, 2, 0.5), tf.float64)
    _, doubled = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * 1.5), (0, feeds[0]))
    predictions = tf.identity(predict(weights, [doubled, feeds[1]]), name="predictions")
    loss = tf.identity(squared_error(predictions, feeds[-1]), name="loss")
    loss = tf.cond(tf.equal(steps % 2, 0), lambda: loss, lambda: 2.0 * loss)
    optimizer = tf.compat.v1.train.AdamOptimizer(rate)
    train = optimizer.minimize(loss, global_step=steps, name="train")
    return GraphTraining(feeds, train, [loss, predictions])


@dataclass(frozen=True, slots=True)
class Sessions:
    """One program in a plain session and in a distributed one, both initialized."""

    autodist: AutoDist
    plain: Any
    compiled: Any
    feeds: list[str]
    batches: list[tuple[np.ndarray, ...]]

    def run(self, fetches: Any, number: int = 0, **more: Any) -> tuple[Any, Any]:
        """What both return; names serve as fetches in both."""
        feed = {**dict(zip(self.feeds, self.batches[number], strict=True)), **more}
        return self.compiled.run(fetches, feed), self.plain.run(fetches, feed)

    def step(self, number: int) -> None:
        self.run("train", number)

    def compare(self, when: str) -> Values:
        expected = session_values(self.plain.graph, self.plain)
        actual = session_values(self.compiled.graph, self.compiled)
        for name in expected:
            assert_close(actual[name], expected[name], f"variable '{name}' {when}")
        return actual


@contextmanager
def sessions(more: Callable[[], Any] = lambda: None, builder: StrategyBuilder | None = None) -> Iterator[Sessions]:
    """`graph_in_full`, and what `more` adds to the graph."""
    with AutoDist(strategy_builder=builder) as autodist:
        with tf.Graph().as_default() as single:
            training = graph_in_full()
            more()
            tf.group(tf.compat.v1.global_variables_initializer(), name="initialize")
        with tf.Graph().as_default(), autodist.scope():
            graph_in_full()
            more()
            tf.group(tf.compat.v1.global_variables_initializer(), name="initialize")
        compiled = autodist.create_distributed_session()
        with tf.compat.v1.Session(graph=single) as plain:
            both = Sessions(autodist, plain, compiled, [t.name for t in training.feeds], batches("both"))
            both.run("initialize")
            yield both


def evaluate_alone(builder: StrategyBuilder | None = None) -> Values:
    """Workers fetch by themselves, in turns, while the others wait in their next step."""
    with sessions(builder=builder) as both:
        for number in range(4):
            both.step(number)
            if both.autodist.rank == number % both.autodist.num_workers:
                actual, expected = both.run(["loss:0", "predictions:0"], number + 1)
                assert_close(actual[0], expected[0], "loss")
                assert_close(actual[1], expected[1], "predictions")
            if both.autodist.is_chief:
                both.compare("seen by the chief alone")
        return both.compare("at the end")
