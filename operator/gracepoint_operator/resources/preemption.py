"""Preemption: one disruption of one JobSet, as API, durable state and record at once.

PreemptionRequest: what a user or a controller asks for, to save and exit, or to rehearse that.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint.wire.names import API_VERSION, GROUP
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
    cel_from,
    list_map,
    rules,
)
from gracepoint_operator.resources.policy import PolicyInForce


class WorkloadReference(OfWorkload):
    """A JobSet."""

    name: ObjectName
    """Name of the JobSet."""
    uid: Uid
    """UID of the JobSet. It distinguishes the JobSet from a later one of the same name."""


class PolicyCopy(Model):
    """A copy of the policy as it was at the signal, so that an edit or a deletion does not change a preemption that is
    under way. It has only the fields that the operator uses; the webhook wrote the others into the JobSet."""

    name: ObjectName
    """Name of the policy."""
    spec: PolicyInForce
    """The fields that the operator uses."""


class RequestReference(Model):
    """A request that was adopted."""

    name: ObjectName
    """Name of the request."""
    uid: Uid
    """UID of the request. It distinguishes the request from a later one of the same name."""


class PreemptionSpec(Model):
    """Written by the operator replica that sees the signal first, and read by all replicas.

    Signals that join later may change ``signal``, ``confidence``, ``cancelable``, ``nodes``, ``pods``, ``deadline``,
    ``evictionAttemptedAt``, ``requests`` and ``moves``, and correct ``cause``. The other fields never change.

    A Preemption without ``epoch`` is a request that was made under version 0.2. New ones are PreemptionRequests.
    """

    workload: Annotated[WorkloadReference, Field(json_schema_extra=IMMUTABLE)]
    """The JobSet that is disrupted."""
    epoch: Annotated[Count, Field(json_schema_extra=IMMUTABLE)]
    """Number of the disruption: one more than the highest number of earlier Preemptions of the same JobSet UID."""
    restart_attempt: Annotated[Count, Field(json_schema_extra=IMMUTABLE)] | None = None
    """The restart attempt of the JobSet at the signal. Pods of a later attempt are not part of this disruption. Absent:
    the record was made by an operator that did not have this field."""
    newest_pod_at: Annotated[Time, Field(json_schema_extra=IMMUTABLE)] | None = None
    """When the newest pod of the gang was created, by the clock of the API server. Pods of the same attempt that are
    created later, for example after a suspension, are not part of this disruption. Absent: the record was made by an
    operator that did not have this field; then the creation time of the record is used."""
    cause: LabelName
    """Cause of the first signal in one word, for example SpotTermination or Drain. It is corrected if a signal that
    began earlier becomes known in time."""
    signal: Annotated[str, Field(min_length=1, max_length=512)]
    """Description of the signal that sets the deadline. Signals that follow from another one are left out, for example
    the deletion of pods that follows from a suspension."""
    confidence: Confidence
    """How certain it is that pods will be killed."""
    cancelable: bool
    """True: if the signal goes away before the gang has frozen, the preemption is retracted and training continues."""
    nodes: list[ObjectName] = Field(default=[], max_length=1024, json_schema_extra=LIST_SET)
    """Names of the nodes that have the signals."""
    pods: list[ObjectName] = Field(default=[], max_length=4096, json_schema_extra=LIST_SET)
    """Names of the pods that will be disrupted. All pods of the gang get the notice."""
    observed_at: Annotated[Time, Field(json_schema_extra=IMMUTABLE)]
    """When the first signal was first observed. All timings count from it."""
    deadline: Time
    """When the first of the pods is expected to be killed: the earliest time of all signals. It may move to an earlier
    time. It moves to a later time only if its source says so and the gang has not frozen."""
    eviction_attempted_at: Time | None = None
    """When any replica first saw an attempt to evict one of the pods. The time for which evictions are held counts from
    it. Absent: there was no attempt."""
    requests: list[RequestReference] = Field(default=[], max_length=64, json_schema_extra=list_map("uid"))
    """Requests that started this preemption or joined it."""
    moves: Count = 0
    """How often joining signals have changed the spec. Of two versions the one with more moves wins, then the one with
    the earlier deadline."""
    mode: Annotated[Mode, Field(json_schema_extra=IMMUTABLE)]
    """Enforce: the gang gets a notice, saves and exits. Observe: the preemption is only recorded. Drill: the gang gets
    a notice, saves and continues to train."""
    exits: Annotated[bool, Field(json_schema_extra=IMMUTABLE)] = True
    """False: the gang saves and continues to train, because it has exited too often (exitBreaker of the policy), or
    because it reached its own time limit, which an exit would start again."""
    policy: Annotated[PolicyCopy, Field(json_schema_extra=IMMUTABLE)]
    """The policy that applies to this preemption."""


class Lags(StrEnum):
    """Why the receipt of a pod is missing."""

    NOT_CONNECTED = "NotConnected"
    NOT_ACKNOWLEDGED = "NotAcknowledged"


class Laggard(Model):
    """A pod whose receipt is missing."""

    pod: ObjectName
    """Name of the pod."""
    lags: Lags
    """NotConnected: the pod was not connected to any replica since the signal, so no notice was sent to it.
    NotAcknowledged: a notice was sent to the pod, and it has sent no receipt."""


class Acknowledgements(Model):
    """Receipts of the notice. A process sends one when it has received the notice. While thousands of receipts come
    in, this is some seconds old, as are the entries of the replicas."""

    expected: Count
    """Number of pods of the gang at the signal."""
    received: Count
    """Number of pods that have sent a receipt."""
    laggards: list[Laggard] = Field(default=[], max_length=50)
    """Pods that have sent no receipt to any replica, sorted; at most 50. They include pods that do not exist any
    more."""


#: The stages, in their usual order (``decisions.preemption_status`` says what each is). Later versions may
#: have more.
STAGES = (
    "noticeSent",
    "firstAck",
    "lastAck",
    "frozen",
    "agreed",
    "drained",
    "evacuated",
    "written",
    "durable",
    "committed",
    "exited",
    "unblocked",
    "podsBack",
    "started",
    "attaching",
    "joined",
    "restored",
    "compiled",
    "training",
)
#: A record has so many at most.
STAGES_LIMIT = 32


class StageTime(Model):
    """When a stage was reached. If the list has no entry for a stage, it was not reached or not reported."""

    stage: Annotated[str, Field(min_length=1, max_length=32, pattern="^[a-z][A-Za-z]*$")]
    """Name of the stage."""
    seconds: Seconds
    """Seconds from spec.observedAt until the last process reached the stage."""
    p50_seconds: Seconds | None = None
    """Median over the processes, in seconds after the reporting process received the notice. Absent: not reported."""
    max_seconds: Seconds | None = None
    """Maximum over the processes, in seconds after the reporting process received the notice. Absent: not reported."""
    time: Time | None = None
    """When the operator learned of it."""


class Replica(Model):
    """What one operator replica did. Only that replica writes the entry."""

    name: ObjectName
    """The replica's pod name."""
    told: Count = 0
    """Number of pods to which this replica has sent the notice."""
    acknowledged: Count = 0
    """Number of pods that have sent a receipt to this replica."""
    told_at: Time | None = None
    """When this replica sent the last of the notices. Absent: it sent none."""
    acknowledged_at: Time | None = None
    """When the last receipt arrived at this replica. Absent: none arrived."""
    told_pods: list[Text] = Field(default=[], max_length=4096)
    """Pods to which it has sent the notice, by Job and completion index, for example train-workers-0-[0-499,501]."""
    acknowledged_pods: list[Text] = Field(default=[], max_length=4096)
    """Pods that have sent a receipt to it, in the same form."""


