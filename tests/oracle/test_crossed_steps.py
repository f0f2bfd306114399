"""Steps whose parts on servers and parts of collectives depend on one another crosswise train as on one device."""

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from tests.support.cluster_pool import TWO_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.crossed_steps import CROSSED, Crossed
from tests.support.oracle import Values, assert_close


def trained(name: str) -> Values:
    alone = CROSSED[name]()
    plain = tf.function(alone.step)
    rng = np.random.default_rng(7)
    with AutoDist(strategy_builder=Crossed(alone.on_servers)) as autodist:
        crossed = CROSSED[name]()
        step = autodist.function(crossed.step)
        for size in (5, 3, 6, 4):
            x = rng.uniform(0.5, 1.5, (size, 2))
            wanted = plain(tf.constant(x))
            for one, other in zip(tf.nest.flatten(step(x)), tf.nest.flatten(wanted), strict=True):
                assert_close(one, other, "result")
        for weight, one in alone.weights.items():
            assert_close(crossed.weights[weight].numpy(), one.numpy(), weight)
        return {weight: one.numpy() for weight, one in crossed.weights.items()}


@pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, UNEVEN_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)
@pytest.mark.parametrize("name", CROSSED)
def test_a_crossed_step_trains_as_on_one_device(cluster: Cluster, name: str) -> None:
    same(cluster.run(trained, name=name))
