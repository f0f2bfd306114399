"""GPflow's sparse variational Gaussian processes, trained with minibatches as on one device."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.testing import compare
from tests.packages.fitting import EXAMPLES, STRATEGIES, package
from tests.support.cluster_pool import Cluster
from tests.support.cluster_pool import same_on_all_workers as same

gpflow = package("gpflow", "gpflow")

RNG = np.random.default_rng(7)
X = RNG.uniform(-2.0, 2.0, [EXAMPLES, 1])
Y = np.sin(2.0 * X) + 0.1 * RNG.normal(size=X.shape)
SIZES = (7, 7, 7, 7, 6)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    ends = np.cumsum(SIZES)
    return [(X[end - size : end], Y[end - size : end]) for size, end in zip(SIZES, ends, strict=True)]


def svgp(likelihood: Any, **options: Any) -> Any:
    inducing = np.linspace(-2.0, 2.0, 4)[:, None]
    return gpflow.models.SVGP(gpflow.kernels.SquaredExponential(), likelihood, inducing, num_data=EXAMPLES, **options)


def by_adam(model: Any) -> Callable[..., Any]:
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.training_loss((x, y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def gaussian() -> Callable[..., Any]:
    return by_adam(svgp(gpflow.likelihoods.Gaussian(0.1)))


def counts() -> Callable[..., Any]:
    model = svgp(gpflow.likelihoods.StudentT(), q_diag=True, whiten=False)
    return by_adam(model)


def natural_gradients() -> Callable[..., Any]:
    model = svgp(gpflow.likelihoods.Gaussian(0.1))
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    hyperparameters = by_adam(model)
    natural = gpflow.optimizers.NaturalGradient(gamma=0.1)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss = hyperparameters(x, y)
        natural.minimize(lambda: model.training_loss((x, y)), [(model.q_mu, model.q_sqrt)])
        return loss

    return step


PROGRAMS = {program.__name__: program for program in (gaussian, counts, natural_gradients)}


def fitted(program: str, strategy_builder: str) -> dict[str, float]:
    with AutoDist(strategy_builder=strategy_builder) as autodist:
        step = PROGRAMS[program]()
        comparison = compare(step, autodist.function(step), batches(), tolerance=1e-8)
        assert comparison.first is None, str(comparison)
        return comparison.differences


@pytest.mark.on(1)
@pytest.mark.parametrize("strategy_builder", STRATEGIES)
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_process_is_trained_as_on_one_device(cluster: Cluster, program: str, strategy_builder: str) -> None:
    same(cluster.run(fitted, program=program, strategy_builder=strategy_builder))
