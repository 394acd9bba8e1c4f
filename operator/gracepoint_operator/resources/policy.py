"""CheckpointPolicy: how the JobSets that name it by label are checkpointed.

There are two kinds of fields. The operator uses ``PolicyInForce`` (``mode``, ``signals``, ...) for its decisions: an
edit takes effect at the next disruption. All other fields must be the same for all processes of a gang: the webhook
writes them into the JobSet when it is created, and they stay for its life.
"""

from __future__ import annotations

import re
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
from gracepoint_operator.resources.goodput import SaveIntervalMode
from gracepoint_operator.resources.policy_status import CheckpointPolicyStatus

_CHARACTERS = r"([A-Za-z0-9._~@%+=,:/-]|\{namespace\}|\{jobset\})*"
_BUCKET = "[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
_DIRECTORY = rf"^((file://)?/{_CHARACTERS}|(gs|s3)://{_BUCKET}(/{_CHARACTERS})?)$"
_DIRECTORY_MESSAGE = (
    "expected an absolute path, or a file://, gs:// or s3:// URI (with a bucket), of letters, digits and ._~@%+=,:/- "
    "in which only the placeholders {namespace} and {jobset} stand in braces"
)
_ENDPOINT = r"^(https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?/?)?$"
_ENDPOINT_MESSAGE = "expected http:// or https:// with a host and, if need be, a port"
_ENDPOINT_PLACE_MESSAGE = "objectStore.endpoint is only for a directory that is a gs:// or s3:// URI"
_REGION_PLACE_MESSAGE = "objectStore.region is only for a directory that is an s3:// URI"
_AUTO_MESSAGE = "Auto must stand alone: it finds out which of the others this is"
_CODES_MESSAGE = "savedExitCode and unsavedExitCode must differ: they tell the two outcomes apart"


class SignalKind(StrEnum):
    """Kinds of signals that announce a disruption."""

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
    """A cloud whose metadata server the pods can watch."""

    GCE = "GCE"
    AWS = "AWS"
    AZURE = "Azure"
    AUTO = "Auto"


class SaveWriter(StrEnum):
    """Who writes the saves of a training process."""

    THREAD = "Thread"
    WORKER = "Worker"
    KEEPER = "Keeper"


class Training(Model):
    """Which part of the JobSet trains."""

    replicated_jobs: list[LabelName] = Field(default=[], max_length=64, json_schema_extra=LIST_SET)
    """Names of the replicatedJobs whose pods form the gang. Empty: all of them. A JobSet that lacks one of these is
    refused."""
    container: Annotated[str, Field(max_length=63)] = ""
    """Name of the container that calls gracepoint.attach(). Empty: the first container of the pod template."""
    coordinator_port: Annotated[int, Field(ge=1, le=65535)] = 8476
    """Port of the JAX coordination service in process 0's pod."""


