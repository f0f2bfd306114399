"""Small programs for the kernel's tests: written op by op, so that their text is short and depends on nothing else."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.kernel.events import ReduceGradients
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.pipeline import PASSES, CompiledProgram, compile, start
from autodist_py.kernel.program import Options, Program
from autodist_py.kernel.runner import run_passes
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Output, Variable
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer

raw = tf.raw_ops


def topology(*replicas_of_worker: int, worker: int = 0) -> Topology:
    """The topology of `worker` in a cluster whose workers hold so many replicas each, on CPU devices."""
    devices = [
        (rank, f"/device:CPU:{local}") for rank, count in enumerate(replicas_of_worker) for local in range(count)
    ]
    return Topology(worker, tuple(Replica(index, rank, device) for index, (rank, device) in enumerate(devices)))


def all_reduce(item: GraphItem, *, spec: str = "AUTO", chunk_size: int = 128) -> Strategy:
    """AllReduce for every trainable variable; the topology names the devices."""
    nodes = (
        VariableStrategy(variable.name, AllReduceSynchronizer(spec, group=index // chunk_size))
        for index, variable in enumerate(item.trainable_variables)
    )
    return Strategy(tuple(nodes), ("127.0.0.1:CPU:0",))


def started(item: GraphItem, where: Topology, **options: Any) -> Program:
    """`item` before the first pass."""
    return start(item, all_reduce(item), where, Options(**options))


def after(name: str, item: GraphItem, where: Topology, strategy: Strategy | None = None, **options: Any) -> Program:
    """`item` after the pass `name` of the pipeline, and those before it."""
    names = [step.name for step in PASSES]
    program = start(item, strategy or all_reduce(item), where, Options(**options))
    return run_passes(program, PASSES[: names.index(name) + 1])


def gradient_events(
    item: GraphItem, where: Topology, strategy: Strategy | None = None, **options: Any
) -> list[ReduceGradients]:
    """The events of `item`'s schedule that combine gradients."""
    return after("plan-communication", item, where, strategy, **options).schedule.of_kind(ReduceGradients)


def captured(
    graph: tf.Graph,
    *,
    variables: Sequence[Variable] = (),
    gradients: Sequence[Gradient] = (),
    inputs: Sequence[Input] = (),
    outputs: Sequence[tf.Tensor] = (),
    run_ops: Sequence[str] = (),
    loss_reduction: str = "mean",
) -> GraphItem:
    """A GraphItem over a graph that a test built."""
    return GraphItem(
        graph_def=graph.as_graph_def().SerializeToString(deterministic=True),
        variables=tuple(variables),
        gradients=tuple(gradients),
        inputs=tuple(inputs),
        outputs=tuple(
            Output(one.name, one.dtype.name, None if one.shape.rank is None else tuple(one.shape)) for one in outputs
        ),
        run_ops=tuple(run_ops),
        loss_reduction=loss_reduction,
    )


def placeholder(name: str, *shape: int | None, dtype: tf.DType = tf.float64) -> tf.Tensor:
    return tf.compat.v1.placeholder(dtype, shape, name=name)


def handle(name: str, *shape: int, dtype: tf.DType = tf.float64) -> tf.Tensor:
    return raw.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, name=name)


def read(variable: tf.Tensor, dtype: tf.DType = tf.float64) -> tf.Tensor:
    return raw.ReadVariableOp(resource=variable, dtype=dtype, name=f"{variable.op.name}/Read")


