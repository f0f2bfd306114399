"""What a step function does at its edges: arguments, results, state and other workers.

One module, though long: its clusters start once.
"""

import functools
import gc
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, AutoDistError, CaptureError, ClusterError
from tests.support.cluster_pool import TWO_REPLICAS, TWO_WORKERS, Cluster
from tests.support.oracle import assert_close, programs_alive, settings

pytestmark = pytest.mark.parametrize(
    "cluster", [TWO_REPLICAS, TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)

X, Y = np.linspace(-1, 1, 18).reshape(6, 3), np.linspace(0, 1, 6)


class Regression:
    """Linear regression by gradient descent, with a loss of the caller's."""

    def __init__(self, loss: Callable[[tf.Tensor, tf.Variable], tf.Tensor] | None = None):
        self.weight = tf.Variable([0.5, -0.2, 0.1], dtype=tf.float64, name="weight")
        self._loss = loss or (lambda errors, weight: tf.reduce_mean(errors**2))

    def step(self, x: tf.Tensor, y: tf.Tensor, rate: float = 0.1) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self._loss(tf.linalg.matvec(x, self.weight) - y, self.weight)
        self.weight.assign_sub(rate * tape.gradient(loss, self.weight))
        return loss


def train_alike(
    run: Callable[[Regression, Callable[..., Any]], None],
    loss: Callable[[tf.Tensor, tf.Variable], tf.Tensor] | None = None,
    batched: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """`run(model, decorate)` leaves the same weights with tf.function and with autodist.function."""
    plain, compiled = Regression(loss), Regression(loss)
    run(plain, tf.function)
    with AutoDist(**options) as autodist:
        run(compiled, functools.partial(autodist.function, batched=batched))
    assert_close(compiled.weight.numpy(), plain.weight.numpy(), "weight")


def state_is_written_by_a_step_without_gradients() -> None:
    def run(model: Regression, decorate: Callable[..., Any]) -> None:
        step, halve = decorate(model.step), decorate(lambda: model.weight.assign(model.weight * 0.5))
        for _ in range(3):
            step(X, Y)
            halve()

    train_alike(run)


def state_is_written_by_a_raw_op() -> None:
    def run(model: Regression, decorate: Callable[..., Any]) -> None:
        step = decorate(model.step)
        for _ in range(3):
            step(X, Y)
            tf.raw_ops.AssignVariableOp(resource=model.weight.handle, value=model.weight * 0.5)

    train_alike(run)


def arguments_are_taken_in_the_order_of_declaration() -> None:
    def run(model: Regression, decorate: Callable[..., Any]) -> None:
        def anchored(x: tf.Tensor, y: tf.Tensor, anchor: tf.Tensor) -> tf.Tensor:
            loss = model.step(x, y)
            model.weight.assign(0.9 * model.weight + 0.1 * tf.reduce_mean(anchor, 0))
            return loss

        for _ in range(3):
            decorate(anchored)(x=X, y=Y, anchor=np.ones([4, 3]))

    train_alike(run)


def a_sum_counts_a_term_without_examples_once() -> None:
    def run(model: Regression, decorate: Callable[..., Any]) -> None:
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            model.step(x, y, rate=0.01)
            with tf.GradientTape() as tape:
                decay = 0.5 * tf.reduce_sum(model.weight**2)
            model.weight.assign_sub(0.1 * tape.gradient(decay, model.weight))

        for _ in range(3):
            decorate(step)(X, Y)

    train_alike(run, lambda errors, weight: tf.reduce_sum(errors**2), loss_reduction="sum")


def constants_that_are_equal_and_differ_are_other_programs() -> None:
    with AutoDist() as autodist:
        step = autodist.function(lambda x, sign: tf.math.atan2(sign, -1.0) + 0.0 * tf.reduce_sum(x))
        positive, negative = (float(step(np.ones(2, np.float32), sign)) for sign in (0.0, -0.0))
    assert positive > 0 > negative


def a_failed_first_call_decides_nothing() -> None:
    model = Regression()
    with AutoDist() as autodist:
        step = autodist.function(lambda x, y: tf.reduce_mean(tf.linalg.matvec(x, model.weight) - y))
        with pytest.raises(CaptureError, match=r"x \(6, 3\), y \(4,\).*same number of examples"):
            step(X, Y[:4])
        assert_close(step(X, Y).numpy(), np.mean(X @ model.weight.numpy() - Y), "result")


def named_arguments_are_the_batch() -> None:
    model = Regression()
    with AutoDist() as autodist:
        step = autodist.function(batched=["x", "y"])(lambda x, y, x_mean: (model.step(x, y), x_mean * 1.0))
        _, same = step(X, Y, np.ones(6))
        assert same.shape == [6]
        with pytest.raises(CaptureError, match=r"received images, and its array arguments are x, y"):
            autodist.function(batched=["images"])(lambda x, y: x)(X, Y)


def a_method_ends_with_its_autodist() -> None:
    autodist = AutoDist()

    class Trainer(Regression):
        train = autodist.function(Regression.step)

    trainer = Trainer()
    trainer.train(X, Y)
    autodist.close()
    with pytest.raises(AutoDistError, match="closed; make a new one"):
        trainer.train(X, Y)


def results_that_cannot_be_put_together_are_refused() -> None:
    model = Regression()
    with AutoDist() as autodist:
        step = autodist.function(lambda x, y: (model.step(x, y), tf.numpy_function(np.transpose, [x], tf.float64)))
        with pytest.raises(CaptureError, match=r"has the shape <unknown> and differs between replicas"):
            step(X, Y)


def tables_written_from_examples_are_refused() -> None:
    model = Regression()
    with AutoDist() as autodist:
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, 0.0)

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
            table.insert(ids, y)
            return model.step(x, y)

        with pytest.raises(CaptureError, match=r"LookupTableInsertV2\) writes a table or queue"):
            step(X, Y, np.arange(6))


def results_of_other_types_come_whole() -> None:
    model = Regression()
    with AutoDist() as autodist:
        step = autodist.function(
            lambda x, y: (
                model.step(x, y),
                y > 0.5,
                tf.cast(y * 9, tf.uint8),
                y,
                tf.transpose(x),
                tf.unique(y // 0.4)[0],
            )
        )
        _, above, small, same, turned, distinct = step(X, Y)
    np.testing.assert_array_equal(above, Y > 0.5)
    np.testing.assert_array_equal(small, (Y * 9).astype(np.uint8))
    np.testing.assert_array_equal(same, Y)
    np.testing.assert_array_equal(turned, X.T)
    np.testing.assert_array_equal(distinct, [0.0, 1.0, 2.0])


def results_of_types_that_collectives_do_not_carry_are_of_all_examples() -> None:
    total, kept = tf.Variable(tf.zeros([2], tf.complex128)), tf.Variable(tf.constant(3, tf.uint64))

    def step(model: Regression, x: tf.Tensor, y: tf.Tensor) -> Any:
        model.step(x, y)
        number, wide = tf.complex(y, -2.0 * y), tf.cast(y * 9, tf.uint64)
        total.assign_add(tf.stack([tf.reduce_sum(number), tf.reduce_mean(number)]))
        kept.assign_add(tf.reduce_sum(wide) * np.uint64(2**60))
        return {
            "a sum": tf.reduce_sum(number),
            "a mean": tf.reduce_mean(tf.cast(number, tf.complex64), axis=0) * 2j,
            "computed of means": tf.exp(tf.signal.fft(tf.reduce_mean(tf.complex(x, x), axis=0))),
            "above 2**63": tf.reduce_sum(wide) * np.uint64(2**59 + 1),
            "so far": tf.cumsum(wide)[-1],
            "16 bits": tf.reduce_sum(tf.cast(wide, tf.uint16)),
            "32 bits": tf.reduce_max(tf.cast(wide, tf.uint32)),
            "a text": tf.strings.reduce_join(tf.strings.as_string(wide), separator=","),
            "quantized": tf.quantization.quantize(tf.cast(y, tf.float32), 0.0, 1.0, tf.quint8)[0],
            "state": (total.read_value(), kept.read_value()),
        }

    expected = tf.function(step)(Regression(), X, Y)
    total.assign(tf.zeros_like(total))
    kept.assign(3)
    with AutoDist() as autodist:
        model = Regression()
        results = autodist.function(lambda x, y: step(model, x, y))(X, Y)
    for name, wanted in expected.items():
        for got, one in zip(tf.nest.flatten(results[name]), tf.nest.flatten(wanted), strict=True):
            assert got.dtype == one.dtype
            if one.dtype.is_complex:
                np.testing.assert_allclose(got, one, rtol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(got, one, err_msg=name)


def what_one_replica_has_is_no_result() -> None:
    model = Regression()
    with AutoDist() as autodist:
        step = autodist.function(
            lambda x, y: (model.step(x, y), tf.ensure_shape(tf.numpy_function(np.argmax, [y], tf.int64), []))
        )
        with pytest.raises(CaptureError, match=r"of type int64, differs between replicas, and is neither rows"):
            step(X, Y)


def rows_of_every_type_come_in_order() -> None:
    model = Regression()
    texts = np.array(
        [[b"a", b""], ["ö".encode(), b"\0\xff"], [b"", b""], [b"xyz", b"a b"], [b"5", b"5"], [b"", b"end"]]
    )
    texts = texts.astype(object)
    with AutoDist() as autodist:

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor, texts: tf.Tensor) -> Any:
            model.step(x, y)
            big = tf.cast(y * 9, tf.uint64) + tf.constant(2**63, tf.uint64)
            halved = tf.numpy_function(lambda rows: rows / 2.0, [y], y.dtype)
            rows = tf.strings.join([texts, texts]), tf.complex(y, -y), big, y > 0.5, tf.ensure_shape(halved, [None])
            none = [tf.boolean_mask(row, y > 9.0) for row in rows]
            return rows, none, tf.cast(y, tf.bfloat16), texts[:, 1]

        (doubled, wide, big, above, halved), none, small, second = step(X, Y, texts)
        assert [len(row) for row in none] == [0] * 5
        np.testing.assert_array_equal(small, tf.cast(Y, tf.bfloat16))
        np.testing.assert_array_equal(second, texts[:, 1])
    np.testing.assert_array_equal(doubled.numpy(), texts + texts)
    np.testing.assert_array_equal(wide, Y - 1j * Y)
    np.testing.assert_array_equal(halved, Y / 2.0)
    np.testing.assert_array_equal(big, (Y * 9).astype(np.uint64) + np.uint64(2**63))
    np.testing.assert_array_equal(above, Y > 0.5)


def an_iterator_is_shared_out_and_ends_everywhere() -> None:
    def run(model: Regression, decorate: Callable[..., Any]) -> None:
        def step(examples: Any) -> tf.Tensor:
            return model.step(*next(examples))

        examples = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat(3))
        decorated = decorate(step)
        with pytest.raises(tf.errors.OutOfRangeError):
            for _ in itertools.repeat(None):
                decorated(examples)

    train_alike(run)


def an_iterator_that_ends_early_on_the_chief_ends_the_step_everywhere() -> None:
    an_iterator_that_ends_early_on_one_worker_ends_the_step_everywhere(chief_first=True)


def an_iterator_that_ends_early_on_one_worker_ends_the_step_everywhere(*, chief_first: bool = False) -> None:
    model = Regression()
    with AutoDist(batch="global" if chief_first else "local") as autodist:
        batches = 2 if (autodist.rank == 0) == chief_first else 3
        examples = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat(3).take(batches))
        step = autodist.function(lambda examples: model.step(*next(examples)))
        done = 0
        with pytest.raises(tf.errors.OutOfRangeError) as ended:
            for _ in itertools.repeat(None):
                step(examples)
                done += 1
        assert done == (3 if autodist.num_workers == 1 and not chief_first else 2)
        if autodist.num_workers == 2:
            assert f"End of sequence on workers {0 if chief_first else 1}" in str(ended.value)
        examples = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))
        step(examples)  # The next epoch.


