"""AllReduce: every replica gets the combined gradient, and computes the same update of its own copy.

Dense gradients of one group and dtype are packed into buffers, as back-propagation finishes them, weighted, reduced and
split. Outputs that are combined in the same way, the loss say, travel with the first that share a buffer. A gradient
that is larger than a buffer is reduced in pieces, or whole by Horovod.

Sparse gradients are gathered: the rows of all replicas, in replica order, with each replica's values weighted. Of one
lookup these are the rows of one device, in its order; of several lookups in one table, the same rows grouped by
replica. A worker adds up its rows of one index before it sends them where that makes no difference to the update.
There they may travel as a dense gradient, among others (`densifying.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Wire
from autodist_py.kernel.compressors.rounding import rounded, travelling
from autodist_py.kernel.cross_device_ops import packing
from autodist_py.kernel.cross_device_ops.choice import fitting
from autodist_py.kernel.cross_device_ops.collective import CARRIED_BY_HOROVOD, REDUCIBLE, Collectives, on_each
from autodist_py.kernel.cross_device_ops.collective_all_reduce import AUTOMATIC_PACK_BYTES, CollectiveAllReduce
from autodist_py.kernel.cross_device_ops.copying import ReductionToOneDevice
from autodist_py.kernel.cross_device_ops.packs import reduce_pack
from autodist_py.kernel.fragment import Fragment, TensorSpec, trace
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.memory import Recorder
from autodist_py.kernel.names import KERNEL_SCOPE, on_replica, op_of
from autodist_py.kernel.outputs import combined_as, differing
from autodist_py.kernel.program import Program
from autodist_py.kernel.synchronizers import densifying
from autodist_py.kernel.synchronizers.coding import Coding, compressor_for
from autodist_py.kernel.synchronizers.lookups import adds_rows_up
from autodist_py.kernel.weights import batch_specs, raw_gradient, replica_weights, sum_duplicates, weighted
from autodist_py.proto.compressors import Compressor, HorovodCompressor, NoneCompressor, compressor_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, Output
from autodist_py.proto.synchronizers import AllReduceSynchronizer

_LOCAL_FIRST = frozenset({"AUTO", "HOROVOD"})
_ENGINES: Mapping[str, Literal["RING", "NCCL", "HOROVOD"]] = {
    "AUTO": "RING",
    "RING": "RING",
    "NCCL": "NCCL",
    "HOROVOD": "HOROVOD",
}
"""By spec. Where AUTO stands for another engine than RING, that is the spec (`autodist_py/engines.py`)."""

_MOST_PIECES = 4096
"""Of one gradient: each is a collective, of which the graph would be made alone."""


@dataclass(frozen=True, slots=True)
class Group:
    """Gradients that are reduced together: the same synchronizer, stage, reduction, and (dense ones) dtype.

    Gradients of one stage do not depend on one another's combined values (a generator's would on its discriminator's).
    `pack` numbers those of one name, as what is larger is packed into several buffers.
    `outputs` are those of the program that are combined along with the gradients. One whose rows are gathered is a
    group by itself, which `is_sparse`; other sparse ones travel as dense ones.
    """

    synchronizer: AllReduceSynchronizer
    stage: int
    reduction: str
    dtype: tf.DType
    gradients: tuple[Gradient, ...]
    pack: int = 0
    outputs: tuple[Output, ...] = ()
    is_sparse: bool = False

    @property
    def compressor(self) -> Compressor:
        """How its gradients are coded."""
        return compressor_of(self.synchronizer.compressor, "compressor")

    @property
    def scope(self) -> str:
        """The name scope of the group's ops."""
        if self.is_sparse:
            return f"{KERNEL_SCOPE}/AllReduce/{op_of(self.gradients[0].tensors[1])}"
        spec, number = self.synchronizer.spec, self.synchronizer.group
        alike = f"{KERNEL_SCOPE}/AllReduce/{spec}_group_{number}_stage_{self.stage}_{self.reduction}_{self.dtype.name}"
        return f"{alike}_pack_{self.pack}" if self.pack else alike

    def rank(self, program: Program) -> tuple[int, ...]:
        """Where the group's collective stands among others: by stage, then when its last gradient is ready."""
        return (self.stage, 0, self.depth(program))

    def depth(self, program: Program) -> int:
        """How deep in the captured graph its last gradient is."""
        return max(program.analysis.gradient_depth(gradient) for gradient in self.gradients)

    def carries(self, program: Program, output: Output) -> bool:
        """Whether the output can be combined along with these gradients, which are laid into one buffer anyway."""
        return (
            not self.is_sparse
            and len(self.gradients) > 1
            and isinstance(self.compressor, NoneCompressor)
            and self.dtype.name == output.dtype
            and output.shape is not None
            and None not in output.shape
            and self._bytes(program) + _output_bytes(output) <= _pack_bytes(self.synchronizer)
            and self.reduction == combined_as(program, output)
            and program.analysis.stage[op_of(output.tensor)] < self.stage  # It is not computed from what is combined.
        )

    def _bytes(self, program: Program) -> int:
        gradients = [_wire_bytes(program, self.synchronizer, gradient) for gradient in self.gradients]
        return sum(gradients) + sum(map(_output_bytes, self.outputs))

    def __str__(self) -> str:
        names = ", ".join(gradient.variable for gradient in self.gradients)
        outputs = "".join(f", with {output.tensor}" for output in self.outputs)
        return f"{'sparse' if self.is_sparse else 'dense'} gradients of {names}{outputs}"


