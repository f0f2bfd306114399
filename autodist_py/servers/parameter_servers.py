"""`ParameterServers`: the programs of one AutoDist object whose variables live on servers, seen from one worker."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.coordinator.api import LEAVING
from autodist_py.cluster.exit_hooks import one_line
from autodist_py.cluster.exit_stack import Ending, at_exit
from autodist_py.cluster.run_failure import CAUSE_SECONDS
from autodist_py.cluster.step_hook import StepHook
from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.kernel.program import ServerFunction, Shards
from autodist_py.proto.errors import AutoDistError, ClusterError
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.servers.directory import VariableDirectory
from autodist_py.servers.loops import Messages, Run
from autodist_py.servers.update_rules import FirstToArrive, Tokens
from autodist_py.servers.values import ServerValues


class ParameterServers:
    """What programs need of servers: homes for their variables, their messages, and that workers wait for each other.

    Attributes:
        homes: where the variables live.
    """

    _of_process: ClassVar["weakref.WeakSet[ParameterServers]"] = weakref.WeakSet()
    """Those of every AutoDist object: a worker that waits for all others takes a step of none of them."""

    def __init__(self, cluster: Cluster, key: Callable[[str], str], server_devices: Sequence[str]):
        """Nothing is served yet.

        Args:
            cluster: the workers.
            key: makes a key for something that all workers do together, of a word for it.
            server_devices: the device of each worker that holds variables, as strategies name it.
        """
        self._cluster, self._key, self._devices = cluster, key, tuple(server_devices)
        self.directory = VariableDirectory(cluster)
        self._messages: weakref.WeakSet[Messages] = weakref.WeakSet()
        self._apart: list[Messages] = []
        """Those of programs whose steps workers take by themselves."""
        self._forget_exit: Callable[[], None] | None = None
        ParameterServers._of_process.add(self)

    @property
    def is_any(self) -> bool:
        """Whether variables live on servers of several workers."""
        return self.directory.values is not None

    @property
    def are_apart(self) -> bool:
        """Whether workers take the steps of a program by themselves."""
        return bool(self._apart)

    @property
    def backup_rules(self) -> list[FirstToArrive | Tokens]:
        """Those by which this worker, as a server, drops what comes late."""
        rules = (rule for messages in self._messages for rule in messages.rules)
        return [rule for rule in rules if isinstance(rule, FirstToArrive | Tokens)]

    # -- Programs -----------------------------------------------------------------------------------------------------

    def at_home(self, strategy: Strategy, variables: Mapping[str, tf.Variable]) -> Strategy:
        """`strategy`, where variables that live on a server already stay there, and those in shards stay in those."""

        def at_home(node: VariableStrategy) -> VariableStrategy:
            variable = variables[node.var_name]
            if known := self.directory.strategy(variable):
                return replace(known, var_name=node.var_name)
            served = [one.as_ps for one in node.every_synchronizer if one.as_ps]
            rank = self.directory.rank(variable)
            if rank is None or not served:
                return node
            return VariableStrategy(node.var_name, replace(served[0], reduction_destination=self._devices[rank]))

        return replace(strategy, node_config=tuple(map(at_home, strategy.node_config)))

    def hold(
        self, program: CompiledProgram, strategy: Strategy, variables: Mapping[str, tf.Variable]
    ) -> dict[str, tf.Variable]:
        """From now on `program.held` live on servers, and the shards of `program.shards` are variables of ours.

        Args:
            program: what all workers run.
            strategy: how its variables are trained.
            variables: the user's, by their names in the program.

        Returns:
            The shards that this worker has, by their names.

        Raises:
            StrategyError: one of them lives on another server already, or is cut in another way.
        """
        if not program.consistency.is_bsp:
            remembered = {
                memory.part(rank) for memory in program.compressor_states for rank in range(self._cluster.num_workers)
            }
            servers = {rank for name, rank in program.held.items() if name not in remembered}
            self._cluster.step_apart(set(range(self._cluster.num_workers)) - servers)
        elif self.are_apart:
            self._cluster.step_apart(())  # Collectives need everybody.
        if program.held and self.directory.values is None:
            name = f"{self._cluster.run_id}/{self._key('values')}"
            self.directory.values = ServerValues(self._cluster, name, self.directory.held)
            self._wait_at_exit()
        of_shards = {name for one in program.shards for name in one.names}
        for name, rank in program.held.items():
            if name not in of_shards:
                self.directory.put(name, variables[name], rank, program.left_whole.get(name, ""))
        trained = {node.var_name: node for node in strategy.node_config}
        own: dict[str, tf.Variable] = {}
        for one in program.shards:
            own |= self._hold_shards(program, one, variables[one.variable], trained.get(one.variable))
        return own

    def _hold_shards(
        self, program: CompiledProgram, shards: Shards, variable: tf.Variable, node: VariableStrategy | None
    ) -> dict[str, tf.Variable]:
        """The shards of the variable that this worker has."""
        ranks = [program.held.get(name) for name in shards.names]
        self.directory.put_shards(shards, variable, ranks, is_bsp=program.consistency.is_bsp, strategy=node)
        bound = {each.variable for each in program.variables}
        device = program.topology.local_replicas[0].device
        return {
            name: self.directory.shard(variable, position, device)
            for position, name in enumerate(shards.names)
            if name in bound
        }

    def serve(self, program: CompiledProgram, function: Callable[[ServerFunction], Run]) -> Messages | None:
        """Begin to exchange the program's messages; None where it has none.

        Args:
            program: what all workers run.
            function: makes a server function callable.
        """
        if not program.channels:
            return None
        messages = Messages(self._cluster, program, function, self.directory.held)
        self._messages.add(messages)
        self._wait_at_exit()
        if not program.consistency.is_bsp:
            self._apart.append(messages)  # Others may still take steps when this worker has let go of the program.
        return messages

    def copies(self, program: CompiledProgram, variables: Mapping[str, tf.Variable]) -> "RemoteVariables":
        """What a step of the program asks of this worker's copies of the user's variables, and does to them."""
        elsewhere = {name for name, rank in program.held.items() if rank != self._cluster.rank and name in variables}
        elsewhere |= {shards.variable for shards in program.shards}
        # Workers that step by themselves change what others were just brought.
        brought: set[str] = set()
        if program.consistency.is_bsp:
            brought = {name for name in program.refreshed if name in variables}
            brought |= {shards.variable for shards in program.shards if shards.is_whole}
        served = program.held.keys() | elsewhere
        written = {variable.name for variable in program.item.variables if variable.update_ops} - served
        return RemoteVariables(
            self,
            read=[each for name, each in variables.items() if name not in served or name in brought],
            written=[each for name, each in variables.items() if name in written],
            sharded=[variables[shards.variable] for shards in program.shards],
            behind=[variables[name] for name in elsewhere - brought],
            idle=[each for name, each in variables.items() if name in (elsewhere - brought) & program.idle],
            refreshed=[variables[name] for name in brought],
            remembered=[self.directory.own_part(variables[memory.name]) for memory in program.compressor_states],
            together=program.consistency.is_bsp,
        )

    # -- Together with the others -------------------------------------------------------------------------------------

    def sync(self, variables: Iterable[tf.Variable] | None = None) -> None:
        """Give this worker's variables, or some of them, the values that they have on servers; every worker calls it.

        None goes on, and writes to them, before all have them.
        """
        wanted = None if variables is None else list(variables)
        if self.is_any:
            self.pause()
            self._cluster.barrier(self._key("reached"))
        self.directory.pull_all() if wanted is None else self.directory.pull(wanted)
        if self.is_any:
            self._cluster.barrier(self._key("synchronized"))

    def pause(self) -> None:
        """This worker is about to wait for all others: until then servers let none of them wait for its next step."""
        for servers in list(ParameterServers._of_process):
            for messages in list(servers._messages):
                messages.pause()

    def leave(self) -> None:
        """Bring what lives elsewhere here when all workers have taken their last steps."""
        if not self.is_any:
            self.directory.pull_all()
            return
        self._wait_for_all()
        self.directory.pull_all()
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        self.pause()
        self._cluster.compare(f"{LEAVING}{self._key('closed')}", str(self._cluster.step).encode())

    def _wait_at_exit(self) -> None:
        """Others may still ask, or take steps by themselves, when this worker's script has ended: it waits for them."""
        if self._forget_exit is None:
            self._forget_exit = at_exit(Ending.STEPS_OF_OTHERS, self._leave_at_exit)

    def _leave_at_exit(self) -> None:
        with suppress(AutoDistError):  # The run has failed: its cause is shown.
            self._wait_for_all()
            self._wait_for_all()

    def close(self) -> None:
        """End what serves, and let go of the variables."""
        for messages in list(self._messages):
            messages.close()
        self._apart.clear()
        if self.is_any and self._forget_exit is not None:
            self._forget_exit()
        self.directory.close()


