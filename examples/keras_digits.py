"""Handwritten digits by a small convolutional network: Keras's own `fit`, on every worker of the cluster.

Ways to run it:

    python examples/keras_digits.py                            one worker
    autodist run --local 2 examples/keras_digits.py            two workers; the batch size stays that of all together

The chief saves the best model (digits.keras) and the curves of the training (digits.png) in --folder.
"""

import argparse
from pathlib import Path

import keras
import matplotlib as mpl
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from autodist_py import AutoDist
from autodist_py.keras import ThroughputLogger

SEED = 1


def main() -> None:
    options = parse_options()
    autodist = AutoDist(seed=SEED)
    keras.utils.set_random_seed(SEED)
    train_images, test_images, train_labels, test_labels = read_digits()

    with autodist.scope():
        model = make_model()
        model.compile(
            keras.optimizers.AdamW(2e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    options.folder.mkdir(parents=True, exist_ok=True)
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(patience=2),
        keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(options.folder / "digits.keras", save_best_only=True),
        ThroughputLogger(),
    ]
    history = model.fit(
        train_images,
        train_labels,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_split=0.1,
        callbacks=callbacks,
        verbose=2 if autodist.is_chief else 0,
    )
    loss, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    if autodist.is_chief:
        print(f"on {len(test_labels)} images that it has not seen: loss {loss:.3f}, accuracy {accuracy:.1%}")
        plot(history.history, options.folder / "digits.png")
        print(f"saved {options.folder / 'digits.keras'} and {options.folder / 'digits.png'}")
    autodist.close()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a convolutional network on 8 x 8 images of digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="examples of one step, over all workers")
    parser.add_argument("--folder", type=Path, default=Path("digits"), help="where the model and the curves go")
    return parser.parse_args()


def read_digits() -> list[np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return train_test_split(images, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=SEED)


def make_model() -> keras.Model:
    def block(filters: int) -> list[keras.Layer]:
        return [
            keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
        ]

    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            *block(16),
            keras.layers.MaxPooling2D(),
            *block(32),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )


def plot(history: dict[str, list[float]], file: Path) -> None:
    """The curves of the loss and of the accuracy, while it is trained and on the data for validation."""
    mpl.use("Agg")  # Into a file: there may be no screen.
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for panel, name in zip(panels, ("loss", "accuracy"), strict=True):
        epochs = np.arange(1, len(history[name]) + 1)
        panel.plot(epochs, history[name], label="training")
        panel.plot(epochs, history[f"val_{name}"], label="validation")
        panel.set(xlabel="epoch", title=name)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
