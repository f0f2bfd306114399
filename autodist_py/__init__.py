"""A compiler from single-device TensorFlow training code to a distributed program.

The public names are imported when they are first used, so that the values (`autodist_py.proto`) and the command line
load without TensorFlow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autodist_py.autodist import AutoDist
    from autodist_py.cluster.step_hook import StepHook
    from autodist_py.config.settings import SettingsError
    from autodist_py.proto.errors import (
        AutoDistError,
        CaptureError,
        ClusterError,
        GraphItemError,
        InvalidGraphError,
        ResourceSpecError,
        SessionError,
        StrategyError,
        WorkerFailedError,
    )
    from autodist_py.proto.graph_item import GraphItem
    from autodist_py.proto.resource_spec import ResourceSpec
    from autodist_py.proto.strategy import Strategy

__version__ = "0.1.0"

__all__ = [
    "AutoDist",
    "AutoDistError",
    "CaptureError",
    "ClusterError",
    "GraphItem",
    "GraphItemError",
    "InvalidGraphError",
    "ResourceSpec",
    "ResourceSpecError",
    "SessionError",
    "SettingsError",
    "StepHook",
    "Strategy",
    "StrategyError",
    "WorkerFailedError",
]

_HOMES = {
    "AutoDist": "autodist_py.autodist",
    "GraphItem": "autodist_py.proto.graph_item",
    "ResourceSpec": "autodist_py.proto.resource_spec",
    "SettingsError": "autodist_py.config.settings",
    "StepHook": "autodist_py.cluster.step_hook",
    "Strategy": "autodist_py.proto.strategy",
}
_ERRORS = "autodist_py.proto.errors"

if not TYPE_CHECKING:  # A type checker would take every name for a public one.

    def __getattr__(name: str) -> Any:
        """The public name `name`, from the module where it lives."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        return getattr(import_module(_HOMES.get(name, _ERRORS)), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
