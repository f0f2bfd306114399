"""`fit` of data that end early, differ, or are each worker's own."""

import re
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, AutoDistError
from tests.support.cluster_pool import THREE_WORKERS, TWO_REPLICAS, TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import TOLERANCE, X, Y, compiled, fitted
from tests.support.oracle import assert_close

pytestmark = pytest.mark.parametrize(
    "cluster", [TWO_REPLICAS, TWO_WORKERS, THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)


def data_of_other_lengths(num_steps: int, *, known: bool, steps_per_epoch: int | None) -> tuple[str, float]:
    """What is said of the one batch more that the chief has, and how many seconds after the last step."""
    last_step = time.monotonic()

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal last_step
            last_step = time.monotonic()

    with AutoDist() as autodist, autodist.scope():
        model = compiled("sgd")
        data = tf.data.Dataset.from_tensor_slices((np.tile(X, [8, 1]), np.tile(Y, 8))).batch(8)
        data = data.take(num_steps + autodist.is_chief)
        if not known:
            data = data.filter(lambda x, y: tf.shape(x)[0] > 0)
        try:
            model.fit(data, verbose=0, epochs=2, steps_per_epoch=steps_per_epoch, callbacks=[Clock()])
        except AutoDistError as error:
            return str(error), time.monotonic() - last_step
        return "no error", 0.0


@pytest.mark.on(1)
@pytest.mark.parametrize("num_steps", [3, 13])
@pytest.mark.parametrize(("known", "steps_per_epoch"), [(True, None), (False, None), (False, 50)])
def test_data_that_end_early_on_one_worker_are_refused_at_once(
    cluster: Cluster, num_steps: int, known: bool, steps_per_epoch: int | None
) -> None:
    said = cluster.run(data_of_other_lengths, num_steps=num_steps, known=known, steps_per_epoch=steps_per_epoch)
    for text, seconds in said:
        if cluster.shape.num_workers == 1:
            assert text == "no error"
        else:
            assert "has_next_batch" in text or "have ended on some workers" in text
            assert seconds < 10


class Regularized(keras.Sequential):
    """Learns classes, with a penalty on what it says of other rows."""

    def train_step(self, data: Any) -> Any:
        (x, y), others = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True)) + 0.1 * tf.reduce_mean(self(others) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def pairs(num_steps: int, labelled: int, others: int) -> tf.data.Dataset:
    rows = tf.data.Dataset.from_tensor_slices((np.tile(X, [8, 1]), np.tile(Y, 8)))
    return tf.data.Dataset.zip((rows.batch(labelled), rows.map(lambda x, y: -x).batch(others))).take(num_steps)


def pairs_of_batches() -> dict[str, Any]:
    """Of 2 labelled rows for each other one, of sizes without a common divisor, and of one row."""

    def train() -> dict[str, Any]:
        model = compiled(
            "adam", lambda: Regularized([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)]), metrics=None
        )
        values = [fitted(model, pairs(4, *sizes), epochs=1) for sizes in ((8, 4), (5, 3), (3, 1), (4, 4))]
        return {f"{name}, {number}": value for number, own in enumerate(values) for name, value in own.items()}

    expected = train()
    with AutoDist() as autodist, autodist.scope():
        values = train()
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, TOLERANCE)
    return values


def test_pairs_of_batches_of_several_sizes_are_trained_on_as_on_one_device(cluster: Cluster) -> None:
    same(cluster.run(pairs_of_batches))


class Summed(keras.Sequential):
    """Its losses are sums, which no rows leave as they are."""

    def train_step(self, data: Any) -> Any:
        x, others = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self(x) ** 2) + 0.1 * tf.reduce_sum(self(others) ** 4)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def pairs_without_rows() -> dict[str, Any]:
    """In the second step there are none of the first batch, in the third none of the other."""
    steps = [(X[:4], X[4:6]), (X[:0], X[6:10]), (X[8:14], X[:0]), (X[10:14], X[4:6])]

    def train() -> dict[str, Any]:
        rows = tf.TensorSpec([None, 6], tf.float64)
        dataset = tf.data.Dataset.from_generator(lambda: iter(steps), output_signature=(rows, rows))
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(steps)))
        return fitted(compiled("adam", lambda: Summed([keras.layers.Dense(3)]), metrics=None), dataset)

    expected = train()
    with AutoDist() as autodist, autodist.scope():
        values = train()
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, TOLERANCE)
    with AutoDist(batch="local") as autodist, autodist.scope():
        if autodist.num_workers > 1:
            with pytest.raises(AutoDistError, match=r"to train 'summed.*': the first part of the data has no rows"):
                train()
    return values


