"""The distributed session does what a `tf.compat.v1.Session` does, beside training.

One module, though long: its clusters start once.
"""

import gc
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist_py import AutoDist, CaptureError, SessionError
from tests.support.cluster_pool import TWO_REPLICAS, TWO_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import (
    GraphTraining,
    Values,
    assert_close,
    compare_graph,
    programs_alive,
    session_values,
    settings,
)
from tests.support.oracle_programs import batches, graph_weights, initial_values, placeholders, predict, squared_error
from tests.support.sessions import evaluate_alone, graph_in_full, sessions

pytestmark = pytest.mark.parametrize(
    "cluster", [TWO_REPLICAS, TWO_WORKERS, UNEVEN_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)

Pair = namedtuple("Pair", ["first", "second"])


def train_in_full() -> Values:
    return compare_graph(graph_in_full, batches("both"))


def test_schedules_loops_branches_and_steps_are_those_of_one_device(cluster: Cluster):
    same(cluster.run(train_in_full))


def initialize_again() -> Values:
    def between(session: Any, number: int) -> None:
        if number == 2:
            session.run(session.graph.get_operation_by_name("initialize"))

    return compare_graph(graph_in_full, batches("both"), between=between)


def test_an_initializer_starts_training_anew(cluster: Cluster):
    same(cluster.run(initialize_again))


def assign_between() -> Values:
    def build() -> GraphTraining:
        training = graph_in_full()
        table = next(v for v in tf.compat.v1.trainable_variables() if v.op.name == "table")
        tf.group(table.assign(table * 0.5), name="halve")
        tf.identity(table.assign_add(tf.ones_like(table)), name="raised")
        return training

    def between(session: Any, number: int) -> None:
        session.run("halve" if number % 2 else "raised:0")

    return compare_graph(build, batches("both"), between=between)


def test_the_next_step_sees_what_an_assignment_wrote(cluster: Cluster):
    same(cluster.run(assign_between))


def fetch_structures() -> Values:
    with sessions() as both:
        both.step(0)
        for fetches in (
            "loss:0",
            ["loss:0", "predictions:0"],
            ("loss:0", ["predictions:0", "train"]),
            {"loss": "loss:0", "train": "train", "rows": ["predictions:0"]},
            Pair("loss:0", "predictions:0"),
            ["loss:0", "loss:0"],
            [],
            "x:0",
        ):
            actual, expected = both.run(fetches, 1)
            tf.nest.assert_same_structure(expected, actual)
            for got, wanted in zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True):
                if wanted is None:
                    assert got is None
                else:
                    assert type(got) is type(wanted), (fetches, type(got), type(wanted))
                    assert_close(got, wanted, f"a fetch of {fetches}")
        table = next(v for v in both.compiled.graph.get_collection("variables") if v.op.name == "table")
        assert_close(both.compiled.run(table), session_values(both.plain.graph, both.plain)["table"], "table")
        assert_close(both.compiled.run({"t": table})["t"], both.compiled.run(table.value()), "table")
        return both.compare("at the end")


def test_fetches_have_the_structure_types_and_values_of_one_device(cluster: Cluster):
    same(cluster.run(fetch_structures))


def fed_values() -> Values:
    with sessions() as both:
        for number, factor in enumerate((0.5, 2.0, np.float64(1.0))):
            actual, expected = both.run(["loss:0", "train"], number, **{"factor:0": factor})
            assert_close(actual[0], expected[0], "loss")
        both.run(["train"], 3)
        return both.compare("after fed learning rates")


def test_a_scalar_may_be_fed_or_keep_its_default(cluster: Cluster):
    same(cluster.run(fed_values))


def test_one_worker_may_evaluate_by_itself(cluster: Cluster):
    same(cluster.run(evaluate_alone))


def keep_few_programs() -> Values:
    """Each worker lets go of other programs of its own, and all of the same ones that train."""
    with settings(kept_programs=2), programs_alive() as alive, sessions() as both:
        both.step(0)
        for number in range(1, 4):
            for wanted in (["loss:0"], ["predictions:0"], ["predictions:0", "loss:0"])[both.autodist.rank :]:
                for actual, expected in zip(*both.run(wanted, number), strict=True):
                    assert_close(actual, expected, "evaluated")
            for wanted in (["train"], ["loss:0", "train"], ["predictions:0", "train"]):
                both.run(wanted, number)
        gc.collect()
        assert 2 < len(alive) <= 4
        return both.compare("at the end")


def test_programs_that_are_not_used_are_let_go_and_made_again(cluster: Cluster):
    same(cluster.run(keep_few_programs))


