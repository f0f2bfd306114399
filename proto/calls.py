"""Values written as text: `Name`, `module:Name`, or either with `(key=value, ...)`."""

import ast
import inspect
import re
from collections.abc import Mapping
from typing import Any

from autodist_py.proto.errors import StrategyError

# Lower-case spellings that a person coming from YAML or a shell writes.
_CONSTANTS: Mapping[str, object] = {"true": True, "false": False, "none": None}


def split_call(text: str, what: str) -> tuple[str, str]:
    """The name, and what stands between the parentheses.

    Raises:
        StrategyError: it is written in another way; `what` says what it is to be, such as "a strategy builder".
    """
    match = re.fullmatch(r"\s*([\w.]+(?::\w+)?)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
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
    try:
        call = ast.parse(f"_({arguments})", mode="eval").body
    except SyntaxError as error:
        raise StrategyError(f"the arguments of {what} are written key=value, ...; got {text!r}") from error
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise StrategyError(f"the arguments of {what} are named; write key=value; got {text!r}")
    return name, {str(keyword.arg): _literal(keyword, text, what) for keyword in call.keywords}


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


def _literal(keyword: ast.keyword, text: str, what: str) -> object:
    value = keyword.value
    if isinstance(value, ast.Name) and value.id in _CONSTANTS:
        return _CONSTANTS[value.id]
    try:
        return ast.literal_eval(value)
    except ValueError as error:
        raise StrategyError(
            f"the argument {keyword.arg} of {what} is a literal, a text in quotes; got {ast.unparse(value)} in {text!r}"
        ) from error
