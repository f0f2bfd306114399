"""Which axes of a tensor go along a replica's examples, and which ops mix examples for certain.

Beside the layouts, which say of a value what it is for the whole batch where that is known, these rules say of a value
that it is *not* what one device has: each claims a mixture only where every value of the tensors would show it, but for
chance. An op without a rule, or one that reads what is not known, is not known: nothing is claimed of it.
`following` takes them for more: that what they say is so for any size of the batch. What must hold besides, of sizes
that meet, is in `alignment`.
It is long, as it is one table of rules.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE, ARITHMETIC
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout, Operands
from autodist_py.kernel.analysis.batch_layout.movement import keeps_rows


@dataclass(frozen=True, slots=True)
class Along:
    """How a value goes along the examples.

    Attributes:
        axes: those with an entry for each example.
        pools: whether each entry is also made of a sum or mean over the replica's own examples.
        adds: whether that is a sum, and no mean.
        order: what put the examples in another order, the op that drew it or a reversal; "": nothing did.
        chosen: whether there are entries only for examples that were chosen by their values.
        counts: whether it is made of the replica's number of examples alone.
        fewer: whether it is a number that is smaller than that, or begins with one.
        both: whether some entries are sums over examples, and others means.
        joined: of which parts, one behind the other, each with entries for all examples, it is made; "": of one.
        others: whether there are entries beside those of examples.
        uneven: whether an entry may be made of several examples, or of none, or stand beside one of another example.
        unset: whether it is a list of which no element has been set.
        before: of a shape, the sizes that stand before the number of examples; None: they are not known.
    """

    axes: frozenset[int] = frozenset()
    pools: bool = False
    adds: bool = False
    order: str = ""
    chosen: bool = False
    counts: bool = False
    fewer: bool = False
    both: bool = False
    joined: str = ""
    others: bool = False
    uneven: bool = False
    unset: bool = False
    before: tuple[int, ...] | None = None

    @property
    def is_same(self) -> bool:
        return not self.axes and not self.pools and not self.counts

    @property
    def keeps_apart(self) -> bool:
        """Whether each entry is one example's, as one device has it, if in another place."""
        return bool(self.axes) and not (self.pools or self.uneven or self.chosen)

    @property
    def is_pooled(self) -> bool:
        """Whether it is a sum or mean over the replica's examples, with no entry for each."""
        return self.pools and not self.axes


class Mixture(str):
    """What an op does that mixes examples, after its name: "pairs ..."."""

    __slots__ = ()


EVERYWHERE = Along()
ROW_BY_ROW = Along(frozenset({0}))
CHOSEN_ROWS = Along(frozenset({0}), chosen=True)
NUMBER = Along(counts=True)
_OF_LAYOUT = {
    BatchLayout.REPLICATED: EVERYWHERE,
    BatchLayout.SHAPE: EVERYWHERE,
    BatchLayout.COUNT: NUMBER,
    BatchLayout.SHARDED: ROW_BY_ROW,
    BatchLayout.SELECTED: CHOSEN_ROWS,
    BatchLayout.PARTIAL_MEAN: Along(pools=True),
    BatchLayout.PARTIAL_SUM: Along(pools=True, adds=True),
    BatchLayout.PARTIAL_SUM_PLUS: Along(pools=True, adds=True),
}

Found = Along | Mixture | None
"""How the result goes along examples; or that they are mixed; None: it is not known."""

_Rule = Callable[[Operands, tuple[Along, ...]], Found]

PAIRS = Mixture("pairs each example with the others of the batch")
OF_POOLED = Mixture("is no sum or mean over examples, and is computed from one")
BY_POOLED = Mixture("computes each example's value with a sum or mean over the batch")
OF_CHOSEN = Mixture(
    "averages over examples that were chosen, of which replicas may have different numbers: divide their sum by their "
    "number, tf.reduce_sum(x) / tf.cast(tf.size(x), x.dtype), or tf.shape(x)[0] where the mean is along the rows alone"
)
OF_OTHERS = Mixture(
    "averages over examples and others, which each replica has beside its own: divide the sum over the examples by "
    "their number"
)
BY_PLACE = Mixture("takes examples by their place in the batch")
ADDS_SUM = Mixture("adds a sum over examples to what is a mean, or is of each example")


