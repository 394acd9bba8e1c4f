"""HTTP requests, each of which any thread can end, and the connections that they take.

An ``Exchange`` is one request and its reply. It belongs to the thread that made it, which alone sends and reads. Other
threads may call only ``abort``, which shuts the socket down, so that the owner returns at once with an error.

Where ``http.client`` expects a socket, it gets a ``Wire``, which belongs to one exchange at a time. Sends and reads are
slices of ``LOOK_EVERY_S``, and so is the wait for a connection. Between them the exchange is asked whether to continue
(``look``), and asks its owner's ``go_on``: an error that this raises ends it. A connection without any progress for
``STALL_S`` ends. A lock keeps ``abort`` from a socket that is being closed: the system may give the number of a closed
socket to another one.

``connect`` looks the server's name up, connects and does the TLS handshake in a separate thread ("gracepoint:
connecting", a daemon), as some of these calls cannot be interrupted. If the caller no longer waits, that thread closes
the connection, and ends when the system's calls return. There are no other threads.

A ``Connections`` belongs to one server, and any thread uses it. ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and
``NO_PROXY`` are honoured for HTTPS, which goes through a tunnel. Requests by plain HTTP go to the server directly.

A ``Body`` is what a request sends: bytes, or an array where it is. It can be sent several times, and by several threads
at once. The standard library alone is needed.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import dataclasses
import http.client
import io
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.buffers import BLOCK_BYTES, Buffer
from gracepoint.checksum import crc32
from gracepoint.threads import Ending, NoThread, forget_in_child, start_thread

#: Seconds without any progress after which a connection counts as dead.
STALL_S = 10.0
#: Seconds between two looks at whether to continue.
LOOK_EVERY_S = 0.1


class Wire:
    """A socket to a server, with or without TLS, whose sends and reads another thread can end.

    Attributes:
        user: The exchange that uses it now.
        stall_s: Seconds without any progress after which a send or a read fails.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._streams = 0  # replies that are still being read
        self._is_closed = False
        self._looked_s = time.monotonic()
        self.user: Exchange | None = None
        self.stall_s = STALL_S
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(LOOK_EVERY_S)

    def abort(self) -> None:
        """Ends all sends and reads, from any thread."""
        with self._lock, contextlib.suppress(OSError):
            # SSLSocket's own shutdown takes TLS off the socket: its owner would then read and send in plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def sendall(self, data: bytes | memoryview) -> None:
        unsent = memoryview(data).cast("B")
        since_s = self._begin()
        while unsent:
            try:
                sent_bytes = self._sock.send(unsent)
            except TimeoutError:
                self._look(since_s)
                continue
            unsent, since_s = unsent[sent_bytes:], time.monotonic()
            self._look(None)

    def recv_into(self, out: memoryview) -> int:
        since_s = self._begin()
        while True:
            try:
                received = self._sock.recv_into(out)
            except TimeoutError:
                self._look(since_s)
                continue
            assert self.user is not None
            self._look(None)
            return received

    def makefile(self, mode: str) -> io.BufferedReader:
        with self._lock:
            self._streams += 1
        return io.BufferedReader(_Stream(self))

    def close(self) -> None:
        """Closes the socket, when no reply is being read any more."""
        with self._lock:
            self._is_closed = True
            if not self._streams:
                self._sock.close()

    def stream_ended(self) -> None:
        with self._lock:
            self._streams -= 1
            if self._is_closed and not self._streams:
                self._sock.close()

    def _begin(self) -> float:
        self._look(None)
        return time.monotonic()

    def _look(self, since_s: float | None) -> None:
        """Asks the user whether to continue. ``since_s`` is when the last progress was made. None: just now."""
        assert self.user is not None
        self.user.look()
        if since_s is not None and time.monotonic() - since_s >= self.stall_s:
            raise TimeoutError(f"no progress within {self.stall_s:.1f} s")


class _Stream(io.RawIOBase):
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        return self._wire.recv_into(memoryview(out))

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._wire.stream_ended()


