"""A program as text, complete: `format_program` has lines for every field of a `Program`.

Unfolded, it is read back by the tests as an equal program, but for the numbers of large constants and the bodies of
functions. The ops of a fragment are one line, unless they are to be unfolded: what it is, how many ops it has, a digest
of their own lines, what they read from outside, and what is read of them there.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import tensorflow as tf

from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.message_layout import MessageLayout
from autodist_py.kernel.ir.names import KERNEL_SCOPE, op_of
from autodist_py.kernel.ir.tf_adapter import own_attributes
from autodist_py.kernel.printer import format_attribute, format_schedule, printed_order, short_name
from autodist_py.kernel.program import Invariant, Program, ServerFunction, ServerProgram

_ITEM_PARTS = frozenset({"graph_def", "inputs", "variables", "gradients", "statistics", "outputs"})
_FOLDED_OPS = 3
"""So many ops of one scope are folded."""


def format_program(program: Program, *, unfolded: bool = False) -> str:
    """All of the program, as lines.

    Args:
        program: the program.
        unfolded: whether each op of the kernel's fragments has a line.
    """
    scopes = {} if unfolded else _scopes(program)
    lines: list[str] = []
    for field, texts in FIELDS.items():
        lines += _graph_lines(program.graph, scopes) if field == "graph" else texts(program)
        if field == "lowered.servers":
            lines += (line for one in program.lowered.servers for line in _server(one, unfolded=unfolded))
    return "\n".join(lines)


# -- Graphs -----------------------------------------------------------------------------------------------------------


def format_op(node: tf.compat.v1.NodeDef) -> str:
    """`name = Op(input, ^control) {attribute} @device`, with all attributes that are not what the type has anyway."""
    attributes = ", ".join(f"{key}={format_attribute(value)}" for key, value in own_attributes(node).items())
    inputs = ", ".join(map(short_name, node.input))
    shown = f" {{{attributes}}}" if attributes else ""
    return f"{node.name} = {node.op}({inputs}){shown}" + (f" @{node.device}" if node.device else "")


def _scopes(program: Program) -> dict[str, str]:
    """The scopes of fragments, each with what it is."""
    found = {f"{KERNEL_SCOPE}/{one.name}": f"Exchange[{one.server}]" for one in program.lowered.channels}
    for event in program.schedule.events:
        scope = getattr(event, "scope", None)
        if scope is not None:
            found[scope] = f"{type(event).__name__}[{event.engine}]"
    return found


def _graph_lines(graph: GraphView, scopes: Mapping[str, str] | None) -> Iterator[str]:
    """A line for each op, or fragment; `scopes` says what some fragments are; None: nothing is folded."""
    members: dict[str, list[str]] = {}
    for name in printed_order(graph):
        members.setdefault(_scope_of(name, scopes) if scopes else name, []).append(name)
    for scope, names in members.items():
        if len(names) < _FOLDED_OPS:
            yield from (format_op(graph.nodes[name]) for name in names)
        else:
            yield _folded(graph, scope, names, (scopes or {}).get(scope, "Fragment"))


def _scope_of(name: str, scopes: Mapping[str, str]) -> str:
    """The fragment that the op is of; its own name, if of none."""
    if not name.startswith(f"{KERNEL_SCOPE}/"):
        return name
    scope = name.rpartition("/")[0]
    while scope and scope not in scopes:
        scope = scope.rpartition("/")[0]
    return scope or "/".join(name.split("/")[:2])


def _folded(graph: GraphView, scope: str, names: list[str], what: str) -> str:
    own = set(names)
    text = "\n".join(format_op(graph.nodes[name]) for name in names)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    read = (one for name in names for one in graph.nodes[name].input if op_of(one) not in own)
    inputs = ", ".join(dict.fromkeys(map(short_name, read)))
    users = graph.users(own)
    gives = [name.removeprefix(f"{scope}/") for name in names if any(user not in own for user in users[name])]
    devices = " ".join(dict.fromkeys(f"@{graph.nodes[name].device}" for name in names if graph.nodes[name].device))
    given = f" gives {', '.join(gives)}" if gives else ""
    return f"{scope} = {what} of {len(names)} ops {digest} ({inputs}){given} {devices}".rstrip()


# -- Fields -----------------------------------------------------------------------------------------------------------


def _item(program: Program) -> Iterator[str]:
    item = program.item
    yield f"item {_value(item, but=_ITEM_PARTS)}".rstrip()
    yield from (f"input {_value(one)}" for one in item.inputs)
    yield from (f"variable {_value(one)}" for one in item.variables)
    yield from (f"gradient {_value(one)}" for one in item.gradients)
    yield from (f"statistic {_value(one)}" for one in item.statistics)
    yield from (f"output {_value(one)}" for one in item.outputs)


def _value(one: Any, *, but: Collection[str] = ()) -> str:
    """The fields of a value that are not what they are by default; of bytes how many there are."""
    given = ((field, getattr(one, field.name)) for field in fields(one) if field.init and field.name not in but)
    shown = ((field.name, value) for field, value in given if value != field.default)
    return ", ".join(f"{name}={f'<{len(v)} bytes>' if isinstance(v, bytes) else repr(v)}" for name, v in shown)


def _strategy(program: Program) -> Iterator[str]:
    for node in program.strategy.node_config:
        own = node.synchronizer
        if node.shards or own is None:
            yield f"strategy {_value(node)}"
        else:
            yield f"strategy {node.var_name}: {type(own).__name__}({_value(own)})"


def _topology(program: Program) -> Iterator[str]:
    own = program.topology
    yield f"worker {own.worker}, replicas {', '.join(program.strategy.replicas)}" + (", apart" if own.cluster else "")
    yield from (
        f"replica {one.index} on worker {one.worker} {one.device}" + ("" if one.trains else " trains not")
        for one in own.everyone
    )
    yield from (f"server {device}: worker {rank}" for device, rank in own.servers.items())


def _schedule(program: Program) -> Iterator[str]:
    yield from format_schedule(program.schedule).splitlines()
    yield from (f"held {name} by worker {rank}" for name, rank in program.held.items())
    yield f"refreshed {_names(sorted(program.refreshed))}"
    yield from (f"first {first}, then {rival}" for first, rival in program.schedule.computed_first)


def _server(one: ServerProgram, *, unfolded: bool) -> Iterator[str]:
    yield (
        f"server program {one.channel.name}: {one.num_messages} messages, each {one.each}, "
        f"takes {_names(one.taken)}, keeps {_names(one.kept)}"
    )
    for what, function in (("update", one.update), ("answer", one.answer)):
        yield from (f"  {what} {line}" for line in _function(function, unfolded=unfolded))


def _function(function: ServerFunction, *, unfolded: bool) -> Iterator[str]:
    yield f"takes {_specs(function.takes, [''] * len(function.takes))}"
    yield from _graph_lines(function.graph, None if unfolded else {"": ""})
    yield f"gives {_names(function.gives)}"
    yield from (f"run {name}" for name in function.run_ops)


def _layout(layout: MessageLayout) -> str:
    return _specs(layout.tensors, [f" {join}" for join in layout.joins])


def _specs(specs: Sequence[TensorSpec], ends: Sequence[str]) -> str:
    shown = (
        f"{spec.name or 'nothing'} {spec.dtype.name}{tf.TensorShape(spec.shape)}{end}"
        for spec, end in zip(specs, ends, strict=True)
    )
    return "; ".join(shown) or "nothing"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


FIELDS: Mapping[str, Callable[[Program], Iterable[str]]] = {
    "item": _item,
    "strategy": _strategy,
    "topology": _topology,
    "options": lambda program: [str(program.options)],
    "graph": lambda program: (),  # By `_graph_lines`.
    "fetches": lambda program: (f"fetch {name}" for name in program.fetches),
    "run_ops": lambda program: (f"run {name}" for name in program.run_ops),
    "cuts.shards": lambda program: map(str, program.cuts.shards),
    "cuts.part_of": lambda program: (f"part {part} of {whole}" for part, whole in program.cuts.part_of.items()),
    "cuts.left_whole": lambda program: (f"whole {name}: {why}" for name, why in program.cuts.left_whole.items()),
    "cuts.whole_branches": lambda program: (
        f"branch {name}: {why}" for name, why in program.cuts.whole_branches.items()
    ),
    "replication.shared": lambda program: [f"shared {_names(sorted(program.replication.shared))}"],
    "replication.batch": lambda program: [f"batch {program.replication.batch}"],
    "schedule": _schedule,
    "lowered.collectives": lambda program: (
        f"collective of event {one.event}, {one.nbytes} bytes{', by name' if one.by_name else ''}: {_names(one.ops)}"
        for one in program.lowered.collectives
    ),
    "lowered.pieces": lambda program: (f"pieces of {op}: {_names(own)}" for op, own in program.lowered.pieces.items()),
    "lowered.channels": lambda program: (
        f"channel {one.name} of server {one.server}{', counts' if one.counts else ''}: "
        f"sent {_layout(one.sent)} | answered {_layout(one.answered)}"
        for one in program.lowered.channels
    ),
    "lowered.servers": lambda program: (),  # By `_server`.
    "lowered.compressor_states": lambda program: (
        f"state {one.name} of {one.owner} by {one.op}: {one.slot.dtype.name}{list(one.slot.shape)}"
        for one in program.lowered.compressor_states
    ),
    "holds": lambda program: [f"holds {_names(one.name for one in Invariant if one in program.holds)}"],
    "lowered.next_instance_key": lambda program: [f"next instance key {program.lowered.next_instance_key}"],
}
"""By field of a program, and of its parts, its lines. What is known of the captured graph is made of it."""
