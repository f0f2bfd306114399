"""Two outputs with loss weights and sample weights, activity regularizer, constraint, validation after each epoch."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import rng, tumours
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("training recipes", "Keras fit", sizes=(8, 8, 5))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    count = sum(header.sizes)
    x, kind = tumours()
    targets = {"kind": kind[:count], "size": x[:count, :1]}
    weights = {"kind": rng(31).uniform(0.5, 2.0, count), "size": rng(32).uniform(0.0, 1.0, count)}
    held_out = (x[count : count + 9, 1:], {"kind": kind[count : count + 9], "size": x[count : count + 9, :1]})
    with autodist.scope():
        inputs = keras.Input([29])
        trunk = keras.layers.Dense(6, activation="tanh", activity_regularizer=keras.regularizers.L1(1e-3))(inputs)
        outputs = {
            "kind": keras.layers.Dense(2, name="kind")(trunk),
            "size": keras.layers.Dense(1, name="size", kernel_constraint=keras.constraints.MaxNorm(1.0))(trunk),
        }
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.Adam(0.01, clipvalue=0.1),
            {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": keras.losses.LogCosh()},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"]},
            weighted_metrics={"size": ["mae"]},
            jit_compile=False,
        )
    yield from fitted(
        model, x[:count, 1:], targets, sample_weight=weights, validation_data=held_out, batch_size=header.sizes[0]
    )
