"""`Served`: the variables of one AutoDist object that live on servers, seen from one worker."""

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import tensorflow as tf

from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.kernel.program import ServerFunction, Shards
from autodist_py.proto.errors import AutoDistError, StrategyError, WorkerFailedError
from autodist_py.proto.strategy import Node, Strategy
from autodist_py.proto.synchronizers import PSSynchronizer
from autodist_py.runtime.aggregation import FirstToArrive
from autodist_py.runtime.cluster import Cluster
from autodist_py.runtime.coordinator import LEAVING
from autodist_py.runtime.cut import CutVariable
from autodist_py.runtime.held import Held
from autodist_py.runtime.kept import Kept
from autodist_py.runtime.parameter_server import Messages, Run
from autodist_py.runtime.served_values import ServedValues
from autodist_py.runtime.watched import Watch, empty, fill, is_shared, look_for, unwatch, watch

_log = logging.getLogger(__name__)


class _Home(NamedTuple):
    """Where a variable, or a shard of one, lives: its number, the same on every worker, and the server's rank."""

    number: int
    rank: int


class _Cut(NamedTuple):
    """A variable that is cut: its shards on this worker, and where each lives; None: on every worker."""

    variable: CutVariable
    homes: tuple[_Home | None, ...]

    @property
    def layout(self) -> tuple[object, ...]:
        """What all programs have alike."""
        shards = self.variable.shards
        return shards.axis, shards.shapes, tuple(home and home.rank for home in self.homes)


