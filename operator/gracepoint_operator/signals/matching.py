"""Finds the rows of the catalogue that match an object. Pure.

A ``Mark`` is a match of a row on one object. Whether it is a signal for a pod, and with which deadline, depends on the
pod as well (``of_pod``).

Users may write anything into annotations, and controllers into conditions. So each taint, label, annotation, condition
and field is read separately. One that cannot be read is reported, and the others still count.
"""

from __future__ import annotations

import dataclasses
import email.utils
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gracepoint.wire.messages import Confidence, one_line
from gracepoint_operator.kube.objects import Pod, Taint, Toleration, parse_time, read_taint, written_at
from gracepoint_operator.read_errors import CAUSES, Unreadable, reading, said
from gracepoint_operator.resources import SignalKind
from gracepoint_operator.signals.rows import (
    Cause,
    ConditionMatch,
    FieldMatch,
    Match,
    On,
    Row,
    TaintMatch,
    Time,
    TimeFormat,
    ValueMatch,
)

Body = Mapping[str, Any]

_HTTP_DATE = re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT")
_DELETED = "metadata.deletionTimestamp"
#: Range of times that a date can hold, with a reserve for durations that are added.
_FIRST_AT, _LAST_AT = 0.0, 253_000_000_000.0
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def named_time(time: Time, value: str, body: Body) -> float | None:
    """Returns the time that an object names for the end of its pods, in seconds since the epoch. None if it names none.

    Raises:
        Unreadable: The value is not JSON, although the row expects it.
    """
    if time.format is TimeFormat.JSON:
        with reading("expected JSON that names a time"):
            content = json.loads(value)
    try:
        at = _time_in(content, time.json_fields) if time.format is TimeFormat.JSON else _plain_time(time, value, body)
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
            date_match = _HTTP_DATE.search(value)
            return None if date_match is None else email.utils.parsedate_to_datetime(date_match[0]).timestamp()
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
        item = value
        for part in path.split("."):
            names = {_bare(name): field for name, field in item.items()} if isinstance(item, Mapping) else {}
            item = names.get(_bare(part))
        if isinstance(item, str):
            return parse_time(item)
        if isinstance(item, int | float):
            return float(item)
    return None


def _bare(name: str) -> str:
    return name.replace("_", "").lower()


def _duration_s(text: str) -> float | None:
    """Returns the seconds of 720h, 1h30m or 90s. None for a text that is not a duration, such as Never."""
    duration_match = _DURATION.fullmatch(text)
    if duration_match is None or not any(duration_match.groups()):
        return None
    hours, minutes, seconds = (float(part or 0) for part in duration_match.groups())
    return hours * 3600 + minutes * 60 + seconds


#: Length of the field ``signal`` of a Preemption. Reasons of conditions have no limit.
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
    unless_timed: str = ""  # distinguishes them too, if the feature names no time
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
    by_feature: dict[str, Mark] = {}
    for row in rows:
        if row.match.kind is not on:
            continue
        for feature in _features(row, body, unreadable_parts):
            mark = _mark(row, feature, uid, body, unreadable_parts)
            if feature.key not in by_feature and not (row.limit and mark.until_at is None):
                by_feature[feature.key] = mark
    return tuple(by_feature.values())


def _mark(row: Row, feature: _Feature, uid: str, body: Body, unreadable_parts: dict[str, None]) -> Mark:
    time = row.deadline.time
    until_at = None if time is None else _named_time(time, feature, body, unreadable_parts)
    version = feature.unless_timed if until_at is None else f"@{until_at:.0f}"
    return Mark(
        id=f"{uid}/{row.name}/{feature.key}{feature.again}{version}",
        row=row,
        text=_shortened(one_line(feature.text), _TEXT_LIMIT),
        since_at=feature.since_at,
        until_at=until_at,
        is_exact=feature.is_exact and feature.since_at is not None,
        taint=feature.taint,
    )


def _named_time(time: Time, feature: _Feature, body: Body, unreadable_parts: dict[str, None]) -> float | None:
    try:
        return named_time(time, feature.value, body)
    except Unreadable as error:
        unreadable_parts[f"{feature.key}: {error}"] = None
        return None


def _features(row: Row, body: Body, unreadable_parts: dict[str, None]) -> list[_Feature]:
    """Returns the parts of the object that the row matches."""
    match = row.match
    features: list[_Feature] = []
    if not _is_of_row(match, body):
        return features

    def see(path: str, read: Callable[[], _Feature | None]) -> None:
        try:
            feature = read()
        except CAUSES as error:
            unreadable_parts[f"{path}: {said(error)}"] = None
        else:
            features.extend([] if feature is None else [feature])

    if match.taint is not None:
        for place, taint in enumerate(_entries(body, "spec.taints")):
            see(f"spec.taints[{place}]", functools.partial(_matched_taint, row, match.taint, taint, body))
    for name, value_match in (("label", match.label), ("annotation", match.annotation)):
        if value_match is not None:
            see(f"{name} {value_match.key}", functools.partial(_matched_value, name, value_match, body))
    if match.condition is not None:
        for place, condition in enumerate(_entries(body, "status.conditions")):
            see(f"status.conditions[{place}]", functools.partial(_matched_condition, row, match.condition, condition))
    if match.field is not None:
        see(match.field.path, functools.partial(_matched_field, row, match.field, body))
    return features


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


