"""The steps of `fit` and `evaluate`: batch after batch of Keras's iterators, until all workers are at their end."""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.cluster.input_check import SAME_DATA_ADVICE
from autodist_py.proto.errors import CaptureError, ClusterError

_END = object()
_HASHED_ROWS = 16
_HASHES = 4096
"""How many digests there are: as float32, their sum over 4,096 rows is exact."""
_FOLDED_STEPS = 256


@dataclass(frozen=True, slots=True)
class Workers:
    """What the Keras door asks of the cluster.

    Attributes:
        distribute: a step of one device -> the step of all workers; its arguments are named in `batched`, and those
            that each worker has of its own in `own`.
        rank: this worker's; the chief's is 0.
        num_workers: how many there are.
        num_replicas: how many share a batch.
        batch: "global" or "local", as AutoDist says.
        looks_ahead: whether steps tell who has another batch: where there are several workers, or such a run is
            compared with this one.
        compare: each worker's value, by rank; every worker calls it.
        take_chiefs: makes variables equal to the chief's; every worker calls it.
        sync: makes variables equal to the servers'; every worker calls it.
        pull: makes this worker's variables equal to the servers'.
        await_chief: returns when the chief is at this place of its script, too, or past it; the chief waits for nobody.
        are_apart: whether workers take their steps by themselves.
    """

    distribute: Callable[..., Callable[..., Any]]
    rank: int
    num_workers: int
    num_replicas: int
    batch: str
    looks_ahead: bool
    compare: Callable[[bytes], Mapping[int, bytes]]
    take_chiefs: Callable[[Iterable[tf.Variable]], None]
    sync: Callable[[Iterable[tf.Variable]], None]
    pull: Callable[[Iterable[tf.Variable]], None]
    await_chief: Callable[[str], None]
    are_apart: Callable[[], bool]


class Ends:
    """Whether the workers' data are the same, and end together, as one device's would.

    What a step says of it is looked at before the next one: nobody waits for it.
    """

    def __init__(self, name: str):
        self._name = name
        self._some: Any = False
        self._all: Any = True
        self._digests: tuple[Any, int] = (0, 0)

    def note(self, some: Any, all_: Any, digest: Any, own_digest: int) -> None:
        """After a step: whether some, and all, workers have another batch; the mean of their data's digests."""
        self._some, self._all, self._digests = some, all_, (digest, own_digest)

    def require_same(self) -> None:
        """Refuse other data than the other workers'.

        Raises:
            ClusterError: those of the last step were.
        """
        digest, own = self._digests
        self._digests = (0, 0)
        if abs(float(digest) - own) > 0.25:
            raise ClusterError(
                f"every worker must be given the same global batch, but the batches of '{self._name}' differ between "
                f"workers. {SAME_DATA_ADVICE}"
            )

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
                "as many batches as the others. Give all the same data, as one device would have. Or give each its own "
                'part, with AutoDist(batch="local"), as a tf.data.Dataset: it goes on empty until all have ended'
            )


