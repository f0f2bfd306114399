"""Steps of dense layers, captured; and how the gradients of these travel by a plan."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.kernel.events import GatherFactors
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support import capture_steps, kernel_programs

FEATURES, WIDE = 300, 400


def weight(*shape: int, name: str) -> tf.Variable:
    """A variable of normal numbers."""
    return tf.Variable(np.random.default_rng(1).normal(size=shape), name=name)


def stepping(loss: Callable[..., tf.Tensor], variables: Sequence[tf.Variable], *arguments: tf.Tensor) -> GraphItem:
    """The item of one step of gradient descent."""

    def step(*inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(*inputs)
        for variable, gradient in zip(variables, tape.gradient(value, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return value

    return capture_steps.capture(step, *(arguments or (tf.ones([4, FEATURES], tf.float64),))).item


def layer() -> GraphItem:
    """A step of one dense layer."""
    kernel, bias = weight(FEATURES, WIDE, name="kernel"), weight(WIDE, name="bias")
    return stepping(lambda x: tf.reduce_mean((x @ kernel + bias) ** 2), [kernel, bias])


def two_layers(features: int = 6, wide: int = 8, out: int = 4) -> GraphItem:
    """A step of two dense layers, `wide` and `out`."""
    first, second = weight(features, wide, name="wide"), weight(wide, out, name="out")
    x = tf.ones([4, features], tf.float64)
    return stepping(lambda x: tf.reduce_mean(tf.tanh(tf.tanh(x @ first) @ second) ** 2), [first, second], x)


def planned(item: GraphItem, where: Sequence[int] = (1, 1), **parameters: Any) -> list[Any]:
    """The events that combine its gradients; `parameters` are of the synchronizer, or options of the program."""
    options = {key: parameters.pop(key) for key in ("examples", "bandwidth", "batch") if key in parameters}
    synchronizer = AllReduceSynchronizer(**parameters)
    nodes = tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables)
    strategy = Strategy(nodes, ("127.0.0.1:CPU:0",))
    return kernel_programs.gradient_events(item, kernel_programs.topology(*where), strategy, **options)


def gathered(item: GraphItem, where: Sequence[int] = (1, 1), **parameters: Any) -> set[str]:
    """The variables of which factors are gathered."""
    events = [event for event in planned(item, where, **parameters) if isinstance(event, GatherFactors)]
    return {gradient.variable for event in events for gradient in event.gradients}
