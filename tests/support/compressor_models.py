"""What each compressor is to do, written in numpy from its paper: all workers at once, step after step."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Gradients = Sequence[np.ndarray]
"""One gradient, of each worker."""

Model = Callable[[Gradients], np.ndarray]
"""The next step's combined gradient, of each worker's."""


def halved(numbers: np.ndarray, name: str) -> np.ndarray:
    """In half precision, rounded as TensorFlow does: by way of float32."""
    rounded: np.ndarray = numbers.astype(np.float32).astype(tf.as_dtype(name).as_numpy_dtype)
    return rounded


def rounding(variable: str, shape: tuple[int, ...], *, dtype: str = "float16", served: bool = False) -> Model:
    """A server sums what is rounded as it is; a collective sums it in half precision."""

    def step(gradients: Gradients) -> np.ndarray:
        if served:
            return np.sum([halved(gradient, dtype).astype(gradient.dtype) for gradient in gradients], axis=0)
        total = halved(np.zeros(shape), dtype)
        for gradient in gradients:
            total = total + halved(gradient, dtype)
        return total.astype(gradients[0].dtype)

    return step


def rounding_with_feedback(
    variable: str, shape: tuple[int, ...], *, dtype: str = "float16", served: bool = False
) -> Model:
    errors: dict[int, Any] = {}

    def step(gradients: Gradients) -> np.ndarray:
        wanted = [gradient + errors.get(worker, 0) for worker, gradient in enumerate(gradients)]
        for worker, one in enumerate(wanted):
            errors[worker] = one - halved(one, dtype).astype(one.dtype)
        return rounding(variable, shape, dtype=dtype, served=served)(wanted)

    return step


def power_sgd(variable: str, shape: tuple[int, ...], *, rank: int = 4) -> Model:
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    width = min(rank, rows, columns)
    if len(shape) < 2 or width * (rows + columns) >= rows * columns:
        return lambda gradients: np.sum(gradients, axis=0)
    right = np.random.default_rng(zlib.crc32(variable.encode())).normal(size=(columns, width))
    errors: dict[int, Any] = {}

    def step(gradients: Gradients) -> np.ndarray:
        nonlocal right
        matrices = [gradient.reshape(rows, columns) + errors.get(at, 0) for at, gradient in enumerate(gradients)]
        # On the mean over workers, as the paper has it; a combined gradient here is their sum.
        left, _ = np.linalg.qr(np.mean([matrix @ right for matrix in matrices], axis=0))
        mean = left @ np.mean([matrix.T @ left for matrix in matrices], axis=0).T
        right = np.sum([matrix.T @ left for matrix in matrices], axis=0)
        for at, matrix in enumerate(matrices):
            errors[at] = matrix - mean
        return (len(gradients) * mean).reshape(shape)

    return step


def top_k(variable: str, shape: tuple[int, ...], *, ratio: float = 0.01, momentum: float = 0.0) -> Model:
    elements = int(np.prod(shape))
    count = max(1, int(np.ceil(ratio * elements)))
    velocities: dict[int, Any] = {}
    rests: dict[int, Any] = {}

    def step(gradients: Gradients) -> np.ndarray:
        total = np.zeros(elements)
        for worker, gradient in enumerate(gradients):
            velocity = momentum * velocities.get(worker, 0) + gradient.reshape(-1)
            wanted = rests.get(worker, 0) + velocity
            largest = np.argsort(-np.abs(wanted), kind="stable")[:count]
            total[largest] += wanted[largest]
            mask = np.ones(elements)
            mask[largest] = 0
            velocities[worker], rests[worker] = velocity * mask, wanted * mask
        return total.reshape(shape)

    return step


def int8(variable: str, shape: tuple[int, ...], *, block: int = 256) -> Model:
    """The group is that of the one variable; random numbers are TensorFlow's."""
    elements = int(np.prod(shape))
    blocks = -(-elements // block)
    steps = zlib.crc32(variable.encode())

    def step(gradients: Gradients) -> np.ndarray:
        nonlocal steps
        total = np.zeros(blocks * block)
        for worker, gradient in enumerate(gradients):
            numbers = np.zeros((blocks, block))
            numbers.reshape(-1)[:elements] = gradient.reshape(-1)
            scales = (np.abs(numbers).max(axis=1, keepdims=True) / 127).astype(np.float32).astype(np.float64)
            up = tf.random.stateless_uniform([blocks, block], [worker, steps], dtype=tf.float64).numpy()
            inverse = np.divide(numbers, scales, out=np.zeros_like(numbers), where=scales > 0)
            total += (np.clip(np.floor(inverse + up), -127, 127) * scales).reshape(-1)
        steps += 1
        return total[:elements].reshape(shape)

    return step


MODELS: Mapping[str, tuple[Callable[..., Model], Mapping[str, Any]]] = {
    "HorovodCompressor": (rounding, {}),
    "HorovodCompressor(dtype='bfloat16')": (rounding, {"dtype": "bfloat16"}),
    "HorovodCompressorEF": (rounding_with_feedback, {}),
    "HorovodCompressorEF(dtype='bfloat16')": (rounding_with_feedback, {"dtype": "bfloat16"}),
    "PowerSGDCompressor(rank=2)": (power_sgd, {"rank": 2}),
    "TopKCompressor(ratio=0.1)": (top_k, {"ratio": 0.1}),
    "TopKCompressor(momentum=0.5, ratio=0.05)": (top_k, {"ratio": 0.05, "momentum": 0.5}),
    "Int8Compressor(block=8)": (int8, {"block": 8}),
}
"""By the compressor's text, what makes its model, and its parameters."""

WITH_FEEDBACK = [text for text in MODELS if text.startswith(("HorovodCompressorEF", "PowerSGD", "TopK"))]


def model_of(compressor: str, variable: str, shape: tuple[int, ...], *, served: bool = False) -> Model:
    make, parameters = MODELS[compressor]
    rounds = {"served": True} if served and make in (rounding, rounding_with_feedback) else {}
    return make(variable, shape, **parameters, **rounds)
