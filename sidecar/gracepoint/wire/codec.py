"""How a message is written and read: dataclasses to JSON and back, strictly.

A reader ignores fields that it does not know, and refuses missing and mistyped ones with ``WireError``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Self

from gracepoint.errors import WireError as WireError  # the operator imports it from here

VERSION = 1

#: Fields whose key in JSON is not their name. Version 1 was made when JobSet was the only kind of workload.
_KEYS = {"workload_uid": "jobset_uid"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages: strict reading and compact writing."""

    type: ClassVar[str] = ""  # of a frame of the stream; empty for all other messages
    version: int = VERSION

    def to_json(self) -> str:
        """One line of JSON without line breaks."""
        return json.dumps(_plain(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads one message.

        Raises:
            WireError: The text is no JSON object, the version is another one, or a field is missing or mistyped.
        """
        return cls.from_dict(parsed(cls.__name__, text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads one message from a parsed JSON object, as ``from_json``."""
        found = data.get("version")
        if found != VERSION:
            raise WireError(f"{cls.__name__}.version: expected {VERSION}, found {shown(found)}")
        return typing.cast(Self, _read(cls.__name__, cls, data))


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        fields = {json_key(f.name): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": value.type, **fields} if value.type else fields
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def json_key(field: str) -> str:
    """Returns the key in JSON of a message's field of this name."""
    return _KEYS.get(field, field)


def printable(text: str) -> str:
    """Returns a text without what could control a terminal or hide its own parts: such characters become escapes.

    Line breaks and tabs stay. Everything that a message says may be shown to a person.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """The same without line breaks and tabs, for what is shown as a line: no text can pretend to be the next one."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def parsed(what: str, text: str | bytes) -> dict[str, Any]:
    """Parses a JSON object; ``what`` names it in the error.

    Raises:
        WireError: The text is no JSON object.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        raise WireError(f"{what}: expected a JSON object, found {text[:80]!r} ({error})") from error
    if not isinstance(data, dict):
        raise WireError(f"{what}: expected a JSON object, found {type(data).__name__}")
    return data


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Returns the types of a class's fields. Cached, as finding them costs more than the rest of reading a message."""
    return typing.get_type_hints(kind)


def _read(path: str, wanted: Any, value: Any) -> Any:
    """Converts ``value`` (plain JSON) to the type ``wanted``, or raises naming ``path``. Texts become printable."""
    if wanted is str and isinstance(value, str):
        return printable(value)
    if type(value) is wanted and wanted is not float:  # the fast path, for most fields
        return value
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):  # only "X | None" is used
        if value is None:
            return None
        (wanted,) = (arm for arm in typing.get_args(wanted) if arm is not type(None))
        return _read(path, wanted, value)
    if origin is list and isinstance(value, list):
        (item,) = typing.get_args(wanted)
        return [_read(f"{path}[{i}]", item, v) for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {printable(k): _read(f"{path}.{k}", typing.get_args(wanted)[1], v) for k, v in value.items()}
    if dataclasses.is_dataclass(wanted) and isinstance(value, Mapping):
        hints = _hints(typing.cast(type, wanted))
        read = {}
        for field in dataclasses.fields(wanted):
            key = json_key(field.name)
            if key in value:
                read[field.name] = _read(f"{path}.{key}", hints[field.name], value[key])
            elif field.default is dataclasses.MISSING:
                raise WireError(f"{path}.{key}: missing; found the fields {shown(sorted(value))}")
        return typing.cast(type, wanted)(**read)
    if isinstance(wanted, type):
        if issubclass(wanted, StrEnum):
            if isinstance(value, str) and value in set(wanted):
                return wanted(value)
            raise WireError(f"{path}: expected one of {[str(v) for v in wanted]}, found {shown(value)}")
        if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
        elif isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
            return value
    name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
    raise WireError(f"{path}: expected {name}, found {shown(value)}")


#: Shortens what the other side sent for an error message, however long and however deeply nested it is.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxdict = 20
_SHORT.maxlevel = 2


def shown(value: Any) -> str:
    """Returns a value for an error message, shortened."""
    return _SHORT.repr(value)[:400]
