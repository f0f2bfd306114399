"""Random programs are compared in all that is not warned of."""

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from tests.support.promised import Unpromised

X = np.ones([4, 3])


def test_what_does_not_depend_on_what_is_warned_of_is_promised() -> None:
    weights = {name: tf.Variable(np.ones(3), name=name) for name in ("seen", "looped", "follower")}
    losses: list[str] = []

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            seen = tf.reduce_mean(tf.square(x * weights["seen"]))
            looped = tf.reduce_mean(tf.py_function(lambda a: a, [x], tf.float64) + x * weights["looped"])
        losses[:] = [seen.name, looped.name]
        of_seen = tape.gradient(seen, weights["seen"])
        weights["seen"].assign_sub(of_seen)
        weights["looped"].assign_sub(tape.gradient(looped, weights["looped"]))
        weights["follower"].assign(weights["looped"] * 2.0)
        return [seen, looped, of_seen]

    with AutoDist() as autodist:
        captured = autodist.function(step).captured(X)
    alone = Unpromised(captured, losses[:1])
    assert alone.variables == {"looped", "follower"}
    assert alone.leaves == [1]
    assert Unpromised(captured, losses).variables == {"seen", "looped", "follower"}
