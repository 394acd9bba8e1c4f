"""The snapshot server: its port, its threads and its limits.

Threads, all daemons. "gracepoint-snapshots: accept" takes connections from the listener, and starts a thread for each
one. The thread of a connection ("...: serve") owns its socket: it shakes hands, reads the hello, and then answers one
request after the other. "...: look" reads certificate and keys again when their files change, and drops what is old.
``close`` ends all of them, and waits for each, for a bounded time; ``drain`` comes before it. ``HeldValues`` is the
only state that connections share, besides the table of connections and the counts, which ``_lock`` guards. Any thread
may shut a socket down; only its own thread closes it.

A connection is *pending* until its hello is accepted. Pending ones are limited for each address and in all. When there
is no place, the address that has the most loses its oldest one, so that a flood from one address blocks that address.
They have a few seconds and the memory of one header. Connections whose caller is known have other places, which nobody
else can take. When there is none left, the namespace that has the most loses one, so that no tenant keeps others out.
Every read and write has a time limit: for the handshake, for a header, between two requests, and for each block of a
body, so that a slow sender or reader is cut off, and what was reserved for it is free.

What strangers cause is counted by its kind, and the log has one line a minute of each kind.
"""

from __future__ import annotations

import base64
import binascii
import collections
import contextlib
import dataclasses
import errno
import json
import logging
import math
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gracepoint.checksum import crc32
from gracepoint.errors import SettingsError
from gracepoint.snapshots.exchange import (
    CHECKSUM,
    LONGEST_KEY_CHARACTERS,
    ConnectionEnded,
    Malformed,
    Refusal,
    blocks,
    frame,
    number,
    read_frame,
    receive,
    send,
    shut_down,
    text,
)
from gracepoint.snapshots.held_values import HeldValues, NotServed
from gracepoint.wire.snapshot_requests import Capability, NotGenuine, Right, check_key, read_capability

logger = logging.getLogger(__name__)

_NAME = "gracepoint-snapshots"
_BACKLOG = 1024
_ACCEPT_AGAIN_S = 0.2  # after the process ran out of descriptors or threads
_LOOK_EVERY_S = 1.0
_SELDOM_S = 60.0
_JOIN_S = 2.0
_LONGEST_FILE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotLimits:
    """The limits of a server.

    Attributes:
        capacity_bytes: What all values together may cost.
        workload_bytes: What those of one workload may cost.
        namespace_bytes: What those of all workloads of one namespace may cost. None: all.
        age_s: Seconds after a workload's newest write from which on its values are dropped.
        connections: Connections whose callers are known.
        connections_of_address: The same for one address.
        pending: Connections whose callers are not known yet.
        pending_of_address: The same for one address.
        handshake_s: Seconds for the TLS handshake.
        header_s: Seconds for a request's header, and for the hello.
        idle_s: Seconds between two requests.
        stall_s: Seconds for each block of 256 KiB of a body.
    """

    capacity_bytes: int
    workload_bytes: int
    namespace_bytes: int | None = None
    age_s: float = 6 * 3600.0
    connections: int = 1024
    connections_of_address: int = 64
    pending: int = 128
    pending_of_address: int = 32
    handshake_s: float = 5.0
    header_s: float = 5.0
    idle_s: float = 300.0
    stall_s: float = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotFiles:
    """Files of a server, which are read again when they change.

    Attributes:
        certificate: PEM file with its certificate, and the intermediate ones after it.
        key: PEM file with the certificate's private key.
        capability_keys: File with a line ``ID BASE64`` for each key of capabilities: one, or two during a rotation.
    """

    certificate: Path
    key: Path
    capability_keys: Path