def test_a_step_may_have_no_rows_of_one_of_its_batches(cluster: Cluster) -> None:
    same(cluster.run(pairs_without_rows))


def pairs_of_own_parts() -> dict[str, Any]:
    """The chief has a step more than the others; sizes that part in a later step only are refused."""
    rows = tf.TensorSpec([None, 6], tf.float64)
    signature = ((rows, tf.TensorSpec([None], tf.int64)), rows)

    def train(steps: list[Any]) -> dict[str, Any]:
        dataset = tf.data.Dataset.from_generator(lambda: iter(steps), output_signature=signature)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(steps)))
        model = compiled("adam", lambda: Regularized([keras.layers.Dense(3)]), metrics=None)
        return fitted(model, dataset, epochs=1)

    with AutoDist(batch="local") as autodist:
        steps = {rank: [((X[rank:][:8], Y[rank:][:8]), X[rank + 8 :][:4])] for rank in range(autodist.num_workers)}
        steps[0].append(((X[:6], Y[:6]), X[6:9]))
        (first, others), last = [
            [list(own) for own in zip(*(one[0] for one in steps.values()), strict=True)],
            steps[0][1],
        ]
        union = (tuple(map(np.concatenate, zip(*first, strict=True))), np.concatenate(others))
        expected = train([union, last])
        with autodist.scope():
            values = train(steps[autodist.rank])
            if autodist.num_workers > 1:
                alike = [((X[:4], Y[:4]), X[4:8]), ((X[:4], Y[:4]), X[4:6])]
                with pytest.raises(AutoDistError, match="the first call says which are of one batch"):
                    train(alike)
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, TOLERANCE)
    return values


def test_pairs_of_own_parts_are_as_pairs_of_all(cluster: Cluster) -> None:
    same(cluster.run(pairs_of_own_parts))


def pairs_of_other_lengths() -> str:
    """The chief alone has rows of each step, and has a step more than the others."""
    with AutoDist() as autodist, autodist.scope():
        model = compiled("sgd", lambda: Regularized([keras.layers.Dense(3)]), metrics=None)
        try:
            model.fit(pairs(3 + autodist.is_chief, 4, 3).filter(lambda *_: True), verbose=0)
        except AutoDistError as error:
            return str(error)
        return "no error"


@pytest.mark.on(1)
def test_pairs_that_end_early_where_a_worker_has_no_rows_are_refused(cluster: Cluster) -> None:
    for said in cluster.run(pairs_of_other_lengths):
        assert "have ended on some workers" in said or (said == "no error" and cluster.shape.num_workers == 1)


def data_that_differ_late() -> str:
    """From the 15th step on, workers but the chief have other rows."""
    with AutoDist() as autodist, autodist.scope():
        model = compiled("sgd")

        def rows(step: Any, x: Any) -> Any:
            return tf.where((step >= 14) & (autodist.rank > 0), -x, x), tf.zeros([8], tf.int64)

        data = tf.data.Dataset.from_tensors(X[:8]).repeat(30).enumerate().map(rows)
        try:
            model.fit(data, verbose=0)
        except AutoDistError as error:
            return str(error)
        return "no error"


def test_data_that_differ_late_are_refused(cluster: Cluster) -> None:
    for said in cluster.run(data_that_differ_late):
        expected = "the same global batch, but the batches of" if cluster.shape.num_workers > 1 else "no error"
        assert expected in said


def evaluated_by_the_chief_alone() -> str:
    with AutoDist() as autodist, autodist.scope():
        model = compiled("sgd")

        def evaluate(epoch: int, logs: Any) -> None:
            if autodist.is_chief:
                model.evaluate(X, Y, verbose=0)

        try:
            model.fit(X, Y, epochs=3, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=evaluate)])
        except AutoDistError as error:
            return str(error)
        return "no error"