def what_an_iterator_gives_may_have_several_numbers_of_rows() -> None:
    sizes = [(3, 9), (4, 6), (1, 5), (5, 2), (6, 6), (0, 4), (6, 18)]  # Some have no common divisor, one has no rows.

    def parts() -> Any:
        for number, (labelled, others) in enumerate(sizes):
            yield X[:labelled], Y[:labelled], np.linspace(-1, number, 3 * others).reshape(others, 3)

    def train(model: Regression, decorate: Callable[..., Any]) -> list[Any]:
        specs = [tf.TensorSpec(shape, tf.float64) for shape in ([None, 3], [None], [None, 3])]

        def step(data: Any) -> Any:
            x, y, others = next(data)
            with tf.GradientTape() as tape:
                error = tf.math.divide_no_nan(
                    tf.reduce_sum((tf.linalg.matvec(x, model.weight) - y) ** 2), tf.cast(tf.shape(y)[0], tf.float64)
                )
                loss = error + 0.1 * tf.reduce_mean(tf.linalg.matvec(others, model.weight) ** 2)
            model.weight.assign_sub(0.1 * tape.gradient(loss, model.weight))
            return loss, tf.reduce_sum(others), tf.shape(others)[0], others, y

        data, decorated = iter(tf.data.Dataset.from_generator(parts, output_signature=tuple(specs))), decorate(step)
        return [[decorated(data), model.weight.numpy()] for _ in sizes]

    expected = train(Regression(), tf.function)
    with AutoDist() as autodist:
        values = train(Regression(), autodist.function)
    for number, (got, wanted) in enumerate(zip(tf.nest.flatten(values), tf.nest.flatten(expected), strict=True)):
        assert_close(got, wanted, f"value {number}")


