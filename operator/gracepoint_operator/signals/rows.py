"""What a row of the disruption catalogue is: how a signal is recognised, and what it means.

The built-in rows (``catalogue``) and users' own are of this one form. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field, model_validator

from gracepoint.wire.messages import Confidence
from gracepoint_operator.resources import SignalKind
from gracepoint_operator.resources.base import Model

Name = Annotated[str, Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
Key = Annotated[str, Field(min_length=1, max_length=317)]
Path = Annotated[str, Field(min_length=1, max_length=256)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]


class Cause(StrEnum):
    """Why the pod is disrupted, in one word; part of the notice and of the Preemption."""

    SPOT_TERMINATION = "SpotTermination"  # the provider takes a spot or preemptible machine back
    MAINTENANCE = "Maintenance"  # the provider repairs, updates or moves the machine
    SCALE_DOWN = "ScaleDown"  # an autoscaler removes the node
    REBALANCE = "Rebalance"  # the provider recommends to leave
    DRAIN = "Drain"  # the pod is evicted, or its node is emptied
    PRIORITY_PREEMPTION = "PriorityPreemption"  # a pod of higher priority needs the place
    NODE_TAINT = "NodeTaint"  # a NoExecute taint that the pod does not tolerate
    NODE_LOST = "NodeLost"  # the node is gone, unreachable or out of service
    NODE_SHUTDOWN = "NodeShutdown"  # the machine shuts down
    NODE_PRESSURE = "NodePressure"  # the kubelet ends the pod: pressure, or the node shuts down
    HARDWARE = "Hardware"  # a device or the machine is failing
    SUSPENSION = "Suspension"  # the job is suspended, by a queue or a person
    TIME_LIMIT = "TimeLimit"  # the job's own time is over: the gang saves, and trains on until it is ended
    POD_DELETION = "PodDeletion"  # somebody deleted the pod, and neither its Job nor its JobSet


class On(StrEnum):
    """Kinds of objects that signals are seen on."""

    NODE = "Node"
    POD = "Pod"
    JOB = "Job"
    JOB_SET = "JobSet"
    NODE_CLAIM = "NodeClaim"  # Karpenter's, of the pod's node
    WORKLOAD = "Workload"  # Kueue's, of the workload or of what controls it
    DEVICE = "Device"  # of dynamic resource allocation, that is allocated to a ResourceClaim of the pod


class TaintMatch(Model):
    """A taint of the node, or of a device."""

    key: Key | None = None
    """Key of the taint. Absent: any key; then effect is required."""
    value: str | None = None
    """Value of the taint. Absent: any value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Absent: any effect."""

    @model_validator(mode="after")
    def _says_something(self) -> TaintMatch:
        if self.key is None and self.effect is None:
            raise ValueError("expected a key or an effect, found neither: every taint would match")
        return self

    def matches(self, taint: Mapping[str, Any]) -> bool:
        return (
            self.key in (None, taint["key"])
            and self.value in (None, taint.get("value") or "")
            and self.effect in (None, taint.get("effect"))
        )


class ValueMatch(Model):
    """A label or an annotation of the object."""

    key: Key
    values: list[str] = Field(default=[], max_length=64)
    """Values that match. Empty: any."""
    without: str = ""
    """Text that the value must not contain. Empty: any value."""

    def matches(self, value: Any) -> TypeGuard[str]:
        return (
            isinstance(value, str)
            and (not self.values or value in self.values)
            and not (self.without and self.without in value)
        )


class ConditionMatch(Model):
    """An entry of the object's ``status.conditions``."""

    type: Key
    status: Literal["True", "False", "Unknown"] = "True"
    reasons: list[str] = Field(default=[], max_length=64)
    """Reasons that match. Empty: any."""
    message: str = ""
    """Text that the message must contain. Empty: any message."""

    def matches(self, condition: Mapping[str, Any]) -> bool:
        return (
            (condition.get("type"), condition.get("status")) == (self.type, self.status)
            and (not self.reasons or condition.get("reason") in self.reasons)
            and self.message in (condition.get("message") or "")
        )


class FieldMatch(Model):
    """A field of the object, for example ``spec.unschedulable``."""

    path: Path
    values: list[str] = Field(default=[], max_length=64)
    """Values that match, as JSON writes them without quotes. Empty: any value except null."""

    def matches(self, value: str | None) -> TypeGuard[str]:
        return value is not None and (not self.values or value in self.values)


class Match(Model):
    """What is looked for: one of ``taint``, ``label``, ``annotation``, ``condition`` and ``field``."""

    kind: On = On.NODE
    """Kind of the object."""
    taint: TaintMatch | None = None
    label: ValueMatch | None = None
    annotation: ValueMatch | None = None
    condition: ConditionMatch | None = None
    field: FieldMatch | None = None
    with_label: ValueMatch | None = None
    """A label that the object must have, too."""
    unless_condition: ConditionMatch | None = None
    """A condition that the object must not have."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Match:
        if len(self._given()) != 1:
            names = self._given() or "none"
            raise ValueError(f"expected exactly one of taint, label, annotation, condition and field, found {names}")
        if self.taint is not None and self.kind not in (On.NODE, On.DEVICE):
            raise ValueError(f"taint: only Nodes and Devices have taints, found kind {self.kind}")
        if self.taint is None and self.kind is On.DEVICE:
            raise ValueError(f"kind Device: expected a taint, found {self._given()}")
        return self

    @property
    def feature(self) -> str:
        """Which one is given: taint, label, annotation, condition or field."""
        (one,) = self._given()
        return one

    def _given(self) -> list[str]:
        return [name for name in ("taint", "label", "annotation", "condition", "field") if getattr(self, name)]


class TimeFormat(StrEnum):
    """How a time is written in the value of a taint, label, annotation or field, or in a condition's message."""

    EPOCH_SECONDS = "EpochSeconds"
    RFC3339 = "RFC3339"
    HTTP_DATE = "HTTPDate"  # somewhere in the text: Mon, 02 Mar 2026 19:01:45 GMT
    JSON = "JSON"  # a JSON object, in one of its fields: RFC 3339, or a number of epoch seconds
    SECONDS = "Seconds"  # a number of seconds after another time
    DURATION = "Duration"  # 720h, 1h30m, after another time


