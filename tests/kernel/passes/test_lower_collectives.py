"""LowerCollectives: which gradients are reduced together, and that the results are those of one device.

One module, though long: the same few steps are lowered in all of it.
"""

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.kernel.events import GatherRows
from autodist_py.kernel.ir.flat_buffers import piece_sizes
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import capture_steps, kernel_programs
from tests.support.packed import in_packs, three_layers


def grouped(item, strategy=None):
    events = kernel_programs.gradient_events(item, kernel_programs.topology(2), strategy)
    return [(event.level, isinstance(event, GatherRows), [one.variable for one in event.gradients]) for event in events]


def test_a_gradient_computed_from_combined_ones_goes_to_another_group():
    assert grouped(kernel_programs.two_stages(stages=3)) == [(1, False, ["v0"]), (2, False, ["v1"]), (3, False, ["v2"])]


def test_dense_gradients_are_grouped_by_type_and_a_sparse_one_is_alone():
    found = grouped(kernel_programs.dense_and_sparse())
    assert sorted(found) == [(1, False, ["a", "b"]), (1, False, ["half"]), (1, True, ["table"])]


def test_the_strategys_group_numbers_separate_gradients():
    item = kernel_programs.dense_and_sparse()
    found = grouped(item, kernel_programs.all_reduce(item, chunk_size=1))
    assert sorted(names for _, _, names in found) == [["a"], ["b"], ["half"], ["table"]]


def reductions(program):
    return [one.what for one in program.lowered.collectives if "gradients" in one.what]


def test_gradients_are_packed_and_reduced_as_back_propagation_finishes_them():
    item = three_layers(side=4)
    strategy = in_packs(item, bytes_per_pack=2 * 4 * 4 * 8)
    assert [names for *_, names in grouped(item, strategy)] == [["w2", "w1"], ["w0"]]
    program = kernel_programs.after("order", item, kernel_programs.topology(1, 1), strategy)
    assert reductions(program) == ["dense gradients of w2, w1", "dense gradients of w0"]


def collectives_of(step, bytes_per_pack=0, compressor="NoneCompressor"):
    """The first words of what each of two workers has collectives for."""
    item = capture_steps.capture(step, tf.ones([4, 2], tf.float64)).item
    synchronizer = AllReduceSynchronizer("RING", compressor, bytes_per_pack=bytes_per_pack)
    config = tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables)
    program = kernel_programs.after(
        "order", item, kernel_programs.topology(1, 1), Strategy(config, ("127.0.0.1:CPU:0",))
    )
    return [one.what.split()[0] for one in program.lowered.collectives]


def regression(*, reduce=tf.reduce_mean, variables=2, returned=lambda loss, x, gradients: loss):
    """Of two features."""
    weights = [tf.Variable([[0.5], [0.25]], dtype=tf.float64, name=f"w{number}") for number in range(variables)]

    def step(x):
        with tf.GradientTape() as tape:
            loss = reduce(sum(x @ weight for weight in weights) ** 2)
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return returned(loss, x, gradients)

    return step


@pytest.mark.parametrize("reduce", [tf.reduce_mean, tf.reduce_sum])
def test_a_loss_travels_with_the_gradients_that_share_a_buffer(reduce):
    assert collectives_of(regression(reduce=reduce)) == ["dense"]


@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (regression(variables=1), {}),
        (regression(), {"bytes_per_pack": 2 * 2 * 8}),
        (regression(), {"compressor": "HorovodCompressor"}),
        (regression(returned=lambda loss, x, gradients: tf.cast(loss, tf.float32)), {}),
        (regression(returned=lambda loss, x, gradients: tf.reduce_sum(x)), {}),
        (regression(returned=lambda loss, x, gradients: tf.reduce_mean(x @ gradients[0])), {}),
    ],
    ids=["no-buffer", "a-full-buffer", "a-compressor", "another-type", "a-sum", "computed-from-gradients"],
)
def test_a_loss_travels_by_itself_where_gradients_cannot_carry_it(step, settings):
    assert sorted(collectives_of(step, **settings)) == ["dense", "fetches"]


@pytest.mark.parametrize(("room", "others"), [(7, 2), (8, 1), (15, 1), (16, 0)])
def test_as_many_outputs_travel_with_gradients_as_their_buffer_holds(room, others):
    step = regression(returned=lambda loss, x, gradients: (loss, 2.0 * loss))
    item = capture_steps.capture(step, tf.ones([4, 2], tf.float64)).item
    (bucket,) = kernel_programs.gradient_events(item, kernel_programs.topology(1, 1), in_packs(item, 2 * 2 * 8 + room))
    assert len(item.outputs) - len(bucket.outputs) == others