def named_arguments_may_be_of_several_batches() -> None:
    """Sizes that no longer agree, then such as happen to; a loss over all rows, in their order."""
    sizes = [(6, 3), (4, 4), (5, 2), (2, 1), (6, 0), (4, 6)]

    def run(model: Regression, decorate: Callable[..., Any]) -> None:
        def step(others: Any, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                rows = tf.linalg.matvec(tf.concat([others, x], 0), model.weight)
                contrast = tf.reduce_mean(tf.nn.log_softmax(rows[:, None] * rows, axis=0) * 0.1 * rows)
                error = tf.math.divide_no_nan(
                    tf.reduce_sum((tf.linalg.matvec(x, model.weight) - y) ** 2), tf.cast(tf.shape(x)[0], tf.float64)
                )
                loss = error - contrast
            model.weight.assign_sub(0.1 * tape.gradient(loss, model.weight))
            return rows, tf.shape(x)[0], loss

        decorated = decorate(step)
        for few, many in sizes:
            values.append(decorated(X[::-1][:few] * 0.7, X[:many], Y[:many]))

    values: list[Any] = []
    train_alike(run, batched=["others", "x", "y"])
    expected, got = values[: len(sizes)], values[len(sizes) :]
    for number, (own, wanted) in enumerate(zip(tf.nest.flatten(got), tf.nest.flatten(expected), strict=True)):
        assert_close(own, wanted, f"value {number}")


def a_row_for_all_may_be_beside_several_batches() -> None:
    """Its gradient is a sum over the rows that it is paired with."""

    def run(model: Regression, decorate: Callable[..., Any]) -> None:
        def step(row: Any, x: Any) -> Any:
            with tf.GradientTape() as tape:
                difference = tf.tanh(row * model.weight) - x
                loss = tf.reduce_sum(tf.sqrt(tf.reduce_mean(difference**2, 0) + 1.0))
            model.weight.assign_sub(0.1 * tape.gradient(loss, model.weight))
            return loss

        decorated = decorate(step)
        for rows, many in ((1, 6), (6, 6), (1, 1), (1, 5)):
            decorated(X[:rows] * 0.7, X[:many])

    train_alike(run, batched=["row", "x"])


def rows_of_other_numbers_are_not_paired() -> None:
    """On one device 4 rows cannot be added to 2, so one row is not given to a replica that has two of the others."""
    model = Regression()
    with AutoDist() as autodist:
        step = autodist.function(model.step, batched=["x", "y"])
        with pytest.raises((tf.errors.InvalidArgumentError, AutoDistError), match="Incompatible shapes") as caught:
            step(X[:4], Y[:2])
        if autodist.num_workers == 1:
            assert "was made in" in str(getattr(caught.value, "__notes__", ""))


def parts_of_other_proportions_on_each_worker_are_refused() -> None:
    model = Regression(lambda errors, weight: tf.reduce_mean(errors**2))
    with AutoDist(batch="local") as autodist:
        labelled, others = (2, 4) if autodist.rank == 0 else (3, 4)
        specs = tuple(tf.TensorSpec(shape, tf.float64) for shape in ([None, 3], [None], [None, 3]))
        parts = tf.data.Dataset.from_tensors((X[:labelled], Y[:labelled], X[:others])).repeat()
        data = iter(tf.data.Dataset.from_generator(lambda: parts, output_signature=specs))

        def read(data: Any) -> Any:
            x, y, others = next(data)
            return model.step(x, y), tf.reduce_mean(others)

        step = autodist.function(read)
        if autodist.num_workers == 1:
            step(data)
            return
        with pytest.raises(ClusterError, match=r"one share of them all.*; on workers 0, 1 the shares differ"):
            step(data)


def iterators_that_differ_between_workers_are_found() -> None:
    model = Regression()
    before = model.weight.numpy()
    with AutoDist() as autodist:
        names = tf.data.Dataset.from_tensor_slices([f"{autodist.rank} {row}" for row in range(len(X))])
        examples = iter(tf.data.Dataset.zip((tf.data.Dataset.from_tensor_slices((X, Y)), names)).batch(4))

        def read() -> Any:
            (x, y), name = next(examples)
            return model.step(x, y) + tf.cast(tf.reduce_max(tf.strings.length(name)), tf.float64)

        step = autodist.function(read)
        if autodist.num_workers == 1:
            step()
            return
        with pytest.raises(ClusterError, match=r"what the iterator gives on workers 1.* differs from the chief's"):
            step()
    np.testing.assert_array_equal(model.weight, before)


def an_iterator_without_an_unknown_batch_dimension_is_refused() -> None:
    model = Regression()
    examples = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True))
    with AutoDist() as autodist:
        step = autodist.function(lambda: model.step(*next(examples)))
        with pytest.raises(CaptureError, match=r"static shapes \(4, 3\), \(4,\).*without drop_remainder"):
            step()


