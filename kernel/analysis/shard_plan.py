"""Which ops of a step are computed shard by shard, where a variable is cut, and what else needs the variable whole."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.analysis.row_access import lookups_of
from autodist_py.kernel.analysis.shard_rules import WRITERS, Kind, Operand, Rule, Rules
from autodist_py.kernel.events import Lookup
from autodist_py.kernel.ir.graph import VARIABLE_OP, GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, Variable
from autodist_py.proto.strategy import VariableStrategy, shard_name

_BY_ENTRY = (Kind.ROWS, Kind.INDICES, Kind.POSITIONS)
"""What there is one of for each entry of a sparse gradient."""
_COUNTS = frozenset({"Shape", "Size"})
"""Op types for which the order of rows makes no difference."""


def marker_kinds(gradient: Gradient, axis: int) -> tuple[Kind, ...]:
    """What a shard's shares of the gradient's tensors are."""
    if not gradient.is_sparse:
        return (Kind.DENSE,)
    return Kind.INDICES, Kind.ROWS if axis == 0 else Kind.DENSE, Kind.SIZES


@dataclass(frozen=True, slots=True)
class Cut:
    """What is computed shard by shard, where a variable is cut, and its optimizer's state with it.

    Attributes:
        node: how the shards are trained.
        variables: all that are cut alike; the trained one is the first.
        gradients: of the trained one.
        kinds: what a shard's share of a tensor is, by the tensor's name.
        rules: the ops that are computed shard by shard.
        joined: those of them whose results others read whole: the shards' results, one after the other.
        repeated: those of them that are computed for the whole variable, too, for others.
        whole: those of the variables that others read whole: after which of its writes each is given its new value, in
            their order; the last are all.
        lookups: the ops that read rows of the trained one, where nothing else reads it.
    """

    node: VariableStrategy
    variables: tuple[Variable, ...]
    gradients: tuple[Gradient, ...]
    kinds: Mapping[str, Kind]
    rules: Mapping[str, Rule]
    joined: frozenset[str]
    repeated: frozenset[str]
    whole: Mapping[str, tuple[frozenset[str], ...]]
    lookups: tuple[Lookup, ...]

    @property
    def axis(self) -> int:
        return self.node.axis

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shards' sizes along the axis."""
        return self.node.sizes(self.variables[0].shape[self.axis])

    @property
    def markers(self) -> frozenset[str]:
        """The ops that pass on its gradients."""
        return frozenset(op_of(tensor) for gradient in self.gradients for tensor in gradient.tensors)

    @property
    def handles(self) -> frozenset[str]:
        return frozenset(variable.name for variable in self.variables)

    def readers(self, view: GraphView, handle: str) -> set[str]:
        """What uses one of the variables as a whole."""
        users = view.dataflow_consumers([handle])
        return users - self.rules.keys() | users & self.repeated


class CannotBeCutError(StrategyError):
    """A variable's update, or what reads it, does not allow that it is cut; `reason` says why."""

    def __init__(self, variable: str, why: str):
        self.reason = f"variable '{variable}' cannot be cut into shards: {why}"
        super().__init__(
            f"{self.reason}. Leave it whole, as PerVariable({{'{variable}': PS()}}, default=...) does, or give "
            "AutoDist(strict=False), which leaves whole what cannot be cut"
        )


@dataclass(frozen=True, slots=True)
class Captured:
    """What is asked of a captured graph for all variables that are cut.

    Attributes:
        program: before the first pass.
        markers: the ops that pass on gradients.
        forward: what gradients are computed from.
        statistics: the ops that pass on what is combined beside gradients.
    """

    program: Program
    markers: frozenset[str]
    forward: frozenset[str]
    statistics: frozenset[str]

    @classmethod
    def of(cls, program: Program) -> "Captured":
        """Of the program before its first pass."""
        view = program.analysis.captured
        markers = frozenset(op_of(tensor) for gradient in program.item.gradients for tensor in gradient.tensors)
        raw = (op_of(name) for marker in markers for name in view.nodes[marker].input)
        statistics = frozenset(op_of(statistic.tensor) for statistic in program.item.statistics)
        return cls(program, markers, frozenset(view.dataflow_ancestors(raw)), statistics)

    @property
    def view(self) -> GraphView:
        return self.program.analysis.captured

    def writers(self, handles: Iterable[str]) -> set[str]:
        """The ops that write one of these variables."""
        return {writer for handle in handles for writer in self.program.analysis.writes[handle]}


