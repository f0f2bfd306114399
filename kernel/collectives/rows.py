"""Rows of any type from worker to worker: what is no number travels as numbers."""

import tensorflow as tf

from autodist_py.kernel.collectives.collectives import CARRIED, Collectives

TRAVELS = frozenset({*CARRIED, tf.uint64, tf.complex64, tf.complex128, tf.string})
"""The types whose rows can be gathered from several workers."""


def gathered_rows(rows: tf.Tensor, collectives: Collectives) -> tf.Tensor:
    """The rows of all workers one after the other in rank order; workers may have different numbers of rows."""
    if collectives.num_workers == 1:
        return rows
    if rows.dtype == tf.string:
        return _gathered_texts(rows, collectives)
    (values,) = collectives.gather_rows([tf.cast(rows, tf.int8) if rows.dtype == tf.bool else rows])
    return tf.cast(values, rows.dtype)


def _gathered_texts(rows: tf.Tensor, collectives: Collectives) -> tf.Tensor:
    """As `gathered_rows`, of byte strings: their lengths travel as rows, and all their bytes one after the other."""
    text = tf.strings.reduce_join(tf.reshape(rows, [-1]))
    (lengths,) = collectives.gather_rows([tf.strings.length(rows)])
    (codes,) = collectives.gather_rows([tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int32)])
    of_code = tf.constant([bytes([code]) for code in range(256)])
    # One byte and one text more, cut off in the end: TensorFlow's search crashes where there are none.
    codes, sizes = tf.pad(codes, [[0, 1]]), tf.concat([tf.reshape(lengths, [-1]), [1]], axis=0)
    owners = tf.searchsorted(tf.cumsum(sizes), tf.range(tf.size(codes)), side="right")
    texts = tf.strings.unsorted_segment_join(tf.gather(of_code, codes), owners, tf.size(sizes))
    return tf.reshape(texts[:-1], tf.shape(lengths))
