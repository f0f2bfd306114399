"""How a worker's replicas are added up: sums equal numpy's, and each way adds where it says."""

import pytest
import tensorflow as tf

from autodist_py.kernel.collectives.local import LOCAL_REDUCTIONS, Hierarchical, Nccl, OneDevice
from autodist_py.kernel.topology import is_gpu
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.synchronizers import LOCAL_REDUCTIONS as NAMES
from tests.support import kernel_programs
from tests.support.reductions import assert_summed, devices_of, one_of_each

GPUS = ["/device:GPU:0", "/device:GPU:1"]


def test_each_way_that_a_strategy_may_name_is_there():
    assert tuple(LOCAL_REDUCTIONS) == NAMES


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("local", [OneDevice(), Hierarchical()], ids=["one_device", "hierarchical"])
def test_each_value_of_each_type_and_shape_is_summed_as_numpy_does(local, replicas):
    batch, devices = one_of_each(replicas), devices_of(replicas)
    with tf.Graph().as_default() as graph:
        fed = [[tf.compat.v1.placeholder(value.dtype, value.shape) for value in values] for values in batch]
        first = [local.on_first(values, devices) for values in fed]
        each = [local.on_each(values, devices) for values in fed]
    with kernel_programs.session(graph) as running:
        feeds = {
            one: value for own, values in zip(fed, batch, strict=True) for one, value in zip(own, values, strict=True)
        }
        firsts, copies = running.run([first, each], feeds)
    for result, results, values in zip(firsts, copies, batch, strict=True):
        assert len(results) == replicas
        assert_summed([result, *results], values)


def added_on(local, method, devices):
    """Which devices add how many values, and where the results are."""
    with tf.Graph().as_default() as graph:
        results = getattr(local, method)([tf.compat.v1.placeholder(tf.float32, [9]) for _ in devices], devices)
        nodes = graph.as_graph_def().node
    added = [(int(node.device[-1]), len(node.input)) for node in nodes if node.op == "AddN"]
    return added, [one.device for one in (results if isinstance(results, list) else [results])]


def test_one_device_adds_all_values_up():
    assert added_on(OneDevice(), "on_first", devices_of(4)) == ([(0, 4)], devices_of(1))
    assert added_on(OneDevice(), "on_each", devices_of(4)) == ([(0, 4)], devices_of(4))


def test_a_tree_adds_neighbours_first_and_no_device_more_than_two_values_at_once():
    added = [(0, 2), (2, 2), (0, 2), (0, 2)]
    assert added_on(Hierarchical(), "on_first", devices_of(5)) == (added, devices_of(1))
    assert added_on(Hierarchical(), "on_each", devices_of(5)) == (added, devices_of(5))


def nodes_on_gpus(method, dtype=tf.float32):
    with tf.Graph().as_default() as graph:
        getattr(Nccl(), method)([tf.compat.v1.placeholder(dtype, [100]) for _ in GPUS], GPUS)
    return [node for node in graph.as_graph_def().node if node.op != "Placeholder"]


def test_nccl_reduces_between_all_gpus():
    nodes = nodes_on_gpus("on_each")
    assert [(node.op, node.device) for node in nodes] == [("NcclAllReduce", device) for device in GPUS]
    assert {(node.attr["num_devices"].i, node.attr["reduction"].s) for node in nodes} == {(2, b"sum")}
    assert len({node.attr["shared_name"].s for node in nodes}) == 1


def test_nccl_waits_for_all_results_where_one_is_wanted():
    *sums, first = nodes_on_gpus("on_first")
    assert [name.removeprefix("^") for name in first.input] == [node.name for node in sums]
    assert (len(sums), first.op, first.device) == (len(GPUS), "Identity", GPUS[0])


def test_nccl_refuses_what_it_does_not_carry():
    with pytest.raises(StrategyError, match="carries float16, float32, float64, int32, int64; got bfloat16; train the"):
        nodes_on_gpus("on_each", tf.bfloat16)


def test_a_gpu_is_known_by_each_of_its_names():
    gpus = ["/device:GPU:0", "/job:worker/replica:0/task:1/device:GPU:1", "GPU:3", "/gpu:0", "10.0.0.1:GPU:0"]
    assert [is_gpu(device) for device in gpus] == [True] * len(gpus)
    assert [is_gpu(device) for device in ["/device:CPU:0", "/cpu:1", "GPU.example.org:CPU:0", ""]] == [False] * 4
