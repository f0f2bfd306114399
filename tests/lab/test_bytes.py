"""What compressors leave of the bytes that hosts send, by the counters of their network devices."""

import json
import sys
from pathlib import Path

import pytest

from tests.lab.conftest import ENDED_SECONDS, SPEC, SSH, Lab

pytestmark = pytest.mark.alone

LARGEST_SHARES = {
    "HorovodCompressor": 0.52,
    "HorovodCompressorEF": 0.52,
    "Int8Compressor": 0.28,
    "PowerSGDCompressor(rank=4)": 0.02,
    "TopKCompressor(ratio=0.01)": 0.03,
}
"""Of what travels without a compressor."""

COUNTS = """
import json, sys
from pathlib import Path
from autodist_py import AutoDist
from autodist_py.strategy_builders.all_reduce import AllReduce
import numpy as np

def sent():
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(line.partition(":")[2].split()[8])

def bytes_of_a_step(compressor):
    autodist = AutoDist("spec.yaml", strategy_builder=AllReduce(compressor=compressor), seed=1)
    import tensorflow as tf
    layer = tf.Variable(np.zeros([2048, 2048], np.float32))
    with autodist:
        @autodist.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum((x @ layer) ** 2 + x @ layer, axis=1))
            layer.assign_sub(0.0001 * tape.gradient(loss, layer))
        data = np.random.default_rng(3).normal(size=(8, 2048)).astype(np.float32)
        for _ in range(12):  # In the first ones workers compare what they are given.
            step(data)
        before = sent()
        for _ in range(5):
            step(data)
        return (sent() - before) / 5

counted = {compressor: bytes_of_a_step(compressor) for compressor in sys.argv[1:]}
print("counted " + json.dumps(counted), flush=True)
"""


@pytest.fixture(scope="module")
def counted(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """For each host and compressor what a step sends."""
    folder: Path = tmp_path_factory.mktemp("bytes")
    (folder / "count.py").write_text(COUNTS)
    (folder / "spec.yaml").write_text(SPEC + SSH)
    run = lab.start(0, [sys.executable, "count.py", "NoneCompressor", *LARGEST_SHARES], folder)
    try:
        run.wait_for("counted", 2)
        assert run.end(ENDED_SECONDS) == 0, run.text
    finally:
        run.close()
    return [json.loads(line.partition("counted ")[2]) for line in run.lines if "counted " in line]


def test_without_a_compressor_each_host_sends_the_gradient_once(counted: list[dict[str, float]]) -> None:
    for host in counted:
        assert 1.0 <= host["NoneCompressor"] / (2048 * 2048 * 4) < 1.05


@pytest.mark.parametrize("compressor", LARGEST_SHARES)
def test_a_compressor_sends_no_more_than_its_share(counted: list[dict[str, float]], compressor: str) -> None:
    shares = [host[compressor] / host["NoneCompressor"] for host in counted]
    assert max(shares) <= LARGEST_SHARES[compressor], shares
