"""Which rows match an object, and what the object tells of when. Pure.

A ``Mark`` is what a row has matched on one object. What it means for a pod, and by when, depends on the pod as well
(``signal.of_pod``).
"""

from __future__ import annotations

import dataclasses
import email.utils
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gracepoint_operator.kube.objects import Taint, parse_time, read_taint
from gracepoint_operator.signals.rows import On, Row, Time, TimeFormat

Body = Mapping[str, Any]

_HTTP_DATE = re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a row has matched on one object.

    Attributes:
        id: Equal for the same thing seen again, different for a new one: a taint that is put again with another
            value or time, a condition that came again, a maintenance that was moved.
        text: For people: what was seen, as "taint cloud.google.com/impending-node-termination:NoSchedule".
        since_at: When it began, where the API tells that; else the latest time at which it can have, or None.
        is_exact: It tells that.
        until_at: When the pod is gone, where the object tells that.
        taint: The taint, where it is one.
    """

    id: str
    row: Row
    text: str
    since_at: float | None
    until_at: float | None
    is_exact: bool
    taint: Taint | None = None


@dataclasses.dataclass(frozen=True)
class _Feature:
    """One thing on an object that rows may match."""

    key: str  # which taint, label, ...; the first row that matches it counts
    text: str
    value: str  # in which a time may be written
    since_at: float | None
    is_exact: bool = False
    again: str = ""  # what tells a new one from an old one
    untold: str = ""  # ... and what does so as well where it tells no time
    taint: Taint | None = None


def marks(rows: Iterable[Row], on: On, body: Body) -> tuple[Mark, ...]:
    """What the rows match on an object of the API server, in the rows' order."""
    found: dict[str, Mark] = {}
    for row in rows:
        if row.match.kind is not on:
            continue
        for feature in _features(row, body):
            mark = _mark(row, feature, body)
            if feature.key not in found and not (row.limit and mark.until_at is None):
                found[feature.key] = mark
    return tuple(found.values())


def _mark(row: Row, feature: _Feature, body: Body) -> Mark:
    time = row.deadline.time
    until_at = None if time is None else told_time(time, feature.value, body)
    told = feature.untold if until_at is None else f"@{until_at:.0f}"
    return Mark(
        id=f"{body['metadata']['uid']}/{row.name}/{feature.key}{feature.again}{told}",
        row=row,
        text=feature.text,
        since_at=feature.since_at,
        until_at=until_at,
        is_exact=feature.is_exact and feature.since_at is not None,
        taint=feature.taint,
    )


def told_time(time: Time, value: str, body: Body) -> float | None:
    """The time that an object tells, in seconds since the epoch; None where it tells none that can be read."""
    try:
        match time.format:
            case TimeFormat.EPOCH_SECONDS:
                return float(value)
            case TimeFormat.RFC3339:
                return parse_time(value)
            case TimeFormat.HTTP_DATE:
                found = _HTTP_DATE.search(value)
                return None if found is None else email.utils.parsedate_to_datetime(found[0]).timestamp()
            case TimeFormat.JSON:
                return _time_in(json.loads(value), time.json_fields)
            case TimeFormat.SECONDS:
                used_s = next((used for path in time.minus if (used := at(body, path)) is not None), 0)
                return _after(time, float(value) - float(used_s), body)
            case TimeFormat.DURATION:
                length_s = _duration_s(value)
                return None if length_s is None else _after(time, length_s, body)
    except (ValueError, TypeError, OverflowError):  # whatever stands there, it is no time
        return None


def at(body: Any, path: str) -> Any:
    """The value at a path; entries of lists are named by their type. None where there is nothing."""
    for part in path.split("."):
        if isinstance(body, list):
            body = next((item for item in body if item.get("type") == part), None)
        elif isinstance(body, Mapping):
            body = body.get(part)
        else:
            return None
    return body


