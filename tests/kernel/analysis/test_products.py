"""Which gradients are products of rows: as their ops say, and their sizes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py.proto.errors import StrategyError
from tests.support.dense_layers import FEATURES, WIDE, gathered, layer, planned, stepping, weight


def test_the_gradients_of_a_layer_are_a_product_and_the_sum_of_one_factors_rows():
    (event,) = planned(layer(), factors=True)
    assert {(one.width, one.is_weighted) for one in event.factors} == {(FEATURES, False), (WIDE, True)}
    assert [output.tensor for output in event.outputs] == ["Identity:0"]


def test_layers_of_one_input_share_its_factor():
    weights = [weight(FEATURES, WIDE, name=name) for name in "qkv"]

    def loss(x):
        query, key, value = (tf.tensordot(x, one, 1) for one in weights)
        return tf.reduce_mean(query * key + value**2)

    item = stepping(loss, weights, tf.ones([4, 2, FEATURES], tf.float64))
    (event,) = planned(item, factors=True)
    assert [one.width for one in event.factors].count(FEATURES) == 1
    assert len(event.factors) == 4


def test_products_of_matrices_that_are_added_up_are_products_of_all_their_rows():
    layer = keras.layers.EinsumDense("abc,cde->abde", output_shape=(None, 4, 5), bias_axes="de", dtype="float64")
    x = tf.ones([4, 2, 6], tf.float64)
    layer.build(x.shape)
    variables = [variable.value for variable in layer.trainable_variables]
    item = stepping(lambda x: tf.reduce_mean(layer(x) ** 2), variables, x)
    (event,) = planned(item, factors=True, examples=8)
    assert event.variables == "einsum_dense/bias, einsum_dense/kernel"
    assert [product.rows for product in event.products] == [8, 8]


def transposed(w, x):
    return tf.matmul(x, w, transpose_b=True)


def twice(w, x):
    return tf.matmul(x @ w, w, transpose_b=True)


def of_columns(w, x):
    return tf.matmul(w, x, transpose_a=True, transpose_b=True)


def by_element(w, x):
    return x * w[0]


@pytest.mark.parametrize(
    ("shape", "product", "why"),
    [
        ((WIDE, FEATURES), transposed, None),
        ((FEATURES, WIDE), twice, "AddN"),
        ((FEATURES, WIDE), of_columns, "MatMul"),
        ((1, FEATURES), by_element, "StridedSliceGrad"),
    ],
)
def test_factors_are_asked_for_where_no_gradient_has_any(shape, product, why):
    w = weight(*shape, name="w")
    item = stepping(lambda x: tf.reduce_mean(product(w, x) ** 2), [w])
    if why is None:
        assert gathered(item, factors=True) == {"w"}
        return
    with pytest.raises(StrategyError, match=rf"no gradient here is one of rows: 'w': '.*' \({why}\) makes it\. Leave"):
        planned(item, factors=True)


@pytest.mark.parametrize("compressor", ["HorovodCompressor", "TopKCompressor(ratio=0.1)"])
def test_what_is_coded_is_not_gathered_by_factors(compressor):
    with pytest.raises(StrategyError, match=r"'kernel': .*Compressor codes it; 'bias': "):
        planned(layer(), compressor=compressor, factors=True)
    assert gathered(layer(), compressor=compressor, examples=8) == set()


def test_a_sum_along_other_axes_is_no_sum_of_rows():
    """Its variable is as long as the batch has rows, and as a row is."""
    size = 8
    kernel, scale = weight(size, size, name="kernel"), weight(size, name="scale")
    x = tf.constant(np.random.default_rng(2).normal(size=[size, size]))
    y = tf.ones([4, 1, 1], tf.float64)
    item = stepping(lambda y: tf.reduce_mean((x @ kernel + tf.reshape(scale, [size, 1])) ** 2 * y), [kernel, scale], y)
    assert gathered(item, factors=True) == {"kernel"}


def handed_back(gradient_of):
    """A dense layer of `kernel`, whose gradient of it is what the function makes of the input and what comes back."""
    kernel = weight(FEATURES, WIDE, name="kernel")

    @tf.custom_gradient
    def dense(x, kernel):
        return x @ kernel, lambda dy: (tf.matmul(dy, kernel, transpose_b=True), gradient_of(x, dy))

    return stepping(lambda x: tf.reduce_mean(dense(x, kernel) ** 2), [kernel])


def checked(x, dy):
    product = tf.matmul(x, dy, transpose_a=True)
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_max(product) < 1e9, [product])]):
        return tf.identity(product)


def checked_sum(x, dy):
    left, right = x[:, None, :], dy[:, None, :]
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_max(dy) < 1e9, [dy])]):
        products = tf.matmul(left, right, transpose_a=True)
    return tf.reduce_sum(products, axis=[0])


def in_half_precision(x, dy):
    return tf.cast(tf.cast(tf.matmul(x, dy, transpose_a=True), tf.float16), tf.float64)


def as_integers(x, dy):
    return tf.cast(tf.cast(tf.matmul(x, dy, transpose_a=True), tf.int32), tf.float64)


def broadcast(x, dy):
    rows = tf.stack([dy, dy], axis=1)
    return tf.reduce_sum(tf.matmul(tf.ones([1, 2, FEATURES], tf.float64), rows, transpose_a=True), axis=[0])


def of_transposed(x, dy):
    return tf.reduce_sum(tf.linalg.matmul(x[:, :, None], dy[:, :, None], adjoint_b=True), axis=[0])


@pytest.mark.parametrize(
    ("gradient_of", "why"),
    [
        (checked, "it waits for '.*Assert.*'"),
        (checked_sum, "it waits for '.*Assert.*'"),
        (in_half_precision, "it is cast to a third type on the way"),
        (as_integers, r"'.*' \(Cast\) makes it"),
        (broadcast, "its factors have not the same rows"),
        (of_transposed, r"'.*' \(Sum\) makes it"),
    ],
)
def test_what_only_looks_like_a_product_of_rows_is_none(gradient_of, why):
    with pytest.raises(StrategyError, match=f"'kernel': {why}"):
        planned(handed_back(gradient_of), factors=True)


def test_a_sum_along_the_last_axis_is_no_sum_of_rows():
    """Its variable has an axis of size 1 there, and as many numbers as a row."""
    kernel, column = weight(5, 4, name="kernel"), weight(4, 1, name="column")

    def loss(x):
        x = tf.reshape(x, [tf.shape(x)[0], -1, 5])
        return tf.reduce_mean(tf.add_n([tf.matmul(x, kernel), x[..., :4] + column]) ** 2)

    item = stepping(loss, [kernel, column], tf.ones([6, 4, 5], tf.float64))
    assert gathered(item, factors=True) == {"kernel"}


def test_a_sum_of_channels_that_stand_first_is_no_sum_of_rows():
    kernel, bias = weight(4, 4, name="kernel"), weight(4, name="bias")

    def loss(x):
        return tf.reduce_mean(tf.nn.bias_add(tf.matmul(x, kernel), bias, data_format="NCHW") ** 2)

    item = stepping(loss, [kernel, bias], tf.ones([6, 4, 4], tf.float64))
    assert gathered(item, factors=True) == {"kernel"}


def test_rows_of_a_transposed_input_are_others():
    one, other = weight(4, 4, name="one"), weight(4, 3, name="other")

    def loss(x):
        return tf.reduce_mean(tf.tensordot(x, one, [[1], [0]]) ** 2) + tf.reduce_mean(tf.tensordot(x, other, 1) ** 2)

    (event,) = planned(stepping(loss, [one, other], tf.ones([6, 4, 4], tf.float64)), factors=True)
    assert len({factor.source for factor in event.factors}) == 4
