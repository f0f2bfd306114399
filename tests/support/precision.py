"""The precision of Keras's layers in tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras


@contextmanager
def in_float64(library: Any) -> Iterator[None]:
    """Within this context layers and losses are of float64, whatever tests before have left."""
    policies, floats = library.mixed_precision, library.backend.floatx()
    before = (policies.dtype_policy if library is keras else policies.global_policy)()
    library.backend.set_floatx("float64")
    change = policies.set_dtype_policy if library is keras else policies.set_global_policy
    change("float64")
    try:
        yield
    finally:
        change(before)
        library.backend.set_floatx(floats)
