"""Arguments and fields are of the types that their annotations say, before anything is done with them.

pydantic checks them, in its strict mode: "false" is no bool, True is no int. What it would copy stays what was given.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, KeysView, Mapping
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from autodist_py.proto.checks import MOST_BITS, is_writable
from autodist_py.proto.text import shown

P = ParamSpec("P")
R = TypeVar("R")

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def checked(*names: str, error: type[Exception]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: its arguments `names` are of their annotated types, or `error` is raised and nothing done.

    Scalars of NumPy's are taken as Python's, alone and in a tuple, and a dict's keys as a tuple.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:  # Python says it in its own words.
                return function(*args, **kwargs)
            for name in names:
                if name in bound.arguments:
                    value = bound.arguments[name] = _plain(bound.arguments[name])
                    _require(value, _hints(function)[name], f"{name} of {_title(function)}", error)
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def check_fields(value: Any, *, error: type[Exception], but: Collection[str] = ()) -> None:
    """The fields of a dataclass, `but` some, are of their annotated types; scalars of NumPy's become Python's.

    Raises:
        error: it names the field, what it must be, and what it is.
    """
    kind: Any = type(value)
    for field in fields(value):
        if not field.init or field.name in but:
            continue  # It is made of the others, or checked elsewhere.
        given = _plain(getattr(value, field.name))
        _require(given, _hints(kind)[field.name], f"{field.name} of {kind.__name__}", error)
        object.__setattr__(value, field.name, given)  # Dataclasses are frozen.


def _require(value: object, annotation: Any, what: str, error: type[Exception]) -> None:
    try:
        _adapter(annotation).validate_python(value)
    except ValidationError:
        expected = re.sub(r"(?:\w+\.)+(?=\w)", "", inspect.formatannotation(annotation)).replace(" | ", " or ")
        raise error(f"{what} must be {expected}; got {shown(value)} ({type(value).__name__})") from None
    if not is_writable(value):
        raise error(f"{what} has integers of at most {MOST_BITS} bits; got one of more")


@functools.cache
def _hints(annotated: Any) -> Mapping[str, Any]:
    return get_type_hints(annotated)


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=_STRICT)


def _title(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def _plain(value: Any) -> Any:
    """A scalar of NumPy's, or a tuple of them, as Python's, and keys as a tuple.

    `proto` imports no NumPy, so that a scalar is told by what it has.
    """
    if isinstance(value, KeysView) or type(value) is tuple:
        return tuple(map(_plain, value))
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value
