"""A branch taken apart: its ops are computed in each step, and its writes leave alone what they would not write.

It owns which ops may be computed though their branch is not taken, and how a write is made one that chooses. Which
branches are taken apart is the business of the pass (`passes/unbranch.py`).
"""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import tensorflow as tf

from autodist_py.kernel.analysis.shard_rules import ELEMENT_WISE, REDUCTIONS, WRITERS
from autodist_py.kernel.ir.graph import VARIABLE_OP, GraphView, functions_of
from autodist_py.kernel.ir.names import TensorName, op_of
from autodist_py.kernel.ir.node import Attribute, controls_of, node
from autodist_py.kernel.ir.tf_adapter import argument_names, is_stateful, result_index

BRANCHES = frozenset({"If", "StatelessIf"})

_READS = frozenset({"ReadVariableOp", "ResourceGather"})
_ADDS = frozenset({"AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd", "ResourceScatterSub"})
"""Op types that write by adding, to which adding 0 changes nothing."""
_INDICES = ("indices", "segment_ids")
"""What TensorFlow calls the inputs of ops that fail where an index is out of its range."""
_OF_INDICES = frozenset({"Cast", "ConcatV2", "ExpandDims", "Identity", "Reshape", "Unique"})
"""Op types that make of indices in a range indices in that range."""
_DIVIDES = frozenset({"Div", "FloorDiv", "FloorMod", "Pow", "RealDiv", "TruncateDiv", "TruncateMod"})
"""Op types that fail for some integers."""
_COMPUTES = (
    ELEMENT_WISE - {"CheckNumerics"}
    | REDUCTIONS.keys()
    | _DIVIDES
    | _OF_INDICES
    | {
        "ArgMax",
        "ArgMin",
        "BatchMatMulV2",
        "BroadcastTo",
        "Const",
        "Einsum",
        "Fill",
        "GatherV2",
        "MatMul",
        "Mean",
        "NoOp",
        "Pack",
        "Prod",
        "Range",
        "Rank",
        "Shape",
        "Size",
        "Slice",
        "Squeeze",
        "StridedSlice",
        "Transpose",
        "UnsortedSegmentSum",
    }
)
"""Op types that compute something whatever values they are given, but for what is said above."""


class StaysWholeError(Exception):
    """A branch cannot be taken apart; the message says why."""


@dataclass(frozen=True, slots=True)
class Use:
    """An op that uses a variable."""

    handle: str
    op: str
    writes: bool


@dataclass(frozen=True, slots=True)
class Apart:
    """What stands in the place of a branch.

    Attributes:
        nodes: its ops; one of the branch's own name waits for all.
        results: the tensors in the place of its results.
        uses: the ops that use variables.
    """

    nodes: Sequence[tf.compat.v1.NodeDef]
    results: Sequence[str]
    uses: Sequence[Use]


def take_apart(
    view: GraphView, branch: tf.compat.v1.NodeDef, *, scope: str, sure: Collection[str], read: Collection[str]
) -> Apart:
    """The ops of both sides of the `branch`, named `scope/...`, each of which is computed in each step.

    Case 1: an op that computes something does so whether its side is taken or not.
    Case 2: a write of a value writes what is there already if its side is not taken, and one that adds adds 0.
    Case 3: after any other write (an optimizer's own op) the variables are given the values that they had before.
    Case 4: a result is chosen of those of both sides.

    What is on the second side uses a variable after the first, and everything after what the branch waits for.

    Args:
        view: the captured graph.
        branch: of a type of `BRANCHES`.
        scope: for the names of the ops, but for the one of the branch's name.
        sure: ops of indices that are in their range, as they were looked up.
        read: the tensors of the graph that something reads.

    Raises:
        StaysWholeError: an op may fail, or do something, where its side is not taken; or a result's shape may differ.
    """
    inlined = _Inlined(view, sure)
    data = [name for name in branch.input if not name.startswith("^")]
    waits = controls_of(branch)
    results = inlined.add_branch(branch, data, waits, scope, condition=None)
    inlined.add_waits(view.ancestors([branch.name]) - {branch.name})
    used = [result for at, result in enumerate(results) if str(TensorName(branch.name, at)) in read]
    end = node("NoOp", branch.name, controls=inlined.last_uses() or waits, like=branch)
    inlined.require_harmless(map(op_of, (*used, *end.input)))
    return Apart([*inlined.nodes.values(), end], results, inlined.uses)


