"""The rules that every strategy keeps for its graph item and resources, whoever built it."""

from collections.abc import Iterable

from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem, Variable
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.text import known_names


def validate_strategy(strategy: Strategy, item: GraphItem, resources: ResourceSpec) -> None:
    """The strategy fits.

    1. Each trainable variable of the item has one node, and nothing else has.
    2. Replicas and reduction destinations are devices of the resources.
    3. A partitioner has one number per axis of its variable, and no more shards than the axis has elements; the shards
       together are as long as the axis.
    4. A compressor can code the gradient it is given.
    5. Workers may be as far apart for one variable as for any other.
    6. Groups are numbered from 0, and are no more than there are variables and shards.

    That a variable or a device is named once, and that groups are not negative, holds for any `Strategy`.

    Raises:
        StrategyError: it names the variable, the rule and the value.
    """
    _check_coverage(strategy, item)
    _check_devices(strategy.replicas, resources, "replica")
    _ = strategy.consistency
    _check_groups(strategy)
    sparse = {variable.name for variable in item.sparse_variables}
    for node in strategy.node_config:
        servers = [server for one in node.every_synchronizer for server in one.servers]
        _check_devices(servers, resources, f"reduction_destination of variable {node.var_name!r}")
        _check_partitioner(node, item.variable(node.var_name).shape)
        _check_compressor(node, item.variable(node.var_name), is_sparse=node.var_name in sparse)


def _check_coverage(strategy: Strategy, item: GraphItem) -> None:
    trainable = [variable.name for variable in item.trainable_variables]
    covered = [node.var_name for node in strategy.node_config]
    missing = sorted(set(trainable) - set(covered))
    if missing:
        raise StrategyError(f"each variable with a gradient needs a node; missing: {', '.join(map(repr, missing))}")
    for name in covered:
        if name not in trainable:
            raise StrategyError(f"variable {name!r} has a node, but no gradient; {known_names(name, trainable)}")


def _check_devices(devices: Iterable[str], resources: ResourceSpec, what: str) -> None:
    for device in devices:
        if device not in resources.devices:
            raise StrategyError(
                f"{what} must be a device of the resources; got {device!r}; {known_names(device, resources.devices)}"
            )


def _check_groups(strategy: Strategy) -> None:
    most = sum(node.num_shards for node in strategy.node_config)
    for node in strategy.node_config:
        for synchronizer in node.every_synchronizer:
            if synchronizer.group >= most:
                raise StrategyError(
                    f"groups are numbered from 0, and there is one at most for each variable or shard, of which this "
                    f"strategy has {most}; got group {synchronizer.group} for variable {node.var_name!r}"
                )


def _check_partitioner(node: VariableStrategy, shape: tuple[int, ...]) -> None:
    if not node.partitioner:
        return
    shards = [int(number) for number in node.partitioner.split(",")]
    if len(shards) != len(shape) or any(number > size for number, size in zip(shards, shape, strict=True)):
        raise StrategyError(
            f"a partitioner has one number per axis, not above its size; variable {node.var_name!r} has shape {shape}; "
            f"got {node.partitioner!r}"
        )
    if node.part_sizes and sum(node.sizes(shape[node.axis])) != shape[node.axis]:
        raise StrategyError(
            f"the shards of a variable make it whole; variable {node.var_name!r} has size {shape[node.axis]} along the "
            f"axis that is cut; got shards of {node.part_sizes}"
        )


def _check_compressor(node: VariableStrategy, variable: Variable, *, is_sparse: bool) -> None:
    for synchronizer in node.every_synchronizer:
        compressor = synchronizer.compressor
        name = type(compressor).__name__
        if not compressor.gives_up:
            continue
        if "float" not in variable.dtype:
            raise StrategyError(
                f"a compressor that loses precision codes floats; variable {node.var_name!r} is of type "
                f"{variable.dtype}; got {name}; use NoneCompressor for it"
            )
        reduced = synchronizer.as_all_reduce
        as_dense = reduced is not None and reduced.sparse_as_dense
        if is_sparse and not as_dense and not compressor.codes_rows:
            raise StrategyError(
                f"variable {node.var_name!r} has a sparse gradient, which {name} cannot compress; "
                f"use HorovodCompressor or NoneCompressor for it"
            )
