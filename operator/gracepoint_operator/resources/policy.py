"""CheckpointPolicy: how the JobSets that name it by label are checkpointed.

Two kinds of fields: what the operator decides with (``mode``, ``signals``) counts from the moment it is
edited; what the processes of a gang must all have alike (everything else) is written into a JobSet when that
is created and stays for its life, so that no gang ever runs with two versions of its policy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from gracepoint.wire.messages import Mode
from gracepoint.wire.names import DEFAULT_HEAD_START_S, DEFAULT_SAVED_EXIT_CODE, DEFAULT_UNSAVED_EXIT_CODE
from gracepoint_operator.resources.base import (
    LIST_SET,
    Conditions,
    Count,
    LabelName,
    Model,
    ObjectName,
    OfWorkload,
    Resource,
    Seconds,
    Time,
    Uid,
    cel,
    list_map,
    rules,
)

_DIRECTORY = r"^(file://)?/([A-Za-z0-9._~@%+=,:/-]|\{namespace\}|\{jobset\})*$"
_DIRECTORY_MESSAGE = (
    "expected an absolute path or a file:// URI of letters, digits and ._~@%+=,:/- "
    "in which only the placeholders {namespace} and {jobset} stand in braces"
)
_AUTO_MESSAGE = "Auto must stand alone: it finds out which of the others this is"
_CODES_MESSAGE = "savedExitCode and unsavedExitCode must differ: they tell the two outcomes apart"


class SignalKind(StrEnum):
    """What can be seen of a disruption before it happens."""

    NODE_TAINT = "NodeTaint"
    NODE_LABEL = "NodeLabel"
    NODE_ANNOTATION = "NodeAnnotation"
    NODE_CONDITION = "NodeCondition"
    NODE_CLAIM = "NodeClaim"
    SUSPENSION = "Suspension"
    TIME_LIMIT = "TimeLimit"
    DISRUPTION_TARGET = "DisruptionTarget"
    POD_DELETION = "PodDeletion"
    EVICTION = "Eviction"
    REQUEST = "Request"


class CloudMetadata(StrEnum):
    """A cloud whose metadata server the pods can watch themselves."""

    GCE = "GCE"
    AWS = "AWS"
    AZURE = "Azure"
    AUTO = "Auto"


class Training(Model):
    """Which part of the JobSet trains."""

    replicated_jobs: list[LabelName] = Field(default=[], max_length=64, json_schema_extra=LIST_SET)
    """The replicatedJobs whose pods form the gang. Empty: all. A JobSet that lacks one of them is refused."""
    container: Annotated[str, Field(max_length=63)] = ""
    """The container that calls gracepoint.attach(). Empty: the first of the pod template."""
    coordinator_port: Annotated[int, Field(ge=1, le=65535)] = 8476
    """Port of the JAX coordination service in process 0's pod."""


class Checkpoint(Model):
    """Where checkpoints go and when they are made."""

    directory: Annotated[
        str,
        Field(
            min_length=1,
            max_length=1024,
            json_schema_extra=rules(cel(f"self.matches(r'{_DIRECTORY}')", _DIRECTORY_MESSAGE, "self")),
        ),
    ]
    """Directory below which a JobSet's steps are kept: an absolute path or file:// URI that every pod of the
    gang has mounted. {namespace} and {jobset} become the JobSet's namespace and name. Without {jobset}, all
    JobSets of the policy share one directory: only right when one runs at a time."""
    every_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 100
    """Training steps between periodic saves. 0: none for that reason."""
    every_seconds: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Seconds after the last save at which the next periodic one is due. 0: none for that reason. With everySteps 0,
    too, there is only the emergency save."""
    keep_last: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Complete checkpoints that are kept; older ones are deleted after a newer one is complete."""
    keep_every_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Also kept, for good: checkpoints of steps that are a multiple of it. 0: none for that reason."""
    keep_for_seconds: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Also kept: checkpoints that are younger than that. 0: none for that reason."""

    @field_validator("directory")
    @classmethod
    def _directory_is_absolute(cls, value: str) -> str:
        if not re.fullmatch(_DIRECTORY, value):
            raise ValueError(f"{_DIRECTORY_MESSAGE}; found {value!r}")
        return value


