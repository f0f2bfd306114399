"""Loops over the examples of a batch, as `tf.map_fn` makes them: each turn computes something of one example.

Such a loop counts from 0 to the number of a replica's examples, reads each example at its place, and keeps what it
computes at the same place, or adds it up. It is the same on one device if no turn reads anything of another one. Values
of a turn are told apart:

1. SAME: computed from what all replicas have.
2. PLACE: which turn it is; it may only be counted on, and read and written by.
3. ROWS: a list or batch of all examples, of which the turn may take its own.
4. OWN: computed from the turn's own example, or drawn for it (by a seed that is given all turns draw the same).
5. FILLED: a list to which each turn adds its own value.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from autodist_py.kernel.analysis.batch_layout.along import ROW_BY_ROW
from autodist_py.kernel.analysis.batch_layout.following import UNKNOWN, Known, known_by
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout, Block
from autodist_py.kernel.analysis.batch_layout.lists import UNSET_FOR_EXAMPLES
from autodist_py.kernel.ir.graph import READS_VARIABLE


class Argument(NamedTuple):
    """What is known of what a loop is given.

    Attributes:
        known: what it is for the whole batch.
        constant: its value, where that is known.
        block: of how many of its rows, or elements, each example has; None: it is not known.
    """

    known: Known
    constant: np.ndarray | None
    block: Block | None

    @property
    def is_zero(self) -> bool:
        """Whether it is surely 0."""
        return self.constant is not None and not np.any(self.constant)


class _Value(Enum):
    """What a tensor is in one turn: the cases above."""

    SAME = 1
    PLACE = 2
    ROWS = 3
    OWN = 4
    FILLED = 5


class Body(NamedTuple):
    """The functions of a loop.

    Attributes:
        graph: what a turn computes.
        condition: whether there is another one.
        ops: those of `graph`, in the order in which they can be computed.
        draws: the names of those that draw random numbers.
        draws_anew: whether an op draws other numbers each time that it runs, and changes nothing else.
        is_pure: whether an op that runs functions computes the same of the same, and changes nothing.
    """

    graph: tf.Graph
    condition: tf.Graph
    ops: Sequence[tf.Operation]
    draws: set[str]
    draws_anew: Callable[[tf.Operation], bool]
    is_pure: Callable[[tf.Operation], bool]


def mapped(body: Body, arguments: Sequence[Argument]) -> list[Known]:
    """What is known of what a loop returns, if it computes something of one example in each turn."""
    counters = {index for index, one in enumerate(arguments) if one.is_zero and _is_counted(body, index, arguments)}
    block = _block_of_bounds(body, arguments, counters)
    if block is None:
        return [UNKNOWN] * len(arguments)
    given = [
        _Value.PLACE if index in counters else _given(body, index, one, block) for index, one in enumerate(arguments)
    ]
    found = {symbol.name: value for symbol, value in zip(body.graph.inputs, given, strict=True)}
    for op in body.ops:
        if op.outputs and op.outputs[0].name not in found:
            found |= dict.fromkeys([symbol.name for symbol in op.outputs], _computed(body, op, found))
    return [_returned(body, index, argument, given[index], found) for index, argument in enumerate(arguments)]


def _given(body: Body, index: int, argument: Argument, block: Block) -> _Value | None:
    """What the turns are given; None: what is not known, or not the same in all."""
    layout, along = argument.known
    if along == UNSET_FOR_EXAMPLES:
        return _Value.FILLED if argument.block == block else None
    if not _stays(body, index):
        return None
    if layout is BatchLayout.REPLICATED:
        return _Value.SAME
    return _Value.ROWS if along == ROW_BY_ROW and argument.block == block else None


def _returned(
    body: Body, index: int, argument: Argument, given: _Value | None, found: dict[str, _Value | None]
) -> Known:
    """What is known of what the loop returns in the place of this argument."""
    if given is _Value.PLACE:
        return known_by(BatchLayout.COUNT)
    if _stays(body, index):
        return argument.known
    symbol = _source(body.graph.outputs[index])
    if given is _Value.FILLED:
        return Known(BatchLayout.MIXED, ROW_BY_ROW) if found[symbol.name] is _Value.FILLED else UNKNOWN
    is_added = symbol.op.type in ("Add", "AddV2") and argument.is_zero and symbol.shape.is_fully_defined()
    terms = [_source(term) for term in symbol.op.inputs] if is_added else []
    others = [term for term in terms if term is not body.graph.inputs[index]]
    is_sum = len(terms) == 2 and [found[one.name] for one in others] in ([_Value.OWN], [_Value.SAME])
    return known_by(BatchLayout.PARTIAL_SUM) if is_sum else UNKNOWN


def _computed(body: Body, op: tf.Operation, found: dict[str, _Value | None]) -> _Value | None:
    """What the results of an op of a turn are."""
    values = [found[symbol.name] for symbol in op.inputs]
    if op.type in ("Identity", "StopGradient"):
        return values[0]
    if values[:1] == [_Value.ROWS] and _takes_own(op, found):
        return _Value.OWN
    if op.type == "TensorListSetItem" and values[:2] == [_Value.FILLED, _Value.PLACE]:
        return _Value.FILLED if values[2] in (_Value.OWN, _Value.SAME) else None
    is_apart = all(value in (_Value.SAME, _Value.OWN) for value in values)
    if op.name in body.draws:
        return _Value.OWN if is_apart and body.draws_anew(op) else None
    if not is_apart or not (op.type in READS_VARIABLE or body.is_pure(op)):
        return None
    return _Value.OWN if _Value.OWN in values else _Value.SAME


def _takes_own(op: tf.Operation, found: dict[str, _Value | None]) -> bool:
    """Whether the op takes the turn's own example out of all: `rows.read(i)`, `tf.gather(x, i)` or `x[i]`."""
    if op.type == "StridedSlice":
        masks = {key: op.get_attr(f"{key}_mask") for key in ("begin", "ellipsis", "new_axis", "shrink_axis")}
        is_one = masks["shrink_axis"] & 1 and not masks["begin"] & 1 and not masks["ellipsis"] | masks["new_axis"]
        first, *others = _packed(op.inputs[1])
        others += [*_packed(op.inputs[2])[1:], op.inputs[3]]
        is_fixed = all(found[_source(other).name] in (_Value.SAME, _Value.OWN) for other in others)
        return bool(is_one) and is_fixed and found[_source(first).name] is _Value.PLACE
    if op.type == "GatherV2" and (_constant(op.inputs[2]) != 0 or op.get_attr("batch_dims")):
        return False
    is_read = op.type in ("GatherV2", "TensorListGetItem")
    return is_read and [found[one.name] for one in op.inputs][1:] == [_Value.PLACE, _Value.SAME]


