"""Environment of the kernel's tests: quiet TensorFlow, and five logical CPU devices for sessions."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture
def keras_of_float64() -> Iterator[None]:
    """Keras's programs are of float64 here, and what others make is as it was before."""
    import keras

    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # A layer that was made before has settled it.
    yield
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx(before)
