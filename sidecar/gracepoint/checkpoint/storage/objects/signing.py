"""What a request needs besides HTTP: a socket that can be ended, credentials, and the errors of a store's answers.

A ``Wire`` stands where ``http.client`` expects a socket, with or without TLS. It belongs to one ``Exchange`` at a time
(``user``), whose thread sends and reads. Another thread may call ``abort`` only. Sends and reads are slices of
``LOOK_EVERY_S``: between them the user is asked whether to continue (``look``). Without any progress for ``stall_s``
they raise TimeoutError.

``connect`` looks the server's name up, connects and does the TLS handshake in a separate thread ("gracepoint:
connecting", a daemon), as some of these calls cannot be interrupted. If the caller no longer waits, that thread closes
the connection, and ends when the system's calls return. The lock keeps ``abort`` from a socket that is being closed:
the system may give the number of a closed socket to another one.

``Renewed`` credentials are renewed before they expire. A thread ("gracepoint: credentials", a daemon) finds and renews
them, one at a time for each ``Renewed``. It lives as long as the call into the cloud's library, which can take minutes,
and which nothing can interrupt. A request waits for the thread only if there are no valid credentials, and only as long
as the request has time. The lock guards all attributes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import http.client
import io
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from gracepoint.checkpoint.storage.backend import NotAdmitted
from gracepoint.errors import SettingsError
from gracepoint.threads import DaemonThread

#: Seconds without any progress after which a connection counts as dead.
STALL_S = 10.0
#: Seconds between two looks at whether to continue.
LOOK_EVERY_S = 0.1


class User(Protocol):
    """Who uses a wire."""

    def look(self) -> None:
        """Raises an error if the wire must not be used any more."""


class Wire:
    """A socket to a server, whose sends and reads another thread can end.

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


class Transient(OSError):
    """The store did not carry the request out, and may do so later.

    Attributes:
        after_s: Seconds to wait at least, as the store asks. 0 if it does not ask.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(errno.EAGAIN, message)
        self.after_s = after_s


class ConditionFailed(OSError):
    """The object does not have the generation that a request asked for. Or the upload of the request has ended."""


class UploadConflict(OSError):
    """Another writer interfered with the end of an upload. The upload must be made again."""


logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Credentials are renewed when they are valid for less than this.
RENEW_BEFORE_S = 300.0
_USED_UP_S = 5.0  # credentials that are valid for less than this are not sent any more
_PAUSE_S = 1.0  # after a renewal that failed


@dataclasses.dataclass(frozen=True)
class StoreCredentials(Generic[T]):
    """Credentials that were found.

    Attributes:
        value: What is sent.
        lasts: Returns whether they are still valid after so many seconds.
    """

    value: T
    lasts: Callable[[float], bool]


class Renewed(Generic[T]):
    """The credentials for one store. Any thread uses them.

    Args:
        what: What they are, for messages.
        find: Finds or renews them. It may take minutes. Its argument is whether the server refused the last ones.
    """

    def __init__(self, subject: str, find: Callable[[bool], StoreCredentials[T]]) -> None:
        self._what = subject
        self._find = find
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._found: StoreCredentials[T] | None = None
        self._found_s = float("-inf")
        self._is_refused = False
        self._renewing: DaemonThread | None = None
        self._error: Exception | None = None  # of the last renewal
        self._failed_s = float("-inf")

    def get(self, go_on: Callable[[], None]) -> T:
        """Returns valid credentials. While it waits for them, it calls ``go_on``, whose error ends the wait.

        Raises:
            NotAdmitted: There are none.
            Transient: They could not be renewed yet.
        """
        until_s = time.monotonic() + STALL_S
        is_begun = False
        while True:
            with self._lock:
                if self._found is not None and self._found.lasts(RENEW_BEFORE_S):
                    return self._found.value
                if not self._is_renewing and time.monotonic() - self._failed_s >= _PAUSE_S and not is_begun:
                    is_begun = True
                    self._begin()
                if self._found is not None and self._found.lasts(_USED_UP_S):
                    return self._found.value
                if not self._is_renewing:
                    if self._error is None:  # what was found is about to expire, and nothing else is to be had
                        raise Transient(f"{self._what}: what was found has expired")
                    self._raise(self._error)
                self._changed.wait(LOOK_EVERY_S)
            go_on()
            if time.monotonic() > until_s:
                raise Transient(f"{self._what}: they are being renewed for longer than {STALL_S:.0f} s")

    def refused(self, value: T) -> bool:
        """Notes that the server refused credentials. Returns whether others may help: then ``get`` renews them."""
        with self._lock:
            if self._found is None or self._found.value != value:
                return True
            if time.monotonic() - self._found_s < RENEW_BEFORE_S:
                return False
            self._found, self._is_refused = None, True
            return True

    @property
    def _is_renewing(self) -> bool:
        # As the thread says: one whose start was interrupted may never run.
        return self._renewing is not None and not self._renewing.ended

    def _begin(self) -> None:
        self._renewing = thread = DaemonThread(self._renew, "gracepoint: credentials")
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads, or the interpreter is about to end
            self._renewing, self._error, self._failed_s = None, error, time.monotonic()

    def _renew(self) -> None:
        renewed: StoreCredentials[T] | None = None
        error: Exception | None = None
        try:
            renewed = self._find(self._is_refused)
        except Exception as raised:  # noqa: BLE001 - the clouds' libraries raise many types; ``get`` raises it
            error = raised
            logger.warning("%s: not renewed: %s", self._what, raised)
        with self._lock:
            self._renewing, self._error = None, error
            if renewed is None:
                self._failed_s = time.monotonic()
            else:
                self._found, self._found_s, self._is_refused = renewed, time.monotonic(), False
            self._changed.notify_all()

    def _raise(self, error: Exception) -> None:
        if isinstance(error, NotAdmitted):
            raise NotAdmitted(*error.args) from error
        if isinstance(error, SettingsError):
            raise SettingsError(*error.args) from error
        raise Transient(f"{self._what}: they could not be renewed: {error}") from error
