"""Where the replicas of an AutoDist are: `ServedPlacement`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from autodist_py import tf_adapter as tensorflow
from autodist_py.distribute import tf_adapter
from autodist_py.distribute.placement import ClusterPlacement, together
from autodist_py.distribute.replica_program import ReplicaProgram, ServedProgram
from autodist_py.kernel.program import Options
from autodist_py.program.build import CapturedStep, Compiler
from autodist_py.proto.errors import CaptureError


class ServedPlacement(ClusterPlacement):
    """The replicas are those of an AutoDist, which says where variables live."""

    def __init__(self, compiler: Compiler, devices: Sequence[str], options: Options):
        super().__init__(compiler, len(devices), options)
        self._devices = devices

    def compiled(self, step: CapturedStep) -> ReplicaProgram:
        """See Placement."""
        own = {"keeps_copies": False, "folds_seeds": self.options.folds_seeds, "batch": "global"}
        served = self._compiler.served_step(step, **own)
        behind = {name for name in served.program.held if name not in served.program.refreshed}
        behind |= {shards.variable for shards in served.program.shards if not shards.is_whole}
        for name, variable in step.variables.items():
            container = tf_adapter.container_of(variable)
            if isinstance(container, tf_adapter.CentralVariable):
                if name in behind and container.is_read_in_function():
                    raise tf_adapter.used_outside(name)
                container.lives_elsewhere |= name in behind
                container.is_used = True
        return ServedProgram(served, step, self.begin_step)  # Whoever waits for this worker is told that it goes on.

    def separate(self, container: Any, name: str, writer: str) -> None:
        """See Placement."""
        if tf_adapter.is_sync_on_read(container) or tf_adapter.is_separate(container):
            return
        if not isinstance(container, tf_adapter.CentralVariable) or container.is_aggregated:
            raise together(name, writer)
        own = f"'{writer}' gives each replica its own value of variable '{name}', which "
        or_made = "; or make the variable with synchronization=tf.VariableSynchronization.ON_READ"
        if container.is_used:
            way_out = "Run this one first, as fit() before evaluate()"
            raise CaptureError(f"{own}a function in run() has read as one for all. {way_out}{or_made}")
        if container.is_written_in_function():
            way_out = "Do this first, and eagerly or in run()"
            raise CaptureError(f"{own}a tf.function writes for all outside of run(). {way_out}{or_made}")
        with tensorflow.eagerly():
            value, further = tf_adapter.components_of(container)[0].read_value(), []
            for device in self._devices[1:]:
                with tf.device(device):
                    further.append(tensorflow.variable_of_no_strategy(value, value.dtype, f"{name}/own"))
        container.separate(further)
