"""An object that is open for reading. It is read as one stream as long as the caller reads in order.

All ranges are of one generation of the object. If the stream breaks or stalls, another request goes on where it
ended. A reader belongs to one thread.
"""

from __future__ import annotations

import time

from gracepoint.checkpoint.storage.backend import Generation
from gracepoint.checkpoint.storage.objects.api import ConditionFailed, ObjectApi
from gracepoint.checkpoint.storage.objects.connection import Exchange, Unreachable
from gracepoint.checkpoint.storage.objects.persistence import Persistence, RequestPauses, Transient, wait


class ObjectReader:
    """Reads ranges of one object.

    Attributes:
        size_bytes: Size of the object.
    """

    def __init__(self, api: ObjectApi, persistence: Persistence, key: str) -> None:
        self._api = api
        self._persistence = persistence
        self._key = key
        self._generation: Generation | None = None
        self._stream: Exchange | None = None
        self._position = 0  # of the stream
        self.size_bytes = 0

    def begin(self) -> None:
        """Opens the stream at the begin of the object.

        Raises:
            FileNotFoundError: The object does not exist.
        """
        self._open(0)

    def read_into(self, out: memoryview, offset: int) -> int:
        """Reads bytes from ``offset`` into ``out``. Returns the number of bytes read, 0 at the end of the object.

        Raises:
            OSError: The object was replaced, or cannot be read.
        """
        wanted = max(0, min(len(out), self.size_bytes - offset))
        done, until_s, pauses = 0, time.monotonic() + self._persistence.patience_s, RequestPauses()
        while done < wanted:
            if self._stream is None or self._position != offset + done:
                self._open(offset + done)
            assert self._stream is not None
            try:
                got = self._stream.read_into(out[done:wanted])
                if got == 0:
                    raise Unreachable(f"{self._api.url(self._key)}: the reply ended early")
            except (Unreachable, Transient):
                self.close()
                wait_s = pauses.next_s()
                if time.monotonic() + wait_s > until_s:
                    raise
                wait(wait_s, lambda: None)
                continue
            done += got
            self._position += got
        return done

    def close(self) -> None:
        """Ends the stream."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open(self, first: int) -> None:
        self.close()

        def act(exchange: Exchange) -> Exchange:
            found = self._api.get(exchange, self._key, first, None, self._generation)
            if self._generation is None:
                self._generation, self.size_bytes = found.generation, found.bytes
            return exchange

        try:
            self._stream = self._persistence.keep(f"GET {self._api.url(self._key)}", act)
        except ConditionFailed as error:
            raise OSError(f"{self._api.url(self._key)} was replaced while it was read") from error
        self._position = first