def _features(row: Row, body: Body) -> Iterator[_Feature]:
    """The things on the object that the row matches."""
    match = row.match
    if match.taint is not None:
        for taint in (body.get("spec") or {}).get("taints") or ():
            if match.taint.matches(taint):
                yield _taint(read_taint(taint), body)
    for name, wanted in (("label", match.label), ("annotation", match.annotation)):
        if wanted is None:
            continue
        values = body["metadata"].get(f"{name}s") or {}
        if wanted.matches(value := values.get(wanted.key)):
            since_at = _written_at(body, "f:metadata", f"f:{name}s", f"f:{wanted.key}")
            text = f"{name} {wanted.key}={_short(value)}"
            yield _Feature(f"{name}/{wanted.key}", text, value, since_at, untold=f"={value}")
    if match.condition is not None:
        for condition in (body.get("status") or {}).get("conditions") or ():
            if match.condition.matches(condition):
                yield _condition(row, condition)
    if match.field is not None:
        field = at(body, match.field.path)
        if match.field.matches(value := _plain(field)):
            yield _field(row, match.field.path, value, body)


def _taint(taint: Taint, body: Body) -> _Feature:
    key = f"taint/{taint.key}={taint.value}:{taint.effect}"
    since_at = taint.added_at or _written_at(body, "f:spec", "f:taints")
    return _Feature(
        key=key,
        text=f"taint {taint.key}:{taint.effect}",
        value=taint.value,
        since_at=since_at,
        is_exact=taint.added_at is not None,
        again=f"@{taint.added_at or ''}",
        taint=taint,
    )


def _condition(row: Row, condition: Body) -> _Feature:
    type, status, reason = (condition.get(field) or "" for field in ("type", "status", "reason"))
    since_at = parse_time(condition.get("lastTransitionTime"))
    said = reason if status == "True" else f"{status}, {reason}"
    return _Feature(
        key=f"condition/{type}",
        text=f"condition {type} ({said})"
        if row.match.kind is On.POD
        else f"{row.match.kind} condition {type} ({said})",
        value=condition.get("message") or "",
        since_at=since_at,
        is_exact=True,
        again=f"={status}/{reason}@{since_at or ''}",
    )


def _field(row: Row, path: str, value: str, body: Body) -> _Feature:
    if path == "metadata.deletionTimestamp":  # it includes the grace period
        deleted_at = parse_time(value)
        grace_s = float(at(body, "metadata.deletionGracePeriodSeconds") or 0)
        since_at = None if deleted_at is None else deleted_at - grace_s
        return _Feature(f"field/{path}", f"deletion of the {row.match.kind}".lower(), "", since_at, is_exact=True)
    since_at = _written_at(body, *(f"f:{part}" for part in path.split(".")))
    text = f"{row.match.kind} {path}={_short(value)}"
    return _Feature(f"field/{path}", text, value, since_at, untold=f"={value}")


def _after(time: Time, length_s: float, body: Body) -> float | None:
    since_at = parse_time(at(body, time.since))
    return None if since_at is None else since_at + length_s


def _time_in(value: Any, fields: Iterable[str]) -> float | None:
    """The first of the fields that is there; names are compared without underscores and case."""
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
    """Seconds of 720h, 1h30m or 90s; None for what is no duration, as Never."""
    found = _DURATION.fullmatch(text)
    if found is None or not any(found.groups()):
        return None
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def _plain(value: Any) -> str | None:
    """A field as rows name its values."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


def _short(value: str) -> str:
    return value if len(value) <= 64 else f"{value[:61]}..."


def _written_at(body: Body, *path: str) -> float | None:
    """When the owner of a field last wrote the object: what is in the field was there by then."""
    times = []
    for entry in at(body, "metadata.managedFields") or ():
        owned = entry.get("fieldsV1") or {}
        for part in path:
            owned = owned.get(part) if isinstance(owned, Mapping) else None
        if owned is not None:
            times.append(parse_time(entry.get("time")))
    return max((time for time in times if time is not None), default=None)