def cut_of(captured: Captured, node: VariableStrategy) -> Cut:
    """How the variable of `node` is cut.

    Raises:
        CannotBeCutError: its update, or what reads it, does not allow it; the message names the op.
    """
    trained = _Trained.of(captured.program, node)
    for index in range(node.num_shards):
        shard = shard_name(node.var_name, index)
        if shard in captured.view.nodes:
            raise trained.refusal(f"'{shard}' is there already; rename one of them")
    shares = _Shares(captured, trained, {node.var_name})
    while more := shares.written_alike():
        shares = _Shares(captured, trained, shares.handles | more)
    shares.require_separable()
    return _Others(captured, trained, shares).cut(node)


@dataclass(frozen=True, slots=True)
class _Trained:
    """The variable that is cut, as its shards are trained.

    Attributes:
        variable: the trained one.
        gradients: those of the variable.
        markers: for each op that passes on one of their tensors, what a shard's share of it is; where it has one row
            for each entry, also the key of the gradient whose entries they are.
        rules: how ops compute shares.
        state: the variables that may be its optimizer's state.
    """

    variable: Variable
    gradients: tuple[Gradient, ...]
    markers: Mapping[str, tuple[Kind, str]]
    rules: Rules
    state: frozenset[str]

    @classmethod
    def of(cls, program: Program, node: VariableStrategy) -> "_Trained":
        """The variable of `node`, in the program before its first pass."""
        variable = program.item.variable(node.var_name)
        gradients = program.item.gradients_of(node.var_name)
        markers = {
            op_of(tensor): (kind, gradient.key if kind in _BY_ENTRY else "")
            for gradient in gradients
            for tensor, kind in zip(gradient.tensors, marker_kinds(gradient, node.axis), strict=True)
        }
        trained = {gradient.variable for gradient in program.item.gradients}
        state = frozenset(
            one.name
            for one in program.item.variables
            if one.shape == variable.shape and one.name not in trained and one.name in program.analysis.writes
        )
        return cls(variable, gradients, markers, Rules(variable.shape, node.axis), state)

    def refusal(self, why: str) -> CannotBeCutError:
        return CannotBeCutError(self.variable.name, why)