def _matched_taint(row: Row, taint_match: TaintMatch, taint: Any, body: Body) -> _Feature | None:
    if not taint_match.matches(taint):
        return None
    parsed = read_taint(taint)
    # Whatever its key announces, a taint of this effect ends the pods that do not tolerate it.
    is_more = row.confidence is Confidence.HINT and taint_match.effect is None and parsed.effect == "NoExecute"
    return None if is_more else _taint(parsed, body)


def _matched_value(name: str, value_match: ValueMatch, body: Body) -> _Feature | None:
    value = (body["metadata"].get(f"{name}s") or {}).get(value_match.key)
    if not value_match.matches(value):
        return None
    since_at = written_at(body, "f:metadata", f"f:{name}s", f"f:{value_match.key}")
    return _Feature(
        f"{name}/{value_match.key}",
        f"{name} {value_match.key}={_shortened(value)}",
        value,
        since_at,
        unless_timed=f"={value}",
    )


def _matched_condition(row: Row, condition_match: ConditionMatch, condition: Any) -> _Feature | None:
    return _condition(row, condition) if condition_match.matches(condition) else None


def _matched_field(row: Row, field_match: FieldMatch, body: Body) -> _Feature | None:
    value = _plain(at(body, field_match.path))
    return _field(row, field_match.path, value, body) if field_match.matches(value) else None


def _taint(taint: Taint, body: Body) -> _Feature:
    key = f"taint/{taint.key}={taint.value}:{taint.effect}"
    since_at = taint.added_at or written_at(body, "f:spec", "f:taints")
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
    state = reason if status == "True" else f"{status}, {reason}"
    # Kueue's message says which workload took the quota.
    detail = f": {condition['message']}" if row.match.kind is On.WORKLOAD and condition.get("message") else ""
    return _Feature(
        key=f"condition/{type}",
        text=f"condition {type} ({state})"
        if row.match.kind is On.POD
        else f"{row.match.kind} condition {type} ({state}){detail}",
        value=condition.get("message") or "",
        since_at=since_at,
        is_exact=True,
        again=f"={status}/{reason}@{since_at or ''}",
    )


def _field(row: Row, path: str, value: str, body: Body) -> _Feature:
    if path == _DELETED:  # it includes the grace period
        deleted_at = parse_time(value)
        grace_s = float(at(body, "metadata.deletionGracePeriodSeconds") or 0)
        since_at = None if deleted_at is None else deleted_at - grace_s
        of = row.match.kind if row.match.kind is On.NODE_CLAIM else row.match.kind.lower()
        return _Feature(f"field/{path}", f"deletion of the {of}", "", since_at, is_exact=True)
    since_at = written_at(body, *(f"f:{part}" for part in path.split(".")))
    text = f"{row.match.kind} {path}={_shortened(value)}"
    return _Feature(f"field/{path}", text, value, since_at, unless_timed=f"={value}")


