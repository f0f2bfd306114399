"""`CentralStorageStrategy`: several devices of one machine, whose variables are on one of them."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from autodist_py.distribute.extended import CentralExtended
from autodist_py.distribute.placement import options_of
from autodist_py.strategy_builders.parameter_server import PS


class CentralStorageStrategy(tf.distribute.experimental.CentralStorageStrategy):
    """`tf.distribute.experimental.CentralStorageStrategy`, whose replica functions are traced once, and compiled.

    A variable is there once. In each step replicas read it, and its update is done once. What is synchronized when it
    is read (`VariableSynchronization.ON_READ`), as metrics of Keras are, each replica has for itself.

    Args:
        compute_devices: of the replicas; None: all GPUs, or the CPU.
        parameter_device: of the variables; None: the CPU, or the only device.
        decorrelate: whether each replica draws numbers of its own by a seed, such as dropout's masks.
    """

    _collective_key_base = 0  # `MirroredExtended` asks its strategy for it.

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        decorrelate: bool = False,
    ):
        options = options_of(decorrelate=decorrelate, keeps_copies=False)
        extended: Any = CentralExtended(self, compute_devices, parameter_device, strategy_builder=PS(), options=options)
        tf.distribute.Strategy.__init__(self, extended)