class _Watched:
    """What the files say. ``read`` belongs to one thread at a time; the attributes are replaced as a whole."""

    context: ssl.SSLContext
    keys: Mapping[str, bytes]

    def __init__(self, files: SnapshotFiles) -> None:
        self._files = files
        self._pair = (b"", b"")
        self._key_lines: bytes | None = None
        self._read_certificate()
        self._read_keys()

    def read(self) -> None:
        """Reads what has changed.

        Raises:
            ExceptionGroup: OSError and ValueError of files that cannot be read. What was read of them before stays.
        """
        errors: list[Exception] = []
        for read in (self._read_certificate, self._read_keys):
            try:
                read()
            except (OSError, ValueError) as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("files that cannot be read", errors)

    def _read_certificate(self) -> None:
        files = self._files
        pair = (_content(files.certificate), _content(files.key))
        if pair == self._pair:
            return
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # no client comes back with one
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")  # asks for none on a terminal
        if pair != (_content(files.certificate), _content(files.key)):
            raise SettingsError("certificate and key: expected files that stay while they are read, found new ones")
        self.context, self._pair = context, pair
        logger.info("read the certificate")

    def _read_keys(self) -> None:
        lines = _content(self._files.capability_keys)
        if lines != self._key_lines:
            self.keys, self._key_lines = _keys(lines), lines
            logger.info("read the keys of capabilities ids=%s", ",".join(self.keys))


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LONGEST_FILE_BYTES)


def _keys(content: bytes) -> dict[str, bytes]:
    """Reads the keys of capabilities. No message quotes one."""
    keys = {}
    for line in content.decode("ascii", "replace").splitlines():
        if line.strip():
            key_id, _, coded = line.strip().partition(" ")
            try:
                keys[key_id] = base64.b64decode(coded, validate=True)
            except binascii.Error as error:
                raise SettingsError("keys of capabilities: expected lines ID BASE64, found another one") from error
            check_key(key_id, keys[key_id])
    if not keys:
        raise SettingsError("keys of capabilities: expected a line ID BASE64 for each, found none")
    return keys


@dataclasses.dataclass(eq=False)
class _ServedConnection:
    """A connection, and how far it is. ``_lock`` of the server guards what is below its address."""

    socket: ssl.SSLSocket
    address: str
    is_known: bool = False
    is_idle: bool = True
    namespace: str = ""


