"""Whether all workers are given the same global batch: found by comparing fingerprints of the first steps' inputs."""

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
import tensorflow as tf

from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.step_hook import StepHook
from autodist_py.proto.errors import ClusterError

SAME_DATA_ADVICE = (
    "Look for a shuffle without a seed, files in another order, or a shard of the data per worker; if each worker is "
    'meant to read its own part, say AutoDist(batch="local")'
)

_BYTES = 16
_SECONDS = 24 * 3600.0
"""How long a worker may take from one step to the next: what it does between them is its own matter."""


class InputCheck(StepHook):
    """Compares what the workers are fed in the first steps of one program."""

    def __init__(self, cluster: Cluster, key: str, names: Sequence[str], *, own: Collection[str], steps: int):
        """Check the first `steps` steps of a program.

        Args:
            cluster: the workers.
            key: that of the program.
            names: those of its inputs.
            own: those of inputs that each worker has of its own: they are not compared.
            steps: how many.
        """
        self._cluster, self._key, self._names, self._own = cluster, key, names, frozenset(own)
        self._left = steps if cluster.num_workers > 1 and names else 0

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        """Compare `feeds`, one for each name.

        Raises:
            ClusterError: an input differs between workers.
        """
        if not self._left:
            return
        self._left -= 1
        compared = [(name, value) for name, value in zip(self._names, feeds, strict=True) if name not in self._own]
        own = b"".join(_fingerprint(value) for _, value in compared)
        everyone = self._cluster.compare(f"{self._key}/inputs/{self._left}", own, timeout=_SECONDS)
        chief = everyone[0]
        for rank, other in sorted(everyone.items()):
            for position, (name, _) in enumerate(compared):
                part = slice(position * _BYTES, (position + 1) * _BYTES)
                if other[part] != chief[part]:
                    raise ClusterError(
                        f"every worker must be given the same global batch, but '{name}' of worker {rank} differs from "
                        f"the chief's. {SAME_DATA_ADVICE}"
                    )


def _fingerprint(tensor: tf.Tensor) -> bytes:
    """Of shape, type and values."""
    value = np.asarray(tensor)
    content = b"\0".join(value.ravel().tolist()) if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    digest = hashlib.blake2b(f"{value.shape} {value.dtype}".encode(), digest_size=_BYTES)
    digest.update(content)
    return digest.digest()