def linear_regression() -> GraphItem:
    """One step of linear regression by gradient descent; the factor 2 of the squared error is in the rate."""
    with tf.Graph().as_default() as graph:
        x, y = placeholder("x", None, 3), placeholder("y", None, 1)
        w = handle("w", 1, 3)
        rate = tf.constant(0.2, tf.float64, name="rate")
        rows = tf.constant(0, name="rows")
        prediction = raw.MatMul(a=x, b=read(w), transpose_b=True, name="prediction")
        error = raw.Sub(x=prediction, y=y, name="error")
        loss = raw.Mean(input=raw.Square(x=error, name="square"), axis=tf.constant([0, 1], name="all"), name="loss")
        per_example = raw.Mul(x=error, y=x, name="per_example")
        gradient = raw.Identity(
            input=raw.Mean(input=per_example, axis=rows, keep_dims=True, name="mean_gradient"), name="gradient/w"
        )
        raw.AssignSubVariableOp(resource=w, value=raw.Mul(x=rate, y=gradient, name="step"), name="update")
        return captured(
            graph,
            variables=[Variable("w", "float64", (1, 3), update_ops=("update",))],
            gradients=[Gradient("w", ("gradient/w:0",))],
            inputs=[Input("x", "float64", (None, 3), batched=True), Input("y", "float64", (None, 1), batched=True)],
            outputs=[loss],
            run_ops=["update"],
        )


def two_stages(*, stages: int = 2) -> GraphItem:
    """Variables `v0`, `v1`, ...; each one's gradient is computed from the combined gradient of the one before."""
    with tf.Graph().as_default() as graph:
        x = placeholder("x", None)
        before = tf.zeros([], tf.float64, name="none_before")
        for index in range(stages):
            own = raw.Mean(input=raw.Mul(x=x, y=read(handle(f"v{index}"))), axis=tf.constant(0), name=f"mean_{index}")
            before = raw.Identity(input=raw.AddV2(x=own, y=before), name=f"gradient/v{index}")
            target = graph.get_tensor_by_name(f"v{index}:0")
            raw.AssignSubVariableOp(resource=target, value=before, name=f"update_{index}")
        names = [f"v{index}" for index in range(stages)]
        return captured(
            graph,
            variables=[Variable(name, "float64", ()) for name in names],
            gradients=[Gradient(name, (f"gradient/{name}:0",)) for name in names],
            inputs=[Input("x", "float64", (None,), batched=True)],
            run_ops=[f"update_{index}" for index in range(stages)],
        )


def dense_and_sparse() -> GraphItem:
    """Two dense variables of float64, one of float32, and an embedding table whose gradient is sparse."""
    with tf.Graph().as_default() as graph:
        x, ids = placeholder("x", None), placeholder("ids", None, dtype=tf.int64)
        mean = raw.Mean(input=x, axis=tf.constant(0), name="mean")
        a, b, table = handle("a"), handle("b"), handle("table", 5, 2)
        half = handle("half", dtype=tf.float32)
        for variable, value in ((a, mean), (b, raw.Neg(x=mean)), (half, tf.cast(mean, tf.float32))):
            name = variable.op.name
            raw.AssignSubVariableOp(
                resource=variable, value=raw.Identity(input=value, name=f"gradient/{name}"), name=f"update_{name}"
            )
        rows = raw.ResourceGather(resource=table, indices=ids, dtype=tf.float64, name="rows")
        indices = raw.Identity(input=ids, name="gradient/table/indices")
        values = raw.Identity(input=rows, name="gradient/table/values")
        raw.Identity(input=tf.constant([5, 2]), name="gradient/table/dense_shape")
        raw.ResourceScatterSub(resource=table, indices=indices, updates=values, name="update_table")
        dense = [Gradient(name, (f"gradient/{name}:0",)) for name in ("a", "b", "half")]
        parts = tuple(f"gradient/table/{part}:0" for part in ("indices", "values", "dense_shape"))
        return captured(
            graph,
            variables=[
                Variable("a", "float64", ()),
                Variable("b", "float64", ()),
                Variable("half", "float32", ()),
                Variable("table", "float64", (5, 2)),
            ],
            gradients=[*dense, Gradient("table", parts)],
            inputs=[Input("x", "float64", (None,), batched=True), Input("ids", "int64", (None,), batched=True)],
            run_ops=["update_a", "update_b", "update_half", "update_table"],
        )