class PreemptionStatus(Model):
    """Written by the replicas of the operator, at most once a second. The figures come from the primary process."""

    observed_generation: Count | None = None
    """The generation of the object from which the rest of the status was computed. Absent: it was written by an
    operator that did not have this field."""
    phase: Phase | None = None
    """The phase that was reached. It only moves forward. Evacuated, Committed, Promoted, Retracted, Expired and Failed
    are final, with two exceptions: a late report changes Expired or Retracted to Evacuated, Committed or Promoted; and
    Evacuated (safe in snapshot servers) becomes Committed when the next start has saved it to storage. Absent: the
    object was just created."""
    message: Text | None = None
    """Description of the phase. In a final phase, the reason for it."""
    ordinal: Count | None = None
    """Number of the sync point at which all processes agreed to save. Absent until they have agreed."""
    step: Count | None = None
    """The training step that is being saved, or was saved. Absent until the processes have agreed."""
    bytes: Count | None = None
    """Number of bytes written by all processes together."""
    processes: Count | None = None
    """Number of processes that took part in the save."""
    acknowledgements: Acknowledgements | None = None
    """Receipts of the notice, counted over all replicas."""
    timings: Annotated[list[StageTime], Field(max_length=STAGES_LIMIT, json_schema_extra=list_map("stage"))] | None = (
        None
    )
    """When each stage was reached."""
    choice: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    """How all processes decided to use the time that was left: SaveNow, FinishInFlight, CancelAndSave, Promote,
    Evacuate or Impossible. Absent until they have agreed, and with library versions that do not report it."""
    choice_reason: Text | None = None
    """Reason for the choice, with the figures. Absent if there is no choice."""
    steps_lost: Count | None = None
    """Number of completed training steps that are not in the checkpoint. Absent until known."""
    seconds_to_spare: float | None = None
    """Seconds between the commit and the deadline. Negative if the commit came after the deadline. Absent until
    known."""
    restored_step: Count | None = None
    """The training step from which the restarted job continued. Absent until it has restored."""
    restored_from_memory: bool | None = None
    """True: that step came from a snapshot in the memory of nodes. Absent: it came from the checkpoint's directory."""
    conditions: Conditions | None = None
    """Ended: the preemption is over; the reason says why in one word. Exits=False: the gang is told to save and to
    continue to train. Progressing=False: the gang has stalled within the preemption; the message names the process that
    holds up the others. Started=False: the gang has left, and its next start waits for infrastructure; the message says
    for what."""
    replicas: Annotated[list[Replica], Field(max_length=16, json_schema_extra=list_map("name"))] | None = None
    """One entry for each replica of the operator that took part."""


