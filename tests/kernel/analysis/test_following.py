"""What is followed along any axis, against its definition: replicas' results, joined there, are one device's."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from autodist_py.kernel.analysis.batch_layout.along import RULES, Along
from autodist_py.kernel.analysis.batch_layout.following import Known, followed, is_exact, known_by
from autodist_py.kernel.analysis.batch_layout.layouts import MIXED, Operands
from autodist_py.kernel.analysis.batch_layout.sizes import SIZED
from tests.support.rule_results import FAILS_ON_NONE, JOINED, joined, require_same
from tests.support.rule_samples import Sample, samples

MIXING = frozenset({"BroadcastTo", "Cholesky", "LogMatrixDeterminant", "MatrixDeterminant", "MatrixInverse"})
"""Their rules only say what mixes examples, or has none."""
NOT_DRAWN = frozenset({"BatchMatMulV3", "RandomShuffle", "ResourceGather", "ScatterNd"})
"""The first has the rule of BatchMatMulV2, and seldom types that agree. The next one draws, the third reads a variable
and has a twin here, and the shape of the last one is made of the number of examples."""
FOLLOWED = sorted((RULES.keys() | SIZED) - MIXING - NOT_DRAWN)

TRIED, ENOUGH = 100, 2


def known_of(sample: Sample) -> list[Known]:
    """What is known of each input."""
    return [
        Known(MIXED, Along(frozenset({axis}))) if layout is MIXED else known_by(layout)
        for layout, axis in zip(sample.layouts, sample.axes, strict=True)
    ]


def follow(sample: Sample, reads: Sequence[Known]) -> list[Known]:
    """What is known of each result."""
    op = sample.op
    constants = [value if known else None for value, known in zip(sample.values, sample.constant, strict=True)]
    operands = Operands.of(op.node_def, list(op.inputs), sample.layouts, constants, sample.blocks)
    return [followed(operands, reads, result) for result in op.outputs]


def is_told(found: Known) -> bool:
    """Whether it is said how the whole batch's value is made of those of replicas."""
    along = found.along
    if along is None:
        return False
    in_order = along.keeps_apart and len(along.axes) == 1 and not (along.order or along.joined or along.others)
    return found.layout in JOINED or in_order


def whole(found: Known, own: Sequence[np.ndarray], parts: Sequence[int]) -> list[np.ndarray]:
    if found.layout in JOINED:
        return list(joined(found.layout, own, parts))
    assert found.along is not None
    (axis,) = found.along.axes
    return [np.concatenate(own, axis)]


def check(sample: Sample, said: Mapping[int, Known], rng: np.random.Generator) -> bool:
    """Compare the results of which something is said, by position; whether anything could be."""
    own = sample.run_parts(rng, ())
    if own is None:
        return False
    wanted = sample.run(sample.values)
    for index, known in said.items():
        for value in whole(known, [results[index] for results in own], sample.parts):
            require_same(value, wanted[index], sample, known)
    return True


@pytest.mark.parametrize("op_type", FOLLOWED)
def test_what_is_followed_is_true_on_random_parts(op_type: str) -> None:
    """A few samples of all combinations of places of the examples that come up."""
    rng = np.random.default_rng(1)
    checked: Counter[str] = Counter()
    for sample in samples(op_type, seed=1, tries=TRIED, turned=True):
        reads = known_of(sample)
        found = follow(sample, reads)
        said = {at: one for at, one in enumerate(found) if is_told(one) and is_exact(one, op_type, reads)}
        kind = repr((reads, found))
        follows = any(read.along is not None and not read.along.is_same for read in reads)
        if follows and said and checked[kind] < ENOUGH and not (0 in sample.parts and op_type in FAILS_ON_NONE):
            checked[kind] += check(sample, said, rng)
    assert checked.total(), "no sample of it is followed"
