"""Programs whose dense layers' gradients travel in another way than by one all-reduce, beside one device."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.support.oracle import SINGLE, Parts, compare_function, compare_graph, settings
from tests.support.oracle_programs import FUNCTION_FAMILIES, SIZES, batches, graph_program

OWN_SIZES = [(3, 2, 4), (4, 1, 2), (0, 3, 1), (2, 2, 2), (1, 0, 2)]
"""For each step the rows of each worker; some of them have none."""

FACTORS = AllReduce(factors=True)
"""All products of rows by their factors."""
PIECES = AllReduce(factors=False, bytes_per_pack=16)
"""All products of rows in pieces of a few numbers."""


def travelled(folder: str, run: Callable[[], Any], builder: AllReduce = FACTORS) -> tuple[Any, list[str]]:
    """What `run` returns, and of which variables gradients travelled meanwhile in the builder's way."""
    own = Path(folder) / str(os.getpid())
    with settings(dump_dir=own):
        result = run()
    planned = [path.read_text() for path in sorted(own.rglob("*-plan-communication.txt"))]
    assert planned, "no program was compiled"
    lines = [line for text in planned for line in text.splitlines() if line.startswith("event ")]
    ours = [line for line in lines if ("GatherFactors[" if builder.factors else ", in pieces") in line]
    names = [line.partition("gradients of ")[2].partition("; ")[0].partition(", with")[0] for line in ours]
    return result, sorted({name for line in names for name in line.split(", ")} - {"in pieces"})


def train(
    door: str,
    folder: str,
    *,
    model: str = "dense",
    optimizer: str = "sgd",
    sizes: Sequence[int] = SIZES,
    own_sizes: list[tuple[int, ...]] | None = None,
    dtype: str = "float64",
    reduction: str = "mean",
    clip: bool = False,
    builder: AllReduce = FACTORS,
    **options: Any,
) -> list[str]:
    """Compare a program of that door and model with one device; of which variables gradients travelled so."""
    parts = None if own_sizes is None else Parts(own_sizes)
    sizes = sizes if own_sizes is None else [sum(step) for step in own_sizes]
    data = batches(model, sizes, dtype=dtype)
    given: dict[str, Any] = {
        "parts": parts,
        "autodist": {"strategy_builder": builder, **options},
        "tolerance": SINGLE if dtype == "float32" else 1e-9,
    }
    extra: dict[str, Any] = {"clip": clip, "reduction": reduction}
    if door != "keras-3":
        extra["dtype"] = dtype
    if door == "graph":
        program = graph_program(model, optimizer, **extra)
        return travelled(folder, lambda: compare_graph(program, data, **given), builder)[1]
    family = FUNCTION_FAMILIES[door](model, optimizer, **extra)
    return travelled(folder, lambda: compare_function(family, data, **given), builder)[1]


def sequences() -> tuple[np.ndarray, np.ndarray]:
    """Rows of four steps, and their classes."""
    rng = np.random.default_rng(8)
    return rng.normal(size=(22, 4, 6)), rng.integers(0, 3, 22)


class Attention(keras.layers.Layer):
    """Queries, keys and values of one input, by dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(5, use_bias=False) for _ in range(3)]

    def call(self, inputs: Any) -> Any:
        query, key, value = (part(inputs) for part in self.parts)
        scores = keras.ops.softmax(keras.ops.matmul(query, keras.ops.transpose(key, [0, 2, 1])))
        return keras.ops.matmul(scores, value)


def attentive() -> keras.Model:
    """A model of layers that share factors, and of rank 3."""
    einsum = keras.layers.EinsumDense("abc,cd->abd", output_shape=(4, 5), bias_axes="d", activation="tanh")
    return keras.Sequential([Attention(), einsum, keras.layers.Flatten(), keras.layers.Dense(3)])
