"""sparse as dense: which sparse gradients travel as dense ones, and that their updates are what they are with rows."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist_py.kernel.collectives.sparse_as_dense import expected_rows, is_fewer_bytes
from autodist_py.kernel.events import GatherRows
from autodist_py.proto.compressors import HorovodCompressor, NoneCompressor
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, Input, Variable
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import capture_steps, kernel_programs
from tests.support.densified import (
    FOR_ALL_ROWS,
    ROWS,
    WIDTH,
    executed,
    least_examples,
    scaled,
    stepping,
    strategy_of,
    travels_dense,
)


def lazy_momentum(table, rows, rate):
    values = 0.9 * tf.gather(table, rows.indices) + rate * rows.values
    table.scatter_update(tf.IndexedSlices(values, rows.indices))


def squared(table, rows, rate):
    table.scatter_sub(tf.IndexedSlices(rate * rows.values**2, rows.indices))


def clipped(table, rows, rate):
    scaled(table, tf.clip_by_norm(rows, 1.0), rate)


# -- Where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [scaled, lazy_momentum, squared, clipped])
def test_a_table_is_densified_only_if_its_update_adds_rows_up(update):
    item = stepping(update)[0].item
    assert travels_dense(item) == (update is scaled)
    if update is scaled:
        assert travels_dense(item, examples=1, sparse_as_dense=True)
        return
    with pytest.raises(
        StrategyError, match=r"variable 'table': sparse_as_dense=True sends .* Leave sparse_as_dense out"
    ):
        travels_dense(item, sparse_as_dense=True)


def test_rows_that_are_also_returned_travel_as_rows():
    table = tf.Variable(np.zeros([ROWS, WIDTH]), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, ids))
        rows = tape.gradient(loss, table)
        scaled(table, rows, 0.1)
        return rows.values

    assert not travels_dense(capture_steps.capture(step, tf.zeros([1], tf.int64)).item)


@pytest.mark.parametrize(
    ("wanted", "parameters"),
    [
        (True, {}),
        (False, {"examples": 2}),
        (False, {"examples": 0}),
        (False, {"examples": None}),
        (True, {"examples": None, "sparse_as_dense": True}),
        (False, {"sparse_as_dense": False}),
        (False, {"where": (2,)}),  # Nothing is sent.
        (True, {"where": (2,), "sparse_as_dense": True}),
        (False, {"compressor": "HorovodCompressorEF"}),  # What it keeps would depend on the first batch.
        (True, {"compressor": "HorovodCompressor"}),
    ],
)
def test_without_a_word_it_is_where_that_is_fewer_bytes_and_else_as_it_is_said(wanted, parameters):
    assert travels_dense(stepping(scaled)[0].item, **parameters) == wanted


def test_what_horovod_does_not_carry_stays_rows_unless_they_are_to_travel_as_dense():
    item = stepping(scaled, dtype=tf.bfloat16, dense=False)[0].item
    assert travels_dense(item)
    assert not travels_dense(item, spec="HOROVOD")
    with pytest.raises(StrategyError, match="variable 'table': its gradient travels as bfloat16, which Horovod does"):
        travels_dense(item, spec="HOROVOD", sparse_as_dense=True)


def test_what_would_be_too_many_pieces_stays_rows_unless_they_are_to_travel_as_dense():
    item = stepping(scaled, dense=False, width=4096 // ROWS + 1)[0].item
    assert travels_dense(item, examples=10_000, bytes_per_pack=16)
    assert not travels_dense(item, examples=10_000, bytes_per_pack=1)
    with pytest.raises(StrategyError, match="variable 'table': bytes_per_pack=1 is too small for its gradient"):
        travels_dense(item, bytes_per_pack=1, sparse_as_dense=True)


@pytest.mark.parametrize("where", [(1, 1), (3, 1), (1, 1, 1)])
@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.parametrize("examples", [1, 10, 20, 30, 40, 100])
def test_all_workers_decide_alike(where, batch, examples):
    item = stepping(scaled)[0].item
    decisions = {travels_dense(item, where, examples=examples, batch=batch, worker=one) for one in range(len(where))}
    assert len(decisions) == 1


def test_the_examples_of_a_worker_count():
    """A worker's part of a global batch, the worker's with most replicas; a local batch is a part itself."""
    item = stepping(scaled)[0].item
    own = least_examples(item, (1, 1), batch="local")
    assert own > 2
    assert least_examples(item, (1, 1)) == 2 * own
    assert least_examples(item, (3, 1)) == 4 * -(-own // 3)
    assert least_examples(item, (1, 3), batch="local") == -(-own // 3)


def test_replicas_that_are_added_up_before_make_no_longer_ring():
    """Those of a worker are with AUTO, and where something is coded; else a table has a longer way."""
    item, where = stepping(scaled)[0].item, (2, 2)
    assert travels_dense(item, where)
    assert not travels_dense(item, where, spec="RING")
    assert travels_dense(item, where, spec="RING", compressor="HorovodCompressor")


def test_the_ids_of_an_example_count():
    many = stepping(scaled, (4, 3))[0].item
    one = stepping(scaled)[0].item
    assert least_examples(many, (1, 1)) == 2 * -(-least_examples(one, (1, 1)) // 2 // 12)


def test_lookups_in_one_table_count_together_but_for_those_that_all_replicas_have():
    """Which are summed by themselves, however the others travel."""
    table = tf.Variable(np.zeros([ROWS, WIDTH]), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, ids)) + tf.reduce_mean(tf.gather(table, tf.zeros([5], tf.int64)))
            loss += tf.reduce_mean(tf.gather(table, ids + 0))
        scaled(table, tape.gradient(loss, table), 0.1)

    item = capture_steps.capture(step, tf.zeros([1], tf.int64)).item
    own, same = item.gradients
    assert (own.indices, same.indices, same.rows) == ("", "same", 5)
    one = stepping(scaled)[0].item
    twice = replace(item, gradients=(own,))
    assert least_examples(twice, (1, 1)) == 2 * -(-least_examples(one, (1, 1)) // 4) > 1


def of_unknown_length(*, from_iterator):
    with tf.Graph().as_default() as graph:
        ids = kernel_programs.placeholder("ids", None, None, dtype=tf.int64)
        if from_iterator:
            ids = tf.raw_ops.IteratorGetNext(
                iterator=tf.compat.v1.placeholder(tf.resource, (), name="iterator"),
                output_types=[tf.int64],
                output_shapes=[[None, 3]],
                name="next",
            )[0]
        table = kernel_programs.handle("table", ROWS, WIDTH)
        flat = tf.reshape(ids, [-1], name="flat")
        values = tf.raw_ops.ResourceGather(resource=table, indices=flat, dtype=tf.float64, name="rows")
        tensors = [
            tf.identity(one, name=f"gradient/{name}")
            for one, name in ((flat, "indices"), (values, "values"), (tf.constant([ROWS, WIDTH]), "shape"))
        ]
        tf.raw_ops.ResourceScatterSub(resource=table, indices=tensors[0], updates=tensors[1], name="update")
        inputs = [Input("iterator", "resource", (), batched=False, kind="state")]
        return kernel_programs.captured(
            graph,
            variables=[Variable("table", "float64", (ROWS, WIDTH))],
            gradients=[Gradient("table", tuple(one.name for one in tensors))],
            inputs=inputs if from_iterator else [Input("ids", "int64", (None, None), batched=True)],
            run_ops=["update"],
        )


@pytest.mark.parametrize("from_iterator", [False, True])
def test_where_the_number_of_ids_is_not_known_rows_stay_rows(from_iterator):
    item = of_unknown_length(from_iterator=from_iterator)
    assert not travels_dense(item)
    assert travels_dense(item, sparse_as_dense=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_shards_rows_may_travel_as_dense_and_how_many_it_has_is_known_of_columns_only(axis):
    topology = replace(kernel_programs.topology(1, 1), servers={"127.0.0.1:CPU:0": 0})

    def is_dense(*, as_dense=None, update=scaled):
        item = stepping(update, dense=False)[0].item
        synchronizers = (AllReduceSynchronizer(sparse_as_dense=as_dense), PSSynchronizer("127.0.0.1:CPU:0"))
        nodes = (VariableStrategy.partitioned(one, axis, synchronizers) for one in item.trainable_variables)
        strategy = Strategy(tuple(nodes), ("127.0.0.1:CPU:0",))
        (shard,) = kernel_programs.gradient_events(item, topology, strategy, examples=FOR_ALL_ROWS)
        assert [one.variable for one in shard.gradients] == ["table/part_0"]
        return not isinstance(shard, GatherRows)

    assert is_dense() == (axis == 1)
    assert is_dense(as_dense=True)
    assert not is_dense(as_dense=False)
    assert not is_dense(update=lazy_momentum)
    with pytest.raises(StrategyError, match="variable 'table/part_0': sparse_as_dense=True sends"):
        is_dense(as_dense=True, update=lazy_momentum)


# -- The rule ---------------------------------------------------------------------------------------------------------


def drawn(law, rows, ids, rng):
    """How many distinct rows are among so many ids, on average of many draws."""
    share = {"even": np.ones(rows), "zipf": 1 / np.arange(1, rows + 1)}[law]
    draws = rng.multinomial(ids, share / share.sum(), size=200)
    return float(np.mean(np.count_nonzero(draws, axis=1)))


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 200), ids=st.integers(0, 2000), seed=st.integers(0, 2**31))
def test_expected_rows_are_those_of_zipfs_law_and_even_ids_have_more(rows, ids, seed):
    rng = np.random.default_rng(seed)
    expected = expected_rows(rows, ids)
    assert abs(drawn("zipf", rows, ids, rng) - expected) <= 0.5 + 0.02 * rows
    assert expected <= drawn("even", rows, ids, rng) + 0.5 + 0.02 * rows


def chunks_sent_by_a_ring(nbytes, members):
    """What one member sends: the parts of a reduce-scatter, then those of an all-gather, one after the other."""
    return sum(nbytes / members for _ in ("reduce-scatter", "all-gather") for _ in range(members - 1))


@settings(deadline=None, max_examples=200)
@given(
    rows=st.integers(1, 100),
    width=st.integers(1, 64),
    ids=st.integers(0, 1500),
    workers=st.integers(2, 4),
    index=st.sampled_from([4, 8]),
    half=st.booleans(),
)
def test_where_the_rule_says_so_fewer_bytes_are_sent_for_even_ids_and_for_those_of_zipfs_law(
    rows, width, ids, workers, index, half
):
    number = 2 if half else 4
    says = is_fewer_bytes(
        (rows, width),
        ids,
        item=4,
        index=index,
        compressor=HorovodCompressor() if half else NoneCompressor(),
        workers=workers,
        members=workers,
    )
    rng = np.random.default_rng(0)
    table = chunks_sent_by_a_ring(rows * width * number, workers)

    def gathered(law):  # Each worker passes on what it has, and what it is given, but for the last.
        return sum(drawn(law, rows, ids, rng) * (width * number + index) for _ in range(workers - 1))

    if says:
        assert table < 1.03 * gathered("even")
        assert table < 1.03 * gathered("zipf")
    else:
        assert table > 0.97 * gathered("zipf")


def test_a_table_of_nothing_stays_one_of_rows():
    assert not is_fewer_bytes((5, 0), 50, item=4, index=8, compressor=NoneCompressor(), workers=2, members=2)


# -- What it becomes --------------------------------------------------------------------------------------------------


def test_it_joins_the_dense_gradients_and_no_rows_are_gathered():
    item = stepping(scaled)[0].item
    made = {}
    for dense in (True, False):
        strategy = strategy_of(item, sparse_as_dense=dense)
        program = kernel_programs.after("lower-collectives", item, kernel_programs.topology(1, 1), strategy)
        made[dense] = sorted(one.what for one in program.lowered.collectives if "gradients" in one.what)
    assert made[True] == ["dense gradients of table, scale, with Identity:0"]
    assert made[False] == ["dense gradients of scale", *["sparse gradients of table"] * 2]


def test_rows_are_laid_into_a_table_once_a_replica_and_taken_out_of_the_total():
    item = stepping(scaled)[0].item
    program = kernel_programs.after(
        "lower-collectives", item, kernel_programs.topology(2, 1), strategy_of(item, sparse_as_dense=True)
    )
    made = Counter(node.op for name, node in program.graph.nodes.items() if name.startswith("AutoDist/AllReduce/"))
    assert (made["ScatterNd"], made["CollectiveGatherV2"], made["Where"], made["GatherV2"]) == (2, 1, 2, 2)
    assert made["Unique"] == 0


@pytest.mark.parametrize("rate", [0.1, 0.0, np.inf, np.nan])
def test_rows_that_no_example_uses_are_left_as_they_are_whatever_scales_them(rate):
    found, step, variables = stepping(scaled, dense=False)
    executor, copies = executed(step, found, variables, 2)
    plain = tf.function(step)
    for ids in ([0, 3, 3], [3, 2, 0], [2, 2, 2]):
        given = [tf.constant(ids, tf.int64), tf.constant(rate, tf.float64)]
        executor.run(given)
        plain(*given)
        for position in range(2):
            np.testing.assert_allclose(copies["table", position], variables["table"], rtol=1e-12)
    assert np.isfinite(variables["table"].numpy()[[1, 4, 5]]).all()


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_index_out_of_range_is_an_error_as_on_one_device(wrong):
    table = tf.Variable(np.zeros([ROWS, WIDTH]), name="table")

    @tf.custom_gradient
    def elsewhere(ids):
        """Rows whose gradient is of other rows than were looked up."""
        rows = tf.gather(table, ids)

        def gradient(upstream, variables=None):
            return None, [tf.IndexedSlices(upstream, ids * 0 + wrong, tf.constant([ROWS, WIDTH]))]

        return rows, gradient

    def step(ids, rate):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(elsewhere(ids))
        scaled(table, tape.gradient(loss, table), rate)
        return loss

    given = [tf.constant([0, 1, 1], tf.int64), tf.constant(0.1, tf.float64)]
    executor, _ = executed(step, capture_steps.capture(step, *given), {"table": table}, 2)
    for run in (tf.function(step), lambda *arguments: executor.run(arguments)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            run(*given)
