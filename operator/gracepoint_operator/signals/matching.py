"""Finds the rows of the catalogue that match an object. Pure.

A ``Mark`` is a match of a row on one object. Whether it is a signal for a pod, and with which deadline, depends on the
pod as well (``signal.of_pod``).

Users may write anything into annotations, and controllers into conditions. So each taint, label, annotation, condition
and field is read separately. One that cannot be read is reported, and the others still count.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gracepoint.wire.codec import one_line
from gracepoint.wire.messages import Confidence
from gracepoint_operator.kube.fields import parse_time
from gracepoint_operator.kube.objects import Taint, Toleration, read_taint
from gracepoint_operator.read_errors import CAUSES, Unreadable, reading, said
from gracepoint_operator.signals.end_times import Body, at, told_time
from gracepoint_operator.signals.rows import (
    ConditionMatch,
    FieldMatch,
    Match,
    On,
    Row,
    TaintMatch,
    Time,
    ValueMatch,
)

#: Length of the field ``signal`` of a Preemption. Reasons of conditions have no limit of their own.
_TEXT_LIMIT = 512


@dataclasses.dataclass(frozen=True)
class Mark:
    """A match of a row on one object.

    Attributes:
        id: The same for the same signal seen again, and different for a new one: a taint that was set again with
            another value or time, a condition that came again, a maintenance that was moved.
        row: The row that matched.
        text: Description for users, e.g. "taint cloud.google.com/impending-node-termination:NoSchedule".
        since_at: When it began, in seconds since the epoch. If the object does not say, the latest time at which it can
            have begun. None if that is not known either.
        is_exact: Whether the object says when it began.
        until_at: When the pod will be gone, in seconds since the epoch. None if the object does not say.
        taint: The taint. None if it is not a taint.
        tolerations: What tolerates the taint, in the order in which it counts: the claim's tolerations of a device's
            taint. None: the pod's tolerations.
    """

    id: str
    row: Row
    text: str
    since_at: float | None
    until_at: float | None
    is_exact: bool
    taint: Taint | None = None
    tolerations: tuple[Toleration, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _Feature:
    """A taint, label, annotation, condition or field of an object that a row matches."""

    key: str  # identifies the taint, label, ...; the first row that matches it counts
    text: str
    value: str  # may contain a time
    since_at: float | None
    is_exact: bool = False
    again: str = ""  # distinguishes a new one from an old one
    untold: str = ""  # distinguishes them too, if the feature tells no time
    taint: Taint | None = None


def marks(rows: Iterable[Row], on: On, body: Body, unreadable_parts: dict[str, None] | None = None) -> tuple[Mark, ...]:
    """Returns the marks of the rows on an object, in the order of the rows.

    Args:
        rows: The catalogue.
        on: The kind of the object.
        body: The object as the API server gives it.
        unreadable_parts: Gets the parts of the object that could not be read.

    Raises:
        Unreadable: The object has no UID.
    """
    unreadable_parts = {} if unreadable_parts is None else unreadable_parts
    with reading("metadata.uid"):
        uid = str(body["metadata"]["uid"])
    found: dict[str, Mark] = {}
    for row in rows:
        if row.match.kind is not on:
            continue
        for feature in _features(row, body, unreadable_parts):
            mark = _mark(row, feature, uid, body, unreadable_parts)
            if feature.key not in found and not (row.limit and mark.until_at is None):
                found[feature.key] = mark
    return tuple(found.values())


def _mark(row: Row, feature: _Feature, uid: str, body: Body, unreadable_parts: dict[str, None]) -> Mark:
    time = row.deadline.time
    until_at = None if time is None else _told_time(time, feature, body, unreadable_parts)
    told = feature.untold if until_at is None else f"@{until_at:.0f}"
    return Mark(
        id=f"{uid}/{row.name}/{feature.key}{feature.again}{told}",
        row=row,
        text=_shortened(one_line(feature.text), _TEXT_LIMIT),
        since_at=feature.since_at,
        until_at=until_at,
        is_exact=feature.is_exact and feature.since_at is not None,
        taint=feature.taint,
    )


def _told_time(time: Time, feature: _Feature, body: Body, unreadable_parts: dict[str, None]) -> float | None:
    try:
        return told_time(time, feature.value, body)
    except Unreadable as error:
        unreadable_parts[f"{feature.key}: {error}"] = None
        return None


def _features(row: Row, body: Body, unreadable_parts: dict[str, None]) -> list[_Feature]:
    """Returns the parts of the object that the row matches."""
    match = row.match
    found: list[_Feature] = []
    if not _is_of_row(match, body):
        return found

    def see(what: str, read: Callable[[], _Feature | None]) -> None:
        try:
            feature = read()
        except CAUSES as error:
            unreadable_parts[f"{what}: {said(error)}"] = None
        else:
            found.extend([] if feature is None else [feature])

    if match.taint is not None:
        for place, taint in enumerate(_entries(body, "spec.taints")):
            see(f"spec.taints[{place}]", functools.partial(_matched_taint, row, match.taint, taint, body))
    for name, wanted in (("label", match.label), ("annotation", match.annotation)):
        if wanted is not None:
            see(f"{name} {wanted.key}", functools.partial(_matched_value, name, wanted, body))
    if match.condition is not None:
        for place, condition in enumerate(_entries(body, "status.conditions")):
            see(f"status.conditions[{place}]", functools.partial(_matched_condition, row, match.condition, condition))
    if match.field is not None:
        see(match.field.path, functools.partial(_matched_field, row, match.field, body))
    return found


def _is_of_row(match: Match, body: Body) -> bool:
    """True unless the row is for other objects, whatever else they show. A part that cannot be read is not there."""

    def shows(matches: Callable[[], bool]) -> bool:
        try:
            return matches()
        except CAUSES:
            return False

    label, without = match.with_label, match.unless_condition
    if label is not None and not shows(lambda: label.matches(body["metadata"]["labels"].get(label.key))):
        return False
    if without is None:
        return True
    return not any(shows(functools.partial(without.matches, entry)) for entry in _entries(body, "status.conditions"))


def _entries(body: Body, path: str) -> Sequence[Any]:
    entries = at(body, path)
    return entries if isinstance(entries, list | tuple) else ()


def _matched_taint(row: Row, wanted: TaintMatch, taint: Any, body: Body) -> _Feature | None:
    if not wanted.matches(taint):
        return None
    found = read_taint(taint)
    # Whatever its key announces, a taint of this effect ends the pods that do not tolerate it.
    is_more = row.confidence is Confidence.HINT and wanted.effect is None and found.effect == "NoExecute"
    return None if is_more else _taint(found, body)


def _matched_value(name: str, wanted: ValueMatch, body: Body) -> _Feature | None:
    value = (body["metadata"].get(f"{name}s") or {}).get(wanted.key)
    if not wanted.matches(value):
        return None
    since_at = _written_at(body, "f:metadata", f"f:{name}s", f"f:{wanted.key}")
    return _Feature(
        f"{name}/{wanted.key}", f"{name} {wanted.key}={_shortened(value)}", value, since_at, untold=f"={value}"
    )


def _matched_condition(row: Row, wanted: ConditionMatch, condition: Any) -> _Feature | None:
    return _condition(row, condition) if wanted.matches(condition) else None


def _matched_field(row: Row, wanted: FieldMatch, body: Body) -> _Feature | None:
    value = _plain(at(body, wanted.path))
    return _field(row, wanted.path, value, body) if wanted.matches(value) else None


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
    # Kueue's message says which workload took the quota.
    told = f": {condition['message']}" if row.match.kind is On.WORKLOAD and condition.get("message") else ""
    return _Feature(
        key=f"condition/{type}",
        text=f"condition {type} ({said})"
        if row.match.kind is On.POD
        else f"{row.match.kind} condition {type} ({said}){told}",
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
        of = row.match.kind if row.match.kind is On.NODE_CLAIM else row.match.kind.lower()
        return _Feature(f"field/{path}", f"deletion of the {of}", "", since_at, is_exact=True)
    since_at = _written_at(body, *(f"f:{part}" for part in path.split(".")))
    text = f"{row.match.kind} {path}={_shortened(value)}"
    return _Feature(f"field/{path}", text, value, since_at, untold=f"={value}")


def _plain(value: Any) -> str | None:
    """Returns the value of a field in the form that rows use."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


def _shortened(text: str, limit: int = 64) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _written_at(body: Body, *path: str) -> float | None:
    """Returns when the owner of a field last wrote the object: the field had its value by then."""
    times = []
    for entry in _entries(body, "metadata.managedFields"):
        owned: Any = entry.get("fieldsV1") or {}
        for part in path:
            owned = owned.get(part) if isinstance(owned, Mapping) else None
        if owned is not None:
            times.append(parse_time(entry.get("time")))
    return max((time for time in times if time is not None), default=None)
