"""An object that is open for reading.

All ranges are of one generation of the object. A reader belongs to one thread. What that thread asks for in order is
read as one stream. A large range is read by several streams: the thread's own stream goes on from the start of the
range, and additional threads ("gracepoint: ranges", daemons) read parts from its end. They end with the call. All
readers of a store share a bound on the number of these threads.

If a stream breaks or stalls, another request goes on where it ended.
"""

from __future__ import annotations

import collections
import errno
import threading
import time

from gracepoint.checkpoint.storage import time_limit
from gracepoint.checkpoint.storage.backend import HOT_BYTES, Generation, StaleGeneration
from gracepoint.checkpoint.storage.objects.http.connection import Exchange, Unreachable
from gracepoint.checkpoint.storage.objects.http.persistence import Persistence, RequestPauses, wait
from gracepoint.checkpoint.storage.objects.http.request_errors import ConditionFailed, Transient
from gracepoint.checkpoint.storage.objects.providers.api import ObjectApi

#: Bytes of the parts in which a large range is read. A request takes a round trip, and time for its bytes.
PART_BYTES = 8 << 20
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
        if self.size_bytes >= 2 * PART_BYTES:
            self.best_bytes = self.size_bytes

    def read_into(self, out: memoryview, offset: int) -> int:
        """Reads bytes from ``offset`` into ``out``. Returns the number of bytes read, 0 at the end of the object.

        Raises:
            StaleGeneration: The object was replaced or deleted.
            OSError: The object cannot be read.
        """
        out = out[: max(0, min(len(out), self.size_bytes - offset))]
        if len(out) < 2 * PART_BYTES:
            self._stream.read(out, offset, None)
        else:
            self._read_at_once(out, offset)
        return len(out)

    def close(self) -> None:
        """Ends the stream."""
        self._stream.close()

    def _read_at_once(self, out: memoryview, offset: int) -> None:
        parts = collections.deque(range(0, len(out), PART_BYTES))
        errors: list[BaseException] = []
        limit = time_limit.current()

        def read(stream: _RangeStream, *, from_the_end: bool) -> None:
            try:
                while not errors:
                    start = parts.pop() if from_the_end else parts.popleft()
                    part = out[start : start + PART_BYTES]
                    stream.read(part, offset + start, offset + start + len(part) if from_the_end else None)
            except IndexError:
                pass  # nothing is left
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                errors.append(error)

        def help_() -> None:
            try:
                with time_limit.ended_by(limit), self._stream.another() as stream:
                    read(stream, from_the_end=True)
            finally:
                self._slots.release()

        helpers: list[threading.Thread] = []
        while len(helpers) < min(_STREAMS, len(parts)) - 1 and self._slots.acquire(blocking=False):
            helper = threading.Thread(target=help_, name="gracepoint: ranges", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # the system has no more threads: this one reads the rest
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
        """Fills ``out`` with bytes from ``offset``. New requests are for bytes up to ``stop``. None: up to the end."""
        done, until_s, pauses = 0, time.monotonic() + self._persistence.patience_s, RequestPauses()
        while done < len(out):
            if self._exchange is None or self._position != offset + done:
                self.open(offset + done, stop)
            assert self._exchange is not None
            try:
                got = self._exchange.read_into(out[done:])
                if got == 0:
                    raise Unreachable(f"{self._api.url(self._key)}: the reply ended early")
            except (Unreachable, Transient):
                self.close()
                wait_s = pauses.next_s()
                if time.monotonic() + wait_s > until_s:
                    raise
                wait(wait_s, time_limit.current() or _nothing)
                continue
            done += got
            self._position += got

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
            found = self._api.get(exchange, self._key, first, stop, self._generation)
            if self._generation is None:
                self._generation, self.size_bytes = found.generation, found.bytes
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
