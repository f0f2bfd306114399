"""The steps of `fit` and `evaluate`: batch after batch of Keras's iterators, until all workers are at their end."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.proto.errors import ClusterError

_END = object()


@dataclass(frozen=True, slots=True)
class Workers:
    """What the Keras door asks of the cluster.

    Attributes:
        distribute: a step of one device -> the step of all workers; its arguments are named in `batched`.
        rank: this worker's; the chief's is 0.
        num_workers: how many there are.
        num_replicas: how many share a batch.
        batch: "global" or "local", as AutoDist says.
        looks_ahead: whether steps tell who has another batch: where there are several workers, or such a run is
            compared with this one.
        compare: each worker's value, by rank; every worker calls it.
        take_chiefs: makes variables equal to the chief's; every worker calls it.
    """

    distribute: Callable[..., Callable[..., Any]]
    rank: int
    num_workers: int
    num_replicas: int
    batch: str
    looks_ahead: bool
    compare: Callable[[bytes], Mapping[int, bytes]]
    take_chiefs: Callable[[Iterable[tf.Variable]], None]


class Ends:
    """Whether the workers' data end together: one device's data end once.

    Attributes:
        others_go_on: whether some worker has another batch, as of the last step.
    """

    def __init__(self, name: str):
        self._name = name
        self._some: Any = False
        self._all: Any = True

    @property
    def others_go_on(self) -> bool:
        """Whether some worker has another batch after the last step."""
        return bool(self._some)

    def note(self, some: Any, all_: Any) -> None:
        """After a step: whether some, and all, workers have another batch; tensors, which are read when needed."""
        self._some, self._all = some, all_

    def require_together(self) -> None:
        """Refuse data that go on after the last step on some workers only.

        Raises:
            ClusterError: they do.
        """
        some, all_ = bool(self._some), bool(self._all)
        self._some, self._all = False, True
        if some and not all_:
            raise ClusterError(
                f"the data of '{self._name}' have ended on some workers, and not on others. Every worker must be given "
                'the same data, as one device would be; if each has its own part, say AutoDist(batch="local")'
            )


class Steps:
    """A function of an iterator, as Keras calls it: takes as many batches as Keras wants at once, a step for each.

    Where it `looks_ahead`, it takes one batch ahead, and each step tells all of them who has another one: with
    `batch="global"` to refuse data of different lengths, with "local" to go on with no examples until all have ended.

    Attributes:
        examples: how many examples all workers together have been given.
    """

    def __init__(self, step: Callable[[Any], Any], workers: Workers, ends: Ends, num_steps: Callable[[], int]):
        """Make steps of `step`; `num_steps` says how many Keras wants at once."""
        self._workers, self._ends, self._num_steps = workers, ends, num_steps
        self._iterator: Any = None
        self._ahead: Any = _END
        self._rows: list[Any] = []
        self._examples = 0

        def one_step(data: Any) -> Any:
            return step(data)

        def one_step_of_many(data: Any, has_next_batch: tf.Tensor) -> Any:
            # Floats, and compared: so they are summed with the statistics of metrics, not apart.
            going_on, rows = tf.reduce_sum(has_next_batch), tf.reduce_sum(tf.ones_like(has_next_batch))
            return step(data), going_on > 0, going_on >= rows, tf.round(rows)

        self._step = (
            workers.distribute(one_step_of_many, batched=["data", "has_next_batch"])
            if workers.looks_ahead
            else workers.distribute(one_step, batched=["data"])
        )

    def __call__(self, iterator: Iterator[Any]) -> Any:
        """The logs of the last step.

        Raises:
            StopIteration: the iterator has ended.
            ClusterError: it has ended here, and has not on another worker, or the other way round; or it has nothing.
        """
        logs = self._next_step(iterator)
        for _ in range(1, self._num_steps()):
            try:
                logs = self._next_step(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
        return logs

    @property
    def examples(self) -> int:
        """How many examples all workers together have been given."""
        self._examples += sum(int(rows) for rows in self._rows)
        self._rows.clear()
        return self._examples

    def _next_step(self, iterator: Iterator[Any]) -> Any:
        if not self._workers.looks_ahead:
            data = _present(next(iterator))
            self._rows.append(_num_rows(data))
            return self._step(data)
        if self._workers.batch == "global":
            self._ends.require_together()
        data = self._take(iterator)
        has_next = self._ahead is not _END
        logs = self._shared_step(data, has_next=has_next)
        if self._workers.batch == "local" and not has_next:
            nothing = tf.nest.map_structure(lambda leaf: leaf[:0], data)
            while self._ends.others_go_on:
                logs = self._shared_step(nothing, has_next=False)
        return logs

    def _take(self, iterator: Iterator[Any]) -> Any:
        """The next batch; the one after it is `_ahead`."""
        if iterator is not self._iterator:
            self._iterator, self._ahead = iterator, _next(iterator)
            if self._ahead is _END:
                raise ClusterError(
                    f"worker {self._workers.rank} was given no batch at all, while the others wait for it; every "
                    "worker needs one, of its own part too: share out more files, or smaller batches"
                )
        data = self._ahead
        if data is _END:
            self._iterator = None
            raise StopIteration
        self._ahead = _next(iterator)
        return _present(data)

    def _shared_step(self, data: Any, *, has_next: bool) -> Any:
        num_rows = _num_rows(data)
        flags = np.full([num_rows], has_next, np.float32)
        logs, some, all_, rows = self._step(data, flags)
        if self._workers.batch == "global" and num_rows < self._workers.num_replicas:
            # Some worker has no row, and so no say.
            everyone = self._workers.compare(bytes([has_next])).values()
            some, all_ = any(map(any, everyone)), all(map(any, everyone))
        self._ends.note(some, all_)
        self._rows.append(rows)
        return logs


def _next(iterator: Iterator[Any]) -> Any:
    try:
        return next(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return _END


def _num_rows(data: Any) -> int:
    return int(next(np.shape(leaf)[0] for leaf in tf.nest.flatten(data) if leaf is not None))


def _present(data: Any) -> Any:
    """`data` with None for what Keras's adapters mark as absent."""
    leaves = tf.nest.flatten(data)
    if not any(isinstance(leaf, tf.experimental.Optional) for leaf in leaves):
        return data
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
