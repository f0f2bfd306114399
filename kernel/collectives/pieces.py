"""Large gradients that are products: a piece of rows is computed by itself, and travels while the next one is computed.

It is the pipelining of ByteScheduler (Peng et al., SOSP 2019), begun in the op that makes the gradient.
"""

from collections.abc import Collection, Iterable, Sequence

import tensorflow as tf

from autodist_py.kernel.analysis.products import products_of
from autodist_py.kernel.analysis.replica_weights import dense_bytes, summed_as
from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.collectives.members import members_of
from autodist_py.kernel.events import AllReduceBucket
from autodist_py.kernel.ir.names import on_replica, op_of
from autodist_py.kernel.ir.product import Product
from autodist_py.kernel.program import Program
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.synchronizers import AllReduceSynchronizer


def products(program: Program, gradients: Iterable[tuple[AllReduceSynchronizer, Gradient]]) -> dict[str, Product]:
    """Those of the dense gradients that are products and larger than a buffer, by their markers' tensors.

    Horovod sends a gradient whole, and NCCL is not waited for. A product that another op reads is computed anyway.

    Args:
        program: the captured one.
        gradients: each with how it is reduced.
    """
    large = [
        gradient
        for synchronizer, gradient in gradients
        if synchronizer.spec in ("AUTO", "RING")
        and not gradient.is_sparse
        and synchronizer.compressor.passes_through
        and members_of(program, synchronizer, coded=False) > 1
        and dense_bytes(program, gradient) > synchronizer.bytes_per_pack
    ]
    found, _ = products_of(program, large)
    fetched = {op_of(output.tensor) for output in program.item.outputs} | set(program.item.run_ops)
    return {
        marker: product
        for marker, product in found.items()
        if product.left is not None and product.left.width > 1 and _is_read_alone(program, marker, product, fetched)
    }


def _is_read_alone(program: Program, marker: str, product: Product, fetched: Collection[str]) -> bool:
    """Whether nothing but the gradient's marker reads the product, or waits for it."""
    op, successors = product.right.op, program.analysis.captured.digraph.succ
    while (readers := set(successors[op])) != {op_of(marker)}:
        if len(readers) > 1 or op in fetched:
            return False
        (op,) = readers
    return op not in fetched


def computed(
    event: AllReduceBucket,
    product: Product,
    values: Sequence[Sequence[list[tf.Tensor]]],
    devices: Sequence[str],
    collectives: Collectives,
) -> list[list[tf.Tensor]]:
    """The pieces of the event's gradient, each on every device.

    Args:
        event: whose gradient it is.
        product: what it is.
        values: on each replica the rows of its factors.
        devices: the replicas'.
        collectives: notes which ops compute the pieces.
    """
    left, right = product.factors
    most = max(1, event.synchronizer.bytes_per_pack // (right.width * summed_as(event.dtype).size))
    size = -(-left.width // -(-left.width // most))  # Pieces of one size, but the last.
    on_device: list[list[tf.Tensor]] = []
    for replica, device in enumerate(devices):
        with tf.device(device):
            of_left, of_right = (
                tf.reshape(copies[replica][0], [-1, one.width])
                for one, copies in zip(product.factors, values, strict=True)
            )
            own = [
                tf.matmul(of_left[:, begin : begin + size], of_right, transpose_a=True)
                for begin in range(0, left.width, size)
            ]
            collectives.pieces[on_replica(replica, right.op)] = tuple(piece.op.name for piece in own)
            on_device.append([tf.cast(piece, event.dtype) for piece in own])
    return [list(copies) for copies in zip(*on_device, strict=True)]
