"""Programs of a few ops, one for each pass, and what the pass changes in their texts."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist_py.kernel.ir.names import captured_name, replica_of
from autodist_py.kernel.pipeline import PASSES, start
from autodist_py.kernel.printer import printed_order, short_name
from autodist_py.kernel.program import Options, Program
from autodist_py.kernel.runner import Pass, run_passes
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Variable
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer, Synchronizer
from tests.support import kernel_programs
from tests.support.kernel_programs import captured, handle, placeholder, read, topology

raw = tf.raw_ops
DEVICES = ("127.0.0.1:CPU:0", "127.0.0.2:CPU:0")


@dataclass(frozen=True, slots=True)
class Example:
    """What a pass is shown on.

    Attributes:
        item: makes the captured program.
        where: the topology.
        synchronizers: of each trainable variable; None: AllReduce.
        shards: for a variable that is cut into columns or rows, how, and how each part is synchronized.
    """

    item: Callable[[], GraphItem]
    where: Topology
    synchronizers: tuple[Synchronizer, ...] | None = None
    shards: tuple[str, tuple[int, ...], tuple[Synchronizer, ...]] | None = None

    def started(self) -> Program:
        """The program before the first pass."""
        item = self.item()
        where = replace(self.where, servers=dict(zip(DEVICES, range(2), strict=True)))
        names = [variable.name for variable in item.trainable_variables]
        if self.shards is not None:
            partitioner, sizes, parts = self.shards
            config = tuple(VariableStrategy(f"{names[0]}/part_{number}", one) for number, one in enumerate(parts))
            strategy = Strategy((VariableStrategy(names[0], None, partitioner, config, sizes),), DEVICES)
        else:
            synchronizers = self.synchronizers or tuple(AllReduceSynchronizer() for _ in names)
            nodes = tuple(VariableStrategy(*pair) for pair in zip(names, synchronizers, strict=True))
            strategy = Strategy(nodes, DEVICES)
        return start(item, strategy, where, Options())


def less_the_mean(graph: tf.Graph, w: tf.Tensor, values: tf.Tensor, source: Input) -> GraphItem:
    """`w -= mean(values)`, of values that are made of the input `source`."""
    mean = raw.Mean(input=values, axis=tf.constant(0, name="rows"), name="mean")
    gradient = raw.Identity(input=mean, name="gradient/w")
    raw.AssignSubVariableOp(resource=w, value=gradient, name="update")
    return captured(
        graph,
        variables=[Variable("w", "float64", (), update_ops=("update",))],
        gradients=[Gradient("w", ("gradient/w:0",))],
        inputs=[source],
        run_ops=["update"],
    )


def scale() -> GraphItem:
    """`w -= mean(x)`."""
    with tf.Graph().as_default() as graph:
        x, w = placeholder("x", None), handle("w")
        return less_the_mean(graph, w, x, Input("x", "float64", (None,), batched=True))


def vector() -> GraphItem:
    """`w -= mean(x)`, by columns."""
    with tf.Graph().as_default() as graph:
        x, w = placeholder("x", None, 3), handle("w", 3)
        mean = raw.Mean(input=x, axis=tf.constant(0, name="rows"), name="mean")
        gradient = raw.Identity(input=mean, name="gradient/w")
        raw.AssignSubVariableOp(resource=w, value=gradient, name="update")
        return captured(
            graph,
            variables=[Variable("w", "float64", (3,), update_ops=("update",))],
            gradients=[Gradient("w", ("gradient/w:0",))],
            inputs=[Input("x", "float64", (None, 3), batched=True)],
            run_ops=["update"],
        )


def lookup() -> GraphItem:
    """Rows of a table that is read whole are added to it."""
    with tf.Graph().as_default() as graph:
        ids, table = placeholder("ids", None, dtype=tf.int64), handle("table", 5, 2)
        whole = read(table)
        rows = raw.GatherV2(params=whole, indices=ids, axis=tf.constant(0, name="axis"), name="rows")
        indices = raw.Identity(input=ids, name="gradient/table/indices")
        values = raw.Identity(input=rows, name="gradient/table/values")
        raw.Identity(input=tf.constant([5, 2], name="shape"), name="gradient/table/dense_shape")
        raw.ResourceScatterSub(resource=table, indices=indices, updates=values, name="update")
        parts = tuple(f"gradient/table/{part}:0" for part in ("indices", "values", "dense_shape"))
        return captured(
            graph,
            variables=[Variable("table", "float64", (5, 2), update_ops=("update",))],
            gradients=[Gradient("table", parts)],
            inputs=[Input("ids", "int64", (None,), batched=True)],
            run_ops=["update"],
        )


def branch() -> GraphItem:
    """`if now: a -= mean(x); b -= mean(x)`."""
    with tf.Graph().as_default() as graph:
        x, now = placeholder("x", None), placeholder("now", dtype=tf.bool)
        mean = raw.Mean(input=x, axis=tf.constant(0, name="rows"), name="mean")
        variables = [handle("a"), handle("b")]
        gradients = [raw.Identity(input=mean, name=f"gradient/{one.op.name}") for one in variables]

        def update() -> tf.Tensor:
            for one, gradient in zip(variables, gradients, strict=True):
                raw.AssignSubVariableOp(resource=one, value=gradient, name=f"update_{one.op.name}")
            return tf.constant(True)

        tf.cond(now, update, lambda: tf.constant(False), name="cond")
        return captured(
            graph,
            variables=[Variable(name, "float64", (), update_ops=("cond",)) for name in "ab"],
            gradients=[Gradient(name, (f"gradient/{name}:0",)) for name in "ab"],
            inputs=[Input("x", "float64", (None,), batched=True), Input("now", "bool", (), batched=False)],
            run_ops=["cond"],
        )


def data() -> GraphItem:
    """`w -= mean(next)`."""
    with tf.Graph().as_default() as graph:
        iterator, w = placeholder("iterator", dtype=tf.resource), handle("w")
        (x,) = raw.IteratorGetNext(iterator=iterator, output_types=[tf.float64], output_shapes=[[None]], name="next")
        return less_the_mean(graph, w, x, Input("iterator", "resource", (), batched=False, kind="state"))


def table() -> GraphItem:
    """`w -= mean(table[keys])`."""
    with tf.Graph().as_default() as graph:
        keys, w = placeholder("keys", None, dtype=tf.int64), handle("w")
        table = raw.HashTableV2(key_dtype=tf.int64, value_dtype=tf.float64, name="table")
        default = tf.constant(0.0, tf.float64, name="default")
        found = raw.LookupTableFindV2(table_handle=table, keys=keys, default_value=default, name="found")
        return less_the_mean(graph, w, found, Input("keys", "int64", (None,), batched=True))


ON_GPU = Topology(0, (Replica(0, 0, "/device:GPU:0"),))
SERVER = PSSynchronizer(DEVICES[0])
OTHER = PSSynchronizer(DEVICES[1])
EXAMPLES: Mapping[str, Example] = {
    "unbranch": Example(branch, topology(1, 1), (SERVER, OTHER)),
    "look-up": Example(lookup, topology(1, 1)),
    "partition": Example(vector, topology(1, 1), shards=("2", (2, 1), (AllReduceSynchronizer(), OTHER))),
    "plan-communication": Example(kernel_programs.linear_regression, topology(1, 1)),
    "replicate": Example(scale, topology(2)),
    "refresh": Example(scale, topology(2)),
    "read-data": Example(data, topology(1, 1)),
    "split-batch": Example(scale, topology(2)),
    "lower-collectives": Example(scale, topology(1, 1)),
    "lower-exchanges": Example(scale, topology(1, 1, worker=1), (SERVER,)),
    "place": Example(table, ON_GPU),
    "order": Example(lambda: kernel_programs.two_stages(stages=3), topology(1, 1)),
}


def around(name: str) -> tuple[list[str], list[str]]:
    """What the pass's example shows before it, and after it."""
    names = [step.name for step in PASSES]
    before = run_passes(EXAMPLES[name].started(), PASSES[: names.index(name)])
    after = run_passes(before, [PASSES[names.index(name)]])
    return shown(before, devices=name == "place"), shown(after, devices=name == "place")