#: Fields, by their JSON names, that only a record has; and all fields that a record must have.
RECORD_ONLY = ("signal", "confidence", "cancelable", "observedAt", "policy")
_RECORD = (*RECORD_ONLY, "cause", "mode", "deadline", "jobSet.uid")
#: Fields that must not be added or removed later. The rule that a field is immutable does not cover this.
_STAYS = ("epoch", "restartAttempt", "newestPodAt", "cause", "mode", "exits")
_KIND_MESSAGE = (
    f"a Preemption is a record, which the operator makes, and spec.epoch is its number; to ask for a preemption, "
    f"create a PreemptionRequest ({GROUP}/{API_VERSION}) with the same jobSet, deadline or deadlineSeconds, cause and "
    "mode"
)
_STAYS_MESSAGE = "restartAttempt, newestPodAt, cause, mode and exits never come or go"


def _has(fields: tuple[str, ...], joined: str) -> str:
    return joined.join(f"has(self.{field})" for field in fields)


#: The schema of a Preemption's spec in addition to its fields. Requests of version 0.2, which are stored as Preemptions
#: without a number, may be changed, and none is made.
EITHER = rules(
    cel_from(
        f"has(self.epoch) ? {_has(_RECORD, ' && ')} && !has(self.deadlineSeconds) : oldSelf.hasValue() && "
        f"!({_has(RECORD_ONLY, ' || ')})",
        _KIND_MESSAGE,
    ),
    cel(" && ".join(f"has(self.{field}) == has(oldSelf.{field})" for field in _STAYS), _STAYS_MESSAGE),
)


