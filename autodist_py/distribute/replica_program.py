"""`ReplicaProgram`: a compiled replica function, as an op of the graph in which `run` is called."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.program.build import CapturedStep
from autodist_py.program.executor import Executor
from autodist_py.program.served_step import ServedStep


class ReplicaProgram:
    """A replica function, compiled for this process's replicas.

    Attributes:
        program: what all processes run.
        variables: the first replica's, by their names in it.
    """

    def __init__(self, program: CompiledProgram, step: CapturedStep, begin: Callable[[], None] | None = None):
        """The program of `step`; `begin` makes ops that say that it begins."""
        self.program = program
        self.variables: Mapping[str, tf.Variable] = step.variables
        self._state, self._name, self._begin = step.state, step.name, begin

    def add_to_graph(
        self, variables: Mapping[tuple[str, int], tf.Variable], feeds: Sequence[tf.Tensor]
    ) -> tf.Operation:
        """An op of the default graph that runs a step, with a tensor for each of the program's feeds; see Executor."""
        if self._begin is not None:
            self._begin()
        return self._executor(variables).add_to_graph(feeds)

    def _executor(self, variables: Mapping[tuple[str, int], tf.Variable]) -> Executor:
        return Executor(self.program, variables, self._state, name=self._name, is_op=True)


class ServedProgram(ReplicaProgram):
    """One whose variables may live on servers, or in shards: around each step this process asks, and tells, of them."""

    def __init__(self, served: ServedStep, step: CapturedStep, begin: Callable[[], None] | None = None):
        """The program of `served`, which is made of `step`."""
        super().__init__(served.program, step, begin)
        self.variables = served.variables
        self._served = served

    def add_to_graph(
        self, variables: Mapping[tuple[str, int], tf.Variable], feeds: Sequence[tf.Tensor]
    ) -> tf.Operation:
        """See ReplicaProgram."""
        executor = self._executor(variables)
        step = self._served.begun(executor)
        before = tf.numpy_function(step.before, [], [])
        if self._begin is not None:
            self._begin()
        with tf.control_dependencies([before]):
            ran = executor.add_to_graph(feeds)
        with tf.control_dependencies([ran]):
            tf.numpy_function(step.after, [], [])
        return ran