def shown(program: Program, *, devices: bool = False) -> list[str]:
    """The program's ops and events, a line each, with short names: see the top of docs/passes.md."""
    lines: dict[str, list[str]] = {}
    for name in printed_order(program.graph):
        node = program.graph.nodes[name]
        fragment = fragment_of(name)
        inputs = dict.fromkeys(shortened(one) for one in node.input)
        if fragment is None:
            place = f" @{node.device.removeprefix('/device:')}" if devices and node.device else ""
            lines[name] = [f"{shortened(name)} = {node.op}(", *inputs, f"){place}"]
        else:
            head, *read, tail = lines.get(fragment, [f"{fragment} = ops(", ")"])
            others = [one for one in inputs if one.removeprefix("^") != fragment]
            lines[fragment] = [head, *dict.fromkeys([*read, *others]), tail]
    ops = [f"{head}{', '.join(inputs)}{tail}" for head, *inputs, tail in lines.values()]
    return ops + [f"event {type(one).__name__}[{one.engine}] {one.what}" for one in program.schedule.events]


def shortened(name: str) -> str:
    """The name of an op, a tensor, or what an op waits for."""
    name = short_name(name)
    control, name = ("^", name[1:]) if name.startswith("^") else ("", name)
    replica, captured_as = replica_of(name), captured_name(name)
    if replica is not None:
        return f"{control}{replica}/{captured_as}"
    return control + (fragment_of(name) or name.removeprefix("AutoDist/").removeprefix("AutoDist-"))


def fragment_of(name: str) -> str | None:
    """The short name of the fragment that the op is of, or None."""
    parts = name.split("/")
    if parts[0] == "AutoDist-Shards":
        return "/".join(parts[:2]).removeprefix("AutoDist-")
    if parts[0] == "AutoDist" and parts[1] in ("AllReduce", "Batch", "Data", "channel"):
        return parts[1] if parts[1] != "AllReduce" else f"AllReduce/{parts[2].partition('_level_')[2][0]}"
    return None


def block_of(step: Pass) -> list[str]:
    """The lines of the example in the pass's docstring, the indented ones behind the line that begins with Example."""
    _, _, behind = inspect.cleandoc(type(step).__doc__ or "").partition("\nExample")
    found: list[str] = []
    for line in behind.splitlines()[1:]:
        if found and not line.strip():
            break
        if line.startswith("    "):
            found.append(line[4:])
    return found
