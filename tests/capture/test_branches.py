"""A branch is given only what one of its sides needs, and does what it did."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.capture.branches import drop_unused_arguments


def unused(x: tf.Tensor, y: tf.Tensor) -> Any:
    def then() -> tf.Tensor:
        tf.exp(y)
        return x + 1.0

    return tf.cond(x > 0.0, then, lambda: x * 2.0)


def used_on_one_side(x: tf.Tensor, y: tf.Tensor) -> Any:
    return tf.cond(x > 0.0, lambda: x + 1.0, lambda: x * y)


def unused_within(x: tf.Tensor, y: tf.Tensor) -> Any:
    def inner() -> tf.Tensor:
        tf.exp(y)
        return x * 3.0

    return tf.cond(x > 0.0, lambda: tf.cond(x > 2.0, inner, lambda: x), lambda: x * 2.0)


def joined_with_another(x: tf.Tensor, y: tf.Tensor) -> Any:
    return tf.cond(x > 0.0, lambda: tf.identity_n([y, x])[1], lambda: x * 2.0)


def shown(x: tf.Tensor, y: tf.Tensor) -> Any:
    def then() -> tf.Tensor:
        with tf.control_dependencies([tf.print(y)]):
            return x + 1.0

    return tf.cond(x > 0.0, then, lambda: x)


@pytest.mark.parametrize(
    ("function", "num_arguments"),
    [(unused, 1), (used_on_one_side, 2), (unused_within, 1), (joined_with_another, 1), (shown, 2)],
)
def test_what_neither_side_needs_is_dropped(function: Callable[..., Any], num_arguments: int) -> None:
    spec = tf.TensorSpec([], tf.float32)
    traced = tf.function(function, autograph=False).get_concrete_function(spec, spec)
    definition = traced.graph.as_graph_def()
    drop_unused_arguments(definition)
    (branch,) = (node for node in definition.node if node.op in ("If", "StatelessIf"))
    assert len(branch.attr["Tin"].list.type) == num_arguments
    assert len([name for name in branch.input if not name.startswith("^")]) == num_arguments + 1
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
        results = [graph.get_tensor_by_name(tensor.name) for tensor in traced.outputs]
        given = [graph.get_tensor_by_name(tensor.name) for tensor in traced.inputs]
        with tf.compat.v1.Session() as session:
            made = {x: session.run(results[0], dict(zip(given, (x, 5.0), strict=True))) for x in (-1.0, 1.0, 3.0)}
    for x, result in made.items():
        np.testing.assert_array_equal(result, traced(tf.constant(x), tf.constant(5.0)))


def test_a_function_that_another_op_calls_too_stays_as_it_is() -> None:
    spec = tf.TensorSpec([], tf.float32)
    definition = tf.function(unused, autograph=False).get_concrete_function(spec, spec).graph.as_graph_def()
    (branch,) = (node for node in definition.node if node.op in ("If", "StatelessIf"))
    twin = tf.compat.v1.NodeDef()
    twin.CopyFrom(branch)
    twin.name = "twin"
    definition.node.append(twin)
    before = definition.SerializeToString(deterministic=True)
    drop_unused_arguments(definition)
    assert definition.SerializeToString(deterministic=True) == before
