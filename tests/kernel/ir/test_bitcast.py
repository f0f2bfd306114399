"""Numbers as words: what is made of words again is, bit by bit, what they were made of."""

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.ir.bitcast import count, from_int32, to_int32

TYPES = (tf.int8, tf.uint8, tf.float16, tf.bfloat16, tf.int32, tf.float32, tf.int64, tf.float64, tf.complex128)


def there_and_back(numbers: tf.Tensor, spec: tf.TensorSpec) -> tuple[tf.Tensor, tf.Tensor]:
    @tf.function(input_signature=[spec])
    def both(given: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        words = to_int32(given)
        width = spec.shape[-1]
        assert words.shape[-1] == count(width, spec.dtype), "known before it runs"
        back = from_int32(words, spec.dtype, width)
        assert back.shape.as_list() == spec.shape.as_list()
        return words, back

    return both(numbers)


@pytest.mark.parametrize("rows", [None, 0, 1, 5])
@pytest.mark.parametrize("width", [0, 1, 3, 4])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_numbers_are_what_their_words_were_made_of(dtype: tf.DType, width: int, rows: int | None) -> None:
    """A flat tensor (None), or as many rows as there may be."""
    shape = [width] if rows is None else [rows, width]
    numbers = np.random.default_rng(0).bytes(int(np.prod(shape)) * dtype.size)
    given = tf.reshape(tf.io.decode_raw(numbers, tf.uint8), [*shape, dtype.size])
    given = tf.bitcast(given, dtype) if dtype.size > 1 else tf.bitcast(given[..., 0], dtype)
    spec = tf.TensorSpec([width] if rows is None else [None, width], dtype)

    words, back = there_and_back(given, spec)

    assert (words.dtype, back.dtype) == (tf.int32, dtype)
    assert back.numpy().tobytes() == numbers
    of_rows = [words.numpy()] if rows is None else words.numpy()
    begin = b"".join(row.tobytes()[: width * dtype.size] for row in of_rows)
    assert begin == numbers, "each row begins with a word of its own"
