"""What compiling costs: linear in ops and in replicas. `benchmarks/compile_time.py` measures it at full size."""

import time

import pytest

from benchmarks import compile_time
from benchmarks.layered_steps import deep_mlp

pytestmark = pytest.mark.alone

LAYERS = 20
SLACK = 3.0  # On top of linear: clocks, caches and other processes are not exact.


@pytest.fixture(scope="module")
def costs():
    """Own processor time by (layers, local replicas): the better of two, which another process disturbs less."""
    compile_time.measure(deep_mlp(2), 2)
    found = {}
    for layers, replicas in ((LAYERS, 2), (LAYERS, 8), (4 * LAYERS, 2)):
        step = deep_mlp(layers)
        runs = [compile_time.measure(step, replicas, clock=time.process_time) for _ in range(2)]
        found[layers, replicas] = min(runs, key=lambda stages: stages.own)
    return found


def test_four_times_the_replicas_cost_four_times_as_much_at_most(costs):
    few, many = costs[LAYERS, 2], costs[LAYERS, 8]
    assert 3 < many.compiled_ops / few.compiled_ops < 5
    assert many.own < SLACK * 4 * few.own, (few, many)


def test_four_times_the_ops_cost_four_times_as_much_at_most(costs):
    few, many = costs[LAYERS, 2], costs[4 * LAYERS, 2]
    assert 3 < many.captured_ops / few.captured_ops < 5
    assert many.own < SLACK * 4 * few.own, (few, many)


def test_a_tenth_of_the_largest_graph_takes_less_than_the_limits(costs):
    stages = costs[LAYERS, 8]
    assert stages.captured_ops > 1000
    assert stages.own < compile_time.LIMIT_OWN * SLACK * stages.captured_ops / 10_000, stages
