"""A program's complete text, read back: `parse_program`.

What a program derives from its other fields (its schedule, from the captured item, the strategy, the topology and the
options) is derived again, and compared with what the text says.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist_py.kernel.events import Collective, Schedule
from autodist_py.kernel.ir.dataflow import analyse
from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.message_layout import MessageLayout
from autodist_py.kernel.ir.state import CompressorState, Slot
from autodist_py.kernel.program import (
    Batch,
    Channel,
    Cuts,
    Invariant,
    Lowered,
    Options,
    Program,
    Replication,
    ServerFunction,
    ServerProgram,
    Shards,
)
from autodist_py.kernel.schedule import schedule
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.proto import compressors, synchronizers
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Output, Statistic, Variable
from autodist_py.proto.strategy import Strategy, VariableStrategy

_OP = re.compile(r"(?P<name>\S+) = (?P<op>\w+)\((?P<inputs>[^)]*)\)(?: \{(?P<attributes>.*)\})?(?: @(?P<device>\S+))?")
_SPEC = re.compile(r"(?P<name>\S+) (?P<dtype>\w+)(?P<shape>\(.*?\)|<unknown>)(?: (?P<join>\w+))?")
_WORDS = {**vars(compressors), **vars(synchronizers), "dict": dict} | {
    kind.__name__: kind
    for kind in (VariableStrategy, Options, Batch, Shards, Input, Variable, Gradient, Statistic, Output)
}
_ITEM = {"input": Input, "variable": Variable, "gradient": Gradient, "statistic": Statistic, "output": Output}


class TextError(ValueError):
    """A line is none of a program's, or does not say all that the program has."""


