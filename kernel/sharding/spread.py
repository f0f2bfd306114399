"""Which branches update variables that live apart: `spread_branches`."""

from collections.abc import Collection, Iterator, Mapping

import tensorflow as tf

from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.program import Program
from autodist_py.kernel.sharding.branches import BRANCHES, used_variables
from autodist_py.proto.strategy import VariableStrategy

_WORKERS = ""


def spread_branches(program: Program) -> Iterator[tf.compat.v1.NodeDef]:
    """The branches that update what lives apart."""
    view, item = program.analysis.captured, program.item
    places = {node.var_name: _places(node) for node in program.strategy.node_config}
    if len(set().union(*places.values())) == 1:
        return
    raw = (op_of(view.nodes[op_of(tensor)].input[0]) for gradient in item.gradients for tensor in gradient.tensors)
    forward = view.dataflow_ancestors(raw) - {variable.name for variable in item.variables}
    markers = {op_of(tensor): gradient.variable for gradient in item.gradients for tensor in gradient.tensors}
    for node in view.of_type(BRANCHES):
        used = used_variables(view, node)
        written = {item.variable(handle) for handle, is_written in used.items() if is_written}
        if node.name in forward or not view.control_flow.runs_once(node.name):
            continue
        if not any(one.name in places or one.shape for one in written):
            continue  # A count, a sum for a metric.
        trained = used.keys() & places.keys()
        trained |= _made_of(view, [one.name for one in written], markers, places.keys(), forward)
        directory = set().union(*(places[name] for name in trained))
        if len(directory) > 1:
            yield node


def _made_of(
    view: GraphView, handles: Collection[str], markers: Mapping[str, str], trained: Collection[str], forward: set[str]
) -> set[str]:
    """The trained variables of which, or of whose gradients, these are made."""
    writers = {writer for handle in handles for writer in view.writes[handle]}
    behind = view.dataflow_ancestors(writers, blocked=forward)
    return {markers[op] for op in behind & markers.keys()} | (behind & set(trained))


def _places(node: VariableStrategy) -> set[str]:
    """Where the variable lives; what is cut lives apart, wherever its shards live."""
    synchronizers = [shard.synchronizer for shard in node.shards] or [node.synchronizer]
    servers = [None if one is None else one.as_ps for one in synchronizers]
    places = {_WORKERS if one is None else one.reduction_destination for one in servers}
    return places if places == {_WORKERS} or not node.shards else {shard.var_name for shard in node.shards}