class Steps:
    """A function of an iterator, as Keras calls it: takes as many batches as Keras wants at once, a step for each.

    Where it `looks_ahead`, it takes one batch ahead, and each step tells all of them who has another one.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        workers: Workers,
        ends: Ends,
        *,
        name: str,
        num_steps: Callable[[], int],
        goes_on_empty: Callable[[], bool],
    ):
        """Make steps of `step`.

        Args:
            step: one step of one device, on a batch.
            workers: who takes part.
            ends: what is known of their data.
            name: what the steps do, to which model.
            num_steps: how many Keras wants at once.
            goes_on_empty: whether iterators give empty batches when their data have ended: see `endless`.
        """
        self._workers, self._ends, self._name = workers, ends, name
        self._num_steps, self._goes_on_empty = num_steps, goes_on_empty
        self._iterator: Any = None
        self._ahead: Any = _END
        self._some_go_on: Any = False
        self._rows: list[Any] = []
        self._examples = 0

        def one_step(data: Any) -> Any:
            return step(data)

        def one_step_of_many(data: Any, has_next: tf.Tensor, digests: tf.Tensor) -> Any:
            # Floats, and compared or rounded: so they are summed with the statistics of metrics, not apart.
            going_on, rows = tf.reduce_sum(has_next), tf.reduce_sum(tf.ones_like(has_next))
            digest = tf.math.divide_no_nan(tf.reduce_sum(digests), tf.round(rows))
            return step(data), going_on > 0, going_on >= rows, tf.round(rows), digest

        self._step = (
            workers.distribute(one_step_of_many, batched=["data", "has_next", "digests"], own=["has_next", "digests"])
            if workers.looks_ahead
            else workers.distribute(one_step, batched=["data"])
        )

    def __call__(self, iterator: Iterator[Any]) -> Any:
        """The logs of the last step.

        Raises:
            StopIteration: the iterator has ended; with `goes_on_empty`, those of all workers have.
            ClusterError: it has ended here, and has not on another worker, or the other way round; or its data are
                not those of the other workers; or these do something else.
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
            self._count(_num_rows(data))
            return self._step(data)
        self._ends.require_same()
        if not self._goes_on_empty():
            self._ends.require_together()
        if iterator is not self._iterator:
            self._begin(iterator)
        elif self._goes_on_empty() and not self._some_go_on:
            raise StopIteration
        data = self._ahead
        if data is _END:
            raise StopIteration
        self._ahead = _next(iterator)
        return self._shared_step(_present(data))

    def _begin(self, iterator: Iterator[Any]) -> None:
        """Go on with `iterator`, as all workers must."""
        self._iterator, self._ahead = iterator, _next(iterator)
        everyone = self._compare(self._has_next, self._name)
        for rank, (_, name) in enumerate(everyone):
            if name != everyone[0][1]:
                raise ClusterError(
                    f"worker {rank} begins {name}, while the chief begins {everyone[0][1]}. Every worker must call "
                    "fit, evaluate and their like, in the same order; callbacks that do must do so on every worker"
                )
        without = [rank for rank, (has_next, _) in enumerate(everyone) if not has_next]
        if len(without) == len(everyone):
            raise StopIteration
        if without and not self._goes_on_empty():
            raise ClusterError(
                f"worker {without[0]} was given no batch at all, while others were; every worker must be given as many"
            )

    @property
    def _has_next(self) -> bool:
        return self._ahead is not _END and (not self._goes_on_empty() or _num_rows(_present(self._ahead)) > 0)

    def _shared_step(self, data: Any) -> Any:
        num_rows, has_next = _num_rows(data), self._has_next
        if self._workers.batch == "local":
            num_rows = self._num_own_rows(data)
        own_digest = _digest(data) if self._workers.batch == "global" else 0
        logs, some, all_, rows, digest = self._step(
            data, np.full([num_rows], has_next, np.float32), np.full([num_rows], own_digest, np.float32)
        )
        if self._workers.batch == "global" and _most_parts(data) < self._workers.num_replicas:
            # Some worker has no row, and so no say.
            everyone = self._compare(has_next, own_digest)
            some, all_ = (decide(going_on for going_on, _ in everyone) for decide in (any, all))
            digest = everyone[0][1]  # The chief's.
        self._some_go_on = some
        self._ends.note(some, all_, digest, own_digest)
        self._count(rows)
        return logs

    def _num_own_rows(self, data: Any) -> int:
        """Of the first of this worker's batches: each worker's is taken for the same one in all steps.

        Raises:
            CaptureError: it has no rows, and another has.
        """
        first = _sizes(data)[0]
        if not first and _num_rows(data):
            raise CaptureError(
                f"{self._name}: the first part of the data has no rows, and another has {_num_rows(data)}. With "
                'AutoDist(batch="local") the first part says whether a worker has examples; give it some in each step, '
                'or all workers the same data (batch="global")'
            )
        return first

    def _compare(self, *value: Any) -> list[Any]:
        """The value of each worker, in rank order; all workers ask at once."""
        everyone = self._workers.compare(json.dumps(value).encode())
        return [json.loads(everyone[rank]) for rank in sorted(everyone)]

    def _count(self, rows: Any) -> None:
        self._rows.append(rows)
        if len(self._rows) == _FOLDED_STEPS:
            self._examples += sum(int(one) for one in self._rows)
            self._rows.clear()


def endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset`, then batches without examples, without end."""
    nothing = tf.nest.map_structure(_empty, dataset.element_spec)
    # The filter makes its length unknown: Keras does not ask for a number of steps then.
    return dataset.concatenate(tf.data.Dataset.from_tensors(nothing).repeat()).filter(lambda *_: True)


def _empty(spec: tf.TensorSpec) -> tf.Tensor:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        raise CaptureError(
            'with AutoDist(batch="local") a dataset\'s elements are dense tensors, whose first dimension is the batch, '
            f"so that it can go on empty when other workers have more; received {spec}"
        )
    return tf.zeros([0, *(size or 1 for size in spec.shape[1:])], spec.dtype)


def _next(iterator: Iterator[Any]) -> Any:
    try:
        return next(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return _END


def _num_rows(data: Any) -> int:
    """Of the largest of its batches."""
    return max(_sizes(data))


def _sizes(data: Any) -> list[int]:
    return [int(np.shape(leaf)[0]) for leaf in tf.nest.flatten(data) if leaf is not None]


def _most_parts(data: Any) -> int:
    """Into how many parts the rows can be cut at least, none of which is empty (see the pass split-batch)."""
    sizes = set(_sizes(data))
    return sizes.pop() if len(sizes) == 1 else math.gcd(*sizes) // 2


def _digest(data: Any) -> int:
    """Of the first rows, one of a few thousand numbers."""
    code = 0
    for leaf in tf.nest.flatten(data):
        if leaf is not None:
            rows = np.asarray(leaf[:_HASHED_ROWS])
            content = repr(rows.tolist()).encode() if rows.dtype.hasobject else np.ascontiguousarray(rows).tobytes()
            code = zlib.crc32(content, code)
    return code % _HASHES


def _present(data: Any) -> Any:
    """`data` with None for what Keras's adapters mark as absent."""
    leaves = tf.nest.flatten(data)
    if not any(isinstance(leaf, tf.experimental.Optional) for leaf in leaves):
        return data
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
