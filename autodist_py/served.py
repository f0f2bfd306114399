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
from autodist_py.kernel.program import ServerFunction
from autodist_py.proto.errors import AutoDistError, StrategyError, WorkerFailedError
from autodist_py.proto.strategy import Node, PSSynchronizer, Strategy
from autodist_py.runtime.aggregation import FirstToArrive
from autodist_py.runtime.cluster import Cluster
from autodist_py.runtime.coordinator import LEAVING
from autodist_py.runtime.held import Held
from autodist_py.runtime.kept import Kept
from autodist_py.runtime.parameter_server import Messages, Run
from autodist_py.runtime.served_values import ServedValues
from autodist_py.runtime.watched import unwatch, watch

_log = logging.getLogger(__name__)


class _Home(NamedTuple):
    """Where a variable lives: its number, the same on every worker, and the server's rank."""

    number: int
    rank: int


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
        self._count = 0
        self._held = Held()
        self._old: set[int] = set()
        """The identities of variables whose values on servers are newer than this worker's."""
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
        """`strategy`, where variables that live on a server already stay there."""
        homes = {name: self._homes[each].rank for name, each in variables.items() if each in self._homes}

        def at_home(node: Node) -> Node:
            if node.var_name not in homes or not isinstance(node.synchronizer, PSSynchronizer):
                return node
            device = self._devices[homes[node.var_name]]
            return replace(node, synchronizer=replace(node.synchronizer, reduction_destination=device))

        return replace(strategy, node_config=tuple(map(at_home, strategy.node_config)))

    def hold(self, program: CompiledProgram, variables: Mapping[str, tf.Variable]) -> None:
        """From now on `program.held` live on servers.

        Raises:
            StrategyError: one of them lives on another server already.
        """
        if not program.pace.is_together:
            self._cluster.step_apart(set(range(self._cluster.num_workers)) - set(program.held.values()))
        elif self.are_apart:
            self._cluster.step_apart(())  # Collectives need everybody.
        if program.held and self._values is None:
            name = f"{self._cluster.run_id}/{self._key('values')}"
            self._values = ServedValues(self._cluster, name, self._held)
        for name, rank in program.held.items():
            if variables[name] in self._homes:
                self._require_home(name, self._homes[variables[name]].rank, rank)
                continue
            self._count += 1
            self._homes[variables[name]] = _Home(self._count, rank)
            if rank == self._cluster.rank:
                self._held.add(self._count, variables[name])
            else:
                watch(variables[name], self, self._look)

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
        """What a step of the program asks of this worker's copies, and does to them."""
        elsewhere = {name for name, rank in program.held.items() if rank != self._cluster.rank}
        # Workers that step by themselves change what others were just brought.
        brought = program.refreshed if program.pace.is_together else frozenset()
        return ServedCopies(
            self,
            [each for name, each in variables.items() if name not in program.held or name in brought],
            frozenset(id(variables[name]) for name in elsewhere - brought),
            frozenset(id(variables[name]) for name in brought),
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
        if self._values is None or not self._old:
            return
        with self._pulling:
            among = self._old.intersection(map(id, variables))
            wanted: dict[int, dict[int, tf.Variable]] = {}
            for variable, home in self._homes.items() if among else ():
                if id(variable) in among:
                    wanted.setdefault(home.rank, {})[home.number] = variable
            for rank, named in wanted.items():
                self._values.pull(named, rank)
            self._old -= among

    def _look(self, variable: tf.Variable) -> None:
        """Eager code is about to read or write a variable that lives elsewhere."""
        if id(variable) not in self._old:
            return
        try:
            self.pull([variable])
        except WorkerFailedError as error:  # A last checkpoint may still be written, of what is here.
            what = "'%s' has an old value, as the worker where it lives cannot be asked: %s"
            _log.warning(what, variable.name, error)
            self._old.discard(id(variable))  # It is the newest that there is.

    def keep(self, variables: Iterable[tf.Variable]) -> None:
        """This worker's script is about to write these variables: others still see those that live here as they are."""
        self._held.keep(variables)

    def sync(self) -> None:
        """Give this worker's variables the values that they have on servers; every worker calls it.

        None goes on, and writes to them, before all have them.
        """
        if self._values is not None:
            self.pause()
            self._cluster.barrier(self._key("reached"))
            self._pull_all()
            self._cluster.barrier(self._key("synchronized"))

    def _pull_all(self) -> None:
        self.pull(variable for variable, _ in self._homes.items())

    def stepped(self, old: frozenset[int], current: frozenset[int]) -> None:
        """After a step these variables, by identity, are older than those of the servers, and those are not."""
        with self._pulling:  # What another thread is being given is of before the step.
            self._old |= old
            self._old -= current

    def forget_newer(self, variable: tf.Variable) -> None:
        """The variable was written here, by the user: a server's value is no newer."""
        self._old.discard(id(variable))

    # -- Together with the others -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """This worker is about to wait for all others: until then servers let none of them wait for its next step."""
        for messages in list(self._messages):
            messages.pause()

    def leave(self) -> None:
        """Bring what lives elsewhere here when all workers have taken their last steps."""
        if self._values is not None:
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
        if self._values is not None:
            atexit.unregister(self._leave_at_exit)
            self._values.close()
            self._values = None
        for variable, _ in self._homes.items():
            unwatch(variable, self)
        self._held.clear()
        self._old.clear()
        self._homes.clear()

    def _leave_at_exit(self) -> None:
        with suppress(AutoDistError):  # The run has failed: its cause is shown.
            self._wait_for_all()
            self._wait_for_all()


class ServedCopies:
    """A program's variables that live on servers of other workers: when this worker's are behind, and when not."""

    def __init__(
        self,
        served: Served,
        read: Sequence[tf.Variable],
        behind: frozenset[int],
        refreshed: frozenset[int],
        *,
        together: bool,
    ):
        """The program reads `read`; its steps leave `behind` behind, and bring `refreshed`, by identity."""
        self._served, self._read, self._behind, self._refreshed = served, list(read), behind, refreshed
        self._together = together

    def before_step(self) -> None:
        """Bring what the program reads up to date; for a step of all, after others that each takes by itself, meet."""
        if self._together and self._served.are_apart:
            self._served.pause()
        self._served.pull(self._read)

    def after_step(self) -> None:
        """Note what the step has changed elsewhere."""
        self._served.stepped(self._behind, self._refreshed)

    def after_failed_step(self) -> None:
        """Note what the step may have changed elsewhere, and has not brought."""
        self._served.stepped(self._behind | self._refreshed, frozenset())