def test_an_output_of_unknown_shape_does_not_travel_with_gradients():
    step = regression(
        returned=lambda loss, x, gradients: (loss, tf.numpy_function(lambda one: one, [loss], tf.float64))
    )
    item = capture_steps.capture(step, tf.ones([4, 2], tf.float64)).item
    (bucket,) = kernel_programs.gradient_events(item, kernel_programs.topology(1, 1))
    assert [output.shape for output in item.outputs] == [(), None]
    assert bucket.outputs == item.outputs[:1]


def test_an_output_that_is_ready_late_keeps_no_gradients_waiting():
    weights = [tf.Variable(np.eye(4), name=f"w{index}") for index in range(4)]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = x
            for weight in weights:
                value = tf.tanh(value @ weight)
            loss = tf.reduce_mean(value)
        *gradients, of_input = tape.gradient(loss, [*weights, x])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(gradient)
        return loss, tf.reduce_mean(of_input)

    item = capture_steps.capture(step, tf.ones([2, 4], tf.float64)).item
    found = kernel_programs.gradient_events(item, kernel_programs.topology(1, 1), in_packs(item, 3 * 4 * 4 * 8 - 1))
    loss, late = item.outputs
    assert [[one.variable for one in event.gradients] for event in found] == [["w3", "w2"], ["w1", "w0"]]
    assert [event.outputs for event in found] == [(loss,), (late,)]


@pytest.mark.parametrize("fetch_reduction", ["mean", "sum"])
def test_outputs_that_travel_with_gradients_are_those_of_one_device(fetch_reduction):
    weights = [tf.Variable(np.zeros((2, 1)), name=f"w{number}") for number in range(2)]
    table = tf.Variable(np.zeros((3, 2)), name="table")

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            rows = tf.gather(table, tf.cast(x[:, 0] > 0, tf.int64))
            first = tf.reduce_mean((x @ weights[0] + tf.reduce_sum(rows, axis=1, keepdims=True)) ** 2)
            second = tf.reduce_mean((x @ weights[1]) ** 2 + x @ weights[0])
        for weight in weights:
            weight.assign_sub(0.1 * tape.gradient(second, weight))
        rows = tape.gradient(first, table)
        table.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))
        each = tf.reduce_mean(x, axis=0)
        return first, second, first, each, 2.0 * second, tf.reduce_max(x, axis=1)

    item = capture_steps.capture(step, tf.ones([4, 2], tf.float64)).item
    carried = [one.outputs for one in kernel_programs.gradient_events(item, kernel_programs.topology(1, 1))]
    assert len(carried[0]) >= 4, "without them the test is of nothing"
    random = np.random.default_rng(0)
    feeds = [{item.inputs[0].name: random.normal(size=(count, 2))} for count in (7, 4, 1)]
    initial = {one.name: random.normal(size=one.shape) for one in item.variables}
    one, expected = kernel_programs.run_steps(item, kernel_programs.topology(1), feeds, initial)
    three, results = kernel_programs.run_steps(
        item, kernel_programs.topology(3), feeds, initial, fetch_reduction=fetch_reduction
    )
    for replica in three:
        for name, value in one[0].items():
            np.testing.assert_allclose(replica[name], value, rtol=1e-10, atol=1e-12)
    for fetched, of_one in zip(results, expected, strict=True):
        for value, known in zip(fetched, of_one, strict=True):
            np.testing.assert_allclose(value, known, rtol=1e-10)


def test_variables_of_one_group_may_differ_in_how_they_are_reduced():
    item = kernel_programs.dense_and_sparse()
    differing = {"table": AllReduceSynchronizer(sparse_as_dense=True), "a": AllReduceSynchronizer(bytes_per_pack=64)}
    config = tuple(
        VariableStrategy(one.name, differing.get(one.name, AllReduceSynchronizer())) for one in item.trainable_variables
    )
    program = kernel_programs.after(
        "order", item, kernel_programs.topology(1, 1), Strategy(config, ("127.0.0.1:CPU:0",))
    )
    assert sorted(reductions(program)) == [
        "dense gradients of a",
        "dense gradients of half",
        "dense gradients of table, b",
    ]


@pytest.mark.parametrize(("bytes_per_pack", "count"), [(0, 1), (8 * 144, 3), (8 * 48, 9)])
def test_a_gradient_that_is_larger_than_a_buffer_is_reduced_in_pieces(bytes_per_pack, count):
    item = three_layers(side=12)
    program = kernel_programs.after("order", item, kernel_programs.topology(2, 1), in_packs(item, bytes_per_pack))
    assert len(reductions(program)) == count
    assert all(len(one.ops) == 2 for one in program.lowered.collectives if one.what in reductions(program))


