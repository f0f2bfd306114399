"""The values of variables that live on servers, for a worker that asks: by itself, at any time between its steps."""

import atexit
import threading
from collections.abc import Callable, Mapping

import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.kernel.serving.queues import named_queue
from autodist_py.runtime.cluster import Cluster
from autodist_py.runtime.queues import HOST, Queue, session_between
from autodist_py.runtime.tf_adapter import task_device

_ASKED = (tf.int64,)
"""The asking worker's rank, and the numbers of the variables."""
_GIVEN = (tf.string,)
"""Their values, serialized."""

_END_SECONDS = 5.0


class ServedValues:
    """One AutoDist object's way to ask servers for values, and to answer where this worker is one."""

    def __init__(self, cluster: Cluster, name: str, variable: Callable[[int], tf.Variable], lock: threading.Lock):
        """Begin to answer; every worker does, before any asks.

        Args:
            cluster: the workers.
            name: of no other object, and the same on every worker.
            variable: the variable of a number.
            lock: of this worker's updates, which are whole when values are read.
        """
        self._cluster, self._name, self._variable, self._lock = cluster, name, variable, lock
        self._sessions: dict[int, Callable[[list[int]], list[bytes]]] = {}
        self._open_sessions: list[tf.compat.v1.Session] = []
        with tf_adapter.eagerly(), tf.device(HOST):
            self._asked = Queue(f"{name}/ask", _ASKED)
            self._given = [Queue(f"{name}/give-{worker}", _GIVEN) for worker in range(cluster.num_workers)]
        self._thread = threading.Thread(target=self._answer, name="autodist-values", daemon=True)
        self._thread.start()
        self._forget = cluster.on_failure(lambda cause: self.close())
        atexit.register(self.close)

    def pull(self, wanted: Mapping[int, tf.Variable], server: int) -> None:
        """Give the variables, by number, the values that they have on the worker of rank `server`."""
        if server == self._cluster.rank or not wanted:
            return
        ask = self._sessions.get(server) or self._sessions.setdefault(server, self._asking(server))
        values = ask([self._cluster.rank, *wanted])
        with tf_adapter.eagerly():
            for variable, value in zip(wanted.values(), values, strict=True):
                variable.assign(tf.io.parse_tensor(value, variable.dtype.base_dtype))

    def close(self) -> None:
        """Answer no more."""
        self._forget()
        atexit.unregister(self.close)
        with tf_adapter.eagerly(), tf.device(HOST):
            for queue in (self._asked, *self._given):
                queue.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)
        for session in self._open_sessions:
            session.close()
        self._sessions.clear()

    def _answer(self) -> None:
        with tf_adapter.eagerly(), tf.device(HOST):
            while True:
                try:
                    worker, *numbers = self._asked.take()[0].numpy()
                    with self._lock:
                        values = [tf.io.serialize_tensor(self._variable(number).read_value()) for number in numbers]
                    self._given[worker].put([tf.stack(values)])
                except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
                    return  # It was closed.

    def _asking(self, server: int) -> Callable[[list[int]], list[bytes]]:
        """What asks the server, from this process."""
        with tf.Graph().as_default() as graph, tf.device(task_device(server)):
            asked = tf.compat.v1.placeholder(tf.int64, [None])
            ask = tf.raw_ops.QueueEnqueueV2(handle=named_queue(f"{self._name}/ask", _ASKED), components=[asked])
            with tf.control_dependencies([ask]):
                given = named_queue(f"{self._name}/give-{self._cluster.rank}", _GIVEN)
                (values,) = tf.raw_ops.QueueDequeueV2(handle=given, component_types=list(_GIVEN))
        session = session_between([self._cluster.rank, server], graph)
        self._open_sessions.append(session)
        return session.make_callable(values, [asked])