def groups(program: Program) -> list[Group]:
    """The gradients of `program` that are synchronized by AllReduce, as they are reduced together.

    An output that can be combined along with gradients is so with the first that are ready no earlier, else with the
    last: it keeps none waiting that could go ahead.
    """
    found = sorted(_gradient_groups(program), key=lambda group: group.rank(program))
    for tensor, output in {output.tensor: output for _, output in differing(program)}.items():
        carriers = [index for index, group in enumerate(found) if group.carries(program, output)]
        later = [index for index in carriers if found[index].depth(program) >= program.analysis.depth[op_of(tensor)]]
        for index in (later or carriers[::-1])[:1]:
            found[index] = replace(found[index], outputs=(*found[index].outputs, output))
    return found


def _gradient_groups(program: Program) -> Iterator[Group]:
    dense: dict[tuple[AllReduceSynchronizer, int, str, tf.DType], list[Gradient]] = {}
    for gradient in program.item.gradients:
        if not program.analysis.is_varying(gradient):
            continue  # It is computed from replicated values alone (a regularizer's): equal on all replicas.
        synchronizer = program.strategy.node(gradient.variable).synchronizer
        if not isinstance(synchronizer, AllReduceSynchronizer):
            continue
        dtype = tf.as_dtype(program.item.variable(gradient.variable).dtype)
        stage = program.analysis.gradient_stage(gradient)
        is_sparse = gradient.is_sparse and not _is_densified(program, synchronizer, gradient, dtype)
        _check(program, synchronizer, gradient, dtype, is_sparse=is_sparse)
        reduced = replace(synchronizer, sparse_as_dense=None)  # It is decided, and makes no other difference.
        key = (reduced, stage, program.item.reduction_of(gradient), dtype)
        if is_sparse:
            yield Group(*key, (gradient,), is_sparse=True)
        else:
            dense.setdefault(key, []).append(gradient)
    packs: Counter[tuple[Any, ...]] = Counter()
    for (synchronizer, stage, reduction, dtype), together in dense.items():
        named = (synchronizer.spec, synchronizer.group, stage, reduction, dtype)
        for pack in _packed(program, together, synchronizer):
            yield Group(synchronizer, stage, reduction, dtype, pack, packs[named])
            packs[named] += 1


def _is_densified(program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient, dtype: tf.DType) -> bool:
    """Whether a sparse gradient travels as a dense one: where it is asked for, else where it can and is fewer bytes.

    Raises:
        StrategyError: it is asked for, and makes a difference to the update.
    """
    if synchronizer.sparse_as_dense:
        densifying.require_rows_added_up(program, gradient)
        return True
    if synchronizer.sparse_as_dense is False or _why_not_dense(program, synchronizer, gradient, dtype):
        return False
    members = len(program.place.workers if synchronizer.spec in _LOCAL_FIRST else program.place.replicas)
    return densifying.is_worth_it(program, synchronizer, gradient, members=members)


def _wire_bytes(program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient) -> int:
    """The bytes that stand for a dense gradient between workers."""
    variable = program.item.variable(gradient.variable)
    compressor = compressor_of(synchronizer.compressor, "compressor")
    return compressor.wire_bytes(variable.shape, tf.as_dtype(variable.dtype).size)