def print_and_summarize(directory: str) -> None:
    model = Regression()
    with AutoDist() as autodist:
        writer = tf.summary.create_file_writer(directory)

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            loss = model.step(x, y)
            tf.print("mean", tf.reduce_mean(y), "of", y, summarize=-1, output_stream=f"file://{directory}/printed")
            with writer.as_default(step=tf.constant(1, tf.int64)):
                tf.summary.write("mean", tf.reduce_mean(y))
            return loss

        step(X, Y)
        writer.close()


def a_loss_that_cannot_be_followed_is_warned_of_by_the_chief() -> None:
    weight = tf.Variable(np.ones(3))
    autodist = AutoDist(strict=False, batch_statistics="replica")
    with autodist, LogHandler("autodist_py.program.build") as records:

        @autodist.function
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_logsumexp(tf.linalg.matvec(x, weight))
            weight.assign_sub(tape.gradient(loss, weight))

        step(X)
        step(X)
    assert len(records) == (1 if autodist.is_chief else 0)


class LogHandler(logging.Handler):
    """The records of one logger within the context."""

    def __init__(self, name: str):
        super().__init__()
        self._logger = logging.getLogger(name)
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def __enter__(self) -> list[logging.LogRecord]:
        self._logger.addHandler(self)
        return self._records

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)


