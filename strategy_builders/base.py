"""The strategy builder protocol, and how a builder is found by name.

A builder is named by the user as `AllReduce`, `AllReduce(chunk_size=32)`, or `my_package.module:MyBuilder(...)`. Names
without a module are those of the entry point group `autodist_py.strategy_builders`; the built-in ones are also listed
here, so that they work uninstalled.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

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

# Lower-case spellings that a person coming from YAML or a shell writes.
_CONSTANTS: Mapping[str, object] = {"true": True, "false": False, "none": None}


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
        name, arguments = _parse(spec)
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


def _parse(spec: str) -> tuple[str, dict[str, object]]:
    """The name and the keyword arguments of `Name`, `module:Name`, or either with `(key=value, ...)`."""
    match = re.fullmatch(r"\s*([\w.]+(?::\w+)?)\s*(?:\((.*)\))?\s*", spec, re.DOTALL)
    if match is None:
        raise StrategyError(f"a strategy builder is written Name, Name(key=value, ...) or module:Name; got {spec!r}")
    name, arguments = match.groups(default="")
    try:
        call = ast.parse(f"_({arguments})", mode="eval").body
    except SyntaxError as error:
        raise StrategyError(f"the arguments of a strategy builder are written key=value, ...; got {spec!r}") from error
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise StrategyError(f"the arguments of a strategy builder are named; write key=value; got {spec!r}")
    return name, {str(keyword.arg): _literal(keyword, spec) for keyword in call.keywords}


def _literal(keyword: ast.keyword, spec: str) -> object:
    value = keyword.value
    if isinstance(value, ast.Name) and value.id in _CONSTANTS:
        return _CONSTANTS[value.id]
    try:
        return ast.literal_eval(value)
    except ValueError as error:
        raise StrategyError(
            f"the argument {keyword.arg} of a strategy builder is a literal, a text in quotes; "
            f"got {ast.unparse(value)} in {spec!r}"
        ) from error


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
    parameters = inspect.signature(factory).parameters
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if accepts_any else [argument for argument in arguments if argument not in parameters]
    if unknown:
        listed = ", ".join(map(str, parameters.values())) or "none"
        raise StrategyError(f"strategy builder {name} has no parameter {unknown[0]!r}; its parameters: {listed}")
    try:
        builder = factory(**arguments)
    except TypeError as error:
        raise StrategyError(f"strategy builder {name} does not accept {dict(arguments)}: {error}") from error
    if not isinstance(builder, StrategyBuilder):
        raise StrategyError(f"{name} is no strategy builder: it has no method build(item, resources)")
    return builder
