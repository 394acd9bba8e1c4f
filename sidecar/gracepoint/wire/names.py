"""Names that the operator writes and the library reads: labels, HTTP paths, environment variables.

Images live for months, so an operator and a library of different versions meet. The meaning of a name here never
changes.
"""

from __future__ import annotations

GROUP = "gracepoint.dev"
API_VERSION = "v1beta1"
#: The version before. It is served, and stored, as long as a rollback may need it.
OLD_API_VERSION = "v1alpha1"

#: Label on a JobSet or Job that opts it in. Its value is the name of a CheckpointPolicy in the same namespace. The
#: operator's webhook copies it to the pods when the workload is created.
LABEL_POLICY = "gracepoint.dev/policy"

#: Label on the pod template of a replicatedJob, and on its pods. With the value ``helper``, they are no processes of
#: the gang: they load data, or start others. The webhook writes it, and users may.
LABEL_ROLE = "gracepoint.dev/role"
ROLE_HELPER = "helper"

#: Label on a node. With the value ``off``, nothing holds up evictions from it: an administrator's way through.
LABEL_EVICTION_HOLD = "gracepoint.dev/eviction-hold"
EVICTION_HOLD_OFF = "off"

#: Label on the pods of snapshot servers. Its value distinguishes installations: the name of the DaemonSet.
LABEL_SNAPSHOT_SERVER = "gracepoint.dev/snapshot-server"

#: Label on a JobSet or Job. With the value ``off``, it gets no default policy.
LABEL_DEFAULT = "gracepoint.dev/default-policy"

#: Audience of the projected service-account token by which a pod identifies itself.
TOKEN_AUDIENCE = "gracepoint.dev"
TOKEN_DIRECTORY = "/var/run/secrets/gracepoint.dev"
TOKEN_FILE = f"{TOKEN_DIRECTORY}/token"

#: Where the trainer and the keeper of a pod meet: a volume that both mount, and the keeper's socket in it.
KEEPER_DIRECTORY = "/var/run/gracepoint.dev"
KEEPER_SOCKET = f"{KEEPER_DIRECTORY}/keeper.sock"

#: Exit codes if the policy names none. From 3 to 125, as shells, Python and runtimes use 0 to 2 and 126 to 255.
DEFAULT_SAVED_EXIT_CODE = 77
DEFAULT_UNSAVED_EXIT_CODE = 78
#: Exit code of a process that did not get into a training job for a reason that is not the program's. It trained
#: nothing, and another start may succeed.
DEFAULT_NOT_JOINED_EXIT_CODE = 79

#: Seconds before the deadline at which a preemption's save begins at the latest, if the policy names none.
DEFAULT_HEAD_START_S = 60.0

#: Seconds for which periodic saves may fail, if the policy names none.
DEFAULT_TOLERATE_FAILURES_S = 900.0

#: In how many servers each part of a snapshot is, if the policy says no other number.
DEFAULT_SNAPSHOT_COPIES = 2

#: Seconds without progress after which a process is reported as stalled, if the policy names none.
DEFAULT_STALL_AFTER_S = 900.0
#: What follows from a stall. "report": it is logged and reported. "restart": the processes also exit, so that the job
#: starts again.
STALL_REPORT = "report"
STALL_RESTART = "restart"
#: With which they exit then. The program hangs, so the restart counts. No policy can give this code another meaning.
STALLED_EXIT_CODE = 1

#: Whether compiled programs are kept. "on": next to the checkpoints. Any other value is the directory that they are in.
COMPILATION_CACHE_OFF = "off"
COMPILATION_CACHE_ON = "on"
#: The folder of compiled programs in a directory of checkpoints. Names with a leading dot are never steps.
PROGRAMS_FOLDER = ".compiled-programs"
#: JAX's own settings of its persistent cache.
ENV_JAX_CACHE_DIR = "JAX_COMPILATION_CACHE_DIR"
ENV_JAX_MIN_COMPILE_S = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
ENV_JAX_XLA_CACHES = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"

