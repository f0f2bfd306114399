"""Gradients whose factors are gathered instead: where that takes less time, and what is made of the factors.

A ring of n workers moves 2 (n - 1) / n of the bytes of a gradient of M x N numbers. Of `leftᵀ · right` the factors
have M + N numbers a row, and each worker is given the rows of all others, (n - 1) times as many as it has. Then it
multiplies the rows of all workers, where it would have its own. (Zhang et al., "Poseidon", USENIX ATC 2017, chooses by
bytes alone.)
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.analysis.first_batch import most_replicas
from autodist_py.kernel.analysis.products import products_of
from autodist_py.kernel.analysis.replica_weights import counting_rows, dense_bytes, summed_as, weighted_each
from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.collectives.local import copied
from autodist_py.kernel.collectives.members import members_of
from autodist_py.kernel.events import GatherFactors
from autodist_py.kernel.ir import flat_buffers
from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import on_replica
from autodist_py.kernel.ir.product import Factor, Product, factor_bytes
from autodist_py.kernel.program import Program
from autodist_py.kernel.topology import is_gpu
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.synchronizers import AllReduceSynchronizer

_RING_BANDWIDTH = 2.3e9
"""In bit/s, of TensorFlow's rings where links are faster: 40 MB in 139 ms (docs/performance.md)."""
_CPU_FLOPS, _GPU_FLOPS = 3e10, 5e12
"""How many floating-point operations a second a core makes in a product of matrices, and a GPU."""
_MESSAGE_SECONDS = 1e-3
"""What a message between workers takes, however small it is."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What decides whether factors are worth it.

    Attributes:
        workers: how many gather.
        members: of the ring that would reduce the gradient.
        replicas: how many the worker has that has most of them.
        bandwidth: of the slowest link, in bit/s.
        flops: how many floating-point operations a second a worker makes; a core of it, where it has no GPU.
    """

    workers: int
    members: int
    replicas: int
    bandwidth: float
    flops: float

    @classmethod
    def of(cls, program: Program, *, members: int) -> "Costs":
        """Those of a program, whose ring would have so many members."""
        are_gpus = all(is_gpu(replica.device) for replica in program.topology.everyone)
        return cls(
            workers=len(program.topology.workers),
            members=members,
            replicas=most_replicas(program),
            bandwidth=min(program.options.bandwidth or _RING_BANDWIDTH, _RING_BANDWIDTH),
            flops=_GPU_FLOPS if are_gpus else _CPU_FLOPS,
        )

    def gains(self, products: Mapping[str, Product]) -> dict[str, float]:
        """The seconds a step that are gained where these products' factors are gathered; of each; < 0: lost."""
        users = Counter(factor for product in products.values() for factor in product.factors)
        return {marker: self._gained(product, users) for marker, product in products.items()}

    def _gained(self, product: Product, users: Mapping[Factor, int]) -> float:
        """By one, which has its share of each factor that several have."""
        if product.rows is None:
            return -math.inf
        width, height = product.right.width, 1 if product.left is None else product.left.width
        ring = 2 * (self.members - 1) / self.members * height * width * product.right.dtype.size
        row = sum(one.width * one.dtype.size / users[one] for one in product.factors)
        others = (self.workers - 1) * self.replicas * product.rows
        flops = 0 if product.left is None else 2 * others * height * width
        return 8 * (ring - others * row) / self.bandwidth - flops / self.flops


def worth_gathering(
    program: Program, synchronizer: AllReduceSynchronizer, gradients: Sequence[Gradient]
) -> dict[str, Product]:
    """Those of the gradients, by their markers' tensors, whose factors are gathered: dense ones, reduced alike."""
    if _why_not(synchronizer):
        return {}
    if synchronizer.factors:
        return products_of(program, gradients)[0]
    costs = Costs.of(program, members=members_of(program, synchronizer, coded=False))
    ring_bits = 8 * 2 * sum(dense_bytes(program, gradient) for gradient in gradients)  # At most.
    if synchronizer.spec == "NCCL" or costs.workers == 1 or ring_bits < _MESSAGE_SECONDS * costs.bandwidth:
        return {}
    products, reasons = products_of(program, gradients)
    return chosen(products, costs, is_all=not reasons)


def together(products: Mapping[str, Product], most: int) -> Iterator[tuple[str, ...]]:
    """The products in groups of no more bytes than `most`, in their order; those that share a factor are in one group.

    Args:
        products: by their markers' tensors.
        most: bytes; those that share factors may have more.
    """
    place = {marker: position for position, marker in enumerate(products)}
    sharing: nx.Graph[str | Factor] = nx.Graph()
    for marker, product in products.items():
        sharing.add_edges_from((marker, factor) for factor in product.factors)
    groups = [sorted(place.keys() & one, key=place.__getitem__) for one in nx.connected_components(sharing)]
    groups.sort(key=lambda group: place[group[-1]])  # By when the last one is ready.
    for several in flat_buffers.filled(groups, lambda group: factor_bytes(map(products.__getitem__, group)), most):
        yield tuple(marker for group in several for marker in group)