class Time(Model):
    """The time that the object itself tells."""

    format: TimeFormat
    json_fields: list[str] = Field(default=[], max_length=16)
    """For JSON: paths of the fields that may hold the time, with dots between levels. The first that exists counts.
    Underscores and capitals make no difference."""
    since: str = ""
    """For Seconds and Duration: path of the object's field with the time from which they count. Conditions are named by
    their type."""
    minus: list[str] = Field(default=[], max_length=16)
    """For Seconds: paths of the object's fields that may hold seconds that are used up already. The first that exists
    counts."""

    @model_validator(mode="after")
    def _complete(self) -> Time:
        if (self.format is TimeFormat.JSON) != bool(self.json_fields):
            raise ValueError(f"jsonFields: expected with format JSON and no other, found format {self.format}")
        if (self.format in (TimeFormat.SECONDS, TimeFormat.DURATION)) != bool(self.since):
            raise ValueError(f"since: expected with format Seconds or Duration and no other, found {self.format}")
        return self


class DeadlineRule(Model):
    """By when the pod will be gone.

    This is the time that the object tells. If it tells none, or one before the signal began, the deadline is the sum of
    the seconds below after the beginning of the signal.
    """

    time: Time | None = None
    """How the object tells the time. Absent: it tells none."""
    row: str = ""
    """Name of another row. If that row matches for the same pod, its time counts. Empty: none."""
    after_seconds: Seconds | None = None
    """Seconds after the signal began. Absent: the pod's grace period."""
    grace_cap_seconds: Seconds | None = None
    """Seconds to which the pod's grace period is cut. Absent: it is not cut."""
    tolerated: bool = False
    """True: the seconds for which the pod tolerates the taint are added."""


class Row(Model):
    """One row. The first row that matches a taint, label, annotation, condition or field is the one that counts."""

    name: Name
    provider: Annotated[str, Field(min_length=1, max_length=63)]
    """Who gives the signal."""
    match: Match
    cause: Cause
    confidence: Confidence
    """sure: the pod will die. likely: it probably will; the gang saves and leaves as well. hint: the gang prepares."""
    cancelable: bool
    """True: if the signal goes away before the gang has frozen, the gang is told to continue."""
    deadline: DeadlineRule = DeadlineRule()
    tolerable: bool = False
    """True: the taint is no signal for a pod that tolerates it without tolerationSeconds, because that pod stays."""
    limit: bool = False
    """True: it is a time limit, which is set in advance. So it counts also for pods that were bound after it was set.
    If the object tells no time, there is no signal."""
    about: Annotated[str, Field(max_length=1024)] = ""
    """Description for users: what happens, and the source of this knowledge."""

    @model_validator(mode="after")
    def _limits_tell_their_time(self) -> Row:
        if self.limit and self.deadline.time is None:
            raise ValueError("limit: expected deadline.time beside it, found none")
        return self

    @property
    def kind(self) -> SignalKind:
        """What a policy's ``signals`` calls it."""
        if self.limit:
            return SignalKind.TIME_LIMIT
        if self.match.kind is On.NODE:
            return _ON_NODE[self.match.feature]
        if self.match.kind is On.DEVICE:
            return SignalKind.DEVICE_TAINT
        if self.match.kind is On.POD:
            return SignalKind.POD_DELETION if self.match.feature == "field" else SignalKind.DISRUPTION_TARGET
        return SignalKind.NODE_CLAIM if self.match.kind is On.NODE_CLAIM else SignalKind.SUSPENSION


_ON_NODE = {
    "taint": SignalKind.NODE_TAINT,
    "label": SignalKind.NODE_LABEL,
    "annotation": SignalKind.NODE_ANNOTATION,
    "condition": SignalKind.NODE_CONDITION,
    "field": SignalKind.NODE_CONDITION,
}


SURE, LIKELY, HINT = Confidence.SURE, Confidence.LIKELY, Confidence.HINT


def taint(key: str, effect: str | None = None) -> Match:
    return Match(taint=TaintMatch.model_validate({"key": key, "effect": effect}))


def condition(on: On, type: str, *, status: str = "True", reasons: tuple[str, ...] = (), message: str = "") -> Match:
    fields = {"type": type, "status": status, "reasons": list(reasons), "message": message}
    return Match(kind=on, condition=ConditionMatch.model_validate(fields))


def field(on: On, path: str, *values: str, **also: Any) -> Match:
    return Match(kind=on, field=FieldMatch(path=path, values=list(values)), **also)


def after(seconds: float, *, tolerated: bool = False) -> DeadlineRule:
    return DeadlineRule(after_seconds=seconds, tolerated=tolerated)
