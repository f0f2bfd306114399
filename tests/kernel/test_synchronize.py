"""Synchronize: which gradients are reduced together, and that what is reduced is what one device has."""

import numpy as np
import pytest

from autodist_py.kernel.synchronizers.all_reduce import groups
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.strategy import Node, Strategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.kernel import programs


def grouped(item, strategy=None):
    program = programs.after("split-batch", item, programs.place(2), strategy)
    return [(group.stage, group.is_sparse, [one.variable for one in group.gradients]) for group in groups(program)]


def test_a_gradient_computed_from_combined_ones_goes_to_another_group():
    assert grouped(programs.two_stages(stages=3)) == [(1, False, ["v0"]), (2, False, ["v1"]), (3, False, ["v2"])]


def test_dense_gradients_are_grouped_by_type_and_a_sparse_one_is_alone():
    found = grouped(programs.dense_and_sparse())
    assert sorted(found) == [(1, False, ["a", "b"]), (1, False, ["half"]), (1, True, ["table"])]


def test_the_strategys_group_numbers_separate_gradients():
    item = programs.dense_and_sparse()
    found = grouped(item, programs.all_reduce(item, chunk_size=1))
    assert sorted(names for _, _, names in found) == [["a"], ["b"], ["half"], ["table"]]


@pytest.mark.parametrize("where", [programs.place(2), programs.place(1, 1), programs.place(2, 1)])
def test_every_gradient_op_reads_the_combined_gradient_and_nothing_else_does(where):
    item = programs.dense_and_sparse()
    before = programs.after("split-batch", item, where)
    after = programs.after("synchronize", item, where)
    changed = set()
    for node in before.graph.nodes.values():
        now = programs.node(after.graph, node.name)
        if list(now.input) != list(node.input):
            changed.add(node.name.partition("/")[2])
            assert all(name.startswith("AutoDist/AllReduce/") for name in now.input)
    sparse = ("table/indices", "table/values", "table/dense_shape")
    assert changed == {f"gradient/{name}" for name in ("a", "b", "half", *sparse)}


def test_one_replica_is_left_as_it_is():
    item = programs.dense_and_sparse()
    before = programs.after("split-batch", item, programs.place(1))
    assert programs.after("synchronize", item, programs.place(1)).graph.graph_def() == before.graph.graph_def()


@pytest.mark.parametrize(("stages", "replicas"), [(1, 3), (2, 2), (3, 4)])
def test_stages_train_as_on_one_device(stages, replicas):
    item = programs.two_stages(stages=stages)
    feeds = [{"x": np.arange(rows) / 7 + rows} for rows in (replicas, replicas + 1, 2 * replicas + 1)]
    initial = {f"v{index}": np.array(index + 0.5) for index in range(stages)}
    (one,), _ = programs.run_steps(item, programs.place(1), feeds, initial)
    many, _ = programs.run_steps(item, programs.place(replicas), feeds, initial)
    for replica in many:
        for name, value in one.items():
            np.testing.assert_allclose(replica[name], value, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("rows", [1, 5, 6])
def test_weights_are_shares_of_the_examples_and_an_empty_replica_counts_nothing(rows):
    item = programs.dense_and_sparse()
    feeds = [{"x": np.arange(rows) + 1.0, "ids": np.arange(rows) % 2}]
    initial = {
        "a": np.array(1.0),
        "b": np.array(2.0),
        "half": np.array(3.0, np.float32),
        "table": np.arange(10.0).reshape(5, 2),
    }
    (one,), _ = programs.run_steps(item, programs.place(1), feeds, initial)
    for replica in programs.run_steps(item, programs.place(3), feeds, initial)[0]:
        for name in ("a", "b", "half"):
            np.testing.assert_allclose(replica[name], one[name], rtol=1e-12, err_msg=name)
        # Each row's gradient is its value here, so its weight shows: a replica's share of the examples.
        shares = np.repeat(np.array([rows // 3 + (index < rows % 3) for index in range(3)]), 1) / rows
        weights = np.concatenate([np.full(rows // 3 + (index < rows % 3), shares[index]) for index in range(3)])
        expected = initial["table"].copy()
        np.subtract.at(expected, feeds[0]["ids"], weights[:, None] * initial["table"][feeds[0]["ids"]])
        np.testing.assert_allclose(replica["table"], expected, rtol=1e-12)


def strategy_with(synchronizer):
    return Strategy(tuple(Node(f"v{index}", synchronizer) for index in range(2)), ("127.0.0.1:CPU:0",))


@pytest.mark.parametrize(
    ("synchronizer", "message"),
    [
        (AllReduceSynchronizer("NCCL"), "variable 'v0': all_reduce_spec 'NCCL' cannot run on CPU devices; use AUTO"),
        (AllReduceSynchronizer(compressor="PowerSGDCompressor"), "compressor 'PowerSGDCompressor' is not available"),
    ],
)
def test_what_cannot_run_is_refused_with_the_variable_and_the_pass(synchronizer, message):
    with pytest.raises(StrategyError, match=message) as raised:
        programs.after("synchronize", programs.two_stages(), programs.place(2), strategy_with(synchronizer))
    before = "partition, replicate, refresh, read-data, split-batch, combine"
    assert raised.value.__notes__ == [f"in pass 'synchronize', after {before}"]


def test_a_compressor_of_a_server_is_refused_with_the_variable_and_the_pass():
    strategy = strategy_with(PSSynchronizer("127.0.0.1:CPU:0", compressor="HorovodCompressor"))
    with pytest.raises(
        StrategyError, match="variable 'v0': compressor 'HorovodCompressor' of a PS synchronizer"
    ) as raised:
        programs.after("serve", programs.two_stages(), programs.place(2), strategy)
    before = "partition, replicate, refresh, read-data, split-batch, combine, synchronize"
    assert raised.value.__notes__ == [f"in pass 'serve', after {before}"]
