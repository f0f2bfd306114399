"""Numbers of any type as 32-bit words, bit by bit: what is gathered is carried as one tensor."""

import tensorflow as tf

_WORD = tf.int32


def words_of(numbers: tf.Tensor) -> tf.Tensor:
    """A flat tensor's numbers, of 32 or 64 bits, or of 8 bits and as many as fill words."""
    if numbers.dtype.size < _WORD.size:
        numbers = tf.reshape(numbers, [-1, _WORD.size // numbers.dtype.size])
    return tf.reshape(tf.bitcast(numbers, _WORD), [-1])


def numbers_of(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The numbers of each row that `words_of` has made words of; shape: [rows, numbers]."""
    each = words.shape[1] * _WORD.size // dtype.size
    if dtype.size > _WORD.size:
        words = tf.reshape(words, [-1, each, dtype.size // _WORD.size])
    return tf.reshape(tf.bitcast(words, dtype), [-1, each])


def count(elements: int, dtype: tf.DType) -> int:
    """How many words so many numbers of a type are."""
    return elements * dtype.size // _WORD.size
