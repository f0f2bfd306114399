"""Loops and branches of TensorFlow 1's control flow: in which an op stands, and what decides whether it runs.

A loop's ops stand in a *frame*: `Enter` leads in, `Exit` leads out, and no other edge may cross its border, so who
waits for an op on the other side waits at the border. An op of a branch runs if the *predicate* of a `Switch` is so; it
may be tied to the branch by a control edge alone, and a `Merge` returns whatever has run, so neither reads the
predicate on which it depends.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import tensorflow as tf

from autodist_py.kernel.ir.names import TensorName, op_of, parse

BACK_EDGE = frozenset({"NextIteration", "RefNextIteration"})
"""Op types whose edges to a Merge close a loop."""

CONTROL_FLOW = frozenset({"Enter", "Exit", "LoopCond", "Merge", "NextIteration", "Switch"})
"""Op types of TensorFlow 1's control flow, which pass on what they are given."""

_STACK, _PUSH, _POP = "StackV2", "StackPushV2", "StackPopV2"
_Sides = frozenset[tuple[str, int]]
"""Predicates, and the side of their `Switch` on which an op stands."""


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """Where the ops of a graph stand; of those that stand in no loop and no branch nothing is said.

    Attributes:
        frames: for each op of a loop, the innermost frame; an `Enter` stands in the frame that it leads to.
        around: for each frame, the one around it; "" for what is in none.
        predicates: for each op of a loop or branch, the ops that decide whether it runs.
        unread: for each op, those on which it depends though no edge says so: predicates, and what puts on a stack the
            values that it takes from it, as back-propagation through a loop does.
        chosen: for each `Merge` that ends a branch, the predicates that decide which of its inputs it returns.
    """

    frames: Mapping[str, str] = field(default_factory=dict)
    around: Mapping[str, str] = field(default_factory=dict)
    predicates: Mapping[str, frozenset[str]] = field(default_factory=dict)
    unread: Mapping[str, frozenset[str]] = field(default_factory=dict)
    chosen: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def runs_once(self, op: str) -> bool:
        """Whether `op` runs in each step, and once."""
        return op not in self.frames and op not in self.predicates

    def ways_in(self, op: str) -> tuple[str, ...]:
        """The frames that lead to `op`, the outermost first."""
        frames = []
        frame = self.frames.get(op, "")
        while frame:
            frames.append(frame)
            frame = self.around[frame]
        return tuple(reversed(frames))


def control_flow(nodes: Mapping[str, tf.compat.v1.NodeDef], order: Iterable[str]) -> ControlFlow:
    """Where `nodes` stand, which `order` names, each after all that it reads or waits for but back edges."""
    frames: dict[str, str] = {}
    around: dict[str, str] = {}
    sides: dict[str, _Sides] = {}
    unread: dict[str, frozenset[str]] = {}
    chosen: dict[str, frozenset[str]] = {}
    for name in order:
        node = nodes[name]
        reads = [one for one in map(parse, node.input) if one.op in nodes and nodes[one.op].op not in BACK_EDGE]
        frame = _deepest({frames.get(one.op, "") for one in reads}, around)
        if node.op == "Enter":
            own = node.attr["frame_name"].s.decode()
            around[own], frame = frame, own
        by_data = [_sides(nodes, one, sides) for one in reads if not one.is_control]
        by_waiting = frozenset[tuple[str, int]]().union(*(sides.get(one.op, ()) for one in reads if one.is_control))
        everywhere = frozenset[tuple[str, int]]().union(*by_data)
        if node.op == "Merge" and by_data:
            common = frozenset.intersection(*by_data)
            if everywhere != common:
                chosen[name] = frozenset(op for op, _ in everywhere - common)
            everywhere = common
        elif node.op == "Exit":
            everywhere = frozenset(side for side in everywhere if frames.get(side[0], "") != frame)
            frame = around.get(frame, "")
        hidden = {op for op, _ in by_waiting - everywhere} | chosen.get(name, frozenset())
        if hidden:
            unread[name] = frozenset(hidden)
        if everywhere | by_waiting:
            sides[name] = everywhere | by_waiting
        if frame:
            frames[name] = frame
    predicates = {name: frozenset(op for op, _ in found) for name, found in sides.items()}
    for name, pushes in _stacked(nodes):
        unread[name] = unread.get(name, frozenset()) | pushes
    return ControlFlow(frames, around, predicates, unread, chosen)


def _stacked(nodes: Mapping[str, tf.compat.v1.NodeDef]) -> Iterator[tuple[str, frozenset[str]]]:
    """Each op that takes values from a stack, with those that put them there."""

    def stack(op: str) -> str:
        while nodes[op].op != _STACK and nodes[op].input and op_of(nodes[op].input[0]) in nodes:
            op = op_of(nodes[op].input[0])
        return op

    pushes: dict[str, set[str]] = {}
    for node in nodes.values():
        if node.op == _PUSH:
            pushes.setdefault(stack(node.name), set()).add(node.name)
    for node in nodes.values() if pushes else ():
        if node.op == _POP:
            yield node.name, frozenset(pushes.get(stack(node.name), ()))


def _sides(nodes: Mapping[str, tf.compat.v1.NodeDef], read: TensorName, sides: Mapping[str, _Sides]) -> _Sides:
    """On which sides of predicates the tensor is made."""
    producer = nodes[read.op]
    own = sides.get(producer.name, frozenset())
    return own | {(_predicate(nodes, producer), read.output)} if producer.op == "Switch" else own


def _predicate(nodes: Mapping[str, tf.compat.v1.NodeDef], switch: tf.compat.v1.NodeDef) -> str:
    """What a `Switch` asks; `tf.cond` gives some of a branch's the predicate itself, and others a copy of it."""
    op = op_of(switch.input[1])
    while op in nodes and nodes[op].op == "Identity":
        op = op_of(nodes[op].input[0])
    return op


def _deepest(frames: Iterable[str], around: Mapping[str, str]) -> str:
    """The innermost of some frames of which each is within the next."""

    def depth(frame: str) -> int:
        return depth(around[frame]) + 1 if frame else 0

    return max(frames, key=depth, default="")
