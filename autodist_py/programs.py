"""Programs as the doors run them: a step of all workers, or a run of this one alone."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from autodist_py.kernel.passes.read_data import END_OF_DATA, OTHER_DATA
from autodist_py.kernel.passes.split_batch import UNEVEN_DATA
from autodist_py.kernel.program import Launch
from autodist_py.proto.errors import ClusterError
from autodist_py.runtime.cluster import Cluster
from autodist_py.runtime.executor import Executor
from autodist_py.runtime.homes import Homes
from autodist_py.runtime.input_check import SAME_DATA_ADVICE, InputCheck
from autodist_py.runtime.parameter_server import Messages
from autodist_py.served import ServedCopies
from autodist_py.step_times import StepTimes
from autodist_py.timeline import Timeline


class StepProgram:
    """A distributed program: counts its steps, and reports the cluster's one cause when it fails."""

    def __init__(
        self,
        executor: Executor,
        cluster: Cluster,
        check_inputs: InputCheck,
        copies: ServedCopies,
        messages: Messages | None = None,
        *,
        launches: Sequence[Launch] = (),
        timeout: float = 0.0,
        timeline: Timeline | None = None,
        times: StepTimes | None = None,
        may_go: bool = False,
    ):
        """A program whose collectives are `launches`, in their order, in which a step waits so long for others.

        One of no launches is none of all workers together, as far as waiting is concerned. It `may_go` if it keeps
        nothing, and all workers run it in the same steps.
        """
        self.goes_among = "those of all workers" if may_go else ""
        self._executor = executor
        self._copies = copies
        self._messages = messages
        self._cluster = cluster
        self._check_inputs = check_inputs
        self._timeline = timeline
        self._times = times
        self._waits = {op: launch.what for launch in launches for op in launch.ops}
        whats = sorted({launch.what for launch in launches}, key=lambda what: ("gradients" not in what, what))
        one = f" (one of its {len(whats)} collectives)" if len(whats) > 1 else ""
        self._together = (timeout, f"{whats[0]}{one}") if whats else None

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One step, together with all other workers.

        Raises:
            WorkerFailedError: another worker failed; the message names it, and why.
            ClusterError: the workers are given different batches.
            OutOfRangeError: an iterator that the step reads has ended, on this worker or another.
        """
        self._cluster.check()
        if self._messages is not None and self._messages.is_closed:
            raise _ended(self._messages.error)
        self._cluster.step += 1
        with nullcontext() if self._together is None else self._cluster.together(*self._together):
            return self._run(feeds)

    def _run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        self._check_inputs(feeds)
        self._copies.before_step()
        if self._timeline is not None:
            self._timeline.before_step()
        try:
            with nullcontext() if self._times is None else self._times.step():
                results = self._executor.run(feeds)
        except tf.errors.OpError as error:
            where = self._where(error)
            self._cluster.stopped_in(where)
            if self._messages is not None and self._messages.is_closed:
                raise self._cluster.failure() or _ended(self._messages.error) from error
            data_error = _data_error(error)
            failure = self._cluster.failure() if data_error is None else self._cluster.failure(wait=0.0)
            if failure is not None:
                if where:
                    failure.add_note(f"while this worker waited for the others to combine {where}")
                raise failure from error
            self._cluster.stopped_in("")  # The script may go on, and waits for nobody meanwhile.
            if data_error is None and self._messages is not None:
                self._messages.close()  # What this step has sent belongs to no other.
                self._copies.after_failed_step()
            if data_error is None or data_error is error:
                raise
            raise data_error from error
        self._copies.after_step()
        if self._timeline is not None:
            self._timeline.after_step(self._waits)
        return results

    def _where(self, error: tf.errors.OpError) -> str:
        """What the collective combines that raised; empty, if none did."""
        return next((what for op, what in self._waits.items() if f"{{{{node {op}}}}}" in str(error.message)), "")


class AloneProgram:
    """A program that this worker runs by itself."""

    def __init__(
        self,
        executor: Executor,
        variables: Mapping[str, tf.Variable],
        written: Mapping[str, tf.Variable],
        homes: Homes,
        on_written: Callable[[Mapping[str, tf.Variable]], None],
        *,
        may_go: bool = False,
    ):
        """It reads `variables`, and writes `written`, of which `on_written` is told after each run.

        It `may_go` if it keeps nothing.
        """
        self.goes_among = "this worker's own" if may_go else ""
        self._executor = executor
        self._variables = list(variables.values())
        self._written, self._on_written = written, on_written
        self._homes = homes

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One run."""
        self._homes.use(self._variables)
        self._homes.keep(self._written.values())
        results = self._executor.run(feeds)
        if self._written:
            self._on_written(self._written)
        return results


def _ended(error: Exception | None) -> ClusterError:
    if isinstance(error, ClusterError):
        return error
    return ClusterError(
        "the program's servers have ended: a step before failed half-way, on this worker or another, so that what was "
        "sent belongs to no step; or the AutoDist of a server was closed. Make the step anew (with AutoDist.function, "
        "or compile), on all workers, after an error that you go on from"
    )


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
            "what iterators give has several numbers of rows, and each worker must have one share of them all, by "
            f"which its means count; on workers {workers} the shares differ. Give all workers the same batches "
            '(batch="global"), or batches of the same sizes'
        )
    return ClusterError(
        f"every worker must be given the same global batch, but what the iterator gives on workers {workers} differs "
        f"from the chief's. {SAME_DATA_ADVICE}"
    )
