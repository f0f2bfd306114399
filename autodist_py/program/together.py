"""`Together`: the hook by which the cluster knows that this worker is in a step of all workers, and how it ended."""

import re
from collections.abc import Sequence
from contextlib import ExitStack

import tensorflow as tf

from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.input_check import SAME_DATA_ADVICE
from autodist_py.cluster.run_failure import cause_seconds
from autodist_py.cluster.step_hook import StepHook
from autodist_py.kernel.events import Collective
from autodist_py.kernel.passes.read_data import END_OF_DATA, OTHER_DATA
from autodist_py.kernel.passes.split_batch import UNEVEN_DATA
from autodist_py.proto.errors import ClusterError


class Together(StepHook):
    """Counts the steps, bounds how long one waits for other workers, and finds the run's cause for one that raises."""

    def __init__(self, cluster: Cluster, collectives: Sequence[Collective], timeout: float):
        """A program of these collectives, in their order, in which a step waits so many seconds for others.

        One of no collectives is none of all workers together, as far as waiting is concerned.
        """
        self._cluster = cluster
        self._timeout = timeout
        self._whats = {op: one.what for one in collectives for op in one.ops}
        whats = sorted(set(self._whats.values()), key=lambda what: ("gradients" not in what, what))
        one = f" (one of its {len(whats)} collectives)" if len(whats) > 1 else ""
        self._first = f"{whats[0]}{one}" if whats else ""
        self._step = ExitStack()

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        """See StepHook."""
        self._cluster.step = step
        if self._first:
            self._step.enter_context(self._cluster.together(self._timeout, self._first))

    def after(self, step: int) -> None:
        """See StepHook."""
        self._step.close()

    def failed(self, step: int, error: BaseException) -> None:
        """Raise the run's one cause if it has failed, or what `error` says of the data that the step reads itself.

        Raises:
            WorkerFailedError: another worker failed; the message names it, and why.
            ClusterError: the workers are given different batches.
            OutOfRangeError: an iterator that the step reads has ended, on this worker or another.
        """
        with self._step:
            if isinstance(error, tf.errors.OpError):
                self._raise_cause(error)

    def _raise_cause(self, error: tf.errors.OpError) -> None:
        where = self._where(error)
        self._cluster.stopped_in(where)
        data_error = _data_error(error)
        seconds = cause_seconds(error, self._cluster.heartbeat_timeout) if data_error is None else 0.0
        failure = self._cluster.failure(wait=seconds)
        if failure is not None:
            if where:
                failure.add_note(f"while this worker waited for the others to combine {where}")
            raise failure from error
        self._cluster.stopped_in("")  # The script may go on, and waits for nobody meanwhile.
        if data_error is not None and data_error is not error:
            raise data_error from error

    def _where(self, error: tf.errors.OpError) -> str:
        """What the collective combines that raised; empty, if none did."""
        return next((what for op, what in self._whats.items() if f"{{{{node {op}}}}}" in str(error.message)), "")


def _data_error(error: tf.errors.OpError) -> Exception | None:
    """What `error` says of the data that a step reads by itself, if it does; no failure of a worker looks like that."""
    if isinstance(error, tf.errors.OutOfRangeError):
        return error
    kinds = "|".join(map(re.escape, (END_OF_DATA, OTHER_DATA, UNEVEN_DATA)))
    found = re.search(f"({kinds})\\] \\[([0-9 ]*)\\]", error.message)
    if found is None:
        return None
    what, workers = found[1], found[2].replace(" ", ", ")
    if what == END_OF_DATA:
        return tf.errors.OutOfRangeError(error.node_def, error.op, f"End of sequence on workers {workers}")
    if what == UNEVEN_DATA:
        return ClusterError(
            "the batches of a step have several numbers of rows. Each worker must have one share of them all, by "
            f"which its means count; on workers {workers} the shares differ. Give all workers the same batches "
            '(batch="global"), or batches of sizes in the same proportions'
        )
    return ClusterError(
        f"every worker must be given the same global batch, but what the iterator gives on workers {workers} differs "
        f"from the chief's. {SAME_DATA_ADVICE}"
    )
