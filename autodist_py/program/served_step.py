"""What is done around each step of a program with variables on servers, or in shards, that is an op of a graph."""

from collections.abc import Mapping

import tensorflow as tf

from autodist_py.cluster.cluster import Cluster
from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.program.executor import Executor
from autodist_py.servers.parameter_servers import OpenMessages, ParameterServers, RemoteVariables


class ServedStep:
    """A program that is to run as an op.

    Attributes:
        program: what all workers run.
        variables: the first local replica's, by their names in the program.
    """

    def __init__(
        self,
        program: CompiledProgram,
        variables: Mapping[str, tf.Variable],
        cluster: Cluster,
        servers: ParameterServers,
        copies: RemoteVariables,
    ):
        """The program among these workers; `copies` are its variables that live elsewhere."""
        self.program, self.variables = program, variables
        self._cluster, self._servers, self._copies = cluster, servers, copies

    def begun(self, executor: Executor) -> "ServedSteps":
        """The program's messages are exchanged from now on, by what `executor` runs as a server."""
        messages = self._servers.serve(self.program, executor.server_function)
        opened = OpenMessages(self._cluster, messages, self._copies) if messages else None
        steps = ServedSteps(self._cluster, opened, self._copies)
        if messages is not None:
            messages.close_with(steps)
        return steps


class ServedSteps:
    """What is done around each step, by ops before and after it."""

    def __init__(self, cluster: Cluster, messages: OpenMessages | None, copies: RemoteVariables):
        self._cluster, self._messages, self._copies = cluster, messages, copies
        self._is_under_way = False

    def before(self) -> None:
        """Bring what the step reads up to date.

        Raises:
            WorkerFailedError: another worker failed; the message names it, and why.
            ClusterError: a step before failed half-way, so that nothing is exchanged any more.
        """
        self._cluster.check()
        step = self._cluster.step + 1
        if self._messages is not None:
            if self._is_under_way:
                self._messages.failed(step, tf.errors.AbortedError(None, None, "a step before failed half-way"))
            self._messages.before(step, ())
        self._copies.before(step, ())
        self._is_under_way = True

    def after(self) -> None:
        """Note what the step has changed elsewhere."""
        self._is_under_way = False
        self._copies.after(self._cluster.step)
