"""Fragments: a TensorFlow function traced into ops that fit the graph they are spliced into."""

import pytest
import tensorflow as tf

from autodist_py.kernel.ir.fragment import TensorSpec, trace
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.proto.errors import InvalidGraphError
from tests.support import kernel_programs

A = TensorSpec("model/a:1", tf.float32, (2,))
B = TensorSpec("b", tf.float32, (2,))


def by_name(fragment):
    return {node.name: node for node in fragment.nodes}


def test_seams_carry_the_names_of_the_graph_and_new_ops_those_of_the_scope():
    fragment = trace(lambda a, b: tf.add(a, b, name="sum"), [A, B], scope="S/t")
    assert {name: list(node.input) for name, node in by_name(fragment).items()} == {"S/t/sum": ["model/a:1", "b"]}
    assert fragment.outputs == "S/t/sum"


def test_outputs_keep_their_structure_and_their_index():
    fragment = trace(lambda a: {"parts": tf.split(a, 2, name="parts")}, [A], scope="S")
    assert fragment.outputs == {"parts": ["S/parts", "S/parts:1"]}


def test_an_argument_that_is_returned_is_the_tensor_it_stands_for():
    fragment = trace(lambda pair: pair, [[A, B]], scope="S")
    assert fragment.nodes == ()
    assert fragment.outputs == ["model/a:1", "b"]


def test_a_control_edge_from_an_argument_comes_from_the_op_that_makes_it():
    def after(a, b):
        with tf.control_dependencies([a]):
            return tf.identity(b, name="late")

    assert list(by_name(trace(after, [A, B], scope="S"))["S/late"].input) == ["b", "^model/a"]


def test_devices_that_the_function_sets_are_kept_and_none_is_added():
    def on_devices(a):
        with tf.device("/device:CPU:1"):
            first = tf.negative(a, name="there")
        return tf.negative(first, name="anywhere")

    nodes = by_name(trace(on_devices, [A], scope="S"))
    assert nodes["S/there"].device == "/device:CPU:1"
    assert nodes["S/anywhere"].device == ""


def test_a_fragment_that_calls_a_library_function_is_refused():
    with pytest.raises(InvalidGraphError, match="'S' does"):
        trace(lambda a: tf.function(tf.negative)(a), [A], scope="S")


def test_a_spliced_fragment_computes_what_the_function_does():
    with tf.Graph().as_default() as graph:
        tf.split(tf.constant([1.0, 2.0, 3.0, 4.0]), 2, name="model/a")
        tf.constant([10.0, 20.0], name="b")
    fragment = trace(lambda a, b: a * b, [A, B], scope="S")
    definition = graph.as_graph_def()
    definition.node.extend(fragment.nodes)
    joined = kernel_programs.import_graph(GraphView(definition))
    with kernel_programs.session(joined) as running:
        assert running.run(joined.get_tensor_by_name(f"{fragment.outputs}:0")).tolist() == [30.0, 80.0]
