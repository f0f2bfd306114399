"""What replicas' results of a single op must be together, by their layout."""

from collections.abc import Iterator, Sequence

import numpy as np

from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    REPLICATED,
    SHAPE,
    SHARDED,
    BatchLayout,
)
from tests.support.rule_samples import Sample

_SINGLE = frozenset(map(np.dtype, (np.float32, np.complex64)))
FAILS_ON_NONE = frozenset(
    {"Conv2D", "Conv3D", "DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter", "FusedBatchNormV3"}
)
"""Of no rows the first three return another shape, in float32 by oneDNN; the next one returns what stood in memory
before, and the last one NaN for what it is given."""
JOINED = frozenset({COUNT, PARTIAL_MEAN, PARTIAL_SUM, REPLICATED, SHAPE, SHARDED})


def joined(layout: BatchLayout, own: Sequence[np.ndarray], parts: Sequence[int]) -> Iterator[np.ndarray]:
    """The value for the whole batch, from those of the replicas: all that it must be."""
    if layout is REPLICATED:
        yield from own
    elif layout is SHARDED:
        yield np.concatenate(own)
    elif layout is PARTIAL_MEAN:
        yield np.sum([value * part / sum(parts) for value, part in zip(own, parts, strict=True) if part], axis=0)
    elif layout is SHAPE:
        for value in own:
            yield np.array([sum(one[0] for one in own), *value[1:]])
    else:
        yield sum(own[1:], own[0])


def require_same(value: np.ndarray, wanted: np.ndarray, sample: Sample, found: object) -> None:
    """Compare what replicas' results make together with one device's."""
    kinds = {value.dtype, *(one.dtype for one in sample.values)}
    tolerance = 1e-4 if kinds & _SINGLE else 1e-9
    assert _difference(np.asarray(value), wanted) <= tolerance, f"{found}, {value} for {wanted}: {sample}"


def _difference(value: np.ndarray, wanted: np.ndarray) -> float:
    if value.shape != wanted.shape:
        return float("inf")
    if value.dtype.kind not in "fc":
        return float(not np.array_equal(value, wanted))
    exact = np.isclose(value, wanted, rtol=0.0, atol=0.0, equal_nan=True)
    size = 1.0 + np.abs(np.nan_to_num(wanted)).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        return float(np.where(exact, 0.0, np.abs(value - wanted) / size).max(initial=0.0))
