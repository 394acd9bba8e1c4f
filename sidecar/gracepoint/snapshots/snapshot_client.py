"""The client of a snapshot server: named values are put, read in ranges, listed and dropped.

Any thread may call a ``SnapshotClient``; each call has a connection to itself until it is answered, and gives it back
for the next one. So as many calls run at once as there are connections: who wants throughput calls from several
threads. There are no threads here. ``_lock`` guards the connections that rest and their number.

A request that fails on a connection that had rested is made again on a new one, as the server may have closed it
meanwhile; but not a put that must be the first. Every wait ends with the ``Deadline`` of its call, also if it moves or
is cancelled, and if nothing moves for ``stall_s``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from gracepoint.checksum import crc32
from gracepoint.deadline import Deadline
from gracepoint.errors import WireError
from gracepoint.snapshots.exchange import (
    CHECKSUM,
    Malformed,
    Refusal,
    SnapshotDamaged,
    SnapshotRefused,
    SnapshotReplaced,
    SnapshotsFull,
    SnapshotsUnavailable,
    StoredValue,
    ValuePlace,
    blocks,
    error_of,
    frame,
    number,
    read_frame,
    receive,
    send,
    shut_down,
    text,
)
from gracepoint.threads import forget_in_child

T = TypeVar("T")

#: How often a deadline is looked at while nothing moves.
_LOOK_EVERY_S = 0.2
_CONNECT_TIMEOUT_S = 5.0
_STALL_S = 10.0
#: The longest answer that is kept in memory: a list or the figures of a server.
_LONGEST_ANSWER_BYTES = 64 << 20


class _Link:
    """A connection, of one call at a time.

    Attributes:
        tls: Its socket.
        capability: What its server was shown last.
        limit_bytes: What the server has answered to it; see ``SnapshotClient.limit_bytes``.
    """

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self.tls = tls
        self.capability = ""
        self.limit_bytes: int | None = None


class SnapshotClient:
    """Speaks to one server.

    Args:
        address: Host and port.
        server_name: The name in the server's certificate.
        authorities: Returns the PEM certificates to trust, for each new connection.
        capability: Returns the capability that the server is shown. It may change.
        connections: How many connections there are at most.
        stall_s: Seconds without progress after which a call fails.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        server_name: str,
        authorities: Callable[[], str],
        capability: Callable[[], str],
        connections: int = 4,
        stall_s: float = _STALL_S,
    ) -> None:
        self._address = address
        self._server_name = server_name
        self._authorities = authorities
        self._capability = capability
        self._connections = connections
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._resting: list[_Link] = []  # used last comes last, and is used first
        self._links: set[_Link] = set()  # all
        self._places = connections  # that no call has
        self._is_closed = False
        forget_in_child(self, SnapshotClient._forget)

    def put(
        self,
        key: str,
        data: Sequence[memoryview],
        deadline: Deadline,
        *,
        if_absent: bool = False,
        checksum: int | None = None,
    ) -> StoredValue:
        """Writes a value. It can be seen once all of it has arrived and its checksum fits.

        Args:
            key: ``STEP/ATTEMPT/PART/PATH``, with the attempt of the capability.
            data: The bytes, one piece after the other. They must not change meanwhile.
            deadline: When to give up.
            if_absent: Whether a value that is there already is an error.
            checksum: CRC-32 that the bytes had, if it is known. None: it is computed while they are sent.

        Raises:
            FileExistsError: There is a value, and ``if_absent`` was given.
            SnapshotsFull: The server has no memory for it.
            SnapshotDamaged: The bytes changed while they were sent, or since ``checksum`` was computed.
            SnapshotRefused: The capability does not allow it.
            SnapshotsUnavailable: The server was not reached, or not in time.
        """
        ValuePlace.of(key)
        pieces = [piece.cast("B") for piece in data if piece.nbytes]

        def converse(link: _Link, go_on: Callable[[], None]) -> StoredValue:
            self._ask(link, go_on, op="put", key=key, bytes=sum(map(len, pieces)), if_absent=if_absent)
            computed = 0
            for piece in pieces:
                for block in blocks(piece):
                    send(link.tls, block, self._stall_s, go_on)
                    if checksum is None:
                        computed = crc32(block, computed)
            trailer = CHECKSUM.pack(computed if checksum is None else checksum)
            send(link.tls, memoryview(trailer), self._stall_s, go_on)
            return _stored(self._answer(link, go_on))

        return self._call(f"put {key}", converse, deadline, repeatable=not if_absent)

    def link(self, key: str, of: str, generation: str, deadline: Deadline) -> StoredValue:
        """Makes a value with the bytes of another one, which the server holds once for both.

        Args:
            key: As of ``put``.
            of: Key of the other value.
            generation: The version that it must have.
            deadline: When to give up.

        Raises:
            FileNotFoundError: There is no other value.
            SnapshotReplaced: It has another generation.
            SnapshotsFull, SnapshotRefused, SnapshotsUnavailable: As of ``put``.
        """
        ValuePlace.of(key)

        def converse(link: _Link, go_on: Callable[[], None]) -> StoredValue:
            return _stored(self._ask(link, go_on, op="link", key=key, of=of, generation=generation))

        return self._call(f"link {key}", converse, deadline)

    def get_into(
        self, key: str, out: memoryview, deadline: Deadline, *, start: int = 0, generation: str = ""
    ) -> StoredValue:
        """Fills ``out`` with bytes of a value. All of a value is compared with its checksum, a range is not.

        Args:
            key: Its key.
            out: Where the bytes go. All of it is filled.
            deadline: When to give up.
            start: The first byte.
            generation: The version that is expected. Empty for any.

        Raises:
            FileNotFoundError: There is no such value.
            ValueError: It ends before ``out`` is full.
            SnapshotReplaced: It has another generation.
            SnapshotDamaged: Its bytes do not fit its checksum.
            SnapshotRefused, SnapshotsUnavailable: As of ``put``.
        """
        ValuePlace.of(key)
        out = out.cast("B") if out.nbytes else memoryview(b"")

        def converse(link: _Link, go_on: Callable[[], None]) -> StoredValue:
            answer = self._ask(link, go_on, op="get", key=key, start=start, bytes=len(out), generation=generation)
            count, size, checksum = number(answer, "bytes"), number(answer, "size"), 0
            if count > len(out):
                raise Malformed(f"expected at most {len(out)} bytes, found {count}")
            is_all = start == 0 and count == size
            for block in blocks(out[:count]):
                receive(link.tls, block, self._stall_s, go_on)
                checksum = crc32(block, checksum) if is_all else 0
            if count < len(out):
                raise ValueError(f"{key}: expected {len(out)} bytes from {start}, found {count}: it has {size}")
            expected = number(answer, "checksum")
            if is_all and checksum != expected:
                raise SnapshotDamaged(
                    errno.EIO, f"{key}: expected the checksum {expected:08x}, found {checksum:08x}: read another copy"
                )
            return StoredValue(key=key, bytes=size, checksum=expected, generation=text(answer, "generation"), age_s=0.0)

        return self._call(f"get {key}", converse, deadline)

    def entry(self, key: str, deadline: Deadline) -> StoredValue | None:
        """Returns what the server says of a value. None if there is none."""
        ValuePlace.of(key)
        return next((entry for entry in self.entries(key, deadline) if entry.key == key), None)

    def entries(self, under: str, deadline: Deadline) -> list[StoredValue]:
        """Returns all values in a folder, or all if it is empty, in the order of their keys.

        Which steps, attempts and parts are there is in the ``place`` of each.
        """
        entries: list[StoredValue] = []
        while page := self.page(under, entries[-1].key if entries else "", deadline):
            entries += page
        return entries

    def page(self, under: str, after: str, deadline: Deadline) -> list[StoredValue]:
        """Returns some values in a folder, the first ones whose keys come after ``after``. Empty if there are none."""
        rows = self._read(f"list {under or 'all'}", deadline, op="list", under=under, after=after)
        if not isinstance(rows, list):
            raise SnapshotsUnavailable(errno.EPROTO, f"list {under}: expected a list, found {type(rows).__name__}")
        return [_stored(row) for row in rows]

    def drop(self, under: str, deadline: Deadline) -> int:
        """Drops a value, all in a folder, or all if it is empty. Returns how many."""
        return self._drop(f"drop {under or 'all'}", deadline, under=under)

    def drop_before(self, step: int, deadline: Deadline) -> int:
        """Drops the values of all steps before one. Returns how many."""
        return self._drop(f"drop before step {step}", deadline, before_step=step)

    def limit_bytes(self, deadline: Deadline) -> int | None:
        """Returns what the values of the workload may cost in the server, if nobody else has any. None: it is older."""
        return self._call("limit", lambda link, go_on: link.limit_bytes, deadline)

    def stat(self, deadline: Deadline) -> dict[str, Any]:
        """Returns the figures of the server, if the capability allows it: what it has, for whom, what it refused."""
        figures = self._read("stat", deadline, op="stat")
        if not isinstance(figures, dict):
            raise SnapshotsUnavailable(errno.EPROTO, f"stat: expected an object, found {type(figures).__name__}")
        return figures

    def close(self) -> None:
        """Ends all connections, also those of calls that run. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            for link in self._links:
                shut_down(link.tls)
            for link in self._resting:
                link.tls.close()
            self._links -= set(self._resting)
            self._resting.clear()
            self._changed.notify_all()

    def _forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        for link in self._links:
            link.tls.close()
        self._links.clear()
        self._resting.clear()
        self._places = self._connections
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def _drop(self, call: str, deadline: Deadline, **what_to_drop: object) -> int:
        def converse(link: _Link, go_on: Callable[[], None]) -> int:
            return number(self._ask(link, go_on, op="drop", **what_to_drop), "values")

        return self._call(call, converse, deadline)

    def _read(self, call: str, deadline: Deadline, **request: object) -> Any:
        def converse(link: _Link, go_on: Callable[[], None]) -> Any:
            count = number(self._ask(link, go_on, **request), "bytes")
            if count > _LONGEST_ANSWER_BYTES:
                raise Malformed(f"expected an answer of up to {_LONGEST_ANSWER_BYTES} bytes, found {count}")
            data = bytearray(count)
            receive(link.tls, memoryview(data), self._stall_s, go_on)
            return json.loads(data)

        return self._call(call, converse, deadline)

    # Connections.

    def _call(
        self,
        call: str,
        converse: Callable[[_Link, Callable[[], None]], T],
        deadline: Deadline,
        *,
        repeatable: bool = True,
    ) -> T:
        """Calls ``converse`` with a connection.

        Errors that are the answer leave the connection usable; after all others it is closed.
        """

        def go_on() -> None:
            if deadline.passed():
                raise TimeoutError(errno.ETIMEDOUT, f"not done {deadline.ended}")

        try:
            with self._place(go_on):
                link = self._rested()
                if link is not None:
                    try:
                        return self._conversed(link, converse, go_on)
                    except ConnectionError:  # closed meanwhile
                        if not repeatable:
                            raise
                return self._conversed(self._connected(deadline), converse, go_on)
        except (SnapshotRefused, SnapshotsFull, SnapshotReplaced, SnapshotDamaged, FileNotFoundError, FileExistsError):
            raise  # the server's answer
        except (OSError, Malformed, json.JSONDecodeError) as error:
            text_of_it = error.strerror if isinstance(error, SnapshotsUnavailable) else error
            raise SnapshotsUnavailable(_code(error), f"{self._where}: {call}: {text_of_it}") from error

    @property
    def _where(self) -> str:
        return f"snapshot server {self._address[0]}:{self._address[1]}"

    @contextlib.contextmanager
    def _place(self, go_on: Callable[[], None]) -> Iterator[None]:
        """Waits until there are fewer calls than connections."""
        with self._lock:
            while self._places == 0 and not self._is_closed:
                go_on()
                self._changed.wait(_LOOK_EVERY_S)
            if self._is_closed:
                raise SnapshotsUnavailable(errno.ESHUTDOWN, "the client is closed")
            self._places -= 1
        try:
            yield
        finally:
            with self._lock:
                self._places += 1
                self._changed.notify()

    def _rested(self) -> _Link | None:
        """Takes a connection that rests and that the server has not closed."""
        while True:
            with self._lock:
                if not self._resting:
                    return None
                link = self._resting.pop()
            poll = select.poll()
            poll.register(link.tls, select.POLLIN)
            if not poll.poll(0):
                return link
            self._end(link)

    def _conversed(
        self, link: _Link, converse: Callable[[_Link, Callable[[], None]], T], go_on: Callable[[], None]
    ) -> T:
        is_usable = False
        try:
            capability = self._capability()
            if capability != link.capability:
                answer = self._ask(link, go_on, op="hello", capability=capability)
                link.capability = capability
                link.limit_bytes = number(answer, "limit_bytes") if "limit_bytes" in answer else None
            result = converse(link, go_on)
            is_usable = True
            return result
        except _Answered as answered:
            is_usable = bool(link.capability) and answered.refusal not in (Refusal.MALFORMED, Refusal.SLOW)
            raise error_of(answered.refusal, answered.message) from None
        except (ValueError, SnapshotDamaged) as error:  # found when all was received
            is_usable = not isinstance(error, Malformed | WireError | json.JSONDecodeError)
            raise
        finally:
            with self._lock:
                is_kept = is_usable and not self._is_closed
                if is_kept:
                    self._resting.append(link)
            if not is_kept:
                self._end(link)

    def _end(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)
        link.tls.close()

    def _connected(self, deadline: Deadline) -> _Link:
        context = ssl.create_default_context(cadata=self._authorities())
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        raw = socket.create_connection(self._address, timeout=_connect_timeout_s(deadline))
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.settimeout(_connect_timeout_s(deadline))
            tls = context.wrap_socket(raw, server_hostname=self._server_name)
        except BaseException:
            raw.close()
            raise
        tls.settimeout(_LOOK_EVERY_S)
        link = _Link(tls)
        with self._lock:
            self._links.add(link)
        return link

    def _ask(self, link: _Link, go_on: Callable[[], None], **request: object) -> dict[str, Any]:
        send(link.tls, memoryview(frame(**request)), self._stall_s, go_on)
        return self._answer(link, go_on)

    def _answer(self, link: _Link, go_on: Callable[[], None]) -> dict[str, Any]:
        answer = read_frame(link.tls, self._stall_s, go_on)
        if "refused" in answer:
            raise _Answered(text(answer, "refused"), text(answer, "message"))
        return answer


def _code(error: Exception) -> int:
    """Returns the number of the system's error. TLS has numbers of its own, and other errors have none."""
    if isinstance(error, TimeoutError):
        return errno.ETIMEDOUT
    is_known = isinstance(error, OSError) and not isinstance(error, ssl.SSLError | socket.gaierror)
    return (getattr(error, "errno", None) if is_known else None) or errno.ECONNABORTED


def _connect_timeout_s(deadline: Deadline) -> float:
    return max(0.001, min(_CONNECT_TIMEOUT_S, deadline.remaining_s()))


class _Answered(Exception):
    """The server refuses."""

    def __init__(self, refusal: str, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.message = message


def _stored(row: object) -> StoredValue:
    """Reads what a server says of a value. A newer one may say more."""
    if not isinstance(row, dict) or not isinstance(row.get("age_s"), int | float):
        raise Malformed(f"expected a value with its age, found {str(row)[:80]!r}")
    return StoredValue(
        key=text(row, "key"),
        bytes=number(row, "bytes"),
        checksum=number(row, "checksum"),
        generation=text(row, "generation"),
        age_s=float(row["age_s"]),
    )
