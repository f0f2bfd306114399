"""A language model of Python: an embedding and a GRU learn the text of Python's own standard library, by `fit`.

Ways to run it:

    python examples/keras_text.py                              one worker
    autodist run --local 2 examples/keras_text.py              two workers; the batch size stays that of all together

At the end the chief lets the model write on.
"""

import argparse
import sysconfig
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.keras import ThroughputLogger

SEED = 1
MODULES = ("argparse", "ast", "dataclasses", "functools", "inspect", "pathlib", "statistics", "textwrap", "typing")
PROMPT = "def __init__(self"


def main() -> None:
    options = parse_options()
    autodist = AutoDist(seed=SEED)
    keras.utils.set_random_seed(SEED)
    text = read_text()
    characters = sorted(set(text))
    train, test = make_datasets(text, characters, options)

    with autodist.scope():
        model = make_model(len(characters), options)
        model.compile(
            keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3, options.epochs * len(train))),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    if autodist.is_chief:
        print(f"{len(text):,} characters, {len(characters)} different ones; {model.count_params():,} weights")
    model.fit(
        train,
        validation_data=test,
        epochs=options.epochs,
        shuffle=False,  # The dataset does it.
        callbacks=[ThroughputLogger()],
        verbose=2 if autodist.is_chief else 0,
    )
    if autodist.is_chief:
        print(write_on(model, PROMPT, characters, length=300))
    autodist.close()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a language model on the text of Python's standard library.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="passages of one step, over all workers")
    parser.add_argument("--length", type=int, default=64, help="characters of a passage")
    parser.add_argument("--units", type=int, default=192, help="of the GRU")
    return parser.parse_args()


def read_text() -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    return "".join((folder / f"{module}.py").read_text(encoding="utf-8") for module in MODULES)


def make_datasets(
    text: str, characters: list[str], options: argparse.Namespace
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Passages as numbers of characters, and the same moved on by one; a tenth of them for validation."""
    numbers = {character: number for number, character in enumerate(characters)}
    encoded = np.array([numbers[character] for character in text], np.int32)
    starts = np.random.default_rng(SEED).permutation(np.arange(0, len(encoded) - options.length - 1, options.length))
    passages = np.stack([encoded[start : start + options.length + 1] for start in starts])
    num_test = len(passages) // 10

    def dataset(part: np.ndarray) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((part[:, :-1], part[:, 1:]))

    train = dataset(passages[num_test:]).shuffle(len(passages), seed=SEED).batch(options.batch_size)
    return train.prefetch(2), dataset(passages[:num_test]).batch(options.batch_size)


def make_model(num_characters: int, options: argparse.Namespace) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([None], dtype="int32"),
            keras.layers.Embedding(num_characters, 32),
            keras.layers.GRU(options.units, return_sequences=True),
            keras.layers.Dense(num_characters),
        ]
    )


def write_on(model: keras.Model, prompt: str, characters: list[str], *, length: int) -> str:
    """`prompt`, and `length` characters after it, each drawn as the model finds it likely."""
    rng = np.random.default_rng(SEED)
    read = tf.function(model, input_signature=[tf.TensorSpec([1, None], tf.int32)])  # Op by op takes ten times as long.
    written = [characters.index(character) for character in prompt]
    for _ in range(length):
        logits = read(np.array([written[-64:]], np.int32)).numpy()[0, -1]
        likelihoods = np.exp(1.5 * (logits - logits.max()))
        written.append(int(rng.choice(len(characters), p=likelihoods / likelihoods.sum())))
    return "".join(characters[number] for number in written)


if __name__ == "__main__":
    main()
