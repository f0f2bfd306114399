"""Programs of one machine's replicas have a host, also where all replicas are on GPUs."""

from autodist_py.distribute.placement import LocalPlacement, options_of
from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.kernel.test_replica_programs import replica_function


def test_replicas_on_gpus_alone_are_compiled() -> None:
    options = options_of(decorrelate=False)
    placement = LocalPlacement(["/device:GPU:0", "/device:GPU:1"], AllReduce(), options)
    program = placement.compiled(replica_function(), "step")
    assert {bound.replica for bound in program.variables} == {0, 1}
