"""CheckpointPolicy: how the JobSets that name it by label are checkpointed.

There are two kinds of fields. The operator uses ``PolicyInForce`` (``mode``, ``signals``, ...) for its decisions: an
edit takes effect at the next disruption. All other fields must be the same for all processes of a gang: the webhook
writes them into the JobSet when it is created, and they stay for its life.

ClusterCheckpointPolicy: what administrators say for the namespaces of a cluster. It has a default policy, for JobSets
and Jobs that name none, and for those that name this one where their namespace has no CheckpointPolicy of that name;
and limits, which hold for every policy in these namespaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from gracepoint.wire.messages import Mode
from gracepoint.wire.names import (
    DEFAULT_HEAD_START_S,
    DEFAULT_NOT_JOINED_EXIT_CODE,
    DEFAULT_SAVED_EXIT_CODE,
    DEFAULT_SNAPSHOT_COPIES,
    DEFAULT_STALL_AFTER_S,
    DEFAULT_TOLERATE_FAILURES_S,
    DEFAULT_UNSAVED_EXIT_CODE,
)
from gracepoint_operator.resources.base import LIST_SET, LabelName, LabelSelector, Model, Resource, cel, rules
from gracepoint_operator.resources.policy_status import CheckpointPolicyStatus, SaveIntervalMode

_CHARACTERS = r"([A-Za-z0-9._~@%+=,:/-]|\{namespace\}|\{jobset\})*"
_BUCKET = "[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
_DIRECTORY = rf"^((file://)?/{_CHARACTERS}|(gs|s3)://{_BUCKET}(/{_CHARACTERS})?)$"
_DIRECTORY_MESSAGE = (
    "expected an absolute path, or a file://, gs:// or s3:// URI with a bucket; allowed are letters, digits, "
    "._~@%+=,:/- and the placeholders {namespace} and {jobset}"
)
_ENDPOINT = r"^(https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?/?)?$"
_ENDPOINT_MESSAGE = "expected http:// or https:// with a host and, if need be, a port"
_ENDPOINT_PLACE_MESSAGE = "objectStore.endpoint is only for a directory that is a gs:// or s3:// URI"
_REGION_PLACE_MESSAGE = "objectStore.region is only for a directory that is an s3:// URI"
_ALGORITHM_PLACE_MESSAGE = "serverSideEncryption.algorithm is only for a directory that is an s3:// URI"
_KEY_PLACE_MESSAGE = (
    "serverSideEncryption.keyId is only for an s3:// URI with an aws:kms algorithm, and for a gs:// URI"
)
_MEMORY_MESSAGE = "one of memory.everySteps and memory.everySeconds must be above 0, and the other one 0"
_BUCKET_KEY_MESSAGE = "bucketKey is only for the algorithms aws:kms and aws:kms:dsse"


class SaveWriter(StrEnum):
    """Who writes the saves of a training process."""

    THREAD = "Thread"
    WORKER = "Worker"
    KEEPER = "Keeper"


class EncryptionAlgorithm(StrEnum):
    """What a store encrypts new objects with."""

    BUCKET_DEFAULT = "BucketDefault"
    AES256 = "AES256"
    KMS = "aws:kms"
    KMS_DUAL_LAYER = "aws:kms:dsse"

    @property
    def has_key(self) -> bool:
        return self in (EncryptionAlgorithm.KMS, EncryptionAlgorithm.KMS_DUAL_LAYER)


class ServerSideEncryption(Model):
    """What the store encrypts new objects with, if the bucket's own setting is not enough: some buckets have policies
    that refuse objects without an encryption header."""

    algorithm: EncryptionAlgorithm = EncryptionAlgorithm.BUCKET_DEFAULT
    """BucketDefault: the bucket's own setting. For s3:// also AES256 (SSE-S3), aws:kms (SSE-KMS) and aws:kms:dsse (two
    layers)."""
    key_id: Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z0-9:/_.-]*$")] = ""
    """For aws:kms, the ARN or id of the key; for gs://, the name of the key of Cloud KMS. Empty: the account's or the
    bucket's own."""
    bucket_key: bool = False
    """True: aws:kms uses an S3 bucket key, which needs fewer requests to KMS."""

    @model_validator(mode="after")
    def _bucket_key_fits(self) -> ServerSideEncryption:
        if self.bucket_key and not self.algorithm.has_key:
            raise ValueError(f"{_BUCKET_KEY_MESSAGE}; found {self.algorithm}")
        return self

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel("!self.bucketKey || self.algorithm.startsWith('aws:kms')", _BUCKET_KEY_MESSAGE, "self.algorithm")
        )
    )


