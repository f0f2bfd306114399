"""Messages as files and hashes: binary or JSON by the file's suffix, written atomically.

The JSON form is a plain rendering of a message's fields: names as in the `.proto`, enum values by name, bytes in
base64, unset fields left out. `google.protobuf.json_format` is not used because it must know the type inside an Any,
and a GraphDef's type is TensorFlow's, which this layer does not import; here an Any is its two fields, `type_url` and
`value`.
What a message means is the business of the value it belongs to.
"""

import base64
import hashlib
import json
import os
import reprlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from autodist_py.proto.text import first_repeated, known_names

M = TypeVar("M", bound=Message)

# A FieldDescriptor: protobuf's implementations each have a class of their own.
Field = Any

SUFFIXES = (".pb", ".json")

MOST_BYTES = 2**31 - 1
"""What protobuf reads at most."""

_PIECE_BYTES = 1 << 24

_NO_NAME = "{!r} is no name of a file"


def to_bytes(message: Message) -> bytes:
    """The binary form; equal messages give equal bytes."""
    return message.SerializeToString(deterministic=True)


def content_hash(message: Message) -> str:
    """sha256 of the binary form, as 64 hexadecimal digits."""
    return hashlib.sha256(to_bytes(message)).hexdigest()


def to_json(message: Message) -> str:
    """The JSON form, indented; equal messages give equal text."""
    return json.dumps(to_plain(message), indent=2, ensure_ascii=False) + "\n"


def from_json(message_type: type[M], text: str) -> M:
    """The message that `to_json` wrote.

    Raises:
        ValueError: the text is not JSON, or not of this message; it names the field.
    """
    message = message_type()
    _fill(message, json.loads(text, object_pairs_hook=_unique_keys), "")
    return message


def save(message: Message, path: str | os.PathLike[str], *, error: type[Exception]) -> None:
    """The message is in the file, whole: a reader sees the old content or the new one, never a part.

    Raises:
        error: the suffix is neither `.pb` nor `.json`, or the file cannot be written.
    """
    suffix = require_suffix(path, error=error)
    content = to_bytes(message) if suffix == ".pb" else to_json(message).encode()
    try:
        write_atomically(path, content)
    except OSError as cause:
        raise error(f"{os.fspath(path)}: {len(content)} bytes cannot be written: {cause.strerror or cause}") from cause
    except ValueError as cause:
        raise error(f"{_NO_NAME.format(os.fspath(path))}: {cause}") from cause


def load(
    message_type: type[M], path: str | os.PathLike[str], *, error: type[Exception], most_bytes: int = MOST_BYTES
) -> M:
    """The message in a file that `save` wrote.

    Raises:
        error: the suffix is neither `.pb` nor `.json`, the file has more than `most_bytes`, or the content is not of
            this message.
        OSError: the file cannot be read.
    """
    path = Path(path)
    suffix = require_suffix(path, error=error)
    try:
        content = _read(path, most_bytes + 1)
    except ValueError as cause:
        raise error(f"{_NO_NAME.format(os.fspath(path))}: {cause}") from cause
    what = f"{path}: not a {message_type.DESCRIPTOR.name} in {suffix} form"
    if len(content) > most_bytes:
        raise error(f"{what}: it has more than {most_bytes} bytes")
    try:
        return message_type.FromString(content) if suffix == ".pb" else from_json(message_type, content.decode())
    except (DecodeError, ValueError, OverflowError) as cause:
        raise error(f"{what}: {cause}") from cause
    except RecursionError as cause:
        raise error(f"{what}: it is nested too deeply") from cause