@dataclass(slots=True)
class _Read:
    """What has been read so far: by the first word of a line, what lines that begin so say."""

    lines: dict[str, list[str]] = field(default_factory=dict)
    ops: list[tf.compat.v1.NodeDef] = field(default_factory=list)
    servers: list[list[str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return self.lines.get(word, [])


def parse_program(text: str, captured: GraphItem | None = None) -> Program:
    """The program of which `text` is the complete, unfolded text.

    Args:
        text: the text.
        captured: the item whose graph was the program's before it was replicated; None: it is not yet.

    Raises:
        TextError: a line says something else than the others, or less than is needed.
    """
    read = _Read()
    for line in text.splitlines():
        _sort(line, read)
    graph = GraphView(_graph_def(read.ops))
    holds = frozenset(Invariant[name] for name in _names(read.of("holds")[0]))
    item = _item(read, graph.graph_def() if captured is None else tf.compat.v1.GraphDef.FromString(captured.graph_def))
    (options,) = map(_evaluated, read.of("options"))
    analysis = analyse(item, batch=options.batch)
    program = Program(
        analysis=analysis,
        strategy=_strategy(read),
        topology=_topology(read),
        options=options,
        graph=analysis.captured if captured is None else graph,
        fetches=tuple(read.of("fetch")),
        run_ops=tuple(read.of("run")),
        cuts=_cuts(read),
        replication=Replication(frozenset(_names(read.of("shared")[0])), _evaluated(read.of("batch")[0])),
        holds=holds,
    )
    if Invariant.SCHEDULED in holds:
        before = replace(program, graph=analysis.captured, lowered=Lowered())
        program = replace(program, schedule=schedule(before))
    if str(program.schedule).splitlines() != read.of("event"):
        raise TextError(f"other events are planned: {program.schedule}")
    if [f"{first}, then {rival}" for first, rival in program.schedule.computed_first] != read.of("first"):
        raise TextError(f"others are computed first: {program.schedule.computed_first}")
    return replace(program, lowered=_lowered(read, program.schedule))


def _sort(line: str, read: _Read) -> None:
    if line.startswith("  "):
        read.servers[-1].append(line.strip())
    elif line.startswith("server program "):
        read.servers.append([line])
    elif match := _OP.fullmatch(line):
        read.ops.append(_node(match))
    elif line.startswith(("Options(", "Shards(")):
        read.lines.setdefault(line.partition("(")[0].lower(), []).append(line)
    else:
        word, _, said = line.partition(" ")
        read.lines.setdefault(word, []).append(said)


def _evaluated(text: str) -> Any:
    """The value that Python writes so, of the kinds that programs are made of."""
    return eval(text, {"__builtins__": {}}, _WORDS)


def _names(text: str) -> list[str]:
    return [] if text == "nothing" else text.split(", ")


# -- Graphs -----------------------------------------------------------------------------------------------------------


def _graph_def(nodes: Iterable[tf.compat.v1.NodeDef]) -> tf.compat.v1.GraphDef:
    graph = tf.compat.v1.GraphDef(versions={"producer": tf.version.GRAPH_DEF_VERSION})
    graph.node.extend(nodes)
    return graph


def _node(match: re.Match[str]) -> tf.compat.v1.NodeDef:
    definition = op_def_registry.get(match["op"])
    kinds = {one.name: one.type for one in definition.attr}
    node = tf.compat.v1.NodeDef(name=match["name"], op=match["op"], device=match["device"] or "")
    node.input.extend(name for name in match["inputs"].split(", ") if name)
    given = dict(one.split("=", 1) for one in _apart(match["attributes"] or ""))
    for key, text in sorted(given.items(), key=lambda one: kinds.get(one[0]) == "tensor"):  # Whose type is another one.
        if key.startswith("_") and text in ("True", "False"):
            _set(node.attr[key], "bool", text)
        elif key not in kinds:
            raise TextError(f"ops {match['op']} have no attribute '{key}'; got {match[0]}")
        elif kinds[key] == "tensor":
            _set_tensor(node, key, text)
        elif kinds[key].startswith("list("):
            for one in _apart(text[1:-1]):
                _append(node.attr[key].list, kinds[key][5:-1], one)
            node.attr[key].list.SetInParent()
        else:
            _set(node.attr[key], kinds[key], text)
    for one in definition.attr:
        if one.HasField("default_value") and one.name not in node.attr:
            node.attr[one.name].CopyFrom(one.default_value)
    return node


def _apart(text: str) -> Iterator[str]:
    """What is between commas that stand in no bracket."""
    depth, begin, quoted = 0, 0, ""
    for place, letter in enumerate(text):
        if quoted:
            quoted = "" if letter == quoted and text[place - 1] != "\\" else quoted
        elif letter in "'\"":
            quoted = letter
        depth += 0 if quoted else (letter in "[(<{") - (letter in "])>}")
        if letter == "," and not depth and not quoted:
            yield text[begin:place].strip()
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _set(value: tf.compat.v1.AttrValue, kind: str, text: str) -> None:
    if kind == "string":
        value.s = _bytes(text)
    elif kind == "type":
        value.type = tf.as_dtype(text).as_datatype_enum
    elif kind == "shape":
        value.shape.CopyFrom(_shape(text))
    elif kind == "func":
        value.func.name = text
    elif kind == "bool":
        value.b = text == "True"
    elif kind == "float":
        value.f = float(text)
    else:
        value.i = int(text)


def _append(values: Any, kind: str, text: str) -> None:
    one = tf.compat.v1.AttrValue()
    _set(one, kind, text)
    name = {"func": "func", "type": "type", "shape": "shape"}.get(kind, kind[0])
    getattr(values, name).append(getattr(one, name))


def _bytes(text: str) -> bytes:
    return ast.literal_eval(text) if text.startswith(("b'", 'b"')) else text.encode()


def _shape(text: str) -> Any:
    return tf.TensorShape(
        None if text == "?" else [None if size == "?" else int(size) for size in text[1:-1].split(",") if size]
    ).as_proto()


def _set_tensor(node: tf.compat.v1.NodeDef, key: str, text: str) -> None:
    dtype = tf.as_dtype(node.attr["dtype"].type)
    if text.startswith("<"):
        shape = ast.literal_eval(text[text.index("[") : text.index("]") + 1])
        if 0 not in shape:
            raise TextError(f"the text does not have the numbers of constant '{node.name}': {text}")
        proto = tf.make_tensor_proto([], dtype, shape)
    else:
        proto = tf.make_tensor_proto(
            eval(text, {"__builtins__": {}}, {"inf": float("inf"), "nan": float("nan")}), dtype
        )
    node.attr[key].tensor.CopyFrom(proto)


# -- Fields -----------------------------------------------------------------------------------------------------------


def _item(read: _Read, graph: tf.compat.v1.GraphDef) -> GraphItem:
    parts: dict[str, Any] = {
        f"{word}s": tuple(_evaluated(f"{kind.__name__}({line})") for line in read.of(word))
        for word, kind in _ITEM.items()
    }
    facts = _evaluated(f"dict({read.of('item')[0]})")
    return GraphItem(
        graph_def=graph.SerializeToString(deterministic=True),
        **parts,
        **facts,
    )


def _strategy(read: _Read) -> Strategy:
    nodes = []
    for line in read.of("strategy"):
        name, colon, synchronizer = line.partition(": ")
        whole = colon and not line.startswith("var_name=")
        nodes.append(
            VariableStrategy(name, _evaluated(synchronizer)) if whole else _evaluated(f"VariableStrategy({line})")
        )
    (_, replicas) = _worker(read)
    return Strategy(tuple(nodes), replicas)


def _worker(read: _Read) -> tuple[int, tuple[str, ...]]:
    (line,) = read.of("worker")
    rank, _, devices = line.removesuffix(", apart").partition(", replicas ")
    return int(rank), tuple(devices.split(", "))


def _topology(read: _Read) -> Topology:
    worker, _ = _worker(read)
    everyone = []
    for line in read.of("replica"):
        index, _, _, rank, device, *rest = line.split()
        everyone.append(Replica(int(index), int(rank), device, trains=not rest))
    servers = {device: int(rank) for device, rank in (line.split(": worker ") for line in read.of("server"))}
    topology = Topology(worker, tuple(everyone), servers)
    return topology.apart() if read.of("worker")[0].endswith(", apart") else topology


def _cuts(read: _Read) -> Cuts:
    return Cuts(
        shards=tuple(map(_evaluated, read.of("shards"))),
        part_of=dict(line.split(" of ", 1) for line in read.of("part")),
        left_whole=dict(line.split(": ", 1) for line in read.of("whole")),
        whole_branches=dict(line.split(": ", 1) for line in read.of("branch")),
    )


def _lowered(read: _Read, planned: Schedule) -> Lowered:
    channels = {channel.name: channel for channel in map(_channel, read.of("channel"))}
    (key,) = (line.removeprefix("instance key ") for line in read.of("next"))
    return Lowered(
        collectives=tuple(_collective(line, planned) for line in read.of("collective")),
        pieces=dict(_pieces(line) for line in read.of("pieces")),
        next_instance_key=int(key),
        compressor_states=tuple(map(_state, read.of("state"))),
        channels=tuple(channels.values()),
        servers=tuple(_server(lines, channels) for lines in read.servers),
    )


def _collective(line: str, planned: Schedule) -> Collective:
    match = re.fullmatch(r"of event (\d+), (\d+|None) bytes(, by name)?: (.*)", line)
    if match is None:
        raise TextError(f"no collective: {line}")
    event, nbytes = int(match[1]), None if match[2] == "None" else int(match[2])
    return Collective(tuple(_names(match[4])), event, planned.events[event].what, nbytes, bool(match[3]))


def _pieces(line: str) -> tuple[str, tuple[str, ...]]:
    op, _, own = line.removeprefix("of ").partition(": ")
    return op, tuple(_names(own))


def _state(line: str) -> CompressorState:
    match = re.fullmatch(r"(\S+) of (\S+) by (\S+): (\w+)(\[.*\])", line)
    if match is None:
        raise TextError(f"no state: {line}")
    name, owner, op, dtype, shape = match.groups()
    return CompressorState(name, owner, op, Slot(tuple(ast.literal_eval(shape)), tf.as_dtype(dtype)))


def _channel(line: str) -> Channel:
    match = re.fullmatch(r"((\S+)/(\d+)) of server (\d+)(, counts)?: sent (.*) \| answered (.*)", line)
    if match is None:
        raise TextError(f"no channel: {line}")
    _, service, number, server, counts, sent, answered = match.groups()
    return Channel(int(server), service, int(number), _layout(sent), _layout(answered), bool(counts))


def _layout(text: str) -> MessageLayout:
    specs = list(_specs(text))
    return MessageLayout(tuple(spec for spec, _ in specs), tuple(join for _, join in specs))


def _specs(text: str) -> Iterator[tuple[TensorSpec, str]]:
    for one in [] if text == "nothing" else text.split("; "):
        match = _SPEC.fullmatch(one)
        if match is None:
            raise TextError(f"no tensor: {one}")
        shape = None if match["shape"] == "<unknown>" else ast.literal_eval(match["shape"])
        name = "" if match["name"] == "nothing" else match["name"]
        yield TensorSpec(name, tf.as_dtype(match["dtype"]), shape), match["join"] or ""


def _server(lines: Sequence[str], channels: dict[str, Channel]) -> ServerProgram:
    match = re.fullmatch(r"server program (\S+): (\d+) messages, each (True|False), takes (.*), keeps (.*)", lines[0])
    if match is None:
        raise TextError(f"no server program: {lines[0]}")
    name, number, each, taken, kept = match.groups()
    functions = {
        what: _function([line.removeprefix(f"{what} ") for line in lines[1:] if line.startswith(f"{what} ")])
        for what in ("update", "answer")
    }
    return ServerProgram(
        channel=channels[name],
        update=functions["update"],
        num_messages=int(number),
        each=each == "True",
        taken=tuple(_names(taken)),
        kept=tuple(_names(kept)),
        answer=functions["answer"],
    )


def _function(lines: Sequence[str]) -> ServerFunction:
    takes, *ops = lines
    ends = next(place for place, line in enumerate(ops) if line.startswith("gives "))
    matches = [_OP.fullmatch(line) for line in ops[:ends]]
    if None in matches:
        raise TextError(f"no op: {ops[matches.index(None)]}")
    return ServerFunction(
        graph=GraphView(_graph_def(_node(match) for match in matches if match)),
        takes=tuple(spec for spec, _ in _specs(takes.removeprefix("takes "))),
        gives=tuple(_names(ops[ends].removeprefix("gives "))),
        run_ops=tuple(line.removeprefix("run ") for line in ops[ends + 1 :]),
    )
