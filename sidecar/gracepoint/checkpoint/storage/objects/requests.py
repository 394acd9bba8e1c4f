"""Reads and writes of large objects, by several requests at a time.

``ObjectReader``: all ranges are of one generation of the object. A reader belongs to one thread. What that thread asks
for in order is read as one stream. A large range is read by several streams: the thread's own stream continues from the
start of the range, and additional threads ("gracepoint: ranges", daemons) read parts from its end. They end with the
call. All readers of a store share a bound on the number of these threads. If a stream breaks or stalls, another request
continues where it ended.

``write``: the parts go to the store several at a time, straight from memory. If anything fails, the upload is aborted,
so that the store keeps no parts. A process that dies leaves its parts in the store. A lifecycle rule of the bucket for
incomplete multipart uploads can delete them.

``run`` calls several functions at once, each of which mostly waits for the store. The calling thread and additional
threads each take the next function. The additional threads end with the call. They are daemons: if the store hangs, the
process can still exit.
"""

from __future__ import annotations

import collections
import errno
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gracepoint.checkpoint.storage.objects.http import SOCKET_BLOCK_BYTES, ArrayBody, Exchange, Unreachable
from gracepoint.checkpoint.storage.objects.persistence import Persistence, request_backoff, wait
from gracepoint.checkpoint.storage.objects.provider import (
    ConditionFailed,
    GoOn,
    ObjectApi,
    Transient,
    UploadConflict,
    Uploads,
)
from gracepoint.checkpoint.storage.storage_path import HOT_BYTES, Generation, StaleGeneration, current_limit, ended_by
from gracepoint.threads import NoThread, start_thread

#: Bytes of the parts in which a large range is read. A request takes a round trip, and time for its bytes.
READ_PART_BYTES = 8 << 20
_STREAMS = 8


class ObjectReader:
    """Reads ranges of one object.

    Args:
        api: The requests to the bucket.
        persistence: Makes them.
        key: The object.
        slots: How many additional streams there may be for all readers of the store.

    Attributes:
        size_bytes: Size of the object.
        best_bytes: How many bytes are best read at once.
    """

    def __init__(self, api: ObjectApi, persistence: Persistence, key: str, slots: threading.Semaphore) -> None:
        self._stream = _RangeStream(api, persistence, key)
        self._slots = slots
        self.size_bytes = 0
        self.best_bytes = HOT_BYTES

    def begin(self) -> None:
        """Opens the stream at the start of the object.

        Raises:
            FileNotFoundError: The object does not exist.
        """
        self._stream.open(0, None)
        self.size_bytes = self._stream.size_bytes
        if self.size_bytes >= 2 * READ_PART_BYTES:
            self.best_bytes = self.size_bytes

    def read_into(self, out: memoryview, offset: int) -> int:
        """Reads bytes from ``offset`` into ``out``. Returns the number of bytes read, 0 at the end of the object.

        Raises:
            StaleGeneration: The object was replaced or deleted.
            OSError: The object cannot be read.
        """
        out = out[: max(0, min(len(out), self.size_bytes - offset))]
        if len(out) < 2 * READ_PART_BYTES:
            self._stream.read(out, offset, None)
        else:
            self._read_at_once(out, offset)
        return len(out)

    def close(self) -> None:
        """Ends the stream."""
        self._stream.close()

    def _read_at_once(self, out: memoryview, offset: int) -> None:
        parts = collections.deque(range(0, len(out), READ_PART_BYTES))
        errors: list[BaseException] = []
        limit = current_limit()

        def read(stream: _RangeStream, *, from_the_end: bool) -> None:
            try:
                while not errors:
                    start = parts.pop() if from_the_end else parts.popleft()
                    part = out[start : start + READ_PART_BYTES]
                    stream.read(part, offset + start, offset + start + len(part) if from_the_end else None)
            except IndexError:
                pass  # nothing is left
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                errors.append(error)

        def help_() -> None:
            try:
                with ended_by(limit), self._stream.another() as stream:
                    read(stream, from_the_end=True)
            finally:
                self._slots.release()

        helpers: list[threading.Thread] = []
        while len(helpers) < min(_STREAMS, len(parts)) - 1 and self._slots.acquire(blocking=False):
            helper = threading.Thread(target=help_, name="gracepoint: ranges", daemon=True)
            try:
                start_thread(helper)
            except NoThread:  # the system has no more threads: this one reads the rest
                self._slots.release()
                break
            helpers.append(helper)
        read(self._stream, from_the_end=False)
        # Each helper ends with the part that it reads: after an error no other part is begun. A part has a timeout for
        # each request and each pause between bytes, or the limit.
        for helper in helpers:
            helper.join()
        if errors:
            raise errors[0]


