"""The combinations of programs and clusters that the oracle is run on: some in each run, the rest marked slow."""

import itertools
from collections.abc import Collection
from typing import Any

import pytest

from tests.support.cluster_pool import SHAPES
from tests.support.oracle_programs import MODELS, OPTIMIZERS


def matrix(families: Collection[str]) -> list[Any]:
    """Parameters (cluster, family, optimizer, model, clip), the full product.

    Not slow is one of each cluster and optimizer, chosen so that any two values of any two axes meet
    (`tests/oracle/test_matrix.py`).
    """
    parameters = []
    axes = itertools.product(enumerate(SHAPES), enumerate(families), enumerate(OPTIMIZERS), enumerate(MODELS))
    for (i, shape), (j, family), (k, optimizer), (m, model) in axes:
        is_chosen = j == (i + k) % len(families) and m == (i - k) % len(MODELS)
        clip = (i // 2 + k // 2) % 2 == 0
        name = f"{shape.name}-{family}-{optimizer}-{model}{'-clipped' if clip else ''}"
        marks = () if is_chosen else pytest.mark.slow
        parameters.append(pytest.param(shape, family, optimizer, model, clip, id=name, marks=marks))
    return parameters
