"""Reads the time that an object names for the end of its pods. Pure."""

from __future__ import annotations

import email.utils
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gracepoint_operator.kube.fields import parse_time
from gracepoint_operator.read_errors import reading
from gracepoint_operator.signals.rows import Time, TimeFormat

Body = Mapping[str, Any]

_HTTP_DATE = re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT")
#: Range of times that a date can hold, with a reserve for durations that are added.
_FIRST_AT, _LAST_AT = 0.0, 253_000_000_000.0
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def told_time(time: Time, value: str, body: Body) -> float | None:
    """Returns the time that an object names, in seconds since the epoch. None if it names none.

    Raises:
        Unreadable: The value is not JSON, although the row expects it.
    """
    if time.format is TimeFormat.JSON:
        with reading("expected JSON that tells a time"):
            told = json.loads(value)
    try:
        at = _time_in(told, time.json_fields) if time.format is TimeFormat.JSON else _plain_time(time, value, body)
    except (ValueError, TypeError, AttributeError, OverflowError):  # the value is not a time
        return None
    return at if at is not None and _FIRST_AT <= at <= _LAST_AT else None


def _plain_time(time: Time, value: str, body: Body) -> float | None:
    match time.format:
        case TimeFormat.EPOCH_SECONDS:
            return float(value)
        case TimeFormat.RFC3339:
            return parse_time(value)
        case TimeFormat.HTTP_DATE:
            found = _HTTP_DATE.search(value)
            return None if found is None else email.utils.parsedate_to_datetime(found[0]).timestamp()
        case TimeFormat.SECONDS:
            used_s = next((used for path in time.minus if (used := at(body, path)) is not None), 0)
            return _after(time, float(value) - float(used_s), body)
        case TimeFormat.DURATION:
            length_s = _duration_s(value)
            return None if length_s is None else _after(time, length_s, body)
        case TimeFormat.JSON:
            return None


def at(body: Any, path: str) -> Any:
    """Returns the value at a path. Entries of lists are named by their type. None if there is no value."""
    for part in path.split("."):
        if isinstance(body, list):
            body = next((item for item in body if isinstance(item, Mapping) and item.get("type") == part), None)
        elif isinstance(body, Mapping):
            body = body.get(part)
        else:
            return None
    return body


def _after(time: Time, length_s: float, body: Body) -> float | None:
    since_at = parse_time(at(body, time.since))
    return None if since_at is None else since_at + length_s


def _time_in(value: Any, fields: Iterable[str]) -> float | None:
    """Returns the time in the first of the fields that exists. Names are compared without underscores and case."""
    for path in fields:
        found = value
        for part in path.split("."):
            names = {_bare(name): item for name, item in found.items()} if isinstance(found, Mapping) else {}
            found = names.get(_bare(part))
        if isinstance(found, str):
            return parse_time(found)
        if isinstance(found, int | float):
            return float(found)
    return None


def _bare(name: str) -> str:
    return name.replace("_", "").lower()


def _duration_s(text: str) -> float | None:
    """Returns the seconds of 720h, 1h30m or 90s. None for a text that is not a duration, such as Never."""
    found = _DURATION.fullmatch(text)
    if found is None or not any(found.groups()):
        return None
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds
