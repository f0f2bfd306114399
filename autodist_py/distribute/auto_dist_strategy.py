"""`AutoDistStrategy`: the replicas of an `AutoDist`, whose variables live where its strategy builder says."""

from typing import Any

import tensorflow as tf

from autodist_py.autodist import AutoDist
from autodist_py.distribute.extended import ServedExtended
from autodist_py.distribute.multi_worker_mirrored_strategy import MultiWorkerMirroredStrategy
from autodist_py.distribute.placement import options_of
from autodist_py.proto.arguments import checked
from autodist_py.proto.errors import StrategyError


class AutoDistStrategy(MultiWorkerMirroredStrategy):
    """A `tf.distribute.Strategy` of the workers and devices of an `AutoDist`, by its strategy builder.

    All means what it means in `MultiWorkerMirroredStrategy`. A variable is there once: on all workers alike, on a
    server, or in shards on several, as the builder says. What is synchronized when it is read
    (`VariableSynchronization.ON_READ`) each replica has for itself. So is a variable without an aggregation, if
    replicas write values of their own to it, as batch normalization does.

    Args:
        autodist: whose workers, devices and builder they are. Closing it ends the strategy.
        communication_options: how values are combined outside of `run`.
        decorrelate: whether each replica draws numbers of its own by a seed, such as dropout's masks.

    Raises:
        ClusterError: the workers have different numbers of devices.
        StrategyError: something given is of another type.
        AutoDistError: the AutoDist is closed.
    """

    @checked("autodist", "decorrelate", error=StrategyError)
    def __init__(self, autodist: AutoDist, *, communication_options: Any = None, decorrelate: bool = False):
        compiler = autodist.replica_compiler()
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        self._given_resolver = None
        self._take_keys(compiler.cluster.resources)
        kernel_options = options_of(decorrelate=decorrelate, keeps_copies=False)
        tf.distribute.Strategy.__init__(self, ServedExtended(self, options, compiler, kernel_options))
