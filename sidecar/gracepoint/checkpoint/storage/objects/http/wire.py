"""One socket to a server, with or without TLS. Its sends and reads end early if another thread wants that.

A ``Wire`` stands where ``http.client`` expects a socket. It belongs to one ``Exchange`` at a time (``user``), whose
thread sends and reads. Another thread may call ``abort`` only. Sends and reads are slices of ``LOOK_EVERY_S``: between
them the user is asked whether to go on (``look``). Without any progress for ``stall_s`` they raise TimeoutError.

``connect`` looks the server's name up, connects and does the TLS handshake in a thread of its own ("gracepoint:
connecting", a daemon), as some of these calls cannot be interrupted. If the caller no longer waits, that thread closes
the connection, and ends when the system's calls return. The lock keeps ``abort`` from a socket that is being closed:
the system may give the number of a closed socket to another one.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import threading
import time
from typing import Any, Protocol

#: Seconds without any progress after which a connection counts as dead.
STALL_S = 10.0
#: Seconds between two looks at whether to go on.
LOOK_EVERY_S = 0.1


class User(Protocol):
    """Who uses a wire."""

    def look(self) -> None:
        """Raises an error if the wire must not be used any more."""


class Wire:
    """See the module.

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
        self.user: User | None = None
        self.stall_s = STALL_S
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(LOOK_EVERY_S)

    def abort(self) -> None:
        """Ends all sends and reads, from any thread."""
        with self._lock, contextlib.suppress(OSError):
            # SSLSocket's own shutdown takes TLS off the socket: its owner would then read and send in plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def sendall(self, data: bytes | memoryview) -> None:
        left = memoryview(data).cast("B")
        since_s = self._begin()
        while left:
            try:
                sent = self._sock.send(left)
            except TimeoutError:
                self._look(since_s)
                continue
            left, since_s = left[sent:], time.monotonic()
            self._look(None)

    def recv_into(self, out: memoryview) -> int:
        since_s = self._begin()
        while True:
            try:
                got = self._sock.recv_into(out)
            except TimeoutError:
                self._look(since_s)
                continue
            assert self.user is not None
            self._look(None)
            return got

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
        """Asks the user whether to go on. ``since_s`` is when the last progress was made. None: just now."""
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
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_given_up = False

    def run(self) -> None:
        try:
            self.connection.connect()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self.error = error
        with self._lock:
            self.ended.set()
            if self._is_given_up:
                self.connection.close()

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            if self.ended.is_set():
                self.connection.close()


def connect(connection: http.client.HTTPConnection, user: User) -> Wire:
    """Connects ``connection``, and puts a ``Wire`` in the place of its socket.

    Raises:
        OSError: It is not connected within ``STALL_S``, or cannot be.
    """
    attempt = _Attempt(connection)
    try:
        threading.Thread(target=attempt.run, name="gracepoint: connecting", daemon=True).start()
    except RuntimeError:  # the system has no more threads, or the interpreter is about to end
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
