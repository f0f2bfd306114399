"""`tf.distribute` programs, compiled: their strategies, whose replica functions are traced once for all replicas."""

from autodist_py.distribute import towers
from autodist_py.distribute.mirrored_strategy import MirroredStrategy
from autodist_py.distribute.multi_worker_mirrored_strategy import MultiWorkerMirroredStrategy
from autodist_py.distribute.session_creator import SessionCreator
from autodist_py.distribute.sync_replicas import SyncReplicasOptimizer

__all__ = ["MirroredStrategy", "MultiWorkerMirroredStrategy", "SessionCreator", "SyncReplicasOptimizer", "towers"]
