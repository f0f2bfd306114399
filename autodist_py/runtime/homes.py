"""`Homes`: where the variables of one AutoDist object live, and what this worker knows of their values."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from autodist_py.kernel.program import Shards
from autodist_py.proto.errors import AutoDistError, StrategyError, WorkerFailedError
from autodist_py.runtime.cluster import Cluster
from autodist_py.runtime.held import Held, Home
from autodist_py.runtime.kept import Kept
from autodist_py.runtime.served_values import ServedValues
from autodist_py.runtime.sharded_variable import ShardedVariable
from autodist_py.runtime.watched import Watch, empty, fill, is_shared, look_for, unwatch, watch

_log = logging.getLogger(__name__)


class Homes:
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
        self.held = Held()
        self.values: ServedValues | None = None
        self._whole: Kept[Home] = Kept()
        self._sharded: Kept[ShardedVariable] = Kept()
        self._count = 0
        self._old: set[int] = set()
        """The identities of variables whose values on servers are newer than this worker's."""
        self._let_go: Kept[None] = Kept()
        """Those that hold nothing here."""
        self._used_unseen: Kept[None] = Kept()
        """Those that functions of the user's, or other threads, may read at any time."""
        self._seen: Kept[None] = Kept()
        """Those in shards that the script has looked at since the last step."""
        self._thread = threading.get_ident()
        self._pulling = threading.RLock()

    # -- What lives where ---------------------------------------------------------------------------------------------

    def rank(self, variable: tf.Variable) -> int | None:
        """That of the server where the variable lives, if it lives whole on one."""
        return self._whole[variable].rank if variable in self._whole else None

    def put(self, name: str, variable: tf.Variable, rank: int, why: str) -> None:
        """From now on the variable lives on the server of that rank, whole; `why`, if it was to be cut.

        Raises:
            StrategyError: it lives elsewhere already, or in shards.
        """
        if variable in self._whole:
            _require_home(name, self._whole[variable].rank, rank)
            return
        if variable in self._sharded:
            raise _other_layout(name, why)
        home = self._whole[variable] = self._new_home(rank)
        if rank == self._cluster.rank:
            self.held.add(home.number, variable)
            watch(variable, self, Watch(lambda looked_at: self.held.keep([looked_at]), lambda captured: None))
        else:
            watch(variable, self, Watch(self._look, self._use_unseen))

    def put_shards(
        self, shards: Shards, variable: tf.Variable, ranks: Sequence[int | None], *, is_together: bool
    ) -> None:
        """From now on the variable lives in shards, on the servers of those ranks; None: on every worker.

        Raises:
            StrategyError: it lives whole, or in other shards, already.
        """
        if variable not in self._sharded and variable not in self._whole:
            homes = [None if rank is None else self._new_home(rank) for rank in ranks]
            self._sharded[variable] = ShardedVariable(variable, shards, homes, is_together=is_together)
            watch(variable, self, Watch(self._look, self._use_unseen))
        if variable not in self._sharded or not self._sharded[variable].is_cut_alike(shards, ranks):
            raise _other_layout(shards.variable)

    def shard(self, variable: tf.Variable, position: int, device: str) -> tf.Variable:
        """This worker's own shard at that position, made on the device, of the variable's value, if it is new."""
        sharded = self._sharded[variable]
        if position not in sharded.own:
            self.pull([variable])
            shard = sharded.have(variable, position, device)
            home = sharded.homes[position]
            if home is not None:
                self.held.add(home.number, shard)
        return sharded.own[position]

    def own_part(self, variable: tf.Variable) -> tf.Variable:
        """This worker's shard of a variable of which it has one."""
        (part,) = self._sharded[variable].own.values()
        return part

    def _new_home(self, rank: int) -> Home:
        self._count += 1
        return Home(self._count, rank)

    # -- Before somebody reads or writes ------------------------------------------------------------------------------

    def pull(self, variables: Iterable[tf.Variable]) -> None:
        """Give these variables of this worker the values that they have on servers, if those are newer.

        No other worker need call it; this one is between two steps.
        """
        if not self._old:
            return
        with self._pulling:
            among = self._old.intersection(map(id, variables))
            whole = [(variable, home) for variable, home in self._whole.items() if id(variable) in among]
            cut = [(variable, sharded) for variable, sharded in self._sharded.items() if id(variable) in among]
            wanted = {home: tf.TensorSpec(one.shape, one.dtype.base_dtype, one.name) for one, home in whole}
            for _, sharded in cut:
                wanted |= sharded.elsewhere(self._cluster.rank)
            values = self._ask(wanted)
            for variable, home in whole:
                fill(variable, values[home])
            for variable, sharded in cut:
                with self.held.steady():
                    sharded.join(variable, values)
            self._old -= among
            for variable, _ in (*whole, *cut):
                self._let_go.discard(variable)

    def pull_all(self) -> None:
        """Give all variables of this worker the values that they have on servers."""
        self.pull([variable for known in (self._whole, self._sharded) for variable, _ in known.items()])

    def _ask(self, wanted: Mapping[Home, tf.TensorSpec]) -> dict[Home, tf.Tensor]:
        found: dict[Home, tf.Tensor] = {}
        for rank in sorted({home.rank for home in wanted}):
            numbers = {home.number: spec for home, spec in wanted.items() if home.rank == rank}
            if self.values is not None:
                found |= {Home(number, rank): value for number, value in self.values.ask(numbers, rank).items()}
        return found

    def use(self, variables: Sequence[tf.Variable]) -> None:
        """A program is about to read these, or to write them: they are as they are wherever they live."""
        self.pull(variables)
        look_for(self, variables)

    def keep(self, variables: Iterable[tf.Variable]) -> None:
        """This worker's script is about to write these variables: others still see those that live here as they are."""
        for variable in variables:
            self.held.keep([variable])
            if variable in self._sharded:
                self._look(variable)

    def _look(self, variable: tf.Variable) -> None:
        """Eager code is about to read or write a variable that lives elsewhere, or in shards."""
        if threading.get_ident() != self._thread:  # It may read while the next step ends.
            self._used_unseen[variable] = None
        if id(variable) in self._old:
            try:
                self.pull([variable])
            except WorkerFailedError as error:  # A last checkpoint may still be written, of what is here.
                self._give_up([variable], error)
        if variable in self._sharded:
            with self._pulling:
                self._sharded[variable].looked_at(variable)
                self._seen[variable] = None

    def _use_unseen(self, variable: tf.Variable) -> None:
        """From now on a function of the user's may read the variable."""
        self._used_unseen[variable] = None
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
        look_for(self, (variable for variable, _ in self._seen.items()))  # Another AutoDist may have let go of it.
        with self._pulling:
            for variable, _ in self._seen.items():
                if id(variable) in self._old:
                    continue  # Nobody has looked since the last step.
                for shard, value in self._sharded[variable].written(variable):
                    self.held.keep([shard])
                    with self.held.steady():
                        fill(shard, value)
            self._seen.clear()
        for variable in written:
            if variable in self._sharded:
                self._look(variable)

    def stepped(
        self,
        old: frozenset[int],
        current: frozenset[int],
        sharded: Iterable[tf.Variable] = (),
        idle: Iterable[tf.Variable] = (),
    ) -> None:
        """After a step these variables, by identity, are older than those of the servers, and those are not.

        Those in shards may have others than they were brought from. The memory of the `idle` ones, which no step of
        this worker's uses, is let go of.
        """
        with self._pulling:  # What another thread is being given is of before the step.
            self._thread = threading.get_ident()
            self._old |= old
            self._old -= current
            for variable in sharded:
                self._sharded[variable].forget()
            for variable in idle:
                if variable not in self._let_go and variable not in self._used_unseen:
                    self._let_go[variable] = None
                    empty(variable)

    def written_here(self, variable: tf.Variable) -> None:
        """The variable was written by the user, on this worker: a server's value is no newer."""
        if variable in self._let_go:  # It was not, on this worker.
            self.pull([variable])
        self._old.discard(id(variable))

    # -- When others can be asked no more -----------------------------------------------------------------------------

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
            if variable in self._sharded:
                self._sharded[variable].join_own(variable)
            else:
                fill(variable, tf.zeros(variable.shape, variable.dtype.base_dtype))
            self._let_go.discard(variable)
        for variable in variables:
            self._old.discard(id(variable))

    def close(self) -> None:
        """Ask nobody any more, and let go of the variables."""
        self.bring_back()
        if self.values is not None:
            self.values.close()
            self.values = None
        for variable, _ in (*self._whole.items(), *self._sharded.items()):
            unwatch(variable, self)
        self.held.clear()
        self._old.clear()
        for kept in (self._whole, self._sharded, self._let_go, self._used_unseen, self._seen):
            kept.clear()


def _require_home(name: str, home: int, rank: int) -> None:
    if home != rank:
        raise StrategyError(
            f"variable '{name}' lives on worker {home}, where another program of this AutoDist updates it, and "
            f"this one's update runs on worker {rank}. Give both the same variables, or one server: PS()"
        )


def _other_layout(name: str, why: str = "") -> StrategyError:
    return StrategyError(
        f"variable '{name}' is cut into other shards, or is whole, in another program of this AutoDist"
        f"{f' ({why})' if why else ''}. Give it the same shards in both, or leave it whole, as PerVariable does"
    )