def _output_bytes(output: Output) -> int:
    """Of an output of a static shape."""
    return int(tf.TensorShape(output.shape).num_elements()) * tf.as_dtype(output.dtype).size


def _pack_bytes(synchronizer: AllReduceSynchronizer) -> int:
    return synchronizer.bytes_per_pack or AUTOMATIC_PACK_BYTES


def _packed(
    program: Program, gradients: Sequence[Gradient], synchronizer: AllReduceSynchronizer
) -> Iterator[tuple[Gradient, ...]]:
    """The gradients as back-propagation finishes them, together as far as a buffer holds them."""
    finished = sorted(gradients, key=program.analysis.gradient_depth)
    return packing.filled(
        finished, lambda gradient: _wire_bytes(program, synchronizer, gradient), _pack_bytes(synchronizer)
    )


def _check(
    program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient, dtype: tf.DType, *, is_sparse: bool
) -> None:
    if dtype not in REDUCIBLE:
        raise StrategyError(
            f"variable '{gradient.variable}' is of type {dtype.name}, which collectives do not carry; "
            f"they carry {', '.join(sorted(kind.name for kind in REDUCIBLE))}"
        )
    reason = "" if is_sparse else _why_not_dense(program, synchronizer, gradient, dtype)
    if reason:
        raise StrategyError(f"variable '{gradient.variable}': {reason}")


def _why_not_dense(program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient, dtype: tf.DType) -> str:
    """Why a gradient of the variable's shape cannot be reduced; "": it can."""
    compressor = compressor_of(synchronizer.compressor, "compressor")
    travels_as = travelling(compressor, dtype) if isinstance(compressor, HorovodCompressor) else dtype
    if synchronizer.spec == "HOROVOD" and travels_as not in CARRIED_BY_HOROVOD:
        return (
            f"its gradient travels as {travels_as.name}, which Horovod does not carry; "
            f"it carries {', '.join(sorted(kind.name for kind in CARRIED_BY_HOROVOD))}. Use another compressor, or "
            "all_reduce_spec AUTO or RING"
        )
    size = _wire_bytes(program, synchronizer, gradient)
    if synchronizer.spec != "HOROVOD" and size > _MOST_PIECES * _pack_bytes(synchronizer):
        return (
            f"bytes_per_pack={synchronizer.bytes_per_pack} is too small for its "
            f"gradient, of which {size} bytes travel: it would be reduced in more than {_MOST_PIECES} pieces; give a "
            "larger one, or 0, an automatic one"
        )
    return ""


def combine(program: Program, group: Group, view: GraphView, collectives: Collectives, recorder: Recorder) -> Fragment:
    """The ops that combine `group` over all replicas; `view` is of the program's graph.

    What the compressor keeps from step to step is `recorder`'s.

    The fragment's outputs are, for each gradient and then each output, for each local replica, the combined tensors:
    indices, values and dense shape of a sparse gradient; else one.
    """
    replicas = range(program.num_local_replicas)
    raw = [[raw_gradient(program, gradient, view, replica) for replica in replicas] for gradient in group.gradients]
    carried = [
        [[TensorSpec(on_replica(replica, output.tensor), group.dtype, output.shape)] for replica in replicas]
        for output in group.outputs
    ]

    def reduce(batch: Sequence[tf.Tensor], values: list[list[list[tf.Tensor]]]) -> list[list[list[tf.Tensor]]]:
        with tf.device(program.place.host):
            weights = replica_weights(program, batch, group.reduction)
        if group.is_sparse:
            return [_reduce_sparse(program, group, values[0], weights, collectives)]
        devices = [replica.device for replica in program.place.local_replicas]
        rows = {position: gradient for position, gradient in enumerate(group.gradients) if gradient.is_sparse}
        dense = [[tensors[0] for tensors in copies] for copies in values]
        for position, gradient in rows.items():
            dense[position] = densifying.densified(program, gradient, values[position], devices)
        if _is_coded(program, group):
            combined = _reduce_coded(program, group, dense, weights, collectives, recorder)
        else:
            combined = _reduce_dense(program, group, dense, weights, collectives)
        for position, gradient in rows.items():
            combined[position] = densifying.as_rows(program, gradient, values[position], combined[position], devices)
        return combined

    return trace(reduce, [batch_specs(program), raw + carried], scope=group.scope)


