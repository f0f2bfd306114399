"""The function door: variables, names, arguments, and results."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.ir.names import unique_names
from autodist_py.proto.errors import CaptureError
from tests.support.capture_steps import FUNCTION_STEPS, batch, capture

w = tf.Variable(3.0)


def names(captured):
    return [variable.name for variable in captured.item.variables]


def test_a_variable_created_in_the_step_is_refused():
    def step(x):
        return tf.reduce_mean(x) * tf.Variable(1.0, name="inside")

    with pytest.raises(CaptureError, match=r"a variable \(inside\) is created inside the step"):
        capture(step, batch())


def test_a_variable_of_what_the_step_computes_is_created_once():
    made: list[tf.Variable] = []

    def step(x):
        if not made:
            made.append(tf.Variable(2.0 * tf.random.stateless_uniform([3], seed=[1, 2]), name="computed"))
        return tf.reduce_sum(made[0] * x)

    captured = capture(step, batch())
    assert names(captured) == ["computed"]
    assert made[0].numpy() == pytest.approx(2.0 * tf.random.stateless_uniform([3], seed=[1, 2]).numpy())


def test_several_such_variables_are_made_without_a_warning_of_tensorflows(caplog):
    """Also of tensors that the step closes over."""
    scale = tf.constant(tf.random.stateless_uniform([3], seed=[1, 2]))
    made: list[tf.Variable] = []

    def step(x):
        made.extend(tf.Variable(scale * float(number) + 1.0) for number in range(len(made), 8))
        return tf.reduce_sum(made[7] * x)

    capture(step, batch())
    assert made[7].numpy() == pytest.approx(scale.numpy() * 7.0 + 1.0)
    assert "retracing" not in caplog.text


@pytest.mark.parametrize("initial", [tf.reduce_mean, lambda x: w * 2.0], ids=["argument", "variable"])
def test_a_variable_that_begins_with_what_the_step_is_given_or_reads_is_refused(initial):
    """A variable's value may be on a server: who reads it in a function of its own looks there."""
    made: list[tf.Variable] = []

    def step(x):
        if not made:
            made.append(tf.Variable(initial(x), name="given"))
        return tf.reduce_sum(made[0] * x)

    with pytest.raises(
        CaptureError, match=r"\(given\) is created inside .* neither from what the step is given nor from a"
    ):
        capture(step, batch())


def test_a_variable_may_begin_with_what_a_function_reads_of_another():
    made: list[tf.Variable] = []

    def step(x):
        if not made:
            made.append(tf.Variable(lambda: w * 2.0, name="given"))
        return tf.reduce_sum(made[0] * x)

    capture(step, batch())
    assert made[0].numpy() == 6.0


def test_layers_and_optimizers_that_are_built_when_first_used_are_captured_with_all_their_variables():
    step, args = FUNCTION_STEPS["keras_mlp"]()
    captured = capture(step, *args)
    found = names(captured)
    weights = ["hidden/kernel", "hidden/bias", "out/kernel", "out/bias"]
    assert sorted(gradient.variable.removeprefix("mlp/") for gradient in captured.item.gradients) == sorted(weights)
    assert len([name for name in found if "momentum" in name or "velocity" in name]) == 2 * len(weights)
    assert len(set(found)) == len(found)
    assert all(isinstance(variable, tf.Variable) for variable in captured.variables.values())


def test_lazily_built_variables_are_created_once_and_keep_their_values_at_capture():
    layer = keras.layers.Dense(2, kernel_initializer="ones", name="lazy")

    def step(x):
        return layer(x)

    captured = capture(step, batch())
    assert set(captured.variables) == {"lazy/kernel", "lazy/bias"}
    assert captured.variables["lazy/kernel"] is layer.kernel.value
    np.testing.assert_array_equal(layer.kernel.numpy(), np.ones((3, 2)))
    assert capture(step, batch()).variables["lazy/kernel"] is captured.variables["lazy/kernel"]


def test_the_step_is_the_second_trace_where_the_first_creates_variables():
    made: list[tf.Variable] = []

    def step(x):
        if not made:
            made.append(tf.Variable(lambda: 2.0, name="made"))
            return x
        return x * made[0]

    assert names(capture(step, batch())) == ["made"]
    assert len(made) == 1


def test_variables_have_the_names_that_the_user_gave_and_layers_their_paths():
    model = keras.Sequential([keras.layers.Dense(1, name="a"), keras.layers.Dense(1, name="b")], name="m")
    model.build([None, 3])
    raw = tf.Variable(1.0, name="scope/raw")
    captured = capture(lambda x: model(x) * raw, batch())
    paths = [weight.path for weight in model.weights]
    assert sorted(names(captured)) == sorted([*paths, "scope/raw"])
    for weight in model.weights:
        assert captured.variables[weight.path] is weight.value


def test_variables_of_one_name_are_told_apart_in_the_order_of_their_use():
    first, second, third = (tf.Variable(float(value), name="w") for value in range(3))
    captured = capture(lambda x: x * second * first * third, batch())
    assert names(captured) == ["w", "w_1", "w_2"]
    assert [captured.variables[name].numpy() for name in names(captured)] == [1.0, 0.0, 2.0]


def test_a_variable_named_as_an_argument_is_told_apart_from_it():
    x_variable = tf.Variable(1.0, name="x")

    def step(x):
        return x * x_variable

    captured = capture(step, batch())
    assert [one.name for one in captured.item.inputs] == ["x"]
    assert names(captured) == ["x_1"]


