"""What is known of entries of rows holds for every value: of parts of a batch, against the whole one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.capture.batch import statistics
from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.batch.layouts.solver import solve
from autodist_py.capture.inexact import inexact
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.ir.names import op_of
from autodist_py.testing import assert_equivalent

COLUMNS, TABLE = 4, np.random.default_rng(2).normal(size=(9, 3))
TAIL = np.array([1, 5], np.int64)

Case = Callable[[tf.Tensor], tf.Tensor]


def sparse(ids: tf.Tensor) -> tf.SparseTensor:
    return tf.sparse.from_dense(ids)


def weighted(ids: tf.Tensor) -> tf.Tensor:
    entries = sparse(ids)
    weights = entries.with_values(1.0 / tf.sqrt(tf.cast(entries.values, tf.float64)))
    return tf.nn.embedding_lookup_sparse(TABLE, entries, weights, combiner="mean")


def chosen_twice(ids: tf.Tensor) -> tf.Tensor:
    some = tf.boolean_mask(ids, ids[:, 0] > 0)
    odd = tf.where(some[:, 1] % 2 == 1)[:, 0]
    kept, firsts = tf.gather(some, odd), tf.gather(some[:, 0], odd)
    return tf.cast(tf.reduce_sum(kept * firsts[:, None]), tf.float64)


def chosen_keys_taken(ids: tf.Tensor) -> tf.Tensor:
    firsts = tf.boolean_mask(ids[:, 0], ids[:, 1] > 0)
    distinct, keys = tf.unique(firsts)
    some = tf.reshape(tf.where(firsts > 2), [-1])
    return tf.reduce_sum(tf.gather(tf.tanh(tf.gather(TABLE, distinct)) * 2.0, tf.gather(keys, some)))


def distinct(ids: tf.Tensor) -> tf.Tensor:
    elements, keys = tf.unique(ids[:, 0])
    return tf.gather(tf.gather(TABLE, elements) ** 2, keys)


def places_and_columns(ids: tf.Tensor) -> tf.Tensor:
    places = tf.where(ids > 0)
    return tf.reduce_sum(tf.gather(ids, places[:, 0]) * places[:, 1:2])


def with_a_tail(ids: tf.Tensor) -> tf.Tensor:
    """Rows of the batch's ids and of constants, looked up together, as `tf.nn.nce_loss` does."""
    rows, size = tf.gather(TABLE, tf.concat([ids[:, 0], TAIL], axis=0)), tf.shape(ids)[0]
    own, others = tf.slice(rows, [0, 0], [size, 3]), tf.slice(rows, [size, 0], [-1, -1])
    return tf.matmul(own, others, transpose_b=True)


CASES: dict[str, Case] = {
    "mean": lambda ids: tf.nn.embedding_lookup_sparse(TABLE, sparse(ids), None),
    "sum": lambda ids: tf.nn.embedding_lookup_sparse(TABLE, sparse(ids), None, combiner="sum"),
    "by the root of their number": lambda ids: tf.nn.embedding_lookup_sparse(
        TABLE, sparse(ids), None, combiner="sqrtn"
    ),
    "weighted": weighted,
    "safe": lambda ids: tf.nn.safe_embedding_lookup_sparse(TABLE, sparse(ids)),
    "safe, sum": lambda ids: tf.nn.safe_embedding_lookup_sparse(TABLE, sparse(ids), combiner="sum"),
    "safe, with a default": lambda ids: tf.nn.safe_embedding_lookup_sparse(TABLE, sparse(ids), default_id=2),
    "safe, TF1": lambda ids: tf.compat.v1.nn.safe_embedding_lookup_sparse(tf.constant(TABLE), sparse(ids)),
    "dense again": lambda ids: tf.sparse.to_dense(sparse(ids)),
    "a product": lambda ids: tf.sparse.sparse_dense_matmul(tf.cast(sparse(ids), tf.float64), TABLE[:COLUMNS]),
    "distinct elements": distinct,
    "places and columns": places_and_columns,
    "with a tail": with_a_tail,
    "chosen twice": chosen_twice,
    "keys that are taken": chosen_keys_taken,
    "the number of those chosen": lambda ids: tf.shape(tf.boolean_mask(ids, ids[:, 0] > 0))[0],
}


def batch(rng: np.random.Generator, size: int) -> np.ndarray:
    """Ids, some 0; the last example of each pair has one."""
    ids = rng.integers(1, 9, size=(size, COLUMNS)) * (rng.uniform(size=(size, COLUMNS)) > 0.5)
    ids[1::2, 0] = 3
    return ids


def combined(case: Case, monkeypatch: pytest.MonkeyPatch) -> Solution:
    """What is known of a loss that is made of the case."""
    found: list[Solution] = []

    def noted(*arguments: Any) -> Solution:
        found.append(solve(*arguments))
        return found[-1]

    monkeypatch.setattr(statistics, "solve", noted)
    weight = tf.Variable(1.0, dtype=tf.float64, name="weight")

    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(case(ids), tf.float64)) * weight
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    with AutoDist(batch_statistics="replica") as autodist:
        item = autodist.function(step).captured(batch(np.random.default_rng(0), 6)).item
    assert not list(inexact(item))
    return found[-1]


class Values:
    """The values of some tensors of a graph, given the ids."""

    def __init__(self, solution: Solution, ids: np.ndarray):
        regions, found = solution.regions, solution.table.found
        graph = regions.graph
        tensors = [
            f"{name}:{index}"
            for name, layouts in found.items()
            if name in regions.losses
            if name not in regions.trained and graph.nodes[name].op not in ("VarHandleOp", "NoOp")
            for index in range(len(layouts))
        ]
        with tf.Graph().as_default() as own, tf.compat.v1.Session(graph=own) as session:
            tf.graph_util.import_graph_def(graph.graph_def(), name="")
            self._all = dict(zip(tensors, session.run(tensors, {"ids:0": ids}), strict=True))

    def __iter__(self) -> Any:
        return iter(self._all)

    def __getitem__(self, tensor: str) -> Any:
        return self._all[tensor if ":" in tensor else f"{tensor}:0"]


