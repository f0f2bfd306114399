"""TensorFlow Probability's layers and variational losses, fitted as on one device.

What a layer samples differs between replicas, as it must; so posteriors are used by their means here.
"""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.packages.fitting import BATCH, EXAMPLES, STRATEGIES, Values, assert_as_on_one_device, package, state
from tests.support.cluster_pool import Cluster
from tests.support.cluster_pool import same_on_all_workers as same

tfp = package("tensorflow_probability", "tensorflow-probability")

RNG = np.random.default_rng(7)
X = RNG.normal(size=[EXAMPLES, 4])
Y = RNG.normal(size=[EXAMPLES, 1])


def fit(model: Any, x: Any, y: Any, **compiled: Any) -> Values:
    model.compile(tf_keras.optimizers.Adam(0.02), **compiled)
    return state(model, model.fit(x, y, batch_size=BATCH, verbose=0))


def mean(distribution: Any) -> Any:
    return distribution.mean()


def variational_dense() -> Values:
    def divergence(q: Any, p: Any, _: Any) -> Any:
        return tfp.distributions.kl_divergence(q, p) / EXAMPLES

    def layer(units: int, **options: Any) -> Any:
        return tfp.layers.DenseReparameterization(
            units, kernel_posterior_tensor_fn=mean, kernel_divergence_fn=divergence, **options
        )

    return fit(tf_keras.Sequential([layer(5, activation="tanh"), layer(1)]), X, Y, loss="mse", metrics=["mae"])


def regression() -> Values:
    """The negative log-likelihood of a distribution that the model returns."""

    def normal(parameters: Any) -> Any:
        return tfp.distributions.Normal(parameters[..., :1], 1e-3 + tf.math.softplus(parameters[..., 1:]))

    def likelihood(y: Any, distribution: Any) -> Any:
        return -distribution.log_prob(y)

    outputs = tfp.layers.DistributionLambda(normal, convert_to_tensor_fn=mean)
    model = tf_keras.Sequential([tf_keras.layers.Dense(5, "tanh"), tf_keras.layers.Dense(2), outputs])
    return fit(model, X, Y, loss=likelihood)


def autoencoder() -> Values:
    prior = tfp.distributions.MultivariateNormalDiag(loc=tf.zeros([2], tf.float64))
    encoder = [
        tf_keras.layers.Dense(tfp.layers.MultivariateNormalTriL.params_size(2)),
        tfp.layers.MultivariateNormalTriL(
            2,
            convert_to_tensor_fn=mean,
            activity_regularizer=tfp.layers.KLDivergenceRegularizer(prior, weight=0.5, use_exact_kl=True),
        ),
    ]
    decoder = [tf_keras.layers.Dense(8), tfp.layers.IndependentNormal(4, convert_to_tensor_fn=mean)]
    model = tf_keras.Sequential([*encoder, *decoder])
    return fit(model, X, X, loss=lambda x, distribution: -distribution.log_prob(x))


PROGRAMS = {program.__name__: program for program in (variational_dense, regression, autoencoder)}


def fitted(program: str, strategy_builder: str) -> Values:
    def train() -> Values:
        tf_keras.backend.set_floatx("float64")
        tf_keras.utils.set_random_seed(11)
        return PROGRAMS[program]()

    return assert_as_on_one_device(train, strategy_builder=strategy_builder)


@pytest.mark.on(1)
@pytest.mark.parametrize("strategy_builder", STRATEGIES)
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_model_is_fitted_as_on_one_device(cluster: Cluster, program: str, strategy_builder: str) -> None:
    same(cluster.run(fitted, program=program, strategy_builder=strategy_builder))