#: Paths of the channel on the operator's HTTPS server. All take a POST with ``Authorization: Bearer``.
PATH_SUBSCRIBE = "/v1/subscriptions"  # Subscription in; a stream of frames, one JSON object a line, out
PATH_ACKNOWLEDGE = "/v1/acknowledgements"  # Acknowledgement in; 204 out
PATH_REPORT = "/v1/reports"  # Report in; 204 out
PATH_FORECAST = "/v1/forecasts"  # Forecast in; 204 out, or a SaveEvery if it takes one
PATH_RESUMPTION = "/v1/resumptions"  # Resumption in; 204 out
PATH_STALL = "/v1/stalls"  # Stall in; 204 out
PATH_TROUBLE = "/v1/troubles"  # Trouble in; 204 out
PATH_SNAPSHOT = "/v1/snapshots"  # SnapshotReport in; 204 out

#: JobSet's own labels on pods (jobset.sigs.k8s.io, api/jobset/v1alpha2).
JOBSET_LABEL_NAME = "jobset.sigs.k8s.io/jobset-name"
JOBSET_LABEL_UID = "jobset.sigs.k8s.io/jobset-uid"
JOBSET_LABEL_REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
JOBSET_LABEL_JOB_INDEX = "jobset.sigs.k8s.io/job-index"
JOBSET_LABEL_RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"

ENV_PREFIX = "GRACEPOINT_"


class Env:
    """Environment variables of the training container, written by the operator's webhook.

    Those that say who the pod is come from the pod's own fields (the downward API). All others are constants of the
    JobSet and its policy. The library reads all of them once, in ``attach``. ``settings.Settings`` says what each
    means, which values it takes, and what its absence means. Its field ``x`` is ``GRACEPOINT_X``.
    """

    # Who this pod is (downward).
    NAMESPACE = "GRACEPOINT_NAMESPACE"
    POD_NAME = "GRACEPOINT_POD_NAME"
    POD_UID = "GRACEPOINT_POD_UID"
    NODE_NAME = "GRACEPOINT_NODE_NAME"
    JOBSET_NAME = "GRACEPOINT_JOBSET_NAME"
    JOBSET_UID = "GRACEPOINT_JOBSET_UID"
    RESTART_ATTEMPT = "GRACEPOINT_RESTART_ATTEMPT"
    REPLICATED_JOB = "GRACEPOINT_REPLICATED_JOB"
    JOB_INDEX = "GRACEPOINT_JOB_INDEX"
    # Its place among the training processes.
    PROCESS_COUNT = "GRACEPOINT_PROCESS_COUNT"
    PROCESS_OFFSET = "GRACEPOINT_PROCESS_OFFSET"
    PODS_PER_JOB = "GRACEPOINT_PODS_PER_JOB"
    MIN_PROCESSES = "GRACEPOINT_MIN_PROCESSES"
    COORDINATOR_JOB = "GRACEPOINT_COORDINATOR_JOB"
    COORDINATOR_PORT = "GRACEPOINT_COORDINATOR_PORT"
    SUBDOMAIN = "GRACEPOINT_SUBDOMAIN"
    # The channel.
    OPERATOR_URL = "GRACEPOINT_OPERATOR_URL"
    CA_CERTIFICATE = "GRACEPOINT_CA_CERTIFICATE"
    TOKEN_FILE = "GRACEPOINT_TOKEN_FILE"
    # What else is watched.
    METADATA = "GRACEPOINT_METADATA"
    GCE_NOTICE_S = "GRACEPOINT_GCE_NOTICE_S"
    # The policy.
    POLICY = "GRACEPOINT_POLICY"
    DIRECTORY = "GRACEPOINT_DIRECTORY"
    SAVE_EVERY_STEPS = "GRACEPOINT_SAVE_EVERY_STEPS"
    SAVE_EVERY_S = "GRACEPOINT_SAVE_EVERY_S"
    SAVE_INTERVAL = "GRACEPOINT_SAVE_INTERVAL"
    KEEP_LAST = "GRACEPOINT_KEEP_LAST"
    KEEP_EVERY_STEPS = "GRACEPOINT_KEEP_EVERY_STEPS"
    KEEP_FOR_S = "GRACEPOINT_KEEP_FOR_S"
    SNAPSHOT_EVERY_STEPS = "GRACEPOINT_SNAPSHOT_EVERY_STEPS"
    SNAPSHOT_EVERY_S = "GRACEPOINT_SNAPSHOT_EVERY_S"
    SNAPSHOT_COPIES = "GRACEPOINT_SNAPSHOT_COPIES"
    WRITER = "GRACEPOINT_WRITER"
    HOST_MEMORY_LIMIT_BYTES = "GRACEPOINT_HOST_MEMORY_LIMIT_BYTES"
    SAVED_EXIT_CODE = "GRACEPOINT_SAVED_EXIT_CODE"
    UNSAVED_EXIT_CODE = "GRACEPOINT_UNSAVED_EXIT_CODE"
    NOT_JOINED_EXIT_CODE = "GRACEPOINT_NOT_JOINED_EXIT_CODE"
    JOIN_TIMEOUT_S = "GRACEPOINT_JOIN_TIMEOUT_S"
    GRACE_PERIOD_S = "GRACEPOINT_GRACE_PERIOD_S"
    MARGIN = "GRACEPOINT_MARGIN"
    HEAD_START_S = "GRACEPOINT_HEAD_START_S"
    TOLERATE_FAILURES_S = "GRACEPOINT_TOLERATE_FAILURES_S"
    STALL_AFTER_S = "GRACEPOINT_STALL_AFTER_S"
    STALL_ACTION = "GRACEPOINT_STALL_ACTION"
    COMPILATION_CACHE = "GRACEPOINT_COMPILATION_CACHE"
    COMPILATION_CACHE_BYTES = "GRACEPOINT_COMPILATION_CACHE_BYTES"
    COMPILATION_CACHE_DAYS = "GRACEPOINT_COMPILATION_CACHE_DAYS"
    TRACE = "GRACEPOINT_TRACE"


