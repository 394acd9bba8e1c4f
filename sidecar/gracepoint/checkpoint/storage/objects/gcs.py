"""Google Cloud Storage, through its JSON API. Generations are the store's own.

Credentials are Google's application default credentials: workload identity on GKE, the metadata server, or the file
that ``GOOGLE_APPLICATION_CREDENTIALS`` names. ``google-auth`` finds and renews them (``provider.Renewed``).

``TENSORSTORE_GCS_HTTP_URL`` names another server, such as an endpoint of Private Service Connect. An access token is
sent there, too, unless the URL begins with ``http://``. ``STORAGE_EMULATOR_HOST`` names an emulator. An emulator, or a
server at ``http://``, gets only ``GOOGLE_AUTH_TOKEN_FOR_TESTING``, if that is set. ``GOOGLE_STORAGE_KMS_KEY_NAME``
names the key that new objects are encrypted with.

This module has no threads.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import quote, urlencode

from gracepoint.checkpoint.storage.objects import provider
from gracepoint.checkpoint.storage.objects.http import Body, Exchange, Request, connections_to
from gracepoint.checkpoint.storage.objects.provider import Found, Page, Renewed, StoreClock, StoreCredentials, Transient
from gracepoint.checkpoint.storage.storage_path import Entry, Generation, NotAdmitted
from gracepoint.errors import SettingsError

_GOOGLE = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
# Google's text for a missing bucket. For a missing object it is "No such object: BUCKET/KEY". Both have one reason.
_NO_BUCKET = "The specified bucket does not exist"


def name_for_tensorstore(environ: MutableMapping[str, str]) -> None:
    """Sets the environment variables by which TensorStore finds the emulator, if there is one."""
    if host := environ.get("STORAGE_EMULATOR_HOST"):
        environ.setdefault("TENSORSTORE_GCS_HTTP_URL", connections_to(_with_scheme(host)).url)
        environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "testing")


class GcsApi:
    """One bucket."""

    uploads: provider.Uploads | None = None
    largest_bytes = 5 << 40

    def __init__(self, bucket: str, environ: Mapping[str, str] = os.environ) -> None:
        self._bucket = bucket
        emulator = environ.get("STORAGE_EMULATOR_HOST")
        url = _with_scheme(emulator or environ.get("TENSORSTORE_GCS_HTTP_URL") or _GOOGLE)
        self.connections = connections_to(url)
        self._key_name = environ.get("GOOGLE_STORAGE_KMS_KEY_NAME", "")
        self.clock = StoreClock()
        self._tokens: Renewed[str] | None = None
        self._testing: str | None = None
        if emulator or url.startswith("http://"):
            self._testing = environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING")
        else:
            self._tokens = Renewed("gs://: access tokens for Google Cloud Storage", _GoogleTokens())

    def url(self, key: str) -> str:
        return f"gs://{self._bucket}/{key}"

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        return {"driver": "gcs", "bucket": self._bucket, "path": key}

    def put(
        self, exchange: Exchange, key: str, body: Body, only_if: Generation | None, note: str, crc32: int
    ) -> Generation:
        query = {"uploadType": "multipart", "name": key, "fields": "generation"}
        if only_if is not None:
            query["ifGenerationMatch"] = only_if or "0"
        if self._key_name:
            query["kmsKeyName"] = self._key_name
        parts = _Parts({"name": key, "metadata": {provider.NOTE: note}, **_checksum(body)}, body)
        target = f"/upload/storage/v1/b/{self._bucket}/o?{urlencode(query)}"
        headers = {"Content-Type": f"multipart/related; boundary={parts.boundary}"}
        self._send(exchange, "POST", target, key, headers, parts)
        with provider.parsing(f"POST {self.url(key)}"):
            return _generation(json.loads(exchange.read()))

    def get(self, exchange: Exchange, key: str, first: int, stop: int | None, generation: Generation | None) -> Found:
        headers = {}
        if first or stop is not None:
            headers["Range"] = f"bytes={first}-{'' if stop is None else stop - 1}"
        query = {"alt": "media"} | ({} if generation is None else {"generation": str(generation)})
        self._send(exchange, "GET", f"{self._place(key)}?{urlencode(query)}", key, headers)
        with provider.parsing(f"GET {self.url(key)}"):
            stored = Generation(exchange.headers["x-goog-generation"])
            return Found(provider.total_bytes(exchange, first), stored, provider.changed_s(exchange), "")

    def head(self, exchange: Exchange, key: str) -> Found | None:
        try:
            self._send(exchange, "GET", f"{self._place(key)}?fields=size,generation,updated,metadata", key)
        except FileNotFoundError:
            return None
        with provider.parsing(f"GET {self.url(key)}"):
            fields = json.loads(exchange.read())
            note = (fields.get("metadata") or {}).get(provider.NOTE, "")
            return Found(int(fields["size"]), _generation(fields), _seconds(fields["updated"]), note)

    def list(self, exchange: Exchange, prefix: str, *, flat: bool, token: str | None, limit: int) -> Page:
        query = {
            "prefix": prefix,
            "maxResults": str(limit),
            "fields": "prefixes,items(name,size,generation,updated),nextPageToken",
        }
        if not flat:
            query["delimiter"] = "/"
        if token is not None:
            query["pageToken"] = token
        self._send(exchange, "GET", f"{self._objects}?{urlencode(query)}", prefix)
        with provider.parsing(f"LIST {self.url(prefix)}"):
            fields = json.loads(exchange.read())
            entries = [
                Entry(item["name"], int(item["size"]), _generation(item), _seconds(item["updated"]))
                for item in fields.get("items") or ()
            ]
            return Page(entries, fields.get("prefixes") or (), fields.get("nextPageToken") or None)

    def delete(self, exchange: Exchange, key: str, generation: Generation | None) -> None:
        # With a generation, only that version is deleted. If another one is there now, the store answers 404.
        query = "" if generation is None else f"?{urlencode({'generation': generation})}"
        try:
            self._send(exchange, "DELETE", f"{self._place(key)}{query}", key)
        except FileNotFoundError:
            return
        exchange.read()

    def _place(self, key: str) -> str:
        return f"{self._objects}/{quote(key, safe='')}"

    @property
    def _objects(self) -> str:
        return f"/storage/v1/b/{self._bucket}/o"

    def _send(
        self,
        exchange: Exchange,
        method: str,
        target: str,
        key: str,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> None:
        token = self._testing if self._tokens is None else self._tokens.get(exchange.go_on)
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        sent_s = time.monotonic()
        exchange.send(Request(method, target, {**(headers or {}), **authorization}, body))
        self.clock.observe(exchange.headers.get("date"), sent_s)
        if exchange.status >= 300:
            code, message = _error(exchange.read())
            # Writes and listings need only the bucket. If one of them gets a 404, the bucket is missing. For other
            # requests only the text tells. Its start is compared, as names of users may follow.
            only_needs_bucket = method == "POST" or target.startswith(f"{self._objects}?")
            if exchange.status == 404 and (only_needs_bucket or message.startswith(_NO_BUCKET)):
                code = "NoSuchBucket"
            if exchange.status == 401 and self._tokens is not None and self._tokens.refused(str(token)):
                raise Transient(f"{method} {self.url(key)}: the access token was refused, and is renewed")
            raise provider.refused(f"{method} {self.url(key)}", exchange, code, message, writes=method != "GET")


class _Parts:
    """The body of an upload: the object's metadata, and its bytes."""

    def __init__(self, metadata: Mapping[str, Any], data: Body) -> None:
        self.boundary = f"gracepoint-{secrets.token_hex(16)}"
        described = json.dumps(metadata)
        self._before = (
            f"--{self.boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{described}\r\n"
            f"--{self.boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        self._after = f"\r\n--{self.boundary}--".encode()
        self._data = data

    def __len__(self) -> int:
        return len(self._before) + len(self._data) + len(self._after)

    def blocks(self) -> Iterable[memoryview]:
        yield memoryview(self._before)
        yield from self._data.blocks()
        yield memoryview(self._after)


class _GoogleTokens:
    """Finds and renews access tokens with ``google-auth``. One thread at a time uses it."""

    def __init__(self) -> None:
        self._credentials: Any = None

    def __call__(self, was_refused: bool) -> StoreCredentials[str]:
        try:
            import google.auth
            from google.auth.exceptions import DefaultCredentialsError
            from google.auth.transport.requests import Request as GoogleRequest
        except ImportError as error:
            raise SettingsError(
                f"gs:// needs the extra 'gcs', for credentials: pip install 'gracepoint[gcs]' ({error})"
            ) from error
        try:
            if self._credentials is None:
                self._credentials = google.auth.default(scopes=[_SCOPE])[0]
        except DefaultCredentialsError as error:
            raise NotAdmitted(
                errno.EIO,
                "gs://: no credentials were found. On GKE, bind the pod's service account with workload identity; "
                f"elsewhere set GOOGLE_APPLICATION_CREDENTIALS ({error})",
            ) from error
        self._credentials.refresh(GoogleRequest())
        expiry = self._credentials.expiry  # UTC, without a time zone
        until_s = float("inf") if expiry is None else expiry.replace(tzinfo=datetime.UTC).timestamp()
        return StoreCredentials(str(self._credentials.token), lambda seconds: time.time() + seconds < until_s)


def _checksum(body: Body) -> dict[str, str]:
    """Returns the field of the object's metadata with the checksum that the store compares.

    It is the CRC-32C, if compiled code for that is installed. Otherwise it is the MD5, which takes longer.
    """
    with contextlib.suppress(ImportError):
        import google_crc32c

        if google_crc32c.implementation == "c":
            checksum = 0
            for block in body.blocks():
                checksum = google_crc32c.extend(checksum, bytes(block))
            return {"crc32c": base64.b64encode(checksum.to_bytes(4, "big")).decode()}
    digest = hashlib.md5(usedforsecurity=False)
    for block in body.blocks():
        digest.update(block)
    return {"md5Hash": base64.b64encode(digest.digest()).decode()}


def _error(data: bytes) -> tuple[str, str]:
    try:
        error = json.loads(data)["error"]
        reasons = [str(each.get("reason", "")) for each in error.get("errors") or ()]
        return (reasons or [str(error.get("status", ""))])[0], str(error.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", data[:200].decode(errors="replace")


def _with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def _generation(fields: Mapping[str, Any]) -> Generation:
    return Generation(str(int(fields["generation"])))


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
