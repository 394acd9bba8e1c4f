"""HTTP requests, each of which any thread can end.

An ``Exchange`` is one request and its reply. It belongs to the thread that made it, which alone sends and reads. Other
threads may call only ``abort``. It shuts the socket down, so that the owner returns at once with an error.

A connection without any progress for ``STALL_S`` ends. A request that makes slow progress ends when ``go_on`` raises an
error. ``go_on`` is called about every ``LOOK_EVERY_S``, also while the request connects, sends and waits (``wire``).

This module has no threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn, Protocol

from gracepoint.checkpoint.storage.objects.http.connection_pool import BLOCK_BYTES, Connections
from gracepoint.checkpoint.storage.objects.http.wire import LOOK_EVERY_S, Wire, connect

_FAILED_S = 0.5  # for a reply that came while the request was still being sent


class Body(Protocol):
    """What a request sends. It can be sent several times, and by several threads at once."""

    def __len__(self) -> int:
        """Returns the number of bytes."""

    def blocks(self) -> Iterable[memoryview]:
        """Yields the bytes in order."""


class Bytes:
    """A body that is in memory."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    def __len__(self) -> int:
        return len(self._data)

    def blocks(self) -> Iterable[memoryview]:
        for start in range(0, len(self._data), BLOCK_BYTES):
            yield self._data[start : start + BLOCK_BYTES]


@dataclasses.dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        method: The method.
        target: Path and query, encoded.
        headers: All headers but ``Host`` and ``Content-Length``.
        body: What is sent. None: nothing.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: Body | None = None


class Unreachable(OSError):
    """No reply came, or only a part of one. Whether the server carried the request out is not known."""


class Exchange:
    """One request and its reply.

    Attributes:
        status: The status of the reply.
        headers: The headers of the reply, in lower case.
        go_on: Called again and again by the owner. An error that it raises ends the exchange, and is raised.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._connection: http.client.HTTPConnection | None = None
        self._reply: http.client.HTTPResponse | None = None
        self._drop = False
        self._lock = threading.Lock()  # protects what ``abort`` uses
        self._wire: Wire | None = None
        self._is_aborted = False
        self._looked_s = 0.0
        self._ended_by: BaseException | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.go_on: Callable[[], None] = lambda: None

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abort(self) -> None:
        """Ends the exchange, from any thread. Its owner gets ``Unreachable``."""
        with self._lock:
            self._is_aborted = True
            if self._wire is not None:
                self._wire.abort()

    def look(self) -> None:
        """Raises an error if the exchange must end. The owner's sends and reads call it."""
        if self._is_aborted:
            raise ConnectionAbortedError("another request was faster")
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            try:
                self.go_on()
            except BaseException as error:
                self._ended_by = error
                raise

    def send(self, request: Request) -> None:
        """Sends ``request``, and waits for the head of the reply.

        Raises:
            Unreachable: There is no reply.
        """
        self._connection, reused = self._connections.take()
        try:
            try:
                self._send(self._connection, request)
            except (OSError, http.client.HTTPException) as error:
                if not reused or self._is_aborted or not _is_closed(error):
                    raise
                # The server had closed the connection, which was idle. The other idle ones are about as old, so a new
                # connection is made.
                self._connection.close()
                self._connection = self._connections.new()
                self._send(self._connection, request)
        except (OSError, http.client.HTTPException) as error:
            self._raise(error)

    def _send(self, connection: http.client.HTTPConnection, request: Request) -> None:
        wire = connection.sock
        if wire is None:
            wire = connect(connection, self)
        assert isinstance(wire, Wire)
        wire.user = self
        with self._lock:
            self._wire = wire
        self.look()
        connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", self._connections.host)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        length = 0 if request.body is None else len(request.body)
        if length or request.method in ("PUT", "POST"):
            connection.putheader("Content-Length", str(length))
        try:
            connection.endheaders()
            if request.body is not None:
                for block in request.body.blocks():
                    connection.send(block)
        except (BrokenPipeError, ConnectionResetError):
            # A server may refuse a request before it has all of it. Then the reply says why.
            wire.stall_s = _FAILED_S
            self._drop = True
        self._reply = connection.getresponse()
        self.status = self._reply.status
        self.headers = {name.lower(): value for name, value in self._reply.getheaders()}

    def read(self) -> bytes:
        """Returns the rest of the reply.

        Raises:
            Unreachable: The connection broke.
        """
        assert self._reply is not None
        try:
            return self._reply.read()
        except (OSError, http.client.HTTPException) as error:
            self._raise(error)

    def read_into(self, out: memoryview) -> int:
        """Reads into ``out`` until it is full or the reply ends. Returns the number of bytes.

        Raises:
            Unreachable: The connection broke.
        """
        assert self._reply is not None
        count = 0
        try:
            while count < len(out):
                got = self._reply.readinto(out[count : count + BLOCK_BYTES])
                if got == 0:
                    break
                count += got
        except (OSError, http.client.HTTPException) as error:
            self._raise(error)
        return count

    def close(self) -> None:
        """Keeps the connection if the reply was read to the end, else closes it."""
        with self._lock:
            self._wire = None  # from here on, ``abort`` does not reach the connection
        connection, self._connection = self._connection, None
        if connection is None:
            return
        reply = self._reply
        if reply is not None and reply.isclosed() and not reply.will_close and not self._drop and not self._is_aborted:
            self._connections.give_back(connection)
        else:
            if reply is not None:
                with contextlib.suppress(OSError):
                    reply.close()
            connection.close()

    def _raise(self, error: Exception) -> NoReturn:
        if error is self._ended_by:
            raise error
        what = str(error) if isinstance(error, TimeoutError) else f"{error!r}"
        raise Unreachable(f"{self._connections.url}: {what}") from error


def _is_closed(error: Exception) -> bool:
    return isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