class OpenMessages(StepHook):
    """A step needs its program's messages; one that fails half-way closes them, as what it sent belongs to no other."""

    def __init__(self, cluster: Cluster, messages: Messages, variables: "RemoteVariables"):
        """The messages of a program among these workers, and its variables that they change elsewhere."""
        self._cluster, self._messages, self._variables = cluster, messages, variables

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        """Raises ClusterError: nothing is sent or served any more."""
        if self._messages.is_closed:
            raise self._ended(wait=0.0)

    def failed(self, step: int, error: BaseException) -> None:
        """Raises ClusterError: the step waited for messages that were closed; or why another worker has ended."""
        if not isinstance(error, tf.errors.OpError):
            return  # The run has failed, or the step has not begun.
        may_be_data = isinstance(error, tf.errors.OutOfRangeError)
        is_own = isinstance(error, tf.errors.InvalidArgumentError)  # A check of the step's: no closed queue raises it.
        if self._messages.is_closed and not is_own:  # For other errors `Together` has waited for the cause.
            raise self._ended(wait=CAUSE_SECONDS if may_be_data else 0.0) from error
        if not may_be_data:  # The end of the data comes before anything is sent.
            self._messages.close()
            self._variables.half_done()

    def _ended(self, *, wait: float) -> ClusterError:
        error = self._messages.error
        if isinstance(error, ClusterError):
            return error
        failure = self._cluster.failure(wait=wait) if isinstance(error, tf.errors.OpError) else None
        if failure is not None:  # The end of a server's process may be seen here before the chief has told of it.
            return failure
        seen = f"What was seen here: {one_line(error)}. " if error else ""
        return ClusterError(
            "the program's servers have ended. A step before failed half-way, on this worker or another, so that what "
            "was sent belongs to no step; or the AutoDist of a server was closed. "
            f"{seen}Make the step anew (with AutoDist.function, or compile), on all workers, after an error that you "
            "go on from"
        )


