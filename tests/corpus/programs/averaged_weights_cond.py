"""Stochastic weight averaging as one writes it with an `if`: a branch that writes the averages of several variables."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tests.corpus.header import Header, Seen
from tests.corpus.programs.averaged_weights import training

HEADER = Header("optimization methods", "step function", sizes=(8, 5, 7, 3))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    def average(weights: Sequence[tf.Variable], swa: Sequence[tf.Variable], count: tf.Variable) -> None:
        if count % 2 == 0:
            models = tf.cast(count // 2, weights[0].dtype)
            for weight, mean in zip(weights, swa, strict=True):
                mean.assign_add((weight - mean) / models)

    return training(autodist, header, average)
