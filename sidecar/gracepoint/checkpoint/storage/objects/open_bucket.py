"""Opens buckets by their URI's scheme. One bucket with one set of settings is one back end, for the whole process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from gracepoint.checkpoint.storage.objects.object_backend import ObjectBackend
from gracepoint.checkpoint.storage.objects.providers import gcs
from gracepoint.checkpoint.storage.objects.providers.api import ObjectApi
from gracepoint.checkpoint.storage.objects.providers.gcs import GcsApi
from gracepoint.checkpoint.storage.objects.providers.s3 import S3Api

_APIS: dict[str, Callable[[str], ObjectApi]] = {"gs": GcsApi, "s3": S3Api}
# Environment variables that say which server is used, and as which user. With another value, another back end is made.
_SETTINGS = (
    "STORAGE_EMULATOR_HOST",
    "TENSORSTORE_GCS_HTTP_URL",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_ACCESS_KEY_ID",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "AWS_CA_BUNDLE",
    "AWS_CONFIG_FILE",
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_USE_DUALSTACK_ENDPOINT",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SSE_KMS_KEY_ID",
    "AWS_SSE_BUCKET_KEY_ENABLED",
    "GOOGLE_STORAGE_KMS_KEY_NAME",
)
_lock = threading.Lock()
_opened: dict[tuple[str | None, ...], ObjectBackend] = {}


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it


def open_bucket(scheme: str, bucket: str) -> ObjectBackend:
    """Returns the back end of a bucket. Makes no request.

    Raises:
        SettingsError: A setting is missing, or the extra of the scheme is not installed.
    """
    if scheme == "gs":
        gcs.name_for_tensorstore(os.environ)  # before the settings are read, as it changes them
    settings = (scheme, bucket, *(os.environ.get(name) for name in _SETTINGS))
    with _lock:
        if settings not in _opened:
            _opened[settings] = ObjectBackend(_APIS[scheme](bucket))
        return _opened[settings]
