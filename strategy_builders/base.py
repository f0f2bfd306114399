"""The strategy builder protocol, and how a builder is found by name.

A builder is named by the user as `AllReduce`, `AllReduce(chunk_size=32)`, or `my_package.module:MyBuilder(...)`. Names
without a module are those of the entry point group `autodist_py.strategy_builders`; the built-in ones are also listed
here, so that they work uninstalled.
"""

from typing import Any, Protocol, runtime_checkable

from autodist_py.proto.calls import parse_call
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.plugins import Registry
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.text import shown
from autodist_py.strategy_builders.aggregation import aggregating
from autodist_py.strategy_builders.validation import validate_strategy

DEFAULT = "AllReduce"

PLUGINS = Registry(
    "strategy builder",
    "autodist_py.strategy_builders",
    {
        "AllReduce": "autodist_py.strategy_builders.all_reduce:AllReduce",
        "FromFile": "autodist_py.strategy_builders.from_file:FromFile",
        "Parallax": "autodist_py.strategy_builders.mixed:Parallax",
        "PartitionedAR": "autodist_py.strategy_builders.partitioned:PartitionedAR",
        "PartitionedPS": "autodist_py.strategy_builders.partitioned:PartitionedPS",
        "PerVariable": "autodist_py.strategy_builders.mixed:PerVariable",
        "PS": "autodist_py.strategy_builders.parameter_server:PS",
        "PSLoadBalancing": "autodist_py.strategy_builders.parameter_server:PSLoadBalancing",
        "RandomAxisPartitionAR": "autodist_py.strategy_builders.partitioned:RandomAxisPartitionAR",
        "ShardedOptimizer": "autodist_py.strategy_builders.partitioned:ShardedOptimizer",
        "UnevenPartitionedPS": "autodist_py.strategy_builders.partitioned:UnevenPartitionedPS",
    },
)


@runtime_checkable
class StrategyBuilder(Protocol):
    """A rule for making strategies; by custom a frozen dataclass whose fields are its parameters.

    Deterministic: for equal arguments, `build` returns equal strategies.
    """

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """How to train `item` on `resources`: one node for each trainable variable."""
        ...


def build_strategy(builder: StrategyBuilder, item: GraphItem, resources: ResourceSpec) -> Strategy:
    """The builder's strategy, checked.

    Raises:
        StrategyError: the strategy does not fit the item or the resources; it names the builder.
    """
    name = type(builder).__name__
    try:
        strategy = aggregating(builder.build(item, resources), item, resources)
        validate_strategy(strategy, item, resources)
    except StrategyError as error:
        raise StrategyError(f"strategy builder {name}: {error}") from error
    return strategy


def resolve_builder(spec: StrategyBuilder | str | None) -> StrategyBuilder:
    """The builder that a user means by an instance, by a name with or without arguments, or by nothing.

    Raises:
        StrategyError: there is no such builder or parameter, or the arguments cannot be read; it lists what exists.
    """
    if spec is None:
        return resolve_builder(DEFAULT)
    if isinstance(spec, str):
        name, arguments = parse_call(spec, "a strategy builder")
        builder = PLUGINS.make(name, arguments, _require_callable)
        if not isinstance(builder, StrategyBuilder):
            raise StrategyError(f"{name} is no strategy builder: it has no method build(item, resources)")
        return builder
    if isinstance(spec, type):
        raise StrategyError(f"a strategy builder is an instance, got the class; write {spec.__name__}()")
    if not isinstance(spec, StrategyBuilder):
        raise StrategyError(
            "a strategy builder has a method build(item, resources), or is a name such as 'AllReduce'; "
            f"got {shown(spec)}"
        )
    return spec


def builder_locations() -> dict[str, str]:
    """See Registry.locations."""
    return PLUGINS.locations()


def _require_callable(factory: Any, name: str) -> None:
    if not callable(factory):
        raise StrategyError(f"{name} is no strategy builder: it cannot be called; got {factory!r}")
