"""`Served`: the programs of one AutoDist object whose variables live on servers, seen from one worker."""

import atexit
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import tensorflow as tf

from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.kernel.program import ServerFunction, Shards
from autodist_py.proto.errors import AutoDistError
from autodist_py.proto.strategy import Node, Strategy
from autodist_py.proto.synchronizers import PSSynchronizer
from autodist_py.runtime.aggregation import FirstToArrive
from autodist_py.runtime.cluster import Cluster
from autodist_py.runtime.coordinator import LEAVING
from autodist_py.runtime.homes import Homes
from autodist_py.runtime.kept import Kept
from autodist_py.runtime.parameter_server import Messages, Run
from autodist_py.runtime.served_values import ServedValues


class Served:
    """What programs need of servers: homes for their variables, their messages, and that workers wait for each other.

    Attributes:
        homes: where the variables live.
    """

    def __init__(self, cluster: Cluster, key: Callable[[str], str], server_devices: Sequence[str]):
        """Nothing is served yet.

        Args:
            cluster: the workers.
            key: makes a key for something that all workers do together, of a word for it.
            server_devices: the device of each worker that holds variables, as strategies name it.
        """
        self._cluster, self._key, self._devices = cluster, key, tuple(server_devices)
        self.homes = Homes(cluster)
        self._nodes: Kept[Node] = Kept()
        """How the trained ones among the variables in shards are trained."""
        self._messages: weakref.WeakSet[Messages] = weakref.WeakSet()
        self._apart: list[Messages] = []
        """Those of programs whose steps workers take by themselves."""

    @property
    def is_any(self) -> bool:
        """Whether variables live on servers of several workers."""
        return self.homes.values is not None

    @property
    def are_apart(self) -> bool:
        """Whether workers take the steps of a program by themselves."""
        return bool(self._apart)

    @property
    def backup_rules(self) -> list[FirstToArrive]:
        """Those by which this worker, as a server, drops what comes late."""
        rules = (rule for messages in self._messages for rule in messages.rules)
        return [rule for rule in rules if isinstance(rule, FirstToArrive)]

    # -- Programs -----------------------------------------------------------------------------------------------------

    def at_home(self, strategy: Strategy, variables: Mapping[str, tf.Variable]) -> Strategy:
        """`strategy`, where variables that live on a server already stay there, and those in shards stay in those."""

        def at_home(node: Node) -> Node:
            variable = variables[node.var_name]
            if variable in self._nodes:
                return replace(self._nodes[variable], var_name=node.var_name)
            served = [one for one in node.every_synchronizer if isinstance(one, PSSynchronizer)]
            rank = self.homes.rank(variable)
            if rank is None or not served:
                return node
            return Node(node.var_name, replace(served[0], reduction_destination=self._devices[rank]))

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
        if not program.pace.is_together:
            remembered = {memory.part(rank) for memory in program.memories for rank in range(self._cluster.num_workers)}
            servers = {rank for name, rank in program.held.items() if name not in remembered}
            self._cluster.step_apart(set(range(self._cluster.num_workers)) - servers)
        elif self.are_apart:
            self._cluster.step_apart(())  # Collectives need everybody.
        if program.held and self.homes.values is None:
            name = f"{self._cluster.run_id}/{self._key('values')}"
            self.homes.values = ServedValues(self._cluster, name, self.homes.held)
            self._wait_at_exit()
        of_shards = {name for one in program.shards for name in one.names}
        for name, rank in program.held.items():
            if name not in of_shards:
                self.homes.put(name, variables[name], rank, program.left_whole.get(name, ""))
        cut = {one.variable for one in program.shards}
        for node in strategy.node_config:
            if node.var_name in cut:
                self._nodes[variables[node.var_name]] = node
        own: dict[str, tf.Variable] = {}
        for one in program.shards:
            own |= self._hold_shards(program, one, variables[one.variable])
        return own

    def _hold_shards(self, program: CompiledProgram, shards: Shards, variable: tf.Variable) -> dict[str, tf.Variable]:
        """The shards of the variable that this worker has."""
        ranks = [program.held.get(name) for name in shards.names]
        self.homes.put_shards(shards, variable, ranks, is_together=program.pace.is_together)
        bound = {each.variable for each in program.variables}
        device = program.place.local_replicas[0].device
        return {
            name: self.homes.shard(variable, position, device)
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
        messages = Messages(self._cluster, program, function, self.homes.held)
        self._messages.add(messages)
        self._wait_at_exit()
        if not program.pace.is_together:
            self._apart.append(messages)  # Others may still take steps when this worker has let go of the program.
        return messages

    def copies(self, program: CompiledProgram, variables: Mapping[str, tf.Variable]) -> "ServedCopies":
        """What a step of the program asks of this worker's copies of the user's variables, and does to them."""
        elsewhere = {name for name, rank in program.held.items() if rank != self._cluster.rank and name in variables}
        elsewhere |= {shards.variable for shards in program.shards}
        # Workers that step by themselves change what others were just brought.
        brought: set[str] = set()
        if program.pace.is_together:
            brought = {name for name in program.refreshed if name in variables}
            brought |= {shards.variable for shards in program.shards if shards.is_whole}
        served = program.held.keys() | elsewhere
        written = {variable.name for variable in program.item.variables if variable.update_ops} - served
        return ServedCopies(
            self,
            read=[each for name, each in variables.items() if name not in served or name in brought],
            written=[each for name, each in variables.items() if name in written],
            sharded=[variables[shards.variable] for shards in program.shards],
            behind=frozenset(id(variables[name]) for name in elsewhere - brought),
            idle=[each for name, each in variables.items() if name in (elsewhere - brought) & program.idle],
            refreshed=frozenset(id(variables[name]) for name in brought),
            remembered=[self.homes.own_part(variables[memory.name]) for memory in program.memories],
            together=program.pace.is_together,
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
        self.homes.pull_all() if wanted is None else self.homes.pull(wanted)
        if self.is_any:
            self._cluster.barrier(self._key("synchronized"))

    def pause(self) -> None:
        """This worker is about to wait for all others: until then servers let none of them wait for its next step."""
        for messages in list(self._messages):
            messages.pause()

    def leave(self) -> None:
        """Bring what lives elsewhere here when all workers have taken their last steps."""
        if not self.is_any:
            self.homes.pull_all()
            return
        self._wait_for_all()
        self.homes.pull_all()
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        self.pause()
        self._cluster.compare(f"{LEAVING}{self._key('closed')}", str(self._cluster.step).encode())

    def _wait_at_exit(self) -> None:
        """Others may still ask, or take steps by themselves, when this worker's script has ended.

        It waits for them before it ends what serves them. What is registered last runs first.
        """
        atexit.unregister(self._leave_at_exit)
        atexit.register(self._leave_at_exit)

    def _leave_at_exit(self) -> None:
        with suppress(AutoDistError):  # The run has failed: its cause is shown.
            self._wait_for_all()
            self._wait_for_all()

    def close(self) -> None:
        """End what serves, and let go of the variables."""
        for messages in list(self._messages):
            messages.close()
        self._apart.clear()
        if self.is_any:
            atexit.unregister(self._leave_at_exit)
        self.homes.close()
        self._nodes.clear()


class ServedCopies:
    """A program's variables that live on servers of other workers: when this worker's are behind, and when not."""

    def __init__(
        self,
        served: Served,
        *,
        read: Sequence[tf.Variable],
        written: Sequence[tf.Variable],
        sharded: Sequence[tf.Variable],
        behind: frozenset[int],
        idle: Sequence[tf.Variable],
        refreshed: frozenset[int],
        remembered: Sequence[tf.Variable],
        together: bool,
    ):
        """The program reads `read`, and writes `written` itself; it has those of `sharded` in shards.

        Its steps leave `behind`, of which it does not use `idle`, and bring `refreshed`. What it remembers on this
        worker is in `remembered`.
        """
        self._served, self._read, self._written, self._sharded = served, list(read), list(written), list(sharded)
        self._idle = list(idle)
        self._behind, self._refreshed = behind, refreshed
        self._remembered = list(remembered)
        self._together = together

    def before_step(self) -> None:
        """Bring what the program reads up to date; for a step of all, after others that each takes by itself, meet."""
        if self._together and self._served.are_apart:
            self._served.pause()
        self._served.homes.use(self._read)
        self._served.homes.take_over(self._sharded, self._written)

    def after_step(self) -> None:
        """Note what the step has changed elsewhere, and in what is kept here for others to ask for."""
        self._served.homes.held.changed(self._remembered)
        self._served.homes.stepped(self._behind, self._refreshed, self._sharded, self._idle)

    def after_failed_step(self) -> None:
        """Note what the step may have changed elsewhere, and has not brought."""
        self._served.homes.held.changed(self._remembered)
        self._served.homes.stepped(self._behind | self._refreshed, frozenset())