def the_chief_may_evaluate_alone() -> None:
    model = Regression()
    with AutoDist() as autodist:
        step = autodist.function(model.step)
        predict = autodist.function(lambda x: tf.linalg.matvec(x, model.weight))
        for _ in range(3):
            step(X, Y)
            if autodist.is_chief:
                np.testing.assert_allclose(predict(X), X @ model.weight.numpy())


def each_worker_by_itself_must_not_write_state_from_its_part() -> None:
    weight = tf.Variable(np.zeros(3))
    with AutoDist(batch="local") as autodist:
        step = autodist.function(lambda x: weight.assign_add(tf.reduce_mean(x, 0)))
        if autodist.num_workers == 1:
            step(X)
        else:
            with pytest.raises(CaptureError, match="depends on this worker's own part of the batch"):
                step(X)


def notes_of(step: Callable[..., Any], *arguments: np.ndarray) -> str:
    """What is said beside of a first step that fails."""
    with AutoDist(batch_statistics="replica") as autodist:
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            autodist.function(step)(*arguments)
        return "\n".join(raised.value.__notes__)


def a_failure_on_a_replicas_rows_says_what_may_have_made_it() -> None:
    x = np.ones((12, 2))
    weight = tf.Variable(np.ones((2, 3)), name="weight")

    def reshaped(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.reshape(x @ weight, [12, 3, 1])))
        weight.assign_sub(tape.gradient(loss, weight))

    said = notes_of(reshaped, x)
    assert "test_step_function.py, line " in said
    assert "loss = tf.reduce_mean(tf.square(tf.reshape(x @ weight, [12, 3, 1])))" in said
    assert "has 12 rows whatever the batch" in said
    assert "batched=" not in said

    def weighted(x: tf.Tensor, labels: tf.Tensor, of_classes: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ weight * tf.gather(of_classes, labels))
        weight.assign_sub(tape.gradient(loss, weight))

    said = notes_of(weighted, x, np.full(12, 11), np.ones((12, 1)))
    assert "tf.gather(of_classes, labels)" in said
    assert "x (12, 2), labels (12,), of_classes (12, 1), as all have the first one's number of rows" in said
    assert "autodist.function(batched=[...])" in said