class _Shares:
    """What is computed shard by shard, where given variables are cut.

    Attributes:
        handles: the variables that are cut.
        kinds: what a shard's share of a tensor is, by the tensor's name.
        rules: the ops that are computed shard by shard.
    """

    def __init__(self, captured: Captured, trained: _Trained, handles: set[str]):
        self._captured, self._trained, self.handles = captured, trained, handles
        self.kinds: dict[str, Kind] = {marker: kind for marker, (kind, _) in trained.markers.items()}
        self.rules: dict[str, Rule] = {}
        self._entries: dict[str, str] = {marker: entries for marker, (_, entries) in trained.markers.items()}
        """Which entries a tensor is of, or is the number of."""
        self._mixing: list[str] = []
        """The ops that read shares, and mix those of several shards."""
        self._infer()

    def with_share(self, names: Collection[str], reader: str) -> Iterator[tuple[str, str]]:
        """Those of the inputs that shards have shares of, each with its reader."""
        found = (str(parse(name)) for name in names if not name.startswith("^"))
        return ((name, reader) for name in found if name in self.kinds)

    def _infer(self) -> None:
        view, nodes = self._captured.view, self._captured.view.nodes
        writers = self._captured.writers(self.handles | self._trained.state)
        leading = view.dataflow_ancestors(writers, blocked=self._captured.markers)
        ours = (view.dataflow_consumers(self.handles) & leading) - self._captured.forward
        reached = view.dataflow_descendants(self._trained.markers.keys() | ours)
        for op in view.dataflow_order(reached):
            if op in self._trained.markers:
                continue
            data = [name for name in nodes[op].input if not name.startswith("^")]
            operands = [self._operand(name, is_ours=op in ours) for name in data]
            if all(operand.kind is None for operand in operands):
                continue
            # A statistic is combined over replicas whole.
            is_statistic = op in self._captured.statistics
            rule = None if is_statistic else self._trained.rules.of(nodes[op], operands, view.shapes[op])
            if rule is None:
                self._mixing.append(op)
                continue
            self.rules[op] = rule
            for index, kind in enumerate(rule.kinds):
                tensor = str(parse(f"{op}:{index}"))
                self.kinds[tensor] = kind
                if kind in (*_BY_ENTRY, Kind.SIZES):
                    self._entries[tensor] = self._entries_of(op, index, data, operands)

    def _entries_of(self, op: str, index: int, data: Sequence[str], operands: Sequence[Operand]) -> str:
        """Which entries a result of the op is of, or is the number of: those that it reads, or their distinct ones."""
        node = self._captured.view.nodes[op]
        if node.op == "Unique" and index == 0:
            return op
        if node.op == "UnsortedSegmentSum":
            return op_of(data[1])
        if node.op == "ConcatV2":
            return " ".join(operand.entries for operand in operands[:-1])
        return next((operand.entries for operand in operands if operand.entries), "")

    def _operand(self, name: str, *, is_ours: bool) -> Operand:
        tensor = parse(name)
        kind = self.kinds.get(str(tensor))
        if is_ours and tensor.op in self.handles:
            kind = Kind.HANDLE
        if kind is None and self._captured.view.nodes[tensor.op].op == VARIABLE_OP:
            return Operand(None, tf.TensorShape(None))  # No number, though a handle's own shape is that of one.
        constant = self._captured.view.constant(name) if kind is None else None
        shape = self._captured.view.shapes[tensor.op][tensor.output]
        if kind is Kind.DENSE and shape.rank is None:  # As of a gradient that leaves a loop of TensorFlow 1.
            shape = tf.TensorShape([None] * len(self._trained.variable.shape))
        return Operand(kind, shape, constant, self._entries.get(str(tensor), ""))

    def written_alike(self) -> set[str]:
        """Further variables, of the same shape, that are written shard by shard."""
        found = set()
        for op in self._mixing:
            node = self._captured.view.nodes[op]
            data = [op_of(name) for name in node.input if not name.startswith("^")]
            has_share = any(self._operand(name, is_ours=False).kind for name in node.input if not name.startswith("^"))
            if node.op not in WRITERS or not has_share:
                continue
            for handle in data:
                if self._captured.view.nodes[handle].op != VARIABLE_OP or handle in self.handles:
                    continue
                if self._captured.program.item.variable(handle).shape == self._trained.variable.shape:
                    found.add(handle)
        trained = sorted(found & {gradient.variable for gradient in self._captured.program.item.gradients})
        if trained:
            raise self._trained.refusal(f"its update also writes '{trained[0]}', which has a gradient of its own")
        return found

    def require_separable(self) -> None:
        """Each write is of shards; what leads to it may be computed whole, of what shards bring together."""
        writers = self._captured.writers(self.handles) - self.rules.keys()
        leading = self._captured.view.dataflow_ancestors(writers, blocked=self._captured.markers)
        for op in [one for one in self._mixing if one in leading] or sorted(writers):
            what = f"'{op}' ({self._captured.view.nodes[op].op})"
            if op in self._captured.program.cuts.whole_branches:
                raise self._trained.refusal(
                    f"its update is in the branch {what}, which cannot be taken apart: "
                    f"{self._captured.program.cuts.whole_branches[op]}"
                )
            raise self._trained.refusal(
                f"its update uses {what}, of which a shard's part is not computed of that shard alone"
            )


