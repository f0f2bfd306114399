"""Programs of one machine's replicas have a host, also where all replicas are on GPUs."""

import tensorflow as tf

from autodist_py.distribute.placement import LocalPlacement, options_of
from autodist_py.program.build import CapturedStep
from autodist_py.proto.graph_item import Gradient, Input, Variable
from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.support.kernel_programs import captured, handle, placeholder, raw


def test_replicas_on_gpus_alone_are_compiled() -> None:
    with tf.Graph().as_default() as graph:
        w = handle("w")
        gradient = raw.Identity(input=placeholder("x"), name="gradient/w")
        raw.AssignSubVariableOp(resource=w, value=gradient, name="update")
        item = captured(
            graph,
            variables=[Variable("w", "float64", (), update_ops=("update",))],
            gradients=[Gradient("w", ("gradient/w:0",), "add")],
            inputs=[Input("x", "float64", (), batched=False, kind="part")],
            run_ops=["update"],
        )
    placement = LocalPlacement(["/device:GPU:0", "/device:GPU:1"], AllReduce(), options_of(decorrelate=False))
    step = CapturedStep(item=item, variables={}, name="step")
    assert {bound.replica for bound in placement.compiled(step).program.variables} == {0, 1}
