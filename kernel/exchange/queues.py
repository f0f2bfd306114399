"""Queues that are found by their names, in graphs and in the eager context of the process that has them."""

from collections.abc import Sequence

import tensorflow as tf

QUEUE_CAPACITY = 2
"""How many messages a queue holds: one is on its way while the next is made."""

RUNG = (tf.int64,)
"""What a bell's queue holds: a worker's rank, and the number of the exchange of which it has sent a message."""

PAUSED = -1
"""In place of that number: the worker sends nothing for now."""

LOST = -2
"""In place of that number: the worker never sends anything again."""


def named_queue(name: str, types: Sequence[tf.DType]) -> tf.Tensor:
    """The handle of the queue of that name on the current device; it is made when it is first asked for."""
    return tf.raw_ops.FIFOQueueV2(component_types=list(types), capacity=QUEUE_CAPACITY, shared_name=name)
