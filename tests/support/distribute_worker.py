"""Runs programs of `tf.distribute` under one strategy, in a process of its own, and keeps what each gives.

Under a strategy of several workers it runs in each. TensorFlow finds them by TF_CONFIG; `autodist run` starts ours.
"""

import importlib
import itertools
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

from autodist_py import AutoDist
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from tests.support import distribute_branches, distribute_together, distribute_training, distribute_variables
from tests.support.cutting import CutInTwo
from tests.support.distribute_cases import CASES, OURS, Case

assert distribute_branches and distribute_training and distribute_variables  # They add their cases.


TOWER_MODULES = {
    "towers": ("programs", "sessions", "localities"),
    "tower-references": ("references", "session_references"),
}
"""The modules that have the programs of a kind of strategy, where it is one of towers or is compared with it."""


class _TheirExtended(collective_all_reduce_strategy.CollectiveAllReduceExtended):
    """TensorFlow's, with a replica on each logical CPU, and a server that the process starts but once."""

    num_local = 1

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> Any:
        return tuple(f"{worker_device}/device:CPU:{index}" for index in range(self.num_local)), "CPU"

    def _update_config_proto(self, config: Any) -> Any:
        updated = super()._update_config_proto(config)
        updated.device_count["CPU"] = self.num_local
        return updated


class _TheirWorkers(tf.distribute.MultiWorkerMirroredStrategy):
    _numbers = itertools.count()

    def __init__(self) -> None:
        self._collective_key_base = next(self._numbers) * 1000
        options = tf.distribute.experimental.CommunicationOptions()
        tf.distribute.Strategy.__init__(self, _TheirExtended(self, None, options))
        _TheirExtended._std_server_started = True


def made(kind: str, replicas: int) -> Any:
    devices = [f"/cpu:{index}" for index in range(replicas)]
    if kind in ("tensorflow", "tower-references"):
        return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    if kind == "tensorflow-workers":
        _TheirExtended.num_local = replicas
        return _TheirWorkers()
    if kind == "tensorflow-central":
        return tf.distribute.experimental.CentralStorageStrategy(devices)
    ours = importlib.import_module("autodist_py.distribute")
    if kind == "central":
        return ours.CentralStorageStrategy(devices)
    if kind == "together":
        return distribute_together.of_two_replicas
    if kind.startswith("autodist"):
        resources = None if "workers" in kind else ResourceSpec((NodeSpec("127.0.0.1", cpus=tuple(range(replicas))),))
        named = kind.partition(" ")[2]
        return ours.AutoDistStrategy(AutoDist(resources, CutInTwo() if named == "cut in two" else named))
    if kind == "towers":
        return ours.towers.MirroredStrategy(devices)
    return ours.MirroredStrategy(devices) if kind == "ours" else ours.MultiWorkerMirroredStrategy()


def programs(kind: str) -> dict[str, Case]:
    """The programs of a kind of strategy, by name."""
    modules = [importlib.import_module(f"tests.support.tower_{name}") for name in TOWER_MODULES.get(kind, ())]
    if modules:
        return {name: one for module in modules for name, one in getattr(module, "PROGRAMS", {}).items()}
    if kind == "together":
        return distribute_together.CHECKS
    return CASES | (OURS if kind == "ours" else {})


def as_arrays(value: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in tf.nest.flatten(value)]


def main(kind: str, replicas: int, folder: str, only: list[str]) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    if not kind.startswith(("ours-workers", "ours-tasks", "autodist-workers")):
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    for name, function in programs(kind).items():
        if only and name not in only:
            continue
        strategy = made(kind, replicas)
        extended = getattr(strategy, "extended", None)
        own = Path(folder, str(getattr(extended, "_id_in_cluster", 0)))
        own.mkdir(exist_ok=True)
        try:
            arrays = as_arrays(function(strategy) or [])
        except Exception:
            text = traceback.format_exc()
            print(name, text[-3000:], flush=True)
            (own / f"{name}.error").write_text(text)
            continue
        np.savez(own / f"{name}.npz", *arrays)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