def joined(solution: Solution, tensor: str, parts: list[Values]) -> Any:
    """What the tensor is for the whole batch, as its layout says; None: it says nothing."""
    own = [part[tensor] for part in parts]
    op = op_of(tensor)
    layouts = solution.table.found[op]
    match layouts[int(tensor.rpartition(":")[2]) if len(layouts) > 1 else 0]:
        case BatchLayout.SHARDED | BatchLayout.SELECTED:
            return np.concatenate(own)
        case BatchLayout.PARTIAL_SUM | BatchLayout.COUNT:
            return sum(own)
        case BatchLayout.REPLICATED:
            assert all(np.array_equal(one, own[0]) for one in own)
            return own[0]
        case BatchLayout.SHAPE | BatchLayout.CHOSEN_SHAPE:
            assert all(np.array_equal(one[1:], own[0][1:]) for one in own)
            return np.concatenate([sum(one[:1] for one in own), own[0][1:]])
        case BatchLayout.SELECTED_INDICES:
            source = solution.choices.places[op]
            is_shape = solution.table.layout(source) is BatchLayout.SHAPE
            sizes = [part[source][0] if is_shape else len(part[source]) for part in parts]
            for before, places in zip(np.cumsum([0, *sizes]), own, strict=False):
                places.T[0 if places.ndim > 1 else slice(None)] += before
            return np.concatenate(own)
        case BatchLayout.TAILED:
            return np.concatenate([*(one[: -len(TAIL)] for one in own), own[0][-len(TAIL) :]])
        case BatchLayout.UNIQUE:
            return np.array(list(dict.fromkeys(np.concatenate(own))), own[0].dtype)
        case BatchLayout.EACH:
            elements = np.concatenate([part[solution.choices.sets[op]] for part in parts])
            _, first = np.unique(elements, return_index=True)
            return np.concatenate(own)[np.sort(first)]
        case BatchLayout.KEYS | BatchLayout.CHOSEN_KEYS:
            sets = [part[solution.choices.sets[op]] for part in parts]
            order = list(dict.fromkeys(np.concatenate(sets)))
            of_each = np.concatenate([one[keys] for one, keys in zip(sets, own, strict=True)])
            return np.array([order.index(one) for one in of_each], own[0].dtype)
    return None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_is_known_of_entries_holds_for_every_value(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    solution = combined(case, monkeypatch)
    rng = np.random.default_rng(8)
    for _ in range(5):
        sizes = 2 * rng.integers(1, 4, size=3)
        ids = batch(rng, sum(sizes))
        parts = [Values(solution, part) for part in np.split(ids, np.cumsum(sizes)[:-1])]
        whole = Values(solution, ids)
        for tensor in whole:
            if (expected := joined(solution, tensor, parts)) is not None:
                np.testing.assert_allclose(whole[tensor], expected, err_msg=tensor)


def of_other_rows(ids: tf.Tensor) -> tf.Tensor:
    """Places among chosen rows, by which rows of the batch are taken."""
    some = tf.boolean_mask(ids, ids[:, 0] > 0)
    return tf.gather(ids, tf.where(some[:, 1] > 2)[:, 0])


def by_a_shape_of_other_rows(ids: tf.Tensor) -> tf.Tensor:
    places = tf.where(ids > 0)
    shape = tf.cast(tf.stack([2 * tf.shape(ids)[0], COLUMNS]), tf.int64)
    return tf.sparse.to_dense(tf.SparseTensor(places, tf.gather_nd(ids, places), shape))


def of_other_keys(ids: tf.Tensor) -> tf.Tensor:
    """What is made of some elements, taken by where others are."""
    return tf.gather(tf.gather(TABLE, tf.unique(ids[:, 0]).y), tf.unique(ids[:, 1]).idx % 2)


def of_another_number(ids: tf.Tensor) -> tf.Tensor:
    rows = tf.gather(TABLE, tf.concat([ids[:, 0], TAIL], axis=0))
    return tf.slice(rows, [0, 0], [tf.shape(tf.reshape(ids, [-1, 2]))[0], 3])


APART = [of_another_number, of_other_rows, by_a_shape_of_other_rows, of_other_keys]


@pytest.mark.parametrize("case", APART, ids=lambda case: case.__name__)
def test_what_does_not_belong_together_is_not_known(case: Case) -> None:
    weight = tf.Variable(1.0, dtype=tf.float64, name="weight")

    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.sin(tf.cast(case(ids), tf.float64) * weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    with AutoDist(batch_statistics="replica") as autodist:
        item = autodist.function(step).captured(batch(np.random.default_rng(0), 6)).item
    assert item.gradients[0].reduction == "" and item.local_ops


def test_a_row_that_is_missing_is_an_error() -> None:
    table = tf.Variable(TABLE, name="table")

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.embedding_lookup_sparse(table, sparse(ids), None) ** 2)
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    ids = np.array([[1, 2], [3, 0], [0, 0], [0, 0], [0, 5], [4, 1]])
    assert_equivalent(step, [(ids[[0, 2, 1, 3, 4, 5]],)] * 3, batch_statistics="replica")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"test_entries.py, line .*safe_embedding_lookup_sparse"):
        assert_equivalent(step, [(ids,)] * 3, batch_statistics="replica")
