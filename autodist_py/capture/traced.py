"""`TracedGraph`: what the doors of capture hand over to be made a GraphItem."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.capture.recording.gradients import Origin
from autodist_py.capture.recording.layers import LayerCall
from autodist_py.proto.graph_item import Gradient, Input, Output, Variable


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A single-device graph with variables as `VarHandleOp`s, and what capture knows about it.

    Attributes:
        graph: the graph; ops that nothing needs may stand in it.
        variables: its variables; their update ops are found here.
        gradients: the gradients that were recorded, in order.
        inputs: its placeholders.
        outputs: what is fetched.
        run_ops: what must run beside.
        origins: for each gradient what it is the gradient of.
        tensor_of: a tensor of the graph by its name; only its shape and type are used.
        layer_calls: of Keras's layers, in order.
        table_initializers: the ops that fill lookup tables.
        savers: serialized tensorflow.SaverDefs.
    """

    graph: tf.compat.v1.GraphDef
    variables: tuple[Variable, ...]
    gradients: tuple[Gradient, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    run_ops: tuple[str, ...]
    origins: Mapping[Gradient, Origin]
    tensor_of: Callable[[str], tf.Tensor]
    layer_calls: Sequence[LayerCall] = ()
    table_initializers: Sequence[str] = ()
    savers: Sequence[bytes] = ()
