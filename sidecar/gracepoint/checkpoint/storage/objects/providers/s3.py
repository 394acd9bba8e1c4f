"""S3, and stores with its API. Generations are entity tags: objects with equal bytes have equal ones.

Keys in the environment are used as they are. Without them, ``botocore`` finds and renews credentials (``credentials``):
IRSA, pod identity, the metadata server, its files. ``AWS_CA_BUNDLE`` is a file of the certificates to trust.

``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL`` name another server. Its buckets are then parts of the path, unless
``AWS_VIRTUAL_HOSTED_STYLE_REQUEST`` is ``true``. ``AWS_REGION`` or ``AWS_DEFAULT_REGION`` names the region.

This module has no threads.
"""

from __future__ import annotations

import base64
import datetime
import errno
import hashlib
import hmac
import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from gracepoint.checkpoint.storage.backend import Entry, Generation, NotAdmitted
from gracepoint.checkpoint.storage.objects.http.connection import Body, Exchange, Request
from gracepoint.checkpoint.storage.objects.http.connection_pool import connections_to
from gracepoint.checkpoint.storage.objects.http.credentials import Renewed, StoreCredentials
from gracepoint.checkpoint.storage.objects.http.request_errors import Transient
from gracepoint.checkpoint.storage.objects.providers import api
from gracepoint.checkpoint.storage.objects.providers.api import Found, Page, StoreClock
from gracepoint.checkpoint.storage.objects.providers.s3_uploads import NOTE_HEADER, S3Uploads, conditions
from gracepoint.errors import SettingsError

# The body is not signed. Where a header has its checksum, that header is signed.
_UNSIGNED = "UNSIGNED-PAYLOAD"