def looked_up(squares):
    table = tf.Variable(np.arange(10.0).reshape(5, 2), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.embedding_lookup(table, ids))
        rows = tape.gradient(loss, table)
        values = rows.values**2 if squares else 0.1 * rows.values
        table.scatter_sub(tf.IndexedSlices(values, rows.indices))
        return loss

    return capture_steps.capture(step, tf.constant([0, 3, 3])).item


@pytest.mark.parametrize(("squares", "workers", "added_up"), [(False, 2, 1), (True, 2, 0), (False, 1, 0)])
def test_rows_of_one_index_are_added_up_before_they_travel_where_the_update_does_so_itself(squares, workers, added_up):
    replicas = [1] * workers if workers > 1 else [2]
    program = kernel_programs.after("lower-collectives", looked_up(squares), kernel_programs.topology(*replicas))
    assert sum(node.op == "Unique" for node in program.graph.nodes.values()) == added_up


def test_more_pieces_than_a_program_can_have_are_refused():
    item = three_layers(side=200)
    with pytest.raises(StrategyError, match=r"bytes_per_pack=8 is too small .* of which 320000 bytes travel"):
        kernel_programs.after(
            "lower-collectives", item, kernel_programs.topology(1, 1), in_packs(item, bytes_per_pack=8)
        )


def collectives_of_halves(spec, compressor, bytes_per_pack=0):
    """The collectives of a step of two workers on a matrix of bfloat16: ops and types."""
    weight = tf.Variable(tf.ones([128, 64], tf.bfloat16), name="w")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ weight)
        weight.assign_sub(tape.gradient(loss, weight))

    item = capture_steps.capture(step, tf.ones([1, 128], tf.bfloat16)).item
    synchronizer = AllReduceSynchronizer(spec, compressor, bytes_per_pack=bytes_per_pack)
    strategy = Strategy((VariableStrategy("w", synchronizer),), ("127.0.0.1:CPU:0",))
    program = kernel_programs.after("order", item, kernel_programs.topology(1, 1), strategy)
    nodes = [program.graph.nodes[op] for one in program.lowered.collectives for op in one.ops]
    return [(node.op, tf.as_dtype(node.attr["T"].type)) for node in nodes]


@pytest.mark.parametrize("compressor", ["Int8Compressor", "TopKCompressor(ratio=0.5)"])
@pytest.mark.parametrize(("spec", "bytes_per_pack"), [("HOROVOD", 0), ("RING", 1)], ids=["no-sum", "no-pieces"])
def test_what_is_gathered_is_not_held_to_what_sums_carry(compressor, spec, bytes_per_pack):
    """Horovod's sums carry no bfloat16, and a sum by rings would be made in more pieces than there may be."""
    assert collectives_of_halves(spec, compressor, bytes_per_pack) == [("CollectiveGatherV2", tf.int32)]


@pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed: make horovod")
def test_factors_of_what_horovod_does_not_carry_are_of_a_type_that_it_does():
    assert set(collectives_of_halves("HOROVOD", "PowerSGDCompressor")) == {("HorovodAllreduce", tf.float32)}


def test_gradients_are_packed_as_many_as_fill_a_buffer_as_they_travel():
    item = three_layers(side=4)
    synchronizer = AllReduceSynchronizer("RING", "HorovodCompressor", bytes_per_pack=2 * 4 * 4 * 2)
    config = tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables)
    found = grouped(item, Strategy(config, ("127.0.0.1:CPU:0",)))
    assert [names for *_, names in found] == [["w2", "w1"], ["w0"]]


