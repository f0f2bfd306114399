"""`MirroredStrategy`: several devices of one machine, each with a copy of every variable."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from autodist_py.distribute.extended import CompiledMirroredExtended
from autodist_py.distribute.placement import options_of
from autodist_py.strategy_builders.base import StrategyBuilder, resolve_builder


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """`tf.distribute.MirroredStrategy`, whose replica functions are traced once, and compiled.

    All means what it means there: gradients are combined where the program says so, a replica counts once whatever
    examples it has, and results are PerReplica. Random numbers are those that the program's seeds give, on all
    replicas the same; stateful ops draw others on each.

    Args:
        devices: of the replicas; None: all GPUs, or the CPU.
        cross_device_ops: how values are reduced outside of `run`; None: in order, on one device.
        strategy_builder: how gradients are synchronized, as `AutoDist(strategy_builder=...)`. Default: AllReduce.
        decorrelate: whether each replica draws numbers of its own by a seed, such as dropout's masks.

    Raises:
        StrategyError: no such builder, or wrong arguments.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: Any = None,
        *,
        strategy_builder: StrategyBuilder | str | None = None,
        decorrelate: bool = False,
    ):
        extended = CompiledMirroredExtended(
            self,
            devices,
            cross_device_ops,
            strategy_builder=resolve_builder(strategy_builder),
            options=options_of(decorrelate=decorrelate),
        )
        tf.distribute.Strategy.__init__(self, extended)
