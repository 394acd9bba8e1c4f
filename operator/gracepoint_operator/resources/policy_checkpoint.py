"""Where a policy's checkpoints and compiled programs are stored, and when checkpoints are made."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field, field_validator, model_validator

from gracepoint.wire.names import (
    DEFAULT_COMPILATION_CACHE_BYTES,
    DEFAULT_COMPILATION_CACHE_DAYS,
    DEFAULT_TOLERATE_FAILURES_S,
)
from gracepoint_operator.resources.base import Model, cel, rules
from gracepoint_operator.resources.goodput import SaveIntervalMode

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
    layers). The training container gets it as AWS_SERVER_SIDE_ENCRYPTION unless it sets that variable."""
    key_id: Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z0-9:/_.-]*$")] = ""
    """For aws:kms, the ARN or id of the key; for gs://, the name of the key of Cloud KMS. Empty: the account's or the
    bucket's own. The training container gets it as AWS_SSE_KMS_KEY_ID or GOOGLE_STORAGE_KMS_KEY_NAME unless it sets
    that variable."""
    bucket_key: bool = False
    """True: aws:kms uses an S3 bucket key, which needs fewer requests to KMS. The training container gets it as
    AWS_SSE_BUCKET_KEY_ENABLED unless it sets that variable."""

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

    server_side_encryption: ServerSideEncryption = ServerSideEncryption()
    """What the store encrypts new objects with, if the bucket's policy demands that each object says it."""

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
    tolerate_failures_seconds: Annotated[int, Field(ge=0, le=10_000_000)] = int(DEFAULT_TOLERATE_FAILURES_S)
    """Seconds for which periodic saves may fail, one after the other, before the training processes end with an error.
    Until then training continues, each failure is logged, and the condition Saving of the policy is False. A save is
    tried at least twice. Emergency saves are tried in any case. 0: the first failure ends training."""
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
    """True: the processes keep the programs that JAX compiles, and the next start with the same versions of JAX and the
    same devices reads them. JAX runs what it reads: whoever can write to the directory can run code in the pods. A
    container that sets JAX_COMPILATION_CACHE_DIR keeps JAX's own cache instead."""
    directory: Annotated[
        str,
        Field(
            max_length=1024,
            json_schema_extra=rules(
                cel(f"self == '' || self.matches(r'{_DIRECTORY}')", _DIRECTORY_MESSAGE, "self"),
            ),
        ),
    ] = ""
    """Directory of the compiled programs, in the form of checkpoint.directory. Jobs that run the same programs may
    share one. Empty: a hidden folder in checkpoint.directory."""
    max_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] = DEFAULT_COMPILATION_CACHE_BYTES
    """Bytes that all programs in the directory may have together. The programs that were not used for longest are
    deleted."""
    unused_days: Annotated[int, Field(ge=1, le=3650)] = DEFAULT_COMPILATION_CACHE_DAYS
    """Days after its last use at which a program is deleted."""

    @field_validator("directory")
    @classmethod
    def _directory_is_absolute(cls, value: str) -> str:
        if value and not re.fullmatch(_DIRECTORY, value):
            raise ValueError(f"{_DIRECTORY_MESSAGE}; found {value!r}")
        return value
