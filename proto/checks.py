"""The rules that several values share, as guards that raise the value's own error."""

from collections import Counter
from collections.abc import Iterable

MAX_INT32 = 2**31 - 1

MAX_SECONDS = 10**9
"""Some thirty years: threads, sockets and gRPC can wait for so long."""


def require_member(value: str, known: Iterable[str], what: str, *, error: type[Exception]) -> None:
    """`value` is one of the `known` ones; `what` names it in the error."""
    names = tuple(known)
    if value not in names:
        raise error(f"{what} must be one of {', '.join(names)}; got {value!r}")


def require_unique(names: Iterable[str], rule: str, *, error: type[Exception]) -> None:
    """No name comes twice; `rule` says so in the error."""
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise error(f"{rule}; repeated: {', '.join(repeated)}")


def require_seconds(value: float, what: str, *, error: type[Exception]) -> None:
    """`value` is a number of seconds that can be waited for."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise error(f"{what} must be a number of seconds from 0 to {MAX_SECONDS}; got {value!r}")


def require_flag(value: bool | None, what: str, *, error: type[Exception]) -> None:
    """`value` is True, False, or None for what is best."""
    if value is not None and not isinstance(value, bool):
        raise error(f"{what} must be True, False or None; got {value!r}")


def require_not_negative(value: int, what: str, *, error: type[Exception]) -> None:
    """`value` is an integer >= 0 that the wire format can hold."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INT32:
        raise error(f"{what} must be an integer from 0 to {MAX_INT32}; got {value!r}")