def callables() -> Values:
    with sessions() as both:
        graph = both.compiled.graph
        feeds = [graph.get_tensor_by_name(name) for name in both.feeds]
        train = both.compiled.make_callable([graph.get_tensor_by_name("loss:0"), "train"], feeds)
        plain = both.plain.make_callable(["loss:0", "train"], both.feeds)
        for batch in both.batches:
            assert_close(train(*batch)[0], plain(*batch)[0], "loss")
        rows = graph.get_tensor_by_name("predictions:0")
        feed = dict(zip(feeds, both.batches[0], strict=True))
        assert_close(rows.eval(feed, session=both.compiled), both.run("predictions:0")[1], "predictions")
        with both.compiled.graph.as_default():
            graph.get_operation_by_name("train").run(feed, session=both.compiled)
        both.plain.run("train", dict(zip(both.feeds, both.batches[0], strict=True)))
        return both.compare("at the end")


def test_callables_eval_and_run_are_those_of_a_session(cluster: Cluster):
    same(cluster.run(callables))


def save_and_restore(directory: str) -> Values:
    with sessions(lambda: tf.compat.v1.train.Saver(name="saver")) as both:
        savers = {}
        for session in (both.plain, both.compiled):
            with session.graph.as_default():
                definition = tf.compat.v1.train.SaverDef(
                    filename_tensor_name="saver/Const:0",
                    save_tensor_name="saver/control_dependency:0",
                    restore_op_name="saver/restore_all",
                )
                savers[session] = tf.compat.v1.train.Saver(saver_def=definition)
        both.step(0)
        own = f"{directory}/{both.autodist.rank}"
        paths = {session: savers[session].save(session, f"{own}-{i}") for i, session in enumerate(savers)}
        for name, shape in tf.train.list_variables(paths[both.plain]):
            wanted = tf.train.load_variable(paths[both.plain], name)
            assert list(wanted.shape) == shape
            assert_close(tf.train.load_variable(paths[both.compiled], name), wanted, f"'{name}' as saved")
        both.step(1)
        savers[both.compiled].restore(both.compiled, paths[both.plain])
        savers[both.plain].restore(both.plain, paths[both.compiled])
        both.step(2)
        return both.compare("after a restore")


def test_a_saver_saves_and_restores_through_the_session(cluster: Cluster, tmp_path: Path):
    same(cluster.run(save_and_restore, directory=str(tmp_path)))


def start_from_own_values() -> Values:
    """Each worker sets other initial values; the chief's count."""
    with AutoDist() as autodist:
        results = []
        for seed, compiled in ((1, False), (1 + autodist.rank, True)):
            with tf.Graph().as_default() as graph:
                if compiled:
                    with autodist.scope():
                        feeds, loss = _graph_that_is_set()
                    session = autodist.create_distributed_session()
                else:
                    feeds, loss = _graph_that_is_set()
                    session = tf.compat.v1.Session(graph=graph)
                session.run("initialize")
                values = initial_values("dense", seed)
                session.run("set", {f"new_{name}:0": value for name, value in values.items()})
                for batch in batches("dense"):
                    result = session.run([loss, "train"], dict(zip(feeds, batch, strict=True)))
                results.append((result[0], session_values(graph, session)))
                session.close()
        assert_close(results[1][0], results[0][0], "the last loss")
        for name, wanted in results[0][1].items():
            assert_close(results[1][1][name], wanted, f"variable '{name}'")
        return results[1][1]


def _graph_that_is_set() -> tuple[list[tf.Tensor], tf.Tensor]:
    feeds = placeholders("dense")
    weights = graph_weights("dense")
    loss = squared_error(predict(weights, feeds[:-1]), feeds[-1])
    tf.compat.v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss, name="train")
    sets = [w.assign(tf.compat.v1.placeholder(w.dtype, w.shape, name=f"new_{n}")) for n, w in weights.items()]
    tf.group(sets, name="set")
    tf.group(tf.compat.v1.global_variables_initializer(), name="initialize")
    return feeds, loss


def test_the_values_that_the_chief_set_are_those_that_are_trained(cluster: Cluster):
    same(cluster.run(start_from_own_values))


def train_from_iterators(epochs: int) -> Values:
    """Two iterators that are initialized for each of two epochs, or one that begins by itself; uneven batches."""
    results = []
    with AutoDist() as autodist:
        for compiled in (False, True):
            with tf.Graph().as_default() as graph:
                if compiled:
                    with autodist.scope():
                        again, loss = _graph_of_iterators(one_shot=epochs == 1)
                    session = autodist.create_distributed_session()
                else:
                    again, loss = _graph_of_iterators(one_shot=epochs == 1)
                    session = tf.compat.v1.Session(graph=graph)
                session.run("initialize")
                losses = []
                for _ in range(epochs):
                    session.run(again)
                    with pytest.raises(tf.errors.OutOfRangeError):
                        while True:
                            losses.append(session.run([loss, "train"])[0])
                results.append((losses, session_values(graph, session)))
                session.close()
    (wanted_losses, wanted), (losses, values) = results
    assert len(losses) == 3 * epochs
    assert_close(np.array(losses), np.array(wanted_losses), "the losses")
    for name, value in wanted.items():
        assert_close(values[name], value, f"variable '{name}'")
    return values


