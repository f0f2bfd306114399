"""The size of buckets where the strategy does not say: by the bytes of a step and the slowest link of the spec."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.kernel.collectives.bucket_size import LARGEST_BUCKET, automatic_bucket_bytes
from autodist_py.proto.graph_item import Gradient, GraphItem, Variable
from tests.support.processes import AUTODIST, ended

MESSAGE = 1.5e-3
SIZES = st.lists(st.integers(1, 10**8), min_size=1, max_size=5)


def item_of(sizes: list[int], *, is_sparse: bool = False) -> GraphItem:
    """A program whose gradients have so many numbers of 4 bytes."""
    names = [f"variable_{index}" for index in range(len(sizes))]
    return GraphItem(
        b"",
        tuple(Variable(name, "float32", (size, 1)) for name, size in zip(names, sizes, strict=True)),
        tuple(
            Gradient(name, (f"{name}/v:0", f"{name}/i:0", f"{name}/s:0") if is_sparse else (f"{name}/v:0",))
            for name in names
        ),
    )


@given(sizes=SIZES, bandwidth=st.none() | st.floats(1e9, 1e12))
def test_over_fast_links_and_within_a_host_buckets_are_the_largest(sizes, bandwidth):
    assert automatic_bucket_bytes(item_of(sizes), bandwidth) == LARGEST_BUCKET == 2 << 20


@given(sizes=SIZES, bandwidth=st.floats(1e6, 9.99e8))
def test_over_slow_links_no_other_number_of_buckets_takes_less(sizes, bandwidth):
    """What is not hidden: a message for each bucket, and the last one's bytes."""
    total, size = 4 * sum(sizes), automatic_bucket_bytes(item_of(sizes), bandwidth)

    def seconds(number: float) -> float:
        return number * MESSAGE + 8 * total / number / bandwidth

    assert min(1 << 16, LARGEST_BUCKET) <= size <= LARGEST_BUCKET
    if 1 << 16 < size < LARGEST_BUCKET and total / size < 999:
        for factor in (0.5, 0.9, 1.1, 2.0):
            assert seconds(total / size) <= seconds(factor * total / size) * (1 + 1e-4)


@given(size=st.integers(1, 10**9), bandwidth=st.floats(1e3, 9.99e8), is_sparse=st.booleans())
def test_there_are_no_more_than_a_thousand_of_them_but_by_the_largest(size, bandwidth, is_sparse):
    """Also of a table, which may travel as a dense gradient."""
    number = 4 * size / automatic_bucket_bytes(item_of([size], is_sparse=is_sparse), bandwidth)
    assert number <= max(1001, 4 * size / LARGEST_BUCKET)


def test_rows_of_tables_do_not_count():
    assert automatic_bucket_bytes(item_of([10**7], is_sparse=True), 1e8) == 1 << 16
    assert automatic_bucket_bytes(item_of([10**6]), 1e8) == round(math.sqrt(4e6 * 1e8 / 8 * MESSAGE))


SPEC = """
nodes:
  - {{address: 10.99.0.1, chief: true, network_bandwidth: {bandwidth}}}
  - {{address: 10.99.0.2, network_bandwidth: 10}}
"""
LAYERS = """
import tensorflow as tf
from autodist_py import AutoDist

autodist = AutoDist(strategy_builder="AllReduce")
weights = [tf.Variable(tf.zeros([300, 300]), name=f"weights_{index}") for index in range(6)]

@autodist.function
def step(x):
    with tf.GradientTape() as tape:
        for weight in weights:
            x = tf.tanh(x * tf.reduce_sum(tf.tanh(weight)))
        loss = tf.reduce_mean(x)
    for weight, gradient in zip(weights, tape.gradient(loss, weights)):
        weight.assign_sub(gradient)

step(tf.ones([8, 300]))
"""


@pytest.mark.parametrize(("bandwidth", "buckets"), [(1, 2), (0.2, 6)])
def test_a_spec_that_states_a_slow_link_has_smaller_buckets(bandwidth, buckets, tmp_path):
    (tmp_path / "train.py").write_text(LAYERS)
    (tmp_path / "spec.yaml").write_text(SPEC.format(bandwidth=bandwidth))
    done = ended([*AUTODIST, "plan", "--spec", "spec.yaml", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("event AllReduceBucket") == buckets, done.stdout
