"""A captured graph has no joints: what TensorFlow joins in one op for custom gradients stands apart."""

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.graph import GraphScope, Signature
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from tests.support.capture_steps import batch, capture


def view_of(item):
    return GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))


@tf.custom_gradient
def scaled(x, y):
    return (2.0 * x, 3.0 * y), lambda dx, dy: (2.0 * dx, 3.0 * dy)


def test_recomputed_gradients_stand_apart():
    first, second = tf.Variable(np.ones([3, 4], np.float32)), tf.Variable(np.ones([4, 1], np.float32))

    def predict(x):
        return tf.tanh(tf.tanh(x @ first) @ second)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.recompute_grad(predict)(x))
        for variable, gradient in zip((first, second), tape.gradient(loss, [first, second]), strict=True):
            variable.assign_sub(gradient)
        return loss

    item = capture(step, batch()).item

    assert not [node.name for node in view_of(item).of_type(frozenset({"IdentityN"}))]
    assert [one.reduction for one in item.gradients] == ["mean", "mean"]


def test_what_is_not_passed_on_is_not_depended_on():
    a, b = tf.Variable(1.0, name="a"), tf.Variable(1.0, name="b")

    def step(x):
        left, right = scaled(a + tf.reduce_mean(x), b + 1.0)
        return left, right

    item = capture(step, batch()).item
    view = view_of(item)
    left, right = (view.dataflow_ancestors([op_of(output.tensor)]) for output in item.outputs)

    assert {"a", "x"} <= left and "b" not in left
    assert "b" in right and not {"a", "x"} & right


@pytest.mark.parametrize("as_target", [False, True])
def test_a_joint_that_is_asked_for_is_its_parts(as_target):
    with tf.Graph().as_default() as graph:
        scope = GraphScope(graph, CaptureOptions(batch_statistics="replica"), seed=None)
        with scope.recording():
            x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
            number = tf.constant(2.0)
            with tf.control_dependencies([tf.no_op(name="before")]):
                pair = tf.identity_n([x, number], name="pair")
            after = tf.group(pair[0].op, name="after")
        targets, fetches = (("pair", "after"), ()) if as_target else ((), (pair[1].name, pair[0].name))
        item = scope.cut(Signature(("x:0",), fetches, targets), CaptureOptions(batch_statistics="replica"))
    view = view_of(item)

    assert item.run_ops == (("pair/0", "pair/1", "after") if as_target else ())
    assert [output.tensor for output in item.outputs] == ([] if as_target else ["pair/1:0", "pair/0:0"])
    assert list(view.nodes["pair/0"].input) == ["x", "^before"]
    assert after.type == "NoOp"
    if as_target:
        assert list(view.nodes["after"].input) == ["^pair/0", "^pair/1"]


def test_every_part_waits_for_what_the_joint_showed_or_wrote():
    with tf.Graph().as_default() as graph:
        scope = GraphScope(graph, CaptureOptions(batch_statistics="replica"), seed=None)
        with scope.recording():
            counter = tf.compat.v1.get_variable("counter", initializer=0.0, use_resource=True)
            with tf.control_dependencies([counter.assign_add(1.0)]):  # TensorFlow gives the edge to `number` alone.
                number = tf.constant(2.0)
            pair = tf.identity_n([tf.zeros([]), number], name="pair")
        item = scope.cut(Signature((), (pair[0].name,), ()), CaptureOptions(batch_statistics="replica"))

    (update,) = item.variable("counter").update_ops
    assert list(view_of(item).nodes["pair/0"].input) == ["zeros", f"^{update}"]
