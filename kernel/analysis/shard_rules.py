"""What a shard's share of a tensor is, and which ops keep shards apart: tables of op types, and one rule for each kind.

An op keeps shards apart if its result for one shard can be computed of the shard's share of what it reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import tensorflow as tf

from autodist_py.kernel.analysis.row_access import has_batch_dims
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.ir.stateful import DENSE_UPDATES, SPARSE_UPDATES

ELEMENT_WISE = frozenset(
    {
        "Abs",
        "Add",
        "AddN",
        "AddV2",
        "Cast",
        "Ceil",
        "CheckNumerics",
        "ClipByValue",
        "Div",
        "DivNoNan",
        "Equal",
        "Erf",
        "Exp",
        "Expm1",
        "Floor",
        "FloorDiv",
        "FloorMod",
        "Greater",
        "GreaterEqual",
        "Identity",
        "IsFinite",
        "IsInf",
        "IsNan",
        "Less",
        "LessEqual",
        "Log",
        "Log1p",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Maximum",
        "Minimum",
        "Mul",
        "MulNoNan",
        "Neg",
        "NotEqual",
        "OnesLike",
        "Pow",
        "PreventGradient",
        "RealDiv",
        "Reciprocal",
        "Relu",
        "Rint",
        "Round",
        "Rsqrt",
        "Select",
        "SelectV2",
        "Sigmoid",
        "Sign",
        "Softplus",
        "Sqrt",
        "Square",
        "SquaredDifference",
        "StopGradient",
        "Sub",
        "Tanh",
        "Xdivy",
        "Xlogy",
        "ZerosLike",
    }
)
_PASSES_ON = frozenset({"Identity", "Cast"})
_AXIS_MASKS = ("new_axis_mask", "ellipsis_mask")


def _sum(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of `parts`, in an order that does not depend on buffers: workers compute it, each for itself.

    So workers of one kind of device have the same to the last bit. `tf.add_n` of three or more begins with the one
    whose buffer it may use, which is not the same in every step.
    """
    return tf.reduce_sum(tf.stack(parts), axis=0)


REDUCTIONS: dict[str, Callable[[Sequence[tf.Tensor]], tf.Tensor]] = {
    "All": lambda parts: tf.reduce_all(tf.stack(parts), axis=0),
    "Any": lambda parts: tf.reduce_any(tf.stack(parts), axis=0),
    "L2Loss": _sum,
    "Max": lambda parts: tf.reduce_max(tf.stack(parts), axis=0),
    "Min": lambda parts: tf.reduce_min(tf.stack(parts), axis=0),
    "Sum": _sum,
}
"""Op types that make one number of a whole tensor, and how those of its shards are combined to it."""

_ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
_SCATTERS = frozenset(f"ResourceScatter{how}" for how in ("Add", "Sub", "Update", "Mul", "Div", "Min", "Max"))
WRITERS = _ASSIGNS | _SCATTERS | DENSE_UPDATES | SPARSE_UPDATES
"""Op types that write variables element by element, or row by row."""


class Kind(Enum):
    """What a shard's share of a tensor is. A tensor without a kind is the same for all shards."""

    HANDLE = "the handle of a variable that is cut"
    DENSE = "a tensor that is cut along the variable's axis"
    ROWS = "rows of a sparse gradient: those whose indices are in the shard"
    INDICES = "indices of rows: those in the shard, counted from its first row; all, where columns are cut"
    POSITIONS = "where each of the shard's rows is among its distinct ones"
    SIZES = "sizes, that of the first axis before others: the shard's own"


