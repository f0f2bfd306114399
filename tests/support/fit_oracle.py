"""The oracle of `fit`: plain Keras on one device, in the same process."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from autodist_py import AutoDist
from autodist_py.strategy_builders.base import StrategyBuilder
from tests.support.oracle import assert_close

TOLERANCE = 1e-8
RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(22, 6)), RNG.integers(0, 3, 22)
WEIGHTS = RNG.uniform(0.5, 2.0, 22)
VALIDATION = (RNG.normal(size=(7, 6)), RNG.integers(0, 3, 7))

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9), clipnorm=0.5),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.01, global_clipnorm=0.5),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02, centered=True, clipvalue=0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.05),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "muon": lambda: keras.optimizers.Muon(0.02),
    "lamb": lambda: keras.optimizers.Lamb(0.05),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "accumulated": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
}


def classifier() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])


def compiled(optimizer: Any, make: Callable[[], keras.Model] = classifier, **options: Any) -> keras.Model:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(11)
    model = make()
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **{"metrics": ["accuracy"], "jit_compile": False, **options},
    )
    return model


def in_half_precision(library: Any) -> Any:
    """A small model in mixed_float16, of Keras or of tf_keras; what it returns is of float32."""
    library.backend.set_floatx("float32")
    library.utils.set_random_seed(11)
    layers = [
        library.layers.Dense(5, activation="tanh", kernel_regularizer="l2", dtype="mixed_float16"),
        library.layers.Dense(3, dtype="mixed_float16"),
        library.layers.Activation("softmax", dtype="float32"),
    ]
    return library.Sequential(layers)


def fitted(model: keras.Model, *data: Any, **options: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(12)
    history = model.fit(*data, **{"epochs": 2, "verbose": 0, **options})
    state = {**named("weight", model.variables), **named("slot", model.optimizer.variables)}
    return {**state, **{f"history of {name}": np.array(values) for name, values in history.history.items()}}


def named(kind: str, variables: list[Any]) -> dict[str, np.ndarray]:
    """By number: Keras counts on in the names of a process."""
    return {f"{kind} {number}": np.array(variable) for number, variable in enumerate(variables)}


def compare(
    train: Callable[[], dict[str, Any]],
    *,
    tolerance: float = TOLERANCE,
    strategy_builder: StrategyBuilder | str | None = None,
) -> dict[str, Any]:
    """`train` as it is, and in the scope of an AutoDist."""
    keras.config.set_floatx("float64")
    expected = train()
    with AutoDist(strategy_builder=strategy_builder) as autodist, autodist.scope():
        values = train()
    assert values.keys() == expected.keys()
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, tolerance)
    return values
