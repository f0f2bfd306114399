"""What somebody else may send: valid bytes, values and messages that are changed, and messages that hold anything.

All is drawn from one `random.Random`, so that its seed makes an input again, and Hypothesis, which has such a one, can
make it smaller.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 7, 255, 65536),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400),
    *(-0.0, 0.1, 5e-324, 1e-308, 1e-9, 1e10, 1e20, 1e300, 1.7e308, math.inf, -math.inf, math.nan),
)
TEXTS = (
    *("", " ", "\0", "a\nb", "\r\n", "\t", "..", ".", "-", "--", "~", "/", "\\", ":", ":0", "^x", "x:99", "a:b:c", "*"),
    *("é", "e\u0301", "\u202eright", "\U0001f600", "\ufeff", "\u0663", "\u00b2", "\uff11", "\u0130", "\x85", "\u2028"),
    *("NaN", "1e999", "-1", "0x10", "1_0", "1.5", "null", "true", "no", "%s%n", "{0}", "[", "]", "'", '"', "`", "#"),
    *("..up:Name", "a..b:Name", "module:Name", "os:system", "2026-13-45", "!!int x", "&a [*a]", "<<", "="),
    *("x" * 10_000, "9" * 5_000, "[" * 2_000, "(" * 2_000, "1," * 2_000, "a." * 2_000, "é" * 2_000, "-" * 2_000),
    *("127.0.0.1", "127.0.0.1:CPU:0", "::1", "fe80::1%lo", "fe80::1%$(x)", "kernel", "PS", "NCCL"),
    *(f"0x{'f' * 4_000}", f"0b{'1' * 20_000}", "59:" * 4_000 + "59"),
)
"""Those of Unicode; what is none is in PIECES."""
PIECES = (
    *(text.encode() for text in TEXTS),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\\ud800", b"\\u0000"),
    *(b"[" * 40_000, b"{" * 40_000, b'{"a":' * 5_000, b"- " * 20_000, b"? " * 5_000, b"a: &a [*a]\n", b"!!python/x "),
    *(
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\xff" * 11,
        b"\x80" * 20,
        b"\x0b" * 2_000,
        b"\x12\x02\x0a\x00" * 500,
        b"\x00" * 99,
    ),
)
FOREIGN = ("utf-16", "utf-32", "utf-7", "latin-1", "cp037")


def changed_bytes(choose: Random, content: bytes, other: bytes = b"") -> bytes:
    """The content after some changes, one of which may put a part of `other` into it."""
    for _ in range(choose.choice((1, 1, 2, 4))):
        content = choose.choice(_CHANGES)(choose, content, other)
    return content[: 1 << 20]


def changed_plain(choose: Random, plain: Any) -> Any:
    """A value of maps, lists and scalars after some changes; `plain` stays as it was."""
    for _ in range(choose.choice((1, 1, 2, 3))):
        places = list(_places(plain))
        plain = _with(plain, choose.choice(places), choose, places)
    return plain


def any_scalar(choose: Random) -> Any:
    """A value for any place of a file."""
    return choose.choice((choose.choice(NUMBERS), choose.choice(TEXTS), choose.choice((None, True, False, [], {}))))


def changed_message(choose: Random, message: Message) -> Message:
    """A copy of the message after some changes: fields of it, or of what it holds, are left out, or hold anything."""
    copy: Any = type(message)()
    copy.CopyFrom(message)
    for _ in range(choose.choice((1, 1, 2, 3))):
        within = choose.choice(list(_messages(copy)))
        field = choose.choice(within.DESCRIPTOR.fields)
        if choose.random() < 0.7 or not field.is_repeated:
            within.ClearField(field.name)
        if choose.random() < 0.8:
            _set(choose, within, field, 2)
    return copy


def any_message(choose: Random, kind: type[Message], depth: int = 3) -> Message:
    """A message of that kind whose fields hold anything that their types can."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if choose.random() < 0.6:
            _set(choose, message, field, depth)
    return message


# -- Bytes ------------------------------------------------------------------------------------------------------------


def _range(choose: Random, content: bytes, most: int = 40) -> tuple[int, int]:
    begin = choose.randint(0, len(content))
    return begin, min(len(content), begin + choose.randint(1, most))


def _flip(choose: Random, content: bytes, other: bytes) -> bytes:
    topology = choose.randint(0, max(0, len(content) - 1))
    return (
        content[:topology]
        + bytes(byte ^ 1 << choose.randrange(8) for byte in content[topology : topology + 1])
        + content[topology + 1 :]
    )


def _put(choose: Random, content: bytes, other: bytes) -> bytes:
    begin, end = _range(choose, content)
    return content[:begin] + choose.choice(PIECES) + content[choose.choice((begin, end)) :]


def _cut_short(choose: Random, content: bytes, other: bytes) -> bytes:
    return content[: choose.randint(0, len(content))]


def _delete(choose: Random, content: bytes, other: bytes) -> bytes:
    begin, end = _range(choose, content)
    return content[:begin] + content[end:]