class ObjectStore(Model):
    """How the pods reach the object store of a gs:// or s3:// directory. The training container gets it as
    AWS_ENDPOINT_URL_S3 or TENSORSTORE_GCS_HTTP_URL, AWS_REGION, AWS_SERVER_SIDE_ENCRYPTION, AWS_SSE_KMS_KEY_ID or
    GOOGLE_STORAGE_KMS_KEY_NAME, and AWS_SSE_BUCKET_KEY_ENABLED, unless it sets these itself. Credentials are the pod's
    own: a service account with workload identity, IRSA or pod identity, or variables from a Secret."""

    endpoint: Annotated[
        str,
        Field(max_length=300, json_schema_extra=rules(cel(f"self.matches(r'{_ENDPOINT}')", _ENDPOINT_MESSAGE, "self"))),
    ] = ""
    """URL of a store that is compatible with S3 or Google Cloud Storage. Empty: the provider's own."""
    region: Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9-]*$")] = ""
    """Region of the bucket, for s3://. Empty: the pod's own."""

    server_side_encryption: ServerSideEncryption = ServerSideEncryption()
    """What the store encrypts new objects with, if the bucket's policy demands that each object says it."""

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_a_url(cls, value: str) -> str:
        if not re.fullmatch(_ENDPOINT, value):
            raise ValueError(f"{_ENDPOINT_MESSAGE}; found {value!r}")
        return value