class _RangeStream:
    """Reads one generation of an object. Makes a new request if the position jumps, or if a request breaks."""

    def __init__(self, api: ObjectApi, persistence: Persistence, key: str) -> None:
        self._api = api
        self._persistence = persistence
        self._key = key
        self._generation: Generation | None = None
        self._exchange: Exchange | None = None
        self._position = 0
        self.size_bytes = 0

    def __enter__(self) -> _RangeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def another(self) -> _RangeStream:
        """Returns another stream of the same generation."""
        stream = _RangeStream(self._api, self._persistence, self._key)
        stream._generation, stream.size_bytes = self._generation, self.size_bytes
        return stream

    def read(self, out: memoryview, offset: int, stop: int | None) -> None:
        """Fills ``out`` with bytes from ``offset``. New requests are for bytes up to ``stop``. None: up to the end.

        A reply that breaks is asked for again from the last block on, for as long as a request is. That counts from the
        break, however late it comes, and again from the next one if a whole block has come in between.
        """
        limit, patience_s = current_limit(), self._persistence.patience_s
        pauses, broken_s, filled, since_break = request_backoff(), math.inf, 0, 0
        while filled < len(out):
            if self._exchange is None or self._position != offset + filled:
                self.open(offset + filled, stop)
            assert self._exchange is not None
            try:
                received = self._exchange.read_into(out[filled:])
                if received == 0:
                    raise Unreachable(f"{self._api.url(self._key)}: the reply ended early")
            except (Unreachable, Transient):
                self.close()
                wait_s, now_s = pauses.next_s(), time.monotonic()
                broken_s, since_break = min(broken_s, now_s), 0
                if limit is None and now_s + wait_s > broken_s + patience_s:
                    raise
                wait(wait_s, limit or _nothing)
                continue
            except BaseException:
                self.close()  # part of a block may be lost
                raise
            filled += received
            since_break += received
            self._position += received
            if since_break >= SOCKET_BLOCK_BYTES:
                broken_s = math.inf
                pauses.reset()

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def open(self, first: int, stop: int | None) -> None:
        """Asks for the bytes from ``first`` to ``stop``. None: to the end of the object.

        Raises:
            FileNotFoundError: The object does not exist.
            StaleGeneration: The object was replaced or deleted since the first request.
        """
        self.close()

        def act(exchange: Exchange) -> Exchange:
            stored = self._api.get(exchange, self._key, first, stop, self._generation)
            if self._generation is None:
                self._generation, self.size_bytes = stored.generation, stored.bytes
            return exchange

        try:
            self._exchange = self._persistence.keep(f"GET {self._api.url(self._key)}", act)
        except (ConditionFailed, FileNotFoundError) as error:
            # gs:// does not have the generation any more, and so answers as if the object did not exist.
            if self._generation is None:
                raise
            raise StaleGeneration(
                errno.ESTALE, "the object was replaced or deleted while it was read", self._api.url(self._key)
            ) from error
        self._position = first


def _nothing() -> None:
    pass


def run(acts: Sequence[Callable[[], object]], *, threads: int) -> None:
    """Calls all of ``acts``. After an error no more of them are called. Raises it when those that run have ended."""
    numbers = itertools.count()  # each call takes one number, in any thread
    errors: list[BaseException] = []
    limit = current_limit()

    def help_() -> None:
        with ended_by(limit):
            work()

    def work() -> None:
        while not errors and (number := next(numbers)) < len(acts):
            try:
                acts[number]()
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                errors.append(error)

    helpers = []
    for number in range(1, min(len(acts), threads)):
        helper = threading.Thread(target=help_, name=f"gracepoint: requests {number}", daemon=True)
        try:
            start_thread(helper)
        except NoThread:  # the system has no more threads: the others do the work
            break
        helpers.append(helper)
    work()
    # Each helper ends with the function that it runs. A request of a function ends with its timeout or with the limit.
    # A call to a file system ends when the kernel returns: it has no other bound, in this thread either.
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


logger = logging.getLogger(__name__)

#: Bytes of a part, unless there would be too many.
WRITE_PART_BYTES = 64 << 20
_MOST_PARTS = 10_000
_MIB = 1 << 20
_AT_ONCE = 4
_TRIES = 3
_ABORT_S = 5.0
_ABORTS_EVERY_S = 0.2


class Run(Protocol):
    """``Persistence.run``, to which ``go_on`` and ``patient`` are given already."""

    def __call__(self, subject: str, act: Any, *, kind: str, size_bytes: int = 0, hedge: bool = True) -> Any: ...


def part_bytes(size_bytes: int) -> int:
    """Returns the size of the parts of an object: in whole MiB, and so that there are at most as many as S3 allows."""
    return max(WRITE_PART_BYTES, -(-size_bytes // (_MOST_PARTS * _MIB)) * _MIB)


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
    """Writes an object, and returns its generation. See ``ObjectPath.write``.

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
    """One upload that has begun. The threads of ``run`` send its parts."""

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
        run(acts, threads=_AT_ONCE)
        parts = [self._parts[number] for number in sorted(self._parts)]
        generation: Generation = self._run(
            f"POST {self._url}",
            lambda exchange: self._uploads.complete(exchange, self._key, self._upload, parts, only_if),
            kind="complete",
            hedge=False,
        )
        return generation

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
