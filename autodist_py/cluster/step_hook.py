"""`StepHook`: what is done before each step of all workers, after it, and when it fails."""

from collections.abc import Sequence

import tensorflow as tf


class StepHook:
    """Is called around each step that all workers take; a subclass overrides what it needs.

    Hooks nest, as `with` statements do. `before` is called in the order in which the hooks stand, `after` and `failed`
    in the reverse order. A hook whose `before` has returned is told of the step's end, by exactly one of the two.
    """

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        """The step begins.

        Args:
            step: its number: the first step of this process is 1.
            feeds: the tensors that the step is given, in the order of its inputs.

        Raises:
            Exception: the step is not taken, and fails with this error.
        """

    def after(self, step: int) -> None:
        """The step has ended, and its results are there. An error that this raises fails the step."""

    def failed(self, step: int, error: BaseException) -> None:
        """The step has raised `error`, or a later hook has. An error that this raises takes its place."""
