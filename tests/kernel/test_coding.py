"""Whether a gradient is coded on its way, by whatever it is synchronized."""

import pytest
import tensorflow as tf

from autodist_py.kernel.pipeline import start
from autodist_py.kernel.program import Options
from autodist_py.kernel.synchronizers.coding import compressor_for
from autodist_py.proto.compressors import HorovodCompressor
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Variable
from autodist_py.proto.strategy import Node, Strategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer, Synchronizer
from tests.kernel import programs


def item() -> GraphItem:
    """Gradients of the examples, of nothing, and of no example."""
    with tf.Graph().as_default() as graph:
        x = programs.placeholder("x", None, 3)
        mean = tf.reduce_mean(x, axis=0)
        gradients = {"of_examples": mean, "of_nothing": mean[:0], "of_no_example": tf.ones([3], tf.float64)}
        for name, gradient in gradients.items():
            update = tf.raw_ops.AssignSubVariableOp
            update(
                resource=programs.handle(name, *gradient.shape), value=tf.identity(gradient, name=f"gradient/{name}")
            )
        return programs.captured(
            graph,
            variables=[Variable(name, "float64", tuple(one.shape)) for name, one in gradients.items()],
            gradients=[Gradient(name, (f"gradient/{name}:0",)) for name in gradients],
            inputs=[Input("x", "float64", (None, 3), batched=True)],
        )


CODED = "HorovodCompressor"
DEVICE = "127.0.0.1:CPU:0"


@pytest.mark.parametrize(
    ("replicas", "synchronizer", "coded"),
    [
        ((1, 1), AllReduceSynchronizer(compressor=CODED), {"of_examples"}),
        ((1, 1), PSSynchronizer(DEVICE, compressor=CODED), {"of_examples"}),
        ((1, 1), AllReduceSynchronizer(), set()),
        ((2,), AllReduceSynchronizer(compressor=CODED), set()),
        ((2,), PSSynchronizer(DEVICE, compressor=CODED), set()),
    ],
)
def test_what_differs_and_travels_is_coded(
    replicas: tuple[int, ...], synchronizer: Synchronizer, coded: set[str]
) -> None:
    nodes = tuple(Node(variable.name, synchronizer) for variable in item().trainable_variables)
    program = start(item(), Strategy(nodes, (DEVICE,)), programs.place(*replicas), Options())

    found = {gradient.variable: compressor_for(program, gradient) for gradient in program.item.gradients}

    assert {name for name, compressor in found.items() if compressor is not None} == coded
    assert all(found[name] == HorovodCompressor() for name in coded)
