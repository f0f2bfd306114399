"""Fits models that others ship on one device and as compiled, and compares every variable and the history."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autodist_py import AutoDist
from autodist_py.diagnostics.comparison import Comparison, magnitude_of

TOLERANCE = 1e-8
BATCH = 7
EXAMPLES = 34
"""Five steps, the last one with six examples: no replica's number of them is another's."""
STRATEGIES = ("AllReduce", "PSLoadBalancing", "PartitionedPS", "ShardedOptimizer", "Parallax")

Values = dict[str, np.ndarray]


def require(module: str, distribution: str) -> None:
    """Skip the tests of a module where a package is not installed, and say what installs it."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {distribution}: `make packages` installs it", allow_module_level=True)


def package(module: str, distribution: str) -> Any:
    """The module of a package that is required."""
    require(module, distribution)
    return importlib.import_module(module)


def state(model: Any, history: Any) -> Values:
    """All that training has made: weights, the optimizer's variables, and what `fit` returned."""
    values = {f"weight {number} '{v.name}'": np.array(v) for number, v in enumerate(model.variables)}
    slots = model.optimizer.variables
    values |= {f"slot {number}": np.array(v) for number, v in enumerate(slots() if callable(slots) else slots)}
    return values | {f"history of {name}": np.array(steps) for name, steps in history.history.items()}


def assert_as_on_one_device(
    train: Callable[[], Values],
    alone: Callable[[], Values] | None = None,
    *,
    strategy_builder: str,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> Values:
    """`train` in the scope of an AutoDist does what `alone` does on one device, or `train` itself.

    A bias that no output depends on (of the keys of an attention) is zero but for rounding, of which no two machines
    make the same. `options` are AutoDist's.
    """
    expected = (alone or train)()
    with AutoDist(strategy_builder=strategy_builder, **options) as autodist, autodist.scope():
        values = train()
    assert len(values) == len(expected)
    comparison = Comparison()
    magnitude = magnitude_of(expected.values())
    for name, actual, wanted in zip(expected, values.values(), expected.values(), strict=True):
        comparison.note(name, 5, actual, wanted, tolerance, magnitude=magnitude)
    assert comparison.first is None, str(comparison)
    return values