def weights_after(signatures: Sequence[int], *, most: int, **options: Any) -> np.ndarray:
    """After a step for each signature, of which no more than `most` have a program at any time."""
    model = Regression()
    with settings(kept_programs=most), programs_alive() as alive, AutoDist(**options) as autodist:
        step = autodist.function(lambda x, y: model.step(tf.reduce_mean(x, 1), y))
        for number, columns in enumerate(signatures):
            x = X[:, None] * np.linspace(0.5, 1 + 0.1 * number, columns)[:, None]
            step(x, Y)
            gc.collect()
            assert 0 < len(alive) <= most
    return model.weight.numpy()


def a_program_that_was_let_go_is_compiled_again_and_goes_on() -> None:
    signatures = (1, 2, 3, 1, 1, 2, 3)
    for builder in ("AllReduce", "PS", "AllReduce(compressor='PowerSGDCompressor')", "PartitionedPS"):
        options = {"strategy_builder": builder}
        few, all_ = (weights_after(signatures, most=most, **options) for most in (2, 9))
        assert_close(few, all_, builder)


def a_program_that_draws_numbers_by_itself_is_not_let_go() -> None:
    model = Regression()

    def train(x: tf.Tensor) -> tf.Tensor:
        model.step(x[:, :3], x[:, 0])
        return draw(x)

    def draw(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x) * 0.0 + tf.random.uniform([], dtype=tf.float64)

    def drawn(step: Callable[..., Any], most: int) -> list[float]:
        tf.random.set_seed(7)
        with settings(kept_programs=most), AutoDist() as autodist:
            run = autodist.function(step)
            return [float(run(np.ones([4, columns]))) for columns in (3, 4, 3, 4, 3)]

    for step in (train, draw):
        few = drawn(step, 1)
        assert few == drawn(step, 9)
        assert len(set(few[::2])) == 3


