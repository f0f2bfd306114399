"""Handwritten digits: a TF2 training step for one device, trained by every worker of the cluster.

Ways to run it:

    python examples/digits.py                                  one worker
    autodist run --local 2 examples/digits.py                  two workers
    autodist run --local 2 examples/digits.py --compare        then the same on one device, and how far they are apart
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from autodist_py import AutoDist

SEED = 1


def main() -> None:
    options = parse_options()
    autodist = AutoDist(seed=SEED)

    digits = read_digits()
    model, optimizer = make_model()
    initial_weights = model.get_weights()

    @autodist.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return update(model, optimizer, images, labels)

    console = Console(quiet=not autodist.is_chief)
    console.print(f"{len(digits.train_labels)} images for training, {len(digits.test_labels)} for testing")
    title = "1 worker" if autodist.num_workers == 1 else f"{autodist.num_workers} workers"
    report(train(train_step, digits, options, console, title=title), model, digits, console)

    if options.compare and autodist.is_chief:
        twin, twin_optimizer = make_model()
        twin.set_weights(initial_weights)

        @tf.function(reduce_retracing=True)
        def twin_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            return update(twin, twin_optimizer, images, labels)

        report(train(twin_step, digits, options, console, title="one device"), twin, digits, console)
        difference = largest_difference(
            model.variables + optimizer.variables, twin.variables + twin_optimizer.variables
        )
        console.print(f"largest relative difference over all variables: {difference:.1e}")
    autodist.close()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small network on 8 × 8 images of handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="examples of one step, over all workers")
    parser.add_argument("--compare", action="store_true", help="train again, on one device, and compare")
    return parser.parse_args()


@dataclass(frozen=True)
class Digits:
    """8 × 8 images as rows of 64 floats in [0, 1], and the digits they show."""

    train_images: np.ndarray
    test_images: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray

    def batches(self, epochs: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Every training example once an epoch, in an order that is the same each time this is called."""
        rng = np.random.default_rng(SEED)
        for _ in range(epochs):
            order = rng.permutation(len(self.train_labels))
            for start in range(0, len(order), size):
                chosen = order[start : start + size]
                yield self.train_images[chosen], self.train_labels[chosen]


def read_digits() -> Digits:
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    return Digits(*train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=SEED))


def make_model() -> tuple[keras.Model, keras.Optimizer]:
    model = keras.Sequential(
        [keras.Input([64]), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)], name="digits"
    )
    optimizer = keras.optimizers.Adam(learning_rate=1e-3)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def update(model: keras.Model, optimizer: keras.Optimizer, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """One step of training; returns its loss."""
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@dataclass(frozen=True)
class Timing:
    """How long each step took, in seconds, and how many images it trained on."""

    title: str
    seconds: list[float]
    images: list[int]

    def __str__(self) -> str:
        # The first step includes tracing and compiling.
        throughput = sum(self.images[1:]) / sum(self.seconds[1:])
        return f"{self.title}: {1000 * np.median(self.seconds[1:]):.2f} ms a step, {throughput:,.0f} images a second"


def train(
    step: Callable[[np.ndarray, np.ndarray], tf.Tensor],
    digits: Digits,
    options: argparse.Namespace,
    console: Console,
    *,
    title: str,
) -> Timing:
    steps_per_epoch = -(-len(digits.train_labels) // options.batch_size)
    timing = Timing(title, [], [])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as progress:
        task = progress.add_task(title, total=options.epochs * steps_per_epoch, loss=float("nan"))
        for images, labels in digits.batches(options.epochs, options.batch_size):
            started = time.perf_counter()
            loss = float(step(images, labels))
            timing.seconds.append(time.perf_counter() - started)
            timing.images.append(len(labels))
            progress.update(task, advance=1, loss=loss)
    return timing


def report(timing: Timing, model: keras.Model, digits: Digits, console: Console) -> None:
    predictions = np.argmax(model(digits.test_images), axis=-1)
    accuracy = np.mean(predictions == digits.test_labels)
    console.print(f"{timing}; test accuracy {accuracy:.1%}", highlight=False, soft_wrap=True)


def largest_difference(state: list[tf.Variable], twin_state: list[tf.Variable]) -> float:
    """Over all variables: the largest difference between two values, relative to the variable's largest value."""
    pairs = [(np.asarray(one), np.asarray(other)) for one, other in zip(state, twin_state, strict=True)]
    return max(float(np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-30)) for one, other in pairs)


if __name__ == "__main__":
    main()