class _Attempt:
    """What the thread that connects and the one that waits for it share."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self.ended = Ending()
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_given_up = False

    def run(self) -> None:
        try:
            self.connection.connect()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self.error = error
        with self._lock:
            self.ended.end()
            if self._is_given_up:
                self.connection.close()

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            if self.ended.ended:
                self.connection.close()


def connect(connection: http.client.HTTPConnection, user: Exchange) -> Wire:
    """Connects ``connection``, and puts a ``Wire`` in the place of its socket.

    Raises:
        OSError: It is not connected within ``STALL_S``, or cannot be.
    """
    attempt = _Attempt(connection)
    try:
        start_thread(threading.Thread(target=attempt.run, name="gracepoint: connecting", daemon=True))
    except NoThread:  # the system has no more threads, or the interpreter is about to end
        attempt.run()
    until_s = time.monotonic() + STALL_S
    try:
        while not attempt.ended.wait(LOOK_EVERY_S):
            user.look()
            if time.monotonic() > until_s:
                raise TimeoutError(f"not connected within {STALL_S:.0f} s")
        if attempt.error is not None:
            raise attempt.error
        user.look()
    except BaseException:
        attempt.give_up()
        raise
    assert connection.sock is not None
    wire = Wire(connection.sock)
    connection.sock = wire
    return wire


#: Bytes of one send or read.
SOCKET_BLOCK_BYTES = 1 << 18
_CONNECT_S = 3.0  # for one address: a server can have several, of which some do not answer
# Servers close connections that are idle for longer. A request on a closed connection costs a round trip.
_IDLE_S = 20.0
_KEPT = 64
_PORTS = {"http": 80, "https": 443}


class Connections:
    """The connections to one server.

    Args:
        url: Scheme, host and port of the server.
        authorities: A file of the certificates to trust. None: those of the system, or of ``SSL_CERT_FILE``.

    Attributes:
        host: Host and port as they stand in the header ``Host``: in lower case, and without the default port.
        url: Scheme, host and port.
    """

    def __init__(self, url: str, authorities: str | None = None) -> None:
        self._where: SplitResult = urlsplit(url)
        scheme, hostname = self._where.scheme, self._where.hostname
        if scheme not in _PORTS or not hostname:
            raise ValueError(f"{url!r}: expected http:// or https:// with a host")
        if self._where.path not in ("", "/") or self._where.query or self._where.fragment:
            raise ValueError(f"{url!r}: expected a server alone, without a path: requests could not be signed")
        if self._where.username is not None:
            raise ValueError("the URL of a server has a user: expected it without, as credentials have settings")
        name = f"[{hostname}]" if ":" in hostname else hostname
        port = self._where.port
        self.host = name if port in (None, _PORTS[scheme]) else f"{name}:{port}"
        self.url = f"{scheme}://{self.host}"
        self._authorities = authorities
        self._lock = threading.Lock()
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._tls: ssl.SSLContext | None = None
        forget_in_child(self, Connections._forget)

    def _forget(self) -> None:
        """In a forked child: the idle connections are its parent's, whose requests would get the child's replies."""
        self._lock = threading.Lock()
        self.close()

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """Returns a connection, and whether it was used before. If it was not, it is not connected yet."""
        with self._lock:
            while self._idle:
                since_s, connection = self._idle.pop()
                if time.monotonic() - since_s < _IDLE_S:
                    return connection, True
                connection.close()
        return self.new(), False

    def new(self) -> http.client.HTTPConnection:
        """Returns a connection that is not connected yet."""
        hostname, port = str(self._where.hostname), self._where.port
        if self._where.scheme == "http":
            return http.client.HTTPConnection(hostname, port, timeout=_CONNECT_S, blocksize=SOCKET_BLOCK_BYTES)
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._authorities)
        proxies = {} if urllib.request.proxy_bypass(self.host) else urllib.request.getproxies()
        proxy = proxies.get("https") or proxies.get("all")
        if not proxy:
            return http.client.HTTPSConnection(hostname, port, timeout=_CONNECT_S, context=self._tls)
        way = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if way.scheme != "http" or not way.hostname:
            raise ValueError("HTTPS_PROXY: expected http:// with a host and a port")
        connection = http.client.HTTPSConnection(way.hostname, way.port or 80, timeout=_CONNECT_S, context=self._tls)
        headers = {}
        if way.username is not None:
            user = f"{unquote(way.username)}:{unquote(way.password or '')}"
            headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        connection.set_tunnel(hostname, port or _PORTS["https"], headers)
        return connection

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


_servers: dict[tuple[str, str | None], Connections] = {}
_servers_lock = threading.Lock()


def connections_to(url: str, authorities: str | None = None) -> Connections:
    """Returns the connections of this process to a server. They are closed at the end of the process."""
    with _servers_lock:
        if not _servers:
            atexit.register(close_idle_connections)
        if (url, authorities) not in _servers:
            _servers[url, authorities] = Connections(url, authorities)
        return _servers[url, authorities]


def close_idle_connections() -> None:
    """Closes the connections of this process, to all servers, that no request uses."""
    for connections in list(_servers.values()):
        connections.close()


def _renew_lock() -> None:
    global _servers_lock
    _servers_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it


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
        for start in range(0, len(self._data), SOCKET_BLOCK_BYTES):
            yield self._data[start : start + SOCKET_BLOCK_BYTES]


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
        """Reads the next block of the reply into ``out``. Returns the number of bytes, 0 at the end of the reply.

        Raises:
            Unreachable: The connection broke.
        """
        assert self._reply is not None
        try:
            return self._reply.readinto(out[:SOCKET_BLOCK_BYTES])
        except (OSError, http.client.HTTPException) as error:
            self._raise(error)

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
        reason = str(error) if isinstance(error, TimeoutError) else f"{error!r}"
        raise Unreachable(f"{self._connections.url}: {reason}") from error


def _is_closed(error: Exception) -> bool:
    return isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)


class ArrayBody:
    """The bytes of an array. If they are not in place, each sender copies them block by block.

    Args:
        data: The array.
        first: The first byte that is sent.
        stop: The byte after the last one. None: the end of the array.
    """

    def __init__(self, data: ArrayBytes, first: int = 0, stop: int | None = None) -> None:
        self._data = data
        self._first = first
        self._stop = len(data) if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._first

    def part(self, first: int, stop: int) -> ArrayBody:
        """Returns the part from ``first`` to ``stop``, which must be boundaries of values."""
        return ArrayBody(self._data, self._first + first, self._first + stop)

    def crc32(self) -> int:
        """Returns the CRC-32 of the bytes."""
        checksum = 0
        for block in self.blocks():
            checksum = crc32(block, checksum)
        return checksum

    def blocks(self) -> Iterable[memoryview]:
        """Yields the bytes in order."""
        if self._data.in_place is not None:
            yield from Bytes(self._data.in_place.data[self._first : self._stop]).blocks()
            return
        buffer = Buffer().bytes
        for offset in range(self._first, self._stop, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, self._stop - offset)]
            self._data.copy(offset, block)
            yield from Bytes(block.data).blocks()
