"""Runs programs of `tf.distribute` under one strategy, in a process of its own, and keeps what each gives."""

import importlib
import sys
import traceback
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support import distribute_training
from tests.support.distribute_cases import CASES, OURS

assert distribute_training  # It adds its cases.


def made(kind: str, replicas: int) -> Any:
    devices = [f"/cpu:{index}" for index in range(replicas)]
    if kind == "tensorflow":
        return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    return importlib.import_module("autodist_py.distribute").MirroredStrategy(devices)


def as_arrays(value: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in tf.nest.flatten(value)]


def main(kind: str, replicas: int, folder: str, only: list[str]) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    for name, function in (CASES | (OURS if kind == "ours" else {})).items():
        if only and name not in only:
            continue
        try:
            arrays = as_arrays(function(made(kind, replicas)))
        except Exception:
            text = traceback.format_exc()
            print(name, text[-3000:], flush=True)
            with open(f"{folder}/{name}.error", "w") as file:
                file.write(text)
            continue
        np.savez(f"{folder}/{name}.npz", *arrays)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