def _reduce_dense(
    program: Program,
    group: Group,
    values: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
) -> list[list[list[tf.Tensor]]]:
    devices = [replica.device for replica in program.place.local_replicas]
    operation = _operation(program, group, collectives)
    reduced = reduce_pack(
        values, devices, devices, lambda buffers: operation.reduce(_weighted(buffers, weights, devices), devices)
    )
    return [[[tensor] for tensor in copies] for copies in reduced]


def _operation(program: Program, group: Group, collectives: Collectives) -> CollectiveAllReduce:
    """What reduces dense tensors: with AUTO and HOROVOD local replicas are added up first, else each is a member.

    Raises:
        StrategyError: the engine that is asked for does not fit the devices, and nothing else may be used.
    """
    requested = CollectiveAllReduce(
        collectives,
        implementation=_ENGINES[group.synchronizer.spec],
        local=ReductionToOneDevice() if group.synchronizer.spec in _LOCAL_FIRST else None,
        bytes_per_pack=group.synchronizer.bytes_per_pack,
    )
    everyone = [replica.device for replica in program.place.everyone]
    try:
        fits = fitting(requested, everyone, strict=program.options.strict).op
    except StrategyError as error:
        raise StrategyError(f"{group}: {error}, or AutoDist(strict=False), which does") from None
    return cast(CollectiveAllReduce, fits)  # Without NCCL it is another of its kind.


def _is_coded(program: Program, group: Group) -> bool:
    """Whether the group's gradients are coded: if one of them is."""
    return any(compressor_for(program, gradient) is not None for gradient in group.gradients)


def _reduce_coded(
    program: Program,
    group: Group,
    gradients: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
    recorder: Recorder,
) -> list[list[list[tf.Tensor]]]:
    """As `_reduce_dense`: local replicas are added up, and what leaves the worker is coded."""
    place = collectives.place
    devices = [replica.device for replica in place.local_replicas]
    between = replace(_operation(program, group, collectives), local=ReductionToOneDevice())
    wire = Wire(place.workers.index(place.worker), collectives.num_workers, lambda value: between.sums([value])[0])
    with tf.device(devices[0]):
        parts = [_weighted(copies, weights, devices) for copies in gradients]
        own = [copies[0] for copies in ReductionToOneDevice().batch_reduce(parts, devices, destinations=devices[:1])]
        coding = Coding(program, group.compressor, group.gradients, group.dtype, recorder)
        sent, states = coding.compress(own, wire)
        travelled = collectives.gather(sent) if group.compressor.gathers else wire.total(sent)
        totals, after = coding.decompress(travelled, states, wire)
        coding.keep(after, after=[travelled])
    return [[[copy] for copy in on_each(total, devices)] for total in totals]


def _weighted(copies: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    parts = []
    for copy, weight, device in zip(copies, weights, devices, strict=True):
        with tf.device(device):
            parts.append(weighted(copy, weight))
    return parts


def _reduce_sparse(
    program: Program,
    group: Group,
    gradients: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
) -> list[list[tf.Tensor]]:
    replicas = program.place.local_replicas
    compressor = group.compressor
    half = travelling(compressor, group.dtype) if isinstance(compressor, HorovodCompressor) else group.dtype
    parts = []
    for replica, (indices, values, _), weight in zip(replicas, gradients, weights, strict=True):
        with tf.device(replica.device):
            parts.append((indices, weighted(values, weight)))
    with tf.device(replicas[0].device):
        indices, values = (tf.concat(rows, axis=0) if len(rows) > 1 else rows[0] for rows in zip(*parts, strict=True))
        travels = collectives.num_workers > 1
        if program.options.sum_duplicates or (travels and adds_rows_up(program, group.gradients[0])):
            indices, values = sum_duplicates(indices, values)
        if travels:
            indices, coded = collectives.gather_rows([indices, rounded(values, half, 1)])
            values = tf.cast(coded, values.dtype)
        if program.options.sum_duplicates and travels:
            indices, values = sum_duplicates(indices, values)
    combined = []
    shape = program.item.variable(group.gradients[0].variable).shape  # A branch that was not taken has no other.
    for replica, (_, _, dense_shape) in zip(replicas, gradients, strict=True):
        with tf.device(replica.device):
            combined.append([tf.identity(indices), tf.identity(values), tf.constant(shape, dense_shape.dtype)])
    return combined