class ObjectStore(Model):
    """How the pods reach the object store of a gs:// or s3:// directory. Credentials are the pod's own: a service
    account with workload identity, IRSA or pod identity, or variables from a Secret."""

    endpoint: Annotated[
        str,
        Field(max_length=300, json_schema_extra=rules(cel(f"self.matches(r'{_ENDPOINT}')", _ENDPOINT_MESSAGE, "self"))),
    ] = ""
    """URL of the store, for one that is compatible with S3 or Google Cloud Storage. Empty: the provider's own. The
    training container gets it as AWS_ENDPOINT_URL_S3 or TENSORSTORE_GCS_HTTP_URL unless it sets that variable."""
    region: Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9-]*$")] = ""
    """Region of the bucket, for s3://. Empty: the pod's own. The training container gets it as AWS_REGION unless it
    sets that variable."""

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, value: str) -> str:
        if not re.fullmatch(_ENDPOINT, value):
            raise ValueError(f"{_ENDPOINT_MESSAGE}; found {value!r}")
        return value


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
    """Directory in which the checkpoints of a JobSet are stored: an absolute path or a file:// URI, which every pod of
    the gang must have mounted, or a gs:// or s3:// URI with a bucket and a prefix, which needs no volume. {namespace}
    and {jobset} are replaced by the namespace and the name of the JobSet. Without {jobset}, all JobSets of the policy
    share one directory, which is only correct if one runs at a time."""
    object_store: ObjectStore = ObjectStore()
    """How the pods reach the object store of a gs:// or s3:// directory, if it is not the provider's own."""
    every_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 100
    """Number of training steps between periodic saves. 0: the number of steps starts no save."""
    every_seconds: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Seconds between the last save and the next periodic one. 0: time starts no save. If everySteps is 0 as well, only
    emergency saves are made."""
    interval: SaveIntervalMode = SaveIntervalMode.FIXED
    """Fixed: everySteps and everySeconds say when periodic saves are due. Auto: the operator finds the seconds between
    two saves from what they cost and how often steps are lost (suggestion in status.goodput). Then everySteps does not
    count, and everySeconds, or 600 if it is 0, counts until there was a disruption."""
    keep_last: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Number of complete checkpoints to keep. Older ones are deleted when a newer one is complete."""
    keep_every_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Checkpoints whose step is a multiple of this number are kept forever. 0: none are kept for this reason."""
    keep_for_seconds: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Checkpoints younger than this number of seconds are kept. 0: none are kept for this reason."""
    writer: SaveWriter = SaveWriter.THREAD
    """Who writes saves: threads of the training process (Thread), a second process in the training container, which
    finishes a save if the training process is killed (Worker), or a process in a sidecar, which finishes it even if the
    whole training container is killed (Keeper)."""

    @field_validator("directory")
    @classmethod
    def _directory_is_absolute(cls, value: str) -> str:
        if not re.fullmatch(_DIRECTORY, value):
            raise ValueError(f"{_DIRECTORY_MESSAGE}; found {value!r}")
        return value

    @model_validator(mode="after")
    def _store_fits_the_directory(self) -> Checkpoint:
        if self.object_store.endpoint and not self.directory.startswith(("gs://", "s3://")):
            raise ValueError(f"{_ENDPOINT_PLACE_MESSAGE}; found {self.directory!r}")
        if self.object_store.region and not self.directory.startswith("s3://"):
            raise ValueError(f"{_REGION_PLACE_MESSAGE}; found {self.directory!r}")
        return self

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.objectStore.endpoint == '' || self.directory.matches(r'^(gs|s3)://')",
                _ENDPOINT_PLACE_MESSAGE,
                "self.directory",
            ),
            cel(
                "self.objectStore.region == '' || self.directory.startsWith('s3://')",
                _REGION_PLACE_MESSAGE,
                "self.directory",
            ),
        )
    )


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


class EvictionHoldPolicy(Model):
    """How long an eviction waits for the save that it causes."""

    enabled: bool = True
    """True: an eviction of one of the gang's pods through the Eviction API (kubectl drain, autoscalers, the
    descheduler) is answered with 429, try again later, until the save is committed. False: it is allowed at once."""
    bound_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Seconds after the first attempt at which evictions are allowed even if the save is not committed. This is the
    deadline of the save, so set it to more than a save takes. If it is more than deadline.headStartSeconds, training
    continues for the difference."""


class StallAction(StrEnum):
    """What follows if a gang makes no progress."""

    REPORT = "Report"
    RESTART = "Restart"


class StallPolicy(Model):
    """What counts as a stall: no progress in a step, a save, a restore or a meeting of the processes."""

    after_seconds: Annotated[float, Field(ge=0, le=604_800)] = DEFAULT_STALL_AFTER_S
    """Seconds without progress after which a process is reported as stalled, with the process that holds up the others.
    A compilation is progress as long as it computes. Longer than the longest evaluation without a sync point. 0:
    nothing is watched."""
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
    deadline: DeadlinePolicy = DeadlinePolicy()
    """How early an emergency save starts. An edit applies to JobSets created afterwards."""
    after_save: AfterSave = AfterSave()
    """How processes exit after a save. An edit applies to JobSets created afterwards."""
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