class MemoryPolicy(Model):
    """Snapshots in the memory of nodes, beside the saves in the directory: an end without notice loses no more than one
    interval. They need the chart's snapshots.enabled."""

    every_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Training steps between two snapshots. 0: everySeconds counts."""
    every_seconds: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Seconds between two snapshots. 0: everySteps counts."""
    copies: Annotated[int, Field(ge=1, le=2)] = DEFAULT_SNAPSHOT_COPIES
    """In how many nodes' memory each part of a snapshot is. 2: its own node's and another one's, so that the end of a
    node loses none. 1: the end of a node loses all."""

    model_config = ConfigDict(
        json_schema_extra=rules(cel("(self.everySteps > 0) != (self.everySeconds > 0)", _MEMORY_MESSAGE))
    )

    @model_validator(mode="after")
    def _has_one_interval(self) -> MemoryPolicy:
        if (self.every_steps > 0) == (self.every_seconds > 0):
            raise ValueError(f"{_MEMORY_MESSAGE}; found {self.every_steps} and {self.every_seconds}")
        return self


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
    """Where the checkpoints of a JobSet are: an absolute path or a file:// URI, which every pod must have mounted, or a
    gs:// or s3:// URI with a bucket and a prefix. {namespace} and {jobset} stand for the JobSet's. Without {jobset},
    all JobSets of the policy share one directory, so only one may run at a time."""
    object_store: ObjectStore = ObjectStore()
    """How the pods reach the object store of a gs:// or s3:// directory, if it is not the provider's own."""
    every_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 100
    """Training steps between periodic saves. 0: steps start no save."""
    every_seconds: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Seconds between two saves. 0: time starts no save. If everySteps is 0 as well, only emergency saves are made."""
    interval: SaveIntervalMode = SaveIntervalMode.FIXED
    """Fixed: everySteps and everySeconds say when periodic saves are due. Auto: the operator finds the seconds from
    what saves cost and how often steps are lost (suggestion in status.goodput). Then everySteps does not count, and
    everySeconds, or 600 if it is 0, counts until there is a suggestion."""
    keep_last: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Complete checkpoints to keep. Older ones are deleted when a newer one is complete."""
    keep_every_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Checkpoints whose step is a multiple of this number are kept forever. 0: none."""
    keep_for_seconds: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Checkpoints younger than this number of seconds are kept. 0: none."""
    tolerate_failures_seconds: Annotated[int, Field(ge=0, le=10_000_000)] = int(DEFAULT_TOLERATE_FAILURES_S)
    """Seconds for which periodic saves may fail before the training processes end with an error. Until then training
    continues, and the condition Saving is False. A save is tried at least twice. Emergency saves are tried in any case.
    0: the first failure ends training."""
    writer: SaveWriter = SaveWriter.THREAD
    """Who writes saves. Thread: threads of the training process. Worker: a second process in the training container,
    which finishes a save if the training process is killed. Keeper: a process in a sidecar, which finishes it even if
    the whole training container is killed."""
    memory: MemoryPolicy | None = None
    """Snapshots in the memory of nodes. Absent: there are none."""

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
        encryption, is_s3 = self.object_store.server_side_encryption, self.directory.startswith("s3://")
        if encryption.algorithm is not EncryptionAlgorithm.BUCKET_DEFAULT and not is_s3:
            raise ValueError(f"{_ALGORITHM_PLACE_MESSAGE}; found {self.directory!r}")
        takes_key = encryption.algorithm.has_key if is_s3 else self.directory.startswith("gs://")
        if encryption.key_id and not takes_key:
            raise ValueError(f"{_KEY_PLACE_MESSAGE}; found {self.directory!r} and {encryption.algorithm}")
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
            cel(
                "self.objectStore.serverSideEncryption.algorithm == 'BucketDefault' "
                "|| self.directory.startsWith('s3://')",
                _ALGORITHM_PLACE_MESSAGE,
                "self.directory",
            ),
            cel(
                "self.objectStore.serverSideEncryption.keyId == '' || self.directory.startsWith('gs://') "
                "|| (self.directory.startsWith('s3://') "
                "&& self.objectStore.serverSideEncryption.algorithm.startsWith('aws:kms'))",
                _KEY_PLACE_MESSAGE,
                "self.directory",
            ),
        )
    )


class CompilationCache(Model):
    """Compiled programs, kept so that the next start of a job does not compile them again."""

    enabled: bool = False
    """True: JAX keeps compiled programs in its persistent cache for the next start with the same JAX and devices. JAX
    runs what it reads: whoever can write to the directory can run code in the pods. If the container sets
    JAX_COMPILATION_CACHE_DIR in its `env`, its value counts."""
    directory: Annotated[
        str,
        Field(
            max_length=1024,
            json_schema_extra=rules(
                cel(f"self == '' || self.matches(r'{_DIRECTORY}')", _DIRECTORY_MESSAGE, "self"),
            ),
        ),
    ] = ""
    """Directory of the compiled programs, in the form of checkpoint.directory. Empty: a hidden folder in
    checkpoint.directory; if that is a bucket, no programs are kept. For gs:// the image needs the Python package
    etils[epath-gcs], for s3:// etils[epath-s3]."""
    max_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] = 10 << 30
    """Has no effect: nothing is deleted. For a bound, set JAX_COMPILATION_CACHE_MAX_SIZE in the container."""
    unused_days: Annotated[int, Field(ge=1, le=3650)] = 30
    """Has no effect: nothing is deleted."""

    @field_validator("directory")
    @classmethod
    def _directory_is_absolute(cls, value: str) -> str:
        if value and not re.fullmatch(_DIRECTORY, value):
            raise ValueError(f"{_DIRECTORY_MESSAGE}; found {value!r}")
        return value


