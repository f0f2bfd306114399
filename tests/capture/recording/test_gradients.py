"""Which gradients are recorded, what they are, and what cannot be.

One module, though long: the same few models are recorded in all of it.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import gradients_util

from autodist_py.capture import tf_adapter
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.errors import CaptureError
from tests.support import capture_steps
from tests.support.capture_steps import batch, capture


@pytest.fixture
def w():
    return tf.Variable(tf.ones([3, 1]), name="w")


def view_of(item):
    return GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))


def loss_of(x, *variables):
    return tf.add_n([tf.reduce_mean(tf.square(tf.matmul(x, variable))) for variable in variables])


def variables_of(item):
    return [gradient.variable for gradient in item.gradients]


def test_a_gradient_passes_through_an_op_of_its_own_that_its_update_reads(w):
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        w.assign_sub(0.1 * tape.gradient(loss, w))

    item = capture(step, batch()).item
    (gradient,) = item.gradients
    view = view_of(item)
    (marker,) = map(op_of, gradient.tensors)
    assert gradient.variable == "w"
    assert view.nodes[marker].op == "Identity"
    (update,) = item.variable("w").update_ops
    assert update in view.dataflow_descendants([marker])
    assert update not in view.dataflow_descendants(["x"], blocked=[marker])


def test_everything_that_reads_a_gradient_reads_it_after_its_op(w):
    other = tf.Variable(tf.ones([3, 1]), name="other")

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, w, other)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, [w, other]), 1.0)
        w.assign_sub(gradients[0])
        other.assign_sub(gradients[1])
        return norm

    item = capture(step, batch()).item
    view = view_of(item)
    markers = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
    ends = {op_of(item.outputs[0].tensor), *item.variable("w").update_ops, *item.variable("other").update_ops}
    assert variables_of(item) == ["w", "other"]
    assert not view.dataflow_descendants(["x"], blocked=markers) & ends


@pytest.mark.parametrize("structure", [lambda a, b: {"a": a, "b": [b]}, lambda a, b: (a, b)])
def test_sources_may_be_any_structure_and_the_result_has_it(w, structure):
    other = tf.Variable(tf.ones([3, 1]), name="other")

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, w, other)
        sources = structure(w, other)
        gradients = tape.gradient(loss, sources)
        tf.nest.assert_same_structure(gradients, sources)
        for variable, gradient in zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True):
            variable.assign_sub(gradient)

    assert sorted(variables_of(capture(step, batch()).item)) == ["other", "w"]


def test_the_gradient_of_a_keras_variable_is_recorded_under_its_path():
    layer = keras.layers.Dense(1, name="unit")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x))
        kernel, bias = tape.gradient(loss, [layer.kernel, layer.bias])
        layer.kernel.assign(layer.kernel - kernel)
        layer.bias.assign(layer.bias - bias)

    item = capture(step, batch()).item
    assert variables_of(item) == ["unit/kernel", "unit/bias"]


def test_an_unconnected_variable_gets_none_and_no_gradient(w):
    other = tf.Variable(tf.ones([3, 1]), name="other")
    seen = []

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        gradient, none = tape.gradient(loss, [w, other])
        seen.append(none)
        w.assign_sub(gradient)

    assert variables_of(capture(step, batch()).item) == ["w"]
    assert seen == [None]


def test_a_persistent_tape_records_each_losss_gradient(w):
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            first, second = loss_of(x, w), tf.reduce_mean(tf.matmul(x, w))
        w.assign_sub(tape.gradient(first, w) + tape.gradient(second, w))

    item = capture(step, batch()).item
    assert variables_of(item) == ["w", "w"]
    assert len({gradient.key for gradient in item.gradients}) == 2


def test_a_sparse_gradient_is_indices_values_and_dense_shape():
    step, args = capture_steps.sparse_embedding()
    item = capture(step, *args).item
    by_variable = {gradient.variable: gradient for gradient in item.gradients}
    assert not by_variable["emb/w"].is_sparse
    sparse = by_variable["emb/table"]
    view = view_of(item)
    types = [tf.as_dtype(view.nodes[op_of(tensor)].attr["T"].type) for tensor in sparse.tensors]
    assert types[:2] == [tf.int64, tf.float32]
    assert types[2].is_integer
    assert {view.nodes[op_of(tensor)].op for tensor in sparse.tensors} == {"Identity"}
    (update,) = item.variable("emb/table").update_ops
    assert view.nodes[update].op == "ResourceScatterSub"
    assert update in view.dataflow_descendants([op_of(sparse.tensors[0])])


def test_a_sparse_gradient_that_one_turns_dense_is_still_recorded_as_rows():
    table = tf.Variable(tf.ones([6, 2]), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, ids))
        table.assign_sub(tf.convert_to_tensor(tape.gradient(loss, table)))

    (gradient,) = capture(step, tf.constant([1, 1])).item.gradients
    assert gradient.is_sparse


def test_recompute_grad_records_the_outer_gradient_only(w):
    @tf.recompute_grad
    def forward(x):
        return tf.tanh(tf.matmul(x, w))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(x))
        w.assign_sub(tape.gradient(loss, w))

    item = capture(step, batch()).item
    assert variables_of(item) == ["w"]
    view = view_of(item)
    (marker,) = map(op_of, item.gradients[0].tensors)
    assert item.variable("w").update_ops[0] in view.dataflow_descendants([marker])


@pytest.mark.parametrize("construct", ["while", "cond"])
def test_a_variable_read_in_a_loop_or_branch_has_one_gradient_in_the_step(w, construct):
    def in_loop(x):
        _, value = tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, tf.tanh(v * tf.transpose(w))), [0, x])
        return value

    def in_branch(x):
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: x @ w, lambda: x @ w * 2.0)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(in_loop(x) if construct == "while" else in_branch(x))
        w.assign_sub(tape.gradient(loss, w))

    assert variables_of(capture(step, batch()).item) == ["w"]


def test_the_inner_gradient_of_a_gradient_penalty_is_not_combined(w):
    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = loss_of(x, w)
            penalty = tf.reduce_sum(tf.square(inner.gradient(loss, w)))
            total = loss + penalty
        w.assign_sub(0.1 * outer.gradient(total, w))

    item = capture(step, batch()).item
    (gradient,) = item.gradients
    view = view_of(item)
    (marker,) = map(op_of, gradient.tensors)
    assert item.variable("w").update_ops[0] in view.dataflow_descendants([marker])
    # The one that is combined is the outer one: no other gradient is computed from it.
    assert not any("gradient" in name for name in view.dataflow_descendants([marker]) if name != marker)


def test_maml_is_refused_with_both_variables_named(w):
    fast = tf.Variable(tf.ones([3, 1]), name="fast")

    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = loss_of(x, w)
            inner_gradient = inner.gradient(loss, w)
            loss = loss_of(x, w - 0.1 * inner_gradient)
        outer_gradient = outer.gradient(loss, w)
        fast.assign_sub(inner_gradient)
        w.assign_sub(outer_gradient)

    with pytest.raises(CaptureError, match=r"gradient of variable 'w' trains it.*by which 'w' is trained.*MAML"):
        capture(step, batch())


def test_a_gradient_that_trains_may_be_data_of_another_loss(w):
    """Be it behind a stop, or computed before that loss's tape."""
    other = tf.Variable(tf.ones([3, 1]), name="other")

    def step(x, stop):
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        gradient = tape.gradient(loss, w)
        with tf.GradientTape() as tape:
            scaled = loss_of(x, other) * stop(tf.norm(gradient))
        w.assign_sub(gradient)
        other.assign_sub(tape.gradient(scaled, other))

    for stop in (tf.stop_gradient, tf.identity):
        item = capture(lambda x, stop=stop: step(x, stop), batch()).item
        assert [gradient.reduction for gradient in item.gradients] == ["mean", "mean"]


