"""`VariableDirectory`: where the variables of one AutoDist object live, and what this worker knows of their values."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from autodist_py.cluster.cluster import Cluster
from autodist_py.kernel.program import Shards
from autodist_py.proto.errors import AutoDistError, StrategyError, WorkerFailedError
from autodist_py.proto.strategy import VariableStrategy
from autodist_py.servers.lazy_variable import (
    AccessObserver,
    empty,
    fill,
    is_shared,
    look_for,
    observe_access,
    stop_observing,
)
from autodist_py.servers.record import VariableRecord
from autodist_py.servers.sharded_variable import ShardedVariable
from autodist_py.servers.store import Location, ServerStore
from autodist_py.servers.values import ServerValues
from autodist_py.servers.weak_map import WeakIdentityMap

_log = logging.getLogger(__name__)


class VariableDirectory:
    """Which variables live where, whole or in shards, and which of this worker's copies are old.

    Whoever is about to read a copy that is old, or to write it, has it brought first: eager code by a look, programs by
    `use`.

    Attributes:
        held: what lives here.
        values: how the other servers are asked; None where nothing lives on servers.
    """

    def __init__(self, cluster: Cluster):
        """All variables are whole, and on every worker."""
        self._cluster = cluster
        self.held = ServerStore()
        self.values: ServerValues | None = None
        self._records: WeakIdentityMap[VariableRecord] = WeakIdentityMap()
        """Of the variables that live elsewhere, or in shards; others are whole and current on every worker."""
        self._locations = 0
        self._thread = threading.get_ident()
        self._pulling = threading.RLock()

    # -- What lives where ---------------------------------------------------------------------------------------------

    def rank(self, variable: tf.Variable) -> int | None:
        """That of the server where the variable lives, if it lives whole on one."""
        where = self._where(variable)
        return where.rank if isinstance(where, Location) else None

    def strategy(self, variable: tf.Variable) -> VariableStrategy | None:
        """How a variable in shards is trained; None: it is in none, or nothing trains it."""
        return self._records[variable].strategy if variable in self._records else None

    def put(self, name: str, variable: tf.Variable, rank: int, why: str) -> None:
        """From now on the variable lives on the server of that rank, whole; `why`, if it was to be cut.

        Raises:
            StrategyError: it lives elsewhere already, or in shards.
        """
        where = self._where(variable)
        if isinstance(where, Location):
            _require_location(name, where.rank, rank)
            return
        if where is not None:
            raise _other_layout(name, why)
        location = self._new_location(rank)
        self._records[variable] = VariableRecord(location)
        if rank == self._cluster.rank:
            self.held.add(location.number, variable)
            observer = AccessObserver(lambda looked_at: self.held.keep([looked_at]), lambda captured: None)
        else:
            observer = AccessObserver(self._look, self._pin)
        observe_access(variable, self, observer)

    def put_shards(
        self,
        shards: Shards,
        variable: tf.Variable,
        ranks: Sequence[int | None],
        *,
        is_bsp: bool,
        strategy: VariableStrategy | None = None,
    ) -> None:
        """From now on the variable lives in shards, on the servers of those ranks; None: on every worker.

        Raises:
            StrategyError: it lives whole, or in other shards, already.
        """
        if variable not in self._records:
            locations = [None if rank is None else self._new_location(rank) for rank in ranks]
            self._records[variable] = VariableRecord(ShardedVariable(variable, shards, locations, is_bsp=is_bsp))
            observe_access(variable, self, AccessObserver(self._look, self._pin))
        record = self._records[variable]
        if not isinstance(record.where, ShardedVariable) or not record.where.is_cut_alike(shards, ranks):
            raise _other_layout(shards.variable)
        record.strategy = strategy or record.strategy

    def shard(self, variable: tf.Variable, position: int, device: str) -> tf.Variable:
        """This worker's own shard at that position, made on the device, of the variable's value, if it is new."""
        sharded = self._shards(variable)
        if position not in sharded.own:
            self.pull([variable])
            shard = sharded.have(variable, position, device)
            location = sharded.locations[position]
            if location is not None:
                self.held.add(location.number, shard)
        return sharded.own[position]

    def own_part(self, variable: tf.Variable) -> tf.Variable:
        """This worker's shard of a variable of which it has one."""
        (part,) = self._shards(variable).own.values()
        return part

    def _where(self, variable: tf.Variable) -> Location | ShardedVariable | None:
        return self._records[variable].where if variable in self._records else None

    def _shards(self, variable: tf.Variable) -> ShardedVariable:
        where = self._records[variable].where
        if not isinstance(where, ShardedVariable):
            raise TypeError(f"'{variable.name}' lives whole on worker {where.rank}, and is asked for its shards")
        return where

    def _new_location(self, rank: int) -> Location:
        self._locations += 1
        return Location(self._locations, rank)

    # -- Before somebody reads or writes ------------------------------------------------------------------------------

    def pull(self, variables: Iterable[tf.Variable]) -> None:
        """Give these variables of this worker the values that they have on servers, if those are newer.

        No other worker need call it; this one is between two steps.
        """
        with self._pulling:
            old = {id(one): one for one in variables if one in self._records and not self._records[one].is_current}
            if not old:
                return
            wanted: dict[Location, tf.TensorSpec] = {}
            for variable in old.values():
                where = self._records[variable].where
                if isinstance(where, ShardedVariable):
                    wanted |= where.elsewhere(self._cluster.rank)
                else:
                    wanted[where] = tf.TensorSpec(variable.shape, variable.dtype.base_dtype, variable.name)
            values = self._ask(wanted)
            for variable in old.values():
                record = self._records[variable]
                if isinstance(record.where, ShardedVariable):
                    with self.held.steady():
                        record.where.join(variable, values)
                else:
                    fill(variable, values[record.where])
                record.filled()

    def pull_all(self) -> None:
        """Give all variables of this worker the values that they have on servers."""
        self.pull(variable for variable, _ in self._records.items())

    def _ask(self, wanted: Mapping[Location, tf.TensorSpec]) -> dict[Location, tf.Tensor]:
        found: dict[Location, tf.Tensor] = {}
        for rank in sorted({location.rank for location in wanted}):
            numbers = {location.number: spec for location, spec in wanted.items() if location.rank == rank}
            if self.values is not None:
                found |= {Location(number, rank): value for number, value in self.values.ask(numbers, rank).items()}
        return found

    def use(self, variables: Sequence[tf.Variable]) -> None:
        """A program is about to read these, or to write them: they are as they are wherever they live."""
        self.pull(variables)
        look_for(self, variables)

    def keep(self, variables: Iterable[tf.Variable]) -> None:
        """This worker's script is about to write these variables: others still see those that live here as they are."""
        for variable in variables:
            self.held.keep([variable])
            if isinstance(self._where(variable), ShardedVariable):
                self._look(variable)

    def _look(self, variable: tf.Variable) -> None:
        """Eager code is about to read or write a variable that lives elsewhere, or in shards."""
        record = self._records[variable]
        if threading.get_ident() != self._thread:  # It may read while the next step ends.
            record.is_pinned = True
        if not record.is_current:
            try:
                self.pull([variable])
            except WorkerFailedError as error:  # A last checkpoint may still be written, of what is here.
                self._give_up([variable], error)
        if isinstance(record.where, ShardedVariable):
            with self._pulling:
                record.where.looked_at(variable)
                record.is_seen = True

    def _pin(self, variable: tf.Variable) -> None:
        """From now on a function of the user's may read the variable."""
        self._records[variable].is_pinned = True
        self._look(variable)

    # -- Around a step ------------------------------------------------------------------------------------------------

    def take_over(self, sharded: Iterable[tf.Variable], written: Iterable[tf.Variable]) -> None:
        """Before a step with these in shards, which writes others itself: what scripts have written is in the shards.

        This worker's script has, and another AutoDist may have, which trains one of them, too. What the step writes of
        variables that other programs have in shards those take over in their turn.
        """
        for variable in filter(is_shared, sharded):
            self._look(variable)
            look_for(self, [variable])
        seen = [(variable, record) for variable, record in self._records.items() if record.is_seen]
        look_for(self, (variable for variable, _ in seen))  # Another AutoDist may have let go of it.
        with self._pulling:
            for variable, record in seen:
                record.is_seen = False
                if not record.is_current:
                    continue  # Nobody has looked since the last step.
                for shard, value in self._shards(variable).written(variable):
                    self.held.keep([shard])
                    with self.held.steady():
                        fill(shard, value)
        for variable in written:
            if isinstance(self._where(variable), ShardedVariable):
                self._look(variable)

    def stepped(
        self,
        behind: Iterable[tf.Variable],
        refreshed: Iterable[tf.Variable],
        sharded: Iterable[tf.Variable] = (),
        idle: Iterable[tf.Variable] = (),
    ) -> None:
        """After a step the variables `behind` are older than those of the servers, and the `refreshed` ones are not.

        Those in shards may have others than they were brought from. The memory of the `idle` ones, which no step of
        this worker's uses, is let go of.
        """
        with self._pulling:  # What another thread is being given is of before the step.
            self._thread = threading.get_ident()
            for variable in behind:
                self._records[variable].left_behind()
            for variable in refreshed:
                self._records[variable].filled()
            for variable in sharded:
                self._shards(variable).forget()
            for variable in idle:
                if self._records[variable].released():
                    empty(variable)

    def written_here(self, variable: tf.Variable) -> None:
        """The variable was written by the user, on this worker: a server's value is no newer."""
        if variable not in self._records:
            return
        if self._records[variable].is_released:  # It was not, on this worker.
            self.pull([variable])
        self._records[variable].filled()

    # -- When others can be asked no more -----------------------------------------------------------------------------

    def bring_back(self) -> None:
        """What was let go of is here again, as far as those who have it can still be asked."""
        lost: list[tf.Variable] = []
        cause: AutoDistError | None = None
        for variable, record in self._records.items():
            try:
                if record.is_released:
                    self.pull([variable])
            except AutoDistError as error:
                lost.append(variable)
                cause = error
        if cause is not None:
            self._give_up(lost, cause)

    def _give_up(self, variables: Sequence[tf.Variable], error: AutoDistError) -> None:
        """Go on with what is here of variables that cannot be brought: there is nothing newer."""
        lost = [variable for variable in variables if self._records[variable].is_released]
        for what, those in (
            ("old values", [variable for variable in variables if not self._records[variable].is_released]),
            ("zeros in the place of values that are lost", lost),
        ):
            if those:
                names = ", ".join(f"'{variable.name}'" for variable in those)
                _log.warning("%s: %s, as the workers where they live cannot be asked: %s", names, what, error)
        for variable in lost:
            where = self._records[variable].where
            if isinstance(where, ShardedVariable):
                where.join_own(variable)
            else:
                fill(variable, tf.zeros(variable.shape, variable.dtype.base_dtype))
        for variable in variables:
            self._records[variable].filled()

    def close(self) -> None:
        """Ask nobody any more, and let go of the variables."""
        self.bring_back()
        if self.values is not None:
            self.values.close()
            self.values = None
        for variable, _ in self._records.items():
            stop_observing(variable, self)
        self.held.clear()
        self._records.clear()


def _require_location(name: str, location: int, rank: int) -> None:
    if location != rank:
        raise StrategyError(
            f"variable '{name}' lives on worker {location}, where another program of this AutoDist updates it, and "
            f"this one's update runs on worker {rank}. Give both the same variables, or one server: PS()"
        )


def _other_layout(name: str, why: str = "") -> StrategyError:
    return StrategyError(
        f"variable '{name}' is cut into other shards, or is whole, in another program of this AutoDist"
        f"{f' ({why})' if why else ''}. Give it the same shards in both, or leave it whole, as PerVariable does"
    )
