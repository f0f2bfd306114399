"""How much each replica's value counts."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist_py.kernel.analysis.replica_weights import joined_rows, weighted
from autodist_py.proto.graph_item import Gradient


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 50), min_size=2, max_size=9).filter(any))
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.float32, tf.float64])
def test_the_replicas_shares_add_up_to_the_whole(dtype: tf.DType, rows: list[int]) -> None:
    shares = [tf.constant(own / sum(rows), tf.float64) for own in rows]
    total = tf.add_n([weighted(tf.ones([], dtype), share) for share in shares])
    assert abs(float(total) - 1.0) <= 1e-6


def joined(indices: str) -> tuple[list[int], list[float]]:
    gradient = Gradient("table", ("i:0", "v:0", "s:0"), "sum", indices)
    parts = [([2, 0, 2], [1.0, 2.0, 4.0]), ([2, 0, 1], [8.0, 16.0, 32.0])]
    found = joined_rows(gradient, [(tf.constant(ids), tf.constant(values)) for ids, values in parts])
    return tuple(np.array(one).tolist() for one in found)


def test_rows_of_several_replicas_are_what_their_indices_say() -> None:
    assert joined("") == ([2, 0, 2, 2, 0, 1], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert joined("same") == ([2, 0, 2], [9.0, 18.0, 36.0])
    assert joined("distinct") == ([2, 0, 1], [13.0, 18.0, 32.0])
