"""Top-k: of each gradient the largest numbers travel, with their places (Lin et al. 2018, section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Dense, Slot, State, Wire, apart, chosen, flat, working
from autodist_py.kernel.ir.bitcast import count, from_int32, to_int32
from autodist_py.proto.compressors import TopKCompressor


@dataclass(frozen=True, slots=True)
class TopK:
    """The codec of a TopKCompressor.

    The state of a gradient is what of it has not travelled yet, in flat tensors: with a momentum, also the velocity.
    Numbers that travel are taken out of both.
    """

    compressor: TopKCompressor

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """See Codec."""
        slots = []
        for one in gradients:
            slot = Slot((one.elements,), working(one.dtype))
            slots.append({"rest": slot, "velocity": slot} if self.compressor.momentum else {"rest": slot})
        return slots

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, list[State]]:
        """See Codec."""
        dtype = working(gradients[0].dtype)
        values, places = [], []
        after: list[State] = []
        begin = 0
        for gradient, state in zip(gradients, states, strict=True):
            numbers = tf.reshape(tf.cast(gradient, dtype), [-1])
            velocity = numbers
            if "velocity" in state:
                velocity = tf.cast(self.compressor.momentum, dtype) * state["velocity"] + numbers
            wanted = state["rest"] + velocity
            elements = wanted.shape.num_elements()
            largest = tf.math.top_k(tf.abs(wanted), self.compressor.kept(elements), sorted=False).indices
            is_finite = tf.reduce_all(tf.math.is_finite(wanted))
            nan = tf.constant(float("nan"), dtype)
            values.append(tf.where(is_finite, tf.gather(wanted, largest), nan))  # Somebody may look for it.
            places.append(largest + begin)
            left = {"rest": wanted, "velocity": velocity}
            after.append({name: chosen(is_finite, _without(left[name], largest), old) for name, old in state.items()})
            begin += elements
        return tf.concat([to_int32(flat(values)), flat(places)], axis=0), after

    def decompress(
        self, travelled: tf.Tensor, gradients: Sequence[Dense], states: Sequence[State], wire: Wire
    ) -> tuple[list[tf.Tensor], Sequence[State]]:
        """See Codec."""
        dtype = working(gradients[0].dtype)
        kept = sum(self.compressor.kept(one.elements) for one in gradients)
        of_values = count(kept, dtype)
        values = tf.reshape(from_int32(travelled[:, :of_values], dtype, kept), [-1])
        places = tf.reshape(travelled[:, of_values:], [-1])
        total = tf.math.unsorted_segment_sum(values, places, sum(one.elements for one in gradients))
        return apart(tf.cast(total, gradients[0].dtype), [one.shape for one in gradients]), states


def _without(numbers: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    zeros = tf.zeros(places.shape, numbers.dtype)
    return tf.tensor_scatter_nd_update(numbers, tf.expand_dims(places, 1), zeros)
