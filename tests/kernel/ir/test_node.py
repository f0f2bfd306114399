"""Ops that are made by hand."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.ir.node import controls_of, identity, node
from autodist_py.kernel.program_text import format_op

KERNEL = Path(__file__).resolve().parents[3] / "kernel"
HANDLE = node("VarHandleOp", "w", dtype=tf.float32, shape=tf.TensorShape([2, None]))
HANDLE.device = "/device:GPU:1"


def test_an_op_has_its_inputs_and_then_what_it_waits_for_each_once():
    made = node("AddV2", "sum", ["a", "b:1"], controls=["c", "^d", "c"], T=tf.float64)
    assert format_op(made) == "sum = AddV2(a, b:1, ^c, ^d) {T=float64}"
    assert controls_of(made) == ["^c", "^d"]


def test_an_op_like_another_stands_on_its_device_and_has_the_attributes_that_both_types_have():
    read = node("ReadVariableOp", "w/Read", ["w"], like=HANDLE)
    assert format_op(read) == "w/Read = ReadVariableOp(w) {dtype=float32} @/device:GPU:1"
    assert set(read.attr) == {"dtype"}


def test_what_is_given_counts_before_what_the_other_op_has():
    read = node("ReadVariableOp", "w/Read", ["w"], like=HANDLE, dtype=tf.float16)
    assert (read.attr["dtype"].type, read.device) == (tf.float16.as_datatype_enum, HANDLE.device)


def test_the_other_op_stays_as_it_is():
    before = HANDLE.SerializeToString(deterministic=True)
    node("ReadVariableOp", "w/Read", ["w"], like=HANDLE).attr["dtype"].type = tf.int32.as_datatype_enum
    assert HANDLE.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (identity("i", "a", tf.int64), "i = Identity(a) {T=int64}"),
        (
            node("Const", "c", dtype=tf.int32, value=np.array([1, 2], np.int32)),
            "c = Const() {dtype=int32, value=[1, 2]}",
        ),
        (node("IdentityN", "n", ["a", "b"], T=[tf.int32, tf.string]), "n = IdentityN(a, b) {T=[int32, string]}"),
        (
            node("EnsureShape", "e", ["a"], T=HANDLE.attr["dtype"], shape=tf.TensorShape([None])),
            "e = EnsureShape(a) {T=float32, shape=[?]}",
        ),
    ],
    ids=lambda one: one.op if isinstance(one, tf.compat.v1.NodeDef) else "",
)
def test_attributes_are_types_shapes_and_constants(made, text):
    assert format_op(made) == text


def test_what_is_made_runs():
    graph = tf.compat.v1.GraphDef(versions={"producer": tf.version.GRAPH_DEF_VERSION})
    graph.node.extend(
        [
            node("Const", "c", dtype=tf.float32, value=np.array([1.5, 2.0], np.float32)),
            identity("i", "c", tf.float32),
            node("NoOp", "wait", controls=["i"]),
        ]
    )
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        (result,) = tf.graph_util.import_graph_def(graph, name="", return_elements=["i:0"])
        assert session.run(result).tolist() == [1.5, 2.0]


def test_nothing_else_in_the_kernel_makes_an_op_by_hand():
    making = {str(path.relative_to(KERNEL)) for path in KERNEL.rglob("*.py") if ".NodeDef(" in path.read_text()}
    assert making == {"ir/node.py"}