def require_some(program: Program) -> None:
    """Refuse a strategy that asks for factors, where no gradient has any.

    Raises:
        StrategyError: there is none; with each gradient's reason.
    """
    reasons: dict[str, str] = {}
    asked = []
    for gradient in program.item.gradients:
        own = program.strategy.node(gradient.variable).synchronizer
        synchronizer = None if own is None else own.as_all_reduce
        if synchronizer is None or not synchronizer.factors or not program.analysis.is_varying(gradient):
            continue
        if reason := "it is sparse" if gradient.is_sparse else _why_not(synchronizer):
            reasons[gradient.variable] = reason
        else:
            asked.append(gradient)
    if not asked and not reasons:
        return
    products, others = products_of(program, asked)
    reasons |= {gradient.variable: others.get(gradient.tensors[0], "") for gradient in asked}
    if reasons and not products:
        listed = "; ".join(f"'{name}': {reason}" for name, reason in reasons.items())
        raise StrategyError(
            "factors=True gathers what gradients are products of, and no gradient here is one of rows: "
            f"{listed}. Leave factors out: then they are gathered where that takes less time"
        )


def _why_not(synchronizer: AllReduceSynchronizer) -> str:
    """Why no dense gradient of the synchronizer is reduced by its factors; "": some may be."""
    if synchronizer.factors is False:
        return "factors=False"
    if not synchronizer.compressor.passes_through:
        return f"{type(synchronizer.compressor).__name__} codes it"
    return ""


def chosen(products: Mapping[str, Product], costs: Costs, *, is_all: bool) -> dict[str, Product]:
    """Those that are worth it.

    Each that gains, if all of these gain more than the messages take. Those that lose less than a message takes go
    with them where nothing else would need one.

    Args:
        products: those that are reduced alike.
        costs: what it takes.
        is_all: whether all gradients that are reduced alike are products.
    """
    found = dict(products)
    while losing := {marker for marker, gain in costs.gains(found).items() if gain <= 0}:
        found = {marker: product for marker, product in found.items() if marker not in losing}
    gained, for_all = sum(costs.gains(found).values()), sum(costs.gains(products).values())
    if is_all and for_all > gained - _MESSAGE_SECONDS:
        found, gained = dict(products), for_all
    return found if gained > _MESSAGE_SECONDS else {}


def specs(factors: Iterable[Factor], view: GraphView, replicas: Iterable[int]) -> list[list[list[TensorSpec]]]:
    """The rows that each replica has, by factor and replica."""
    return [
        [[TensorSpec(view.nodes[on_replica(replica, one.op)].input[one.position], one.dtype)] for replica in replicas]
        for one in factors
    ]


def multiplied(
    program: Program,
    event: GatherFactors,
    values: Sequence[Sequence[list[tf.Tensor]]],
    weights: Sequence[tf.Tensor],
    devices: Sequence[str],
    collectives: Collectives,
) -> list[list[list[tf.Tensor]]]:
    """For each gradient, on each device, the product of all replicas' rows; then the sum of each output.

    Args:
        program: whose gradients they are.
        event: says which.
        values: on each replica the rows of each factor, then each output.
        weights: of each replica.
        devices: the replicas'.
        collectives: those of the program.
    """
    count = len(event.factors)
    own = [
        _worker_rows(one, copies, weights, devices) for one, copies in zip(event.factors, values[:count], strict=True)
    ]
    own += [_worker_sum(copies, weights, devices) for copies in values[count:]]
    with tf.device(devices[0]):
        gathered = collectives.gather_each(own)
        rows = dict(zip(event.factors, gathered[:count], strict=True))
        totals = [
            tf.reshape(_total(product, rows), program.item.variable(gradient.variable).shape)
            for gradient, product in zip(event.gradients, event.products, strict=True)
        ]
        along = zip(event.outputs, gathered[count:], strict=True)
        totals += [tf.reshape(tf.reduce_sum(parts, axis=0), output.shape) for output, parts in along]
        totals = [tf.cast(total, event.dtype) for total in totals]
    return [[[copy] for copy in copied(total, devices)] for total in totals]


def _total(product: Product, rows: Mapping[Factor, tf.Tensor]) -> tf.Tensor:
    right = rows[product.right]
    if product.left is None:  # TensorFlow's own sum of many numbers in half precision comes to a halt.
        return tf.cast(tf.reduce_sum(tf.cast(right, summed_as(right.dtype)), axis=0), right.dtype)
    return tf.matmul(rows[product.left], right, transpose_a=True)


def _worker_rows(
    factor: Factor, copies: Sequence[list[tf.Tensor]], weights: Sequence[tf.Tensor], devices: Sequence[str]
) -> tf.Tensor:
    """The rows of all replicas of this worker; none of one that does not count, whatever is in them."""
    counting = []
    for (tensor,), weight, device in zip(copies, weights, devices, strict=True):
        with tf.device(device):
            rows = tf.reshape(tensor, [-1, factor.width])
            counting.append(counting_rows(rows, weight))
    if factor.is_weighted:
        counting = weighted_each(counting, weights, devices)
    with tf.device(devices[0]):
        return tf.cast(tf.concat(counting, axis=0) if len(counting) > 1 else counting[0], factor.dtype)


def _worker_sum(copies: Sequence[list[tf.Tensor]], weights: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
    """The sum over all replicas of this worker, as one row."""
    parts = weighted_each([value for (value,) in copies], weights, devices)
    with tf.device(devices[0]):
        return tf.reshape(tf.add_n(parts), [1, parts[0].shape.num_elements()])