class RemoteVariables(StepHook):
    """A program's variables that live on servers of other workers: when this worker's are behind, and when not."""

    def __init__(
        self,
        served: ParameterServers,
        *,
        read: Sequence[tf.Variable],
        written: Sequence[tf.Variable],
        sharded: Sequence[tf.Variable],
        behind: Sequence[tf.Variable],
        idle: Sequence[tf.Variable],
        refreshed: Sequence[tf.Variable],
        remembered: Sequence[tf.Variable],
        together: bool,
    ):
        """The program reads `read`, and writes `written` itself; it has those of `sharded` in shards.

        Its steps leave `behind`, of which it does not use `idle`, and bring `refreshed`. What it remembers on this
        worker is in `remembered`.
        """
        self._served, self._read, self._written, self._sharded = served, list(read), list(written), list(sharded)
        self._idle = list(idle)
        self._behind, self._refreshed = list(behind), list(refreshed)
        self._remembered = list(remembered)
        self._together = together

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        """Bring what the program reads up to date; for a step of all, after others that each takes by itself, meet."""
        if self._together and self._served.are_apart:
            self._served.pause()
        self._served.directory.use(self._read)
        self._served.directory.take_over(self._sharded, self._written)

    def after(self, step: int) -> None:
        """Note what the step has changed elsewhere, and in what is kept here for others to ask for."""
        self._served.directory.held.changed(self._remembered)
        self._served.directory.stepped(self._behind, self._refreshed, self._sharded, self._idle)

    def half_done(self) -> None:
        """Note what a step that failed may have changed elsewhere, and has not brought."""
        self._served.directory.held.changed(self._remembered)
        self._served.directory.stepped([*self._behind, *self._refreshed], ())
