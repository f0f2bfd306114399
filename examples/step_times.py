"""A hook that logs how long each step takes, around a step function on scikit-learn's digits.

Ways to run it:

    python examples/step_times.py                          one worker
    autodist run --local 2 examples/step_times.py          two workers, with a file for each
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf
from sklearn.datasets import load_digits

from autodist_py import AutoDist, StepHook

STEPS = 50
BATCH_SIZE = 128


class StepTimeLog(StepHook):
    """Appends a line to a file for each step: its number, and the seconds that it took."""

    def __init__(self, path: Path):
        self.path = path
        self.begun = 0.0

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        self.begun = time.perf_counter()

    def after(self, step: int) -> None:
        self._write(f"{step} {time.perf_counter() - self.begun:.6f}")

    def failed(self, step: int, error: BaseException) -> None:
        self._write(f"{step} failed: {error!r}")

    def _write(self, line: str) -> None:
        with self.path.open("a") as log:
            log.write(f"{line}\n")


def main(folder: Path) -> None:
    autodist = AutoDist(seed=1)
    log = folder / f"steps-{autodist.rank}.txt"
    autodist.add_step_hook(StepTimeLog(log))
    digits = load_digits()
    images, labels = digits.data.astype("float32") / 16, digits.target
    weights = tf.Variable(tf.zeros([64, 10]), name="weights")

    @autodist.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ weights)
            loss = tf.reduce_mean(losses)
        weights.assign_sub(0.5 * tape.gradient(loss, weights))
        return loss

    for step in range(STEPS):
        first = step * BATCH_SIZE % (len(images) - BATCH_SIZE)
        loss = train_step(images[first : first + BATCH_SIZE], labels[first : first + BATCH_SIZE])
    if autodist.is_chief:
        print(f"loss {float(loss):.4f}; the times of {STEPS} steps are in {log}")
    autodist.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
