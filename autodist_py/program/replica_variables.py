"""Copies of the user's variables on a worker's further devices.

They hold nothing between steps: each step begins by assigning them the user's values (the Refresh pass). They are made
with a value of the right shape, because ops in loops' gradients read a variable's shape before anything is assigned.
"""

import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.servers.weak_map import WeakIdentityMap


class ReplicaVariables:
    """The copies that one AutoDist object keeps; those of a variable go when it does."""

    def __init__(self) -> None:
        self._copies: WeakIdentityMap[dict[tuple[int, str], tf.Variable]] = WeakIdentityMap()

    def of(self, variable: tf.Variable, replica: int, device: str) -> tf.Variable:
        """The copy of `variable` for a further replica, on the device; made when first asked for."""
        if variable not in self._copies:
            self._copies[variable] = {}
        own = self._copies[variable]
        if (replica, device) not in own:
            own[replica, device] = _copy(variable, device)
        return own[replica, device]

    def clear(self) -> None:
        """Let go of all copies."""
        self._copies.clear()


def _copy(variable: tf.Variable, device: str) -> tf.Variable:
    with tf_adapter.eagerly(), tf.device(device):
        if variable.dtype == tf.string:
            return tf_adapter.uninitialized_variable("copy", variable.dtype, variable.shape, trainable=False)
        unset = float("nan") if variable.dtype.is_floating else 0  # What would be read too early must show.
        value = tf.cast(tf.fill(variable.shape, unset), variable.dtype)
        return tf_adapter.variable_of_no_strategy(value, variable.dtype, "copy")
