"""What Keras and TensorFlow write in a run of several workers: once, by the chief, and there when a call returns."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.parameter_server import PS
from tests.support.cluster_pool import THREE_WORKERS, TWO_WORKERS, Cluster

X = np.random.default_rng(5).normal(size=(24, 6)).astype("float32")
Y = np.random.default_rng(6).normal(size=(24, 3)).astype("float32")


def trained(autodist: AutoDist, package: Any = keras) -> Any:
    package.utils.set_random_seed(3)
    with autodist.scope():
        model = package.Sequential([package.layers.Input((6,)), package.layers.Dense(3)])
        model.compile("adam", "mean_squared_error")
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    return model


def loaded_checkpoint(model: Any, path: Any) -> list[np.ndarray]:
    saved = [value + 0.0 for value in model.get_weights()]
    model.set_weights([value * 0.0 for value in saved])
    tf.train.Checkpoint(model=model).read(os.fspath(path)).expect_partial()
    found = model.get_weights()
    model.set_weights(saved)
    return found


def by_manager(model: Any, path: Path) -> list[np.ndarray]:
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), str(path), max_to_keep=2)
    made = [manager.save() for _ in range(3)]
    assert manager.checkpoints == made[1:] and manager.latest_checkpoint == made[-1] == f"{path}/ckpt-3"
    assert tf.train.latest_checkpoint(str(path)) == made[-1]
    assert sorted(each.name for each in path.glob("*.index")) == ["ckpt-2.index", "ckpt-3.index"]
    return loaded_checkpoint(model, made[-1])


def by_checkpoint(model: Any, path: Path) -> list[np.ndarray]:
    checkpoint = tf.train.Checkpoint(model=model)
    made = [checkpoint.save(path), checkpoint.save(path)]
    assert (made, int(checkpoint.save_counter)) == ([f"{path}-1", f"{path}-2"], 2)
    assert tf.train.latest_checkpoint(str(path.parent)) == made[-1]
    return loaded_checkpoint(model, made[-1])


def by_loading(load: Callable[[str], Any]) -> Callable[[Any, Path], list[np.ndarray]]:
    def write_and_load(model: Any, path: Path) -> list[np.ndarray]:
        model.save(path)
        return list(load(str(path)).get_weights())

    return write_and_load


def by_export(model: Any, path: Path) -> list[np.ndarray]:
    model.export(path, verbose=False)
    return [np.asarray(each) for each in tf.saved_model.load(str(path)).variables]


def by_saved_model(model: Any, path: Path) -> list[np.ndarray]:
    module = tf.Module()
    module.kept = [tf.Variable(each) for each in model.get_weights()]
    tf.saved_model.save(module, str(path))
    return [np.asarray(each) for each in tf.saved_model.load(str(path)).kept]


def by_weights(model: Any, path: Path) -> list[np.ndarray]:
    model.save_weights(path)
    other = keras.models.clone_model(model)
    other.load_weights(path)
    return list(other.get_weights())


def by_write(model: Any, path: Path) -> list[np.ndarray]:
    assert tf.train.Checkpoint(model=model).write(path) == str(path)
    return loaded_checkpoint(model, path)


def by_function(model: Any, path: Path) -> list[np.ndarray]:
    keras.saving.save_model(model, path, overwrite=True)
    return list(keras.saving.load_model(path, compile=False).get_weights())


WRITERS: dict[str, tuple[str, Callable[[Any, Path], list[np.ndarray]]]] = {
    "model.save .keras": ("m.keras", by_loading(lambda path: keras.saving.load_model(path))),
    "model.save .h5": ("m.h5", by_loading(lambda path: keras.saving.load_model(path, compile=False))),
    "save_model": ("f.keras", by_function),
    "save_weights": ("m.weights.h5", by_weights),
    "export": ("exported", by_export),
    "saved_model.save": ("saved", by_saved_model),
    "Checkpoint.save": ("c/saved", by_checkpoint),
    "Checkpoint.write": ("c/written", by_write),
    "CheckpointManager.save": ("managed", by_manager),
}


def written_by(writer: str, folder: str, strategy: str) -> None:
    """Each worker writes where all do, and loads at once, twice."""
    with AutoDist(strategy_builder=strategy) as autodist:
        model = trained(autodist)
        name, write = WRITERS[writer]
        for number in range(2):
            path = Path(folder) / str(number) / name
            Path(folder, str(number)).mkdir(exist_ok=True)
            for found, own in zip(write(model, path), model.get_weights(), strict=True):
                np.testing.assert_array_equal(found, own)
            model.fit(X, Y, batch_size=8, epochs=1, verbose=0)


@pytest.mark.on(1)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("cluster", [TWO_WORKERS, THREE_WORKERS], indirect=True, ids=lambda shape: shape.name)
def test_what_all_write_is_whole_when_each_returns(cluster: Cluster, tmp_path: Path, writer: str) -> None:
    cluster.run(written_by, writer=writer, folder=str(tmp_path), strategy="AllReduce")


@pytest.mark.parametrize(
    ("strategy", "writer"),
    [("PS", "export"), ("PSLoadBalancing", "Checkpoint.save"), ("ShardedOptimizer", "save_model")],
)
@pytest.mark.parametrize("cluster", [TWO_WORKERS], indirect=True, ids=lambda shape: shape.name)
def test_what_lives_elsewhere_is_brought_before(cluster: Cluster, tmp_path: Path, writer: str, strategy: str) -> None:
    cluster.run(written_by, writer=writer, folder=str(tmp_path), strategy=strategy)


def written_apart(folder: str) -> tuple[list[Any], list[str]]:
    """Each worker has a file system of its own; what the calls return, and the files that this worker has then."""
    before = os.getcwd()
    with AutoDist() as autodist:
        model = trained(autodist)
        os.makedirs(f"{folder}/{autodist.rank}")
        os.chdir(f"{folder}/{autodist.rank}")
        try:
            checkpoint = tf.train.Checkpoint(model=model)
            manager = tf.train.CheckpointManager(checkpoint, "managed", max_to_keep=1)
            returned = [
                model.save("m.keras"),
                keras.saving.save_model(model, "n.keras"),
                model.save("m.h5"),
                model.save_weights("m.weights.h5"),
                model.export("exported", verbose=False),
                tf.saved_model.save(checkpoint, "saved"),
                checkpoint.write("written"),
                checkpoint.save("made/c"),
                manager.save(),
                manager.save(),
                manager.checkpoints,
            ]
            return returned, sorted(os.listdir())
        finally:
            os.chdir(before)


@pytest.mark.parametrize("cluster", [TWO_WORKERS], indirect=True, ids=lambda shape: shape.name)
def test_the_others_write_nothing_and_return_what_the_chief_does(cluster: Cluster, tmp_path: Path) -> None:
    (returned, files), others = cluster.run(written_apart, folder=str(tmp_path))
    assert returned == [*[None] * 6, "written", "made/c-1", "managed/ckpt-2", "managed/ckpt-3", ["managed/ckpt-3"]]
    assert others == (returned, [])
    assert {"m.keras", "n.keras", "m.h5", "m.weights.h5", "exported", "saved", "written.index", "made"} < {*files}


def called_by_some(folder: str) -> dict[str, Any]:
    """Calls that not all workers make, and calls that differ between them; what each worker found."""
    found: dict[str, Any] = {}
    with AutoDist() as autodist:
        model = trained(autodist)
        if autodist.is_chief:
            model.save(f"{folder}/chief.keras")
        model.save(f"{folder}/rank-{autodist.rank}.keras")
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
        found["own"] = os.path.exists(f"{folder}/rank-{autodist.rank}.keras")
        found["no folder"] = error_of(lambda: model.save(f"{folder}/missing/m.keras"))
        found["no suffix"] = error_of(lambda: model.save(f"{folder}/m"))
        if autodist.is_chief:
            time.sleep(1.0)  # Those that call it have to wait.
        model.save(f"{folder}/all.keras")
        found["all"] = os.path.exists(f"{folder}/all.keras")
        best = f"{folder}/{{epoch}}.keras"
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[Slow(), keras.callbacks.ModelCheckpoint(best)])
        found["fitted"] = os.path.exists(f"{folder}/2.keras")
    return found


class Slow(keras.callbacks.Callback):
    """Is late where it is the chief's."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if os.environ.get("AUTODIST_RANK") is None:
            time.sleep(0.5)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("cluster", [TWO_WORKERS], indirect=True, ids=lambda shape: shape.name)