def _packed(symbol: tf.Tensor) -> list[tf.Tensor]:
    """The numbers that a vector is made of, where it is; else itself."""
    source = _source(symbol)
    return list(source.op.inputs) if source.op.type == "Pack" else [source]


def _block_of_bounds(body: Body, arguments: Sequence[Argument], counters: set[int]) -> Block | None:
    """Of how many rows an example has when the loop turns once for each; None: it does not."""
    places = {id(symbol): index for index, symbol in enumerate(body.condition.inputs)}
    blocks = set[Block | None]()
    for term in _terms(body.condition.outputs[0]):
        if term.op.type != "Less":
            return None
        counter, bound = (places.get(id(_source(symbol))) for symbol in term.op.inputs)
        if counter not in counters or bound is None or not _stays(body, bound):
            return None
        is_number = arguments[bound].known.layout is BatchLayout.COUNT
        blocks.add(arguments[bound].block if is_number else None)
    return blocks.pop() if len(blocks) == 1 else None


def _terms(symbol: tf.Tensor) -> Iterator[tf.Tensor]:
    """The conditions that must all hold."""
    source = _source(symbol)
    if source.op.type != "LogicalAnd":
        yield source
        return
    for one in source.op.inputs:
        yield from _terms(one)


def _is_counted(body: Body, index: int, arguments: Sequence[Argument]) -> bool:
    """Whether each turn returns one more than it was given."""
    symbol = _source(body.graph.outputs[index])
    if symbol.op.type not in ("Add", "AddV2") or symbol.shape.rank != 0 or not symbol.dtype.is_integer:
        return False
    one, other = (_source(term) for term in symbol.op.inputs)
    values = [None if one.constant is None or np.ndim(one.constant) else one.constant.item() for one in arguments]
    ones = [at for at, value in enumerate(values) if value == 1]
    is_one = any(other is body.graph.inputs[at] and _stays(body, at) for at in ones if at != index)
    return one is body.graph.inputs[index] and (is_one or _constant(other) == 1)


def _stays(body: Body, index: int) -> bool:
    """Whether each turn returns what it was given."""
    return _source(body.graph.outputs[index]) is body.graph.inputs[index]


def _source(symbol: tf.Tensor) -> tf.Tensor:
    """What `symbol` is, as another op may pass it on."""
    while symbol.op.type == "Identity":
        symbol = symbol.op.inputs[0]
    return symbol


def _constant(symbol: tf.Tensor) -> int | None:
    """The value of a constant number; None: of anything else."""
    value = tf.get_static_value(symbol)
    return int(value) if value is not None and np.ndim(value) == 0 else None
