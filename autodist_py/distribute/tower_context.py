"""`TowerContext`: what a function that is called for each tower may ask of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.distribute import tf_adapter
from autodist_py.distribute.replica_context import tracing_context
from autodist_py.distribute.tower_strategy import DistributionStrategy, view_of


@tf_adapter.left_as_it_is
@dataclass(frozen=True, slots=True)
class TowerContext:
    """The tower for which a function runs. In a tf.function, whose towers are traced once, it stands for all of them.

    Attributes:
        replica_context: the same, as `tf.distribute` has it.
    """

    replica_context: tf.distribute.ReplicaContext

    def merge_call(self, merge_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `merge_fn(d, *args, **kwargs)` returns, called once for all towers in the cross-tower context of `d`.

        Args:
            merge_fn: its result is each tower's; of a T, a tower has its own value.
            args: what each tower has; `merge_fn` is given T, but for variables, and what is the same object on all.
            kwargs: likewise.
        """

        def merged(strategy: tf.distribute.Strategy, *given: Any, **named: Any) -> Any:
            return merge_fn(view_of(strategy), *given, **named)

        return self._current().merge_call(merged, args, kwargs)

    @property
    def tower_id(self) -> Any:
        """The tower's number, from 0: an int, or a tensor where the context stands for all towers."""
        number = self._current().replica_id_in_sync_group
        static = tf.get_static_value(number) if tf.is_tensor(number) else number
        return number if static is None else int(static)

    @property
    def num_towers(self) -> int:
        """The number of towers, to average over them."""
        return self.distribution_strategy.num_towers

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower."""
        return self.distribution_strategy.is_single_tower

    @property
    def distribution_strategy(self) -> DistributionStrategy:
        """The strategy whose tower it is."""
        return view_of(self.replica_context.strategy)

    @property
    def device(self) -> str:
        """The device that the tower's ops are put on.

        Raises:
            RuntimeError: the context stands for several towers.
        """
        context = self._current()
        if tracing_context(context.strategy) is not None and not self.is_single_tower:
            raise RuntimeError(
                "device is asked for in a tf.function, whose towers are traced once, so that it is none's alone. Leave "
                "it out: ops are put on their tower's device. Its number is tower_id"
            )
        return tf_adapter.current_device()

    def _current(self) -> tf.distribute.ReplicaContext:
        if tf.distribute.get_replica_context() is not self.replica_context:
            raise RuntimeError(
                "a TowerContext is used where it is not the current one; ask for it in the function that uses it: "
                "get_tower_context()"
            )
        return self.replica_context