def test_a_gradient_that_is_data_alone_is_combined(w):
    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = loss_of(x, w)
            moved = loss_of(x, w + tf.stop_gradient(inner.gradient(loss, w)))
        w.assign_sub(outer.gradient(moved, w))

    item = capture(step, batch()).item
    assert [gradient.reduction for gradient in item.gradients] == ["mean", "mean"]
    assert not item.local_ops


def test_a_gradient_in_a_loop_body_is_refused_with_its_variable(w):
    def step(x):
        for _ in tf.range(3):
            with tf.GradientTape() as tape:
                loss = loss_of(x, w)
            w.assign_sub(0.1 * tape.gradient(loss, w))

    with pytest.raises(CaptureError, match=r"gradient of variable 'w(:0)?' is computed inside a loop body"):
        capture(step, batch())


def test_a_gradient_in_a_branch_is_refused_with_the_path_of_a_keras_variable():
    layer = keras.layers.Dense(1, name="branchy")
    layer.build([None, 3])

    def step(x):
        if tf.reduce_sum(x) > 0.0:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(layer(x))
            layer.kernel.assign_sub(tape.gradient(loss, layer.kernel))

    with pytest.raises(CaptureError, match=r"gradient of variable 'branchy/kernel'"):
        capture(step, batch())


def test_gradients_that_reach_nothing_are_refused_with_their_variables(w):
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        tape.gradient(loss, w)
        return loss

    with pytest.raises(CaptureError, match=r"computes gradients \(of w\), but none of them reaches"):
        capture(step, batch())


def test_a_gradient_that_is_returned_is_kept(w):
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        return tape.gradient(loss, w)

    item = capture(step, batch()).item
    (gradient,) = item.gradients
    assert op_of(item.outputs[0].tensor) in view_of(item).dataflow_descendants([op_of(gradient.tensors[0])])


def test_tf_gradients_is_recorded_as_a_tape_is(w):
    def step(x):
        w.assign_sub(tf.gradients(loss_of(x, w), [w])[0])

    assert variables_of(capture(step, batch()).item) == ["w"]


