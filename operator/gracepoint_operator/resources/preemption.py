"""Preemption: one disruption of one JobSet, as API, durable state and record at once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator.resources.base import (
    IMMUTABLE,
    LIST_SET,
    Conditions,
    Count,
    LabelName,
    Model,
    ObjectName,
    OfWorkload,
    Resource,
    Seconds,
    Text,
    Time,
    Uid,
    cel,
    list_map,
    rules,
)
from gracepoint_operator.resources.policy import PolicyInForce


class WorkloadReference(OfWorkload):
    """The JobSet. Its UID, as one of the same name may come after it."""

    name: ObjectName
    uid: Uid


class PolicyCopy(Model):
    """The policy as it was at the signal, as far as it is decided with: editing or deleting it in mid-flight changes
    nothing. All else of it stands in the JobSet since that was created."""

    name: ObjectName
    spec: PolicyInForce


class RequestReference(Model):
    """A request that was adopted. Its UID, as one of the same name may come after it."""

    name: ObjectName
    uid: Uid


class PreemptionSpec(Model):
    """Written by the operator replica that sees the signal first; read by all replicas.

    Signals that join later may move ``signal``, ``confidence``, ``cancelable``, ``nodes``, ``pods``, ``deadline``,
    ``evictionAttemptedAt``, ``requests`` and ``moves``; the rest never changes.

    A Preemption without ``epoch`` is a request of a person or a controller: it has ``jobSet`` (by name), ``deadline``
    or ``deadlineSeconds``, ``cause``, ``mode`` (Enforce or Drill) and ``retracted``, and nothing else.
    """

    workload: Annotated[WorkloadReference, Field(json_schema_extra=IMMUTABLE)]
    """Whom it is about."""
    epoch: Annotated[Count, Field(json_schema_extra=IMMUTABLE)]
    """Number of the disruption: one more than the highest of this JobSet UID before."""
    restart_attempt: Annotated[Count, Field(json_schema_extra=IMMUTABLE)] | None = None
    """The JobSet's restart attempt at the signal. Pods of a later attempt are of the gang's next life. Absent: an
    operator from before this field made the record."""
    newest_pod_at: Annotated[Time, Field(json_schema_extra=IMMUTABLE)] | None = None
    """When the newest pod of the gang was created, by the API server's clock. Pods of the same attempt that are created
    later, as after a suspension, are of the gang's next life. Absent: an operator from before this field made the
    record; then the time at which it was created takes its place."""
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
    """When the first of the pods is expected to die. The earliest of all signals; it may move, to a later time only
    where whoever set it says so and the gang has not frozen."""
    eviction_attempted_at: Time | None = None
    """When an eviction of one of the pods was first asked for, by any of the replicas: the hold is counted from it.
    Absent: no eviction was asked for."""
    requests: list[RequestReference] = Field(default=[], max_length=64, json_schema_extra=list_map("uid"))
    """Requests that this is about, or that joined it."""
    moves: Count = 0
    """How often joining signals have changed it. Of two versions the one with more moves counts, then the one with the
    earlier deadline."""
    mode: Annotated[Mode, Field(json_schema_extra=IMMUTABLE)]
    """Enforce: the gang is told, saves and leaves. Observe: recorded only. Drill: the gang is told, saves and trains
    on."""
    exits: Annotated[bool, Field(json_schema_extra=IMMUTABLE)] = True
    """False: the gang saves and trains on, since it has left too often (the policy's exitBreaker), or since its own
    time is over, which leaving would begin anew."""
    policy: Annotated[PolicyCopy, Field(json_schema_extra=IMMUTABLE)]
    """What the gang was told by."""


class Lags(StrEnum):
    """What a pod has not done yet."""

    NOT_CONNECTED = "NotConnected"
    NOT_ACKNOWLEDGED = "NotAcknowledged"


class Laggard(Model):
    """A pod whose receipt is missing."""

    pod: ObjectName
    lags: Lags
    """NotConnected: no replica has told it, as it was connected to none since the signal. NotAcknowledged: it was told,
    and has sent no receipt."""


class Acknowledgements(Model):
    """Receipts of the notice: processes that have it in their mailbox."""

    expected: Count
    """Pods of the gang at the signal."""
    received: Count
    laggards: list[Laggard] = Field(default=[], max_length=50)
    """At most 50 of the pods that have not acknowledged to any replica, sorted; also those that are gone since."""


class StageTime(Model):
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
    told_pods: list[Text] = Field(default=[], max_length=4096)
    """Whom it told: pods by Job and completion index, such as train-workers-0-[0-499,501]."""
    acknowledged_pods: list[Text] = Field(default=[], max_length=4096)
    """Who acknowledged to it, likewise."""


class PreemptionStatus(Model):
    """Written by the operator's replicas, at most once a second; figures come from the primary process."""

    phase: Phase | None = None
    """How far it is; moves forward only. Committed, Promoted, Retracted, Expired and Failed are ends, of which only
    Expired and Retracted may still change: to Committed or Promoted, by a report that came late. Absent: just
    created."""
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
    timings: Annotated[list[StageTime], Field(max_length=32, json_schema_extra=list_map("stage"))] | None = None
    """When which stage was reached."""
    choice: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    """What all processes chose to do with the time that was left: SaveNow, FinishInFlight, CancelAndSave, Promote or
    Impossible. Absent until agreed, and from libraries before there was a choice."""
    choice_reason: Text | None = None
    """Why, with the figures, in one sentence."""
    steps_lost: Count | None = None
    """Completed steps that the checkpoint lacks. Absent until known."""
    seconds_to_spare: float | None = None
    """Deadline minus commit, in seconds; negative: it was late, and lucky."""
    restored_step: Count | None = None
    """The step that the restarted job went on from. Absent until it has restored."""
    conditions: Conditions | None = None
    """Ended: it is over; why, in one word, is the reason. Exits=False: the gang is told to save and to train on."""
    replicas: Annotated[list[Replica], Field(max_length=16, json_schema_extra=list_map("name"))] | None = None
    """One entry for each operator replica that took part."""


_DEADLINE_MESSAGE = "a request has exactly one of deadline and deadlineSeconds"


class RequestedWorkload(OfWorkload):
    """The JobSet, in the request's namespace."""

    name: ObjectName
    uid: Uid | None = None
    """Absent: whichever has the name."""


class RequestSpec(Model):
    """Written by a person or a controller: this JobSet is to save and leave, or to rehearse that.

    Deleting the request takes it back, as ``retracted`` does, unless the gang has frozen.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel("has(self.epoch) || has(self.deadline) != has(self.deadlineSeconds)", _DEADLINE_MESSAGE)
        )
    )

    workload: Annotated[RequestedWorkload, Field(json_schema_extra=IMMUTABLE)]
    """Whom it is about."""
    cause: Annotated[LabelName, Field(json_schema_extra=IMMUTABLE)] = "Requested"
    """Why, in one word. The record and the notice carry it."""
    deadline: Time | None = None
    """When the pods are expected to die: the gang trains on until it must save. May be edited until it has frozen."""
    deadline_seconds: Seconds | None = None
    """In place of deadline: so many seconds after the request was created."""
    mode: Annotated[Literal[Mode.ENFORCE, Mode.DRILL], Field(json_schema_extra=IMMUTABLE)] = Mode.ENFORCE
    """Enforce: save and leave; under a policy of mode Observe or Drill, what that says. Drill: rehearse all but the
    exit."""
    retracted: bool = False
    """True: taken back."""

    @model_validator(mode="after")
    def _one_deadline(self) -> RequestSpec:
        if (self.deadline is None) == (self.deadline_seconds is None):
            raise ValueError(_DEADLINE_MESSAGE)
        return self


class RequestPhase(StrEnum):
    """What became of a request; once its Preemption has ended, how that ended."""

    ADOPTED = "Adopted"
    SUPERSEDED = "Superseded"
    COMMITTED = "Committed"
    PROMOTED = "Promoted"
    RETRACTED = "Retracted"
    EXPIRED = "Expired"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        return self is not RequestPhase.ADOPTED


class RequestStatus(Model):
    """Written by the operator."""

    phase: RequestPhase | None = None
    """Adopted: the Preemption that is named is about it. Superseded: nothing came of it, the message says why. Then
    how that Preemption ended. Absent: not decided yet."""
    message: Text | None = None
    """The phase in words."""
    preemption: ObjectName | None = None
    """The Preemption that was made of it, or that it joined."""


class PreemptionRequest(Resource):
    """A Preemption that somebody else than the operator made: it asks for one."""

    kind_name: ClassVar[str] = "Preemption"
    plural: ClassVar[str] = "preemptions"
    #: A request that is not understood as a whole is not acted upon: what is passed over may be what limits it.
    passes_over = frozenset({"status"})
    #: Failed: nobody acts upon it, and nothing is written over the phase.
    in_place_of_unknown: ClassVar[Mapping[tuple[str, ...], str]] = {("status", "phase"): "Failed"}

    kind: Literal["Preemption"]
    spec: RequestSpec
    status: RequestStatus = RequestStatus()

    @staticmethod
    def is_one(spec: Any) -> bool:
        """True if the spec of a Preemption is a request's: the operator's own have a number."""
        return "epoch" not in spec


#: What of a record stands in no request, and what stands in it beside that, in JSON. Either all is there, or nothing.
RECORD_ONLY = ("signal", "confidence", "cancelable", "observedAt", "policy")
_RECORD = (*RECORD_ONLY, "cause", "mode", "deadline", "jobSet.uid")
#: A rule that a field is immutable does not see that it comes or goes.
_STAYS = ("epoch", "restartAttempt", "newestPodAt", "cause", "mode", "exits")
_KIND_MESSAGE = (
    "expected a request (jobSet, deadline or deadlineSeconds, cause, mode, retracted), or a record, which the operator "
    "makes; neither ever becomes the other, and restartAttempt, newestPodAt, cause, mode and exits never come or go"
)


def _has(fields: tuple[str, ...], joined: str) -> str:
    return joined.join(f"has(self.{field})" for field in fields)


#: The schema of a Preemption's spec beside its fields.
EITHER = rules(
    cel(
        f"has(self.epoch) ? {_has(_RECORD, ' && ')} && !has(self.deadlineSeconds) : !({_has(RECORD_ONLY, ' || ')})",
        _KIND_MESSAGE,
    ),
    cel(" && ".join(f"has(self.{field}) == has(oldSelf.{field})" for field in _STAYS), _KIND_MESSAGE),
)

#: How the names of the operator's records end: part of the JobSet's UID, and the epoch. A request that had the name of
#: the next record would be in its way.
RECORD_NAME_END = "-[0-9a-f]{8}-[0-9]+$"

#: The schema of a Preemption beside its parts.
NAMES = rules(
    cel(
        f"has(self.spec.epoch) || !self.metadata.name.matches('{RECORD_NAME_END}')",
        "metadata.name: a name that ends in eight hexadecimal digits and a number is of a record, which the operator "
        "makes; name the request otherwise",
    )
)


class Preemption(Resource):
    """One disruption of one JobSet: what was seen, who was told, what was saved and how long it took."""

    kind_name: ClassVar[str] = "Preemption"
    plural: ClassVar[str] = "preemptions"
    #: Observe and Failed: this replica tells nobody of it and changes nothing in it; the newer one does.
    in_place_of_unknown: ClassVar[Mapping[tuple[str, ...], str]] = {
        ("spec", "mode"): "Observe",
        ("spec", "confidence"): "likely",
        ("status", "phase"): "Failed",
        ("status", "conditions", "status"): "Unknown",
        ("status", "acknowledgements", "laggards", "lags"): "NotAcknowledged",
    }

    kind: Literal["Preemption"]
    spec: PreemptionSpec
    status: PreemptionStatus = PreemptionStatus()
