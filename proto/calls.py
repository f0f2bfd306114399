"""Values written as text: `Name`, `module:Name`, or either with `(key=value, ...)`."""

import ast
import inspect
import re
from collections.abc import Mapping
from typing import Any

from autodist_py.proto.checks import require_unique
from autodist_py.proto.errors import StrategyError

# Lower-case spellings that a person coming from YAML or a shell writes.
_CONSTANTS: Mapping[str, object] = {"true": True, "false": False, "none": None}
_MOST_CHARACTERS = 10_000
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""What Python's parser and `ast.literal_eval` raise of a text that is none, or is nested too deeply."""


def split_call(text: str, what: str) -> tuple[str, str]:
    """The name, and what stands between the parentheses.

    Raises:
        StrategyError: it is written in another way; `what` says what it is to be, such as "a strategy builder".
    """
    if len(text) > _MOST_CHARACTERS:
        raise StrategyError(f"{what} is written in {_MOST_CHARACTERS} characters at most; got {len(text)}")
    match = re.fullmatch(r"\s*(\w+(?:\.\w+)*(?::\w+)?)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        raise StrategyError(f"{what} is written Name, Name(key=value, ...) or module:Name; got {text!r}")
    name, arguments = match.groups(default="")
    return name, arguments.strip()


def parse_call(text: str, what: str) -> tuple[str, dict[str, object]]:
    """The name, and the keyword arguments.

    Raises:
        StrategyError: as `split_call`, or the arguments are no literals by name.
    """
    name, arguments = split_call(text, what)
    source = f"_({arguments})"
    try:
        call = ast.parse(source, mode="eval").body
    except _UNREADABLE as error:
        raise StrategyError(f"the arguments of {what} are written key=value, ...; got {text!r}") from error
    is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    if not isinstance(call, ast.Call) or not is_call or call.args or any(one.arg is None for one in call.keywords):
        raise StrategyError(f"the arguments of {what} are named; write key=value; got {text!r}")
    require_unique((str(one.arg) for one in call.keywords), f"{what} has each argument once", error=StrategyError)
    return name, {str(keyword.arg): _literal(keyword, source, what) for keyword in call.keywords}


def construct(factory: Any, name: str, arguments: Mapping[str, object], what: str) -> Any:
    """What the factory makes of the arguments.

    Raises:
        StrategyError: it has no such parameter, or does not accept them.
    """
    parameters = inspect.signature(factory).parameters
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if accepts_any else [argument for argument in arguments if argument not in parameters]
    if unknown:
        listed = ", ".join(map(str, parameters.values())) or "none"
        raise StrategyError(f"{what} {name} has no parameter {unknown[0]!r}; its parameters: {listed}")
    try:
        return factory(**arguments)
    except TypeError as error:
        raise StrategyError(f"{what} {name} does not accept {dict(arguments)}: {error}") from error


def _literal(keyword: ast.keyword, source: str, what: str) -> object:
    value = keyword.value
    if isinstance(value, ast.Name) and value.id in _CONSTANTS:
        return _CONSTANTS[value.id]
    try:
        literal = ast.literal_eval(value)
        repr(literal)  # As an error would have to write it out, which Python does of no number of thousands of digits.
        return literal
    except _UNREADABLE as error:
        raise StrategyError(
            f"the argument {keyword.arg} of {what} is a literal, a text in quotes, or a number of few digits; "
            f"got {ast.get_source_segment(source, value)}"
        ) from error
