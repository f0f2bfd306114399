"""KerasHub's models, small and with random weights, fitted as on one device."""

from typing import Any

import keras
import numpy as np
import pytest

from tests.packages.fitting import BATCH, EXAMPLES, STRATEGIES, Values, assert_as_on_one_device, package, state
from tests.support.cluster_pool import Cluster
from tests.support.cluster_pool import same_on_all_workers as same

keras_hub = package("keras_hub", "keras-hub")

RNG = np.random.default_rng(7)
WORDS, LENGTH = 23, 9
TOKENS = RNG.integers(1, WORDS, [EXAMPLES, LENGTH])
PADDING = np.arange(LENGTH) < RNG.integers(3, LENGTH + 1, EXAMPLES)[:, None]
SEGMENTS = RNG.integers(0, 2, [EXAMPLES, LENGTH])
CLASSES = RNG.integers(0, 3, EXAMPLES)
POSITIONS = np.sort(np.argsort(RNG.normal(size=[EXAMPLES, LENGTH]), axis=1)[:, :3], axis=1)


def trained(model: keras.Model, x: Any, y: Any, weights: Any = None, **compiled: Any) -> Values:
    keras.utils.set_random_seed(12)
    model.compile(jit_compile=False, **compiled)
    history = model.fit(x, y, sample_weight=weights, batch_size=BATCH, epochs=1, verbose=0)
    return state(model, history)


def bert() -> Any:
    return keras_hub.models.BertBackbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        dropout=0.0,
        max_sequence_length=LENGTH,
    )


def bert_classifier() -> Values:
    model = keras_hub.models.BertTextClassifier(bert(), 3, preprocessor=None, dropout=0.0)
    x = {"token_ids": TOKENS, "segment_ids": SEGMENTS, "padding_mask": PADDING}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return trained(model, x, CLASSES, optimizer=keras.optimizers.AdamW(0.01), loss=loss, metrics=["accuracy"])


def gpt2_causal_lm(reduction: str = "sum_over_batch_size") -> Values:
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=WORDS,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        dropout=0.0,
        max_sequence_length=LENGTH,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    x = {"token_ids": TOKENS[:, :-1], "padding_mask": PADDING[:, :-1]}
    return trained(
        model,
        x,
        TOKENS[:, 1:],
        PADDING[:, 1:],
        optimizer=keras.optimizers.Adam(0.01, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )


def gpt2_by_real_words() -> Values:
    return gpt2_causal_lm("mean_with_sample_weight")


def gpt2_by_sum() -> Values:
    return gpt2_causal_lm("sum")


def bert_masked_lm() -> Values:
    model = keras_hub.models.BertMaskedLM(bert(), preprocessor=None)
    labels = np.take_along_axis(TOKENS, POSITIONS, axis=1)
    weights = np.take_along_axis(PADDING, POSITIONS, axis=1).astype("float64")
    x = {
        "token_ids": TOKENS,
        "segment_ids": SEGMENTS,
        "padding_mask": PADDING,
        "mask_positions": POSITIONS,
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return trained(model, x, labels, weights, optimizer=keras.optimizers.Adam(0.01), loss=loss)


PROGRAMS = {
    program.__name__: program
    for program in (
        bert_classifier,
        bert_masked_lm,
        gpt2_causal_lm,
        gpt2_by_real_words,
        gpt2_by_sum,
    )
}


def fitted(program: str, strategy_builder: str) -> Values:
    def train() -> Values:
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(11)
        return PROGRAMS[program]()

    return assert_as_on_one_device(train, strategy_builder=strategy_builder)


@pytest.mark.on(1)
@pytest.mark.parametrize("strategy_builder", STRATEGIES)
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_model_is_fitted_as_on_one_device(cluster: Cluster, program: str, strategy_builder: str) -> None:
    same(cluster.run(fitted, program=program, strategy_builder=strategy_builder))
