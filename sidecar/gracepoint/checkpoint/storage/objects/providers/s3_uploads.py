"""Multipart uploads of S3, for objects that are larger than one request may write.

Nothing is visible before an upload is completed, which is one conditional request. S3 answers 409 to that request if
another writer interfered. Then this upload cannot be completed any more, and another one must be made. This module has
no threads.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from gracepoint.checkpoint.storage.backend import Generation
from gracepoint.checkpoint.storage.objects.http.connection import Body, Bytes, Exchange
from gracepoint.checkpoint.storage.objects.http.request_errors import Transient, UploadConflict
from gracepoint.checkpoint.storage.objects.providers import api

if TYPE_CHECKING:
    from gracepoint.checkpoint.storage.objects.providers.s3 import S3Api

#: The header for the metadata field in which a writer leaves a note.
NOTE_HEADER = f"x-amz-meta-{api.NOTE}"


class S3Uploads:
    """The requests of multipart uploads to one bucket. See ``api.Uploads``."""

    from_bytes = 256 << 20

    def __init__(self, bucket: S3Api) -> None:
        self._bucket = bucket

    def begin(self, exchange: Exchange, key: str, note: str) -> str:
        headers = {"Content-Type": "application/octet-stream", "x-amz-checksum-algorithm": "CRC32"}
        headers |= {NOTE_HEADER: note} | self._bucket.encryption
        self._bucket.send(exchange, "POST", key, {"uploads": ""}, headers)
        with api.parsing(f"POST {self._bucket.url(key)}"):
            found = _text(ElementTree.fromstring(exchange.read()), "UploadId")
            if not found:
                raise ValueError("no UploadId")
            return found

    def put(self, exchange: Exchange, key: str, upload: str, number: int, body: Body, crc32: int) -> str:
        headers = {"x-amz-checksum-crc32": _encoded(crc32)}
        self._bucket.send(exchange, "PUT", key, {"partNumber": str(number), "uploadId": upload}, headers, body)
        exchange.read()
        with api.parsing(f"PUT {self._bucket.url(key)}"):
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
        what = f"POST {self._bucket.url(key)}"
        try:
            self._bucket.send(exchange, "POST", key, {"uploadId": upload}, conditions(only_if), body)
        except Transient as error:
            if exchange.status == 409:
                raise UploadConflict(str(error)) from error
            raise
        with api.parsing(what):
            found = ElementTree.fromstring(exchange.read())
            tag = _text(found, "ETag").strip('"')
            # S3 may send the status 200 before it knows the outcome. Then the body tells the error.
            if not tag:
                raise Transient(f"{what}: {_text(found, 'Code')} {_text(found, 'Message')}")
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


def _text(node: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in node if child.tag.rpartition("}")[2] == name), "")