def test_a_gradient_inside_a_nested_function_is_visible(w):
    @tf.function
    def gradient_of(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        return tape.gradient(loss, w)

    def step(x):
        w.assign_sub(gradient_of(x))

    item = capture(step, batch()).item
    assert variables_of(item) == ["w"]
    assert not any("PartitionedCall" in node.op for node in view_of(item).nodes.values())


def test_the_gradient_of_a_tensor_is_not_recorded(w):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(x, w)
        return tape.gradient(loss, x)

    assert capture(step, batch()).item.gradients == ()


def patched_places():
    """What tracing replaces for as long as it takes, as it stands now."""
    return {
        "gradient": inspect.getattr_static(tf.GradientTape, "gradient"),
        "helper": gradients_util._GradientsHelper,
        "call": inspect.getattr_static(polymorphic_function.Function, "__call__"),
        "handle": inspect.getattr_static(tf_adapter.BaseVariable, "handle"),
        "value": inspect.getattr_static(keras.Variable, "value"),
    }


def test_nothing_stays_patched_after_a_trace(w):
    before = patched_places()
    during = {}

    def step(x):
        during.update(patched_places())
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        w.assign_sub(tape.gradient(loss, w))

    capture(step, batch())
    assert {name for name in before if during[name] is not before[name]} == set(before)
    assert patched_places() == before


def test_nothing_stays_patched_after_a_step_that_raises(w):
    before = patched_places()

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        tape.gradient(loss, w)
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        capture(step, batch())
    assert patched_places() == before


def test_nothing_stays_patched_after_a_graph_is_built():
    before = patched_places()
    capture_steps.graph_mode()
    assert patched_places() == before


def test_tracing_elsewhere_while_a_step_is_traced_records_nothing(w):
    other = tf.Variable(1.0, name="elsewhere")

    def step(x):
        with tf.init_scope(), tf.GradientTape() as eager:
            value = other * 2.0
        with tf.init_scope():
            eager.gradient(value, other)
        with tf.GradientTape() as tape:
            loss = loss_of(x, w)
        w.assign_sub(tape.gradient(loss, w))

    assert variables_of(capture(step, batch()).item) == ["w"]


def test_graph_mode_records_the_gradients_of_a_tf1_optimizer():
    item = capture_steps.graph_mode_item()
    assert variables_of(item) == ["w"]
    assert {variable.name: bool(variable.update_ops) for variable in item.variables} == {
        "w": True,
        "w/Adam": True,
        "w/Adam_1": True,
        "beta1_power": True,
        "beta2_power": True,
    }


def lookups(table: tf.Variable, ids: tf.Tensor, flags: tf.Tensor) -> dict[str, tf.Tensor]:
    chosen = tf.boolean_mask(ids, flags)
    return {
        "constants": tf.gather(table, [0, 1, 1]),
        "positions": tf.gather(table, tf.range(tf.shape(ids)[1])),
        "ids": tf.gather(table, ids),
        "a few ids": tf.gather(table, chosen),
        "distinct ids": tf.gather(table, tf.unique(tf.reshape(ids, [-1]))[0]),
        "distinct ids of a few": tf.gather(table, tf.unique(tf.reshape(chosen, [-1]))[0]),
        "remainders of distinct ids": tf.gather(table, tf.unique(tf.reshape(ids, [-1]))[0] % 2),
    }


@pytest.mark.parametrize(
    ("kind", "indices", "rows"),
    [
        ("constants", "same", 3),
        ("positions", "same", 3),
        ("ids", "", None),
        ("a few ids", "", None),
        ("distinct ids", "distinct", None),
        ("distinct ids of a few", "distinct", None),
        ("remainders of distinct ids", "", None),
    ],
)
def test_a_sparse_gradient_says_what_its_indices_are_for_the_whole_batch(kind, indices, rows):
    table = tf.Variable(np.ones([5, 2]))

    def step(ids, flags):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(lookups(table, ids, flags)[kind])) * tf.reduce_sum(tf.cast(ids, tf.float64))
        gradient = tape.gradient(loss, table)
        table.scatter_sub(gradient)
        return loss

    (gradient,) = capture(step, tf.zeros([2, 3], tf.int64), tf.zeros([2], tf.bool)).item.gradients
    assert (gradient.indices, gradient.rows) == (indices, rows)


def test_rows_that_were_joined_are_gradients_of_their_own_by_what_their_indices_are():
    table = tf.Variable(np.ones([5, 2]))

    def step(ids):
        with tf.GradientTape() as tape:
            rows, others = (
                tf.add_n([tf.reduce_sum(tf.square(tf.gather(table, one))) for one in looked_up])
                for looked_up in ([ids, ids + 1], [[0, 1], [2]])
            )
            loss = rows + others * tf.reduce_sum(tf.cast(ids, tf.float64))
        table.scatter_sub(tape.gradient(loss, table))
        return loss

    item = capture(step, tf.zeros([2], tf.int64)).item
    assert [(one.indices, one.rows, one.reduction) for one in item.gradients] == [("", None, "sum"), ("same", 3, "sum")]
