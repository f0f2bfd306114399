"""Static shapes as the values of `proto` have them."""

import tensorflow as tf

from autodist_py.proto.errors import CaptureError


def static_shape(shape: tf.TensorShape) -> tuple[int | None, ...] | None:
    """A TensorShape as a tuple; None where the rank is unknown."""
    return None if shape.rank is None else tuple(shape.as_list())


def full_shape(name: str, shape: tf.TensorShape) -> tuple[int, ...]:
    """The static shape of the variable `name`.

    Raises:
        CaptureError: a dimension is unknown.
    """
    if not shape.is_fully_defined():
        raise CaptureError(f"variable '{name}' has the shape {shape}; give it a static shape")
    return tuple(shape.as_list())
