"""Where the tower API puts what it reduces or broadcasts: a `Destination`."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.distribute import tf_adapter
from autodist_py.distribute.locality import Locality, M, N, of_variable


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a value is put.

    Attributes:
        target: what `tf.distribute` is told.
        locality: that of the value there.
    """

    target: Any
    locality: Locality


def destination_of(method: str, destinations: Any, strategy: tf.distribute.Strategy) -> Destination:
    """What `destinations`, an argument of `method`, stands for.

    Args:
        method: its name, for errors.
        destinations: None: all towers; a variable; a device; or a list of one or of all towers' devices.
        strategy: whose towers they are.

    Raises:
        ValueError: they are something else.
    """
    if isinstance(destinations, tf.Variable):
        return Destination(destinations, of_variable(destinations))
    if destinations is None:
        return _everywhere(strategy)
    devices = [destinations] if isinstance(destinations, str) else destinations
    if isinstance(devices, list | tuple) and all(isinstance(device, str) for device in devices):
        if len(devices) == 1:
            return Destination(devices[0], N)
        if set(map(tf_adapter.device_named, devices)) == set(map(tf_adapter.device_named, _devices(strategy))):
            return _everywhere(strategy)
    raise ValueError(
        f"{method}(): destinations takes a variable, a device, or a list of one or of all towers' devices; received "
        f"{destinations!r}. Leave it out for all towers"
    )


def _everywhere(strategy: tf.distribute.Strategy) -> Destination:
    return Destination(tf_adapter.Devices(_devices(strategy)), M)


def _devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """The devices of all towers; the default strategy has none."""
    return () if tf_adapter.is_default(strategy) else tuple(strategy.extended.worker_devices)
