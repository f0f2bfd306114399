"""What Keras's users may add to a model that is compiled in `scope()`."""

import time
from typing import Any

import keras

from autodist_py.capture.keras import hooked
from autodist_py.proto.errors import CaptureError


class ThroughputLogger(keras.callbacks.Callback):
    """Adds "examples_per_second" to the logs of each epoch: how many examples all workers together train on.

    The first step of an epoch does not count where there are others: in the first epoch it compiles the program.
    Validation does not count.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """See keras.callbacks.Callback.

        Raises:
            CaptureError: the model is not compiled in `scope()`, which counts the examples.
        """
        found = hooked(self.model)
        if found is None:
            raise CaptureError(
                "ThroughputLogger counts the examples of a model that is compiled in scope(), and "
                f"'{self.model.name}' is not"
            )
        self._hooked = found

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """See keras.callbacks.Callback."""
        self._marks = [self._now()]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """See keras.callbacks.Callback."""
        self._marks = [*self._marks[:2], self._now()]  # The beginning, the end of the first step, and of the last.

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """See keras.callbacks.Callback."""
        if logs is not None and len(self._marks) > 1:
            (begin, before), (end, after) = self._marks[-2:]
            logs["examples_per_second"] = (after - before) / (end - begin)

    def _now(self) -> tuple[float, int]:
        return time.perf_counter(), self._hooked.examples
