"""The rules of batch layouts, each against its definition: what replicas make of their parts, joined, is the whole."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from autodist_py.kernel.analysis.batch_layout.arithmetic import ARITHMETIC
from autodist_py.kernel.analysis.batch_layout.back_propagation import BACK_PROPAGATION
from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    MIXED,
    REPLICATED,
    SHAPE,
    SHARDED,
    TAKES_SHAPE,
    BatchLayout,
    Operands,
)
from autodist_py.kernel.analysis.batch_layout.linear import LINEAR
from autodist_py.kernel.analysis.batch_layout.movement import LAYOUT
from autodist_py.kernel.analysis.batch_layout.rules import layout_of
from autodist_py.kernel.ir.graph import SEED_INPUT, SEEDED_RANDOM
from tests.support.rule_results import FAILS_ON_NONE, JOINED, joined, require_same
from tests.support.rule_samples import Sample, samples

OF_RESOURCES = frozenset({"LookupTableFindV2", "ResourceGather", "ResourceGatherNd"})
KNOWN = sorted(
    (ARITHMETIC.keys() | LAYOUT.keys() | LINEAR | BACK_PROPAGATION.keys())
    - (OF_RESOURCES | SEEDED_RANDOM | SEED_INPUT.keys())
)
"""But for those of which each replica has numbers of its own, and for those of resources, which have a twin here."""

TRIED, ENOUGH = 100, 2


def layouts_of(sample: Sample) -> tuple[BatchLayout, ...]:
    """What the rules say of each result."""
    op = sample.op
    constants = [value if known else None for value, known in zip(sample.values, sample.constant, strict=True)]
    operands = Operands.of(op.node_def, list(op.inputs), sample.layouts, constants, sample.blocks)
    found = layout_of(operands)
    if found is MIXED and op.type in BACK_PROPAGATION:
        found = BACK_PROPAGATION[op.type](operands)
    return found if isinstance(found, tuple) else (found,) * len(op.outputs)


def combined(sample: Sample, found: Sequence[BatchLayout]) -> list[int]:
    """The inputs that an op beside rows reads combined, but for shapes that say how many rows to return."""
    if SHARDED not in found:
        return []
    takes = TAKES_SHAPE.get(sample.op.type)
    return [
        index
        for index, layout in enumerate(sample.layouts)
        if layout not in (SHARDED, REPLICATED) and not (index == takes and layout in (SHAPE, COUNT))
    ]


def check(sample: Sample, found: Sequence[BatchLayout], rng: np.random.Generator) -> bool:
    """Compare; whether anything could be."""
    if 0 in sample.parts and sample.op.type in FAILS_ON_NONE:
        return False
    whole = sample.run(sample.values)
    own = sample.run_parts(rng, combined(sample, found))
    if own is None:
        return False
    for index, (layout, wanted) in enumerate(zip(found, whole, strict=True)):
        if layout not in JOINED:
            continue
        for value in joined(layout, [results[index] for results in own], sample.parts):
            require_same(value, wanted, sample, found)
    return not JOINED.isdisjoint(found)


@pytest.mark.parametrize("op_type", KNOWN)
def test_a_rule_is_true_on_random_parts(op_type: str) -> None:
    """A few samples of all combinations of layouts that come up."""
    rng = np.random.default_rng(1)
    checked: Counter[tuple[tuple[BatchLayout, ...], ...]] = Counter()
    for sample in samples(op_type, seed=1, tries=TRIED):
        found = layouts_of(sample)
        kind = (sample.layouts, found)
        is_said = set(found) != {MIXED} and any(layout is not REPLICATED for layout in sample.layouts)
        if is_said and checked[kind] < ENOUGH:
            checked[kind] += check(sample, found, rng)
    assert checked.total(), "no sample of it is followed"
