"""`tf.distribute` programs, compiled: their strategies, whose replica functions are traced once for all replicas."""

from autodist_py.distribute.mirrored_strategy import MirroredStrategy

__all__ = ["MirroredStrategy"]