def workers_that_step_by_themselves_let_go_of_nothing() -> None:
    model = Regression()
    with settings(kept_programs=1), AutoDist(strategy_builder="PS(sync=False)") as autodist:
        step = autodist.function(lambda x, y: model.step(tf.reduce_mean(x, 1), y))
        for columns in (1, 2, *((1, 2) if autodist.is_chief else (2, 1))):
            step(X[:, None] * np.ones([columns, 1]), Y)


def an_object_that_one_worker_has_keeps_the_programs_of_all() -> None:
    model = Regression()
    with settings(kept_programs=1), programs_alive() as alive, AutoDist() as autodist:
        step = autodist.function(lambda x, y, writer: model.step(tf.reduce_mean(x, 1), y))
        writer = Regression() if autodist.is_chief else None
        for columns in (1, 2, 1):
            step(X[:, None] * np.ones([columns, 1]), Y, writer)
        gc.collect()
        assert len(alive) == 2


def a_step_that_is_another_when_it_is_traced_again_is_refused() -> None:
    for what, change in (("its graph", "rate"), ("the tensor '.*' that it closes over", "tensor"), ("variable", "w")):
        uses: dict[str, Any] = {"rate": 0.1, "tensor": tf.fill([9999], 0.1), "w": Regression()}

        def step(x: tf.Tensor, y: tf.Tensor, uses: dict[str, Any]) -> tf.Tensor:
            return uses["w"].step(tf.reduce_mean(x, 1), y, rate=uses["rate"]) * tf.cast(uses["tensor"][0], tf.float64)

        with settings(kept_programs=1), AutoDist() as autodist:
            run = autodist.function(functools.partial(step, uses=uses))
            for columns in (1, 2, 1):
                run(X[:, None] * np.ones([columns, 1]), Y)
            uses[change] = {"rate": 0.2, "tensor": tf.fill([9999], 0.2), "w": Regression()}[change]
            run(X[:, None] * np.ones([3, 1]), Y)
            with pytest.raises(CaptureError, match=f"let go, and {what} .*AUTODIST_KEPT_PROGRAMS, now 1"):
                run(X[:, None] * np.ones([2, 1]), Y)


def weights_of_as_many_classes_as_examples_are_no_batch() -> None:
    labels, of_classes = np.array([0, 2, 1, 1, 0, 2]), np.linspace(1, 3, 6)

    def run(model: Regression, decorate: Callable[..., Any]) -> None:
        def weighted(x: tf.Tensor, labels: tf.Tensor, of_classes: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                errors = tf.linalg.matvec(x, model.weight) - 1.0
                loss = tf.reduce_mean(errors**2 * tf.gather(of_classes, tf.cast(labels, tf.int32)))
            model.weight.assign_sub(0.1 * tape.gradient(loss, model.weight))

        step = decorate(weighted)
        if decorate is not tf.function:
            with pytest.raises(CaptureError, match=r"looks up elements of 'of_classes' by those of 'labels' .*gather"):
                step(X, labels, of_classes)
            with pytest.raises(CaptureError, match=r"autodist.function\(batched=\['x', 'labels'\]\)"):
                step(X, labels, of_classes)
            step = decorate(weighted, batched=["x", "labels"])
        for _ in range(3):
            step(X, labels, of_classes)

    train_alike(run, batch_statistics="replica")


def an_operation_is_run_and_returned_as_nothing() -> None:
    """As a session returns it; a plain tf.function cannot return one."""

    def step(model: Regression, x: tf.Tensor) -> tuple[tf.Tensor, tf.Operation]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.linalg.matvec(x, model.weight) ** 2)
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        return loss, optimizer.apply_gradients([(tape.gradient(loss, model.weight), model.weight)])

    def run(model: Regression, decorate: Callable[..., Any]) -> None:
        is_plain = decorate is tf.function
        running = decorate(lambda x: step(model, x)[0]) if is_plain else decorate(lambda x: step(model, x))
        for _ in range(3):
            result = running(X)
            assert is_plain or result[1] is None

    train_alike(run)