#: Values of SAVE_INTERVAL: the settings alone say when periodic saves are due; or the operator does, once it knows.
SAVE_FIXED = "fixed"
SAVE_AUTO = "auto"
#: Seconds between two periodic saves with SAVE_AUTO while nothing is known, if no other number is set.
DEFAULT_AUTO_S = 600.0

#: A process sends its receipt of a notice after so many seconds for each process of its gang, and so many for each one
#: before it: all are told at the same time, and receipts come one after another.
TELLING_ONE_S = 0.001
BETWEEN_RECEIPTS_S = 0.005

#: Clouds whose metadata server the library can watch from within the pod.
METADATA_CLOUDS = ("gce", "aws", "azure")
#: Instead of names of clouds: the library finds out in which cloud it runs.
METADATA_AUTO = "auto"

#: Variables of the stores' clients that the webhook sets if the policy has an endpoint, a region or an encryption.
ENV_S3_ENDPOINT = "AWS_ENDPOINT_URL_S3"
ENV_S3_REGION = "AWS_REGION"
ENV_GCS_ENDPOINT = "TENSORSTORE_GCS_HTTP_URL"
ENV_S3_ENCRYPTION = "AWS_SERVER_SIDE_ENCRYPTION"
ENV_S3_KEY = "AWS_SSE_KMS_KEY_ID"
ENV_S3_BUCKET_KEY = "AWS_SSE_BUCKET_KEY_ENABLED"
ENV_GCS_KEY = "GOOGLE_STORAGE_KMS_KEY_NAME"

#: Set by the Job controller in every container of an Indexed Job.
ENV_JOB_COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
