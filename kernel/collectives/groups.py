"""Which gradients AllReduce combines together, and in which buckets: `gradient_events`, and `carrying`.

Dense gradients of one group and dtype are laid into buckets as back-propagation finishes them, or their factors are
gathered instead (`factors.py`). Outputs that are combined in the same way, the loss say, travel with the first that
share a bucket. Rows of sparse gradients are gathered together as far as a bucket holds them, or a sparse gradient
travels as a dense one, among others (`sparse_as_dense.py`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import tensorflow as tf

from autodist_py.kernel.analysis.first_batch import most_replicas, replica_shapes
from autodist_py.kernel.analysis.outputs import output_reduction
from autodist_py.kernel.analysis.replica_weights import dense_bytes, gradient_shapes, summed_as
from autodist_py.kernel.collectives import factors, pieces, sparse_as_dense
from autodist_py.kernel.collectives.bucket_size import LARGEST_BUCKET, automatic_bucket_bytes
from autodist_py.kernel.collectives.collectives import CARRIED_BY_HOROVOD, REDUCIBLE
from autodist_py.kernel.collectives.members import (
    engine_of,
    is_coded,
    is_local_first,
    local_of,
    members_of,
)
from autodist_py.kernel.compressors.rounding import travelling
from autodist_py.kernel.events import AllReduceBucket, GatherFactors, GatherRows, ReduceGradients
from autodist_py.kernel.ir import flat_buffers
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.ir.product import Product
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, Output
from autodist_py.proto.synchronizers import AllReduceSynchronizer

_MOST_UNKNOWN = 8
"""Of tables, whose rows are gathered together: each waits for the last of them."""

_MOST_PIECES = 4096
"""Of one gradient: each is a collective, of which the graph would be made alone."""


def gradient_events(program: Program) -> list[ReduceGradients]:
    """The gradients that are synchronized by AllReduce, as they are reduced together, as they are ready.

    Gradients of one level do not depend on one another's combined values (a generator's would on its discriminator's).

    Args:
        program: the captured one.
    """
    return as_ready(_gradient_events(program))


def as_ready(events: Iterable[ReduceGradients]) -> list[ReduceGradients]:
    """`events` in the order in which back-propagation finishes them, with buckets numbered as they are given."""
    return sorted(_numbered(events), key=lambda event: (event.level, event.depth))


def carrying(
    program: Program,
    events: Sequence[ReduceGradients],
    outputs: Iterable[Output],
    *,
    barred: Collection[tuple[str, int]] = (),
) -> list[ReduceGradients]:
    """`events`, some of which carry outputs.

    An output that can be combined along with gradients is so with the first that are ready no earlier, else with the
    last: it keeps none waiting that could go ahead.

    Args:
        program: the captured one.
        events: in the order in which they are ready.
        outputs: those that are to be combined.
        barred: outputs, each with an event by its position, which must not wait for it.
    """
    found = list(events)
    for output in outputs:
        ready = program.analysis.depth[op_of(output.tensor)]
        carriers = [
            index
            for index, event in enumerate(found)
            if not isinstance(event, GatherRows)
            and (output.tensor, index) not in barred
            and _carries(program, event, output)
        ]
        if carriers:
            first = next((index for index in carriers if found[index].depth >= ready), carriers[-1])
            found[first] = _with_output(found[first], output)
    return found


def _with_output(event: ReduceGradients, output: Output) -> ReduceGradients:
    dtype = summed_as(tf.as_dtype(output.dtype))
    event = replace(event, outputs=(*event.outputs, output), needs=(*event.needs, output.tensor))
    if event.nbytes is None:
        return event
    return replace(event, nbytes=event.nbytes + int(tf.TensorShape(output.shape).num_elements()) * dtype.size)


def _carries(program: Program, event: ReduceGradients, output: Output) -> bool:
    """Whether the output can be combined along with these gradients, which are laid into one buffer anyway."""
    sizes = [_wire_bytes(program, event.synchronizer, gradient) for gradient in event.gradients]
    carried = [*event.outputs, output]
    is_gathered = isinstance(event, GatherFactors)
    return (
        (is_gathered or len(event.gradients) > 1)
        and event.compressor.passes_through
        and event.dtype.name == output.dtype
        and output.shape is not None
        and None not in output.shape
        and 0 not in output.shape
        and (is_gathered or sum(sizes) + sum(map(_output_bytes, carried)) <= event.synchronizer.bytes_per_pack)
        and event.reduction == output_reduction(program, output)
        and program.analysis.level[op_of(output.tensor)] < event.level  # It is not computed from what is combined.
    )


def _numbered(events: Iterable[ReduceGradients]) -> list[ReduceGradients]:
    """`events`, whose buckets are numbered where they differ in nothing else."""
    made: Counter[tuple[object, ...]] = Counter()
    found: list[ReduceGradients] = []
    for event in events:
        if isinstance(event, AllReduceBucket):
            named = (event.synchronizer.spec, event.synchronizer.group, event.level, event.reduction, event.dtype)
            event = replace(event, bucket=made[named])
            made[named] += 1
        found.append(event)
    return found


def reducing(
    program: Program,
    gradients: Sequence[Gradient],
    synchronizer: AllReduceSynchronizer,
    *,
    is_sparse: bool = False,
    products: Sequence[Product] = (),
    product: Product | None = None,
) -> ReduceGradients:
    """The event that combines these gradients, which are alike: sparse ones, or those of `products`, or others.

    Of the others, one alone may be `product`, in pieces.

    Raises:
        StrategyError: the engine that is asked for does not fit the devices, and nothing else may be used.
    """
    first, nodes = gradients[0], program.analysis.captured.nodes
    tensors = [tensor for gradient in gradients for tensor in gradient.tensors]
    facts = {
        "needs": tuple(nodes[op_of(tensor)].input[0] for tensor in tensors),
        "gives": tuple(tensors),
        "level": program.analysis.gradient_level(first),
        "engine": "",
        "gradients": tuple(gradients),
        "shapes": tuple(gradient_shapes(program, gradient) for gradient in gradients),
        "synchronizer": synchronizer,
        "reduction": program.item.weighting_of(first),
        "dtype": tf.as_dtype(program.item.variable(first.variable).dtype),
        "depth": max(program.analysis.gradient_depth(gradient) for gradient in gradients),
    }
    event: ReduceGradients
    if is_sparse:
        event = GatherRows(**facts, members=len(program.topology.workers))
    elif products:
        event = GatherFactors(**facts, members=len(program.topology.workers), products=tuple(products))
        needs = tuple(factor.tensor for factor in event.factors)
        event = replace(event, needs=needs, depth=max(program.analysis.depth[op_of(tensor)] for tensor in needs))
    else:
        coded = is_coded(program, gradients)
        event = AllReduceBucket(
            **facts,
            members=members_of(program, synchronizer, coded=coded),
            nbytes=sum(dense_bytes(program, gradient) for gradient in gradients),
            is_coded=coded,
            is_local_first=is_local_first(synchronizer, coded=coded),
            local=local_of(program, synchronizer),
            product=product,
        )
    return replace(event, engine=engine_of(program, event))


def _gradient_events(program: Program) -> Iterator[ReduceGradients]:
    dense: dict[tuple[AllReduceSynchronizer, int, str, tf.DType], list[Gradient]] = {}
    sparse: dict[tuple[AllReduceSynchronizer, int, str, tf.DType], list[Gradient]] = {}
    factors.require_some(program)
    of_rings = automatic_bucket_bytes(program.item, program.options.bandwidth)
    for gradient in program.item.gradients:
        if not program.analysis.is_varying(gradient):
            continue  # It is computed from replicated values alone (a regularizer's): equal on all replicas.
        own = program.strategy.node(gradient.variable).synchronizer
        synchronizer = None if own is None else own.as_all_reduce
        if synchronizer is None:
            continue
        given = synchronizer.bytes_per_pack
        # What a message takes was measured of rings.
        automatic = LARGEST_BUCKET if synchronizer.spec == "HOROVOD" else of_rings
        synchronizer = replace(synchronizer, bytes_per_pack=given or automatic)
        dtype = tf.as_dtype(program.item.variable(gradient.variable).dtype)
        level = program.analysis.gradient_level(gradient)
        is_sparse = gradient.is_sparse and not _is_as_dense(program, synchronizer, gradient, dtype)
        _require_reducible(program, synchronizer, gradient, dtype, is_sparse=is_sparse)
        reduced = replace(synchronizer, sparse_as_dense=None)  # It is decided, and makes no other difference.
        if is_sparse:
            reduced = replace(reduced, bytes_per_pack=given or LARGEST_BUCKET)
        key = (reduced, level, program.item.weighting_of(gradient), dtype)
        (sparse if is_sparse else dense).setdefault(key, []).append(gradient)
    for (synchronizer, *_), rows in sparse.items():
        for together in _rows_together(program, synchronizer, rows):
            yield reducing(program, together, synchronizer, is_sparse=True)
    cut = pieces.products(program, ((key[0], gradient) for key, together in dense.items() for gradient in together))
    for (synchronizer, *_), together in dense.items():
        finished = sorted(together, key=program.analysis.gradient_depth)
        products = factors.worth_gathering(program, synchronizer, finished)
        by_marker = {one.tensors[0]: one for one in finished}
        multiplied = {marker: products[marker] for marker in by_marker if marker in products}
        for group in factors.together(multiplied, synchronizer.bytes_per_pack):
            gathered = [by_marker[marker] for marker in group]
            yield reducing(program, gathered, synchronizer, products=[multiplied[marker] for marker in group])
        others = [one for one in finished if one.tensors[0] not in products]
        size = partial(_wire_bytes, program, synchronizer)
        for bucket in flat_buffers.filled(others, size, synchronizer.bytes_per_pack):
            product = cut.get(bucket[0].tensors[0]) if len(bucket) == 1 else None
            yield reducing(program, bucket, synchronizer, product=product)


def _rows_together(
    program: Program, synchronizer: AllReduceSynchronizer, gradients: Sequence[Gradient]
) -> Iterator[Sequence[Gradient]]:
    """Those whose rows are gathered together: as many as have no more bytes than a bucket in the first step.

    Where the number of rows is not known, they are as many bytes as let `_MOST_UNKNOWN` be together. One whose indices
    are the same for all replicas is alone, and one whose rows have no numbers.
    """
    rows_of = {one: program.item.variable(one.variable).shape[1:] for one in gradients}
    alone = [one for one in gradients if one.indices == "same" or not math.prod(rows_of[one])]
    together = [one for one in gradients if one not in alone]
    shapes = replica_shapes(program, {one.tensors[0] for one in together})

    def size(gradient: Gradient) -> int:
        indices = shapes[gradient.tensors[0]].num_elements()
        if indices is None:
            return synchronizer.bytes_per_pack // _MOST_UNKNOWN
        dtype = tf.as_dtype(program.item.variable(gradient.variable).dtype)
        row = synchronizer.compressor.wire_bytes((1, *rows_of[gradient]), dtype.size)
        return int(indices) * most_replicas(program) * (row + tf.int64.size)

    together.sort(key=program.analysis.gradient_depth)
    yield from flat_buffers.filled(together, size, synchronizer.bytes_per_pack)
    yield from ([one] for one in alone)


def _is_as_dense(program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient, dtype: tf.DType) -> bool:
    """Whether a sparse gradient travels as a dense one: where it is asked for, else where it can and is fewer bytes.

    Raises:
        StrategyError: it is asked for, and makes a difference to the update.
    """
    if synchronizer.sparse_as_dense:
        sparse_as_dense.require_rows_added_up(program, gradient)
        return True
    if (
        synchronizer.sparse_as_dense is False
        or gradient.indices == "same"
        or _why_not_dense(program, synchronizer, gradient, dtype)
    ):
        return False
    members = members_of(program, synchronizer, coded=not synchronizer.compressor.passes_through)
    return sparse_as_dense.is_worth_it(program, synchronizer, gradient, members=members)


def _wire_bytes(program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient) -> int:
    """The bytes that stand for a dense gradient between workers."""
    variable = program.item.variable(gradient.variable)
    return synchronizer.compressor.wire_bytes(variable.shape, tf.as_dtype(variable.dtype).size)


def _output_bytes(output: Output) -> int:
    """Of an output of a static shape."""
    return int(tf.TensorShape(output.shape).num_elements()) * tf.as_dtype(output.dtype).size


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
    compressor = synchronizer.compressor
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
    if synchronizer.spec != "HOROVOD" and size > _MOST_PIECES * synchronizer.bytes_per_pack:
        return (
            f"bytes_per_pack={synchronizer.bytes_per_pack} is too small for its "
            f"gradient, of which {size} bytes travel: it would be reduced in more than {_MOST_PIECES} pieces; give "
            f"{-(-size // _MOST_PIECES)} or more"
        )
    return ""