class DeadlinePolicy(Model):
    """How careful the plan for an emergency save is."""

    margin: Annotated[float, Field(ge=1, le=10)] = 1.25
    """Factor on the predicted duration of drain and save: the save starts that long before the deadline."""
    head_start_seconds: Annotated[float, Field(ge=0, le=86_400)] = DEFAULT_HEAD_START_S
    """The save starts no later than so many seconds before the deadline, however short it is predicted to be. Up to
    that much training time is given for safety; shorter notices are acted upon at once. 0: by the prediction alone."""


ExitCode = Annotated[int, Field(ge=3, le=125)]


class AfterSave(Model):
    """What the processes do when the emergency save is over: they exit, so that the JobSet moves elsewhere.

    A Job that fails by one of these codes restarts its JobSet without counting towards maxRestarts.
    """

    saved_exit_code: ExitCode = DEFAULT_SAVED_EXIT_CODE
    """Exit code after a save that is complete. 0-2 and 126-255 belong to shells, Python and runtimes."""
    unsaved_exit_code: ExitCode = DEFAULT_UNSAVED_EXIT_CODE
    """Exit code where nothing could be saved in time; the restart goes on from the newest checkpoint."""

    model_config = ConfigDict(
        json_schema_extra=rules(cel("self.savedExitCode != self.unsavedExitCode", _CODES_MESSAGE))
    )

    @model_validator(mode="after")
    def _codes_differ(self) -> AfterSave:
        if self.saved_exit_code == self.unsaved_exit_code:
            raise ValueError(f"{_CODES_MESSAGE}; found {self.saved_exit_code}")
        return self


class ExitBreaker(Model):
    """What ends a circle of saving, leaving and being disrupted again where the job comes back."""

    saved_exits: Annotated[int, Field(ge=0, le=1000)] = 5
    """A JobSet that has saved and left so often within withinSeconds saves at the next notice and trains on, until a
    SIGTERM says that it must go. 0: it leaves always."""
    within_seconds: Annotated[int, Field(ge=1, le=604_800)] = 1800
    """The time within which those exits are counted."""


class EvictionHoldPolicy(Model):
    """How long an eviction waits for the save that it brings about."""

    enabled: bool = True
    """An eviction through the Eviction API (kubectl drain, autoscalers, the descheduler) of one of the gang's pods is
    answered with 429, try again later, until the save is committed. False: it is let through at once."""
    bound_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Seconds after the first attempt at which evictions are let through in any case. It is the deadline of the save,
    so it should be more than a save takes; what it is more than deadline.headStartSeconds, training goes on first."""


class PolicyInForce(Model):
    """What the operator decides with. An edit counts for the next disruption: one that is under way goes by what was
    there when it began."""

    mode: Mode = Mode.ENFORCE
    """Enforce: a disrupted gang is told, saves and leaves. Observe: the Preemption is recorded and nobody is
    told. Drill: the gang is told, saves and trains on, until a SIGTERM says that it must go. An edit counts for the
    next disruption."""
    signals: list[SignalKind] | None = Field(default=None, max_length=16, json_schema_extra=LIST_SET)
    """Kinds of signals that count; the others are not looked at. Absent: all, also those of later versions. Empty:
    none. An edit counts for the next disruption."""
    eviction_hold: EvictionHoldPolicy = EvictionHoldPolicy()
    """How long evictions wait for the save. Only in mode Enforce, and not where signals leaves Eviction out. An edit
    counts for the next disruption."""
    exit_breaker: ExitBreaker = ExitBreaker()
    """When a JobSet that leaves again and again is to leave no more. An edit counts for the next disruption."""

    def counts(self, kind: SignalKind) -> bool:
        """True if signals of that kind are looked at."""
        return self.signals is None or kind in self.signals


class CheckpointPolicySpec(PolicyInForce):
    """Written by users. The operator's webhooks read it at JobSet CREATE, the operator at every signal."""

    training: Training = Training()
    """Which part of the JobSet trains. An edit counts for JobSets created later."""
    checkpoint: Checkpoint
    """Where and when checkpoints are made. An edit counts for JobSets created later."""
    cloud_metadata: list[CloudMetadata] = Field(
        default=[],
        max_length=4,
        json_schema_extra=LIST_SET | rules(cel("self.size() < 2 || !('Auto' in self)", _AUTO_MESSAGE)),
    )
    """Clouds whose metadata server each pod watches by itself, so that it hears of its machine's end while the
    operator is down. Auto, alone: the pod finds out. Empty: none. An edit counts for JobSets created later."""
    deadline: DeadlinePolicy = DeadlinePolicy()
    """How careful the emergency plan is. An edit counts for JobSets created later."""
    after_save: AfterSave = AfterSave()
    """How processes leave. An edit counts for JobSets created later."""

    @field_validator("cloud_metadata")
    @classmethod
    def _auto_stands_alone(cls, value: list[CloudMetadata]) -> list[CloudMetadata]:
        if len(value) > 1 and CloudMetadata.AUTO in value:
            raise ValueError(f"{_AUTO_MESSAGE}; found {[str(cloud) for cloud in value]}")
        return value

    @property
    def in_force(self) -> PolicyInForce:
        """The part that a disruption under way goes by, without the rest."""
        return PolicyInForce(**{name: getattr(self, name) for name in PolicyInForce.model_fields})