def _repeat(choose: Random, content: bytes, other: bytes) -> bytes:
    begin, end = _range(choose, content, most=200)
    return content[:begin] + content[begin:end] * choose.choice((2, 2, 3, 30, 500)) + content[end:]


def _splice(choose: Random, content: bytes, other: bytes) -> bytes:
    begin, end = _range(choose, other or content, most=400)
    topology = choose.randint(0, len(content))
    return content[:topology] + (other or content)[begin:end] + content[topology:]


def _translate(choose: Random, content: bytes, other: bytes) -> bytes:
    return content.decode("utf-8", "replace").encode(choose.choice(FOREIGN), "replace")


_CHANGES: Sequence[Callable[[Random, bytes, bytes], bytes]] = (
    *(_flip, _flip, _put, _put, _put),
    *(_cut_short, _delete, _delete, _repeat, _splice, _splice, _translate),
)


# -- Maps, lists and scalars ------------------------------------------------------------------------------------------

_Topology = tuple[Any, ...]
_LIKE: Mapping[type, Sequence[Any]] = {
    str: TEXTS,
    bool: (True, False),
    int: [number for number in NUMBERS if isinstance(number, int)],
    float: NUMBERS,
}


def _places(plain: Any, topology: _Topology = ()) -> Iterator[_Topology]:
    yield topology
    parts = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, part in parts:
        yield from _places(part, (*topology, key))


def _at(plain: Any, topology: _Topology) -> Any:
    for key in topology:
        plain = plain[key]
    return plain


def _with(plain: Any, topology: _Topology, choose: Random, places: Sequence[_Topology]) -> Any:
    """A copy that is changed at the place, or in the map or list that it is in."""
    if len(topology) > 1 or (topology and choose.random() < 0.2):
        first, *rest = topology
        copy = dict(plain) if isinstance(plain, dict) else list(plain)
        within = [each[1:] for each in places if each[:1] == (first,)]
        copy[first] = _with(plain[first], tuple(rest), choose, within)
        return copy
    if topology and choose.random() < 0.3:
        return _without_or_twice(plain, topology[0], choose)
    new: Any = any_scalar(choose)
    how = choose.randrange(16)
    old = _at(plain, topology)
    if how > 5 and type(old) in _LIKE:
        new = choose.choice(_LIKE[type(old)])
    if how == 0:
        new = _at(plain, choose.choice(places))
    elif how == 1:
        new = old
        for _ in range(choose.choice((1, 2, 30, 200))):
            new = [new] if choose.random() < 0.5 else {"nodes": new}
    elif how == 2:
        new = [old] * choose.choice((2, 3, 100))
    if not topology:
        return new
    copy = dict(plain) if isinstance(plain, dict) else list(plain)
    copy[topology[0]] = new
    return copy


def _without_or_twice(plain: Any, key: Any, choose: Random) -> Any:
    if isinstance(plain, list):
        return plain[:key] + [plain[key]] * choose.choice((0, 2, 3)) + plain[key + 1 :]
    new_key = choose.choice(TEXTS)
    return {(new_key if one == key else one): value for one, value in plain.items() if new_key or one != key}


# -- Messages ---------------------------------------------------------------------------------------------------------


def _messages(message: Any) -> Iterator[Any]:
    """The message, and all that it holds."""
    yield message
    for field, value in message.ListFields():
        if field.message_type and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type:
                for key in sorted(value):
                    yield from _messages(value[key])
        elif field.message_type:
            for one in value if field.is_repeated else [value]:
                yield from _messages(one)


_RANGES: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
}


def _set(choose: Random, message: Any, field: Any, depth: int) -> None:
    target = getattr(message, field.name)
    if field.message_type and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(choose.randint(0, 2)):
            if value.message_type:
                target[_scalar(choose, key)].CopyFrom(
                    any_message(choose, GetMessageClass(value.message_type), depth - 1)
                )
            else:
                target[_scalar(choose, key)] = _scalar(choose, value)
    elif field.message_type:
        for _ in range(choose.randint(0, 3) if field.is_repeated else 1):
            if depth > 0:
                one = target.add() if field.is_repeated else target
                one.CopyFrom(any_message(choose, GetMessageClass(field.message_type), depth - 1))
    elif field.is_repeated:
        target.extend(_scalar(choose, field) for _ in range(choose.randint(0, 4)))
    else:
        setattr(message, field.name, _scalar(choose, field))


def _scalar(choose: Random, field: Any) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return choose.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return float(
            choose.choice([number for number in NUMBERS if isinstance(number, float) or abs(number) < 2**1000])
        )
    if field.type == FieldDescriptor.TYPE_BYTES:
        return choose.choice(PIECES)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return choose.choice(TEXTS)
    if field.enum_type and choose.random() < 0.8:
        return choose.choice(field.enum_type.values).number
    least, most = _RANGES[field.cpp_type]
    return choose.choice([number for number in NUMBERS if isinstance(number, int) and least <= number <= most])
