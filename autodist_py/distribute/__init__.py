"""`tf.distribute` programs, compiled: their strategies, whose replica functions are traced once for all replicas."""

import tensorflow as tf

from autodist_py.distribute import towers
from autodist_py.distribute.auto_dist_strategy import AutoDistStrategy
from autodist_py.distribute.central_storage_strategy import CentralStorageStrategy
from autodist_py.distribute.mirrored_strategy import MirroredStrategy
from autodist_py.distribute.multi_worker_mirrored_strategy import MultiWorkerMirroredStrategy
from autodist_py.distribute.session_creator import SessionCreator
from autodist_py.distribute.sync_replicas import SyncReplicasOptimizer

OneDeviceStrategy = tf.distribute.OneDeviceStrategy  # Of one replica there is nothing to combine.

__all__ = [
    "AutoDistStrategy",
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "SessionCreator",
    "SyncReplicasOptimizer",
    "towers",
]
