"""CheckpointPolicy: how the JobSets that name it by label are checkpointed.

There are two kinds of fields. The operator uses ``PolicyInForce`` (``mode``, ``signals``, ...) for its decisions: an
edit takes effect at the next disruption. All other fields must be the same for all processes of a gang: the webhook
writes them into the JobSet when it is created, and they stay for its life.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from gracepoint.wire.messages import Mode
from gracepoint.wire.names import (
    DEFAULT_HEAD_START_S,
    DEFAULT_SAVED_EXIT_CODE,
    DEFAULT_STALL_AFTER_S,
    DEFAULT_UNSAVED_EXIT_CODE,
)
from gracepoint_operator.resources.base import LIST_SET, LabelName, Model, Resource, cel, rules
from gracepoint_operator.resources.policy_checkpoint import Checkpoint, CompilationCache
from gracepoint_operator.resources.policy_status import CheckpointPolicyStatus

_AUTO_MESSAGE = "Auto must stand alone: it finds out which of the others this is"
_CODES_MESSAGE = "savedExitCode and unsavedExitCode must differ: they tell the two outcomes apart"


class SignalKind(StrEnum):
    """Kinds of signals that announce a disruption."""

    NODE_TAINT = "NodeTaint"
    NODE_LABEL = "NodeLabel"
    NODE_ANNOTATION = "NodeAnnotation"
    NODE_CONDITION = "NodeCondition"
    NODE_CLAIM = "NodeClaim"
    DEVICE_TAINT = "DeviceTaint"
    SUSPENSION = "Suspension"
    TIME_LIMIT = "TimeLimit"
    DISRUPTION_TARGET = "DisruptionTarget"
    POD_DELETION = "PodDeletion"
    EVICTION = "Eviction"
    REQUEST = "Request"


class CloudMetadata(StrEnum):
    """A cloud whose metadata server the pods can watch."""

    GCE = "GCE"
    AWS = "AWS"
    AZURE = "Azure"
    AUTO = "Auto"


class Training(Model):
    """Which part of the JobSet trains."""

    replicated_jobs: list[LabelName] = Field(default=[], max_length=64, json_schema_extra=LIST_SET)
    """Names of the replicatedJobs that train. Empty: all of them, except those with the label gracepoint.dev/role:
    helper on their pod templates and, if some ask for accelerators, those that ask for none. A JobSet that lacks one of
    these is refused."""
    container: Annotated[str, Field(max_length=63)] = ""
    """Name of the container that calls gracepoint.attach(). Empty: the first container of the pod template."""
    coordinator_port: Annotated[int, Field(ge=1, le=65535)] = 8476
    """Port of the JAX coordination service in process 0's pod."""
    min_processes: Annotated[int, Field(ge=0, le=100_000)] = 0
    """The least number of processes with which a JobSet or Job may start again after its size was changed by a person,
    Kueue or an autoscaler. Gracepoint changes no sizes. 0: the number of processes is fixed at the creation."""


class DeadlinePolicy(Model):
    """How early an emergency save starts."""

    margin: Annotated[float, Field(ge=1, le=10)] = 1.25
    """Factor by which the predicted duration of drain and save is multiplied. The save starts that long before the
    deadline."""
    head_start_seconds: Annotated[float, Field(ge=0, le=86_400)] = DEFAULT_HEAD_START_S
    """The save starts at least this number of seconds before the deadline, even if it is predicted to be shorter. If
    less time is left when the notice comes, the save starts at once. 0: only the prediction counts."""


ExitCode = Annotated[int, Field(ge=3, le=125)]


class AfterSave(Model):
    """How the processes exit after the emergency save, so that the JobSet starts again on other nodes.

    If a Job fails with one of these codes, its JobSet restarts and the restart does not count towards maxRestarts.
    """

    saved_exit_code: ExitCode = DEFAULT_SAVED_EXIT_CODE
    """Exit code after a complete save. Shells, Python and container runtimes use 0-2 and 126-255."""
    unsaved_exit_code: ExitCode = DEFAULT_UNSAVED_EXIT_CODE
    """Exit code if nothing could be saved in time. The restarted job continues from the newest checkpoint."""

    model_config = ConfigDict(
        json_schema_extra=rules(cel("self.savedExitCode != self.unsavedExitCode", _CODES_MESSAGE))
    )

    @model_validator(mode="after")
    def _codes_differ(self) -> AfterSave:
        if self.saved_exit_code == self.unsaved_exit_code:
            raise ValueError(f"{_CODES_MESSAGE}; found {self.saved_exit_code}")
        return self