def test_unique_names_number_from_1_and_skip_those_taken():
    assert unique_names(["a", "a", "a_1", "a"], ["b"]) == ["a", "a_1", "a_1_1", "a_2"]
    assert unique_names(["b"], ["b", "b_1"]) == ["b_2"]


def test_a_variable_handle_stands_in_the_graph_under_the_variables_name():
    w = tf.Variable(tf.ones([3, 2]), name="dir/w")
    item = capture(lambda x: tf.matmul(x, w), batch()).item
    (handle,) = (n for n in tf.compat.v1.GraphDef.FromString(item.graph_def).node if n.op == "VarHandleOp")
    assert handle.name == "dir/w"
    assert handle.attr["shared_name"].s == b"dir/w"
    assert tf.TensorShape(handle.attr["shape"].shape) == [3, 2]


RESULTS = {
    "a tensor": lambda a, b: a,
    "none": lambda a, b: None,
    "nested": lambda a, b: {"z": [a, None, (b, {"k": a})], "a": b},
    "twice the same": lambda a, b: (a, a, b),
    "a tuple with a none": lambda a, b: (None, b),
}


def test_a_lazy_read_that_an_assignment_returns_is_not_taken_for_the_variable():
    weight = tf.Variable(1.0, name="weight")

    def step(x):
        return weight.assign_add(tf.reduce_sum(x)).assign_add(1.0)

    captured = capture(step, batch())
    assert captured.variables["weight"] is weight


def values_of(item, x):
    """The item's outputs for the input `x`."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(item.graph_def), name="")
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run([output.tensor for output in item.outputs], {"x:0": x})


@pytest.mark.parametrize("kind", RESULTS)
def test_results_are_put_together_as_the_step_returned_them(kind):
    make = RESULTS[kind]
    x = batch()
    captured = capture(lambda x: make(tf.reduce_sum(x), tf.reduce_max(x)), x)
    packed = captured.result.pack(values_of(captured.item, x.numpy()))
    expected = make(np.sum(x), np.max(x))
    tf.nest.assert_same_structure(packed, expected)
    for got, wanted in zip(tf.nest.flatten(packed), tf.nest.flatten(expected), strict=True):
        assert got is None if wanted is None else got == pytest.approx(wanted)


def test_a_result_that_is_an_argument_or_a_variable_is_an_output():
    w = tf.Variable([1.0, 2.0], name="w")

    def step(x):
        return {"x": x, "w": w}

    captured = capture(step, batch())
    assert [output.dtype for output in captured.item.outputs] == ["float32", "float32"]
    assert set(captured.result.pack(["a", "b"])) == {"x", "w"}


def test_the_batched_arguments_are_those_of_the_first_ones_leading_size():
    def step(x, y, rate, table):
        return tf.reduce_mean(x) * rate + tf.reduce_sum(table) + tf.reduce_sum(y)

    item = capture(step, batch(4), batch(4, 1), tf.constant(0.1), batch(7)).item
    assert [(one.name, one.shape, one.batched) for one in item.inputs] == [
        ("x", (None, 3), True),
        ("y", (None, 1), True),
        ("rate", (), False),
        ("table", (7, 3), False),
    ]


def test_a_constant_of_the_step_is_state_or_part_of_the_graph():
    table = batch(2)

    def step(x):
        return tf.matmul(x, table, transpose_b=True)

    captured = capture(step, batch())
    state = [one.name for one in captured.item.inputs if one.kind == "state"]
    assert list(captured.state) == state
    for tensor in captured.state.values():
        np.testing.assert_array_equal(tensor, table)


def test_reads_are_not_run_for_themselves_and_writes_are():
    w = tf.Variable(1.0, name="w")

    def step(x):
        w.assign_add(tf.reduce_sum(tf.ones([2])))
        return tf.reduce_sum(x) * w

    item = capture(step, batch()).item
    nodes = {node.name: node.op for node in tf.compat.v1.GraphDef.FromString(item.graph_def).node}
    assert [nodes[name] for name in item.run_ops] == ["AssignAddVariableOp"]
    assert item.variable("w").update_ops == item.run_ops


def test_an_error_of_the_users_code_is_the_users_with_a_hint_on_the_batch_dimension():
    def step(x):
        return tf.ones([x.shape[0] + 1])

    with pytest.raises(TypeError) as raised:
        capture(step, batch())
    assert any("for any batch size" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("wrong", [lambda x: x + None, lambda x: tf.reshape(x, [None, 2])])
def test_an_error_that_has_nothing_to_do_with_the_batch_has_no_hint_on_it(wrong):
    with pytest.raises((TypeError, ValueError)) as raised:
        capture(wrong, batch())
    assert not any("for any batch size" in note for note in getattr(raised.value, "__notes__", []))


def test_the_step_may_be_a_tf_function_and_is_traced_through_autograph():
    @tf.function
    def step(x):
        result = x
        if tf.reduce_sum(x) > 0.0:
            result = -x
        return result

    item = capture(step, batch()).item
    types = {node.op for node in tf.compat.v1.GraphDef.FromString(item.graph_def).node}
    assert types & {"If", "StatelessIf"}
    assert not types & {"StatefulPartitionedCall", "PartitionedCall"}


def test_autograph_stays_off_where_the_user_turned_it_off():
    @tf.function(autograph=False)
    def step(x):
        return x if tf.reduce_sum(x) > 0.0 else -x

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        capture(step, batch())


def test_a_nested_function_with_autograph_off_is_traced_as_it_is():
    @tf.function(autograph=False)
    def inner(x):
        return x if tf.reduce_sum(x) > 0.0 else -x

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        capture(lambda x: inner(x), batch())