def _graph_of_iterators(*, one_shot: bool) -> tuple[tf.Operation, tf.Tensor]:
    rng = np.random.default_rng(5)
    rows = [rng.normal(size=(13, *feed.shape[1:])) for feed in placeholders("dense")]
    others = tf.data.Dataset.range(26).batch(10)  # Twice as many rows.
    data = tf.data.Dataset.zip((tf.data.Dataset.from_tensor_slices(tuple(rows)).batch(5), others))
    if one_shot:
        first, scale, again = tf.compat.v1.data.make_one_shot_iterator(data), 1.0, tf.no_op()
    else:
        first = tf.compat.v1.data.make_initializable_iterator(data)
        # The second one's elements are equal: whether one is taken in the step that has no data is not said. It is
        # initialized again as well, because TensorFlow may end an iterator for ever when a step that reads it fails.
        second = tf.compat.v1.data.make_initializable_iterator(tf.data.Dataset.from_tensors(np.float64(0.7)).repeat())
        scale, again = second.get_next(), tf.group(first.initializer, second.initializer)
    weights = graph_weights("dense")
    (*features, targets), others = first.get_next()
    loss = squared_error(predict(weights, features), targets) * scale
    loss += tf.reduce_mean(tf.cast(others, tf.float64)[:, tf.newaxis] * tf.square(weights["bias"]))
    tf.compat.v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss, name="train")
    tf.group(tf.compat.v1.global_variables_initializer(), name="initialize")
    return again, loss


@pytest.mark.parametrize("epochs", [1, 2])
def test_iterators_of_a_graph_are_shared_out_and_begin_anew_when_initialized(cluster: Cluster, epochs: int):
    same(cluster.run(train_from_iterators, epochs=epochs))


def begin_without_initializer(batch: str, directory: str) -> Values:
    """No worker initializes anything, and each would draw other numbers: the chief's count, from the beginning."""
    with AutoDist(batch=batch) as autodist:
        with tf.Graph().as_default() as single:
            feeds, _ = _graph_of_random_weights(seed=1)
        with tf.Graph().as_default(), autodist.scope():
            _graph_of_random_weights(seed=1 + autodist.rank)
        with tf.compat.v1.Session(graph=single) as plain:
            plain.run("initialize")
            initial = session_values(single, plain)
            with autodist.create_distributed_session() as session:
                assert tf.compat.v1.get_default_session() is session
                graph = session.graph
                weight, word = (next(v for v in _variables(graph) if v.op.name == name) for name in ("table", "word"))
                assert word.eval() == b"word"
                assert_close(weight.eval(), initial["table"], "a weight before the first step")
                saved = graph.get_tensor_by_name("save/Const:0"), f"{directory}/{autodist.rank}"
                session.run("save/control_dependency:0", dict([saved]))
                for whole in batches("both"):
                    own = [np.array_split(rows, autodist.num_workers)[autodist.rank] for rows in whole]
                    given = own if batch == "local" else whole
                    graph.get_operation_by_name("train").run(dict(zip((t.name for t in feeds), given, strict=True)))
                    plain.run("train", dict(zip(feeds, whole, strict=True)))
                trained = session_values(graph, session)
                for name, wanted in session_values(single, plain).items():
                    if name != "word":
                        assert_close(trained[name], wanted, f"variable '{name}'")
                graph.get_operation_by_name("save/restore_all").run(dict([saved]))
                assert_close(weight.eval(), initial["table"], "a weight that was restored")
                session.run("train", dict(zip((t.name for t in feeds), given, strict=True)))
                session.run("initialize")
                assert word.eval() == b"word"
                if autodist.is_chief:  # Who runs an initializer by itself has its own numbers, up to the next step.
                    assert_close(weight.eval(), initial["table"], "a weight that was initialized again")
    del trained["word"]
    return trained


def _graph_of_random_weights(seed: int) -> tuple[list[tf.Tensor], tf.Tensor]:
    tf.compat.v1.set_random_seed(seed)
    feeds = placeholders("both")
    weights = {
        name: tf.compat.v1.get_variable(
            name, initializer=tf.random.uniform(value.shape, -0.5, 0.5, tf.float64), use_resource=True
        )
        for name, value in initial_values("both", 1).items()
    }
    tf.compat.v1.get_variable("word", initializer=tf.constant("word"), trainable=False)
    loss = squared_error(predict(weights, feeds[:-1]), feeds[-1])
    tf.compat.v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss, name="train")
    tf.group(tf.compat.v1.global_variables_initializer(), name="initialize")
    tf.compat.v1.train.Saver(name="save")
    return feeds, loss