CASES = [
    a_failure_on_a_replicas_rows_says_what_may_have_made_it,
    weights_of_as_many_classes_as_examples_are_no_batch,
    an_operation_is_run_and_returned_as_nothing,
    state_is_written_by_a_step_without_gradients,
    state_is_written_by_a_raw_op,
    arguments_are_taken_in_the_order_of_declaration,
    a_sum_counts_a_term_without_examples_once,
    constants_that_are_equal_and_differ_are_other_programs,
    a_failed_first_call_decides_nothing,
    named_arguments_are_the_batch,
    a_method_ends_with_its_autodist,
    results_that_cannot_be_put_together_are_refused,
    tables_written_from_examples_are_refused,
    results_of_other_types_come_whole,
    results_of_types_that_collectives_do_not_carry_are_of_all_examples,
    what_one_replica_has_is_no_result,
    rows_of_every_type_come_in_order,
    an_iterator_is_shared_out_and_ends_everywhere,
    an_iterator_that_ends_early_on_one_worker_ends_the_step_everywhere,
    an_iterator_that_ends_early_on_the_chief_ends_the_step_everywhere,
    what_an_iterator_gives_may_have_several_numbers_of_rows,
    named_arguments_may_be_of_several_batches,
    a_row_for_all_may_be_beside_several_batches,
    rows_of_other_numbers_are_not_paired,
    parts_of_other_proportions_on_each_worker_are_refused,
    iterators_that_differ_between_workers_are_found,
    an_iterator_without_an_unknown_batch_dimension_is_refused,
    a_loss_that_cannot_be_followed_is_warned_of_by_the_chief,
    a_program_that_was_let_go_is_compiled_again_and_goes_on,
    a_program_that_draws_numbers_by_itself_is_not_let_go,
    workers_that_step_by_themselves_let_go_of_nothing,
    an_object_that_one_worker_has_keeps_the_programs_of_all,
    a_step_that_is_another_when_it_is_traced_again_is_refused,
    the_chief_may_evaluate_alone,
    each_worker_by_itself_must_not_write_state_from_its_part,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.replace("_", "-"))
def test_at_its_edges_a_step_does_what_one_device_does_or_says_why_not(
    cluster: Cluster, case: Callable[[], None]
) -> None:
    cluster.run(case)


def test_what_is_printed_is_printed_once_and_whole(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(print_and_summarize, directory=str(tmp_path))
    mean, _, rows = (tmp_path / "printed").read_text().removeprefix("mean ").partition(" of ")
    np.testing.assert_allclose(float(mean), np.mean(Y), rtol=1e-5)
    np.testing.assert_allclose(np.fromstring(rows.strip("[]\n"), sep=" "), Y, atol=1e-5)
    events = [event for file in tmp_path.glob("events*") for event in tf.compat.v1.train.summary_iterator(str(file))]
    (event,) = (event for event in events if event.HasField("summary"))
    np.testing.assert_allclose(tf.make_ndarray(event.summary.value[0].tensor), np.mean(Y), rtol=1e-6)
