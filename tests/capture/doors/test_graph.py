"""The graph door: what an item says of the user's graph beside the step."""

from pathlib import Path

import pytest
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.function import Argument, Slot, capture_function
from autodist_py.capture.doors.graph import GraphScope
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.tf_adapter import eagerly
from tests.support.loop_programs import control_flow_of_tensorflow_1

v1 = tf.compat.v1


def _table() -> tf.lookup.StaticHashTable:
    return tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2]), tf.constant([10.0, 20.0])), 0.0
    )


@pytest.fixture
def scope() -> GraphScope:
    """A step that looks rows up in one of two tables, with a saver that was made in the scope."""
    scope = GraphScope(tf.Graph(), CaptureOptions(batch_statistics="replica"), seed=None)
    with scope.graph.as_default(), scope.recording():
        keys = v1.placeholder(tf.int32, [None], name="keys")
        unused, table = _table(), _table()
        tf.identity(unused.lookup(keys), name="unused")
        w = v1.get_variable("w", initializer=1.0, use_resource=True)
        loss = tf.reduce_mean(table.lookup(keys) * w)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        v1.train.Saver(max_to_keep=7)
    return scope


def test_an_item_has_the_savers_and_the_initializers_of_tables_that_are_used(scope: GraphScope, tmp_path: Path) -> None:
    """What a program that has only the item, and the graph, needs: tables are filled, values saved and restored."""
    scope.item(CaptureOptions(batch_statistics="replica")).save(tmp_path / "item.pb")
    item = GraphItem.load(tmp_path / "item.pb")
    (saver_def,) = map(v1.train.SaverDef.FromString, item.savers)
    assert saver_def.max_to_keep == 7
    assert len(item.table_initializers) == 1
    assert len(scope.graph.get_collection(v1.GraphKeys.TABLE_INITIALIZERS)) == 2
    with scope.graph.as_default(), v1.Session() as session:
        session.run([scope.graph.get_operation_by_name("w/Assign"), *item.table_initializers])
        saver = v1.train.Saver(saver_def=saver_def)
        session.run("train", {"keys:0": [1, 2, 1]})
        (trained,) = session.run(["w/Read/ReadVariableOp:0"])
        assert trained == pytest.approx(1.0 - 0.1 * (10 + 20 + 10) / 3)
        path = saver.save(session, str(tmp_path / "saved"))
        session.run("train", {"keys:0": [1, 2, 1]})
        saver.restore(session, path)
        assert session.run("w/Read/ReadVariableOp:0") == trained
        with pytest.raises(tf.errors.FailedPreconditionError, match="not initialized"):
            session.run("unused:0", {"keys:0": [1]})


def test_savers_of_other_graphs_and_of_the_collection_are_told_apart(scope: GraphScope) -> None:
    with scope.graph.as_default():
        late = v1.train.Saver(max_to_keep=3)  # Outside of the scope.
        v1.add_to_collection(v1.GraphKeys.SAVERS, late)
        with scope.recording(), tf.Graph().as_default():
            v1.get_variable("other", initializer=1.0, use_resource=True)
            v1.train.Saver(max_to_keep=5)
    savers = map(v1.train.SaverDef.FromString, scope.item(CaptureOptions(batch_statistics="replica")).savers)
    assert [saver.max_to_keep for saver in savers] == [7, 3]


def test_a_table_that_a_step_makes_is_filled_by_an_op_of_its_item() -> None:
    def step(keys: tf.Tensor) -> tf.Tensor:
        return _table().lookup(keys)

    argument = Argument("keys", tf.TensorSpec([None], tf.int32), batch=0)
    with eagerly():
        item = capture_function(step, [argument], ((Slot(0),), {}), CaptureOptions(batch_statistics="replica")).item
    ops = {node.name: node.op for node in v1.GraphDef.FromString(item.graph_def).node}
    assert [ops[name] for name in item.table_initializers] == ["LookupTableImportV2"]
    assert item.savers == ()


@pytest.mark.parametrize("around", ["loop", "branch"])
def test_a_gradient_in_a_loop_or_branch_of_tensorflow_1_is_refused_with_its_name(around: str) -> None:
    scope = GraphScope(tf.Graph(), CaptureOptions(batch_statistics="replica"), seed=None)

    def trained() -> tf.Operation:
        return v1.train.GradientDescentOptimizer(0.1).minimize(tf.square(w))

    with control_flow_of_tensorflow_1(), scope.graph.as_default(), scope.recording():
        w = v1.get_variable("w", initializer=1.0)
        with pytest.raises(CaptureError, match=rf"'w(:0)?' is computed inside a loop body, branch .*'here_{around}/"):
            if around == "branch":
                tf.cond(w > 0.0, trained, tf.no_op, name="here_branch")
            else:
                tf.while_loop(lambda i: i < 3, lambda i: [i + 1, trained()][:1], [0], name="here_loop")


def test_variables_of_a_scope_are_resource_variables_whatever_the_process_makes() -> None:
    scope = GraphScope(tf.Graph(), CaptureOptions(batch_statistics="replica"), seed=None)
    v1.disable_resource_variables()
    try:
        with scope.graph.as_default(), scope.recording():
            v1.get_variable("w", initializer=1.0)
        assert not v1.resource_variables_enabled()
    finally:
        v1.enable_resource_variables()
    assert list(scope.variables()) == ["w"]
