"""How a call of the chief's went, as the other workers are told: a value of JSON, or an error that each can raise."""

import builtins
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from autodist_py.proto import errors
from autodist_py.proto.errors import ClusterError

_NOTE = "raised by the chief, which writes for all workers"
_PLAIN = (str, int, type(None))


def of_value(value: Any) -> dict[str, Any]:
    """The call returned this; what is no path, number or None stays with the chief."""
    return {"value": value if isinstance(value, _PLAIN) else None}


def of_error(error: Exception) -> dict[str, Any]:
    """The call raised this."""
    system = [error.errno, error.strerror, _text(error.filename)] if isinstance(error, OSError) else []
    return {"error": type(error).__name__, "message": getattr(error, "message", str(error)), "system": system}


def value_of(outcome: Mapping[str, Any]) -> Any:
    """What the call returned, or what it raised is raised here.

    An error is of the same class if that is one of Python's, TensorFlow's or ours, as scripts may catch it on all
    workers; else it is a ClusterError.
    """
    if "error" not in outcome:
        return outcome["value"]
    error = _error(outcome)
    error.add_note(_NOTE)
    raise error


def _error(outcome: Mapping[str, Any]) -> Exception:
    name, message = outcome["error"], outcome["message"]
    if outcome["system"] and outcome["system"][0] is not None:
        return OSError(*outcome["system"])
    directory = (builtins, tf.errors, errors)
    kind = next((getattr(home, name) for home in directory if isinstance(getattr(home, name, None), type)), None)
    arguments = (None, None, message) if kind is not None and issubclass(kind, tf.errors.OpError) else (message,)
    try:
        made = None if kind is None else kind(*arguments)
    except TypeError:  # It has a constructor of its own.
        made = None
    return made if isinstance(made, Exception) else ClusterError(f"the chief could not write: {name}: {message}")


def _text(path: Any) -> str | None:
    return None if path is None else str(path)
