"""What the other workers are told of a call of the chief's, and raise."""

import json

import pytest
import tensorflow as tf

from autodist_py.proto.errors import CaptureError, ClusterError
from autodist_py.saving.outcome import of_error, of_value, value_of


@pytest.mark.parametrize("value", [None, "ckpt-3", 7])
def test_a_value_is_what_the_call_returned(value: object) -> None:
    assert value_of(json.loads(json.dumps(of_value(value)))) == value


class Own(Exception):
    """Of a script."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (FileNotFoundError(2, "No such file", "a/m.keras"), FileNotFoundError, "a/m.keras"),
        (OSError("no space"), OSError, "no space"),
        (ValueError("a suffix"), ValueError, "a suffix"),
        (tf.errors.NotFoundError(None, None, "no folder"), tf.errors.NotFoundError, "no folder"),
        (CaptureError("not so"), CaptureError, "not so"),
        (UnicodeDecodeError("utf8", b"", 0, 1, "bad"), ClusterError, "UnicodeDecodeError"),
        (Own("mine"), ClusterError, "Own: mine"),
    ],
)
def test_an_error_is_raised_as_one_that_scripts_catch_alike(error: Exception, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        value_of(json.loads(json.dumps(of_error(error))))
    assert text in str(raised.value)
    assert type(raised.value) is kind
    assert raised.value.__notes__ == ["raised by the chief, which writes for all workers"]