class PolicyWorkloads(Model):
    """The JobSets that name the policy."""

    count: Count = 0
    names: list[ObjectName] = Field(default=[], max_length=50)
    """At most 50 of them, sorted."""


class LastSave(Model):
    """The newest emergency save of any of the policy's JobSets."""

    preemption: ObjectName
    """Name of its Preemption."""
    workload: ObjectName
    step: Count
    time: Time
    """When it was committed."""


class WorkloadForecast(OfWorkload):
    """What an emergency would take in one JobSet, by its newest report."""

    name: ObjectName
    uid: Uid
    drain_seconds: Seconds
    """For the steps in flight."""
    save_seconds: Seconds
    """From drained to committed, as measured by its last save."""
    margin: Seconds
    """The factor that it plans with."""
    time: Time
    """When it was reported."""


class CheckpointPolicyStatus(Model):
    """Written by the operator."""

    observed_generation: Count | None = None
    """The generation that the rest of the status was computed from. Absent: the operator has not seen it."""
    workloads: PolicyWorkloads | None = None
    """The JobSets that name the policy by label."""
    conditions: Conditions | None = None
    """Ready: the policy can be used. FitsGrace: an emergency save is predicted to fit into the pods' grace
    period, by the newest figures of the JobSets; Unknown until one has reported. Injected: every JobSet was given
    at its creation what its pods need to be told. Recorded: the API server takes the Preemptions; False, with its
    words, where a quota or an admission policy refuses them: gangs are told all the same."""
    forecasts: Annotated[list[WorkloadForecast], Field(max_length=50, json_schema_extra=list_map("uid"))] | None = None
    """What FitsGrace is made of: at most 50, the newest."""
    last_save: LastSave | None = None
    """Absent: no emergency save was committed yet."""


class CheckpointPolicy(Resource):
    """How the JobSets of its namespace that name it by the label gracepoint.dev/policy are checkpointed."""

    kind_name: ClassVar[str] = "CheckpointPolicy"
    plural: ClassVar[str] = "checkpointpolicies"

    in_place_of_unknown: ClassVar[Mapping[tuple[str, ...], str]] = {("status", "conditions", "status"): "Unknown"}

    kind: Literal["CheckpointPolicy"]
    spec: CheckpointPolicySpec
    status: CheckpointPolicyStatus = CheckpointPolicyStatus()
