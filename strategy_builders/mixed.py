"""Builders that leave some variables to one builder, and others to another: Parallax and PerVariable."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from autodist_py.proto.arguments import check_fields
from autodist_py.proto.compressors import Compressor
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.text import known_names, shown
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder, resolve_builder
from autodist_py.strategy_builders.parameter_server import PSLoadBalancing


@dataclass(frozen=True, slots=True)
class Parallax:
    """Dense gradients are summed by collectives; variables with sparse ones live on servers, balanced by bytes.

    Of a table on a server only the rows of a batch travel, where a collective would gather the rows of all workers; of
    dense variables a server would be sent all, and send all back (Kim et al. 2019, "Parallax: Sparsity-aware Data
    Parallel Training of Deep Neural Networks").

    Attributes:
        chunk_size: see AllReduce.
        local_proxy_variable: workers bring tables whole, not only the rows of their batch.
        sync: must be True if any gradient is dense, as collectives keep workers together.
        staleness: must be 0, likewise.
        all_reduce_spec: see AllReduce.
        compressor: of dense gradients; see AllReduce.
        bytes_per_pack: see AllReduce.
        timeout_seconds: see AllReduce.

    Raises:
        StrategyError: a parameter is out of its range, or contradicts another.
    """

    chunk_size: int = 128
    local_proxy_variable: bool = False
    sync: bool = True
    staleness: int = 0
    all_reduce_spec: str = "AUTO"
    compressor: Compressor | str = "NoneCompressor"
    bytes_per_pack: int = 0
    timeout_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._builders()
        check_fields(self, error=StrategyError, but=("compressor",))

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """Each half as its builder would, if there were no other variables."""
        dense, sparse = self._builders()
        tables = {variable.name for variable in item.sparse_variables}
        others = {variable.name for variable in item.trainable_variables} - tables
        return _merged(item, resources, [(dense, others), (sparse, tables)])

    def _builders(self) -> tuple[AllReduce, PSLoadBalancing]:
        return (
            AllReduce(
                chunk_size=self.chunk_size,
                all_reduce_spec=self.all_reduce_spec,
                compressor=self.compressor,
                bytes_per_pack=self.bytes_per_pack,
                timeout_seconds=self.timeout_seconds,
            ),
            PSLoadBalancing(local_proxy_variable=self.local_proxy_variable, sync=self.sync, staleness=self.staleness),
        )


@dataclass(frozen=True, slots=True)
class PerVariable:
    """Each variable is left to the first builder whose pattern its name matches.

    Attributes:
        builders: a glob (`*`, `?`, `[abc]`) on the names of variables -> the builder, or its name with or without
            arguments. What a builder counts or balances it does over its own variables.
        default: the builder of all variables that match none.

    Raises:
        StrategyError: a builder is none.
    """

    builders: Mapping[str, StrategyBuilder | str] = field(hash=False)
    default: StrategyBuilder | str = "AllReduce"
    _resolved: tuple[tuple[str, StrategyBuilder], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.builders, Mapping) or not self.builders:
            raise StrategyError(
                "PerVariable is given builders by patterns, such as PerVariable({'embedding*': PS()}); "
                f"got {shown(self.builders)}"
            )
        ordered = (*self.builders.items(), ("*", self.default))
        resolved = tuple((pattern, resolve_builder(builder)) for pattern, builder in ordered)
        object.__setattr__(self, "builders", dict(self.builders))
        object.__setattr__(self, "_resolved", resolved)

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """Patterns are tried in the order in which they are given.

        Raises:
            StrategyError: a pattern matches no variable.
        """
        names = [variable.name for variable in item.trainable_variables]
        for pattern in self.builders:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise StrategyError(f"pattern {pattern!r} matches no variable; {known_names(pattern, names)}")
        left = list(names)
        parts = []
        for pattern, builder in self._resolved:
            parts.append((builder, {name for name in left if fnmatchcase(name, pattern)}))
            left = [name for name in left if name not in parts[-1][1]]
        return _merged(item, resources, parts)


def _merged(
    item: GraphItem, resources: ResourceSpec, parts: Iterable[tuple[StrategyBuilder, Collection[str]]]
) -> Strategy:
    """One strategy, of what each builder says of its variables.

    Raises:
        StrategyError: builders want replicas on different devices.
    """
    nodes: dict[str, VariableStrategy] = {}
    replicas: dict[tuple[str, ...], str] = {}
    for builder, names in parts:
        if not names:
            continue
        gradients = tuple(gradient for gradient in item.gradients if gradient.variable in names)
        strategy = builder.build(replace(item, gradients=gradients), resources)
        first = 1 + max((one.group for node in nodes.values() for one in node.synchronizers), default=-1)
        nodes |= {node.var_name: _with_groups_from(first, node) for node in strategy.node_config}
        replicas.setdefault(strategy.replicas, type(builder).__name__)
    if len(replicas) > 1:
        (some, one), (others, other), *_ = replicas.items()
        raise StrategyError(
            f"all variables are trained on the same replicas; {one} has {', '.join(some)}, {other} {', '.join(others)}"
        )
    ordered = tuple(nodes[variable.name] for variable in item.trainable_variables if variable.name in nodes)
    return Strategy(ordered, next(iter(replicas), resources.replica_devices))


def _with_groups_from(first: int, node: VariableStrategy) -> VariableStrategy:
    """`node` with its groups counted from `first`: those of two builders are not reduced together."""
    parts = tuple(_with_groups_from(first, part) for part in node.part_config)
    own = node.synchronizer
    return replace(node, synchronizer=None if own is None else own.with_groups_from(first), part_config=parts)
