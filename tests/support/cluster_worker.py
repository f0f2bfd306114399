"""The script of a test cluster's workers: joins the cluster, then runs the cases that the test process sends.

python tests/support/cluster_worker.py    started by tests/support/cluster_pool.py; the chief starts the other workers
"""

import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client

import pytest

ADDRESS_VARIABLE = "CLUSTER_POOL_ADDRESS"
AUTHKEY_VARIABLE = "CLUSTER_POOL_AUTHKEY"

_STACKS_SECONDS = 200.0
"""After so long it is shown where a case stands, before the test process ends it."""


def main() -> None:
    from autodist_py import AutoDist

    leave_datasets_untuned()
    faulthandler.enable()  # Else a crash is told by an exit code, which nobody is left to tell.
    # The first AutoDist joins the cluster; the later ones, which the cases make, use the same one.
    with AutoDist() as autodist:
        rank = autodist.rank
    host, _, port = os.environ[ADDRESS_VARIABLE].rpartition(":")
    with Client((host, int(port)), authkey=bytes.fromhex(os.environ[AUTHKEY_VARIABLE])) as connection:
        connection.send((rank, os.getpid()))
        while (case := connection.recv()) is not None:
            connection.send(outcome(*case))


def leave_datasets_untuned() -> None:
    """Make every iterator without TensorFlow's autotuning thread.

    Whoever drops an iterator waits for that thread with Python's lock held, at times as long as the iterator lived.
    """
    import tensorflow as tf

    untouched = tf.data.Dataset._apply_debug_options

    def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
        options = tf.data.Options()
        options.autotune.enabled = False
        return untouched(dataset).with_options(options)

    tf.data.Dataset._apply_debug_options = untuned  # Which each way to make an iterator calls last.


def outcome(module: str, function: str, arguments: dict) -> tuple[bool, object]:
    """Whether the case succeeded, and its result, or the traceback as text."""
    faulthandler.dump_traceback_later(_STACKS_SECONDS)
    try:
        with settings_restored():
            return True, getattr(importlib.import_module(module), function)(**arguments)
    except (Exception, pytest.fail.Exception):  # The latter is none, and `pytest.raises` raises it.
        return False, traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def settings_restored() -> Iterator[None]:
    """What a case says of Keras's types, and of the environment, is of no other case."""
    environment = dict(os.environ)
    try:
        yield
    finally:
        put_back(environment)
        if "keras" in sys.modules:
            import keras

            keras.utils.clear_session(free_memory=False)  # The policy too, which else stays that of the first layer.
            keras.config.set_floatx("float32")
        if "tf_keras" in sys.modules:
            import tf_keras

            tf_keras.backend.set_floatx("float32")
            tf_keras.mixed_precision.set_global_policy(None)


def put_back(environment: dict[str, str]) -> None:
    """Undo what was changed of the environment, and touch nothing else.

    TensorFlow's threads read it all the time, and a `getenv` beside a `putenv` or `unsetenv` may crash the process.
    """
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name in environment:
        if os.environ.get(name) != environment[name]:
            os.environ[name] = environment[name]


if __name__ == "__main__":
    main()