class Preemption(Resource):
    """One disruption of one JobSet: which signal was seen, which pods got the notice, what was saved, and how long it
    took."""

    kind_name: ClassVar[str] = "Preemption"
    plural: ClassVar[str] = "preemptions"
    #: Observe and Failed: this replica notifies nobody of it and changes nothing in it; the newer one does.
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


_DEADLINE_MESSAGE = "a request has exactly one of deadline and deadlineSeconds"


class RequestedWorkload(OfWorkload):
    """A JobSet in the namespace of the request."""

    name: ObjectName
    """Name of the JobSet."""
    uid: Uid | None = None
    """UID of the JobSet. Absent: any JobSet of that name."""


class RequestSpec(Model):
    """Written by a user or a controller. It asks a JobSet to save and exit, or to rehearse that.

    To withdraw the request, delete it or set ``retracted``. This has no effect when the gang has frozen.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(cel("has(self.deadline) != has(self.deadlineSeconds)", _DEADLINE_MESSAGE))
    )

    workload: Annotated[RequestedWorkload, Field(json_schema_extra=IMMUTABLE)]
    """The JobSet that is asked."""
    cause: Annotated[LabelName, Field(json_schema_extra=IMMUTABLE)] = "Requested"
    """Cause in one word. The record and the notice contain it."""
    deadline: Time | None = None
    """When the pods are expected to be killed. The gang continues to train until it must save. The deadline may be
    edited until the gang has frozen. Absent: deadlineSeconds is used."""
    deadline_seconds: Seconds | None = None
    """Deadline as a number of seconds after the request was created. Absent: deadline is used."""
    mode: Annotated[Literal[Mode.ENFORCE, Mode.DRILL], Field(json_schema_extra=IMMUTABLE)] = Mode.ENFORCE
    """Enforce: save and exit, unless the mode of the policy is Observe or Drill. Drill: rehearse everything except the
    exit."""
    retracted: bool = False
    """True: the request is withdrawn."""

    @model_validator(mode="after")
    def _one_deadline(self) -> RequestSpec:
        if (self.deadline is None) == (self.deadline_seconds is None):
            raise ValueError(_DEADLINE_MESSAGE)
        return self


class RequestPhase(StrEnum):
    """State of a request. When its Preemption has ended, the final phase of that."""

    ADOPTED = "Adopted"
    SUPERSEDED = "Superseded"
    EVACUATED = "Evacuated"
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

    observed_generation: Count | None = None
    """The generation of the object from which the rest of the status was computed. Absent: it was written by an
    operator that did not have this field."""
    phase: RequestPhase | None = None
    """Adopted: a Preemption was made for the request, or the request joined one. Superseded: the request has no effect;
    the message says why. Otherwise the final phase of the Preemption. Absent: not decided yet."""
    message: Text | None = None
    """Description of the phase."""
    preemption: ObjectName | None = None
    """Name of the Preemption that was made for the request, or that the request joined. Absent: there is none."""


class PreemptionRequest(Resource):
    """A request of a user or a controller: a JobSet is to save and exit, or to rehearse that."""

    kind_name: ClassVar[str] = "PreemptionRequest"
    plural: ClassVar[str] = "preemptionrequests"
    #: A request that is not understood as a whole is not acted upon: what is passed over may be what limits it.
    passes_over = frozenset({"status"})
    #: Failed: nobody acts upon it, and nothing is written over the phase.
    in_place_of_unknown: ClassVar[Mapping[tuple[str, ...], str]] = {("status", "phase"): "Failed"}

    #: Preemption: a request that was made under version 0.2, which had one kind for requests and records.
    kind: Literal["PreemptionRequest", "Preemption"]
    spec: RequestSpec
    status: RequestStatus = RequestStatus()

    @staticmethod
    def is_one(spec: Any) -> bool:
        """True if the spec of a Preemption is a request's, of version 0.2: the operator's own have a number."""
        return "epoch" not in spec