def _read(path: Path, most_bytes: int) -> bytes:
    """The file's content, so many bytes at most: in pieces, as Python keeps room for all that is asked for."""
    pieces = []
    with path.open("rb") as file:
        while most_bytes and (piece := file.read(min(most_bytes, _PIECE_BYTES))):
            pieces.append(piece)
            most_bytes -= len(piece)
    return b"".join(pieces)


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """The file holds the content; on failure it is as it was."""
    path = Path(path)
    # Not `tempfile`: its files are readable by their owner only, and would stay so.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def require_suffix(path: str | os.PathLike[str], *, error: type[Exception]) -> str:
    """`.pb` or `.json`, as the path says."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise error(f"a value is saved as binary (.pb) or JSON (.json), told by the suffix; got {os.fspath(path)!r}")
    return suffix


# -- Message -> plain data --------------------------------------------------------------------------------------------


def to_plain(message: Message) -> dict[str, Any]:
    """The fields that are set, as dicts, lists and scalars, in the order of their numbers."""
    return {field.name: _plain_field(field, value) for field, value in message.ListFields()}


def _plain_field(field: Field, value: Any) -> Any:
    if _is_map(field):
        one = _plain_one(field.message_type.fields_by_name["value"])
        return {key: one(value[key]) for key in sorted(value)}
    one = _plain_one(field)
    return [one(item) for item in value] if field.is_repeated else one(value)


def _plain_one(field: Field) -> Callable[[Any], Any]:
    if field.message_type:
        return to_plain
    if field.enum_type:
        return lambda number: field.enum_type.values_by_number[number].name
    if field.type == FieldDescriptor.TYPE_BYTES:
        return lambda value: base64.b64encode(value).decode()
    return lambda value: value


# -- Plain data -> message --------------------------------------------------------------------------------------------


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A map of JSON; a key that comes twice is an error, not a silent choice of the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = first_repeated(key for key, _ in pairs)
        raise ValueError(f"the key {repeated!r} comes twice in one map; remove one")
    return found


def _fill(message: Message, plain: object, where: str) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in _expect(dict, plain, where or "the file").items():
        at = f"{where}.{name}" if where else name
        if name not in fields:
            raise ValueError(f"{at}: no such field; {known_names(name, fields)}")
        _fill_field(message, fields[name], value, at)


def _fill_field(message: Message, field: Field, value: object, at: str) -> None:
    target = getattr(message, field.name)
    if _is_map(field):
        entry = field.message_type.fields_by_name["value"]
        for key, item in _expect(dict, value, at).items():
            if entry.message_type:
                _fill(target[key], item, f"{at}[{key!r}]")
            else:
                target[key] = _scalar(entry, item, f"{at}[{key!r}]")
    elif field.is_repeated:
        for index, item in enumerate(_expect(list, value, at)):
            if field.message_type:
                _fill(target.add(), item, f"{at}[{index}]")
            else:
                target.append(_scalar(field, item, f"{at}[{index}]"))
    elif field.message_type:
        target.SetInParent()
        _fill(target, value, at)
    else:
        setattr(message, field.name, _scalar(field, value, at))


_JSON_TYPES: Mapping[int, tuple[type, ...]] = {
    FieldDescriptor.CPPTYPE_STRING: (str,),
    FieldDescriptor.CPPTYPE_BOOL: (bool,),
    FieldDescriptor.CPPTYPE_INT32: (int,),
    FieldDescriptor.CPPTYPE_INT64: (int,),
    FieldDescriptor.CPPTYPE_DOUBLE: (int, float),
    FieldDescriptor.CPPTYPE_ENUM: (str,),
}


def _scalar(field: Field, value: object, at: str) -> Any:
    expected = _JSON_TYPES[field.cpp_type]
    if type(value) not in expected:
        raise ValueError(f"{at}: expected {expected[-1].__name__}, got {reprlib.repr(value)}")
    if field.enum_type:
        return _enum_number(field, str(value), at)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return base64.b64decode(str(value), validate=True)
    return value


def _enum_number(field: Field, name: str, at: str) -> int:
    values = field.enum_type.values_by_name
    if name not in values:
        raise ValueError(f"{at}: no {field.enum_type.name} is called {name!r}; {known_names(name, values)}")
    return int(values[name].number)


def _expect(expected: type[Any], value: object, at: str) -> Any:
    if not isinstance(value, expected):
        raise ValueError(f"{at}: expected {expected.__name__}, got {reprlib.repr(value)}")
    return value


def _is_map(field: Field) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)
