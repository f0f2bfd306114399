"""Text for people: tables, short ids and near-name suggestions, as the values' text forms and errors use them."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_LONGEST_NAME = 200
"""Of more characters no near name is looked for, which takes time that grows with them."""

_SHOWN = 80
"""Characters of a value in an error."""


def shown(value: object) -> str:
    """A value for an error, in so many characters at most; also one that Python does not write out."""
    try:
        text = repr(value)
    except Exception as error:  # A number of too many digits, or what somebody's own class raises.
        return f"a value that cannot be written out: {type(error).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Left-aligned columns under a header, two spaces apart; an empty cell prints as `-`."""
    lines = [tuple(header), *(tuple(str(cell) or "-" for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def short(digest: str) -> str:
    """The first 12 characters of a content hash, enough to tell values apart in text."""
    return digest[:12]


def count(number: int, noun: str) -> str:
    """The number and its noun, such as `1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name that has come before; None: each comes once."""
    before: set[str] = set()
    for name in names:
        if name in before:
            return name
        before.add(name)
    return None


def some(names: Iterable[str], *, limit: int = 3) -> str:
    """The first names, in quotes, and how many more there are; each counts once."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - limit} more" if len(distinct) > limit else ""
    return ", ".join(f"'{name}'" for name in distinct[:limit]) + more


def known_names(name: str, known: Iterable[str], *, limit: int = 10) -> str:
    """What to write instead of an unknown name: the nearest known one, or the known ones."""
    names = list(known)
    near = get_close_matches(name, names, n=1) if len(name) <= _LONGEST_NAME else []
    if near:
        return f"did you mean {near[0]!r}?"
    if not names:
        return "there is none"
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return f"known: {', '.join(map(repr, names[:limit]))}{more}"
