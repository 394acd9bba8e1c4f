"""HTTP requests on connections that are kept open, each of which any thread can end.

A ``Connections`` belongs to one server, and any thread uses it. An ``Exchange`` is one request and its reply. It
belongs to the thread that made it, which alone sends and reads. Other threads may call only ``abort``. It shuts the
socket down, so that the owner returns at once with an error.

Every send and every read has a timeout (``STALL_S``). So a connection that stalls ends, whatever the other side does.
There are no threads here.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

#: Seconds without any progress after which a connection counts as dead.
STALL_S = 10.0
_CONNECT_S = 5.0
# Servers close connections that are idle for longer. A request on a closed connection costs a round trip.
_IDLE_S = 20.0
_KEPT = 64
_BLOCK_BYTES = 1 << 18
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
        for start in range(0, len(self._data), _BLOCK_BYTES):
            yield self._data[start : start + _BLOCK_BYTES]


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


class Connections:
    """The connections to one server.

    Args:
        url: Scheme, host and port of the server.
    """

    def __init__(self, url: str) -> None:
        self._where: SplitResult = urlsplit(url)
        if self._where.scheme not in ("http", "https") or not self._where.hostname:
            raise ValueError(f"{url!r}: expected http:// or https:// with a host")
        self._lock = threading.Lock()
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._tls: ssl.SSLContext | None = None

    @property
    def host(self) -> str:
        """Host and port as they stand in the header ``Host``."""
        return self._where.netloc.rpartition("@")[2]

    @property
    def url(self) -> str:
        """Scheme, host and port."""
        return f"{self._where.scheme}://{self.host}"

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """Returns a connection, and whether it was used before."""
        with self._lock:
            while self._idle:
                since_s, connection = self._idle.pop()
                if time.monotonic() - since_s < _IDLE_S:
                    return connection, True
                connection.close()
        hostname, port = str(self._where.hostname), self._where.port
        if self._where.scheme == "http":
            return http.client.HTTPConnection(hostname, port, timeout=_CONNECT_S, blocksize=_BLOCK_BYTES), False
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
        return http.client.HTTPSConnection(hostname, port, timeout=_CONNECT_S, context=self._tls), False

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keeps a connection for the next request. Its reply must have been read to the end."""
        with self._lock:
            if len(self._idle) < _KEPT:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def close(self) -> None:
        """Closes the connections that no request uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()


_servers: dict[str, Connections] = {}
_servers_lock = threading.Lock()


def connections_to(url: str) -> Connections:
    """Returns the connections of this process to a server. They are closed at the end of the process."""
    with _servers_lock:
        if not _servers:
            atexit.register(_close_all)
        if url not in _servers:
            _servers[url] = Connections(url)
        return _servers[url]


def _close_all() -> None:
    for connections in list(_servers.values()):
        connections.close()


class Exchange:
    """One request and its reply.

    Attributes:
        status: The status of the reply.
        headers: The headers of the reply, in lower case.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._connection: http.client.HTTPConnection | None = None
        self._reply: http.client.HTTPResponse | None = None
        self._aborted = False
        self.status = 0
        self.headers: dict[str, str] = {}

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abort(self) -> None:
        """Ends the exchange, from any thread. Its owner gets ``Unreachable``."""
        self._aborted = True
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def send(self, request: Request, go_on: Callable[[], None]) -> None:
        """Sends ``request``, and waits for the head of the reply.

        Args:
            request: The request.
            go_on: Called before each block of the body. An error that it raises ends the exchange.

        Raises:
            Unreachable: There is no reply.
        """
        self._connection, reused = self._connections.take()
        try:
            self._send(self._connection, request, go_on)
        except (OSError, http.client.HTTPException) as error:
            if reused and not self._aborted and _is_closed(error):
                # The server had closed the connection. A new one is tried at once.
                self._connection.close()
                while reused:
                    self._connection, reused = self._connections.take()
                    if reused:
                        self._connection.close()
                try:
                    self._send(self._connection, request, go_on)
                    return
                except (OSError, http.client.HTTPException) as again:
                    error = again
            raise self._unreachable(error) from error

    def _send(self, connection: http.client.HTTPConnection, request: Request, go_on: Callable[[], None]) -> None:
        if connection.sock is None:
            connection.connect()
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sock.settimeout(STALL_S)
        if self._aborted:
            raise ConnectionAbortedError("another request was faster")
        connection.putrequest(request.method, request.target, skip_accept_encoding=True)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        length = 0 if request.body is None else len(request.body)
        if length or request.method in ("PUT", "POST"):
            connection.putheader("Content-Length", str(length))
        try:
            connection.endheaders()
            if request.body is not None:
                for block in request.body.blocks():
                    go_on()
                    connection.send(block)
        except (BrokenPipeError, ConnectionResetError):
            # A server may refuse a request before it has all of it. Then the reply says why.
            connection.sock.settimeout(_FAILED_S)
            self._receive(connection)
            self._drop = True
            return
        self._receive(connection)

    def _receive(self, connection: http.client.HTTPConnection) -> None:
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
            raise self._unreachable(error) from error

    def read_into(self, out: memoryview) -> int:
        """Reads into ``out`` until it is full or the reply ends. Returns the number of bytes.

        Raises:
            Unreachable: The connection broke.
        """
        assert self._reply is not None
        count = 0
        try:
            while count < len(out):
                got = self._reply.readinto(out[count : count + _BLOCK_BYTES])
                if got == 0:
                    break
                count += got
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        return count

    _drop = False

    def close(self) -> None:
        """Keeps the connection if the reply was read to the end, else closes it."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        reply = self._reply
        if reply is not None and reply.isclosed() and not reply.will_close and not self._drop and not self._aborted:
            self._connections.give_back(connection)
        else:
            connection.close()

    def _unreachable(self, error: Exception) -> Unreachable:
        what = f"no reply within {STALL_S:.0f} s" if isinstance(error, TimeoutError) else f"{error!r}"
        return Unreachable(f"{self._connections.url}: {what}")


def _is_closed(error: Exception) -> bool:
    return isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError)