def session(graph: tf.Graph) -> tf.compat.v1.Session:
    """A session with CPU devices enough for every place of these tests."""
    threads = {"inter_op_parallelism_threads": 2, "intra_op_parallelism_threads": 1}
    return tf.compat.v1.Session(graph=graph, config=tf.compat.v1.ConfigProto(device_count={"CPU": 8}, **threads))


def import_graph(definition: GraphView) -> tf.Graph:
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition.graph_def(), name="")
    return graph


def run_steps(
    item: GraphItem,
    where: Topology,
    feeds: Sequence[Mapping[str, np.ndarray]],
    initial: Mapping[str, np.ndarray | Sequence[np.ndarray]],
    strategy: Strategy | None = None,
    **options: Any,
) -> tuple[list[dict[str, np.ndarray]], list[list[np.ndarray]]]:
    """Compile `item` for one worker, run on each of `feeds`: each replica's variables at the end, and all fetches.

    `initial` has the value of a variable, or a value for each local replica's copy of it.
    """
    program = compile(item, strategy or all_reduce(item), where, Options(**options))
    with initialized(program, initial) as (running, reads):
        named = (name if ":" in name else f"{name}:0" for name in program.fetches)
        fetches = [running.graph.get_tensor_by_name(name) for name in named]
        results = [running.run([fetches, list(program.run_ops)], _fed(feed))[0] for feed in feeds]
        values = running.run(reads)
    state: list[dict[str, np.ndarray]] = [{} for _ in where.local_replicas]
    for bound, value in zip(program.variables, values, strict=True):
        state[bound.replica][bound.variable] = value
    return state, results


@contextmanager
def initialized(
    program: CompiledProgram, initial: Mapping[str, np.ndarray | Sequence[np.ndarray]]
) -> Iterator[tuple[tf.compat.v1.Session, list[tf.Tensor]]]:
    """A session of `program`, whose variables have the values `initial`, and for each of them what reads it."""
    graph = import_graph(program.graph)
    devices = [replica.device for replica in program.topology.local_replicas]
    with graph.as_default():
        for bound in program.variables:
            name = f"{bound.variable}-{bound.replica}".encode()
            graph.get_operation_by_name(bound.op)._set_attr("shared_name", tf.compat.v1.AttrValue(s=name))
        assigns, reads = [], []
        for bound in program.variables:
            with tf.device(devices[bound.replica]):
                resource = graph.get_tensor_by_name(f"{bound.op}:0")
                given = initial[bound.variable]
                value = tf.constant(given if isinstance(given, np.ndarray) else given[bound.replica])
                assigns.append(raw.AssignVariableOp(resource=resource, value=value))
                reads.append(raw.ReadVariableOp(resource=resource, dtype=value.dtype))
    with session(graph) as running:
        running.run(assigns)
        yield running, reads


def _fed(feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}:0": value for name, value in feed.items()}


_LINE = re.compile(r"(?P<name>\S+) = (?P<op>\w+)\((?P<inputs>[^)]*)\)(?: @(?P<device>\S+))?")


def parsed(*lines: str) -> tf.compat.v1.GraphDef:
    """The graph of lines as the printer writes them, without attributes: `name = Op(input, ^control) @device`."""
    graph = tf.compat.v1.GraphDef()
    for line in lines:
        match = _LINE.fullmatch(line)
        assert match, line
        inputs = [name for name in match["inputs"].split(", ") if name]
        graph.node.add(name=match["name"], op=match["op"], input=inputs, device=match["device"] or "")
    return graph


def program_of(graph: tf.compat.v1.GraphDef, where: Topology, **facts: Any) -> Program:
    """A program over a graph without variables; `facts` are of its GraphItem."""
    item = GraphItem(graph_def=graph.SerializeToString(deterministic=True), variables=(), **facts)
    return started(item, where)


def node(graph: tf.compat.v1.GraphDef | GraphView, name: str) -> tf.compat.v1.NodeDef:
    """The op of that name; one of a GraphDef may be edited."""
    if isinstance(graph, GraphView):
        return graph.nodes[name]
    (found,) = (each for each in graph.node if each.name == name)
    return found
