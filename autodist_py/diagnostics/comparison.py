"""How far a distributed run is from one device: differences of values, and which one is the first too large."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TOLERANCES: Mapping[str, float] = {"float64": 1e-9, "complex128": 1e-9, "float16": 1e-2, "bfloat16": 1e-1}
"""The largest relative difference that rounding explains, by type; 1e-4 for those not named."""

_ROUNDINGS = 16
"""How many machine epsilons of the values that a tensor is computed from may be left where they cancel."""


@dataclass(slots=True)
class Comparison:
    """How far a distributed step is from one device.

    Attributes:
        differences: for each variable and result the largest difference after any step, relative to the largest value
            of the tensor; infinite for integers, texts and shapes that differ.
        first: the first variable or result over its tolerance, and the step (from 1); None: there is none.
    """

    differences: dict[str, float] = field(default_factory=dict)
    first: tuple[str, int] | None = None

    def note(
        self,
        name: str,
        step: int,
        actual: Any,
        expected: Any,
        tolerance: float | None,
        *,
        magnitude: float = 0.0,
        computed_in: Collection[str] = (),
    ) -> None:
        """Compare two values of one tensor.

        Args:
            name: the tensor.
            step: after which step.
            actual: its value.
            expected: its value on one device.
            tolerance: the largest relative difference that is none; None: the one of the least precise of its type and
                `computed_in`.
            magnitude: the largest value that it may be computed from. A tensor with nothing but what terms of that size
                leave of one another by rounding is zero: a gradient that should vanish does not quite.
            computed_in: the floating types that it is computed in: of mixed precision, say.
        """
        actual, expected = np.asarray(actual), np.asarray(expected)
        difference = relative_difference(actual, expected, zero=magnitude * _ROUNDINGS)
        self.differences[name] = max(self.differences.get(name, 0.0), difference)
        types = (expected.dtype.name, *computed_in)
        allowed = max(TOLERANCES.get(name, 1e-4) for name in types) if tolerance is None else tolerance
        if self.first is None and not difference <= allowed:
            self.first = (name, step)

    @property
    def largest(self) -> float:
        """The largest of all differences; 0 where nothing was compared."""
        return max(self.differences.values(), default=0.0)

    def __str__(self) -> str:
        width = max(map(len, self.differences), default=0)
        lines = [f"{name:<{width}}  {value:.1e}" for name, value in self.differences.items()]
        if self.first is not None:
            lines.append(f"'{self.first[0]}' is the first to differ, at step {self.first[1]}")
        return "\n".join(lines)


def magnitude_of(values: Iterable[np.ndarray]) -> float:
    """The largest finite value of all arrays of floats in `values`; scalars may be counts, and say nothing of them."""
    arrays = [value for value in values if np.issubdtype(value.dtype, np.floating) and value.ndim]
    floats = [value[np.isfinite(value)] for value in arrays]
    return max((float(np.max(np.abs(value))) for value in floats if value.size), default=0.0)


def relative_difference(actual: np.ndarray, expected: np.ndarray, *, zero: float = 0.0) -> float:
    """The largest difference of two arrays, relative to the largest value of the second; infinite if incomparable.

    Arrays with no value over `zero` machine epsilons are equal.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return float("inf")
    if expected.dtype.name == "bfloat16":  # NumPy does not know that it is a float.
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    if not np.issubdtype(expected.dtype, np.inexact):
        return 0.0 if np.array_equal(actual, expected) else float("inf")
    if not expected.size:
        return 0.0
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        return float("inf")
    scale = max(float(np.max(np.abs(expected), where=finite, initial=0.0)), float(np.finfo(expected.dtype).tiny))
    largest = float(np.max(np.abs(actual[finite] - expected[finite]), initial=0.0))
    size = max(scale, float(np.max(np.abs(actual), where=finite, initial=0.0)))
    return 0.0 if size <= zero * float(np.finfo(expected.dtype).eps) else largest / scale
