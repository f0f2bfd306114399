"""One random seed for the whole run: shuffles and initial values are those of one process."""

import hashlib
import random

import numpy as np
import tensorflow as tf

from autodist_py.cluster.cluster import Cluster
from autodist_py.tf_adapter import global_seed


def share_seed(cluster: Cluster, seed: int | None, *, key: str) -> None:
    """Seed Python's, NumPy's and TensorFlow's generators alike on all workers.

    Args:
        cluster: the workers.
        seed: what the user asked for; None: the run's seed, for those generators whose states differ between workers
            (equal states are the user's own seed, and are left alone). TensorFlow's has one wherever there are several
            replicas, as some numbers are drawn alike by all.
        key: names this exchange; no other uses it.
    """
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        tf.random.set_seed(seed)
        return
    if global_seed() is None and len(cluster.resources.replica_devices) > 1:
        tf.random.set_seed(cluster.seed)
    if cluster.num_workers == 1:
        return
    if not _equal_everywhere(cluster, f"{key}/python", repr(random.getstate())):
        random.seed(cluster.seed)
    if not _equal_everywhere(cluster, f"{key}/numpy", repr(np.random.get_state(legacy=False))):
        np.random.seed(cluster.seed % 2**32)


def _equal_everywhere(cluster: Cluster, key: str, state: str) -> bool:
    digest = hashlib.sha256(state.encode()).digest()
    return len(set(cluster.compare(key, digest).values())) == 1