class _Inlined:
    """The ops of a branch, in the graph around it.

    Attributes:
        nodes: by name.
        uses: of variables.
    """

    def __init__(self, view: GraphView, sure: Collection[str]):
        self._view, self._sure = view, sure
        self.nodes: dict[str, tf.compat.v1.NodeDef] = {}
        self.uses: list[Use] = []
        self._kept: list[tuple[str, str, str]] = []
        """The reads of what a write may leave as it is, each with the variable and the op that writes it."""
        self._flaws: dict[str, str] = {}
        """For ops that may not be computed where their side is not taken: why."""

    def add_branch(
        self,
        node: tf.compat.v1.NodeDef,
        data: Sequence[str],
        waits: Sequence[str],
        scope: str,
        condition: str | None,
    ) -> list[str]:
        """Add both sides, of a branch that is itself on a side which is taken if `condition`; its results."""
        if tf.as_dtype(node.attr["Tcond"].type) is not tf.bool:
            raise StaysWholeError(f"'{node.name}' ({node.op}) is decided by what is no truth value")
        functions = dict(functions_of(node))
        taken = self._add("Reshape", f"{scope}/taken", [data[0], self._shape(scope)], T=tf.bool, Tshape=tf.int32)
        not_taken = self._add("LogicalNot", f"{scope}/not_taken", [taken])
        first = len(self.uses)
        then = self._add_side(functions["then_branch"], data[1:], waits, f"{scope}/then", self._both(condition, taken))
        between = len(self.uses)
        other = self._add_side(
            functions["else_branch"], data[1:], waits, f"{scope}/else", self._both(condition, not_taken)
        )
        for one, late in product(self.uses[first:between], self.uses[between:]):
            if one.handle == late.handle and (one.writes or late.writes):
                self.nodes[late.op].input.append(f"^{one.op}")
        ends = [f"^{op}" for op in self.last_uses(first)]
        return [
            self._result(node, at, f"{scope}/result_{at}", (taken, *both), ends)
            for at, both in enumerate(zip(then, other, strict=True))
        ]

    def last_uses(self, first: int = 0) -> list[str]:
        """Those uses from the `first` on for which no other of them waits: who waits for these waits for all."""
        ops = [use.op for use in self.uses[first:]]
        waited_for = self._behind(op_of(name) for op in ops for name in self.nodes[op].input)
        return [op for op in ops if op not in waited_for]

    def add_waits(self, before: Collection[str]) -> None:
        """What uses a variable waits for what uses it `before` the branch, and what a write keeps for earlier writes.

        The branch may have waited for that through its predicate, or another input, alone; and a write through what it
        writes.
        """
        for use in self.uses:
            users = self._view.dataflow_consumers([use.handle]) & set(before)
            if not use.writes:
                users &= set(self._view.writes[use.handle])
            self._wait(use.op, users)
        writers: dict[str, set[str]] = {}
        for use in self.uses:
            writers.setdefault(use.handle, set()).update({use.op} if use.writes else ())
        for read, handle, writer in self._kept:
            self._wait(read, writers[handle] & self._behind([writer]) - {writer})

    def _wait(self, op: str, others: Collection[str]) -> None:
        node = self.nodes[op]
        node.input.extend(sorted({f"^{other}" for other in others} - set(node.input)))

    def _behind(self, ends: Iterable[str]) -> set[str]:
        """What `ends` need, of the branch's ops."""
        pending, found = list(ends), set[str]()
        while pending:
            op = pending.pop()
            if op not in found and op in self.nodes:
                found.add(op)
                pending += map(op_of, self.nodes[op].input)
        return found

    def require_harmless(self, ends: Iterable[str]) -> None:
        """Refuse what is needed for `ends`, or does something by itself, and may not be computed in each step."""
        needed = self._behind(ends)
        for op, why in self._flaws.items():
            if op in needed or is_stateful(self.nodes[op]):
                raise StaysWholeError(why)

    # -- One side -----------------------------------------------------------------------------------------------------

    def _add_side(
        self, function_name: str, arguments: Sequence[str], waits: Sequence[str], scope: str, condition: str
    ) -> list[str]:
        """Add the ops of a side, which is taken if `condition`; its results."""
        function = self._view.library[function_name]
        given = dict(zip((one.name for one in function.signature.input_arg), arguments, strict=True))
        types = {one.name: one for one in function.node_def}
        for one in function.node_def:
            if one.op in self._view.library:
                raise StaysWholeError(f"'{one.name}' of the branch calls the function '{one.op}'")

        def here(name: str) -> str:
            if name.startswith("^"):
                return f"^{scope}/{name[1:]}" if name[1:] in types else f"^{op_of(given[name[1:]])}"
            if name in given:
                return given[name]
            op, argument, number = name.split(":")
            if types[op].op in BRANCHES or types[op].op == "IdentityN":
                return f"{scope}/{op}/result_{number}"
            return str(TensorName(f"{scope}/{op}", result_index(types[op], argument) + int(number)))

        for original in function.node_def:
            names = [here(name) for name in original.input]
            data = [name for name in names if not name.startswith("^")]
            controls = [name for name in names if name.startswith("^")]
            self._add_op(original, f"{scope}/{original.name}", data, controls, waits, condition)
        return [here(function.ret[one.name]) for one in function.signature.output_arg]

    def _add_op(
        self,
        original: tf.compat.v1.NodeDef,
        name: str,
        data: Sequence[str],
        controls: Sequence[str],
        waits: Sequence[str],
        condition: str,
    ) -> None:
        if original.op in BRANCHES:
            first = len(self.uses)
            self.add_branch(original, data, [*waits, *controls], name, condition)
            ends = [f"^{op}" for op in self.last_uses(first)] or controls
            self._add("NoOp", name, list(dict.fromkeys(ends)))
            return
        if original.op == "IdentityN":
            types = original.attr["T"].list.type
            results = [
                self._add("Identity", f"{name}/result_{at}", [one, *controls], T=tf.as_dtype(types[at]))
                for at, one in enumerate(data)
            ]
            self._add("NoOp", name, [f"^{result}" for result in results])
            return
        node = copy.deepcopy(original)
        node.name = name
        for key in [key for key in node.attr if key.startswith("_")]:
            del node.attr[key]
        del node.input[:]
        handles = [one for one in data if op_of(one) in self._view.writes]
        if not handles:
            node.input.extend([*data, *controls])
            self.nodes[name] = node
            self._judge(node, original.name)
            return
        node.input.extend([*data, *dict.fromkeys([*controls, *waits])])
        if original.op in _READS:
            self._use(node, handles[0])
            self._judge(node, original.name)
        elif original.op in WRITERS:
            self._judge(node, original.name)
            self._write(node, handles, data, condition)
        else:
            raise StaysWholeError(f"'{original.name}' ({original.op}) of the branch may write '{handles[0]}'")

    def _write(
        self, writing: tf.compat.v1.NodeDef, handles: Sequence[str], data: Sequence[str], condition: str
    ) -> None:
        name, dtype = writing.name, tf.as_dtype(self._view.nodes[handles[0]].attr["dtype"].type)
        if writing.op in _ADDS:
            zeros = self._add("ZerosLike", f"{name}/nothing", [data[-1]], T=dtype)
            writing.input[len(data) - 1] = self._select(f"{name}/chosen", [condition, data[-1], zeros], dtype)
            self._use(writing, handles[0], writes=True)
            return
        waits = controls_of(writing)
        before = [self._read(f"{name}/before_{at}", handle, waits) for at, handle in enumerate(handles)]
        writer = name if writing.op == "AssignVariableOp" else f"{name}/applied"
        self._kept += ((read, handle, writer) for read, handle in zip(before, handles, strict=True))
        if writing.op == "AssignVariableOp":
            writing.input[1] = self._select(f"{name}/chosen", [condition, data[1], before[0]], dtype)
            self._use(writing, handles[0], writes=True)
            return
        applied = writing.name = writer
        writing.input.extend(f"^{read}" for read in before)
        self.nodes[applied] = writing
        self.uses += (Use(handle, applied, writes=True) for handle in handles)
        ends = []
        for at, (handle, old) in enumerate(zip(handles, before, strict=True)):
            own = tf.as_dtype(self._view.nodes[handle].attr["dtype"].type)
            new = self._read(f"{name}/after_{at}", handle, [f"^{applied}"])
            value = self._select(f"{name}/chosen_{at}", [condition, new, old], own)
            assign = node("AssignVariableOp", f"{name}/kept_{at}", [handle, value], like=writing, dtype=own)
            self._use(assign, handle, writes=True)
            ends.append(f"^{assign.name}")
        self._add("NoOp", name, ends)

    def _read(self, name: str, handle: str, waits: Sequence[str]) -> str:
        dtype = self._view.nodes[handle].attr["dtype"]
        self._use(node("ReadVariableOp", name, [handle], controls=waits, dtype=dtype), handle)
        return name

    def _use(self, user: tf.compat.v1.NodeDef, handle: str, *, writes: bool = False) -> None:
        self.nodes[user.name] = user
        self.uses.append(Use(handle, user.name, writes))

    # -- Ops ----------------------------------------------------------------------------------------------------------

    def _add(self, op: str, name: str, inputs: Sequence[str] = (), **attributes: Attribute) -> str:
        self.nodes[name] = node(op, name, inputs, controls=(), **attributes)
        return name

    def _shape(self, scope: str) -> str:
        """That of one truth value."""
        return self._add("Const", f"{scope}/one", dtype=tf.int32, value=np.zeros(0, np.int32))

    def _both(self, condition: str | None, other: str) -> str:
        if condition is None:
            return other
        return self._add("LogicalAnd", f"{other}_here", [condition, other])

    def _select(self, name: str, inputs: Sequence[str], dtype: tf.DType) -> str:
        return self._add("SelectV2", name, inputs, T=dtype)

    def _result(
        self, node: tf.compat.v1.NodeDef, at: int, name: str, inputs: Sequence[str], ends: Sequence[str]
    ) -> str:
        """A result of a branch, which is there when all of the branch is done."""
        dtype = tf.as_dtype(node.attr["Tout"].list.type[at])
        chosen = self._select(f"{name}/chosen", inputs, dtype)
        shapes: Sequence[tf.compat.v1.NodeDef] = node.attr["output_shapes"].list.shape
        if len(shapes) <= at or not tf.TensorShape(shapes[at]).is_fully_defined():
            self._flaws[chosen] = f"result {at} of '{node.name}' ({node.op}) may have another shape on either side"
        elif dtype in (tf.resource, tf.variant):
            self._flaws[chosen] = f"result {at} of '{node.name}' ({node.op}) is no tensor of numbers"
        return self._add("Identity", name, [chosen, *dict.fromkeys(ends)], T=dtype)

    def _judge(self, node: tf.compat.v1.NodeDef, original: str) -> None:
        """Note why the op may not be computed where its side is not taken."""
        what = f"'{original}' ({node.op}) of the branch"
        if node.op not in _COMPUTES | _READS | WRITERS:
            self._flaws[node.name] = f"{what} might fail, or do something, where the branch is not taken"
        elif node.op in _DIVIDES and tf.as_dtype(node.attr["T"].type).is_integer and not self._is_not_0(node.input[1]):
            self._flaws[node.name] = f"{what} fails where it divides by 0, as it might where the branch is not taken"
        elif not all(map(self._is_in_range, self._indices(node))):
            self._flaws[node.name] = f"{what} might look for what is not there, where the branch is not taken"

    @staticmethod
    def _indices(node: tf.compat.v1.NodeDef) -> list[str]:
        return [node.input[at] for at, one in enumerate(argument_names(node)) if one in _INDICES]

    def _node(self, tensor: str) -> tf.compat.v1.NodeDef:
        op = op_of(tensor)
        return self.nodes[op] if op in self.nodes else self._view.nodes[op]

    def _is_not_0(self, tensor: str) -> bool:
        node = self._node(tensor)
        while node.op in ("Cast", "Identity"):
            node = self._node(node.input[0])
        return node.op == "Const" and bool(np.all(np.asarray(tf.make_ndarray(node.attr["value"].tensor)) > 0))

    def _is_in_range(self, tensor: str) -> bool:
        """Whether these are indices, or places among distinct ones, that were looked up before."""
        node = self._node(tensor)
        if node.name in self._sure:
            return True
        data = [name for name in node.input if not name.startswith("^")]
        if node.op == "ConcatV2":
            return all(map(self._is_in_range, data[:-1]))
        return node.op in _OF_INDICES and self._is_in_range(data[0])


def used_variables(view: GraphView, node: tf.compat.v1.NodeDef) -> Mapping[str, bool]:
    """The variables that the branch uses, and whether it writes each."""
    data = (op_of(name) for name in node.input if not name.startswith("^"))
    return {one: node.name in view.writes[one] for one in data if view.nodes[one].op == VARIABLE_OP}
