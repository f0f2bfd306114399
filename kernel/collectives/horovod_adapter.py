"""All that the kernel uses of Horovod, which is optional: it is imported when a program first asks for it."""

import json
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tensorflow as tf

from autodist_py.proto.errors import StrategyError

_WAY_OUT = "build it for this TensorFlow (`make horovod` in the project's folder), or use all_reduce_spec AUTO or RING"


def library() -> Any:
    """The module of Horovod's ops for TensorFlow.

    Raises:
        StrategyError: it is not installed, or built for another TensorFlow, or cannot be read or loaded.
    """
    found = find_spec("horovod")
    if found is None or found.origin is None:
        raise StrategyError(f"all_reduce_spec HOROVOD needs Horovod, which is not installed; {_WAY_OUT}")
    built_for = "none"
    try:
        with suppress(FileNotFoundError):  # Its native part was left out.
            built_for = json.loads(Path(found.origin).with_name("metadata.json").read_text()).get("tensorflow", "none")
    except (OSError, ValueError, AttributeError) as error:
        raise StrategyError(
            f"all_reduce_spec HOROVOD needs Horovod, whose metadata.json cannot be read: {error}; {_WAY_OUT}"
        ) from error
    if built_for != tf.__version__:
        raise StrategyError(
            "all_reduce_spec HOROVOD needs a Horovod that is built for this TensorFlow. Received: one for TensorFlow "
            f"{built_for}, beside TensorFlow {tf.__version__}; {_WAY_OUT}"
        )
    try:
        from horovod.tensorflow import mpi_ops
    except (ImportError, OSError, AttributeError, tf.errors.OpError) as error:
        raise StrategyError(
            f"all_reduce_spec HOROVOD needs Horovod, which cannot be loaded: {error}; {_WAY_OUT}"
        ) from error
    return mpi_ops


def all_reduce(value: tf.Tensor, name: str) -> tf.Tensor:
    """The sum of all workers' values, as an op of this name in the current scope.

    Workers find each other's part by the op's full name, in whatever order they come to it. TensorFlow does not know
    that the op does anything: it drops one whose result is not used, and folds one of a constant.
    """
    horovod = library()
    return horovod._allreduce(value, name=name, op=horovod.Sum)
