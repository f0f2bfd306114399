"""Programs as the doors run them: a step of all workers, or a run of this one alone."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import tensorflow as tf

from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.step_hook import StepHook
from autodist_py.program.executor import Executor
from autodist_py.servers.directory import VariableDirectory


class StepProgram:
    """A distributed program, with what is done around each of its steps."""

    def __init__(
        self,
        executor: Executor,
        cluster: Cluster,
        hooks: Sequence[StepHook],
        *,
        added: Sequence[StepHook] = (),
        may_go: bool = False,
    ):
        """A program with these hooks, the first outermost.

        Within these are the hooks that are `added`, which may become more. The program `may_go` if it keeps nothing,
        and all workers run it in the same steps.
        """
        self.goes_among = "those of all workers" if may_go else ""
        self._executor = executor
        self._cluster = cluster
        self._hooks, self._added = tuple(hooks), added

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One step, together with all other workers.

        Raises:
            WorkerFailedError: another worker failed; the message names it, and why.
            ClusterError: the workers are given different batches.
            OutOfRangeError: an iterator that the step reads has ended, on this worker or another.
        """
        self._cluster.check()
        step = self._cluster.step + 1
        with ExitStack() as stack:
            for hook in (*self._hooks, *self._added):
                hook.before(step, feeds)
                stack.push(partial(_end, hook, step))
            return self._executor.run(feeds)


def _end(
    hook: StepHook,
    step: int,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """Tell the hook how the step has ended, as an ExitStack says it."""
    if error is None:
        hook.after(step)
    else:
        hook.failed(step, error)


class AloneProgram:
    """A program that this worker runs by itself."""

    def __init__(
        self,
        executor: Executor,
        variables: Mapping[str, tf.Variable],
        written: Mapping[str, tf.Variable],
        directory: VariableDirectory,
        on_written: Callable[[Mapping[str, tf.Variable]], None],
        hooks: Sequence[StepHook] = (),
        *,
        may_go: bool = False,
    ):
        """It reads `variables`, and writes `written`, of which `on_written` is told after each run.

        It `may_go` if it keeps nothing. The `hooks` look at what each run is given, which is step 0 to them.
        """
        self.goes_among = "this worker's own" if may_go else ""
        self._executor = executor
        self._variables = list(variables.values())
        self._written, self._on_written, self._hooks = written, on_written, tuple(hooks)
        self._directory = directory

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One run."""
        for hook in self._hooks:
            hook.before(0, feeds)
        self._directory.use(self._variables)
        self._directory.keep(self._written.values())
        results = self._executor.run(feeds)
        if self._written:
            self._on_written(self._written)
        return results