class Served:
    """Which variables live where, which of this worker's copies are old, and the messages of all programs."""

    def __init__(self, cluster: Cluster, key: Callable[[str], str], server_devices: Sequence[str]):
        """Nothing is served yet.

        Args:
            cluster: the workers.
            key: makes a key for something that all workers do together, of a word for it.
            server_devices: the device of each worker that holds variables, as strategies name it.
        """
        self._cluster, self._key, self._devices = cluster, key, tuple(server_devices)
        self._homes: Kept[_Home] = Kept()
        self._cuts: Kept[_Cut] = Kept()
        self._nodes: Kept[Node] = Kept()
        """How the trained ones among the variables that are cut are trained."""
        self._count = 0
        self._held = Held()
        self._old: set[int] = set()
        """The identities of variables whose values on servers are newer than this worker's."""
        self._let_go: Kept[None] = Kept()
        """Those that hold nothing here."""
        self._used_unseen: Kept[None] = Kept()
        """Those that functions of the user's, or other threads, may read at any time."""
        self._seen: Kept[None] = Kept()
        """Those that are cut, and that the script has looked at since the last step."""
        self._thread = threading.get_ident()
        self._pulling = threading.RLock()
        self._values: ServedValues | None = None
        self._messages: weakref.WeakSet[Messages] = weakref.WeakSet()
        self._apart: list[Messages] = []
        """Those of programs whose steps workers take by themselves."""

    @property
    def is_any(self) -> bool:
        """Whether variables live on servers of several workers."""
        return self._values is not None

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
        """`strategy`, where variables that live on a server already stay there, and those that are cut stay so."""
        homes = {name: self._homes[each].rank for name, each in variables.items() if each in self._homes}

        def at_home(node: Node) -> Node:
            if variables[node.var_name] in self._nodes:
                return replace(self._nodes[variables[node.var_name]], var_name=node.var_name)
            served = [one for one in node.every_synchronizer if isinstance(one, PSSynchronizer)]
            if node.var_name not in homes or not served:
                return node
            device = self._devices[homes[node.var_name]]
            return Node(node.var_name, replace(served[0], reduction_destination=device))

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
            self._cluster.step_apart(set(range(self._cluster.num_workers)) - set(program.held.values()))
        elif self.are_apart:
            self._cluster.step_apart(())  # Collectives need everybody.
        if program.held and self._values is None:
            name = f"{self._cluster.run_id}/{self._key('values')}"
            self._values = ServedValues(self._cluster, name, self._held)
        shards = {name for one in program.shards for name in one.names}
        for name, rank in program.held.items():
            if name not in shards:
                self._hold_whole(name, variables[name], rank, program.left_whole.get(name, ""))
        for node in strategy.node_config:
            if any(one.variable == node.var_name for one in program.shards):
                self._nodes[variables[node.var_name]] = node
        own: dict[str, tf.Variable] = {}
        for one in program.shards:
            own |= self._hold_shards(program, one, variables[one.variable])
        return own

    def _hold_whole(self, name: str, variable: tf.Variable, rank: int, why: str) -> None:
        if variable in self._homes:
            self._require_home(name, self._homes[variable].rank, rank)
            return
        if variable in self._cuts:
            raise _other_layout(name, why)
        home = self._homes[variable] = self._new_home(rank)
        if rank == self._cluster.rank:
            self._held.add(home.number, variable)
            watch(variable, self, Watch(lambda looked_at: self._held.keep([looked_at]), lambda captured: None))
        else:
            watch(variable, self, Watch(self._look, self._use_unseen))

    def _hold_shards(self, program: CompiledProgram, shards: Shards, variable: tf.Variable) -> dict[str, tf.Variable]:
        """The shards of the variable that this worker has."""
        ranks = [program.held.get(name) for name in shards.names]
        if variable not in self._cuts and variable not in self._homes:
            homes = tuple(None if rank is None else self._new_home(rank) for rank in ranks)
            self._cuts[variable] = _Cut(CutVariable(variable, shards, is_together=program.pace.is_together), homes)
            watch(variable, self, Watch(self._look, self._use_unseen))
        if variable not in self._cuts or self._cuts[variable].layout != (shards.axis, shards.shapes, tuple(ranks)):
            raise _other_layout(shards.variable)
        cut, homes = self._cuts[variable]
        bound = {each.variable for each in program.variables}
        device = program.place.local_replicas[0].device
        own = {}
        for position, (name, home) in enumerate(zip(shards.names, homes, strict=True)):
            if name not in bound:
                continue
            is_new = position not in cut.own
            self.pull([variable] if is_new else [])
            own[name] = cut.have(variable, position, device)
            if home is not None and is_new:
                self._held.add(home.number, own[name])
        return own

    def _new_home(self, rank: int) -> _Home:
        self._count += 1
        return _Home(self._count, rank)

    def serve(self, program: CompiledProgram, function: Callable[[ServerFunction], Run]) -> Messages | None:
        """Begin to exchange the program's messages; None where it has none.

        Args:
            program: what all workers run.
            function: makes a server function callable.
        """
        if not program.channels:
            return None
        messages = Messages(self._cluster, program, function, self._held)
        self._messages.add(messages)
        # Others may still ask, or take steps by themselves, when this worker's script has ended: it waits for them
        # before it ends what serves them. What is registered last runs first.
        atexit.unregister(self._leave_at_exit)
        atexit.register(self._leave_at_exit)
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
            cut=[variables[shards.variable] for shards in program.shards],
            behind=frozenset(id(variables[name]) for name in elsewhere - brought),
            idle=[each for name, each in variables.items() if name in (elsewhere - brought) & program.idle],
            refreshed=frozenset(id(variables[name]) for name in brought),
            together=program.pace.is_together,
        )

    @staticmethod
    def _require_home(name: str, home: int, rank: int) -> None:
        if home != rank:
            raise StrategyError(
                f"variable '{name}' lives on worker {home}, where another program of this AutoDist updates it, and "
                f"this one's update runs on worker {rank}. Give both the same variables, or one server: PS()"
            )

    # -- Values -------------------------------------------------------------------------------------------------------

    def pull(self, variables: Iterable[tf.Variable]) -> None:
        """Give these variables of this worker the values that they have on servers, if those are newer.

        No other worker need call it; this one is between two steps.
        """
        if not self._old:
            return
        with self._pulling:
            among = self._old.intersection(map(id, variables))
            wanted: dict[int, dict[int, tf.TensorSpec]] = {}
            whole = [(one, home) for one, home in self._homes.items() if id(one) in among]
            for variable, home in whole:
                spec = tf.TensorSpec(variable.shape, variable.dtype.base_dtype, variable.name)
                wanted.setdefault(home.rank, {})[home.number] = spec
            cuts = [(one, cut) for one, cut in self._cuts.items() if id(one) in among]
            for _, cut in cuts:
                for spec, one in zip(cut.variable.specs, cut.homes, strict=True):
                    if one is not None and one.rank != self._cluster.rank:
                        wanted.setdefault(one.rank, {})[one.number] = spec
            values: dict[int, tf.Tensor] = {}
            for rank, specs in wanted.items():
                if self._values is not None:
                    values |= self._values.ask(specs, rank)
            for variable, home in whole:
                fill(variable, values[home.number])
            for variable, cut in cuts:
                numbers = {position: one.number for position, one in enumerate(cut.homes) if one is not None}
                brought = {position: values[number] for position, number in numbers.items() if number in values}
                with self._held.steady():
                    cut.variable.join(variable, brought)
            self._old -= among
            for variable, _ in (*whole, *cuts):
                self._let_go.discard(variable)

    def use(self, variables: Sequence[tf.Variable]) -> None:
        """A program is about to read these, or to write them: they are as they are wherever they live."""
        self.pull(variables)
        look_for(self, variables)

    def _look(self, variable: tf.Variable) -> None:
        """Eager code is about to read or write a variable that lives elsewhere, or is cut."""
        if threading.get_ident() != self._thread:  # It may read while the next step ends.
            self._used_unseen[variable] = None
        if id(variable) in self._old:
            try:
                self.pull([variable])
            except WorkerFailedError as error:  # A last checkpoint may still be written, of what is here.
                self._give_up([variable], error)
        if variable in self._cuts:
            with self._pulling:
                self._cuts[variable].variable.looked_at(variable)
                self._seen[variable] = None

    def _use_unseen(self, variable: tf.Variable) -> None:
        """From now on a function of the user's may read the variable."""
        self._used_unseen[variable] = None
        self._look(variable)

    def _give_up(self, variables: Sequence[tf.Variable], error: AutoDistError) -> None:
        """Go on with what is here of variables that cannot be brought: there is nothing newer."""
        lost = [variable for variable in variables if variable in self._let_go]
        for what, those in (
            ("old values", [variable for variable in variables if variable not in self._let_go]),
            ("zeros in the place of values that are lost", lost),
        ):
            if those:
                names = ", ".join(f"'{variable.name}'" for variable in those)
                _log.warning("%s: %s, as the workers where they live cannot be asked: %s", names, what, error)
        for variable in lost:
            if variable in self._cuts:
                self._cuts[variable].variable.join_own(variable)
            else:
                fill(variable, tf.zeros(variable.shape, variable.dtype.base_dtype))
            self._let_go.discard(variable)
        for variable in variables:
            self._old.discard(id(variable))

    def bring_back(self) -> None:
        """What was let go of is here again, as far as those who have it can still be asked."""
        lost: list[tf.Variable] = []
        cause: AutoDistError | None = None
        for variable, _ in self._let_go.items():
            try:
                self.pull([variable])
            except AutoDistError as error:
                lost.append(variable)
                cause = error
        if cause is not None:
            self._give_up(lost, cause)

    def keep(self, variables: Iterable[tf.Variable]) -> None:
        """This worker's script is about to write these variables: others still see those that live here as they are."""
        for variable in variables:
            self._held.keep([variable])
            if variable in self._cuts:
                self._look(variable)

    def take_from_others(self, variables: Iterable[tf.Variable]) -> None:
        """These are cut; those of them that another AutoDist trains, too, may have been written by that."""
        for variable in filter(is_shared, variables):
            self._look(variable)
            look_for(self, [variable])

    def take_over(self) -> None:
        """Before a step: the shards that live here take what this worker's script has written to their variables."""
        look_for(self, (variable for variable, _ in self._seen.items()))  # Another AutoDist may have let go of it.
        with self._pulling:
            for variable, _ in self._seen.items():
                if id(variable) in self._old:
                    continue  # Nobody has looked since the last step.
                for shard, value in self._cuts[variable].variable.written(variable):
                    self._held.keep([shard])
                    with self._held.steady():
                        fill(shard, value)
            self._seen.clear()

    def sync(self, variables: Iterable[tf.Variable] | None = None) -> None:
        """Give this worker's variables, or some of them, the values that they have on servers; every worker calls it.

        None goes on, and writes to them, before all have them.
        """
        wanted = None if variables is None else list(variables)
        if self._values is not None:
            self.pause()
            self._cluster.barrier(self._key("reached"))
        self._pull_all() if wanted is None else self.pull(wanted)
        if self._values is not None:
            self._cluster.barrier(self._key("synchronized"))

    def _pull_all(self) -> None:
        self.pull([variable for known in (self._homes, self._cuts) for variable, _ in known.items()])

    def note_written(self, variables: Iterable[tf.Variable]) -> None:
        """A step is about to write these: the shards of those that are cut take it over before the next one."""
        for variable in variables:
            if variable in self._cuts:
                self._look(variable)

    def stepped(
        self,
        old: frozenset[int],
        current: frozenset[int],
        cut: Iterable[tf.Variable] = (),
        idle: Iterable[tf.Variable] = (),
    ) -> None:
        """After a step these variables, by identity, are older than those of the servers, and those are not.

        Those that are `cut` may have other shards than they were brought from. The memory of the `idle` ones, which no
        step of this worker's uses, is let go of.
        """
        with self._pulling:  # What another thread is being given is of before the step.
            self._thread = threading.get_ident()
            self._old |= old
            self._old -= current
            for variable in cut:
                self._cuts[variable].variable.forget()
            for variable in idle:
                if variable not in self._let_go and variable not in self._used_unseen:
                    self._let_go[variable] = None
                    empty(variable)

    def forget_newer(self, variable: tf.Variable) -> None:
        """The variable was written here, by the user: a server's value is no newer."""
        if variable in self._let_go:  # It was not, on this worker.
            self.pull([variable])
        self._old.discard(id(variable))

    # -- Together with the others -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """This worker is about to wait for all others: until then servers let none of them wait for its next step."""
        for messages in list(self._messages):
            messages.pause()

    def leave(self) -> None:
        """Bring what lives elsewhere here when all workers have taken their last steps."""
        if self._values is None:
            self._pull_all()
            return
        self._wait_for_all()
        self._pull_all()
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        self.pause()
        self._cluster.compare(f"{LEAVING}{self._key('closed')}", str(self._cluster.step).encode())

    def close(self) -> None:
        """End what serves, and let go of the variables."""
        for messages in list(self._messages):
            messages.close()
        self._apart.clear()
        self.bring_back()
        if self._values is not None:
            atexit.unregister(self._leave_at_exit)
            self._values.close()
            self._values = None
        for variable, _ in (*self._homes.items(), *self._cuts.items()):
            unwatch(variable, self)
        self._held.clear()
        self._old.clear()
        for kept in (self._homes, self._cuts, self._nodes, self._let_go, self._used_unseen, self._seen):
            kept.clear()

    def _leave_at_exit(self) -> None:
        with suppress(AutoDistError):  # The run has failed: its cause is shown.
            self._wait_for_all()
            self._wait_for_all()


