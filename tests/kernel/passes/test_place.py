"""PlaceOps: what stands once, and what several programs use, is on the worker's CPU."""

import pytest

from autodist_py.kernel.pipeline import PASSES
from autodist_py.kernel.runner import run_passes
from autodist_py.kernel.topology import Replica, Topology
from tests.support import kernel_programs
from tests.support.kernel_programs import node, parsed


@pytest.mark.parametrize(
    ("named", "uses"),
    [("IteratorV2", "MakeIterator"), ("FIFOQueueV2", "QueueEnqueueV2"), ("PriorityQueueV2", "QueueSizeV2")],
)
def test_what_another_program_reads_is_filled_where_that_reads_it(named: str, uses: str) -> None:
    """On one GPU: an iterator that is made there is not the one from which a step reads on the CPU."""
    where = Topology(0, (Replica(0, 0, "/device:GPU:0"),))
    program = kernel_programs.program_of(parsed(f"s = {named}()", f"use = {uses}(s)", "other = Const()"), where)
    placed = run_passes(program, PASSES)
    assert {node(placed.graph, f"AutoDist-Replica-0/{name}").device for name in ("s", "use")} == {"/device:CPU:0"}
    assert node(placed.graph, "AutoDist-Replica-0/other").device == "/device:GPU:0"
