"""What Keras's users may add to a model that is compiled in `scope()`."""

import time
from typing import Any

import keras

from autodist_py.capture.doors.keras import hooked
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
        self._begin = self._end = time.perf_counter()
        self._before = self._hooked.examples
        self._num_batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """See keras.callbacks.Callback."""
        self._end = time.perf_counter()
        self._num_batches += 1
        if self._num_batches == 1:
            self._first_end, self._first = self._end, self._hooked.examples

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """See keras.callbacks.Callback."""
        if logs is not None and self._num_batches:
            begin, before = (self._begin, self._before) if self._num_batches == 1 else (self._first_end, self._first)
            logs["examples_per_second"] = (self._hooked.examples - before) / (self._end - begin)

    # What tf_keras asks of a callback beside what Keras 3 does.

    _supports_tf_logs = False

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False
