"""Where replicas are, and how a program is compiled for them: `LocalPlacement`, `ClusterPlacement`."""

import json
from collections.abc import Sequence
from functools import reduce
from typing import Any, Protocol

import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.cluster.cluster import SoloCluster
from autodist_py.distribute.replica_program import ReplicaProgram
from autodist_py.kernel.program import Options
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.program.build import CapturedStep, Compiler, Kernel
from autodist_py.program.replica_variables import ReplicaVariables
from autodist_py.proto.errors import CaptureError, StrategyError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy

_HERE = "127.0.0.1"


def options_of(*, decorrelate: bool, keeps_copies: bool = True) -> Options:
    """Replicas' variables are the user's own, or copies of it; seeds are the program's, or each replica's own."""
    return Options(keeps_copies=keeps_copies, folds_seeds=decorrelate)


class Placement(Protocol):
    """Where the replicas of a strategy are.

    Attributes:
        first: the number of this process's first replica.
        is_alone: whether all replicas are this process's, so that what it has once is the same for all.
        options: by which programs are compiled.
        copies: of the variables that replicas have together, for this process's further replicas.
    """

    first: int
    is_alone: bool
    options: Options
    copies: ReplicaVariables

    def agreed_shapes(self, shapes: Sequence[tf.TensorShape]) -> Sequence[tf.TensorShape]:
        """What is known, of the `shapes` of what this process's replicas are given, of those of all replicas."""
        ...

    def compiled(self, step: CapturedStep) -> ReplicaProgram:
        """The program of this process, of a replica function; all processes ask for it together."""
        ...

    def begin_step(self) -> None:
        """Make the ops that say that replicas begin to combine something, in the graph in which they will."""
        ...

    def separate(self, container: Any, name: str, writer: str) -> None:
        """From now on each replica has its own value of the variable, of which the op `writer` writes others on each.

        Raises:
            CaptureError: the replicas have it together.
        """
        ...


class LocalPlacement:
    """The replicas are this process's, one on each of some devices, which are named as TensorFlow does."""

    first = 0
    is_alone = True

    def __init__(self, devices: Sequence[str], strategy_builder: StrategyBuilder, kernel: Kernel):
        self.strategy_builder, self.options = strategy_builder, kernel.options
        self._kernel = kernel
        self.copies = ReplicaVariables()
        self._devices = [tf.DeviceSpec.from_string(device) for device in devices]

    def agreed_shapes(self, shapes: Sequence[tf.TensorShape]) -> Sequence[tf.TensorShape]:
        """See Placement."""
        return shapes

    def compiled(self, step: CapturedStep) -> ReplicaProgram:
        """See Placement."""
        numbers = {
            kind: tuple(sorted(one.device_index for one in self._devices if one.device_type == kind))
            for kind in ("CPU", "GPU")
        }
        node = NodeSpec(_HERE, gpus=numbers["GPU"], cpus=numbers["CPU"] or (0,))  # A host has at least one.
        resources = ResourceSpec((node,))
        process = SoloCluster(resources)
        replicas = tuple(
            Replica(index, 0, f"/device:{one.device_type}:{one.device_index}")
            for index, one in enumerate(self._devices)
        )
        built = build_strategy(self.strategy_builder, step.item, resources)
        topology, first = Topology(0, replicas, dict.fromkeys(node.devices, 0)), process.next_instance_key
        program = self._kernel.compiled(step.item, built, topology, first_instance_key=first)
        process.next_instance_key = program.next_instance_key
        return ReplicaProgram(program, step)

    def begin_step(self) -> None:
        """See Placement. Nobody waits for it."""

    def separate(self, container: Any, name: str, writer: str) -> None:
        """See Placement."""
        if not self.options.keeps_copies:
            raise together(name, writer)


def together(name: str, writer: str) -> CaptureError:
    """The refusal of a write that would give each replica its own value of a variable."""
    return CaptureError(
        f"variable '{name}' is one for all replicas, and '{writer}' writes what differs between them. Make it with "
        "aggregation=tf.VariableAggregation.MEAN, SUM or ONLY_FIRST_REPLICA, or give it what was reduced"
    )


class ClusterPlacement:
    """The replicas are those of all workers, as many on each. Workers compile alike, by the chief's strategy."""

    def __init__(self, compiler: Compiler, num_local: int, options: Options):
        self._compiler, self.options = compiler, options
        self.copies = compiler.copies
        self.is_alone = compiler.cluster.num_workers == 1
        self.first = compiler.cluster.rank * num_local
        self._steps = _Steps()
        compiler.cluster.add_steps(self._steps)

    def agreed_shapes(self, shapes: Sequence[tf.TensorShape]) -> Sequence[tf.TensorShape]:
        """See Placement.

        Raises:
            CaptureError: the workers give different numbers of tensors.
        """
        own = json.dumps([shape.as_list() if shape.rank is not None else None for shape in shapes])
        everyone = self._compiler.cluster.compare(self._compiler.agreement.key("shapes"), own.encode())
        columns = [[tf.TensorShape(shape) for shape in json.loads(text)] for text in everyone.values()]
        if len({len(column) for column in columns}) > 1:
            raise CaptureError(
                "every worker gives the same number of tensors to a function in run(); received, by rank, "
                f"{', '.join(str(len(column)) for column in columns)}. Call it with the same structure everywhere"
            )
        return [reduce(tf.TensorShape.most_specific_compatible_shape, row) for row in zip(*columns, strict=True)]

    def compiled(self, step: CapturedStep) -> ReplicaProgram:
        """See Placement."""
        program = self._compiler.replica_program(step)
        if program.compressor_states:
            owners = ", ".join(sorted({one.owner for one in program.compressor_states}))
            raise StrategyError(
                f"the compressor of {owners} remembers what it has left out, which a function given to run() cannot "
                "keep; use one that keeps nothing, such as HorovodCompressor, AutoDistStrategy or AutoDist.function"
            )
        return ReplicaProgram(program, step, self.begin_step if program.collectives else None)

    def separate(self, container: Any, name: str, writer: str) -> None:
        """See Placement."""

    def begin_step(self) -> None:
        """See Placement. Workers that wait for one whose script has ended are told so, as steps are counted."""
        self._steps.variable.assign_add(1, read_value=False)


class _Steps:
    """How many steps graphs have begun, on the host."""

    def __init__(self) -> None:
        with tf_adapter.eagerly(), tf.device("/device:CPU:0"):
            self.variable = tf_adapter.variable_of_no_strategy(0, tf.int64, "steps")

    def __call__(self) -> int:
        with tf_adapter.eagerly():
            return int(self.variable.numpy())
