"""Variables of the user's that are cut into shards, and those shards that this worker has.

The user's variable is the one to look at: it is given what the shards hold when somebody does, and the shards are given
what was written to it before the next step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.kernel.program import Shards
from autodist_py.servers.lazy_variable import fill, peek
from autodist_py.servers.store import Location


class ShardedVariable:
    """How a variable is cut, where its shards live, and those of them on this worker.

    It does not keep the variable, and is given it again by who does.

    Attributes:
        shards: how it is cut.
        locations: where each shard lives; None: on every worker.
        own: the shards that this worker has, by their positions.
    """

    def __init__(self, variable: tf.Variable, shards: Shards, locations: Sequence[Location | None], *, is_bsp: bool):
        """This worker has no shard yet; others may change theirs between its steps, unless all step together."""
        self.shards, self.locations = shards, tuple(locations)
        self._is_bsp = is_bsp
        self.own: dict[int, tf.Variable] = {}
        self._dtype = variable.dtype.base_dtype
        self._joined: list[tf.Tensor] = []
        """What the variable was made of when it was last brought, if it is still that."""

    def is_cut_alike(self, shards: Shards, ranks: Sequence[int | None]) -> bool:
        """Whether another program cuts it in this way, too, with the shards on the servers of these ranks."""
        own = self.shards.axis, self.shards.shapes, [location and location.rank for location in self.locations]
        return own == (shards.axis, shards.shapes, list(ranks))

    def elsewhere(self, rank: int) -> dict[Location, tf.TensorSpec]:
        """The types and names of the shards that live on other workers than that of `rank`, by where they live."""
        named = zip(self.locations, self.shards.shapes, self.shards.names, strict=True)
        return {
            location: tf.TensorSpec(shape, self._dtype, name)
            for location, shape, name in named
            if location is not None and location.rank != rank
        }

    def have(self, variable: tf.Variable, position: int, device: str) -> tf.Variable:
        """From now on this worker has that shard, of the variable's value."""
        with tf_adapter.eagerly(), tf.device(device):
            value = self._parts(peek(variable))[position]
            name = self.shards.names[position]
            self.own[position] = tf_adapter.variable_of_no_strategy(value, self._dtype, name)
        return self.own[position]

    def join(self, variable: tf.Variable, others: Mapping[Location, tf.Tensor]) -> None:
        """Give the variable what the shards hold: `others`, by where they live, and this worker's own."""
        with tf_adapter.eagerly(), tf.device("/device:CPU:0"):
            parts = [
                others[location] if location is not None and location in others else peek(self.own[position])
                for position, location in enumerate(self.locations)
            ]
            fill(variable, tf.concat(parts, axis=self.shards.axis))
        self._joined = parts

    def join_own(self, variable: tf.Variable) -> None:
        """Give the variable what this worker's shards hold, and zeros in the place of all others."""
        with tf_adapter.eagerly():
            missing = {
                location: tf.zeros(self.shards.shapes[position], self._dtype)
                for position, location in enumerate(self.locations)
                if location is not None and position not in self.own
            }
        self.join(variable, missing)

    def forget(self) -> None:
        """The variable is not what the shards are any more."""
        self._joined = []

    def looked_at(self, variable: tf.Variable) -> None:
        """The script is about to read or write the variable, which is what the shards were when it was brought."""
        if not self._is_bsp and not self._joined:
            with tf_adapter.eagerly():
                self._joined = self._parts(peek(variable))

    def written(self, variable: tf.Variable) -> list[tuple[tf.Variable, tf.Tensor]]:
        """This worker's shards that the script has written since the variable was brought, and their new values."""
        if not self.own:
            return []
        with tf_adapter.eagerly():
            parts = self._parts(peek(variable))
        # Where workers step together the shards are still what the variable was brought from.
        before = [peek(shard) if self._is_bsp else self._joined[at] for at, shard in self.own.items()]
        self._joined = [] if self._is_bsp else parts
        found = zip(self.own.items(), before, strict=True)
        return [(shard, parts[at]) for (at, shard), was in found if not _is_same(was, parts[at])]

    def _parts(self, value: tf.Tensor) -> list[tf.Tensor]:
        return list(tf.split(value, list(self.shards.sizes), axis=self.shards.axis))


def _is_same(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether two tensors of one type have the same bytes."""
    first, second = (np.ascontiguousarray(tensor.numpy()).view(np.uint8) for tensor in (one, other))
    return np.array_equal(first, second)