class ServedCopies:
    """A program's variables that live on servers of other workers: when this worker's are behind, and when not."""

    def __init__(
        self,
        served: Served,
        *,
        read: Sequence[tf.Variable],
        written: Sequence[tf.Variable],
        cut: Sequence[tf.Variable],
        behind: frozenset[int],
        idle: Sequence[tf.Variable],
        refreshed: frozenset[int],
        together: bool,
    ):
        """The program reads `read`, and writes `written` itself; it has the shards of `cut`.

        Its steps leave `behind`, of which it does not use `idle`, and bring `refreshed`.
        """
        self._served, self._read, self._written, self._cut = served, list(read), list(written), list(cut)
        self._idle = list(idle)
        self._behind, self._refreshed = behind, refreshed
        self._together = together

    def before_step(self) -> None:
        """Bring what the program reads up to date; for a step of all, after others that each takes by itself, meet."""
        if self._together and self._served.are_apart:
            self._served.pause()
        self._served.use(self._read)
        self._served.take_from_others(self._cut)
        self._served.take_over()
        self._served.note_written(self._written)

    def after_step(self) -> None:
        """Note what the step has changed elsewhere."""
        self._served.stepped(self._behind, self._refreshed, self._cut, self._idle)

    def after_failed_step(self) -> None:
        """Note what the step may have changed elsewhere, and has not brought."""
        self._served.stepped(self._behind | self._refreshed, frozenset())


def _other_layout(name: str, why: str = "") -> StrategyError:
    return StrategyError(
        f"variable '{name}' is cut into other shards, or is whole, in another program of this AutoDist"
        f"{f' ({why})' if why else ''}. Give it the same shards in both, or leave it whole, as PerVariable does"
    )
