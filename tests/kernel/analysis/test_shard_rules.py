"""What workers compute of a variable's shards, each for itself: the same on all, to the last bit."""

import pytest
import tensorflow as tf

from autodist_py.kernel.analysis.shard_rules import REDUCTIONS


@pytest.mark.parametrize("op", ["L2Loss", "Sum"])
@pytest.mark.parametrize("read_elsewhere", [(), (0,), (0, 1), (1, 2), (0, 1, 2)])
def test_a_sum_of_shards_is_the_same_whoever_else_reads_them(op: str, read_elsewhere: tuple[int, ...]):
    """1e16 + 1 is 1e16 again, so these three are another number in another order."""

    @tf.function(autograph=False)
    def added_up(x: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        parts = [tf.square(x[index]) for index in range(3)]
        return REDUCTIONS[op](parts), [parts[index] for index in read_elsewhere]

    total, _ = added_up(tf.constant([1e8, 1.0, 1.0], tf.float64))
    assert total.numpy() == 1e16
