"""S3, and stores with its API. Generations are entity tags: objects with equal bytes have equal ones.

``botocore`` says where a bucket is and how requests to it are signed (``_place``), finds and renews credentials
(``_AwsKeys``, ``_DirectorySessions``), and signs (``S3Api._signed``). It reads its own variables and files, and is
imported when a bucket is opened. The requests are made here: they have deadlines, can be ended, and send arrays from
where they are.

``AWS_REGION`` is not one of botocore's variables, but of the other kits. ``AWS_VIRTUAL_HOSTED_STYLE_REQUEST`` says
whether the bucket is a part of the host's name; without it, ``botocore`` decides. ``AWS_SERVER_SIDE_ENCRYPTION``,
``AWS_SSE_KMS_KEY_ID`` and ``AWS_SSE_BUCKET_KEY_ENABLED`` say what new objects are encrypted with.

TensorStore reads leaves in OCDBT and compressed ones by itself. ``kvstore_spec`` gives it the same address.

Large objects are uploaded in parts. Nothing is visible before an upload is completed, which is one conditional request.
S3 answers 409 to that request if another writer interfered. Then another upload must be made.

This module has no threads. Any thread makes requests.
"""

from __future__ import annotations

import base64
import datetime
import errno
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from gracepoint.checkpoint.storage.objects import provider
from gracepoint.checkpoint.storage.objects.http import Body, Bytes, Connections, Exchange, Request, connections_to
from gracepoint.checkpoint.storage.objects.provider import (
    Found,
    Page,
    Renewed,
    StoreClock,
    StoreCredentials,
    Transient,
    UploadConflict,
)
from gracepoint.checkpoint.storage.storage_path import Entry, Generation, NotAdmitted
from gracepoint.errors import SettingsError

#: The header for the metadata field in which a writer leaves a note.
NOTE_HEADER = f"x-amz-meta-{provider.NOTE}"


class S3Uploads:
    """The requests of multipart uploads to one bucket. See ``provider.Uploads``."""

    from_bytes = 256 << 20

    def __init__(self, bucket: S3Api) -> None:
        self._bucket = bucket

    def begin(self, exchange: Exchange, key: str, note: str) -> str:
        headers = {"Content-Type": "application/octet-stream", "x-amz-checksum-algorithm": "CRC32"}
        headers |= {NOTE_HEADER: note} | self._bucket.encryption
        self._bucket.send(exchange, "POST", key, {"uploads": ""}, headers)
        with provider.parsing(f"POST {self._bucket.url(key)}"):
            upload_id = _direct_text(ElementTree.fromstring(exchange.read()), "UploadId")
            if not upload_id:
                raise ValueError("no UploadId")
            return upload_id

    def put(self, exchange: Exchange, key: str, upload: str, number: int, body: Body, crc32: int) -> str:
        headers = {"x-amz-checksum-crc32": _encoded(crc32)}
        self._bucket.send(exchange, "PUT", key, {"partNumber": str(number), "uploadId": upload}, headers, body)
        exchange.read()
        with provider.parsing(f"PUT {self._bucket.url(key)}"):
            return exchange.headers["etag"]

    def complete(
        self,
        exchange: Exchange,
        key: str,
        upload: str,
        parts: Sequence[tuple[str, int]],
        only_if: Generation | None,
    ) -> Generation:
        root = ElementTree.Element("CompleteMultipartUpload", xmlns="http://s3.amazonaws.com/doc/2006-03-01/")
        for number, (tag, crc32) in enumerate(parts, 1):
            part = ElementTree.SubElement(root, "Part")
            for name, text in (("PartNumber", str(number)), ("ETag", tag), ("ChecksumCRC32", _encoded(crc32))):
                ElementTree.SubElement(part, name).text = text
        body = Bytes(ElementTree.tostring(root))
        subject = f"POST {self._bucket.url(key)}"
        try:
            self._bucket.send(exchange, "POST", key, {"uploadId": upload}, conditions(only_if), body)
        except Transient as error:
            if exchange.status == 409:
                raise UploadConflict(str(error)) from error
            raise
        with provider.parsing(subject):
            reply = ElementTree.fromstring(exchange.read())
            tag = _direct_text(reply, "ETag").strip('"')
            # S3 may send the status 200 before it knows the outcome. Then the body tells the error.
            if not tag:
                raise Transient(f"{subject}: {_direct_text(reply, 'Code')} {_direct_text(reply, 'Message')}")
            return Generation(tag)

    def abort(self, exchange: Exchange, key: str, upload: str) -> None:
        self._bucket.send(exchange, "DELETE", key, {"uploadId": upload}, {})
        exchange.read()


