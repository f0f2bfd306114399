"""Runs a file of TensorFlow's own tests with a strategy in the place of its MirroredStrategy, and prints what passes.

    python -m tests.packages.tensorflow_worker ours FILE

`tensorflow` for `ours` runs them with TensorFlow's, on the same CPUs: what fails then needs GPUs.
"""

import faulthandler
import importlib.util
import json
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf
from absl import flags
from tensorflow.python.distribute import mirrored_strategy, strategy_combinations, test_util

from autodist_py.distribute import MirroredStrategy

SECONDS = 90
"""A test that takes longer hangs: then the process ends."""
OF_OTHERS = re.compile("MultiWorker|TPU|ParameterServer|CentralStorage")
"""Tests of other strategies."""
DEVICES = {
    "mirrored_strategy_with_one_cpu": ["/cpu:0"],
    "mirrored_strategy_with_two_cpus": ["/cpu:0", "/cpu:1"],
    "mirrored_strategy_with_gpu_and_cpu": ["/cpu:0", "/cpu:1"],
    "mirrored_strategy_with_cpu_1_and_2": ["/cpu:1", "/cpu:2"],
}
"""The strategies of TensorFlow's tests that are replaced, and on which devices; those of two GPUs are left out."""


class TheirMirroredStrategy(tf.distribute.MirroredStrategy):
    """TensorFlow's, which adds up in order."""

    def __init__(self, devices: Any = None, cross_device_ops: Any = None):
        super().__init__(devices, cross_device_ops or tf.distribute.ReductionToOneDevice())


def main(kind: str, file: str) -> None:
    test_util.set_logical_devices_to_at_least("CPU", 4)
    strategy = MirroredStrategy if kind == "ours" else TheirMirroredStrategy
    for name, devices in DEVICES.items():
        named = getattr(strategy_combinations, name)
        named._initializer = lambda devices=devices: strategy(devices)
        named.required_gpus = named.required_physical_gpus = 0
    for module in (tf.distribute, strategy_combinations, *([mirrored_strategy] if kind == "ours" else [])):
        module.MirroredStrategy = strategy
    cases = unittest.defaultTestLoader.loadTestsFromModule(imported(Path(file)))
    flags.FLAGS([file])
    print(json.dumps({name: outcome for test in flat(cases) for name, outcome in [run(test)]}))


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        elif not OF_OTHERS.search(test.id()) and not test.id().endswith("test_session"):
            yield test


def run(test: unittest.TestCase) -> tuple[str, str]:
    """The name of a test, and how it ends."""
    result = unittest.TestResult()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    test.run(result)
    faulthandler.cancel_dump_traceback_later()
    name = test.id().partition(".")[2]
    for _, text in result.failures + result.errors:
        print(f"{name}: {text}", file=sys.stderr)
    return name, "skipped" if result.skipped else "passed" if result.wasSuccessful() else "failed"


if __name__ == "__main__":
    main(*sys.argv[1:])
