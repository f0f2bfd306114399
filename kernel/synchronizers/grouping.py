"""Which gradients AllReduce combines together, and in which buffers: `groups`.

Dense gradients of one group and dtype are packed into buffers as back-propagation finishes them. Outputs that are
combined in the same way, the loss say, travel with the first that share a buffer. A sparse gradient is a group by
itself, or travels as a dense one, among others (`densifying.py`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from autodist_py.kernel.compressors.rounding import travelling
from autodist_py.kernel.cross_device_ops import packing
from autodist_py.kernel.cross_device_ops.collective import CARRIED_BY_HOROVOD, REDUCIBLE
from autodist_py.kernel.cross_device_ops.collective_all_reduce import AUTOMATIC_PACK_BYTES
from autodist_py.kernel.names import KERNEL_SCOPE, op_of
from autodist_py.kernel.outputs import combined_as, differing
from autodist_py.kernel.program import Program
from autodist_py.kernel.synchronizers import densifying
from autodist_py.proto.compressors import Compressor, NoneCompressor
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, Output
from autodist_py.proto.synchronizers import AllReduceSynchronizer

LOCAL_FIRST = frozenset({"AUTO", "HOROVOD"})
"""With these specs a worker's replicas are added up before, as what is coded is: each worker is then one member."""

_MOST_PIECES = 4096
"""Of one gradient: each is a collective, of which the graph would be made alone."""


@dataclass(frozen=True, slots=True)
class Group:
    """Gradients that are reduced together: the same synchronizer, stage, reduction, and (dense ones) dtype.

    `reduction` is how replicas are weighted, as `GraphItem.weighting_of` says.
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
        return self.synchronizer.coded_by

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
            len(self.gradients) > 1  # One that is sparse is alone, too.
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
    for _, output in differing(program):
        ready = program.analysis.depth[op_of(output.tensor)]
        carriers = [index for index, group in enumerate(found) if group.carries(program, output)]
        if carriers:
            first = next((index for index in carriers if found[index].depth(program) >= ready), carriers[-1])
            found[first] = replace(found[first], outputs=(*found[first].outputs, output))
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
        _require_reducible(program, synchronizer, gradient, dtype, is_sparse=is_sparse)
        reduced = replace(synchronizer, sparse_as_dense=None)  # It is decided, and makes no other difference.
        key = (reduced, stage, program.item.weighting_of(gradient), dtype)
        if is_sparse:
            yield Group(*key, (gradient,), is_sparse=True)
        else:
            dense.setdefault(key, []).append(gradient)
    packs: Counter[tuple[Any, ...]] = Counter()
    for (synchronizer, stage, reduction, dtype), together in dense.items():
        named = (synchronizer.spec, synchronizer.group, stage, reduction, dtype)
        finished = sorted(together, key=program.analysis.gradient_depth)
        size = partial(_wire_bytes, program, synchronizer)
        for pack in packing.filled(finished, size, _pack_bytes(synchronizer)):
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
    if (
        synchronizer.sparse_as_dense is False
        or gradient.indices == "same"
        or _why_not_dense(program, synchronizer, gradient, dtype)
    ):
        return False
    is_local_first = synchronizer.spec in LOCAL_FIRST or not isinstance(synchronizer.coded_by, NoneCompressor)
    members = len(program.place.workers if is_local_first else program.place.replicas)
    return densifying.is_worth_it(program, synchronizer, gradient, members=members)


def _wire_bytes(program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient) -> int:
    """The bytes that stand for a dense gradient between workers."""
    variable = program.item.variable(gradient.variable)
    return synchronizer.coded_by.wire_bytes(variable.shape, tf.as_dtype(variable.dtype).size)


def _output_bytes(output: Output) -> int:
    """Of an output of a static shape."""
    return int(tf.TensorShape(output.shape).num_elements()) * tf.as_dtype(output.dtype).size


def _pack_bytes(synchronizer: AllReduceSynchronizer) -> int:
    return synchronizer.bytes_per_pack or AUTOMATIC_PACK_BYTES


def _require_reducible(
    program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient, dtype: tf.DType, *, is_sparse: bool
) -> None:
    if dtype not in REDUCIBLE:
        raise StrategyError(
            f"variable '{gradient.variable}' is of type {dtype.name}, which collectives do not carry; "
            f"they carry {', '.join(sorted(kind.name for kind in REDUCIBLE))}; train it in one of these"
        )
    reason = "" if is_sparse else _why_not_dense(program, synchronizer, gradient, dtype)
    if reason:
        raise StrategyError(f"variable '{gradient.variable}': {reason}")


def _why_not_dense(program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient, dtype: tf.DType) -> str:
    """Why a gradient of the variable's shape cannot be reduced; "": it can."""
    compressor = synchronizer.coded_by
    if compressor.gathers and not compressor.sums_first:
        return ""  # Nothing of it is summed, and what is gathered is gathered whole, by rings.
    travels_as = travelling(compressor, dtype)
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