def _plain(value: Any) -> str | None:
    """Returns the value of a field in the form that rows use."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


def _shortened(text: str, limit: int = 64) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


#: A signal further ahead than this number of seconds starts no preemption yet, since it may still move or be cancelled.
HORIZON_S = 3600.0

#: Texts of signals that the gang reported: a SIGTERM that only the gang saw, and a notice of which there is no record,
#: because all replicas that had seen the signal ended before one of them could record it.
REPORTED_BY_GANG = "SIGTERM, as the gang reports"
REPORTED_BEFORE = "a notice without a record, as the gang reports"
#: The gang knows of these signals already, so no notice is sent for them.
KNOWN_TO_GANG = frozenset({REPORTED_BY_GANG, REPORTED_BEFORE})


@dataclasses.dataclass(frozen=True)
class Signal:
    """A sign that a pod is going to be disrupted.

    Attributes:
        kind: Its kind, as policies name it.
        mark: The id of the mark; see ``matching.Mark``.
        cause: One of ``Cause``, or the cause that a request names.
        text: Description for users, e.g. "taint cloud.google.com/impending-node-termination:NoSchedule".
        node: Name of the pod's node. Empty for a request.
        pod: The pod that it concerns.
        confidence: How certain it is that the pod will be killed.
        cancelable: Whether it may go away again, which retracts the notice.
        lead_s: Seconds from its beginning to the deadline, if ``until_at`` is None.
        grace_s: The part of ``lead_s`` that is the pod's grace period.
        limit: Whether it is a time limit that was set before.
        on: Kind of the object that shows it. None for an eviction, a request, or a report of the gang.
        began_at: When it began, in seconds since the epoch, if the object itself says so.
        deletes_node: Whether it is the deletion of the Node object.
        until_at: The deadline that the object names, in seconds since the epoch. None if it names none.
        lasting: Whether it may have existed when the pod was bound. Then the gang does not leave for it: the scheduler
            chose that node nevertheless, and would again.
    """

    kind: SignalKind
    mark: str
    cause: str
    text: str
    node: str
    pod: Pod
    confidence: Confidence
    cancelable: bool
    lead_s: float
    until_at: float | None = None
    lasting: bool = False
    grace_s: float = 0.0
    limit: bool = False
    on: On | None = None
    began_at: float | None = None
    deletes_node: bool = False

    def deadline_at(self, since_at: float) -> float:
        """Returns when the pod will be gone. A named time before the beginning of the signal is ignored."""
        is_named = self.until_at is not None and self.until_at >= since_at
        return self.until_at if is_named and self.until_at is not None else since_at + self.lead_s

    @property
    def stays(self) -> bool:
        """True if the gang saves and continues to train: an exit would only start its time limit again."""
        return self.cause is Cause.TIME_LIMIT

    def is_far(self, since_at: float, now: float) -> bool:
        """Returns True if it is too far ahead to start a preemption."""
        return self.near_at(since_at) > now

    def near_at(self, since_at: float) -> float:
        """Returns from when on it is not too far ahead any more, in seconds since the epoch.

        The grace period is not counted as lead: it may have begun already, or be cut short.
        """
        at = self.deadline_at(since_at)
        return (at if at == self.until_at else at - self.grace_s) - HORIZON_S


def of_pod(pod: Pod, marks: Iterable[Mark]) -> list[Signal]:
    """Returns the signals that these marks are for a pod. Empty if the pod has finished.

    Args:
        pod: The pod.
        marks: All marks that concern it: its own and those on its node, Job, JobSet, ...
    """
    if pod.finished:
        return []
    marks = tuple(marks)
    named_times = {mark.row.name: mark.until_at for mark in marks if mark.until_at is not None}
    return [signal for mark in marks if (signal := _of_mark(pod, mark, named_times)) is not None]


def reported_by_gang(pod: Pod, cause: str, text: str = REPORTED_BY_GANG) -> Signal:
    """Returns the signal that the gang itself reported. ``text`` is one of ``KNOWN_TO_GANG``."""
    catalogued = Cause(cause) if cause in set(Cause) else Cause.POD_DELETION
    return Signal(SignalKind.POD_DELETION, "", catalogued, text, pod.node, pod, Confidence.SURE, False, _grace_s(pod))


def is_suspension(mark: Mark) -> bool:
    """Returns True if it is the suspension of a Job or JobSet itself, of which Kueue's Workload may have the reason."""
    row = mark.row
    return row.kind is SignalKind.SUSPENSION and row.match.kind in (On.JOB, On.JOB_SET)


def marks_node(mark: Mark) -> bool:
    """Returns True if a mark on a node says, surely or likely, that the node goes away for all pods."""
    matched = mark.row.match.taint
    for_some = matched is not None and matched.key is None  # "any other taint": may concern some pods
    return mark.row.confidence is not Confidence.HINT and not for_some


def _of_mark(pod: Pod, mark: Mark, named_times: Mapping[str, float]) -> Signal | None:
    row, rule, tolerated_s, evicts = mark.row, mark.row.deadline, 0.0, False
    field = row.match.field
    if mark.taint is not None and mark.taint.effect == "NoExecute":
        # The taint manager uses the first toleration that matches.
        tolerations = pod.tolerations if mark.tolerations is None else mark.tolerations
        toleration = next((item for item in tolerations if item.tolerates(mark.taint)), None)
        if toleration is not None:
            if toleration.seconds is None and row.tolerable:
                return None
            tolerated_s = max(toleration.seconds or 0.0, 0.0)
        evicts = toleration is None or toleration.seconds is not None
    grace_s = _grace_s(pod) if rule.after_seconds is None else 0.0
    if rule.grace_cap_seconds is not None:
        grace_s = min(grace_s, rule.grace_cap_seconds)
    lead_s = (tolerated_s if rule.tolerated else 0.0) + (rule.after_seconds or 0.0) + grace_s
    if evicts and tolerated_s + _grace_s(pod) < lead_s:  # what the row says comes later
        grace_s = _grace_s(pod)
        lead_s = tolerated_s + grace_s
    return Signal(
        kind=row.kind,
        mark=mark.id,
        cause=row.cause,
        text=mark.text,
        node=pod.node,
        pod=pod,
        confidence=row.confidence,
        cancelable=row.cancelable,
        lead_s=lead_s,
        grace_s=grace_s,
        until_at=mark.until_at if mark.until_at is not None else named_times.get(rule.row),
        lasting=row.match.kind is not On.POD and not row.limit,
        limit=row.limit,
        on=row.match.kind,
        began_at=mark.since_at if mark.is_exact else None,
        deletes_node=row.match.kind is On.NODE and field is not None and field.path == _DELETED,
    )


def _grace_s(pod: Pod) -> float:
    """Returns the grace period of the deletion in progress, or the pod's own."""
    return pod.grace_s if pod.deletion_grace_s is None else pod.deletion_grace_s