class S3Api:
    """One bucket."""

    largest_bytes = 5 << 40

    def __init__(self, bucket: str, environ: Mapping[str, str] = os.environ) -> None:
        self._bucket = bucket
        finder = _AwsKeys()
        self._credentials = Renewed("s3://: credentials", finder)
        self._endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
        self._region = (
            environ.get("AWS_REGION")
            or environ.get("AWS_DEFAULT_REGION")
            or finder.region()
            or ("us-east-1" if self._endpoint else None)
        )
        if self._region is None:
            raise SettingsError(f"s3://{bucket}: set AWS_REGION to the region of the bucket")
        url = (self._endpoint or f"https://s3.{self._region}.amazonaws.com").rstrip("/")
        in_host = not self._endpoint or environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() == "true"
        self._base = "" if in_host and "." not in bucket else f"/{bucket}"
        if not self._base:
            scheme, _, rest = url.partition("://")
            url = f"{scheme}://{bucket}.{rest}"
        self.connections = connections_to(url, environ.get("AWS_CA_BUNDLE") or None)
        self.clock = StoreClock()
        self._deletes_with_conditions = True
        self.uploads: api.Uploads | None = S3Uploads(self)

    def url(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        spec: dict[str, Any] = {"driver": "s3", "bucket": self._bucket, "path": key, "aws_region": self._region}
        if self._endpoint:
            spec["endpoint"] = self._endpoint.rstrip("/")
        if "AWS_ACCESS_KEY_ID" in os.environ:
            spec["aws_credentials"] = {"type": "environment"}
        return spec

    def put(
        self, exchange: Exchange, key: str, body: Body, only_if: Generation | None, note: str, crc32: int
    ) -> Generation:
        checksum = base64.b64encode(crc32.to_bytes(4, "big")).decode()
        headers = {"x-amz-checksum-crc32": checksum, "Content-Type": "application/octet-stream", NOTE_HEADER: note}
        self.send(exchange, "PUT", key, {}, headers | conditions(only_if), body)
        exchange.read()
        with api.parsing(f"PUT {self.url(key)}"):
            return _tag(exchange.headers["etag"])

    def get(self, exchange: Exchange, key: str, first: int, stop: int | None, generation: Generation | None) -> Found:
        headers = {}
        if first or stop is not None:
            headers["Range"] = f"bytes={first}-{'' if stop is None else stop - 1}"
        if generation is not None:
            headers["If-Match"] = f'"{generation}"'
        self.send(exchange, "GET", key, {}, headers)
        with api.parsing(f"GET {self.url(key)}"):
            tag = _tag(exchange.headers["etag"])
            return Found(api.total_bytes(exchange, first), tag, api.changed_s(exchange), "")

    def head(self, exchange: Exchange, key: str) -> Found | None:
        try:
            self.send(exchange, "HEAD", key, {}, {})
        except FileNotFoundError:
            return None
        exchange.read()
        with api.parsing(f"HEAD {self.url(key)}"):
            tag, note = _tag(exchange.headers["etag"]), exchange.headers.get(NOTE_HEADER, "")
            return Found(int(exchange.headers["content-length"]), tag, api.changed_s(exchange), note)

    def list(self, exchange: Exchange, prefix: str, *, flat: bool, token: str | None, limit: int) -> Page:
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(limit)}
        if not flat:
            query["delimiter"] = "/"
        if token is not None:
            query["continuation-token"] = token
        self.send(exchange, "GET", "", query, {})
        with api.parsing(f"LIST {self.url(prefix)}"):
            root = ElementTree.fromstring(exchange.read())
            if root.tag.rpartition("}")[2] != "ListBucketResult":
                raise ValueError(f"<{root.tag}>, expected <ListBucketResult>")
            entries = [
                Entry(_text(item, "Key"), int(_text(item, "Size")), _tag(_text(item, "ETag")), _seconds(item))
                for item in _all(root, "Contents")
            ]
            folders = [_text(item, "Prefix") for item in _all(root, "CommonPrefixes")]
            goes_on = _text(root, "IsTruncated") == "true"
            return Page(entries, folders, _text(root, "NextContinuationToken") if goes_on else None)

    def delete(self, exchange: Exchange, key: str, generation: Generation | None) -> None:
        is_conditional = generation is not None and self._deletes_with_conditions
        try:
            self.send(exchange, "DELETE", key, {}, {"If-Match": f'"{generation}"'} if is_conditional else {})
        except FileNotFoundError:
            return
        except OSError as error:
            if is_conditional and exchange.status in (400, 501) and "NotImplemented" in str(error):
                self._deletes_with_conditions = False  # as if the store ignored them (``probe``)
                raise Transient(f"{error}; the request is made without its condition") from error
            raise
        exchange.read()

    def send(
        self,
        exchange: Exchange,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Body | None = None,
    ) -> None:
        """Sends a request, and waits for the head of its reply. Raises an error if the status is not a success."""
        keys = self._credentials.get(exchange.go_on)
        path = f"{self._base}/{quote(key, safe='/-_.~')}"
        encoded = "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query.items()))
        signed = self._signed(keys, method, path, encoded, headers)
        sent_s = time.time()
        exchange.send(Request(method, f"{path}?{encoded}" if encoded else path, signed, body))
        self.clock.told(exchange.headers.get("date"), sent_s)
        if exchange.status >= 300:
            code, message = _error(exchange.read())
            if code in api.EXPIRED and self._credentials.refused(keys):
                raise Transient(f"{method} {self.url(key)}: {code}: the credentials are renewed")
            writes = method != "GET" and method != "HEAD"
            raise api.refused(f"{method} {self.url(key)}", exchange, code, message, writes=writes)

    def _signed(self, keys: Keys, method: str, path: str, query: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns the headers with a signature, version 4."""
        access_key, secret_key, token = keys
        now = datetime.datetime.now(datetime.UTC)
        day, stamp = f"{now:%Y%m%d}", f"{now:%Y%m%dT%H%M%SZ}"
        sent = {**headers, "x-amz-date": stamp, "x-amz-content-sha256": _UNSIGNED}
        if token:
            sent["x-amz-security-token"] = token
        signing = sorted([("host", self.connections.host), *((name.lower(), sent[name].strip()) for name in sent)])
        names = ";".join(name for name, _ in signing)
        lines = "".join(f"{name}:{value}\n" for name, value in signing)
        request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{_UNSIGNED}"
        scope = f"{day}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{secret_key}".encode()
        for part in (day, str(self._region), "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        sent["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return sent


Keys = tuple[str, str, str | None]


class _AwsKeys:
    """Finds credentials: those in the environment, else with ``botocore``, which also renews them.

    ``botocore`` takes 12 MiB of memory, so it is loaded only if it is needed. One thread at a time uses ``__call__``.
    """

    def __init__(self) -> None:
        self._session: Any = None
        self._found: Any = None

    def region(self) -> str | None:
        """Returns the region that botocore finds in its own settings. None if it finds none."""
        found = self._opened().get_config_variable("region")
        return None if found is None else str(found)

    def __call__(self, was_refused: bool) -> StoreCredentials[Keys]:
        if (keys := _keys_in(os.environ)) is not None:
            return StoreCredentials(keys, lambda seconds: True)
        if was_refused:
            self._session = self._found = None
        if self._found is None:
            self._found = self._opened().get_credentials()
        if self._found is None:
            raise NotAdmitted(
                errno.EIO,
                "s3://: no credentials were found. On EKS, give the pod's service account a role (IRSA or pod "
                "identity); elsewhere set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        found = self._found
        frozen = found.get_frozen_credentials()
        expires = hasattr(found, "refresh_needed")
        return StoreCredentials(
            (frozen.access_key, frozen.secret_key, frozen.token),
            lambda seconds: not (expires and found.refresh_needed(seconds)),
        )

    def _opened(self) -> Any:
        if self._session is None:
            try:
                import botocore.session
            except ImportError as error:
                raise SettingsError(
                    f"s3:// needs the extra 's3', for credentials: pip install 'gracepoint[s3]' ({error})"
                ) from error
            self._session = botocore.session.Session()
        return self._session


def _keys_in(environ: Mapping[str, str]) -> Keys | None:
    """Returns the keys in the environment, as ``botocore`` reads them. None if there are none, or if they expire."""
    access_key, secret_key = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if not access_key or not secret_key or environ.get("AWS_CREDENTIAL_EXPIRATION"):
        return None
    return access_key, secret_key, environ.get("AWS_SECURITY_TOKEN") or environ.get("AWS_SESSION_TOKEN") or None


def _tag(text: str) -> Generation:
    tag = text.removeprefix("W/").strip('"')
    if not tag:
        raise ValueError("an empty entity tag")
    return Generation(tag)


def _all(node: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [child for child in node if child.tag.rpartition("}")[2] == name]


def _text(node: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in _all(node, name)), "")


def _seconds(item: ElementTree.Element) -> float:
    return datetime.datetime.fromisoformat(_text(item, "LastModified")).timestamp()


def _error(data: bytes) -> tuple[str, str]:
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return "", data[:200].decode(errors="replace")
    return _text(root, "Code"), _text(root, "Message")
