"""FromFile: a strategy that was saved, perhaps edited."""

import os
from dataclasses import dataclass

from autodist_py.proto.arguments import check_fields
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy


@dataclass(frozen=True, slots=True)
class FromFile:
    """The strategy that `Strategy.save`, or `autodist plan --save`, wrote to `path` (JSON or binary), for this graph.

    It is checked against the graph and the resources as any strategy is.
    """

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        check_fields(self, error=StrategyError)

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """What the file says.

        Raises:
            StrategyError: the file cannot be read, or was damaged.
        """
        try:
            return Strategy.load(self.path)
        except OSError as error:
            raise StrategyError(f"the strategy cannot be read from {self.path}: {error.strerror}") from error