class ExitBreaker(Model):
    """Stops a loop in which a job saves, exits, starts again and is disrupted again."""

    saved_exits: Annotated[int, Field(ge=0, le=1000)] = 5
    """Number of times that a JobSet may save and exit within withinSeconds. After that it saves at the next notice and
    continues to train until it gets a SIGTERM. 0: there is no limit."""
    within_seconds: Annotated[int, Field(ge=1, le=604_800)] = 1800
    """Length in seconds of the period in which exits are counted."""


#: Evictions are held for at most so many seconds, whatever a policy says, if the operator is told no other number.
DEFAULT_LONGEST_HOLD_S = 600.0


class EvictionHoldPolicy(Model):
    """How long an eviction waits for the save that it causes."""

    enabled: bool = True
    """True: an eviction of one of the gang's pods through the Eviction API (kubectl drain, autoscalers, the
    descheduler) is answered with 429, try again later, until the save is committed. False: it is allowed at once."""
    bound_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Seconds after the first attempt at which evictions are allowed even if the save is not committed. This is the
    deadline of the save, so set it to more than a save takes. If it is more than deadline.headStartSeconds, training
    continues for the difference. The operator limits it to evictions.longestHoldSeconds of the chart (600), and to the
    limits of ClusterCheckpointPolicies."""


class VoluntaryDisruption(Model):
    """When autoscalers may move the pods of a gang for reasons of their own: consolidation, drift, scale-down."""

    checkpoint_younger_than_seconds: Annotated[int, Field(ge=0, le=604_800)] = 0
    """While the newest checkpoint of a gang is older than this number of seconds, its pods have the annotations
    karpenter.sh/do-not-disrupt and cluster-autoscaler.kubernetes.io/safe-to-evict, so that their nodes are not removed.
    Right after a restore, a checkpoint counts as new. It should be more than the time between two periodic saves. A
    gang without an account of its time in status.goodput is not protected: before its first process reports, with a
    library that reports no times, and beyond the 50 workloads that fit there. The operator needs the right to annotate
    pods (the chart's protection.enabled). 0: the annotations are not touched."""


class StallAction(StrEnum):
    """What follows if a gang makes no progress."""

    REPORT = "Report"
    RESTART = "Restart"


class StallPolicy(Model):
    """What counts as a stall: no progress in a step, a save, a restore or a meeting of the processes."""

    after_seconds: Annotated[float, Field(ge=0, le=604_800)] = DEFAULT_STALL_AFTER_S
    """Seconds without progress after which a process is reported as stalled, with the process that holds up the others.
    A compilation is progress as long as it computes. Choose more than the longest evaluation without a sync point.
    0: nothing is watched."""
    action: StallAction = StallAction.REPORT
    """Report: the stall is a log line, an Event on the JobSet, the condition Progressing and a metric. Restart: the
    processes exit with afterSave.unsavedExitCode, too, so that the JobSet starts again at the newest checkpoint."""


class PolicyInForce(Model):
    """The part of the policy that the operator uses for its decisions. An edit takes effect at the next disruption. A
    disruption that is under way uses the policy as it was when it began."""

    mode: Mode = Mode.ENFORCE
    """Enforce: a disrupted gang gets a notice, saves and exits. Observe: the Preemption is recorded and pods get no
    notice. Drill: the gang gets a notice, saves and continues to train until it gets a SIGTERM. An edit takes effect
    at the next disruption."""
    signals: list[SignalKind] | None = Field(default=None, max_length=16, json_schema_extra=LIST_SET)
    """Kinds of signals that are acted upon. Absent: all kinds, including those of later versions. Empty: none. An edit
    takes effect at the next disruption."""
    eviction_hold: EvictionHoldPolicy = EvictionHoldPolicy()
    """How long evictions wait for the save. Used only in mode Enforce, and only if signals includes Eviction. An edit
    takes effect at the next disruption."""
    exit_breaker: ExitBreaker = ExitBreaker()
    """When a JobSet that exits again and again stops exiting. An edit takes effect at the next disruption."""

    def counts(self, kind: SignalKind) -> bool:
        """Returns True if signals of that kind are acted upon."""
        return self.signals is None or kind in self.signals


class CheckpointPolicySpec(PolicyInForce):
    """Written by users. The webhooks read it when a JobSet is created, the operator at every signal."""

    training: Training = Training()
    """Which part of the JobSet trains. An edit applies to JobSets created afterwards."""
    checkpoint: Checkpoint
    """Where and when checkpoints are made. An edit applies to JobSets created afterwards."""
    cloud_metadata: list[CloudMetadata] = Field(
        default=[],
        max_length=4,
        json_schema_extra=LIST_SET | rules(cel("self.size() < 2 || !('Auto' in self)", _AUTO_MESSAGE)),
    )
    """Clouds whose metadata server each pod watches, so that it learns of the end of its machine even while the
    operator is down. Auto, alone: the pod detects the cloud. Empty: none. An edit applies to JobSets created
    afterwards."""
    compilation_cache: CompilationCache = CompilationCache()
    """Whether compiled programs are kept. An edit applies to JobSets created afterwards."""
    deadline: DeadlinePolicy = DeadlinePolicy()
    """How early an emergency save starts. An edit applies to JobSets created afterwards."""
    after_save: AfterSave = AfterSave()
    """How processes exit after a save. An edit applies to JobSets created afterwards."""
    voluntary_disruption: VoluntaryDisruption = VoluntaryDisruption()
    """When autoscalers may move the pods for reasons of their own. An edit takes effect at once."""
    stalls: StallPolicy = StallPolicy()
    """What happens if the processes make no progress. An edit applies to JobSets created afterwards."""

    @field_validator("cloud_metadata")
    @classmethod
    def _auto_stands_alone(cls, value: list[CloudMetadata]) -> list[CloudMetadata]:
        if len(value) > 1 and CloudMetadata.AUTO in value:
            raise ValueError(f"{_AUTO_MESSAGE}; found {[str(cloud) for cloud in value]}")
        return value

    @property
    def in_force(self) -> PolicyInForce:
        """The part that the operator uses for its decisions, without the other fields."""
        return PolicyInForce(**{name: getattr(self, name) for name in PolicyInForce.model_fields})


class CheckpointPolicy(Resource):
    """How JobSets are checkpointed. A JobSet of the same namespace uses the policy that its label gracepoint.dev/policy
    names."""

    kind_name: ClassVar[str] = "CheckpointPolicy"
    plural: ClassVar[str] = "checkpointpolicies"

    in_place_of_unknown: ClassVar[Mapping[tuple[str, ...], str]] = {("status", "conditions", "status"): "Unknown"}

    kind: Literal["CheckpointPolicy"]
    spec: CheckpointPolicySpec
    status: CheckpointPolicyStatus = CheckpointPolicyStatus()

    def within(self, longest_hold_s: float, *, protection: bool = True) -> CheckpointPolicy:
        """Returns the policy as it applies under limits.

        Args:
            longest_hold_s: Evictions are held for at most so many seconds. 0: they are not held.
            protection: Whether pods may be protected from autoscalers.
        """
        hold, voluntary = self.spec.eviction_hold, self.spec.voluntary_disruption
        changed: dict[str, Model] = {}
        if not longest_hold_s and hold.enabled:
            changed["eviction_hold"] = hold.model_copy(update={"enabled": False})
        elif longest_hold_s and hold.bound_seconds > longest_hold_s:
            changed["eviction_hold"] = hold.model_copy(update={"bound_seconds": int(longest_hold_s)})
        if not protection and voluntary.checkpoint_younger_than_seconds:
            changed["voluntary_disruption"] = VoluntaryDisruption()
        if not changed:
            return self
        return self.model_copy(update={"spec": self.spec.model_copy(update=changed)})

    def newly_saved(self, before: CheckpointPolicy | None) -> set[str]:
        """UIDs of the workloads with another checkpoint or process than ``before``, if anything depends on them."""
        if not self.spec.voluntary_disruption.checkpoint_younger_than_seconds:
            return set()
        known = set() if before is None else _newest_checkpoints(before.status)
        return {str(uid) for uid, *_ in _newest_checkpoints(self.status) - known}


def _newest_checkpoints(status: CheckpointPolicyStatus) -> set[tuple[object, ...]]:
    lives = ((entry.uid, life) for entry in status.goodput or () for life in entry.lives[-1:])
    return {(uid, life.session, life.restored, life.saved, life.gone) for uid, life in lives}
