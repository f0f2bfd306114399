"""From the devices of a strategy to a worker's place in the cluster."""

import pytest

from autodist_py.kernel.topology import Replica, resolve
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from tests.support import kernel_programs

SPEC = ResourceSpec(
    (NodeSpec("10.0.0.2", gpus=(1, 3)), NodeSpec("10.0.0.1", cpus=(2, 5), chief=True), NodeSpec("10.0.0.3"))
)


def test_replicas_are_numbered_by_rank_and_their_devices_by_position_on_the_node():
    topology = resolve(SPEC.replica_devices, SPEC, worker=1)
    assert topology.replicas == (
        Replica(0, 0, "/device:CPU:0"),
        Replica(1, 0, "/device:CPU:1"),
        Replica(2, 1, "/device:GPU:0"),
        Replica(3, 1, "/device:GPU:1"),
        Replica(4, 2, "/device:CPU:0"),
    )
    assert [replica.index for replica in topology.local_replicas] == [2, 3]
    assert topology.workers == (0, 1, 2)


def test_the_order_of_a_strategys_devices_does_not_change_the_ranks():
    shuffled = ("10.0.0.3:CPU:0", "10.0.0.2:GPU:3", "10.0.0.1:CPU:2")
    topology = resolve(shuffled, SPEC, worker=0)
    assert [(replica.worker, replica.device) for replica in topology.replicas] == [
        (0, "/device:CPU:0"),
        (1, "/device:GPU:1"),
        (2, "/device:CPU:0"),
    ]


def test_a_device_that_the_spec_lacks_is_an_error_that_names_it_and_those_there_are():
    with pytest.raises(StrategyError, match=r"10\.0\.0\.9:CPU:0.*Devices of the spec: 10\.0\.0\.1:CPU:2"):
        resolve(("10.0.0.1:CPU:2", "10.0.0.9:CPU:0"), SPEC, worker=0)


def test_a_worker_alone_has_its_own_replicas_numbered_from_0():
    alone = kernel_programs.topology(1, 2, worker=1).alone()
    assert alone.worker == 1
    assert alone.replicas == (Replica(0, 1, "/device:CPU:0"), Replica(1, 1, "/device:CPU:1"))


def test_a_worker_whose_devices_are_left_out_follows_without_examples():
    spec = ResourceSpec(tuple(NodeSpec(f"10.0.0.{rank}", chief=rank == 0) for rank in range(3)))
    topology = resolve(["10.0.0.1:CPU:0", "10.0.0.2:CPU:0"], spec, worker=0)
    assert [(replica.worker, replica.index, replica.trains) for replica in topology.replicas] == [
        (0, 2, False),
        (1, 0, True),
        (2, 1, True),
    ]
    assert topology.first.worker == 1
