"""The values of variables that live on servers, for a worker that asks: by itself, at any time between its steps."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.exit_hooks import TensorFlowThread, one_line
from autodist_py.cluster.exit_stack import Ending, at_exit
from autodist_py.cluster.tf_adapter import task_device
from autodist_py.kernel.exchange.queues import named_queue
from autodist_py.proto.errors import ClusterError
from autodist_py.servers.queues import HOST, Queue, session_between
from autodist_py.servers.store import ServerStore

_ASKED = (tf.int64,)
"""The asking worker's rank, and the three numbers of each piece."""
_GIVEN = (tf.string,)
"""The elements of each piece, serialized."""
_MESSAGE_BYTES = 1 << 28
"""What a message holds at most: TensorFlow serializes no tensor of 2 GiB."""

_END_SECONDS = 5.0


class _Piece(NamedTuple):
    """Elements of the variable of that number, from `first` up to `last`, in their order in memory."""

    number: int
    first: int
    last: int


def _messages(wanted: Mapping[int, tf.TensorSpec]) -> Iterator[list[_Piece]]:
    """What to ask for: all elements of each variable, one after the other."""
    pieces: list[_Piece] = []
    nbytes = 0
    for number, variable in wanted.items():
        size, item_bytes = variable.shape.num_elements(), max(1, variable.dtype.size)
        most = max(1, _MESSAGE_BYTES // item_bytes)
        for first in range(0, max(1, size), most):
            piece = _Piece(number, first, min(size, first + most))
            more = (piece.last - piece.first) * item_bytes
            if pieces and nbytes + more > _MESSAGE_BYTES:
                yield pieces
                pieces, nbytes = [], 0
            pieces.append(piece)
            nbytes += more
    if pieces:
        yield pieces


class ServerValues:
    """One AutoDist object's way to ask servers for values, and to answer where this worker is one."""

    def __init__(self, cluster: Cluster, name: str, held: ServerStore):
        """Begin to answer; every worker does, before any asks.

        Args:
            cluster: the workers.
            name: of no other object, and the same on every worker.
            held: the variables that live here.
        """
        self._cluster, self._name, self._held = cluster, name, held
        self._closed = threading.Event()
        self._sessions: dict[int, Callable[[list[int]], list[bytes]]] = {}
        self._open_sessions: list[tf.compat.v1.Session] = []
        with tf_adapter.eagerly(), tf.device(HOST):
            self._asked = Queue(f"{name}/ask", _ASKED)
            self._given = [Queue(f"{name}/give-{worker}", _GIVEN) for worker in range(cluster.num_workers)]
        self._thread = TensorFlowThread(self._answer, "autodist-values")
        self._forget = cluster.on_failure(lambda cause: self.close())
        self._forget_exit = at_exit(Ending.VALUES, self.close)
        self._thread.start()

    def ask(self, wanted: Mapping[int, tf.TensorSpec], server: int) -> dict[int, tf.Tensor]:
        """The values that variables, by number, have on the worker of rank `server`, which is another one."""
        try:
            return self._ask(wanted, server)
        except (tf.errors.OpError, RuntimeError) as error:  # A closed session's is a RuntimeError.
            names = ", ".join(f"'{spec.name}'" for spec in wanted.values())
            raise self._cluster.failure() or ClusterError(
                f"worker {server} cannot be asked for the values of {names}, which live there: {one_line(error)}. Look "
                "at them before its script, or its AutoDist, ends"
            ) from error

    def _ask(self, wanted: Mapping[int, tf.TensorSpec], server: int) -> dict[int, tf.Tensor]:
        if self._closed.is_set():
            raise RuntimeError("this worker's AutoDist is closed")
        ask = self._sessions.get(server) or self._sessions.setdefault(server, self._asking(server))
        found: dict[int, tf.Tensor] = {}
        parts: list[tf.Tensor] = []
        for pieces in _messages(wanted):
            values = ask([self._cluster.rank, *(number for piece in pieces for number in piece)])
            with tf_adapter.eagerly(), tf.device(HOST):
                for piece, value in zip(pieces, values, strict=True):
                    spec = wanted[piece.number]
                    parts.append(tf.io.parse_tensor(value, spec.dtype))
                    if piece.last == spec.shape.num_elements():
                        found[piece.number] = tf.reshape(tf.concat(parts, axis=0), spec.shape)
                        parts.clear()
        return found

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()
        self._forget()
        self._forget_exit()
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
                    pieces = map(_Piece, numbers[::3], numbers[1::3], numbers[2::3])
                    with self._held.steady():
                        values = [tf.io.serialize_tensor(self._elements(piece)) for piece in pieces]
                    self._given[worker].put([tf.stack(values)])
                except Exception as error:
                    if not self._closed.is_set():  # Who asked waits for ever, if the run goes on.
                        self._cluster.abort(one_line(error))
                    return

    def _elements(self, piece: "_Piece") -> tf.Tensor:
        return tf.reshape(self._held.value(piece.number), [-1])[piece.first : piece.last]

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
