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
    carried = [variable for variable in variables.values() if variable.dtype.base_dtype in REDUCIBLE]
    for variable, value in zip(carried, _by_collective([one.read_value() for one in carried], cluster), strict=True):
        variable.assign(value)
    for name, variable in variables.items():
        if variable.dtype.base_dtype not in REDUCIBLE:
            _by_coordinator(name, variable, cluster)


def _by_collective(values: Sequence[tf.Tensor], cluster: Cluster) -> list[tf.Tensor]:
    """The chief's `values`, packed: one collective for each type."""
    place = Place(cluster.rank, tuple(Replica(r, r, "/device:CPU:0") for r in range(cluster.num_workers)))
    collectives = Collectives(place, cluster.next_instance_key)

    def body(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        received: dict[int, tf.Tensor] = {}
        with tf.device(place.host):
            for dtype in dict.fromkeys(value.dtype for value in inputs):
                alike = {position: value for position, value in enumerate(inputs) if value.dtype == dtype}
                own = tf.concat([tf.reshape(value, [-1]) for value in alike.values()], axis=0)
                total = collectives.sum_over_workers(own if cluster.is_chief else tf.zeros_like(own))
                parts = tf.split(total, [value.shape.num_elements() for value in alike.values()])
                received |= {
                    position: tf.reshape(part, value.shape)
                    for (position, value), part in zip(alike.items(), parts, strict=True)
                }
        return [received[position] for position in range(len(inputs))]

    specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
    results = tf_adapter.traced_function("initial_values", specs, body)(values)
    cluster.next_instance_key = collectives.next_key
    return results


def _by_coordinator(name: str, variable: tf.Variable, cluster: Cluster) -> None:
    value = np.asarray(variable.numpy())
    if value.dtype.hasobject:
        raise ClusterError(
            f"variable '{name}' holds strings, whose initial value cannot be sent to the workers; use a constant"
        )
    agreed = cluster.agree(f"initial-value/{name}/{cluster.next_instance_key}", value.tobytes())
    variable.assign(np.frombuffer(agreed, value.dtype).reshape(value.shape))