def test_what_one_worker_does_alone_is_refused(cluster: Cluster) -> None:
    for said in cluster.run(evaluated_by_the_chief_alone):
        expected = (
            r"begins to train '.*', while the chief begins to test" if cluster.shape.num_workers > 1 else "no error"
        )
        assert re.search(expected, said), said


PARTS = (X[:10], X[10:16], X[16:22])


def parts_of_other_lengths() -> dict[str, Any]:
    """Batches of 4: one step has examples of all workers, the last ones of some."""

    def batches(rows: np.ndarray) -> list[Any]:
        labels = {row.tobytes(): label for row, label in zip(X, Y, strict=True)}
        return [
            (part, np.array([labels[row.tobytes()] for row in part]))
            for part in (rows[start : start + 4] for start in range(0, len(rows), 4))
        ]

    with AutoDist(batch="local") as autodist:
        all_parts = [batches(part) for part in PARTS[: autodist.num_workers]]
        steps = [[part[step] for part in all_parts if step < len(part)] for step in range(max(map(len, all_parts)))]
        union = [tuple(np.concatenate(arrays) for arrays in zip(*step, strict=True)) for step in steps]

        def train(data: list[Any]) -> dict[str, Any]:
            signature = (tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None], tf.int64))
            dataset = tf.data.Dataset.from_generator(lambda: iter(data), output_signature=signature)
            # Else plain Keras counts an iteration of the optimizer more per epoch: it runs beside the read that fails.
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(data)))
            model = compiled("adam")

            class Writing(keras.callbacks.Callback):
                """Sets the rate and weights after each batch, also where a worker has no data."""

                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    model.optimizer.learning_rate = 0.05 / (2 + batch)
                    model.layers[0].kernel.assign(model.layers[0].kernel * 0.9)

            values = fitted(model, dataset, validation_data=dataset.take(2), callbacks=[Writing()])
            values["evaluated"] = np.array(model.evaluate(dataset, verbose=0))
            values |= {f"{name}, again": value for name, value in fitted(model, dataset, steps_per_epoch=1).items()}
            return values

        expected = train(union)
        with autodist.scope():
            values = train(all_parts[autodist.rank])
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, TOLERANCE)
    return values


def test_workers_whose_own_parts_end_early_go_on_without_examples(cluster: Cluster) -> None:
    same(cluster.run(parts_of_other_lengths))


def shards(folder: str) -> list[Any]:
    files = [Path(folder) / f"{number}.txt" for number in range(3)]
    numbers = tf.data.Dataset.range(12).batch(2)
    with AutoDist(batch="local") as autodist:
        if autodist.is_chief:
            for number, file in enumerate(files):
                file.write_text(f"{number}\n{number}\n")
        text = tf.data.TextLineDataset([str(file) for file in files])
        read = [
            [value.tolist() for value in autodist.shard(numbers, policy).as_numpy_iterator()]
            for policy in ("data", "auto", "off")
        ]
        if autodist.num_workers > 1:
            with pytest.raises(AutoDistError, match="none was found in this one"):
                autodist.shard(numbers, "file")
        with pytest.raises(AutoDistError, match="policy must be one of off, auto, file, data; received 'rows'"):
            autodist.shard(numbers, "rows")
        autodist._cluster.barrier("files")
        read += [
            [int(line) for line in autodist.shard(text, policy).as_numpy_iterator()] for policy in ("file", "auto")
        ]
    with AutoDist() as autodist:
        if autodist.num_workers > 1:
            with pytest.raises(AutoDistError, match=r"Say AutoDist\(batch='local'\)"):
                autodist.shard(numbers)
    return read


def test_a_shard_is_this_workers_part(cluster: Cluster, tmp_path: Path) -> None:
    count = cluster.shape.num_workers
    for rank, (data, auto, off, files, auto_files) in enumerate(cluster.run(shards, folder=str(tmp_path))):
        batches = [[number, number + 1] for number in range(0, 12, 2)]
        assert data == auto == batches[rank::count]
        assert off == batches
        assert files == auto_files == [number for number in range(3)[rank::count] for _ in range(2)]