class _Others:
    """What others read of a variable that is cut, and of what is computed shard by shard."""

    def __init__(self, captured: Captured, trained: _Trained, shares: _Shares):
        self._captured, self._trained, self._shares = captured, trained, shares
        self._program, self._view = captured.program, captured.view

    def cut(self, node: VariableStrategy) -> Cut:
        """How the variable of `node` is cut, given what others read.

        Raises:
            CannotBeCutError: they read what shards cannot give.
        """
        rules, handles, name = self._shares.rules, self._shares.handles, node.var_name
        joined, repeated = self._needed_whole()
        users = {handle: self._view.dataflow_consumers([handle]) - rules.keys() for handle in handles}
        read_of = {handle: self._view.dataflow_consumers([handle]) & repeated for handle in handles}
        read = {handle for handle, those in read_of.items() if those}
        whole = {handle for handle, those in users.items() if those} | read
        lookups: tuple[Lookup, ...] = ()
        if name in whole - read and node.axis == 0 and not _has_proxy(node):
            lookups = lookups_of(self._program, name, rules.keys())
            if lookups or all(self._view.nodes[user].op == "VariableShape" for user in users[name]):
                whole.remove(name)
        return Cut(
            node=node,
            variables=(self._trained.variable, *map(self._program.item.variable, sorted(handles - {name}))),
            gradients=self._trained.gradients,
            kinds=self._shares.kinds,
            rules=rules,
            joined=frozenset(joined),
            repeated=frozenset(repeated),
            whole={handle: self._renewals(handle, users[handle] | read_of[handle]) for handle in sorted(whole)},
            lookups=lookups,
        )

    def _needed_whole(self) -> tuple[set[str], set[str]]:
        """The ops whose results are joined, and those that are repeated, for others."""
        joined: set[str] = set()
        repeated: set[str] = set()
        pending = list(self._read_by_others())
        while pending:
            tensor, reader = pending.pop()
            op = op_of(tensor)
            is_count = reader in self._view.nodes and self._view.nodes[reader].op in _COUNTS
            if self._shares.kinds[tensor] in _BY_ENTRY and not is_count:
                user = f"'{reader}'" if reader else "a result"
                raise self._trained.refusal(
                    f"{user} is made of rows of its gradient, which shards have in another order"
                )
            if op in self._trained.markers or op in joined | repeated:
                continue
            inputs, rule = self._view.nodes[op].input, self._shares.rules[op]
            if rule.kinds == (Kind.DENSE,) and not self._shares.handles.intersection(map(op_of, inputs)):
                joined.add(op)
            else:
                repeated.add(op)
                pending += self._shares.with_share(inputs, op)
        return joined, repeated

    def _read_by_others(self) -> Iterator[tuple[str, str]]:
        """The tensors with shares that are read by what is not computed shard by shard, and the op; "": a result."""
        for output in self._program.item.outputs:
            yield from self._shares.with_share([output.tensor], "")
        for op in sorted(self._view.dataflow_consumers(map(op_of, self._shares.kinds)) - self._shares.rules.keys()):
            yield from self._shares.with_share(self._view.nodes[op].input, op)

    def _renewals(self, handle: str, readers: Collection[str]) -> tuple[frozenset[str], ...]:
        """After which of its writes the variable is given its new value: those before each that reads it, and all."""
        graph, writers = self._view.digraph, frozenset(self._captured.writers([handle]))
        found = {writers}
        if len(writers) > 1:
            before: set[str] = set().union(*(nx.ancestors(graph, writer) for writer in writers))
            for op in sorted(before.intersection(readers)):
                behind: set[str] = nx.ancestors(graph, op)
                own = writers & behind
                if any(not own <= other and not other <= own for other in found):
                    raise self._trained.refusal(f"'{op}' reads '{handle}' between writes that have no order")
                found |= {own} if own else set()
        return tuple(sorted(found, key=len))


def _has_proxy(node: VariableStrategy) -> bool:
    return any(one.as_ps and one.as_ps.local_replication for one in node.synchronizers)