def _variables(graph: tf.Graph) -> list[Any]:
    return list(graph.get_collection("variables"))


@pytest.mark.parametrize("batch", ["global", "local"])
def test_variables_that_nobody_initialized_begin_with_the_chiefs_values(cluster: Cluster, batch: str, tmp_path: Path):
    same(cluster.run(begin_without_initializer, batch=batch, directory=str(tmp_path)))


def train_in_other_sessions() -> None:
    """Sessions of TensorFlow's own read; with several workers none trains until the AutoDist is closed."""
    with AutoDist() as autodist, tf.Graph().as_default() as graph:
        with autodist.scope():
            feeds, loss = _graph_of_random_weights(seed=1)
            given = dict(zip(feeds, batches("both")[0], strict=True))
            refused = (
                pytest.raises(SessionError, match=r"'train' runs '.*Apply.*every worker would train by itself.*create_")
                if autodist.num_workers > 1
                else nullcontext()
            )
            with tf.compat.v1.Session() as session:
                session.run("initialize")
                before = session.run([loss, "table/Read/ReadVariableOp:0"], given)
                with refused:
                    session.run(["train"], given)
                assert np.array_equal(session.run(loss, given), before[0]) == (autodist.num_workers > 1)
        with refused, tf.compat.v1.train.MonitoredTrainingSession() as monitored:
            monitored.run(["train"], given)
        autodist.close()
    with tf.compat.v1.Session(graph=graph) as session:
        session.run("initialize")
        session.run(["train"], given)
        assert not np.array_equal(session.run(loss, given), before[0])


def test_no_session_of_tensorflows_own_trains_on_several_workers(cluster: Cluster):
    cluster.run(train_in_other_sessions)


def train_past_all_doors() -> None:
    """What computes gradients in scope() and is no captured step: eagerly, in a function, in another graph."""
    with AutoDist() as autodist:
        weight = tf.Variable(2.0, name="weight")
        refused = (
            pytest.raises(CaptureError, match=r"gradient of variable 'weight.*in scope\(\), and not in a step that is")
            if autodist.num_workers > 1
            else nullcontext()
        )

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(weight * x)
            return tape.gradient(loss, weight)

        with autodist.scope():
            for gradient_of in (step, tf.function(step, autograph=False)):
                with refused:
                    assert gradient_of(tf.ones([4])) == 1.0
            with refused, tf.Graph().as_default():
                inner = tf.compat.v1.get_variable("weight", [])
                tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(inner**2)
            assert autodist.function(step)(np.ones([4], np.float32)) == 1.0
            x = tf.ones([4])
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(weight * x)
            assert np.array_equal(tape.gradient(loss, x), [2.0] * 4)
        assert step(tf.ones([4])) == 1.0
        with (
            tf.distribute.OneDeviceStrategy("/cpu:0").scope(),
            pytest.raises(CaptureError, match=r"OneDeviceStrategy.*leave the tf.distribute strategy out"),
            autodist.scope(),
        ):
            pass


def test_training_in_scope_that_no_door_sees_is_refused_on_several_workers(cluster: Cluster):
    cluster.run(train_past_all_doors)


def train_by_gradients_made_before() -> None:
    with AutoDist() as autodist, tf.Graph().as_default():
        feeds, _ = _graph_of_random_weights(seed=1)
        with autodist.scope():
            session = autodist.create_distributed_session()
        given = dict(zip(feeds, batches("both")[0], strict=True))
        refused = (
            pytest.raises(SessionError, match=r"'train/.*was not computed in scope\(\)")
            if autodist.num_workers > 1
            else nullcontext()
        )
        with refused:
            session.run("train", given)
        session.close()


def test_a_gradient_computed_before_the_scope_trains_nothing_on_several_workers(cluster: Cluster):
    cluster.run(train_by_gradients_made_before)


def synchronized_in_a_graph() -> None:
    with AutoDist(batch_statistics="replica") as autodist, tf.Graph().as_default(), autodist.scope():
        layer = tf_keras.layers.BatchNormalization(synchronized=True, name="together")
        x = tf.compat.v1.placeholder(tf.float32, [None, 3])
        layer(x, training=False)
        with pytest.raises(CaptureError, match=r"layer 'together' asks tf\.distribute to combine"):
            layer(x, training=True)


def test_synchronized_batch_normalization_is_refused_in_a_graph(cluster: Cluster):
    cluster.run(synchronized_in_a_graph)