class SnapshotServer:
    """Serves until it is closed.

    Args:
        files: Certificate and keys.
        limits: Its limits.
        host: Address to listen on. Empty for all.
        port: Port to listen on. 0: the system chooses.
        clock: Returns monotonic seconds, for ages.
        now: Returns seconds since the epoch, for the end of capabilities.

    Attributes:
        port: The port that it listens on.

    Raises:
        OSError, ValueError: The port is taken, or a file cannot be read.
    """

    def __init__(
        self,
        files: SnapshotFiles,
        limits: SnapshotLimits,
        host: str = "",
        port: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._files = _Watched(files)
        self._limits = limits
        self._now = now
        self._held = HeldValues(
            limits.capacity_bytes,
            limits.workload_bytes,
            secrets.token_hex(4),
            clock,
            namespace_bytes=limits.namespace_bytes,
        )
        self._lock = threading.Lock()
        self._pending: dict[_ServedConnection, None] = {}  # oldest first
        self._known: dict[_ServedConnection, None] = {}  # oldest first
        self._threads: set[threading.Thread] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        self._log = _SeldomLog()
        self._draining = threading.Event()
        self._closing = threading.Event()
        self._listener = _listener(host, port)
        self._listener.settimeout(_LOOK_EVERY_S)  # not every system wakes an accept when the listener is shut down
        self.port = int(self._listener.getsockname()[1])
        self._own = [self._start(self._accept, "accept"), self._start(self._look, "look")]

    def figures(self) -> dict[str, Any]:
        """Returns what the server has and has done since its start, as plain values."""
        with self._lock:
            counts = dict(self._counts)
            connections = {"connections": len(self._known), "pending": len(self._pending)}
        refused = {name: counts.pop(name) for name in [*Refusal] if name in counts}
        return {**self._held.figures(), **connections, **counts, "refused": refused}

    def look(self) -> None:
        """Reads files that have changed, and drops what is old. A thread does so every second."""
        try:
            self._files.read()
        except* (OSError, ValueError) as group:
            self._log.warning("files", "going on with what was read before: %s", "; ".join(map(str, group.exceptions)))
        self._held.give_up_spare()
        dropped = self._held.drop_aged(self._limits.age_s)
        if dropped.values:
            logger.info(
                "dropped values of workloads that write no more values=%d bytes=%d", dropped.values, dropped.bytes
            )

    def drain(self, within_s: float, is_enough: threading.Event) -> None:
        """Takes no new values, and gives and drops those that there are.

        Returns when none is left, after ``within_s`` seconds, or when ``is_enough`` is set. Whoever has values here
        sends them to another server meanwhile, and drops them.
        """
        self._draining.set()
        until_s = time.monotonic() + within_s
        while self._held.figures()["used_bytes"] and (left_s := until_s - time.monotonic()) > 0:
            if is_enough.wait(min(left_s, _LOOK_EVERY_S)):
                return

    def close(self, drain_s: float = 0.0) -> None:
        """Accepts nothing more, and ends all connections: those that rest at once, the others after ``drain_s``."""
        self._closing.set()
        shut_down(self._listener)
        for thread in self._own:
            thread.join(_LOOK_EVERY_S + _JOIN_S)
        self._listener.close()
        with self._lock:
            for connection in [*self._pending, *(each for each in self._known if each.is_idle)]:
                shut_down(connection.socket)
        self._wait(time.monotonic() + drain_s)
        with self._lock:
            for connection in [*self._pending, *self._known]:
                shut_down(connection.socket)
        self._wait(time.monotonic() + _JOIN_S)

    def _wait(self, until_s: float) -> None:
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self, function: Callable[[], object], name: str) -> threading.Thread:
        thread = threading.Thread(target=function, name=f"{_NAME}: {name}", daemon=True)
        thread.start()
        return thread

    def _look(self) -> None:
        while not self._closing.wait(_LOOK_EVERY_S):
            self.look()

    # Connections.

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                accepted, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closing.is_set():
                    return
                self._log.warning("accept", "cannot accept connections: %s", error)
                self._closing.wait(_ACCEPT_AGAIN_S)
                continue
            try:
                self._begin(accepted, _address(peer[0]))
            except (OSError, RuntimeError) as error:  # gone already, or the system has no more threads
                self._count("not begun")
                self._log.warning("begin", "cannot serve a connection: %s", error)

    def _begin(self, accepted: socket.socket, address: str) -> None:
        try:
            with self._lock:  # those that were crowded out may not have ended yet
                if len(self._threads) >= self._limits.connections + 2 * self._limits.pending:
                    raise OSError(errno.EAGAIN, f"{len(self._threads)} connections have not ended")
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.settimeout(self._limits.handshake_s)
            tls = self._files.context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            accepted.close()
            raise
        connection = _ServedConnection(tls, address)
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"{_NAME}: serve", daemon=True)
        with self._lock:
            self._make_room(address)
            self._pending[connection] = None
            self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._forget(connection, thread)
            raise

    def _make_room(self, address: str) -> None:
        """Shuts down pending connections until there is a place. The lock is held."""
        while self._pending:
            counts = collections.Counter(connection.address for connection in self._pending)
            if counts[address] >= self._limits.pending_of_address:
                crowded = address
            elif len(self._pending) >= self._limits.pending:
                crowded = counts.most_common(1)[0][0]
            else:
                return
            oldest = next(each for each in self._pending if each.address == crowded)
            del self._pending[oldest]
            shut_down(oldest.socket)
            self._counts["crowded out"] += 1

    def _serve(self, connection: _ServedConnection) -> None:
        try:
            connection.socket.do_handshake()
            self._converse(connection)
        except ConnectionEnded:
            pass
        except TimeoutError as error:
            self._refused(Refusal.SLOW, f"a connection was too slow: {error}")
        except Malformed as error:
            self._refused(Refusal.MALFORMED, str(error))
            self._answer_last(connection, Refusal.MALFORMED, str(error))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; a socket that was shut down raises both
            self._count("broken")
            logger.debug("a connection broke: %s", error)
        except Exception:  # noqa: BLE001 - of this connection; the others go on
            self._count("failed")
            self._log.warning("failed", "a connection failed", exc_info=True)
        finally:
            self._forget(connection, threading.current_thread())

    def _answer_last(self, connection: _ServedConnection, refusal: Refusal, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            connection.socket.sendall(frame(refused=refusal, message=message[:1000]))

    def _forget(self, connection: _ServedConnection, thread: threading.Thread) -> None:
        with self._lock:
            self._pending.pop(connection, None)
            self._known.pop(connection, None)
            self._threads.discard(thread)
        with contextlib.suppress(OSError):
            connection.socket.close()

    def _admit(self, connection: _ServedConnection, namespace: str) -> None:
        with self._lock:
            if connection.is_known:
                return
            if connection not in self._pending:  # another one has its place
                raise ConnectionEnded("crowded out")
            same = sum(each.address == connection.address for each in self._known)
            if same >= self._limits.connections_of_address:
                raise NotServed(
                    Refusal.BUSY,
                    f"the server has {len(self._known)} connections, {same} of this address: use fewer, or try later",
                )
            if len(self._known) >= self._limits.connections:
                self._take_place(namespace)
            del self._pending[connection]
            self._known[connection] = None
            connection.is_known, connection.namespace = True, namespace

    def _take_place(self, namespace: str) -> None:
        """Shuts down a connection of the namespace that has the most; one that rests, if any. The lock is held."""
        counts = collections.Counter(each.namespace for each in self._known)
        crowded, most = counts.most_common(1)[0]
        if most <= counts[namespace] + 1:
            raise NotServed(
                Refusal.BUSY,
                f"the server has {len(self._known)} connections, {counts[namespace]} of this namespace: use fewer, or "
                "try later",
            )
        of_crowded = [each for each in self._known if each.namespace == crowded]
        victim = next((each for each in of_crowded if each.is_idle), of_crowded[0])
        del self._known[victim]
        shut_down(victim.socket)
        self._counts["crowded out"] += 1

    # Requests.

    def _converse(self, connection: _ServedConnection) -> None:
        tls, limits = connection.socket, self._limits
        tls.settimeout(limits.header_s)
        capability = None
        request = read_frame(tls, limits.header_s)
        while True:
            try:
                if request.get("op") == "hello":
                    capability = self._hello(connection, request)
                    _answer(tls, limits.stall_s, limit_bytes=self._held.limit_bytes(capability))
                elif capability is None:
                    raise NotServed(Refusal.NOT_ADMITTED, "expected a hello with a capability first")
                else:
                    self._check_time(capability)
                    self._request(tls, capability, request)
            except NotServed as error:
                self._refused(error.refusal, str(error))
                _answer(tls, limits.stall_s, refused=error.refusal, message=str(error)[:1000])
                if not connection.is_known:
                    return
            with self._lock:
                connection.is_idle = True
                if self._closing.is_set():
                    return
            tls.settimeout(limits.idle_s)
            request = self._next(connection)

    def _next(self, connection: _ServedConnection) -> dict[str, Any]:
        """Waits for the next request. From its first byte on it has the time of a header."""
        tls = connection.socket
        magic = bytearray(1)
        try:
            receive(tls, memoryview(magic), self._limits.idle_s)
        except TimeoutError:
            raise ConnectionEnded("nothing was asked for a long time") from None
        with self._lock:
            connection.is_idle = False
        tls.settimeout(self._limits.header_s)
        request = read_frame(tls, self._limits.header_s, first=bytes(magic))
        tls.settimeout(self._limits.stall_s)
        return request

    def _hello(self, connection: _ServedConnection, request: Mapping[str, Any]) -> Capability:
        try:
            capability = read_capability(text(request, "capability"), self._files.keys)
        except NotGenuine as error:
            raise NotServed(Refusal.NOT_ADMITTED, str(error)) from error
        self._check_time(capability)
        self._admit(connection, capability.namespace)
        self._held.enter(capability)
        connection.socket.settimeout(self._limits.stall_s)
        return capability

    def _check_time(self, capability: Capability) -> None:
        late_s = self._now() - capability.until
        if late_s >= 0:
            raise NotServed(Refusal.EXPIRED, f"the capability has ended {late_s:.0f} s ago: ask for a new one")

    def _request(self, tls: ssl.SSLSocket, capability: Capability, request: Mapping[str, Any]) -> None:
        match request.get("op"):
            case "put":
                self._put(tls, capability, request)
            case "get":
                self._get(tls, capability, request)
            case "link":
                self._check_stays()
                stored = self._held.link(
                    capability, text(request, "key"), text(request, "of"), text(request, "generation")
                )
                self._count("links")
                _answer(tls, self._limits.stall_s, **dataclasses.asdict(stored))
            case "list":
                entries = self._held.entries(capability, text(request, "under"), text(request, "after"))
                self._answer_with(tls, [dataclasses.asdict(entry) for entry in entries])
            case "drop" if "before_step" in request:
                dropped = self._held.drop(capability, before_step=number(request, "before_step"))
                _answer(tls, self._limits.stall_s, **dataclasses.asdict(dropped))
            case "drop":
                dropped = self._held.drop(capability, under=text(request, "under"))
                _answer(tls, self._limits.stall_s, **dataclasses.asdict(dropped))
            case "stat":
                if Right.STAT not in capability.rights:
                    raise NotServed(Refusal.NOT_ADMITTED, f"the capability does not allow {Right.STAT}")
                self._answer_with(tls, self.figures())
            case other:
                raise Malformed(f"op: expected put, link, get, list, drop or stat, found {str(other)[:80]!r}")

    def _check_stays(self) -> None:
        if self._draining.is_set():
            raise NotServed(Refusal.BUSY, "the server is about to end: use another one")

    def _put(self, tls: ssl.SSLSocket, capability: Capability, request: Mapping[str, Any]) -> None:
        self._check_stays()
        key, size_bytes = text(request, "key"), number(request, "bytes")
        stall_s = self._limits.stall_s
        if_absent = request.get("if_absent") is True
        with self._held.writing(capability, key, size_bytes, if_absent=if_absent) as (value, complete):
            _answer(tls, stall_s)
            checksum = 0
            for block in blocks(value.memory):
                receive(tls, block, stall_s)
                checksum = crc32(block, checksum)
            trailer = bytearray(CHECKSUM.size)
            receive(tls, memoryview(trailer), stall_s)
            (expected,) = CHECKSUM.unpack(trailer)
            if checksum != expected:
                raise NotServed(
                    Refusal.DAMAGED, f"{key}: expected the checksum {expected:08x}, found {checksum:08x}: send it again"
                )
            stored = complete(checksum)
        self._count("puts")
        self._count("received_bytes", size_bytes)
        _answer(tls, stall_s, **dataclasses.asdict(stored))

    def _get(self, tls: ssl.SSLSocket, capability: Capability, request: Mapping[str, Any]) -> None:
        key, start, stall_s = text(request, "key"), number(request, "start"), self._limits.stall_s
        with self._held.reading(capability, key, text(request, "generation")) as value:
            memory = value.memory[start : start + number(request, "bytes")]
            _answer(
                tls,
                stall_s,
                bytes=len(memory),
                size=value.size_bytes,
                checksum=value.checksum,
                generation=value.generation,
            )
            send(tls, memory, stall_s)
            size_bytes = len(memory)
            del memory
        self._count("gets")
        self._count("sent_bytes", size_bytes)

    def _answer_with(self, tls: ssl.SSLSocket, body: object) -> None:
        data = json.dumps(body, separators=(",", ":")).encode()
        _answer(tls, self._limits.stall_s, bytes=len(data))
        send(tls, memoryview(data), self._limits.stall_s)

    # Counts.

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def _refused(self, refusal: Refusal, message: str) -> None:
        self._count(refusal)
        if refusal in (Refusal.NOT_FOUND, Refusal.EXISTS, Refusal.REPLACED):  # answers to be expected
            return
        self._log.warning(refusal, "refused a request reason=%s: %s", refusal, message[: 2 * LONGEST_KEY_CHARACTERS])


class _SeldomLog:
    """Writes one line a minute of each kind. Kinds are few, and no part of what strangers send. Any thread may log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written_s: dict[str, float] = {}
        self._skipped: collections.Counter[str] = collections.Counter()

    def warning(self, kind: str, message: str, *values: object, exc_info: bool = False) -> None:
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._written_s.get(kind, -math.inf) < _SELDOM_S:
                self._skipped[kind] += 1
                return
            self._written_s[kind], skipped = now_s, self._skipped.pop(kind, 0)
        logger.warning("%s (%d more of this kind were not logged)", message % values, skipped, exc_info=exc_info)


def _answer(tls: ssl.SSLSocket, stall_s: float, **header: object) -> None:
    send(tls, memoryview(frame(**header)), stall_s)


def _listener(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _address(host: str) -> str:
    """Who a connection is counted for: of IPv6 the network, as one machine may have all addresses in it."""
    host = host.removeprefix("::ffff:") if "." in host else host
    if ":" not in host:
        return host
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8].hex()