@dataclass(frozen=True, slots=True)
class Operand:
    """What an op reads.

    Attributes:
        kind: of its shares.
        shape: as far as it is known.
        constant: its value, where it is a constant.
        entries: of rows, indices and positions: of which ones, as those of two gradients do not belong together, but
            where both are joined alike. Of sizes: of which ones they are the number; "": they are of what is cut.
    """

    kind: Kind | None
    shape: tf.TensorShape
    constant: np.ndarray | None = None
    entries: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """How an op is cloned for each shard.

    Attributes:
        kinds: of its results.
        cut: which of its inputs are cut for it, and along which axis.
        sized: its input that says how many rows its result has.
        reduces: whether its clones' results are combined to the one that it has.
    """

    kinds: tuple[Kind, ...] = ()
    cut: dict[int, int] = field(default_factory=dict)
    sized: int | None = None
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for a variable of `shape` that is cut along `axis`."""

    shape: tuple[int, ...]
    axis: int

    def of(
        self, node: tf.compat.v1.NodeDef, operands: Sequence[Operand], results: Sequence[tf.TensorShape]
    ) -> Rule | None:
        """How `node` is cloned, given what it reads and the shapes of its results; None: it mixes shards."""
        kinds = [operand.kind for operand in operands]
        if node.op == "ConcatV2":
            return self._joined(operands)
        if len({operand.entries for operand in operands if operand.kind is not Kind.SIZES} - {""}) > 1:
            return None
        if Kind.HANDLE in kinds:
            return self._of_variable(node, operands)
        if node.op in REDUCTIONS and kinds[0] in (Kind.DENSE, Kind.ROWS):
            return self._reduced(node, operands, results[0])
        if node.op in _PASSES_ON and kinds[0] in (Kind.INDICES, Kind.SIZES):
            return Rule((kinds[0],))
        if node.op in ELEMENT_WISE:
            return self._element_wise(node, operands, results[0])
        return self._structural(node, operands)

    @staticmethod
    def _joined(operands: Sequence[Operand]) -> Rule | None:
        """Rows of several gradients of the variable, one after the other: those of a shard are joined likewise."""
        *parts, axis = operands
        kinds = {part.kind for part in parts}
        is_along_rows = axis.constant is not None and axis.constant == 0 and kinds <= {Kind.ROWS, Kind.INDICES}
        return Rule((parts[0].kind,)) if is_along_rows and len(kinds) == 1 and parts[0].kind is not None else None

    @staticmethod
    def _reduced(node: tf.compat.v1.NodeDef, operands: Sequence[Operand], result: tf.TensorShape) -> Rule | None:
        """One number is made of a whole tensor; that there is one number may also be as there is one column."""
        is_one = result.is_fully_defined() and result.num_elements() == 1
        if operands[0].kind is Kind.ROWS and node.op != "L2Loss":
            axes, rank = operands[1].constant, operands[0].shape.rank
            is_one = is_one and axes is not None and rank is not None and 0 in np.reshape(axes, [-1]) % rank
        return Rule(reduces=True) if is_one and not any(operand.kind for operand in operands[1:]) else None

    def _element_wise(
        self, node: tf.compat.v1.NodeDef, operands: Sequence[Operand], result: tf.TensorShape
    ) -> Rule | None:
        kinds = {operand.kind for operand in operands} - {None}
        if result.rank is None:
            result = tf.TensorShape([None] * max(operand.shape.rank or 0 for operand in operands))
        if len(kinds) != 1 or any(operand.shape.rank is None for operand in operands):
            return None
        kind = kinds.pop()
        wholes = {position: one.shape for position, one in enumerate(operands) if one.kind is None}
        if node.op == "Select" and any(shape.rank == 1 for shape in wholes.values()) and result.rank != 1:
            return None  # Its condition may choose rows.
        if kind is Kind.ROWS:
            is_alike = [s.rank is not None and (s.rank < result.rank or s[0] == 1) for s in wholes.values()]
            is_alike += [one.shape.rank == result.rank for one in operands if one.kind is kind]
            return Rule((kind,)) if all(is_alike) else None
        if kind is not Kind.DENSE or result.rank != len(self.shape):
            return None
        cut = {}
        for position, shape in wholes.items():
            if shape.rank is None:
                return None
            axis = self.axis - (result.rank - shape.rank)
            if axis >= 0 and shape[axis] != 1:
                if shape[axis] != self.shape[self.axis]:
                    return None
                cut[position] = axis
        return Rule((kind,), cut)

    def _structural(self, node: tf.compat.v1.NodeDef, operands: Sequence[Operand]) -> Rule | None:
        kinds = tuple(operand.kind for operand in operands)
        distinct = op_of(node.input[1]) if Kind.POSITIONS in kinds else None
        match node.op, kinds:
            case "Shape" | "Size", (Kind.DENSE | Kind.ROWS | Kind.INDICES,):
                return Rule((Kind.SIZES,))
            case "StridedSlice", (Kind.SIZES, None, None, None) if _begins_with_the_first(node, operands):
                return Rule((Kind.SIZES,))
            case "Unique", (Kind.INDICES,):
                return Rule((Kind.INDICES, Kind.POSITIONS))
            case "UnsortedSegmentSum", (Kind.ROWS, Kind.POSITIONS, Kind.SIZES) if operands[2].entries == distinct:
                return Rule((Kind.ROWS,))
            case "UnsortedSegmentSum", (Kind.ROWS, Kind.INDICES, Kind.SIZES) if not operands[2].entries:
                return Rule((Kind.DENSE,))
            case "UnsortedSegmentSum", (Kind.ROWS, Kind.INDICES, None) if operands[2].constant == self.shape[0]:
                return Rule((Kind.DENSE,), sized=2)
            case "UnsortedSegmentSum", (Kind.DENSE, Kind.INDICES | Kind.POSITIONS, Kind.SIZES | None) if self.axis > 0:
                return Rule((Kind.DENSE,))
            case "GatherV2", (Kind.DENSE, ids, None) if operands[2].constant == 0 and not has_batch_dims(node):
                return self._gathered(ids, operands[1].shape)
        return None

    def _gathered(self, ids: Kind | None, shape: tf.TensorShape) -> Rule | None:
        """The rows that are read of a variable, or of what is as large."""
        if self.axis == 0:
            return Rule((Kind.ROWS,)) if ids is Kind.INDICES else None
        return Rule((Kind.DENSE,)) if ids in (Kind.INDICES, None) and shape.rank == 1 else None

    def _of_variable(self, node: tf.compat.v1.NodeDef, operands: Sequence[Operand]) -> Rule | None:
        kinds = [operand.kind for operand in operands]
        values = operands[kinds.count(Kind.HANDLE) :]
        if node.op == "ReadVariableOp":
            return Rule((Kind.DENSE,))
        if node.op == "ResourceGather" and not has_batch_dims(node):
            return self._gathered(values[0].kind, values[0].shape)
        if node.op in _ASSIGNS and values[0].kind is not Kind.ROWS:
            return Rule() if values[0].kind is Kind.DENSE else self._assigned(values[0])
        if node.op in DENSE_UPDATES and all(self._fits(one) for one in values):
            first = kinds.count(Kind.HANDLE)
            return Rule(cut={first + at: self.axis for at, one in enumerate(values) if self._is_whole(one)})
        if node.op in _SCATTERS:
            return Rule() if self._scattered(values[0], values[1]) else None
        if node.op in SPARSE_UPDATES:
            several = [one for one in values if not self._is_number(one)]
            several.sort(key=lambda one: one.kind in (Kind.ROWS, Kind.DENSE))
            return Rule() if len(several) == 2 and self._scattered(*several) else None
        return None

    def _assigned(self, value: Operand) -> Rule | None:
        return Rule(cut={1: self.axis}) if self._is_whole(value) else None

    def _fits(self, value: Operand) -> bool:
        return value.kind is Kind.DENSE or self._is_number(value) or self._is_whole(value)

    def _is_whole(self, value: Operand) -> bool:
        """Whether it is not cut, and as large as the variable."""
        return value.kind is None and value.shape.is_fully_defined() and value.shape.as_list() == list(self.shape) != []

    @staticmethod
    def _is_number(value: Operand) -> bool:
        return value.kind is None and value.shape.rank == 0

    def _scattered(self, indices: Operand, rows: Operand) -> bool:
        if self.axis == 0:
            return indices.kind is Kind.INDICES and (rows.kind is Kind.ROWS or self._is_number(rows))
        return indices.kind in (Kind.INDICES, None) and indices.shape.rank == 1 and rows.kind is Kind.DENSE


def _begins_with_the_first(node: tf.compat.v1.NodeDef, operands: Sequence[Operand]) -> bool:
    """Whether the first element of what is sliced is that of the slice, and others follow it in their order."""
    begin, strides = operands[1].constant, operands[3].constant
    if begin is None or strides is None or any(node.attr[mask].i for mask in _AXIS_MASKS if mask in node.attr):
        return False
    return begin.tolist() == [0] and strides.tolist() == [1]
