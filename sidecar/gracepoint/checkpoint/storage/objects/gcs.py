"""Google Cloud Storage, through its JSON API. Generations are the store's own.

Credentials are Google's application default credentials: workload identity on GKE, the metadata server, or the file
that ``GOOGLE_APPLICATION_CREDENTIALS`` names. ``google-auth`` finds and renews them; any thread may ask for them.
``STORAGE_EMULATOR_HOST`` or ``TENSORSTORE_GCS_HTTP_URL`` name another server. There, no credentials are needed, and
``GOOGLE_AUTH_TOKEN_FOR_TESTING`` is sent if it is set.

This module has no threads.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from gracepoint.checkpoint.storage.backend import Entry, Generation
from gracepoint.checkpoint.storage.objects import api
from gracepoint.checkpoint.storage.objects.api import Found, GoOn, Page, StoreClock
from gracepoint.checkpoint.storage.objects.connection import Body, Exchange, Request, connections_to
from gracepoint.checkpoint.storage.objects.persistence import Transient
from gracepoint.errors import SettingsError

_GOOGLE = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_RENEW_BEFORE_S = 300.0


class GcsApi:
    """One bucket."""

    largest_bytes = 5 << 40

    def __init__(self, bucket: str, environ: Mapping[str, str] = os.environ) -> None:
        self._bucket = bucket
        url = environ.get("STORAGE_EMULATOR_HOST") or environ.get("TENSORSTORE_GCS_HTTP_URL") or _GOOGLE
        if "://" not in url:
            url = f"http://{url}"
        self.connections = connections_to(url)
        self.clock = StoreClock()
        self._token = _Token(environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING"), is_google=url == _GOOGLE)
        if url != _GOOGLE and environ is os.environ:
            # TensorStore asks for its own names.
            os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", self.connections.url)
            os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "testing")

    def url(self, key: str) -> str:
        return f"gs://{self._bucket}/{key}"

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        return {"driver": "gcs", "bucket": self._bucket, "path": key}

    def put(
        self, exchange: Exchange, key: str, body: Body, only_if: Generation | None, note: str, crc32: int, go_on: GoOn
    ) -> Generation:
        query = {"uploadType": "multipart", "name": key, "fields": "generation"}
        if only_if is not None:
            query["ifGenerationMatch"] = only_if or "0"
        parts = _Parts({"name": key, "metadata": {api.NOTE: note}}, body)
        target = f"/upload/storage/v1/b/{self._bucket}/o?{urlencode(query)}"
        headers = {"Content-Type": f"multipart/related; boundary={parts.boundary}"}
        self._send(exchange, "POST", target, key, headers, parts, go_on)
        return Generation(str(json.loads(exchange.read())["generation"]))

    def get(self, exchange: Exchange, key: str, first: int, stop: int | None, generation: Generation | None) -> Found:
        headers = {}
        if first or stop is not None:
            headers["Range"] = f"bytes={first}-{'' if stop is None else stop - 1}"
        query = {"alt": "media"} | ({} if generation is None else {"generation": str(generation)})
        self._send(exchange, "GET", f"{self._place(key)}?{urlencode(query)}", key, headers)
        found = Generation(exchange.headers.get("x-goog-generation", ""))
        return Found(api.total_bytes(exchange), found, api.changed_s(exchange), "")

    def head(self, exchange: Exchange, key: str) -> Found | None:
        try:
            self._send(exchange, "GET", f"{self._place(key)}?fields=size,generation,updated,metadata", key)
        except FileNotFoundError:
            return None
        found = json.loads(exchange.read())
        note = (found.get("metadata") or {}).get(api.NOTE, "")
        return Found(int(found["size"]), Generation(str(found["generation"])), _seconds(found["updated"]), note)

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
        self._send(exchange, "GET", f"/storage/v1/b/{self._bucket}/o?{urlencode(query)}", prefix)
        found = json.loads(exchange.read())
        entries = [
            Entry(item["name"], int(item["size"]), Generation(str(item["generation"])), _seconds(item["updated"]))
            for item in found.get("items") or ()
        ]
        return Page(entries, found.get("prefixes") or (), found.get("nextPageToken") or None)

    def delete(self, exchange: Exchange, key: str, generation: Generation | None) -> None:
        # With a generation, only that version is deleted. If another one is there now, there is nothing to delete.
        query = "" if generation is None else f"?{urlencode({'generation': generation})}"
        try:
            self._send(exchange, "DELETE", f"{self._place(key)}{query}", key)
        except FileNotFoundError:
            return
        exchange.read()

    def _place(self, key: str) -> str:
        return f"/storage/v1/b/{self._bucket}/o/{quote(key, safe='')}"

    def _send(
        self,
        exchange: Exchange,
        method: str,
        target: str,
        key: str,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        go_on: GoOn = lambda: None,
    ) -> None:
        sent_s = time.time()
        exchange.send(Request(method, target, {**(headers or {}), **self._token.headers()}, body), go_on)
        self.clock.told(exchange.headers.get("date"), sent_s)
        if exchange.status >= 300:
            code, message = _error(exchange.read())
            if exchange.status == 404 and (method == "POST" or "bucket" in message.lower()):
                code = "NoSuchBucket"
            if exchange.status == 401 and self._token.renew():
                raise Transient(f"{method} {self.url(key)}: the access token was refused, and is renewed")
            raise api.refused(f"{method} {self.url(key)}", exchange, code, message)


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


class _Token:
    """The access token, renewed some minutes before it expires."""

    def __init__(self, testing: str | None, *, is_google: bool) -> None:
        self._testing = testing
        self._is_google = is_google
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._renewed_s = 0.0

    def headers(self) -> dict[str, str]:
        if self._testing is not None or not self._is_google:
            return {} if self._testing is None else {"Authorization": f"Bearer {self._testing}"}
        with self._lock:
            if self._credentials is None:
                self._credentials = _found_credentials()
            expiry = self._credentials.expiry  # UTC, without a time zone
            left_s = float("inf")
            if expiry is not None:
                left_s = expiry.replace(tzinfo=datetime.UTC).timestamp() - time.time()
            if not self._credentials.token or left_s < _RENEW_BEFORE_S:
                self._refresh()
            return {"Authorization": f"Bearer {self._credentials.token}"}

    def renew(self) -> bool:
        """Gets a new token, as the server refused the present one. Returns False if that was done just now."""
        if self._testing is not None or not self._is_google:
            return False
        with self._lock:
            if time.monotonic() - self._renewed_s < _RENEW_BEFORE_S:
                return False
            self._refresh()
            return True

    def _refresh(self) -> None:
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import Request as GoogleRequest

        try:
            self._credentials.refresh(GoogleRequest())
        except GoogleAuthError as error:
            raise PermissionError(errno.EACCES, f"gs://: no access token for Google Cloud Storage: {error}") from error
        self._renewed_s = time.monotonic()


def _found_credentials() -> Any:
    try:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
    except ImportError as error:
        raise SettingsError(
            f"gs:// needs the extra 'gcs', for credentials: pip install 'gracepoint[gcs]' ({error})"
        ) from error
    try:
        return google.auth.default(scopes=[_SCOPE])[0]
    except DefaultCredentialsError as error:
        raise PermissionError(
            errno.EACCES,
            "gs://: no credentials were found. On GKE, bind the pod's service account with workload identity; "
            f"elsewhere set GOOGLE_APPLICATION_CREDENTIALS ({error})",
        ) from error


def _error(data: bytes) -> tuple[str, str]:
    try:
        error = json.loads(data)["error"]
        reasons = [str(each.get("reason", "")) for each in error.get("errors") or ()]
        return (reasons or [str(error.get("status", ""))])[0], str(error.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", data[:200].decode(errors="replace")


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
