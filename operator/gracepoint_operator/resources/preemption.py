"""Preemption: one disruption of one JobSet, as API, durable state and record at once."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator.resources.base import (
    IMMUTABLE,
    LIST_SET,
    Conditions,
    Count,
    LabelName,
    Model,
    ObjectName,
    Resource,
    Seconds,
    Text,
    Time,
    Uid,
    list_map,
)
from gracepoint_operator.resources.policy import CheckpointPolicySpec


class JobSetReference(Model):
    """The JobSet. Its UID, as one of the same name may come after it."""

    name: ObjectName
    uid: Uid


class PolicyCopy(Model):
    """The policy as it was at the signal: editing or deleting it in mid-flight changes nothing."""

    name: ObjectName
    spec: CheckpointPolicySpec


class PreemptionSpec(Model):
    """Written by the operator replica that sees the signal first; read by all replicas.

    Signals that join later may move ``signal``, ``confidence``, ``cancelable``, ``nodes``, ``pods`` and
    ``deadline``; the rest never changes.
    """

    job_set: Annotated[JobSetReference, Field(json_schema_extra=IMMUTABLE)]
    """Whom it is about."""
    epoch: Annotated[Count, Field(json_schema_extra=IMMUTABLE)]
    """Number of the disruption: one more than the highest of this JobSet UID before."""
    cause: Annotated[LabelName, Field(json_schema_extra=IMMUTABLE)]
    """Why, in one word: SpotTermination, Drain, ... as the first signal has it."""
    signal: Annotated[str, Field(min_length=1, max_length=512)]
    """What was seen, in words; of several signals the one that the deadline comes from."""
    confidence: Confidence
    """How certain it is that pods die."""
    cancelable: bool
    """True: when the signal goes away before the gang has frozen, the gang is told to go on."""
    nodes: list[ObjectName] = Field(default=[], max_length=1024, json_schema_extra=LIST_SET)
    """Nodes that the signals are about."""
    pods: list[ObjectName] = Field(default=[], max_length=4096, json_schema_extra=LIST_SET)
    """Pods of the gang that are going to be disrupted; all pods of the gang are told."""
    observed_at: Annotated[Time, Field(json_schema_extra=IMMUTABLE)]
    """When the first signal was first observed: zero of all timings."""
    deadline: Time
    """When the first of the pods is expected to die. The earliest of all signals; it may move."""
    mode: Annotated[Literal[Mode.ENFORCE, Mode.OBSERVE], Field(json_schema_extra=IMMUTABLE)]
    """Enforce: the gang is told. Observe: recorded only."""
    policy: Annotated[PolicyCopy, Field(json_schema_extra=IMMUTABLE)]
    """What the gang was told by."""


class Acknowledgements(Model):
    """Receipts of the notice: processes that have it in their mailbox."""

    expected: Count
    """Pods of the gang at the signal."""
    received: Count
    laggards: list[ObjectName] = Field(default=[], max_length=50)
    """At most 50 of the pods that have not acknowledged, sorted. Empty also where several replicas had a part in it, as
    none of them knows whose receipt is missing."""


class StageTiming(Model):
    """When a stage was reached. Absent stage: not reached, or nobody reported it."""

    stage: Annotated[str, Field(min_length=1, max_length=32, pattern="^[a-z][A-Za-z]*$")]
    seconds: Seconds
    """Seconds from spec.observedAt until the last process reached the stage."""
    p50_seconds: Seconds | None = None
    """The median over the processes, in seconds after the reporting process had the notice."""
    max_seconds: Seconds | None = None
    """The maximum over the processes, counted alike."""
    time: Time | None = None
    """When the operator learnt of it."""


class Replica(Model):
    """What one operator replica did; only that replica writes its entry."""

    name: ObjectName
    """The replica's pod name."""
    told: Count = 0
    """Pods to whose stream this replica has written the notice."""
    acknowledged: Count = 0
    """Pods that acknowledged to this replica."""
    told_at: Time | None = None
    """When the last of the notices was written."""
    acknowledged_at: Time | None = None
    """When the last of the acknowledgements arrived."""


class PreemptionStatus(Model):
    """Written by the operator's replicas, at most once a second; figures come from the primary process."""

    phase: Phase | None = None
    """How far it is; moves forward only. Committed, Promoted, Retracted, Expired and Failed are ends, of which only
    Expired may still change: to Committed, by a report that came late. Absent: just created."""
    message: Text | None = None
    """The phase in words; at an end, why it ended so."""
    ordinal: Count | None = None
    """The sync point at which all processes agreed to save. Absent until agreed."""
    step: Count | None = None
    """The training step that is, or was, saved. Absent until agreed."""
    bytes: Count | None = None
    """Bytes written by all processes."""
    processes: Count | None = None
    """Processes that took part."""
    acknowledgements: Acknowledgements | None = None
    """Receipts of the notice over all replicas."""
    timings: Annotated[list[StageTiming], Field(max_length=32, json_schema_extra=list_map("stage"))] | None = None
    """When which stage was reached."""
    steps_lost: Count | None = None
    """Completed steps that the checkpoint lacks. Absent until known."""
    seconds_to_spare: float | None = None
    """Deadline minus commit, in seconds; negative: it was late, and lucky."""
    restored_step: Count | None = None
    """The step that the restarted job went on from. Absent until it has restored."""
    conditions: Conditions | None = None
    replicas: Annotated[list[Replica], Field(max_length=16, json_schema_extra=list_map("name"))] | None = None
    """One entry for each operator replica that took part."""


class Preemption(Resource):
    """One disruption of one JobSet: what was seen, who was told, what was saved and how long it took."""

    kind_name: ClassVar[str] = "Preemption"
    plural: ClassVar[str] = "preemptions"

    kind: Literal["Preemption"]
    spec: PreemptionSpec
    status: PreemptionStatus = PreemptionStatus()
