"""The programs whose text after each pass is kept: (topology, strategy; None: all-reduces) by name."""

from dataclasses import replace

from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import kernel_programs

SERVERS = {"127.0.0.1:CPU:0": 0, "127.0.0.2:CPU:0": 1}
SHARDS = VariableStrategy(
    "w",
    None,
    "1,2",
    (
        VariableStrategy("w/part_0", AllReduceSynchronizer()),
        VariableStrategy("w/part_1", PSSynchronizer("127.0.0.2:CPU:0")),
    ),
    (2, 1),
)
CASES = {
    "one_worker_of_two_replicas": (kernel_programs.topology(2), None),
    "worker_0_of_two": (kernel_programs.topology(1, 1, worker=0), None),
    "worker_1_of_two_with_shards": (
        replace(kernel_programs.topology(1, 1, worker=1), servers=SERVERS),
        Strategy((SHARDS,), tuple(SERVERS)),
    ),
}