_AUTO_MESSAGE = "Auto must stand alone: it finds out which of the others this is"
_CODES_MESSAGE = "savedExitCode and unsavedExitCode must differ: they tell the two outcomes apart"
_NOT_JOINED_MESSAGE = "startup.notJoinedExitCode must differ from both exit codes of afterSave"


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
    """Names of the replicatedJobs that train; a JobSet that lacks one is refused. Empty: all, except those with the
    label gracepoint.dev/role: helper on their pod templates and, if some ask for accelerators, those that ask for
    none."""
    container: Annotated[str, Field(max_length=63)] = ""
    """Name of the container that calls gracepoint.attach(). Empty: the first container of the pod template."""
    coordinator_port: Annotated[int, Field(ge=1, le=65535)] = 8476
    """Port of the JAX coordination service in process 0's pod."""
    min_processes: Annotated[int, Field(ge=0, le=100_000)] = 0
    """The least number of processes with which a JobSet or Job may start again after a person, Kueue or an autoscaler
    has changed its size. 0: the number is fixed at the creation."""


class DeadlinePolicy(Model):
    """How early an emergency save starts."""

    margin: Annotated[float, Field(ge=1, le=10)] = 1.25
    """The save starts this many times its predicted duration before the deadline."""
    head_start_seconds: Annotated[float, Field(ge=0, le=86_400)] = DEFAULT_HEAD_START_S
    """The save starts at least this number of seconds before the deadline; at once if less is left. 0: only the
    prediction counts."""


ExitCode = Annotated[int, Field(ge=3, le=125)]


class AfterSave(Model):
    """How the processes exit after the emergency save, so that the JobSet starts again on other nodes.

    If a Job fails with one of these codes, its JobSet restarts and the restart does not count towards maxRestarts.
    """

    saved_exit_code: ExitCode = DEFAULT_SAVED_EXIT_CODE
    """Exit code after a complete save. Shells, Python and runtimes use 0-2 and 126-255."""
    unsaved_exit_code: ExitCode = DEFAULT_UNSAVED_EXIT_CODE
    """Exit code if nothing could be saved in time. The restarted job continues from the newest checkpoint."""

    model_config = ConfigDict(
        json_schema_extra=rules(cel("self.savedExitCode != self.unsavedExitCode", _CODES_MESSAGE))
    )

    @property
    def exit_codes(self) -> list[int]:
        """Both codes in ascending order, as Kubernetes wants them."""
        return sorted((self.saved_exit_code, self.unsaved_exit_code))

    @model_validator(mode="after")
    def _codes_differ(self) -> AfterSave:
        if self.saved_exit_code == self.unsaved_exit_code:
            raise ValueError(f"{_CODES_MESSAGE}; found {self.saved_exit_code}")
        return self


class Startup(Model):
    """How a process starts that finds its peers, its devices or its storage away."""

    join_timeout_seconds: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Seconds that a process waits for other processes and for storage. Then it ends with notJoinedExitCode and gives
    its node back for a while. 0: no limit."""
    not_joined_exit_code: ExitCode | None = None
    """Exit code of a process that did not get into the job, through no fault of the program, or that lost another
    process. Its Job replaces the pod after a pause, uncounted; the others wait for it. Absent: 79, or the next number
    that afterSave does not use."""


class Sidecars(Model):
    """Containers that run beside the training without being native sidecars: they keep their pods running after the
    training has left, so that the gang does not come back elsewhere."""

    end_with_training: bool = False
    """True: the operator deletes pods that other containers keep running: after an exit code of afterSave once all
    processes have left, after startup.notJoinedExitCode at once. It needs the chart's podDeletion.enabled."""


