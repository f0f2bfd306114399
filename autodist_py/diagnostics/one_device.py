"""A captured step's own code on one device, as TensorFlow runs it: nothing of it is compiled.

It is what a "plain" recorded run runs; sessions have theirs in `program/session_programs.py`.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from autodist_py.capture.doors.function import CapturedFunction


class OneDeviceStep:
    """A captured step, run as a tf.function."""

    goes_among = ""
    """No other programs: the run ends after a few steps."""

    def __init__(self, captured: CapturedFunction, *, any_size: bool):
        """Of that function, traced for any number of examples, as `fit` does; else for those that it is given."""
        fed = [one for one in captured.item.inputs if one.kind != "state"]
        signature = [tf.TensorSpec(one.shape, one.dtype) for one in fed] if any_size else None
        self._step = tf.function(captured.user_step, input_signature=signature, reduce_retracing=True)
        self._result = captured.result

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One step: a value for each of the user's results."""
        return self._result.unpack(self._step(*feeds))
