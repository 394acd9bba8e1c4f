"""Reads single fields of API objects: texts, numbers, labels, conditions and times. Pure.

If a field has a wrong type, each function raises ``Unreadable``, or an error that ``read_errors.reading`` turns into
it.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from gracepoint_operator.read_errors import Unreadable

#: Characters in the name of an object.
LONGEST_NAME = 253

_Shared = TypeVar("_Shared", bound=Hashable)


def parse_time(text: str | None) -> float | None:
    """Returns the seconds since the epoch of an RFC 3339 time. None if there is no time."""
    return None if not text else datetime.datetime.fromisoformat(text).timestamp()


def format_time(at: float) -> str:
    """Returns a time as RFC 3339 in UTC with microseconds, as the API's MicroTime."""
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def true_conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the conditions that are True, by type."""
    return {text(item["type"]): item for item in status.get("conditions") or () if item.get("status") == "True"}


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"expected a text, found {value!r:.80}")
    # JSON can hold half of a surrogate pair, which cannot be written to another object.
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise Unreadable(f"expected Unicode text, found {value!r:.80}")
    return value


def object_name(value: Any) -> str:
    """Returns the name of an object, which may be empty. A longer one than objects can have fits into no record."""
    if len(name := text(value)) > LONGEST_NAME:
        raise Unreadable(f"expected at most {LONGEST_NAME} characters, found {len(name)}: {name:.80}")
    return name


@functools.lru_cache(maxsize=65536)
def shared(value: _Shared) -> _Shared:
    """Returns an equal value that was seen before, if there is one, so that equal values are in memory once."""
    return value


def read_labels(meta: Mapping[str, Any]) -> dict[str, str]:
    return {shared(text(key)): shared(text(value)) for key, value in (meta.get("labels") or {}).items()}


def owner_uid(meta: Mapping[str, Any]) -> str:
    """Returns the UID of the object that controls this one. Empty if there is none."""
    owners = (owner for owner in meta.get("ownerReferences") or () if owner.get("controller") is True)
    return next((text(owner["uid"]) for owner in owners), "")


def optional_number(value: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(number := float(value)):
        raise Unreadable(f"expected a number, found {value!r:.80}")
    return number


def label_number(label: str, default: int) -> int:
    """Returns the number in a label, which has at most 63 characters."""
    return int(label) if label.isdecimal() and len(label) < 64 else default
