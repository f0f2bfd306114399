"""Initial values are the chief's, on every worker."""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.kernel.cross_device_ops.collective import REDUCIBLE, Collectives
from autodist_py.kernel.device import Place, Replica
from autodist_py.proto.errors import ClusterError
from autodist_py.runtime.cluster import Cluster


def broadcast(variables: Mapping[str, tf.Variable], cluster: Cluster) -> None:
    """Give each of `variables` the chief's value; every worker calls it with the same variables, in the same order.

    Values that collectives carry go as collectives (the chief's value plus zeros); others through the coordinator.
    """
    place = Place(cluster.rank, tuple(Replica(r, r, "/device:CPU:0") for r in range(cluster.num_workers)))
    for name, variable in variables.items():
        if variable.dtype.base_dtype in REDUCIBLE:
            _by_collective(variable, place, cluster)
        else:
            _by_coordinator(name, variable, cluster)


def _by_collective(variable: tf.Variable, place: Place, cluster: Cluster) -> None:
    collectives = Collectives(place, cluster.next_instance_key)

    def body(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        own = inputs[0] if cluster.is_chief else tf.zeros_like(inputs[0])
        with tf.device(place.host):
            return [collectives.sum_over_workers(own)]

    value = variable.read_value()
    total = tf_adapter.traced_function("initial_value", [tf.TensorSpec(value.shape, value.dtype)], body)([value])
    cluster.next_instance_key = collectives.next_key
    variable.assign(total[0])


def _by_coordinator(name: str, variable: tf.Variable, cluster: Cluster) -> None:
    value = np.asarray(variable.numpy())
    if value.dtype.hasobject:
        raise ClusterError(
            f"variable '{name}' holds strings, whose initial value cannot be sent to the workers; use a constant"
        )
    agreed = cluster.agree(f"initial-value/{name}/{cluster.next_instance_key}", value.tobytes())
    variable.assign(np.frombuffer(agreed, value.dtype).reshape(value.shape))
