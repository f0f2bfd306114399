"""Sizes of values for the batch that the chief is given when a program is compiled: the same on every worker."""

import copy
from collections import Counter
from collections.abc import Collection

import tensorflow as tf

from autodist_py.kernel.ir.batched import batched_tensors
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.program import Program


def most_replicas(program: Program) -> int:
    """How many replicas the worker has that has most of them."""
    return max(Counter(replica.worker for replica in program.topology.everyone if replica.trains).values())


def replica_shapes(program: Program, tensors: Collection[str]) -> dict[str, tf.TensorShape]:
    """The shapes of tensors of the captured graph on a replica for the first batch, as far as they are inferred."""
    if not tensors:
        return {}
    view, examples = program.analysis.captured, _examples_of_a_replica(program)
    inputs = {op_of(tensor.name) for tensor in batched_tensors(program.item, view) if tensor.batch == 0}
    graph = tf.compat.v1.GraphDef(versions=view.versions)
    for name in view.dataflow_ancestors(map(op_of, tensors)):
        node = copy.deepcopy(view.nodes[name])
        data = [read for read in node.input if not read.startswith("^")]
        del node.input[:]
        node.input.extend(data)
        if name in inputs and "shape" in node.attr and examples is not None:
            node.attr["shape"].shape.dim[0].size = examples
        graph.node.append(node)
    graph.library.function.extend(view.functions)
    with tf.Graph().as_default() as scratch:
        tf.graph_util.import_graph_def(graph, name="")
    return {
        tensor: scratch.get_operation_by_name(op_of(tensor)).outputs[parse(tensor).output].shape for tensor in tensors
    }


def _examples_of_a_replica(program: Program) -> int | None:
    """How many examples a replica has in the first step; None: not known."""
    examples = program.options.examples
    if examples is None:
        return None
    training = [replica.worker for replica in program.topology.everyone if replica.trains]
    sharing = training if program.options.batch == "global" else [one for one in training if one == 0]
    return examples // max(len(sharing), 1)
