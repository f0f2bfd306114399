"""Keras's own applications, without weights and on small pictures, tuned as on one device.

They are tuned as they mostly are: what is normalized is so by the averages of before.
"""

import keras
import numpy as np
import pytest

from tests.packages.fitting import Values, assert_as_on_one_device, state
from tests.support.cluster_pool import TWO_REPLICAS, TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same

CLUSTERS = [TWO_REPLICAS, TWO_WORKERS]
RNG = np.random.default_rng(7)
PICTURES = RNG.uniform(0.0, 255.0, [19, 32, 32, 3])
CLASSES = RNG.integers(0, 3, 19)


def mobile_net() -> keras.Model:
    return keras.applications.MobileNetV2(input_shape=(32, 32, 3), alpha=0.35, weights=None, classes=3)


def efficient_net() -> keras.Model:
    model = keras.applications.EfficientNetB0(input_shape=(32, 32, 3), weights=None, classes=3)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0  # Replicas drop other units.
    return model


PROGRAMS = {program.__name__: program for program in (mobile_net, efficient_net)}


def fitted(program: str) -> Values:
    def train() -> Values:
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(11)
        model = PROGRAMS[program]()
        for layer in model.layers[-30:]:
            layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)
        for layer in model.layers[:-30]:
            layer.trainable = False
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
        return state(model, model.fit(PICTURES, CLASSES, batch_size=4, verbose=0))

    return assert_as_on_one_device(train, strategy_builder="AllReduce")


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(PROGRAMS))
@pytest.mark.parametrize(
    "cluster", [TWO_REPLICAS, TWO_WORKERS], ids=lambda one: one.name, indirect=True, scope="module"
)
def test_a_network_is_fitted_as_on_one_device(cluster: Cluster, program: str) -> None:
    same(cluster.run(fitted, program=program))
