"""Programs whose replicas each have values of their own: inputs that are fed in parts, and variables per replica.

Here a replica counts once, whatever examples it has, as in tf.distribute. What such programs may be, in this version.
"""

from collections.abc import Collection

import tensorflow as tf

from autodist_py.kernel.analysis.outputs import differing
from autodist_py.kernel.ir.batched import batched_tensors
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import CaptureError, StrategyError

_COMBINED = ("add", "rows", "same")


def require_own_parts(program: Program) -> None:
    """Refuse what would count a replica by its examples, or lose its own values.

    Raises:
        CaptureError: the item combines something otherwise than by adding up, or joining rows.
        StrategyError: the strategy, or the topology, cannot have replicas that keep their own variables.
    """
    item = program.item
    parts = [source.name for source in item.inputs if source.kind == "part"]
    own = [variable.name for variable in item.variables if variable.per_replica]
    if program.options.keeps_copies:
        _require_everywhere(program)
    if not parts and not own:
        return
    _require_all_train(program)
    _require_reduced(program, own)
    named = ", ".join(f"'{name}'" for name in (*parts, *own))
    if batched := batched_tensors(item, program.analysis.captured):
        raise CaptureError(
            f"replicas have their own values of {named}, and share out '{batched[0].name}': one or the other"
        )
    for gradient in item.gradients:
        if gradient.reduction != "add":
            raise CaptureError(
                f"replicas have their own values of {named}, so gradients are added up; that of variable "
                f"'{gradient.variable}' has the reduction '{gradient.reduction}'"
            )
    for statistic in item.statistics:
        is_number = not tf.as_dtype(statistic.dtype).is_bool and tf.as_dtype(statistic.dtype) != tf.string
        if statistic.reduction not in _COMBINED or (statistic.reduction == "add" and not is_number):
            raise CaptureError(
                f"replicas have their own values of {named}, so statistics are numbers that are added up, or rows; "
                f"'{statistic.tensor}' of type {statistic.dtype} has the reduction '{statistic.reduction}'"
            )
    for output in differing(program):
        raise CaptureError(
            f"replicas have their own values of {named}; result '{output.tensor}' differs between replicas, so it is "
            "to be per_replica"
        )


def _require_everywhere(program: Program) -> None:
    """Refuse variables that live on servers, or are cut."""
    for node in program.strategy.node_config:
        if node.shards or node.synchronizer is None or node.synchronizer.as_all_reduce is None:
            raise StrategyError(
                f"each replica keeps its own copy of variables, which servers and shards have but once; variable "
                f"'{node.var_name}' is to have one. Use AllReduce, or AutoDistStrategy"
            )


def _require_reduced(program: Program, own: Collection[str]) -> None:
    """Refuse to train on a server, or in shards, what each replica has for itself."""
    for node in program.strategy.node_config:
        if node.var_name in own and (node.shards or node.synchronizer is None or node.synchronizer.as_ps):
            raise StrategyError(
                f"variable '{node.var_name}' is trained, and each replica has its own value of it, as replicas write "
                "what differs between them to it. So it is on no server, and in no shards. Give it AllReduce, as "
                f"PerVariable({{'{node.var_name}': AllReduce()}}, default=...) does"
            )


def _require_all_train(program: Program) -> None:
    """Refuse a worker that serves only: its replica would count, too."""
    if idle := [replica.worker for replica in program.topology.everyone if not replica.trains]:
        raise StrategyError(
            f"replicas have values of their own, so each worker trains; worker {idle[0]} is to serve only. Give its "
            "node a replica"
        )
