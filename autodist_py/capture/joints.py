"""Taking joints apart: each `IdentityN` of a captured graph becomes one `Identity` for each of its tensors.

TensorFlow joins the tensors of a custom gradient in one op. Through it every result seems to be computed from every
argument, though each is just passed on: gradients that could live apart hang together. TensorFlow's own optimizer takes
joints apart too, but only after it has dropped the control edges that a joint seemed to make redundant. What a joint
waits for that has an effect (a write, something shown), each of its parts still waits for.
"""

from collections.abc import Iterator
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.recording.layers import LayerCall
from autodist_py.capture.traced import TracedGraph
from autodist_py.kernel.ir.dataflow import using
from autodist_py.kernel.ir.graph import SHOWS, WRITES_RESOURCE, GraphView
from autodist_py.kernel.ir.names import op_of, parse, unique_names
from autodist_py.kernel.ir.node import node

_JOINT = "IdentityN"


def take_joints_apart(traced: TracedGraph) -> TracedGraph:
    """`traced` without joints: whatever names a tensor of one names the `Identity` of that tensor."""
    joints = [node for node in traced.graph.node if node.op == _JOINT]
    if not joints:
        return traced
    parts = _Parts(GraphView(traced.graph), joints)
    graph = tf.compat.v1.GraphDef(versions=traced.graph.versions, library=traced.graph.library)
    for one in traced.graph.node:
        graph.node.extend(parts.identities(one) if one.op == _JOINT else [parts.redirected(one)])
    return replace(
        traced,
        graph=graph,
        gradients=tuple(replace(one, tensors=parts.tensors(one.tensors)) for one in traced.gradients),
        outputs=tuple(replace(one, tensor=parts.tensor(one.tensor)) for one in traced.outputs),
        run_ops=tuple(part for name in traced.run_ops for part in parts.ops(name)),
        origins={
            replace(gradient, tensors=parts.tensors(gradient.tensors)): replace(
                origin,
                losses=parts.tensors(origin.losses),
                through=None if origin.through is None else parts.tensors(origin.through),
            )
            for gradient, origin in traced.origins.items()
        },
        tensor_of=lambda name: traced.tensor_of(parts.whole(name)),
        layer_calls=[
            LayerCall(parts.tensors(call.reads), parts.tensors(call.outputs), parts.tensors(call.shared))
            for call in traced.layer_calls
        ],
    )


class _Parts:
    """The names that the tensors of `joints`, ops of `view`, have when each is an op's own."""

    def __init__(self, view: GraphView, joints: list[tf.compat.v1.NodeDef]):
        tensors = [(node.name, index) for node in joints for index in range(len(node.attr["T"].list.type))]
        names = unique_names([f"{joint}/{index}" for joint, index in tensors], view.nodes)
        self._view = view
        self._effects = using(view, WRITES_RESOURCE | SHOWS).union(*view.writes.values())
        self._of: dict[str, list[str]] = {node.name: [] for node in joints}
        for (joint, _), name in zip(tensors, names, strict=True):
            self._of[joint].append(name)
        self._whole = {name: f"{joint}:{index}" for (joint, index), name in zip(tensors, names, strict=True)}
        self._waits: dict[str, set[str]] = {}
        """For each part, and what leads into its loop of TensorFlow 1, the ops with effects that it waits for."""
        for joint in joints:
            effects = view.ancestors([joint.name]) & self._effects
            for name, source in zip(self._of[joint.name], joint.input, strict=False):
                for effect in effects - view.ancestors([op_of(source)]):
                    for waiting, awaited in view.waits(joint.name, effect):
                        self._waits.setdefault(name if waiting == joint.name else waiting, set()).add(f"^{awaited}")

    def tensor(self, name: str) -> str:
        """The name of a tensor as it is now."""
        tensor = parse(name)
        return f"{self._of[tensor.op][tensor.output]}:0" if tensor.op in self._of else name

    def tensors(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names of tensors as they are now."""
        return tuple(map(self.tensor, names))

    def ops(self, name: str) -> list[str]:
        """The op `name`, or those it has become."""
        return self._of.get(name, [name])

    def whole(self, name: str) -> str:
        """The name that a tensor had before."""
        return self._whole.get(parse(name).op, name)

    def redirected(self, node: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef:
        """`node`, which reads parts."""
        result = tf.compat.v1.NodeDef()
        result.CopyFrom(node)
        result.ClearField("input")
        for name in node.input:
            tensor = parse(name)
            if tensor.is_control:
                result.input.extend(f"^{part}" for part in self.ops(tensor.op))
            else:
                result.input.append(str(parse(self.tensor(name))))
        if node.op == "Enter":
            result.input.extend(sorted(self._waits.get(node.name, set()) - set(node.input)))
        return result

    def identities(self, joint: tf.compat.v1.NodeDef) -> Iterator[tf.compat.v1.NodeDef]:
        """What `joint` becomes."""
        for name, source, dtype in zip(self._of[joint.name], joint.input, joint.attr["T"].list.type, strict=False):
            controls = {*(each for each in joint.input if parse(each).is_control), *self._waits.get(name, ())}
            passed = node("Identity", name, [source], controls=sorted(controls), T=tf.as_dtype(dtype))
            passed.device = joint.device
            yield self.redirected(passed)
