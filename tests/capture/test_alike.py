"""Ops that compute again what another one has computed are one op, where that changes nothing."""

import tensorflow as tf

from autodist_py.capture.alike import without_repeats
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.proto.graph_item import GraphItem, Output, Variable


def item_of(build, *results, run_ops=()):
    """The program of a graph that `build` makes; `results` are the names of the ops that it returns."""
    with tf.Graph().as_default() as graph:
        build()
    outputs = [graph.get_operation_by_name(name).outputs[0] for name in results]
    definition = graph.as_graph_def().SerializeToString(deterministic=True)
    variables = (Variable("v", "float32", (), trainable=False, update_ops=tuple(run_ops)),)
    returned = tuple(Output(each.name, each.dtype.name, ()) for each in outputs)
    return GraphItem(definition, variables, outputs=returned, run_ops=tuple(run_ops))


def nodes_of(item):
    return GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def)).nodes


def handle():
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="v", name="v")


def read(of, name):
    return tf.raw_ops.ReadVariableOp(resource=of, dtype=tf.float32, name=name)


def test_what_is_computed_twice_is_computed_once():
    def build():
        v = handle()
        for each in "ab":
            value = read(v, f"read_{each}")
            root = tf.sqrt(value, name=f"root_{each}")
            number = tf.constant(1.0, name=f"number_{each}")
            with tf.control_dependencies([root]):
                one = tf.raw_ops.Identity(input=number, name=f"one_{each}")
                tf.raw_ops.Identity(input=number, name=f"waits_{each}")
            tf.add(root, one, name=f"sum_{each}")
        tf.add(tf.raw_ops.Identity(input=value), value, name="result")

    nodes = nodes_of(without_repeats(item_of(build, "sum_a", "sum_b", "waits_a", "waits_b", "result")))

    assert {"read_a", "root_a", "one_a", "sum_a", "sum_b"} <= nodes.keys()  # What is returned stays as it is.
    assert not {"read_b", "root_b", "number_b", "one_b"} & nodes.keys()
    assert list(nodes["sum_b"].input) == ["root_a", "one_a"]
    assert list(nodes["waits_b"].input) == ["number_a", "^root_a"]
    assert "read_a" in nodes["result"].input


def test_reads_with_a_write_between_them_are_two():
    def build():
        v = handle()
        before = read(v, "before")
        with tf.control_dependencies([before]):
            write = tf.raw_ops.AssignAddVariableOp(resource=v, value=tf.constant(1.0), name="write")
        with tf.control_dependencies([write]):
            after, again = read(v, "after"), read(v, "again")
        with tf.control_dependencies([after, again]):  # All three are marked as what others wait for.
            tf.no_op()
        tf.add_n([before, after, again], name="result")

    nodes = nodes_of(without_repeats(item_of(build, "result", run_ops=["write"])))

    assert list(nodes["result"].input) == ["before", "after", "after"]


def test_what_has_an_effect_or_differs_is_done_each_time():
    def build():
        v = handle()
        writes = [
            tf.raw_ops.AssignAddVariableOp(resource=v, value=tf.constant(1.0), name=f"write_{each}") for each in "ab"
        ]
        shape = tf.zeros([0], tf.int32)
        drawn = [tf.raw_ops.RandomStandardNormal(shape=shape, dtype=tf.float32, name=f"drawn_{each}") for each in "ab"]
        fed = [tf.raw_ops.Placeholder(dtype=tf.float32, name=f"fed_{each}") for each in "ab"]
        constants = [tf.constant(value, name=f"constant_{value}") for value in (2, 3)]
        with tf.control_dependencies(writes):
            tf.add_n([*drawn, *fed, *(tf.cast(each, tf.float32) for each in constants)], name="result")

    nodes = nodes_of(without_repeats(item_of(build, "result", run_ops=["write_a", "write_b"])))

    assert {f"{kind}_{each}" for kind in ("write", "drawn", "fed") for each in "ab"} <= nodes.keys()
    assert {"constant_2", "constant_3"} <= nodes.keys()


def test_ops_on_two_devices_are_two():
    def build():
        for index in range(2):
            with tf.device(f"/device:CPU:{index}"):
                tf.sqrt(tf.constant(2.0, name="two"), name=f"root_{index}")
        graph = tf.compat.v1.get_default_graph()
        tf.add(graph.get_tensor_by_name("root_0:0"), graph.get_tensor_by_name("root_1:0"), name="result")

    nodes = nodes_of(without_repeats(item_of(build, "result")))

    assert {"root_0", "root_1"} <= nodes.keys()


def test_ops_on_arrays_do_not_become_alike():
    def build():
        v, x = handle(), tf.constant([1.0, 2.0])
        first, second = read(v, "first"), read(v, "second")
        tf.add(first * x, (second * x) * tf.constant([3.0, 5.0]), name="result")

    item = item_of(build, "result")

    assert without_repeats(item) == item
