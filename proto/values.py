"""A saved value, whichever of the three it is."""

import os
from collections.abc import Callable, Mapping

from autodist_py.proto import wire
from autodist_py.proto.arguments import checked
from autodist_py.proto.errors import AutoDistError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy

Value = GraphItem | Strategy | ResourceSpec

# The order matters for binary files, which do not say what they hold: each accepts less than the next.
_LOADERS: Mapping[str, Callable[[str | os.PathLike[str]], Value]] = {
    "graph item": GraphItem.load,
    "strategy": Strategy.load,
    "resource spec": ResourceSpec.load,
}


@checked("path", error=AutoDistError)
def load_value(path: str | os.PathLike[str]) -> Value:
    """The value in a file that `save` wrote as binary (`.pb`) or JSON (`.json`).

    Raises:
        AutoDistError: the file holds none of the three; it says why, for each.
        OSError: the file cannot be read.
    """
    wire.require_suffix(path, error=AutoDistError)
    reasons = []
    for kind, load in _LOADERS.items():
        try:
            return load(path)
        except AutoDistError as error:
            reasons.append(f"  not a {kind}: {error}")
    raise AutoDistError("\n".join([f"{os.fspath(path)} holds no saved value:", *reasons]))
