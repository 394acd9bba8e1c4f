"""Writes a large object in parts.

The parts go to the store several at a time (``concurrent_requests``), straight from memory. If anything fails, the
upload is aborted, so that the store keeps no parts. A process that dies leaves its parts in the store. A lifecycle rule
of the bucket for incomplete multipart uploads can delete them.
"""

from __future__ import annotations

import errno
import functools
import logging
import time
from typing import Any, Protocol

from gracepoint.checkpoint.storage.backend import Generation
from gracepoint.checkpoint.storage.objects import concurrent_requests
from gracepoint.checkpoint.storage.objects.http.bodies import ArrayBody
from gracepoint.checkpoint.storage.objects.http.persistence import Persistence, wait
from gracepoint.checkpoint.storage.objects.http.request_errors import ConditionFailed, UploadConflict
from gracepoint.checkpoint.storage.objects.providers.api import GoOn, Uploads

logger = logging.getLogger(__name__)

#: Bytes of a part, unless there would be too many.
PART_BYTES = 64 << 20
_MOST_PARTS = 10_000
_MIB = 1 << 20
_AT_ONCE = 4
_TRIES = 3
_ABORT_S = 5.0
_ABORTS_EVERY_S = 0.2


class Run(Protocol):
    """``Persistence.run``, to which ``go_on`` and ``patient`` are given already."""

    def __call__(self, what: str, act: Any, *, kind: str, size_bytes: int = 0, hedge: bool = True) -> Any: ...


def part_bytes(size_bytes: int) -> int:
    """Returns the size of the parts of an object: in whole MiB, and so that there are at most as many as S3 allows."""
    return max(PART_BYTES, -(-size_bytes // (_MOST_PARTS * _MIB)) * _MIB)


def write(
    uploads: Uploads,
    persistence: Persistence,
    url: str,
    key: str,
    body: ArrayBody,
    only_if: Generation | None,
    note: str,
    go_on: GoOn | None,
) -> Generation:
    """Writes an object, and returns its generation. See ``ObjectBackend.write``.

    Raises:
        ConditionFailed: The object has another generation. Or the object was written, and the reply to that was lost;
            then the object has the note ``note``.
        OSError: The object was not written.
    """
    run: Run = functools.partial(persistence.run, go_on=go_on or (lambda: None), patient=go_on is not None)
    for _ in range(_TRIES):
        upload = run(f"POST {url}", lambda exchange: uploads.begin(exchange, key, note), kind="begin", hedge=False)
        try:
            return _Upload(uploads, run, url, key, upload).write(body, only_if)
        except UploadConflict as error:
            logger.info("%s is written again: %s", url, error)
            _abort(uploads, persistence, url, key, upload)
        except BaseException:
            _abort(uploads, persistence, url, key, upload)
            raise
    raise OSError(errno.EBUSY, f"other writers interfered {_TRIES} times", url)


class _Upload:
    """One upload that has begun. The threads of ``concurrent_requests`` send its parts."""

    def __init__(self, uploads: Uploads, run: Run, url: str, key: str, upload: str) -> None:
        self._uploads = uploads
        self._run = run
        self._url = url
        self._key = key
        self._upload = upload
        self._parts: dict[int, tuple[str, int]] = {}  # each thread writes entries of its own

    def write(self, body: ArrayBody, only_if: Generation | None) -> Generation:
        size_bytes = part_bytes(len(body))
        starts = enumerate(range(0, len(body), size_bytes), 1)
        acts = [
            functools.partial(self._put, number, body.part(start, min(start + size_bytes, len(body))))
            for number, start in starts
        ]
        concurrent_requests.run(acts, threads=_AT_ONCE)
        parts = [self._parts[number] for number in sorted(self._parts)]
        found: Generation = self._run(
            f"POST {self._url}",
            lambda exchange: self._uploads.complete(exchange, self._key, self._upload, parts, only_if),
            kind="complete",
            hedge=False,
        )
        return found

    def _put(self, number: int, part: ArrayBody) -> None:
        checksum = part.crc32()
        tag = self._run(
            f"PUT part {number} of {self._url}",
            lambda exchange: self._uploads.put(exchange, self._key, self._upload, number, part, checksum),
            kind="write",
            size_bytes=len(part),
        )
        self._parts[number] = tag, checksum


def _abort(uploads: Uploads, persistence: Persistence, url: str, key: str, upload: str) -> None:
    """Has the store delete the parts. The caller's time may be over, so this takes a few seconds at most.

    A part that is still on its way can arrive after the upload has ended, and is then kept. So this is repeated until
    the store no longer knows the upload.
    """
    until_s = time.monotonic() + _ABORT_S

    def go_on() -> None:
        if time.monotonic() > until_s:
            raise TimeoutError(errno.ETIMEDOUT, f"not done in {_ABORT_S:.0f} s")

    try:
        while True:
            persistence.run(
                f"DELETE {url}", lambda exchange: uploads.abort(exchange, key, upload), kind="delete", go_on=go_on
            )
            wait(_ABORTS_EVERY_S, go_on)
    except ConditionFailed:
        pass  # it is over
    except OSError as error:
        logger.warning("parts of an upload to %s are left in the store: %s", url, error)
