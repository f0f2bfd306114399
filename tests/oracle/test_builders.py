"""Every strategy builder, on models of several kinds: `fit` trains as on one device."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.from_file import FromFile
from autodist_py.strategy_builders.mixed import Parallax, PerVariable
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from autodist_py.strategy_builders.partitioned import (
    PartitionedAR,
    PartitionedPS,
    RandomAxisPartitionAR,
    ShardedOptimizer,
    UnevenPartitionedPS,
)
from tests.support.cluster_pool import THREE_WORKERS, TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import compare, compiled, fitted

pytestmark = [pytest.mark.first, pytest.mark.turns(6)]

RNG = np.random.default_rng(8)
WORDS, LENGTH = 11, 5
IDS, LABELS = RNG.integers(0, WORDS, (22, LENGTH)), RNG.integers(0, 3, 22)
NEXT = np.roll(IDS, -1, axis=1)
X = RNG.normal(size=(22, LENGTH, 4))


class TiedTransformer(keras.Model):
    """A language model whose table embeds words and, as a matrix, scores the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(WORDS, 6)
        # Without the biases: that of the keys has no gradient but what is left of rounding.
        self.attention = keras.layers.MultiHeadAttention(num_heads=2, key_dim=3, use_bias=False)
        self.normalization = keras.layers.LayerNormalization()

    def call(self, ids: Any) -> Any:
        words = self.table(ids)
        seen = self.normalization(words + self.attention(words, words, use_causal_mask=True))
        return keras.ops.matmul(seen, keras.ops.transpose(self.table.embeddings))


def bag_of_words() -> keras.Model:
    pooling = keras.layers.GlobalAveragePooling1D()
    return keras.Sequential([keras.layers.Embedding(WORDS, 4), pooling, keras.layers.Dense(3)])


def perceptron() -> keras.Model:
    hidden = keras.layers.Dense(6, activation="tanh")
    return keras.Sequential([keras.layers.Flatten(), hidden, keras.layers.Dense(3)])


def recurrent() -> keras.Model:
    return keras.Sequential([keras.layers.GRU(4), keras.layers.Dense(3)])


MODELS: dict[str, tuple[Callable[[], keras.Model], Any, Any]] = {
    "perceptron": (perceptron, X, LABELS),
    "bag-of-words": (bag_of_words, IDS, LABELS),
    "tied-transformer": (TiedTransformer, IDS, NEXT),
    "recurrent": (recurrent, X, LABELS),
}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
}


class SavedFirst:
    """A strategy of several builders, through a file."""

    def __init__(self, path: str):
        self.path = path

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        PerVariable({"*kernel": PS()}, default=PSLoadBalancing()).build(item, resources).save(self.path)
        return FromFile(self.path).build(item, resources)


BUILDERS: dict[str, Any] = {
    "all-reduce": AllReduce(chunk_size=2),
    "ps": PS(),
    "ps-load-balancing": PSLoadBalancing(),
    "parallax": Parallax(),
    "parallax-ring": Parallax(local_proxy_variable=True, all_reduce_spec="RING"),
    "per-variable": PerVariable({"*kernel": AllReduce(), "*e*": PS()}, default="PSLoadBalancing"),
    "from-file": SavedFirst,
    "partitioned-ps": PartitionedPS(min_shard_bytes=1),
    "partitioned-ps-proxies": PartitionedPS(local_proxy_variable=True, min_shard_bytes=64),
    "uneven-partitioned-ps": UnevenPartitionedPS(min_shard_bytes=1),
    "partitioned-ar": PartitionedAR(chunk_size=2, min_shard_bytes=1),
    "random-axis-partition-ar": RandomAxisPartitionAR(chunk_size=3, seed=1, all_reduce_spec="RING", min_shard_bytes=1),
    "sharded-optimizer": ShardedOptimizer(),
}


def train(builder: str, model: str, optimizer: str, folder: str) -> dict[str, Any]:
    make, x, y = MODELS[model]
    made = BUILDERS[builder]
    return compare(
        lambda: fitted(compiled(OPTIMIZERS[optimizer](), make), x, y, batch_size=8),
        strategy_builder=made(f"{folder}/strategy.json") if isinstance(made, type) else made,
    )


def cases() -> list[Any]:
    """All of them; not slow is one of each builder and every other model."""
    found = []
    shapes = (TWO_WORKERS, THREE_WORKERS)
    axes = itertools.product(enumerate(BUILDERS), enumerate(MODELS), enumerate(OPTIMIZERS), enumerate(shapes))
    for (i, builder), (j, model), (k, optimizer), (m, shape) in axes:
        is_chosen = k == (i // 2 + j // 2) % 2 and m == (i // 4 + j // 2) % 2 and (i + j) % 2 == 0
        marks = () if is_chosen else pytest.mark.slow
        name = f"{shape.name}-{builder}-{model}-{optimizer}"
        found.append(pytest.param(shape, builder, model, optimizer, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("cluster", "builder", "model", "optimizer"), cases(), indirect=["cluster"], scope="module")
def test_a_builders_strategy_trains_as_one_device_does(
    cluster: Cluster, builder: str, model: str, optimizer: str, tmp_path: Any
) -> None:
    same(cluster.run(train, builder=builder, model=model, optimizer=optimizer, folder=str(tmp_path)))
