"""The tower API: `tf.contrib.distribute` of TensorFlow 1.9 to 1.12, over the compiled strategies.

A program imports this module in the place of `tf.contrib.distribute`. docs/distribute.md says what differs.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from autodist_py.distribute import mirrored_strategy, tf_adapter
from autodist_py.distribute.locality import Locality, locality_of
from autodist_py.distribute.tower_context import TowerContext
from autodist_py.distribute.tower_strategy import DistributionStrategy, view_of
from autodist_py.strategy_builders.base import StrategyBuilder

__all__ = [
    "DistributionStrategy",
    "Locality",
    "MirroredStrategy",
    "TowerContext",
    "get_cross_tower_context",
    "get_distribution_strategy",
    "get_tower_context",
    "has_distribution_strategy",
    "in_cross_tower_context",
    "locality_of",
]


class MirroredStrategy(DistributionStrategy):
    """Towers on several devices of one machine, each of which has a copy of every variable.

    Args:
        devices: of the towers; None: all GPUs, or the CPU.
        num_gpus: instead of `devices`: so many GPUs, or the CPU for 0.
        cross_tower_ops: how values are reduced outside of a tf.function; None: in order, on one device.
        strategy_builder: how gradients are synchronized in a tf.function, as `AutoDist(strategy_builder=...)`.

    Raises:
        ValueError: `devices` and `num_gpus` are given, or the machine has fewer GPUs.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        num_gpus: int | None = None,
        cross_tower_ops: Any = None,
        *,
        strategy_builder: StrategyBuilder | str | None = None,
    ):
        if num_gpus is not None:
            found = len(tf.config.list_logical_devices("GPU"))
            if devices is not None or num_gpus > found:
                raise ValueError(
                    f"MirroredStrategy takes devices or a number of GPUs that there are; received {devices=}, "
                    f"{num_gpus=} of {found}. Give one: MirroredStrategy(['/device:CPU:0'])"
                )
            devices = [f"/device:GPU:{number}" for number in range(num_gpus)] or ["/device:CPU:0"]
        super().__init__(
            mirrored_strategy.MirroredStrategy(devices, cross_tower_ops, strategy_builder=strategy_builder)
        )


@tf_adapter.left_as_it_is
def get_tower_context() -> TowerContext | None:
    """The tower for which the caller runs: the default strategy's outside of a scope, None in a cross-tower context."""
    context = tf.distribute.get_replica_context()
    return None if context is None else TowerContext(context)


@tf_adapter.left_as_it_is
def get_cross_tower_context() -> DistributionStrategy | None:
    """The strategy in whose cross-tower context the caller runs; None in a tower context."""
    return get_distribution_strategy() if in_cross_tower_context() else None


@tf_adapter.left_as_it_is
def get_distribution_strategy() -> DistributionStrategy:
    """The strategy in whose scope the caller runs, or the default one of one tower."""
    return view_of(tf.distribute.get_strategy())


@tf_adapter.left_as_it_is
def has_distribution_strategy() -> bool:
    """Whether the caller runs in the scope of a strategy."""
    return bool(tf.distribute.has_strategy())


@tf_adapter.left_as_it_is
def in_cross_tower_context() -> bool:
    """Whether the caller runs for all towers together."""
    return bool(tf.distribute.in_cross_replica_context())