def conditions(only_if: Generation | None) -> dict[str, str]:
    """Returns the headers of a write with the condition ``only_if``: a generation or ``ABSENT``. Empty for None."""
    if only_if is None:
        return {}
    return {"If-Match": f'"{only_if}"'} if only_if else {"If-None-Match": "*"}


def _encoded(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(4, "big")).decode()


def _direct_text(node: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in node if child.tag.rpartition("}")[2] == name), "")


_ALGORITHMS = ("AES256", "aws:kms", "aws:kms:dsse")


class S3Api:
    """One bucket.

    Attributes:
        encryption: The headers that say what a new object is encrypted with.
    """

    largest_bytes = 5 << 40

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self.encryption = _encryption(os.environ)
        keys = _AwsKeys()
        self._place = _place(keys.session(), bucket)
        self.connections = self._place.connections
        finder = _DirectorySessions(keys, bucket, self._place) if self._place.has_sessions else keys
        # The end of a session is compared with this machine's clock, so the server's word counts at once.
        self._credentials = Renewed("s3://: credentials", finder, believes_refusals=self._place.has_sessions)
        self.clock = StoreClock()
        self._deletes_with_conditions = True
        self.uploads: provider.Uploads | None = S3Uploads(self)

    def url(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        region, url = self._place.region, f"{self.connections.url}{self._place.path}"
        spec: dict[str, Any] = {"driver": "s3", "bucket": self._bucket, "path": key, "aws_region": region}
        if self._place.path.endswith(f"/{self._bucket}"):
            spec["endpoint"] = url.removesuffix(f"/{self._bucket}")
        elif url != f"https://{self._bucket}.s3.{region}.amazonaws.com":
            # Without a bucket, the endpoint is the bucket's. Versions before 0.1.86 know only Amazon's own hosts, whose
            # names they make themselves.
            spec |= {"bucket": "", "endpoint": url}
        if "AWS_ACCESS_KEY_ID" in os.environ:
            spec["aws_credentials"] = {"type": "environment"}
        return spec

    def put(
        self, exchange: Exchange, key: str, body: Body, only_if: Generation | None, note: str, crc32: int
    ) -> Generation:
        checksum = base64.b64encode(crc32.to_bytes(4, "big")).decode()
        headers = {"x-amz-checksum-crc32": checksum, "Content-Type": "application/octet-stream", NOTE_HEADER: note}
        self.send(exchange, "PUT", key, {}, headers | self.encryption | conditions(only_if), body)
        exchange.read()
        with provider.parsing(f"PUT {self.url(key)}"):
            return _tag(exchange.headers["etag"])

    def get(self, exchange: Exchange, key: str, first: int, stop: int | None, generation: Generation | None) -> Found:
        headers = {}
        if first or stop is not None:
            headers["Range"] = f"bytes={first}-{'' if stop is None else stop - 1}"
        if generation is not None:
            headers["If-Match"] = f'"{generation}"'
        self.send(exchange, "GET", key, {}, headers)
        with provider.parsing(f"GET {self.url(key)}"):
            tag = _tag(exchange.headers["etag"])
            return Found(provider.total_bytes(exchange, first), tag, provider.changed_s(exchange), "")

    def head(self, exchange: Exchange, key: str) -> Found | None:
        try:
            self.send(exchange, "HEAD", key, {}, {})
        except FileNotFoundError:
            return None
        exchange.read()
        with provider.parsing(f"HEAD {self.url(key)}"):
            tag, note = _tag(exchange.headers["etag"]), exchange.headers.get(NOTE_HEADER, "")
            return Found(int(exchange.headers["content-length"]), tag, provider.changed_s(exchange), note)

    def list(self, exchange: Exchange, prefix: str, *, flat: bool, token: str | None, limit: int) -> Page:
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(limit)}
        if not flat:
            query["delimiter"] = "/"
        if token is not None:
            query["continuation-token"] = token
        self.send(exchange, "GET", "", query, {})
        with provider.parsing(f"LIST {self.url(prefix)}"):
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
                self._deletes_with_conditions = False  # as if the store ignored them, until ``object_store`` has tried
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
        path = f"{self._place.path}/{quote(key, safe='/-_.~')}"
        encoded = "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query.items()))
        target = f"{path}?{encoded}" if encoded else path
        signed = self._signed(keys, method, target, headers)
        sent_s = time.monotonic()
        exchange.send(Request(method, target, signed, body))
        self.clock.observe(exchange.headers.get("date"), sent_s)
        if exchange.status >= 300:
            code, message = _error(exchange.read())
            if code in provider.EXPIRED and self._credentials.refused(keys):
                raise Transient(f"{method} {self.url(key)}: {code}: the credentials are renewed")
            writes = method != "GET" and method != "HEAD"
            raise provider.refused(f"{method} {self.url(key)}", exchange, code, message, writes=writes)

    def _signed(self, keys: Any, method: str, target: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns the headers with a signature."""
        from botocore.awsrequest import AWSRequest

        request = AWSRequest(method, f"{self.connections.url}{target}", headers=headers)
        # The body is not signed. Where a header has its checksum, that header is signed.
        request.context["client_config"] = self._place.config
        self._place.signer(keys).add_auth(request)
        return dict(request.headers.items())


class _Place(NamedTuple):
    """Where a bucket is, and how requests to it are signed.

    Attributes:
        connections: The connections to its server.
        path: What the paths of all requests begin with, without a slash at its end.
        region: The region that is signed.
        signer: Makes one of ``botocore.auth``'s signers with credentials.
        has_sessions: Whether these are credentials of a session with the bucket.
        config: The settings of ``botocore`` that are made here. With them, a signer leaves the body alone.
    """

    connections: Connections
    path: str
    region: str
    signer: Callable[[Any], Any]
    has_sessions: bool
    config: Any


def _place(session: Any, bucket: str) -> _Place:
    """Asks ``botocore`` what it would do with a bucket. Makes no request.

    The rules for hosts and signatures have no public function. So a client is asked for ``HeadBucket``, and the event
    ``before-call``, by which ``botocore.stub`` answers in place of a server, shows the request that it would make.

    Raises:
        SettingsError: There is no region, or ``botocore`` knows no such place.
    """
    from botocore.auth import S3ExpressAuth, S3SigV4Auth
    from botocore.awsrequest import AWSResponse
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    s3: dict[str, Any] = {"us_east_1_regional_endpoint": "regional", "payload_signing_enabled": False}
    in_host = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower()
    if in_host in ("true", "false"):
        s3["addressing_style"] = "virtual" if in_host == "true" else "path"
    elif in_host:
        raise SettingsError(f"AWS_VIRTUAL_HOSTED_STYLE_REQUEST: expected true or false, found {in_host!r}")
    requests: list[tuple[str, str, dict[str, Any]]] = []

    def answer(params: Mapping[str, Any], context: Mapping[str, Any], **_: Any) -> Any:
        requests.append((params["url"], context["auth_type"], context["signing"]))
        return AWSResponse(params["url"], 200, {}, None), {}

    config = Config(s3=s3)
    try:
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
        # Without keys of its own, the client would look for some, which can take seconds. It signs nothing.
        keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
        client = session.create_client("s3", region, config=config, **keys)
        if not region and str(urlsplit(client.meta.endpoint_url).hostname).endswith(".amazonaws.com"):
            raise SettingsError(f"s3://{bucket}: set AWS_REGION to the region of the bucket")
        client.meta.events.register_first("before-call.s3.HeadBucket", answer)
        client.head_bucket(Bucket=bucket)
        ((endpoint, kind, signing),) = requests
        url, authorities = urlsplit(endpoint), session.get_config_variable("ca_bundle")
        connections = connections_to(f"{url.scheme}://{url.netloc}", authorities or None)
    except SettingsError:
        raise
    except (BotoCoreError, ValueError) as error:
        raise SettingsError(f"s3://{bucket}: the settings of its server cannot be used: {error}") from error
    if kind not in ("v4", "s3v4", "v4-s3express"):
        raise SettingsError(f"s3://{bucket}: found a bucket with signatures {kind!r}, expected version 4 of AWS's")
    has_sessions = kind == "v4-s3express"
    # The session's credentials are renewed here, so that a request can wait for them as long as it has time.
    make = functools.partial(S3ExpressAuth, identity_cache=None) if has_sessions else S3SigV4Auth
    signer = functools.partial(make, service_name=signing["signing_name"], region_name=signing["region"])
    return _Place(connections, url.path.rstrip("/"), signing["region"], signer, has_sessions, config)


def _encryption(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers that say what a new object is encrypted with.

    Raises:
        SettingsError: The settings contradict each other.
    """
    algorithm, key = environ.get("AWS_SERVER_SIDE_ENCRYPTION", ""), environ.get("AWS_SSE_KMS_KEY_ID", "")
    of_bucket = environ.get("AWS_SSE_BUCKET_KEY_ENABLED", "").lower()
    if algorithm not in ("", *_ALGORITHMS):
        raise SettingsError(
            f"AWS_SERVER_SIDE_ENCRYPTION: expected one of {', '.join(_ALGORITHMS)}, found {algorithm!r}"
        )
    if of_bucket not in ("", "true", "false"):
        raise SettingsError(f"AWS_SSE_BUCKET_KEY_ENABLED: expected true or false, found {of_bucket!r}")
    if (key or of_bucket == "true") and not algorithm.startswith("aws:kms"):
        raise SettingsError(
            "AWS_SSE_KMS_KEY_ID and AWS_SSE_BUCKET_KEY_ENABLED are for AWS_SERVER_SIDE_ENCRYPTION=aws:kms, found "
            f"{algorithm!r}"
        )
    values = {"": algorithm, "-aws-kms-key-id": key, "-bucket-key-enabled": of_bucket}
    return {f"x-amz-server-side-encryption{name}": value for name, value in values.items() if value}


class _AwsKeys:
    """Finds credentials with ``botocore``, which also renews them. One thread at a time uses ``__call__``."""

    def __init__(self) -> None:
        self._session: Any = None
        self._found: Any = None

    def session(self) -> Any:
        """Returns the session of ``botocore``.

        Raises:
            SettingsError: It is not installed.
        """
        if self._session is None:
            try:
                import botocore.session
            except ImportError as error:
                raise SettingsError(f"s3:// needs the extra 's3': pip install 'gracepoint[s3]' ({error})") from error
            self._session = botocore.session.Session()
        return self._session

    def __call__(self, was_refused: bool) -> StoreCredentials[Any]:
        if was_refused:
            self._session = self._found = None
        if self._found is None:
            self._found = self.session().get_credentials()
        if self._found is None:
            raise NotAdmitted(
                errno.EIO,
                "s3://: no credentials were found. On EKS, give the pod's service account a role (IRSA or pod "
                "identity); elsewhere set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        credentials = self._found
        expires = hasattr(credentials, "refresh_needed")
        return StoreCredentials(
            credentials.get_frozen_credentials(), lambda seconds: not (expires and credentials.refresh_needed(seconds))
        )


_SESSION_RENEWED_S = 60.0  # before its end, after five minutes


class _DirectorySessions:
    """Opens sessions with a directory bucket (S3 Express) by ``botocore``. One thread at a time uses ``__call__``."""

    def __init__(self, keys: _AwsKeys, bucket: str, place: _Place) -> None:
        self._keys = keys
        self._bucket = bucket
        self._place = place

    def __call__(self, was_refused: bool) -> StoreCredentials[Any]:
        from botocore.credentials import ReadOnlyCredentials
        from botocore.exceptions import ClientError

        self._keys(was_refused)
        client = self._keys.session().create_client("s3", self._place.region, config=self._place.config)
        try:
            opened = client.create_session(Bucket=self._bucket)["Credentials"]
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (401, 403, 404):
                raise
            raise NotAdmitted(
                errno.EIO,
                f"s3://{self._bucket}: no session was opened: {error}. Check that the bucket exists, and that this "
                "process's credentials may use s3express:CreateSession on it",
            ) from error
        until_s = opened["Expiration"].timestamp()
        return StoreCredentials(
            ReadOnlyCredentials(opened["AccessKeyId"], opened["SecretAccessKey"], opened["SessionToken"]),
            lambda seconds: time.time() + min(seconds, _SESSION_RENEWED_S) < until_s,
        )


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
