"""A graph item whose graph is somebody else's bytes: the compiler refuses it, with an error of our own."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tensorflow as tf

from autodist_py.proto.errors import AutoDistError, GraphItemError
from autodist_py.proto.graph_item import GraphItem
from tests.support.hostile_graphs import captured, changed, compiled


def with_graph(edit: Callable[[Any], None]) -> GraphItem:
    graph = tf.compat.v1.GraphDef.FromString(captured().graph_def)
    edit(graph)
    return replace(captured(), graph_def=graph.SerializeToString())


def reader(graph: Any) -> Any:
    return next(node for node in graph.node if node.input)


def wait_for_oneself(graph: Any) -> None:
    first = reader(graph)
    first.input.append("^" + next(node.name for node in graph.node if first.name in node.input))


def spoilt(graph: Any) -> GraphItem:
    name = reader(graph).name.encode()
    spoilt_name = b"\xff" * len(name)
    return replace(captured(), graph_def=graph.SerializeToString().replace(name, spoilt_name))


def nested(depth: int) -> bytes:
    """A GraphDef whose first op has an attribute that is nested so deeply: func { attr { value { func { ..."""
    value = b""
    for _ in range(depth):
        for field in (2, 2, 10):  # What the attr's value is; the function's attributes; a value that is a function.
            value = bytes([field << 3 | 2]) + _size(len(value)) + value
    graph = tf.compat.v1.GraphDef.FromString(captured().graph_def)
    entry = b"\x12" + _size(len(value)) + value
    node = b"\x0a\x01x\x2a" + _size(len(entry)) + entry
    return graph.SerializeToString() + b"\x0a" + _size(len(node)) + node


def _size(number: int) -> bytes:
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


FLAWS: dict[str, Callable[[], GraphItem]] = {
    "no GraphDef": lambda: replace(captured(), graph_def=b"\xff" * 40),
    "nested too deeply": lambda: replace(captured(), graph_def=nested(2000)),
    "a name that is not UTF-8": lambda: spoilt(tf.compat.v1.GraphDef.FromString(captured().graph_def)),
    "an input that says no number": lambda: with_graph(lambda graph: reader(graph).input.append("x:b:c")),
    "an input without a name": lambda: with_graph(lambda graph: reader(graph).input.append("")),
    "a cycle": lambda: with_graph(wait_for_oneself),
    "a variable of no type": lambda: replace(
        captured(), variables=(replace(captured().variables[0], dtype="nonsense"), *captured().variables[1:])
    ),
    "a variable of no op": lambda: replace(
        captured(),
        variables=(*captured().variables, replace(captured().variables[0], name="nowhere")),
        gradients=(*captured().gradients, replace(captured().gradients[0], variable="nowhere", tensors=("no:0",))),
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_what_is_wrong_with_a_graph_item_is_said(flaw: str) -> None:
    with pytest.raises(GraphItemError, match="the graph item cannot be compiled, as "):
        compiled(FLAWS[flaw]())


@pytest.mark.parametrize("seed", range(4))
def test_changed_graphs_are_compiled_or_refused(seed: int) -> None:
    choose = random.Random(seed)
    refused = 0
    for _ in range(40):
        try:
            compiled(replace(captured(), graph_def=changed(choose)))
        except AutoDistError:
            refused += 1
    assert refused > 5