def test_calls_of_some_workers_keep_nobody_waiting(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.run(called_by_some, folder=str(tmp_path))
    assert found[1] == found[0]
    assert found[0].pop("no folder") == (
        "FileNotFoundError",
        f"[Errno 2] No such file or directory: '{tmp_path}/missing/m.keras'",
    )
    assert found[0].pop("no suffix")[0] == "ValueError"
    assert set(found[0].values()) == {True}
    names = {"chief.keras", "rank-0.keras", "rank-1.keras", "all.keras", "1.keras", "2.keras"}
    assert {path.name for path in tmp_path.iterdir()} == names


def saved_after_other_numbers_of_steps(folder: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Workers take steps by themselves, worker 1 more of them; then all save a model that they train together."""
    weight = tf.Variable(np.ones((6, 3), "float32"))
    with AutoDist(strategy_builder=PS(sync=False)) as autodist:

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight - y) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))

        for _ in range(1 + 2 * autodist.rank):
            step(X, Y)
    with AutoDist() as autodist:
        model = trained(autodist)
        model.save(f"{folder}/m.keras")
        saved = keras.saving.load_model(f"{folder}/m.keras")
        return list(model.get_weights()), list(saved.get_weights())


@pytest.mark.parametrize("cluster", [TWO_WORKERS], indirect=True, ids=lambda shape: shape.name)
def test_workers_that_have_taken_other_numbers_of_steps_find_what_the_chief_writes(
    cluster: Cluster, tmp_path: Path
) -> None:
    for own, saved in cluster.run(saved_after_other_numbers_of_steps, folder=str(tmp_path), timeout=60.0):
        for found, wanted in zip(saved, own, strict=True):
            np.testing.assert_array_equal(found, wanted)


def saved_by_savers(folder: str) -> list[Any]:
    """A TF1 saver, which keeps the last two: paths, what it says that it has, and what is restored."""
    with AutoDist() as autodist:
        with tf.Graph().as_default(), autodist.scope():
            x = tf.compat.v1.placeholder(tf.float32, [None, 6])
            w = tf.compat.v1.get_variable("w", [6, 1])
            train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean((x @ w) ** 2))
            saver = tf.compat.v1.train.Saver(max_to_keep=2)
            initialize = tf.compat.v1.global_variables_initializer()
        with autodist.create_distributed_session() as session:
            session.run(initialize)
            paths = []
            for step in range(3):
                session.run(train, {x: X})
                paths.append(saver.save(session, f"{folder}/model", global_step=step))
            trained = session.run(w)
            session.run(w.assign(w * 0.0))
            saver.restore(session, paths[-1])
            np.testing.assert_array_equal(session.run(w), trained)
            return [paths, saver.last_checkpoints]


@pytest.mark.parametrize("cluster", [TWO_WORKERS], indirect=True, ids=lambda shape: shape.name)
def test_a_saver_of_graph_mode_writes_once(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.run(saved_by_savers, folder=str(tmp_path))
    assert (
        found[1] == found[0] == [[f"{tmp_path}/model-{n}" for n in range(3)], [f"{tmp_path}/model-{n}" for n in (1, 2)]]
    )
    assert sorted(path.name for path in tmp_path.glob("*.index")) == ["model-1.index", "model-2.index"]


def legacy_models(folder: str) -> None:
    import tf_keras

    with AutoDist() as autodist:
        model = trained(autodist, tf_keras)
        for name in ("m.keras", "m.h5", "saved"):
            model.save(f"{folder}/{name}")
            for found, own in zip(
                tf_keras.models.load_model(f"{folder}/{name}").get_weights(), model.get_weights(), strict=True
            ):
                np.testing.assert_array_equal(found, own)
        for name in ("m.weights.h5", "weights"):
            model.save_weights(f"{folder}/{name}")
            model.load_weights(f"{folder}/{name}")


@pytest.mark.parametrize("cluster", [TWO_WORKERS], indirect=True, ids=lambda shape: shape.name)
def test_models_of_tf_keras_are_written_once(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(legacy_models, folder=str(tmp_path))