def along(operands: Operands, reads: tuple[Along | None, ...]) -> Found:
    """What the op makes of what goes along the examples like `reads`."""
    counts = any(read is not None and read.counts for read in reads)
    rule = (_OF_NUMBERS if counts else RULES).get(operands.node.op)
    known = tuple(read for read in reads if read is not None)
    if rule is None or len(known) < len(reads) or None in operands.ranks:
        return None
    if all(read.is_same for read in known):
        return EVERYWHERE
    result = rule(operands, known)
    if not isinstance(result, Along):
        return result
    with_axes = [read for read in known if read.axes]
    joined = {read.joined for read in with_axes}
    result = replace(
        result,
        others=bool(result.axes) and (result.others or any(read.others for read in known)),
        joined=result.joined or (joined.pop() if len(joined) == 1 else ""),
        uneven=result.uneven or len({read.joined for read in with_axes}) > 1 or any(_is_uneven(read) for read in known),
    )
    orders = {read.order for read in with_axes}
    if len(orders) > 1:
        may_be_one = operands.node.op in _JOINS or any(order.endswith(_UNKNOWN) for order in orders)
        return None if may_be_one else Mixture("pairs each example with another of the batch")
    return replace(result, order=result.order or orders.pop()) if result.axes and orders else result


def of_layout(layout: BatchLayout) -> Along | None:
    """How what is of this layout goes along examples; None: the layout does not say."""
    return _OF_LAYOUT.get(layout)


def _is_uneven(read: Along) -> bool:
    return read.uneven or read.chosen


def is_followed(op_type: str) -> bool:
    """Whether there is a rule for ops of this type."""
    return op_type in RULES


def _joined(reads: tuple[Along, ...], axes: frozenset[int]) -> Along:
    return Along(axes, any(read.pools for read in reads), any(read.adds for read in reads))


def _broadcast(operands: Operands, reads: tuple[Along, ...]) -> frozenset[int] | Mixture:
    """The axes along examples of what is computed element by element."""
    ranks = [rank or 0 for rank in operands.ranks]
    each = [frozenset(axis + max(ranks) - rank for axis in read.axes) for rank, read in zip(ranks, reads, strict=True)]
    union = frozenset[int]().union(*each)
    return PAIRS if len(union) > max(map(len, each)) else union


def _linear_sum(operands: Operands, reads: tuple[Along, ...]) -> Found:
    axes = _broadcast(operands, reads)
    if isinstance(axes, Mixture):
        return axes
    differing = [read for read in reads if not read.is_same]
    is_mixed = len({read.adds for read in differing}) > 1  # A regularizer is the same on all replicas.
    return ADDS_SUM if is_mixed else _joined(reads, axes)


def _product(operands: Operands, reads: tuple[Along, ...]) -> Found:
    return _linear_in(operands, reads, (0, 1))


def _quotient(operands: Operands, reads: tuple[Along, ...]) -> Found:
    return _linear_in(operands, reads, (0,))


def _linear_in(operands: Operands, reads: tuple[Along, ...], positions: tuple[int, ...]) -> Found:
    """Of an op that is linear in each of its inputs at these positions by itself."""
    axes = _broadcast(operands, reads)
    if isinstance(axes, Mixture):
        return axes
    differing = [index for index, read in enumerate(reads) if not read.is_same]
    if len(differing) == 1 and differing[0] in positions:
        return _joined(reads, axes)
    return _of_pooled(reads, axes)


def _of_pooled(reads: tuple[Along, ...], axes: frozenset[int]) -> Found:
    """Of an op that is not linear."""
    if any(read.pools for read in reads):
        return BY_POOLED if axes else OF_POOLED
    return Along(axes)