class ExitBreaker(Model):
    """Stops a loop in which a job saves, exits, starts again and is disrupted again."""

    saved_exits: Annotated[int, Field(ge=0, le=1000)] = 5
    """Number of times that a JobSet may save and exit within withinSeconds. After that it saves at a notice and
    continues to train until it gets a SIGTERM. 0: no limit."""
    within_seconds: Annotated[int, Field(ge=1, le=604_800)] = 1800
    """Seconds in which exits are counted."""


#: Evictions are held for at most so many seconds, whatever a policy says, if the operator is given no other number.
DEFAULT_LONGEST_HOLD_S = 600.0


class EvictionHoldPolicy(Model):
    """How long an eviction waits for the save that it causes."""

    enabled: bool = True
    """True: an eviction of one of the gang's pods (kubectl drain, autoscalers, the descheduler) is answered with 429,
    try again later, until the save is committed. False: it is allowed at once."""
    bound_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Seconds from the first attempt until evictions are allowed in any case. It is the save's deadline: choose more
    than a save takes. If it is more than deadline.headStartSeconds, training continues for the difference. Limited by
    the chart's evictions.longestHoldSeconds (600) and by ClusterCheckpointPolicies."""


class VoluntaryDisruption(Model):
    """When autoscalers may move the pods of a gang for reasons of their own: consolidation, drift, scale-down."""

    checkpoint_younger_than_seconds: Annotated[int, Field(ge=0, le=604_800)] = 0
    """While the newest checkpoint of a gang is older than this number of seconds, its pods have the annotations
    karpenter.sh/do-not-disrupt and cluster-autoscaler.kubernetes.io/safe-to-evict, so that their nodes are not removed.
    Right after a restore, a checkpoint counts as new. Choose more than the time between two periodic saves. A gang
    that status.goodput lacks (it has 50 workloads at most) is not protected. It needs the chart's protection.enabled.
    0: the annotations are not touched."""


class LostNodePolicy(Model):
    """What happens to pods whose node is lost while they are being deleted."""

    delete_pods: bool = False
    """True: a pod of the gang that stays Terminating is deleted by force once its node is gone, or once its node is not
    ready and either has the taint node.kubernetes.io/out-of-service or has lost its NodeClaim. That a node is not ready
    is not enough, because processes may still run there. It needs the chart's podDeletion.enabled. False: the pod is
    only named."""


class StallAction(StrEnum):
    """What follows if a gang makes no progress."""

    REPORT = "Report"
    RESTART = "Restart"


class StallPolicy(Model):
    """What counts as a stall: no progress in a step, a save, a restore or a meeting of the processes."""

    after_seconds: Annotated[float, Field(ge=0, le=604_800)] = DEFAULT_STALL_AFTER_S
    """Seconds without progress after which a stall is reported, with the process that holds up the others. A
    compilation is progress as long as it computes. Choose more than the longest evaluation without a sync point. 0:
    nothing is watched."""
    action: StallAction = StallAction.REPORT
    """Report: a log line, an Event, the condition Progressing and a metric. Restart: the processes also exit with code
    1: the JobSet starts again at the newest checkpoint, and the restart counts."""


