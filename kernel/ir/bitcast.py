"""Numbers of any type as 32-bit words, bit by bit, so that what is of several types is gathered as one tensor."""

import tensorflow as tf

_WORD = tf.int32


def to_int32(numbers: tf.Tensor) -> tf.Tensor:
    """The numbers along the last axis as words; narrow ones are filled up with zeros to whole words."""
    width, in_word = numbers.shape[-1], _WORD.size // numbers.dtype.size
    leading = tf.shape(numbers)[:-1]
    if in_word > 1:
        padding = [[0, 0]] * (numbers.shape.rank - 1) + [[0, -width % in_word]]
        numbers = _shaped(tf.pad(numbers, padding), leading, -(-width // in_word), in_word)
    return _shaped(tf.bitcast(numbers, _WORD), leading, count(width, numbers.dtype))


def from_int32(words: tf.Tensor, dtype: tf.DType, width: int) -> tf.Tensor:
    """The numbers, `width` of them along the last axis, that `to_int32` has made words of."""
    leading = tf.shape(words)[:-1]
    if dtype.size > _WORD.size:
        words = _shaped(words, leading, width, dtype.size // _WORD.size)
    numbers = tf.bitcast(words, dtype)
    if dtype.size < _WORD.size:
        numbers = _shaped(numbers, leading, words.shape[-1] * _WORD.size // dtype.size)[..., :width]
    return numbers


def count(width: int, dtype: tf.DType) -> int:
    """How many words so many numbers of a type are."""
    return -(-width * dtype.size // _WORD.size)


def _shaped(tensor: tf.Tensor, leading: tf.Tensor, *sizes: int) -> tf.Tensor:
    return tf.reshape(tensor, tf.concat([leading, sizes], axis=0))
