"""Queues of this process, used in its eager context, and the sessions that reach those of others."""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from autodist_py.cluster.tf_adapter import server_target, task_device
from autodist_py.kernel.exchange.queues import named_queue

HOST = "/device:CPU:0"
"""The device of all queues of a process."""


class Queue:
    """A queue of this process. It is made and used in the eager context, on `HOST`."""

    def __init__(self, name: str, types: Sequence[tf.DType]):
        self._types, self._handle = list(types), named_queue(name, types)

    def put(self, components: Sequence[tf.Tensor]) -> None:
        """Add an element; waits while the queue is full."""
        tf.raw_ops.QueueEnqueueV2(handle=self._handle, components=list(components))

    def take(self) -> list[tf.Tensor]:
        """The first element; waits while there is none.

        Raises:
            OutOfRangeError: the queue is closed.
        """
        return tf.raw_ops.QueueDequeueV2(handle=self._handle, component_types=self._types)

    def close(self) -> None:
        """Whoever waits for the queue, or will, gets an error."""
        tf.raw_ops.QueueCloseV2(handle=self._handle, cancel_pending_enqueues=True)


def session_between(ranks: Iterable[int], graph: tf.Graph) -> tf.compat.v1.Session:
    """A session of this process's server that asks nothing of other workers, not even whether they are there."""
    tasks = [task_device(rank).partition("/device")[0] for rank in ranks]
    config = tf.compat.v1.ConfigProto(device_filters=tasks)
    return tf.compat.v1.Session(server_target(), graph=graph, config=config)