class PolicyInForce(Model):
    """The part of the policy that the operator uses for its decisions. An edit takes effect at the next disruption. A
    disruption that is under way uses the policy as it was when it began."""

    mode: Mode = Mode.ENFORCE
    """Enforce: a disrupted gang gets a notice, saves and exits. Observe: the Preemption is recorded and pods get no
    notice. Drill: the gang gets a notice, saves and continues to train until it gets a SIGTERM. An edit takes effect
    at the next disruption."""
    signals: list[SignalKind] | None = Field(default=None, max_length=16, json_schema_extra=LIST_SET)
    """Kinds of signals that count. Absent: all, including those of later versions. Empty: none. An edit takes effect at
    the next disruption."""
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
    operator is down. Auto, alone: the pod detects the cloud. An edit applies to JobSets created afterwards."""
    compilation_cache: CompilationCache = CompilationCache()
    """Whether compiled programs are kept. An edit applies to JobSets created afterwards."""
    deadline: DeadlinePolicy = DeadlinePolicy()
    """How early an emergency save starts. An edit applies to JobSets created afterwards."""
    startup: Startup = Startup()
    """How long processes wait for one another at the start. An edit applies to JobSets created afterwards."""
    after_save: AfterSave = AfterSave()
    """How processes exit after a save. An edit applies to JobSets created afterwards."""
    sidecars: Sidecars = Sidecars()
    """What becomes of containers that outlive the training. An edit takes effect at once."""
    voluntary_disruption: VoluntaryDisruption = VoluntaryDisruption()
    """When autoscalers may move the pods for reasons of their own. An edit takes effect at once."""
    lost_nodes: LostNodePolicy = LostNodePolicy()
    """What happens to pods that cannot end because their node is lost. An edit takes effect at once."""
    stalls: StallPolicy = StallPolicy()
    """What happens if the processes make no progress. An edit applies to JobSets created afterwards."""

    @field_validator("cloud_metadata")
    @classmethod
    def _auto_stands_alone(cls, value: list[CloudMetadata]) -> list[CloudMetadata]:
        if len(value) > 1 and CloudMetadata.AUTO in value:
            raise ValueError(f"{_AUTO_MESSAGE}; found {[str(cloud) for cloud in value]}")
        return value

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "!has(self.startup.notJoinedExitCode) || (self.startup.notJoinedExitCode != "
                "self.afterSave.savedExitCode && self.startup.notJoinedExitCode != self.afterSave.unsavedExitCode)",
                _NOT_JOINED_MESSAGE,
            )
        )
    )

    @model_validator(mode="after")
    def _not_joined_is_told_apart(self) -> CheckpointPolicySpec:
        if self.not_joined_exit_code in self.after_save.exit_codes:
            raise ValueError(f"{_NOT_JOINED_MESSAGE}; found {self.not_joined_exit_code}")
        return self

    @property
    def not_joined_exit_code(self) -> int:
        """The exit code of a process that did not get into the job."""
        if self.startup.not_joined_exit_code is not None:
            return self.startup.not_joined_exit_code
        # Policies that are older than this code may use its usual value for something else.
        usual = range(DEFAULT_NOT_JOINED_EXIT_CODE, DEFAULT_NOT_JOINED_EXIT_CODE + 3)
        return next(code for code in usual if code not in self.after_save.exit_codes)

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
        earlier = set() if before is None else _newest_checkpoints(before.status)
        return {str(uid) for uid, *_ in _newest_checkpoints(self.status) - earlier}


def _newest_checkpoints(status: CheckpointPolicyStatus) -> set[tuple[object, ...]]:
    lives = ((entry.uid, life) for entry in status.goodput or () for life in entry.lives[-1:])
    return {(uid, life.session, life.restored, life.saved, life.gone) for uid, life in lives}


class PolicyLimits(Model):
    """What holds for every policy of these namespaces, whoever wrote it. Of several limits, the strictest holds."""

    longest_hold_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """Evictions are held for at most this number of seconds; evictions.longestHoldSeconds of the chart is the same for
    all namespaces. 0: no eviction is held, and those that are held now are let through. Gangs get their notices all the
    same. An edit takes effect at once. Absent: no limit by this policy."""
    protection: bool = True
    """False: pods are not protected from autoscalers, whatever spec.voluntaryDisruption of a policy says. An edit takes
    effect at once."""


class ClusterCheckpointPolicySpec(Model):
    """Written by administrators."""

    namespace_selector: LabelSelector
    """The namespaces that this is for, by their labels. Every namespace has the label kubernetes.io/metadata.name.
    Empty ({}): all namespaces."""
    default: CheckpointPolicySpec | None = None
    """The spec of a CheckpointPolicy. JobSets that name no policy get this one when they are created, and so do Indexed
    Jobs that no other object made, unless they have the label gracepoint.dev/default-policy: off, or cannot meet the
    release contract. Of several defaults for a namespace, the one whose policy's name comes first in the alphabet
    applies. A workload may also name this policy by its label; a CheckpointPolicy of this name in its namespace comes
    first. The operator keeps a CheckpointPolicy of this name, with this spec, in each namespace that uses it; its
    status is there. Absent: no default."""
    limits: PolicyLimits = PolicyLimits()
    """Limits for all policies of these namespaces."""


class ClusterCheckpointPolicyStatus(Model):
    """Written by the operator."""


class ClusterCheckpointPolicy(Resource):
    """A default policy for namespaces, and limits for the policies in them. For administrators."""

    kind_name: ClassVar[str] = "ClusterCheckpointPolicy"
    plural: ClassVar[str] = "clustercheckpointpolicies"
    cluster_scoped: ClassVar[bool] = True

    kind: Literal["ClusterCheckpointPolicy"]
    spec: ClusterCheckpointPolicySpec
    status: ClusterCheckpointPolicyStatus = ClusterCheckpointPolicyStatus()

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Returns whether it is for a namespace with these labels."""
        return self.spec.namespace_selector.selects(labels)

    def as_policy(self, namespace: str) -> CheckpointPolicy | None:
        """Returns the default as the CheckpointPolicy of a namespace. None: it has no default."""
        return None if self.spec.default is None else CheckpointPolicy.of(self.copy_for(namespace))

    def copy_for(self, namespace: str) -> dict[str, Any]:
        """Returns the CheckpointPolicy that the operator keeps in a namespace. It is deleted together with this."""
        assert self.spec.default is not None, "asked for only if there is one"
        owner = {"apiVersion": self.api_version, "kind": self.kind_name, "name": self.name, "uid": self.uid}
        meta = {"name": self.name, "namespace": namespace, "ownerReferences": [{**owner, "controller": True}]}
        spec = self.spec.default.to_json()
        return {"apiVersion": self.api_version, "kind": CheckpointPolicy.kind_name, "metadata": meta, "spec": spec}