@given(elements=st.integers(1, 10**6), dtype=st.sampled_from([tf.float16, tf.float64]), most=st.integers(1, 10**7))
def test_pieces_make_the_buffer_and_are_as_few_and_as_even_as_they_can_be(elements, dtype, most):
    with tf.Graph().as_default():
        sizes = piece_sizes(kernel_programs.placeholder("buffer", elements, dtype=dtype), most)
    aligned = 64 // dtype.size
    assert sum(sizes) == elements
    assert all(size % aligned == 0 for size in sizes[:-1])
    assert max(sizes) <= most + aligned
    assert len(sizes) <= -(-elements // most)
    assert max(sizes) - min(sizes) <= aligned * len(sizes)


@pytest.mark.parametrize(
    "where", [kernel_programs.topology(2), kernel_programs.topology(1, 1), kernel_programs.topology(2, 1)]
)
def test_every_gradient_op_reads_the_combined_gradient_and_nothing_else_does(where):
    item = kernel_programs.dense_and_sparse()
    before = kernel_programs.after("split-batch", item, where)
    after = kernel_programs.after("lower-collectives", item, where)
    changed = set()
    for node in before.graph.nodes.values():
        now = kernel_programs.node(after.graph, node.name)
        if list(now.input) != list(node.input):
            changed.add(node.name.partition("/")[2])
            assert all(name.startswith("AutoDist/AllReduce/") for name in now.input)
    sparse = ("table/indices", "table/values", "table/dense_shape")
    assert changed == {f"gradient/{name}" for name in ("a", "b", "half", *sparse)}


def test_one_replica_is_left_as_it_is():
    item = kernel_programs.dense_and_sparse()
    before = kernel_programs.after("split-batch", item, kernel_programs.topology(1))
    assert (
        kernel_programs.after("lower-collectives", item, kernel_programs.topology(1)).graph.graph_def()
        == before.graph.graph_def()
    )


@pytest.mark.parametrize(("stages", "replicas"), [(1, 3), (2, 2), (3, 4)])
def test_stages_train_as_on_one_device(stages, replicas):
    item = kernel_programs.two_stages(stages=stages)
    feeds = [{"x": np.arange(rows) / 7 + rows} for rows in (replicas, replicas + 1, 2 * replicas + 1)]
    initial = {f"v{index}": np.array(index + 0.5) for index in range(stages)}
    (one,), _ = kernel_programs.run_steps(item, kernel_programs.topology(1), feeds, initial)
    many, _ = kernel_programs.run_steps(item, kernel_programs.topology(replicas), feeds, initial)
    for replica in many:
        for name, value in one.items():
            np.testing.assert_allclose(replica[name], value, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("rows", [1, 5, 6])
def test_weights_are_shares_of_the_examples_and_an_empty_replica_counts_nothing(rows):
    item = kernel_programs.dense_and_sparse()
    feeds = [{"x": np.arange(rows) + 1.0, "ids": np.arange(rows) % 2}]
    initial = {
        "a": np.array(1.0),
        "b": np.array(2.0),
        "half": np.array(3.0, np.float32),
        "table": np.arange(10.0).reshape(5, 2),
    }
    (one,), _ = kernel_programs.run_steps(item, kernel_programs.topology(1), feeds, initial)
    for replica in kernel_programs.run_steps(item, kernel_programs.topology(3), feeds, initial)[0]:
        for name in ("a", "b", "half"):
            np.testing.assert_allclose(replica[name], one[name], rtol=1e-12, err_msg=name)
        # Each row's gradient is its value here, so its weight shows: a replica's share of the examples.
        shares = np.repeat(np.array([rows // 3 + (index < rows % 3) for index in range(3)]), 1) / rows
        weights = np.concatenate([np.full(rows // 3 + (index < rows % 3), shares[index]) for index in range(3)])
        expected = initial["table"].copy()
        np.subtract.at(expected, feeds[0]["ids"], weights[:, None] * initial["table"][feeds[0]["ids"]])
        np.testing.assert_allclose(replica["table"], expected, rtol=1e-12)


def added_up(local, where, **options):
    """The ops of one level's gradients by which a worker's replicas are added up: their types and devices."""
    strategy = strategy_with(AllReduceSynchronizer(local=local))
    program = kernel_programs.after("order", kernel_programs.two_stages(), where, strategy, **options)
    nodes = [
        node for name, node in program.graph.nodes.items() if name.startswith("AutoDist/AllReduce/AUTO_group_0_lev")
    ]
    ops = [
        (node.op, node.device[-1])
        for node in nodes
        if node.op in ("AddN", "NcclAllReduce") and "level_1" in node.name and "unstack" not in node.input[0]
    ]
    return sorted(ops)


def on_gpus(*replicas_of_worker):
    cpus = kernel_programs.topology(*replicas_of_worker)
    return replace(cpus, replicas=tuple(replace(one, device=one.device.replace("C", "G")) for one in cpus.replicas))


@pytest.mark.parametrize("workers", [(4,), (4, 1)], ids=["one worker", "two workers"])
def test_replicas_are_added_up_as_the_strategy_says(workers):
    assert added_up("one_device", kernel_programs.topology(*workers)) == [("AddN", "0")]
    assert added_up("hierarchical", kernel_programs.topology(*workers)) == [("AddN", "0"), ("AddN", "0"), ("AddN", "2")]
    assert added_up("nccl", on_gpus(*workers)) == [("NcclAllReduce", str(index)) for index in range(4)]


def test_where_a_device_is_no_gpu_nccl_is_refused_or_replicas_are_copied():
    with pytest.raises(
        StrategyError, match="local='nccl' of AllReduce needs NCCL, which runs on GPUs only, not on /dev"
    ):
        added_up("nccl", kernel_programs.topology(4))
    assert added_up("nccl", kernel_programs.topology(4), strict=False) == [("AddN", "0")]


def strategy_with(synchronizer):
    return Strategy(tuple(VariableStrategy(f"v{index}", synchronizer) for index in range(2)), ("127.0.0.1:CPU:0",))


@pytest.mark.parametrize(
    ("synchronizer", "message"),
    [
        (
            AllReduceSynchronizer("NCCL"),
            "gradients of v0: .* needs NCCL, which runs on GPUs only, not on /device:CPU:0.*; use .*'RING'",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_variable_and_the_pass(synchronizer, message):
    with pytest.raises(StrategyError, match=message) as raised:
        kernel_programs.after(
            "lower-collectives", kernel_programs.two_stages(), kernel_programs.topology(2), strategy_with(synchronizer)
        )
    assert raised.value.__notes__ == ["in pass 'plan-communication', after unbranch, look-up, partition"]


def test_a_compressor_of_a_server_is_refused_with_the_variable_and_the_pass():
    strategy = strategy_with(PSSynchronizer("127.0.0.1:CPU:0", compressor="PowerSGDCompressor(rank=2)"))
    with pytest.raises(
        StrategyError, match=r"variable 'v0': a server .* and PowerSGDCompressor\(rank=2\) needs a sum over workers"
    ) as raised:
        kernel_programs.after("lower-exchanges", kernel_programs.two_stages(), kernel_programs.topology(2), strategy)
    assert raised.value.__notes__ == ["in pass 'plan-communication', after unbranch, look-up, partition"]


NO_COPY = {"Const", "Reshape", "Cast", "DivNoNan"}
"""Ops that make nothing as large as a gradient: reshaping shares memory, and what else there is are weights."""
SMALL_SUM = {"ExpandDims": 1, "CollectiveGatherV2": 1, "Unpack": 1, "AddN": 1}
"""What adds up a small value over two workers; the first and the third of them share memory."""


@pytest.mark.parametrize(
    ("bytes_per_pack", "where", "golden"),
    [
        # One buffer: three gradients are laid into it, weighted in it, reduced, and are parts of it afterwards.
        (0, (1, 1), {"ConcatV2": 1, "MulNoNan": 1, **SMALL_SUM, "SplitV": 1}),
        # A buffer each: nothing is laid together, and nothing taken apart.
        (1 << 7, (1, 1), {"MulNoNan": 3, **{op: 3 for op in SMALL_SUM}}),
        # Each in two pieces, which are computed apart, and are joined afterwards.
        (1 << 6, (1, 1), {op: 6 for op in ("StridedSlice", "MatMul", "MulNoNan", *SMALL_SUM)} | {"ConcatV2": 3}),
        # Two replicas on a worker are added up once, and the second is given a copy on its device.
        (
            0,
            (2, 1),
            {"ConcatV2": 2, "MulNoNan": 2, **SMALL_SUM, "AddN": 2, "Identity": 1, "SplitV": 2},
        ),
    ],
)
def test_a_buffer_is_copied_no_more_than_it_must_be(bytes_per_pack, where, golden):
    item = three_layers(side=4)
    synchronizer = AllReduceSynchronizer(bytes_per_pack=bytes_per_pack)
    strategy = Strategy(
        tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables), ("127.0.0.1:CPU:0",)
    )
    assert copying_ops(item, strategy, where) == golden


def copying_ops(item, strategy, where):
    program = kernel_programs.after("lower-collectives", item, kernel_programs.topology(*where), strategy)
    made = [node.op for name, node in program.graph.nodes.items() if name.startswith("AutoDist/AllReduce/")]
    return Counter(op for op in made if op not in NO_COPY)


@pytest.mark.parametrize(
    ("side", "golden"),
    [
        (4, {"ConcatV2": 2, "MulNoNan": 2, "AddN": 1, "Identity": 1, "SplitV": 2}),
        (64, {"MulNoNan": 8, "AddN": 4, "Identity": 4}),  # One of the four is the loss.
    ],
)
def test_a_worker_alone_lays_no_gradient_into_a_buffer_that_is_faster_added_up_by_itself(side, golden):
    item = three_layers(side)
    assert copying_ops(item, in_packs(item, bytes_per_pack=0, spec="AUTO"), (2,)) == golden
