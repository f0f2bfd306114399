"""Graph items whose graph is somebody else's bytes."""

import random
from functools import cache

import tensorflow as tf

from autodist_py.kernel.pipeline import compile
from autodist_py.kernel.topology import resolve
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import build_strategy
from tests.support import capture_steps

NAMES = ("", "nowhere", "x:99", "a:b:c", "x:-1", "^", ":0", "a b", "/x", "^x", "é", "x" * 10_000)
OPS = ("", "NoSuchOp", "MatMul", "Placeholder", "Const", "While", "VarHandleOp")


@cache
def captured() -> GraphItem:
    step, arguments = capture_steps.keras_mlp()
    return capture_steps.capture(step, *arguments).item


def compiled(item: GraphItem) -> None:
    resources = ResourceSpec((NodeSpec("127.0.0.1", cpus=(0, 1)),))
    strategy = build_strategy(AllReduce(), item, resources)
    compile(item, strategy, resolve(strategy.replicas, resources, worker=0))


def changed(choose: random.Random) -> bytes:
    """The captured graph with a few bytes, or one thing in it, changed."""
    original = captured().graph_def
    graph = tf.compat.v1.GraphDef.FromString(original)
    node = choose.choice(graph.node)
    kind = choose.randrange(6)
    if kind == 0:
        content = bytearray(original)
        for _ in range(choose.randrange(1, 4)):
            content[choose.randrange(len(content))] = choose.randrange(256)
        return bytes(content)
    if kind == 1:
        node.op = choose.choice(OPS)
    elif kind == 2:
        node.name = choose.choice((*NAMES, choose.choice(graph.node).name))
    elif kind == 3:
        node = choose.choice([each for each in graph.node if each.input])
        node.input[choose.randrange(len(node.input))] = choose.choice(
            (*NAMES, node.name, choose.choice(graph.node).name)
        )
    elif kind == 4:
        graph.node.remove(node)
    elif node.attr:
        name = choose.choice(sorted(node.attr))
        if choose.random() < 0.4:
            del node.attr[name]
        else:
            edit = choose.choice(("s", "type", "i", "shape", "tensor", "func"))
            {
                "s": lambda value: setattr(value, "s", b"\xff\xfe"),
                "type": lambda value: setattr(value, "type", 9999),
                "i": lambda value: setattr(value, "i", -(2**62)),
                "shape": lambda value: value.shape.dim.add(size=-5),
                "tensor": lambda value: setattr(value.tensor, "tensor_content", b"zz"),
                "func": lambda value: setattr(value.func, "name", "nowhere"),
            }[edit](node.attr[name])
    return graph.SerializeToString()