def default_of(
    policies: Iterable[ClusterCheckpointPolicy], labels: Mapping[str, str]
) -> ClusterCheckpointPolicy | None:
    """Returns the policy whose default is for workloads that name none, in a namespace with these labels."""
    candidates = (policy for policy in policies if policy.spec.default is not None and policy.selects(labels))
    return min(candidates, key=lambda policy: policy.name, default=None)


def why_no_default(name: str, policy: ClusterCheckpointPolicy | None, labels: Mapping[str, str]) -> str | None:
    """Returns why a namespace has no default of a name, and what to do. None: it has one.

    Args:
        name: The name.
        policy: The ClusterCheckpointPolicy of this name. None: it does not exist.
        labels: Labels of the namespace.
    """
    if policy is None:
        finding = f"found no ClusterCheckpointPolicy {name}"
    elif policy.spec.default is None:
        finding = f"found no spec.default in the ClusterCheckpointPolicy {name}"
    elif not policy.selects(labels):
        finding = f"found a spec.namespaceSelector of the ClusterCheckpointPolicy {name} that is not for this namespace"
    else:
        return None
    return (
        f"{finding}, expected a default. Let an administrator give it back, or delete the CheckpointPolicy {name} of "
        "this namespace and create one of your own"
    )


def made_from(policy: CheckpointPolicy) -> str:
    """Returns the name of the ClusterCheckpointPolicy that a policy is a copy of. Empty: of none."""
    owners = policy.metadata.get("ownerReferences") or ()
    return next((policy.name for owner in owners if _is_original(owner, policy.name)), "")


def _is_original(owner: object, name: str) -> bool:
    reference = {"kind": ClusterCheckpointPolicy.kind_name, "name": name}
    return isinstance(owner, Mapping) and owner.get("controller") is True and reference.items() <= owner.items()
