"""Large gradients that are products: a piece of rows is computed by itself, and travels while the next one is computed.

It is the pipelining of ByteScheduler (Peng et al., SOSP 2019), begun in the op that makes the gradient.
"""

from collections.abc import Iterator, Sequence

import tensorflow as tf

from autodist_py.kernel.analysis.products import products_of
from autodist_py.kernel.analysis.replica_weights import dense_bytes, summed_as
from autodist_py.kernel.collectives.collectives import Collectives, bucket_bytes
from autodist_py.kernel.events import AllReduceBucket
from autodist_py.kernel.ir.names import on_replica, op_of
from autodist_py.kernel.ir.product import Product
from autodist_py.kernel.program import Program


def product_of(program: Program, event: AllReduceBucket) -> Product | None:
    """What the event's one gradient is a product of, where it is larger than a buffer; None: it is reduced as it is.

    Horovod sends a gradient whole, and NCCL is not waited for. What the program itself reads is computed in any case.
    """
    gradient, view = event.gradients[0], program.analysis.captured
    is_ring = event.members > 1 and event.synchronizer.spec in ("AUTO", "RING")
    is_plain = len(event.gradients) == 1 and not gradient.is_sparse and event.compressor.passes_through
    if not is_ring or not is_plain or dense_bytes(program, gradient) <= bucket_bytes(event.synchronizer):
        return None
    products, _ = products_of(program, [gradient])
    product = products.get(gradient.tensors[0])
    if product is None or product.left is None:
        return None
    op, marker = product.right.op, op_of(gradient.tensors[0])
    while (readers := view.dataflow_consumers([op])) != {marker}:
        if len(readers) > 1:
            return None
        (op,) = readers
    return product


def computed(
    event: AllReduceBucket,
    product: Product,
    values: Sequence[Sequence[list[tf.Tensor]]],
    devices: Sequence[str],
    collectives: Collectives,
) -> Iterator[list[tf.Tensor]]:
    """The pieces of the event's gradient, on each device.

    Args:
        event: whose gradient it is.
        product: what it is.
        values: on each replica the rows of its factors.
        devices: the replicas'.
        collectives: notes which ops compute the pieces.
    """
    left, right = product.factors
    row_bytes = right.width * summed_as(event.dtype).size
    count = -(-left.width * row_bytes // bucket_bytes(event.synchronizer))
    size = -(-left.width // count)
    made: list[list[str]] = [[] for _ in devices]
    factors = []
    for device, copies in zip(devices, zip(*values, strict=True), strict=True):
        with tf.device(device):
            factors.append(
                [tf.reshape(rows, [-1, one.width]) for (rows,), one in zip(copies, product.factors, strict=True)]
            )
    for begin in range(0, left.width, size):
        parts = []
        for replica, (device, (of_left, of_right)) in enumerate(zip(devices, factors, strict=True)):
            with tf.device(device):
                part = tf.matmul(of_left[:, begin : begin + size], of_right, transpose_a=True)
                made[replica].append(part.op.name)
                parts.append(tf.cast(part, event.dtype))
        yield parts
    collectives.pieces |= {on_replica(replica, right.op): tuple(ops) for replica, ops in enumerate(made)}