def _nonlinear(operands: Operands, reads: tuple[Along, ...]) -> Found:
    axes = _broadcast(operands, reads)
    return axes if isinstance(axes, Mixture) else _of_pooled(reads, axes)


def _comparison(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """A gate: what it lets pass may be the same."""
    axes = _broadcast(operands, reads)
    if isinstance(axes, Mixture):
        return axes
    return None if any(read.pools for read in reads) else Along(axes)


def _choice(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """One of two, by a condition."""
    if reads[0].is_same:
        return _linear_sum(operands, (EVERYWHERE, *reads[1:]))
    return _nonlinear(operands, reads)


def _passed(operands: Operands, reads: tuple[Along, ...]) -> Found:
    return reads[0]


def _cast(operands: Operands, reads: tuple[Along, ...]) -> Found:
    is_float = tf.as_dtype(operands.node.attr["DstT"].type).is_floating
    return reads[0] if is_float or not reads[0].pools else None


def _reduced(operands: Operands, read: Along, axes: frozenset[int] | None) -> tuple[frozenset[int], bool] | None:
    """The axes that are left when these are reduced, and whether examples are."""
    rank = operands.ranks[0]
    if axes is None or rank is None:
        return None
    keeps = operands.node.attr["keep_dims"].b
    left = read.axes - axes
    return left if keeps else _without(left, axes), bool(read.axes & axes)


def _without(axes: frozenset[int], gone: Collection[int]) -> frozenset[int]:
    """Where `axes` are when those `gone`, which are others, are no more."""
    return frozenset(axis - sum(one < axis for one in gone) for axis in axes)


def _axes(operands: Operands) -> frozenset[int] | None:
    found = operands.axes(1, operands.ranks[0])
    return None if found is None else frozenset(found)


def _linear_reduction(operands: Operands, reads: tuple[Along, ...]) -> Found:
    reduced = _reduced(operands, reads[0], _axes(operands))
    if reduced is None or not tf.as_dtype(operands.node.attr["T"].type).is_floating:
        return None
    left, over_examples = reduced
    if over_examples and reads[0].chosen and operands.node.op == "Mean":
        return OF_CHOSEN
    if over_examples and reads[0].others and operands.node.op == "Mean":
        return OF_OTHERS
    if reads[0].both:
        is_all = len(_axes(operands) or ()) == operands.ranks[0]
        return ADDS_SUM if is_all else None
    adds = reads[0].adds or (over_examples and operands.node.op == "Sum")
    return Along(left, reads[0].pools or over_examples, adds)


def _extreme(operands: Operands, reads: tuple[Along, ...]) -> Found:
    reduced = _reduced(operands, reads[0], _axes(operands))
    if reduced is None or not tf.as_dtype(operands.node.attr["T"].type).is_floating:
        return None  # The largest of sizes only pads.
    left, over_examples = reduced
    return Mixture("reduces all examples to one value") if over_examples else _of_pooled(reads, left)


def _on_axis(of: Callable[[Operands], frozenset[int] | None], *, linear: bool = False, sorts: bool = False) -> _Rule:
    """Of an op whose entries along an axis depend on one another; one that sorts may do so alike on all replicas."""

    def rule(operands: Operands, reads: tuple[Along, ...]) -> Found:
        axes = of(operands)
        if operands.node.op == "Cumsum" and tf.as_dtype(operands.node.attr["T"].type).is_integer:
            return None  # A running sum of lengths says where ragged rows begin.
        if axes is None or len({read.axes for read in reads if read.axes}) > 1:
            return None
        if axes & reads[0].axes:
            return Mixture("works along the axis of the examples")
        if linear or (sorts and reads[0].pools):
            return reads[0] if linear else None
        return _of_pooled(reads, reads[0].axes)

    return rule


def _places(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Of the places of extremes along an axis, which is gone."""
    found, gone = _on_axis(_axes, sorts=True)(operands, reads), _axes(operands)
    return replace(found, axes=_without(found.axes, gone)) if isinstance(found, Along) and gone else found


def _last(operands: Operands) -> frozenset[int] | None:
    return None if operands.ranks[0] is None else frozenset({operands.ranks[0] - 1})


def _cross_entropy(operands: Operands, reads: tuple[Along, ...]) -> Found:
    if 1 in reads[0].axes:
        return Mixture("works along the axis of the examples")
    return _of_pooled(reads, frozenset({0}) if any(read.axes for read in reads) else frozenset())


def _matmul(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Of matrices, and of batches of them."""
    rank = operands.ranks[0]
    if rank is None or rank < 2 or set(operands.ranks) != {rank}:
        return None
    keys = ("transpose_a", "transpose_b") if operands.node.op == "MatMul" else ("adj_x", "adj_y")
    turned = [operands.node.attr[key].b for key in keys]
    rows, inner = (rank - 1, rank - 2) if turned[0] else (rank - 2, rank - 1)
    columns, other = (rank - 2, rank - 1) if turned[1] else (rank - 1, rank - 2)
    left, right = (read.axes for read in reads)
    axes = {axis for axis in left | right if axis < rank - 2}
    axes |= {rank - 2} if rows in left else set()
    axes |= {rank - 1} if columns in right else set()
    if len(axes) > max(len(left), len(right)) or (rows in left and columns in right):
        return PAIRS
    differing = [read for read in reads if not read.is_same]
    over_examples = inner in left or other in right
    if len(differing) > 1 and any(read.pools for read in differing):
        return _of_pooled(reads, frozenset(axes))
    pools = over_examples or any(read.pools for read in reads)
    return Along(frozenset(axes), pools, over_examples or any(read.adds for read in reads))


def _solved(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Of equations with one matrix for all examples, of each of which a column has the right-hand side."""
    rank = operands.ranks[1]
    is_of_columns = rank is not None and operands.ranks[0] == rank and reads[1].axes <= {rank - 1}
    return _joined(reads[1:], reads[1].axes) if is_of_columns and reads[0].is_same else None


def _einsum(operands: Operands, reads: tuple[Along, ...]) -> Found:
    terms, _, result = operands.node.attr["equation"].s.decode().partition("->")
    inputs = terms.split(",")
    if "." in terms:
        return None
    letters = [{term[axis] for axis in read.axes} for term, read in zip(inputs, reads, strict=True)]
    union = set[str]().union(*letters)
    if len(union) > max(map(len, letters)):
        return PAIRS
    axes = frozenset(result.index(letter) for letter in union & set(result))
    differing = [read for read in reads if not read.is_same]
    if len(differing) > 1 and any(read.pools for read in differing):
        return _of_pooled(reads, axes)
    over_examples = bool(union - set(result))
    pools = over_examples or any(read.pools for read in reads)
    return Along(axes, pools, over_examples or any(read.adds for read in reads))


def _transpose(operands: Operands, reads: tuple[Along, ...]) -> Found:
    order = operands.integers(1)
    return None if order is None else _joined(reads[:1], frozenset(order.index(axis) for axis in reads[0].axes))


def _expand_dims(operands: Operands, reads: tuple[Along, ...]) -> Found:
    new = operands.axes(1, None if operands.ranks[0] is None else operands.ranks[0] + 1)
    if new is None:
        return None
    return _joined(reads[:1], frozenset(axis + (axis >= new[0]) for axis in reads[0].axes))


def _squeeze(operands: Operands, reads: tuple[Along, ...]) -> Found:
    rank, gone = operands.ranks[0], list(operands.node.attr["squeeze_dims"].list.i)
    if rank is None or not gone:
        return None
    taken = {axis % rank for axis in gone}
    return None if taken & reads[0].axes else _joined(reads[:1], _without(reads[0].axes, taken))


def _reshape(operands: Operands, reads: tuple[Along, ...]) -> Found:
    if reads[0].is_pooled:
        return reads[0]
    sizes = operands.integers(1)
    if reads[0].axes != {0} or sizes is None or sizes[:1] != [-1]:
        return None
    return replace(reads[0], uneven=reads[0].uneven or not keeps_rows(operands.row, operands.block, sizes))


def _by_place(operands: Operands, dtype: str = "T") -> Found:
    """Of what takes some examples, by constants; an integer may be a size. The attribute `dtype` has the type."""
    is_fixed = all(one is not None for one in operands.constants[1:])
    is_float = tf.as_dtype(operands.node.attr[dtype].type).is_floating
    return BY_PLACE if is_fixed and is_float else None


def _smaller(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Of a number of examples that is divided, or lessened, by a constant."""
    least = 1 if operands.node.op == "Sub" else 2
    by = operands.integers(1)
    is_of_each = operands.layouts[0] is BatchLayout.COUNT and operands.has_one_row(0)
    return replace(NUMBER, fewer=True) if is_of_each and by is not None and min(by, default=0) >= least else None


def _part_of_rows(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Of a slice of rows, one for each example, from or to a place in the batch."""
    is_of_each = operands.layouts[0] is BatchLayout.SHARDED and operands.has_one_row(0)
    return BY_PLACE if is_of_each and any(read.fewer for read in reads[1:]) else None


def _strided_slice(operands: Operands, reads: tuple[Along, ...]) -> Found:
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {key: operands.node.attr[f"{key}_mask"].i for key in names}
    strides, rank = operands.integers(3), operands.ranks[0]
    if strides is None or rank is None or reads[0].both:
        return None
    new = [bool(masks["new_axis"] >> index & 1) for index in range(len(strides))]
    own, at, moved = 0, 0, dict[int, int]()
    whole = set(range(rank))
    for index, is_new in enumerate(new):
        if masks["ellipsis"] >> index & 1:
            covered = rank - own - sum(not later for later in new[index + 1 :])
            moved |= {own + step: at + step for step in range(covered)}
            own, at = own + covered, at + covered
        elif is_new:
            at += 1
        else:
            is_one = masks["shrink_axis"] >> index & 1
            if not is_one:
                moved[own], at = at, at + 1
            if is_one or strides[index] != 1 or not (masks["begin"] & masks["end"]) >> index & 1:
                whole.discard(own)
            own += 1
    moved |= {axis: at + axis - own for axis in range(own, rank)}
    if not reads[0].axes <= whole:
        return _by_place(operands)
    return _joined(reads[:1], frozenset(moved[axis] for axis in reads[0].axes))


def _concat(operands: Operands, reads: tuple[Along, ...]) -> Found:
    parts = [read for read in reads[:-1] if not read.is_same]
    if not parts or len({read.axes for read in parts}) > 1 or len({read.pools for read in parts}) > 1:
        return None
    found = _joined(tuple(parts), parts[0].axes)
    if found.is_pooled:
        return replace(found, both=_are_both(parts))
    axes = operands.axes(-1, operands.ranks[0])
    if axes is not None and axes[0] not in found.axes:
        return found
    blocks = operands.blocks or (None,) * len(reads)
    of_parts = [read.joined or str(block or "") for read, block in zip(reads[:-1], blocks, strict=False)]
    is_known = all(of_parts) and len(parts) == len(reads) - 1 and axes is not None
    joined = f"({' '.join(of_parts)})" if is_known else operands.node.name
    return replace(found, joined=joined, others=len(parts) < len(reads) - 1, uneven=not is_known)


def _are_both(parts: Iterable[Along]) -> bool:
    """Whether some of these are sums over examples, and others means."""
    return len({part.adds for part in parts if not part.is_same}) > 1


def _pack(operands: Operands, reads: tuple[Along, ...]) -> Found:
    rank = (operands.ranks[0] or 0) + 1
    axis = operands.node.attr["axis"].i % rank
    parts = {read.axes for read in reads if not read.is_same}
    if len(parts) > 1 or len({read.pools for read in reads}) > 1:
        return None
    if not parts:
        return None
    found = _joined(reads, frozenset(own + (own >= axis) for own in parts.pop()))
    return replace(found, both=found.is_pooled and _are_both(reads))


def _unpack(operands: Operands, reads: tuple[Along, ...]) -> Found:
    axis = operands.node.attr["axis"].i % (operands.ranks[0] or 1)
    if axis in reads[0].axes or reads[0].both:
        return None
    return _joined(reads, _without(reads[0].axes, {axis}))


def _layer(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Of a layer's op that works on each entry along axis 0 by itself, with weights that are the same everywhere."""
    is_apart = reads[0].axes == {0} and not reads[0].pools and all(read.is_same for read in reads[1:])
    return reads[0] if is_apart else None


def _padded(operands: Operands, reads: tuple[Along, ...]) -> Found:
    paddings = operands.integers(1)
    is_along = paddings is None or any(paddings[2 * axis] or paddings[2 * axis + 1] for axis in reads[0].axes)
    return replace(reads[0], others=reads[0].others or is_along, uneven=reads[0].uneven or is_along)


def _tiled(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Along the examples it is of several parts, which are the same."""
    times = operands.integers(1)
    if times is not None and all(times[axis] == 1 for axis in reads[0].axes):
        return reads[0]
    return replace(reads[0], joined=operands.node.name, uneven=True)


def _bias_added(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Of a vector that is added along an axis, which is the last one of what is no image."""
    is_last = operands.node.attr["data_format"].s != b"NCHW"
    return reads[0] if reads[1].is_same else _linear_sum(operands, reads) if is_last else None


def _gather(operands: Operands, reads: tuple[Along, ...]) -> Found:
    axes = operands.axes(2, operands.ranks[0])
    if axes is None or ("batch_dims" in operands.node.attr and operands.node.attr["batch_dims"].i):
        return None
    if reads[0].axes:
        return _by_place(operands, "Tparams") if axes[0] in reads[0].axes and reads[1].is_same else None
    if not reads[1].axes:
        return None
    return _joined(reads, frozenset(axes[0] + axis for axis in reads[1].axes))


def _gather_nd(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Of entries by their places along the first axes, which are not those of the examples."""
    rank, depth = operands.ranks[1], operands.shapes[1][-1] if operands.ranks[1] else None
    if rank is None or depth is None or not reads[1].is_same or min(reads[0].axes, default=depth) < depth:
        return None
    return _joined(reads[:1], frozenset(axis - depth + rank - 1 for axis in reads[0].axes))


def _l2_loss(operands: Operands, reads: tuple[Along, ...]) -> Found:
    return OF_POOLED if reads[0].is_pooled else Along(pools=True, adds=True)


def _segment_sum(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """Sums over the examples of each of a fixed number of classes."""
    is_fixed = reads[2].is_same and operands.constants[2] is not None
    return Along(pools=True, adds=True) if is_fixed and reads[0].axes == {0} == reads[1].axes else None


def _shuffled(operands: Operands, reads: tuple[Along, ...]) -> Found:
    return _reordered(reads[0], frozenset({0}), operands.node.name)


def _reversed(operands: Operands, reads: tuple[Along, ...]) -> Found:
    axes = _axes(operands)
    return None if axes is None else _reordered(reads[0], axes, operands.node.op)


def _rolled(operands: Operands, reads: tuple[Along, ...]) -> Found:
    """By as many places as others, or by a number that is not known."""
    axes, places = operands.axes(2, operands.ranks[0]), operands.integers(1)
    if axes is None:
        return None
    if places is None:
        return _reordered(reads[0], frozenset(axes), f"Roll by {operands.node.input[1]}{_UNKNOWN}")
    own = sum(by for axis, by in zip(axes, places, strict=True) if axis in reads[0].axes)
    return _reordered(reads[0], frozenset(axes), f"Roll by {own}") if own else reads[0]


def _reordered(read: Along, axes: frozenset[int], order: str) -> Found:
    """Of what is put in another order along these axes."""
    if read.order:
        return None
    return replace(read, order=order) if axes & read.axes else read


_JOINS = frozenset({"ConcatV2", "Pack"})
_UNKNOWN = "?"
"""The end of an order that may be the same as another one."""
_LAYERS = ("AvgPool", "AvgPool3D", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "LRN", "MaxPool", "MaxPool3D")
_GATES = ("Equal", "Greater", "GreaterEqual", "IsFinite", "IsInf", "IsNan", "Less", "LessEqual", "NotEqual", "Sign")
_TERMS = (*ADDITIVE, "Complex", "Sub")
_PASSES = ("CheckNumerics", "EnsureShape", "Identity", "Neg", "PreventGradient", "StopGradient")
_OF_MATRICES = ("Cholesky", "LogMatrixDeterminant", "MatrixDeterminant", "MatrixInverse")
_ELEMENTWISE = frozenset(op for op, rule in ARITHMETIC.items() if rule in (ARITHMETIC["Exp"], ARITHMETIC["Maximum"]))

RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(sorted(_ELEMENTWISE), _nonlinear),
    **dict.fromkeys(_GATES, _comparison),
    **dict.fromkeys(_TERMS, _linear_sum),
    **dict.fromkeys(_PASSES, _passed),
    **dict.fromkeys(("Real", "Imag", "Conj"), _passed),
    **dict.fromkeys(("Sum", "Mean"), _linear_reduction),
    **dict.fromkeys(("Max", "Min", "Prod"), _extreme),
    **dict.fromkeys(("LogSoftmax", "Softmax"), _on_axis(_last)),
    **dict.fromkeys(("ArgMax", "ArgMin"), _places),
    **dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), _cross_entropy),
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    **dict.fromkeys(_OF_MATRICES, lambda operands, reads: OF_POOLED if reads[0].is_pooled else None),
    **dict.fromkeys(("MatrixSolve", "MatrixTriangularSolve"), _solved),
    **dict.fromkeys(("Div", "DivNoNan", "RealDiv"), _quotient),
    **dict.fromkeys(("Mul", "MulNoNan"), _product),
    **dict.fromkeys(("Select", "SelectV2"), _choice),
    **dict.fromkeys(_LAYERS, _layer),
    **dict.fromkeys(("Pad", "PadV2"), _padded),
    **dict.fromkeys(("OnesLike", "ZerosLike"), lambda operands, reads: Along(reads[0].axes)),
    "BiasAdd": _bias_added,
    "BroadcastTo": lambda operands, reads: None if reads[0].axes else reads[0],
    "Tile": _tiled,
    "Cast": _cast,
    "ConcatV2": _concat,
    "Cumprod": _on_axis(_axes),
    "Cumsum": _on_axis(_axes, linear=True),
    "Einsum": _einsum,
    "ExpandDims": _expand_dims,
    "GatherNd": _gather_nd,
    "GatherV2": _gather,
    "L2Loss": _l2_loss,
    "Pack": _pack,
    "RandomShuffle": _shuffled,
    "Reshape": _reshape,
    "ResourceGather": lambda operands, reads: reads[1],
    "ReverseV2": _reversed,
    "Roll": _rolled,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "TopKV2": _on_axis(_last, sorts=True),
    "Transpose": _transpose,
    "UnsortedSegmentSum": _segment_sum,
    "Unpack": _unpack,
}

_OF_NUMBERS: Mapping[str, _Rule] = {
    **dict.fromkeys(
        ("Cast", "ExpandDims", "Identity", "Pack"), lambda operands, reads: replace(NUMBER, fewer=reads[0].fewer)
    ),
    **dict.fromkeys(("FloorDiv", "Sub", "TruncateDiv"), _smaller),
    **dict.fromkeys(("Slice", "StridedSlice"), _part_of_rows),
}
"""Of ops that read what is made of the number of examples alone."""
