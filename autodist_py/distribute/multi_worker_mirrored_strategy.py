"""`MultiWorkerMirroredStrategy`: the devices of several workers, each with a copy of every variable."""

import itertools
import os
from typing import Any

import tensorflow as tf

from autodist_py.cluster.cluster import join_cluster
from autodist_py.cluster.tf_config import Task
from autodist_py.config.logs import show_logs
from autodist_py.config.resource_spec import given_resource_spec, this_machine
from autodist_py.config.settings import RANK_VARIABLE, RESOURCE_SPEC_VARIABLE, Settings
from autodist_py.diagnostics.pass_dump import dumps
from autodist_py.distribute.extended import CompiledMultiWorkerExtended
from autodist_py.distribute.placement import options_of
from autodist_py.distribute.replica_context import tracing_context
from autodist_py.program.build import Compiler, Kernel
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.text import shown
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder, resolve_builder

_KEYS_OF_A_STRATEGY = 1 << 10
"""TensorFlow numbers the groups of each strategy from 1, and refuses other members under a number it knows."""


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy`, whose replica functions are traced once, and compiled.

    All means what it means there, and in `MirroredStrategy`. The workers are those that `autodist run` starts, or those
    of `resource_spec_file`, which the chief's process starts; or those of TF_CONFIG, each of which a scheduler starts.
    The script makes the strategy before anything eager.

    Args:
        cluster_resolver: whose cluster's workers a scheduler starts; None: TF_CONFIG's, if it has one.
        communication_options: how values are combined outside of `run`, and in it, if there is no `strategy_builder`.
        strategy_builder: how gradients are synchronized, as `AutoDist(strategy_builder=...)`. Default: AllReduce.
        resource_spec_file: the nodes, as for `AutoDist`; None: those of the run, else this machine.
        decorrelate: whether each replica draws numbers of its own by a seed, such as dropout's masks.

    Raises:
        ClusterError: the workers could not be joined; they have different numbers of devices; or a cluster is given in
            two ways.
        StrategyError: no such builder, or wrong arguments.
        ResourceSpecError: the file is no valid resource spec.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        strategy_builder: StrategyBuilder | str | None = None,
        resource_spec_file: str | os.PathLike[str] | ResourceSpec | None = None,
        decorrelate: bool = False,
    ):
        settings = Settings.from_environment()
        show_logs(settings.log_level)
        resolver = _resolver(cluster_resolver)
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        builder = resolve_builder(settings.strategy or strategy_builder or _by_options(options))
        self._given_resolver = resolver
        if resolver is None:
            cluster = join_cluster(given_resource_spec(resource_spec_file, settings), settings)
        else:
            _require_one_cluster(resolver, settings, resource_spec_file)
            given = resolver.cluster_spec()
            jobs = {job: given.job_tasks(job) for job in given.jobs}
            task = Task.of(jobs, resolver.task_type, resolver.task_id)
            cluster = task.join(this_machine().chief, settings)
        name = f"multi-worker-mirrored-{self._take_keys(cluster.resources)}"
        kernel = Kernel(options_of(decorrelate=decorrelate), dumps(settings.dump_dir, name))
        compiler = Compiler(name, cluster, cluster.resources, builder, kernel)
        tf.distribute.Strategy.__init__(self, CompiledMultiWorkerExtended(self, options, compiler, kernel.options))

    def _take_keys(self, resources: ResourceSpec) -> int:
        """Give this strategy's collectives keys of their own; the number of the strategy in this process."""
        numbers = {len(node.replica_devices) for node in resources.workers}
        if len(numbers) > 1:
            raise ClusterError(
                f"each worker of a {type(self).__name__} has as many devices as the others; the resource spec has "
                f"nodes of {', '.join(map(str, sorted(numbers)))}. Give all the same number, or use AutoDist"
            )
        number = next(self._numbers)
        self._collective_key_base = number * _KEYS_OF_A_STRATEGY
        return number

    @property
    def cluster_resolver(self) -> Any:
        """The one that was given, or TF_CONFIG's; else that of the run's workers, whose chief is worker 0."""
        return self._given_resolver or super().cluster_resolver

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """As `tf.distribute.Strategy.reduce`; replicas' scalars are reduced along axis 0 as they are along None.

        Keras's `fit` and `evaluate` ask for that of what they show.
        """
        if axis == 0 and tracing_context(self) is None:
            shapes = [getattr(each, "shape", None) for each in self.experimental_local_results(value)]
            axis = None if {tf.TensorShape(shape).rank for shape in shapes} == {0} else axis
        return super().reduce(reduce_op, value, axis=axis)


def _resolver(given: Any) -> Any:
    """The resolver of a cluster that a scheduler has started, by what is given or by TF_CONFIG; None: it has none."""
    resolver = given
    if resolver is None and "TF_CONFIG" in os.environ:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver is None:
        return None
    if not isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        raise ClusterError(
            "cluster_resolver is one of tf.distribute.cluster_resolver, or None. "
            f"Received: {shown(resolver)}. Leave it out where `autodist run` starts the workers"
        )
    try:
        jobs, _ = resolver.cluster_spec().jobs, resolver.task_id  # Reading the index shows whether it is a number.
    except (AttributeError, TypeError, ValueError) as error:
        if given is not None:
            raise
        raise ClusterError(
            f"TF_CONFIG is JSON with the addresses of a cluster. Received: {shown(os.environ.get('TF_CONFIG'))} "
            f"({error}). Write one such as "
            '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
        ) from error
    return resolver if jobs else None


def _require_one_cluster(resolver: Any, settings: Settings, resource_spec_file: Any) -> None:
    others = {
        "resource_spec_file=": resource_spec_file is not None,
        RESOURCE_SPEC_VARIABLE: settings.resource_spec is not None,
        RANK_VARIABLE: settings.rank is not None,
    }
    if given := [name for name, is_given in others.items() if is_given]:
        raise ClusterError(
            "a run's workers are given in one way. Received: TF_CONFIG, or a cluster_resolver, for "
            f"{resolver.cluster_spec().as_dict()}, and {' and '.join(given)}. Start the script by `autodist run`, or "
            "by the scheduler that sets TF_CONFIG; unset the other"
        )


def _by_options(options: Any) -> StrategyBuilder:
    return AllReduce(
        all_reduce_spec=options.implementation.value,
        bytes_per_pack=options.bytes_per_pack,
        timeout_seconds=options.timeout_seconds or 0.0,
    )
