"""The strategy builder protocol, and how a builder is found by name.

A builder is named by the user as `AllReduce`, `AllReduce(chunk_size=32)`, or `my_package.module:MyBuilder(...)`. Names
without a module are those of the entry point group `autodist_py.strategy_builders`; the built-in ones are also listed
here, so that they work uninstalled.
"""

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from autodist_py.proto.calls import construct, parse_call
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.text import known_names
from autodist_py.strategy_builders.validation import validate_strategy

ENTRY_POINT_GROUP = "autodist_py.strategy_builders"
DEFAULT = "AllReduce"

_BUILT_IN: Mapping[str, str] = {
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
}


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
        strategy = builder.build(item, resources)
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
        return _construct(_find(name), name, arguments)
    if isinstance(spec, type):
        raise StrategyError(f"a strategy builder is an instance, got the class; write {spec.__name__}()")
    if not isinstance(spec, StrategyBuilder):
        raise StrategyError(
            f"a strategy builder has a method build(item, resources), or is a name such as 'AllReduce'; got {spec!r}"
        )
    return spec


def builder_locations() -> dict[str, str]:
    """Name -> `module:Class` of every builder that can be named without its module, by name.

    Raises:
        StrategyError: two installed packages register one name for different builders.
    """
    locations = dict(_BUILT_IN)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        known = locations.setdefault(entry_point.name, entry_point.value)
        if known != entry_point.value:
            raise StrategyError(
                f"a strategy builder's name stands for one builder; {entry_point.name!r} is registered for {known!r} "
                f"and {entry_point.value!r}; uninstall one of the packages"
            )
    return dict(sorted(locations.items()))


def _find(name: str) -> Any:
    """The class, or other callable, of that name."""
    if ":" in name:
        return _import(name)
    locations = builder_locations()
    if name not in locations:
        raise StrategyError(
            f"no strategy builder is called {name!r}; {known_names(name, locations)} "
            f"(one that is not registered is written module:Name)"
        )
    return _import(locations[name])


def _import(location: str) -> Any:
    module_name, _, attribute = location.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise StrategyError(f"the module of strategy builder {location!r} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if isinstance(value, type) and not name.startswith("_")]
        raise StrategyError(f"module {module_name!r} has no {attribute!r}; {known_names(attribute, public)}")
    return getattr(module, attribute)


def _construct(factory: Any, name: str, arguments: Mapping[str, object]) -> StrategyBuilder:
    builder = construct(factory, name, arguments, "strategy builder")
    if not isinstance(builder, StrategyBuilder):
        raise StrategyError(f"{name} is no strategy builder: it has no method build(item, resources)")
    return builder
