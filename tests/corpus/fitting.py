"""Keras's `fit` as a program of the corpus shows it: after each epoch, and at the end its history."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tests.corpus.header import Seen


class _Watch(keras.callbacks.Callback):
    """Keeps what is logged for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def fitted(model: Any, *data: Any, epochs: int = 2, **options: Any) -> Iterator[Seen]:
    """`model.fit`, an epoch at a time, with what it logged for each batch."""
    for epoch in range(epochs):
        watch = _Watch()
        history = model.fit(
            *data,
            initial_epoch=epoch,
            epochs=epoch + 1,
            **{"verbose": 0, "shuffle": False, "callbacks": [watch], **options},
        )
        results = {name: np.array(values) for name, values in history.history.items()}
        yield Seen([results, watch.logs], (model, model.metrics_variables, model.optimizer))
