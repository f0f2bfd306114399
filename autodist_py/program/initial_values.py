"""`InitialValues`: the values from which a program trains are the chief's, on every worker."""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.cluster.cluster import Cluster
from autodist_py.kernel.collectives.collectives import REDUCIBLE, Collectives
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.program.agreement import Agreement
from autodist_py.proto.errors import ClusterError
from autodist_py.servers.parameter_servers import ParameterServers
from autodist_py.servers.weak_map import WeakIdentityMap


class InitialValues:
    """Knows which of the user's variables have the chief's values."""

    def __init__(self, cluster: Cluster, agreement: Agreement, servers: ParameterServers):
        """None of them has yet."""
        self._cluster, self._agreement, self._servers = cluster, agreement, servers
        self._chiefs: WeakIdentityMap[None] = WeakIdentityMap()

    def written_alone(self, variables: Mapping[str, tf.Variable]) -> None:
        """This worker wrote these variables by itself; from the next step on the chief's values count again.

        Every worker must do the same writes before that step; `broadcast` sees to it.
        """
        for variable in variables.values():
            self._chiefs.discard(variable)
            self._servers.directory.written_here(variable)

    def broadcast(self, variables: Mapping[str, tf.Variable]) -> None:
        """Make the variables that were not yet the chief's equal to them, on every worker.

        Raises:
            ClusterError: the workers did not all write the same variables.
        """
        new = {name: variable for name, variable in variables.items() if variable not in self._chiefs}
        if not new:
            return
        for variable in new.values():
            self._chiefs[variable] = None
        if self._cluster.num_workers > 1:
            self._servers.pause()
            self._agreement.require_same_writes(new)
            self._servers.directory.pull(new.values())
            self._servers.directory.keep(new.values())
            broadcast(new, self._cluster)

    def clear(self) -> None:
        """Let go of the variables."""
        self._chiefs.clear()


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
    topology = Topology(cluster.rank, tuple(Replica(r, r, "/device:CPU:0") for r in range(cluster.num_workers)))
    collectives = Collectives(topology, cluster.next_instance_key)

    def body(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        received: dict[int, tf.Tensor] = {}
        with tf.device(topology.host):
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
    agreed = cluster.broadcast(f"initial-value/{name}/{cluster.next_instance_key}", value.tobytes())
    variable.assign(np.frombuffer(agreed, value.dtype).reshape(value.shape))
