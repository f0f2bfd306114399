"""Factors: where those of gradients are gathered, together with which others, and what becomes of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.kernel.collectives import factors
from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.collectives.factors import Costs, chosen
from autodist_py.kernel.events import AllReduceBucket
from autodist_py.kernel.ir.product import Factor, Product
from tests.support import capture_steps, kernel_programs
from tests.support.dense_layers import FEATURES, WIDE, gathered, layer, planned, stepping, weight

# -- Where they are worth it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (True, {"examples": 8}),
        (False, {"examples": 8, "factors": False}),
        (False, {"examples": None}),  # How many rows there are is not known.
        (False, {"examples": 2000}),
        (True, {"examples": None, "factors": True}),
        (True, {"examples": 2000, "factors": True}),
        (False, {"examples": 8, "where": (2,)}),  # Nothing leaves the worker.
        (True, {"examples": 8, "where": (2,), "factors": True}),
        (True, {"examples": 100, "where": (1, 1), "bandwidth": 1e9}),
        (True, {"examples": 200, "bandwidth": 1e9}),
        (False, {"examples": 200, "bandwidth": None}),
        (False, {"examples": 100, "where": (1,) * 8, "batch": "local", "bandwidth": 1e9}),
    ],
)
def test_factors_are_gathered_where_that_takes_less_time(expected, given):
    assert gathered(layer(), **given) == ({"kernel", "bias"} if expected else set())


def test_a_small_gradient_is_not_worth_two_messages():
    kernel = weight(30, 40, name="kernel")
    item = stepping(lambda x: tf.reduce_mean((x @ kernel) ** 2), [kernel], tf.ones([4, 30], tf.float64))
    assert gathered(item, examples=2) == set()


@st.composite
def layers(draw):
    """Products some of which share factors, and costs."""
    sizes, rows = st.integers(1, 4000), draw(st.integers(1, 5000))
    lefts = [factor(f"left {index}", draw(sizes), is_weighted=False) for index in range(3)]
    rights = [factor(f"right {index}", draw(sizes), is_weighted=True) for index in range(3)]
    products = {
        f"gradient {index}": Product(draw(st.sampled_from([None, *lefts])), draw(st.sampled_from(rights)), rows)
        for index in range(draw(st.integers(1, 6)))
    }
    workers, replicas = draw(st.integers(2, 8)), draw(st.integers(1, 3))
    bandwidth = 10 ** draw(st.floats(7.0, 10.0))
    costs = Costs(workers, draw(st.sampled_from([workers, workers * replicas])), replicas, bandwidth, 3e10)
    return products, costs


def factor(name, width, *, is_weighted):
    return Factor(name, width, tf.float32, is_weighted, tensor=name, op="op", position=0)


def seconds(products, costs, by_factors):
    """What these products take a step, of which some are gathered by their factors, each once."""
    total = 0.0
    for marker, product in products.items():
        size = product.right.width * (product.left.width if product.left else 1)
        if marker not in by_factors:
            total += 8 * 2 * (costs.members - 1) / costs.members * 4 * size / costs.bandwidth
        elif product.left:
            total += 2 * (costs.workers - 1) * costs.replicas * product.rows * size / costs.flops
    sent = {
        one: product.rows for marker, product in products.items() if marker in by_factors for one in product.factors
    }
    widths = sum(one.width * rows for one, rows in sent.items())
    return total + 8 * (costs.workers - 1) * costs.replicas * 4 * widths / costs.bandwidth


@given(layers(), st.booleans())
def test_no_choice_takes_longer_than_rings(drawn, is_all):
    products, costs = drawn
    found = chosen(products, costs, is_all=is_all)
    if found:
        assert seconds(products, costs, found) < seconds(products, costs, {})
    for marker, product in products.items():
        alone = {marker: product}
        if seconds(alone, costs, alone) < seconds(alone, costs, {}) - 2e-3:
            assert found, "one alone would have gained more than its messages take"


@pytest.mark.parametrize(("rows", "is_worth_it"), [(100, True), (1000, False)])
def test_what_multiplying_takes_counts(rows, is_worth_it):
    product = Product(factor("x", 4096, is_weighted=False), factor("dy", 4096, is_weighted=True), rows)
    costs = Costs(2, 2, 1, 2.3e9, 3e10)
    assert 8 * 4 * rows * (4096 + 4096) < 8 * 4 * 4096**2  # The bytes alone are fewer in both cases.
    assert bool(chosen({"gradient": product}, costs, is_all=True)) == is_worth_it


def test_the_number_of_rows_must_be_known():
    product = Product(factor("x", 4000, is_weighted=False), factor("dy", 4000, is_weighted=True), None)
    costs = Costs(2, 2, 1, 1e9, 3e10)
    assert chosen({"gradient": product}, costs, is_all=True) == {}
    assert chosen({"gradient": replace(product, rows=1)}, costs, is_all=True)


def test_one_that_loses_little_goes_along_where_nothing_else_needs_a_message():
    x, dy, last = (
        factor(name, width, is_weighted=name != "x") for name, width in (("x", 2048), ("dy", 2048), ("y", 10))
    )
    products = {"large": Product(x, dy, 16), "small": Product(factor("h", 2048, is_weighted=False), last, 16)}
    costs = Costs(2, 2, 1, 1e9, 3e10)
    assert math.isclose(costs.gains(products)["small"], -4.2e-4, rel_tol=0.2)
    assert chosen(products, costs, is_all=True).keys() == products.keys()
    assert chosen(products, costs, is_all=False).keys() == {"large"}


# -- Together ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [8, 256])
def test_gradients_that_share_a_factor_are_gathered_together_however_large_it_is(examples):
    size = 1024
    weights = [weight(size, size, name=name) for name in "qkv"]
    bias = weight(size, name="bias")

    def loss(x):
        query, key, value = (x @ one for one in weights)
        return tf.reduce_mean(query * key + (value + bias) ** 2)

    item = stepping(loss, [*weights, bias], tf.ones([4, size], tf.float64))
    (event,) = planned(item, factors=True, examples=examples)
    assert len(event.gradients) == 4
    assert len(event.factors) == 4


def test_others_are_gathered_in_events_of_their_own_where_they_are_large():
    size, count = 512, 4
    weights = [weight(size, size, name=f"layer_{index}") for index in range(count)]

    def loss(x):
        for one in weights:
            x = tf.tanh(x @ one)
        return tf.reduce_mean(x**2)

    item = stepping(loss, weights, tf.ones([4, size], tf.float64))
    events = planned(item, factors=True, examples=512, bytes_per_pack=4 * 256 * size * 8)
    assert [len(event.gradients) for event in events] == [2, 2]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32])
def test_the_sum_of_many_rows_does_not_come_to_a_halt(dtype):
    rows = tf.ones([6000, 2], dtype)
    factor = Factor("", 2, dtype, True, "", "", 0)
    total = factors._total(Product(None, factor, 6000), {factor: rows})
    assert total.dtype == dtype
    np.testing.assert_allclose(tf.cast(total, tf.float32), 6000, rtol=1e-2)


# -- What becomes of them ----------------------------------------------------------------------------------------------


def test_a_replica_that_does_not_count_has_no_rows_whatever_is_in_them():
    item, where = layer(), kernel_programs.topology(2)
    (event,) = planned(item, (2,), factors=True)
    program = kernel_programs.started(item, where)
    rng = np.random.default_rng(3)
    given: list[list[list[np.ndarray]]] = [
        [[rng.normal(size=(rows, one.width))] for rows in (3, 2)] for one in event.factors
    ]
    given += [[[np.asarray(2.0)], [np.asarray(np.nan)]] for _ in event.outputs]
    for copies in given[:2]:
        copies[1][0][:] = np.nan
    values = [[[tf.constant(tensor) for tensor in copy] for copy in copies] for copies in given]
    weights = [tf.constant(0.5, tf.float64), tf.constant(0.0, tf.float64)]
    devices = [replica.device for replica in where.replicas]
    found = factors.multiplied(program, event, values, weights, devices, Collectives(where, 1))
    rows = {one.width: copies[0][0] for one, copies in zip(event.factors, given, strict=False)}
    wanted = {"kernel": 0.5 * rows[FEATURES].T @ rows[WIDE], "bias": 0.5 * rows[WIDE].sum(axis=0)}
    names = [*(gradient.variable for gradient in event.gradients), "loss"]
    for name, copies in zip(names, found, strict=True):
        for (copy,) in copies:
            np.testing.assert_allclose(copy, wanted.get(name, 1.0), rtol=1e-12, atol=1e-12)


def test_a_result_of_no_elements_does_not_travel_along():
    kernel = weight(FEATURES, WIDE, name="kernel")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel) ** 2)
        kernel.assign_sub(tape.gradient(loss, kernel))
        return loss, tf.reduce_mean(x[:, :0], axis=0)

    item = capture_steps.capture(step, tf.ones([4, FEATURES], tf.float64)).item
    (event,) = planned(item, factors=True)
    assert [output.shape for output in event.outputs] == [()]


# -- Events ------------------------------------------------------------------------------------------------------------


def test_an_event_of_factors_starts_when_they_are_there_and_fills_no_bucket_with_their_product():
    weights = [weight(64, 64, name=f"w{index}") for index in range(4)]

    def loss(x):
        for one in weights:
            x = tf.tanh(x @ one)
        return tf.reduce_mean(x)

    item = stepping(loss, weights, tf.ones([4, 64], tf.float64))
    (event,) = planned(item, factors=True, examples=4, bytes_per_pack=64 * 64 * 8)
    assert len(event.gradients) == 4
    several = planned(item, factors=True, examples=4, bytes_per_pack=2 * 2 * 64 * 8)
    assert [len(event.gradients) for event in several] == [1, 1, 1, 1]
    rings = planned(item, factors=False)
    assert all(isinstance(event, AllReduceBucket) for event in rings)
    assert event.depth < max(one.depth for one in rings)
