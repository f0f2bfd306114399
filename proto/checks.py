"""The rules that several values share, as guards that raise the value's own error."""

from collections import Counter
from collections.abc import Iterable

from autodist_py.proto.text import shown

MAX_INT32 = 2**31 - 1

MAX_SECONDS = 10**9
"""Some thirty years: threads, sockets and gRPC can wait for so long."""


MOST_BITS = 1024
"""Of an integer: more than a float can be, and less than Python refuses to write out, as an error would have to."""


def is_writable(value: object) -> bool:
    """Whether an integer, or all of a tuple, are of at most so many bits; nothing is asked of other values."""
    if isinstance(value, tuple):
        return all(map(is_writable, value))
    return not isinstance(value, int) or value.bit_length() <= MOST_BITS


def require_member(value: str, known: Iterable[str], what: str, *, error: type[Exception]) -> None:
    """`value` is one of the `known` ones; `what` names it in the error."""
    names = tuple(known)
    if not isinstance(value, str) or value not in names:
        raise error(f"{what} must be one of {', '.join(names)}; got {shown(value)}")


def require_unique(names: Iterable[str], rule: str, *, error: type[Exception]) -> None:
    """No name comes twice; `rule` says so in the error."""
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise error(f"{rule}; repeated: {', '.join(repeated)}")


def require_seconds(value: float, what: str, *, error: type[Exception]) -> None:
    """`value` is a number of seconds that can be waited for."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise error(f"{what} must be a number of seconds from 0 to {MAX_SECONDS}; got {shown(value)}")


def require_flag(value: bool | None, what: str, *, error: type[Exception]) -> None:
    """`value` is True, False, or None for what is best."""
    if value is not None and not isinstance(value, bool):
        raise error(f"{what} must be True, False or None; got {shown(value)}")


def require_not_negative(value: int, what: str, *, error: type[Exception]) -> None:
    """`value` is an integer >= 0 that the wire format can hold."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INT32:
        raise error(f"{what} must be an integer from 0 to {MAX_INT32}; got {shown(value)}")
