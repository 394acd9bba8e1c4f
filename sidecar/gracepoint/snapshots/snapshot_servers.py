"""The snapshot servers as one process sees them: where its part goes, and where the parts of all are read from.

The operator says both in a ``ServerPlacement``, and again when something changes. A *part* is what one process has of a
snapshot: the files that a save of this part would write, and its done-record last. The keys of a server are
``STEP/ATTEMPT/PART/SAVE/FILE``, and that of the done-record is ``STEP/ATTEMPT/PART/!done/SAVE``: it is the first one
of its part, so that a list of all parts needs no list of all files. ``SAVE`` tells one save from all others. So a part
that was not finished is never mixed with another one of its step.

Any thread may call everything here; ``_lock`` of each class guards its state, and nothing waits while it is held. There
are no threads but those of ``find``, which end with the call. Connections belong to the ``SnapshotClient`` of each
address, and end when no placement names the address any more, or with ``close``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import hashlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from urllib.parse import quote

from gracepoint.deadline import Deadline
from gracepoint.errors import WireError
from gracepoint.snapshots.exchange import (
    SnapshotDamaged,
    SnapshotRefused,
    SnapshotReplaced,
    SnapshotsFull,
    SnapshotsUnavailable,
    StoredValue,
)
from gracepoint.snapshots.snapshot_client import SnapshotClient
from gracepoint.wire.frames import SnapshotPlacement
from gracepoint.wire.snapshot_requests import unproven_capability

logger = logging.getLogger(__name__)

#: Values from this size on are not sent again if they have not changed.
LINKED_BYTES = 64 << 10
_DONE = "!done"
_LONGEST_FILE_CHARACTERS = 256
_CALL_TIMEOUT_S = 900.0  # a call ends earlier if nothing moves, or if its caller must stop
_DROP_TIMEOUT_S = 5.0
_ASKED_AT_ONCE = 32
#: Seconds in which a server that did not answer is asked after the others.
_AWAY_S = 30.0
#: What makes one server useless for a part, and not the part.
_OF_ONE_SERVER = (SnapshotsUnavailable, SnapshotsFull, SnapshotRefused)
_random = random.Random()  # not the generator of ``random`` itself: the training script may have seeded that one


def sha256(data: memoryview) -> bytes:
    """Returns the SHA-256 of some bytes."""
    return hashlib.sha256(data).digest()


@dataclasses.dataclass(frozen=True)
class ServerAt:
    """A server.

    Attributes:
        node: Name of its node.
        address: Its address, as ``10.0.0.7:9470`` or ``[fd00::7]:9470``.
    """

    node: str
    address: str

    @property
    def host_and_port(self) -> tuple[str, int]:
        """What to connect to.

        Raises:
            WireError: The address is none.
        """
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal():
            raise WireError(f"expected the address of a snapshot server, as 10.0.0.7:9470, found {self.address[:80]!r}")
        return host.strip("[]"), int(port)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerPlacement:
    """What the operator lets this process use.

    Attributes:
        capability: What servers are shown. Empty only if there are no servers.
        server_name: The name in their certificates.
        authorities: PEM certificates that are trusted.
        write: Where this process's part goes, the server of its own node first. Empty: nowhere now.
        read: Servers that may have parts of this workload, of earlier attempts, too.
    """

    capability: str
    server_name: str
    authorities: str
    write: tuple[ServerAt, ...]
    read: tuple[ServerAt, ...]

    @property
    def attempt(self) -> int:
        """The attempt of the workload.

        Raises:
            WireError: The capability cannot be read.
        """
        return unproven_capability(self.capability).attempt

    def staying(self, part: int, leaving: Collection[str]) -> tuple[ServerAt, ...]:
        """Returns where a part goes if some nodes go away, of which the operator may not have said so yet.

        Each of their servers is replaced by another one that the process knows, for each part another. If all go away
        that the process knows, the placement counts: the notice may be about the workload, whose nodes stay.
        """
        staying = tuple(server for server in self.write if server.node not in leaving)
        known = [server for server in self.read if server not in self.write and server.node not in leaving]
        first = part % len(known) if known else 0
        lacking = len(self.write) - len(staying)
        return staying + tuple((known[first:] + known[:first])[:lacking]) or self.write

    @property
    def servers(self) -> tuple[ServerAt, ...]:
        """All servers, nearest first, each once."""
        return tuple({server.address: server for server in (*self.write, *self.read)}.values())


@dataclasses.dataclass(frozen=True)
class PartName:
    """Names a part in all servers.

    Attributes:
        step: The step.
        attempt: The attempt of the workload that wrote it.
        part: Index of the process that wrote it.
        save: Tells this save from all others of the workload. Letters, digits, ``_``, ``-`` and ``.``.
    """

    step: int
    attempt: int
    part: int
    save: str

    @property
    def folder(self) -> str:
        """Where its files are."""
        return f"{self.step}/{self.attempt}/{self.part}/{self.save}"

    @property
    def done(self) -> str:
        """Key of its done-record."""
        return f"{self.step}/{self.attempt}/{self.part}/{_DONE}/{self.save}"

    def file(self, path: str) -> str:
        """Returns the key of a file. Keys have few characters, and a limited number of them."""
        name = quote(path, safe="/")
        if len(name) > _LONGEST_FILE_CHARACTERS or "" in name.split("/"):
            name = f"~{hashlib.sha256(path.encode()).hexdigest()}"
        return f"{self.folder}/{name}"


@dataclasses.dataclass(frozen=True)
class FoundPart:
    """A part whose done-record was found.

    Attributes:
        name: The part.
        record_bytes: Size of its done-record.
        age_s: Seconds since the done-record was written.
        servers: The servers that have it.
    """

    name: PartName
    record_bytes: int
    age_s: float
    servers: tuple[ServerAt, ...]


class SnapshotServers:
    """The servers that the newest placement names.

    Args:
        placement: The first placement. None: it has not come yet.
    """

    def __init__(self, placement: ServerPlacement | None = None) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._placement: ServerPlacement | None = None
        self._clients: dict[str, SnapshotClient] = {}
        self._written: dict[str, ServerAt] = {}  # servers that have or had something of this process, by address
        self._away_s: dict[str, float] = {}  # when a server did not answer last, by address
        if placement is not None:
            self.place(placement)

    def place(self, placement: ServerPlacement) -> None:
        """Takes a new placement.

        Raises:
            WireError: The capability or an address cannot be read.
        """
        if placement.servers:
            _ = placement.attempt, [server.host_and_port for server in placement.servers]
        with self._lock:
            before, self._placement = self._placement, placement
            kept = {server.address for server in placement.servers} | set(self._written)
            if before is not None and before.server_name != placement.server_name:
                kept = set()
            ended = [self._clients.pop(address) for address in list(self._clients) if address not in kept]
            self._changed.notify_all()
        for client in ended:
            client.close()

    def take(self, placement: SnapshotPlacement, authorities: str) -> None:
        """Takes a placement as the operator sent it. ``authorities`` is PEM."""
        logger.info(
            "snapshot servers write_to=%s read_from=%d reason=%s",
            ",".join(placement.write_to) or "none",
            len(placement.read_from),
            placement.reason,
        )
        try:
            self.place(
                ServerPlacement(
                    capability=placement.capability,
                    server_name=placement.server_name,
                    authorities=authorities,
                    write=tuple(ServerAt(*server) for server in placement.write_to.items()),
                    read=tuple(ServerAt(*server) for server in placement.read_from.items()),
                )
            )
        except WireError as error:  # a newer operator wrote it
            logger.error("a placement of snapshots cannot be read, and the one before stays error=%s", error)

    @property
    def placement(self) -> ServerPlacement | None:
        """The newest placement. None if none has come."""
        with self._lock:
            return self._placement

    def wait(self, timeout_s: float) -> bool:
        """Waits for the first placement. Returns whether it has come."""
        until_s = time.monotonic() + timeout_s
        with self._lock:
            while self._placement is None and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return self._placement is not None

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.close()

    def client(self, server: ServerAt) -> SnapshotClient:
        """Returns the client of a server.

        Raises:
            SnapshotsUnavailable: No placement has come.
        """
        with self._lock:
            placement = self._placement
            if placement is None:
                raise SnapshotsUnavailable(errno.EAGAIN, "the operator has named no snapshot server yet")
            if server.address not in self._clients:
                self._clients[server.address] = SnapshotClient(
                    server.host_and_port,
                    server_name=placement.server_name,
                    authorities=lambda: self._placed().authorities,
                    capability=lambda: self._placed().capability,
                )
            return self._clients[server.address]

    def begin(
        self,
        step: int,
        part: int,
        save: str,
        before: Mapping[str, SentFile],
        fingerprint: Callable[[memoryview], bytes] = sha256,
        leaving: Collection[str] = (),
    ) -> PartCopies:
        """Begins to write this process's part of a snapshot to the servers of the placement.

        Args:
            step: The step.
            part: Index of this process.
            save: See ``PartName``.
            before: The files of an earlier part, which are not sent again if they have not changed.
            fingerprint: Tells apart contents that have one CRC-32.
            leaving: Nodes that go away.

        Raises:
            SnapshotsUnavailable: There is no server.
        """
        placement = self.placement
        if placement is None or not placement.write:
            raise SnapshotsUnavailable(errno.EAGAIN, "the operator has named no snapshot server for this process")
        targets = placement.staying(part, leaving)
        with self._lock:
            self._written.update((server.address, server) for server in targets)
        name = PartName(step, placement.attempt, part, save)
        return PartCopies(self, name, targets, before, fingerprint)

    def limits(self, timeout_s: float) -> dict[ServerAt, int | None]:
        """Returns what the job may have in each server that this process writes to. None: it is not known."""
        placement = self.placement
        deadline = Deadline.after(timeout_s, time.monotonic)
        limits: dict[ServerAt, int | None] = {}
        for server in () if placement is None else placement.write:
            try:
                limits[server] = self.client(server).limit_bytes(deadline)
            except OSError as error:
                limits[server] = None
                logger.warning("what the snapshot server of node %s may hold is not known: %s", server.node, error)
        return limits

    def drop(self, *, before_step: int | None = None, folder: str = "", everywhere: bool = False) -> None:
        """Drops all older steps, or a folder, where this process has written, or in all servers of the placement.

        An error is logged: others drop it.
        """
        with self._lock:
            servers = dict(self._written)
            if everywhere and self._placement is not None:
                servers.update((server.address, server) for server in self._placement.servers)
        for server in servers.values():
            try:
                deadline = Deadline.after(_DROP_TIMEOUT_S, time.monotonic)
                if before_step is None:
                    self.client(server).drop(folder, deadline)
                else:
                    self.client(server).drop_before(before_step, deadline)
            except OSError as error:
                logger.info("the snapshot server of node %s keeps what is not needed any more: %s", server.node, error)
                self._forget(server)

    def drop_left(self, step: int, start: str, of: str) -> None:
        """Drops newer steps of other starts, where this process has written: this start began before them.

        ``start`` is that of this gang's saves, and ``of`` the end of the starts whose steps are in its directory.
        """
        with self._lock:
            written = list(self._written.values())
        for server in written:
            try:
                deadline = Deadline.after(_DROP_TIMEOUT_S, time.monotonic)
                for name, _ in list(_done_records(self.client(server), deadline)):
                    other = name.save.rpartition(".")[0]
                    if name.step > step and other != start and other.endswith(of):
                        for folder in (name.done, name.folder):
                            self.client(server).drop(folder, deadline)
            except OSError as error:
                logger.info("the snapshot server of node %s keeps what is not needed any more: %s", server.node, error)

    def find(self, timeout_s: float) -> list[FoundPart]:
        """Returns the parts that have a done-record in any server. Servers that do not answer in time are left out."""
        placement = self.placement
        if placement is None or not placement.servers:
            return []
        deadline = Deadline.after(timeout_s, time.monotonic)

        def look(server: ServerAt) -> list[tuple[PartName, StoredValue]]:
            try:
                return list(_done_records(self.client(server), deadline))
            except OSError as error:
                self.note_away(server)
                logger.warning("what the snapshot server of node %s has is not known: %s", server.node, error)
                return []

        copies_of: dict[PartName, list[tuple[ServerAt, StoredValue]]] = {}
        workers = min(_ASKED_AT_ONCE, len(placement.servers))
        with concurrent.futures.ThreadPoolExecutor(workers, "gracepoint: finds snapshots") as threads:
            for server, records in zip(placement.servers, threads.map(look, placement.servers), strict=True):
                for name, value in records:
                    copies_of.setdefault(name, []).append((server, value))
        return [
            FoundPart(
                name,
                copies[0][1].bytes,
                min(value.age_s for _, value in copies),
                tuple(server for server, value in copies if value.checksum == copies[0][1].checksum),
            )
            for name, copies in copies_of.items()
        ]

    def look(self, key: str, servers: Sequence[ServerAt]) -> StoredValue:
        """Returns what the nearest server says of a value.

        Raises:
            FileNotFoundError: No server that answers has it.
        """
        return self._nearest(key, servers, memoryview(b""), 0)

    def read_into(self, key: str, out: memoryview, servers: Sequence[ServerAt], start: int = 0) -> StoredValue:
        """Fills ``out`` from the nearest copy of a value. If it is damaged or away, from the next one.

        All of a value is compared with its checksum, a range is not.

        Raises:
            FileNotFoundError: No copy can be read.
        """
        return self._nearest(key, servers, out, start)

    def note_away(self, server: ServerAt) -> None:
        """Has other servers asked first for a while."""
        with self._lock:
            self._away_s[server.address] = time.monotonic()

    def _forget(self, server: ServerAt) -> None:
        """Asks a server that did not answer for nothing more, unless it is named again: each question takes time."""
        with self._lock:
            named = self._placement is not None and server in self._placement.write
            client = None if named else self._clients.pop(server.address, None)
            if not named:
                self._written.pop(server.address, None)
        if client is not None:
            client.close()

    def _nearest(self, key: str, servers: Sequence[ServerAt], out: memoryview, start: int) -> StoredValue:
        problems: list[str] = []
        for server in self._by_distance(servers):
            deadline = Deadline.after(_CALL_TIMEOUT_S, time.monotonic)
            try:
                value = self.client(server).get_into(key, out, deadline, start=start)
            except (OSError, ValueError) as error:
                if isinstance(error, SnapshotsUnavailable):
                    self.note_away(server)
                problems.append(f"node {server.node}: {error}")
                if not isinstance(error, FileNotFoundError):
                    logger.warning("a snapshot is read from another copy than that of node %s: %s", server.node, error)
            else:
                return value
        raise FileNotFoundError(errno.ENOENT, f"no copy can be read: {'; '.join(problems) or 'there is none'}", key)

    def _by_distance(self, servers: Sequence[ServerAt]) -> list[ServerAt]:
        with self._lock:
            near = [] if self._placement is None else [server.address for server in self._placement.write]
            now_s, away_s = time.monotonic(), dict(self._away_s)

        def distance(server: ServerAt) -> tuple[bool, int, float]:
            is_away = now_s - away_s.get(server.address, -math.inf) < _AWAY_S
            place = near.index(server.address) if server.address in near else len(near)
            return is_away, place, _random.random()  # so that many processes do not ask the same one

        return sorted(servers, key=distance)

    def _placed(self) -> ServerPlacement:
        placement = self.placement
        assert placement is not None  # a client is made for one
        return placement


@dataclasses.dataclass(frozen=True)
class SentFile:
    """A file of a part, as servers have it.

    Attributes:
        key: Its key.
        size_bytes: Its size.
        checksum: Its CRC-32.
        fingerprint: What tells it from others with the same CRC-32. Empty if it was not computed.
        generations: The version in each server, by address.
    """

    key: str
    size_bytes: int
    checksum: int
    fingerprint: bytes
    generations: Mapping[str, str]


class PartCopies:
    """One process's part of a snapshot, while it is written to several servers.

    A server that fails is left out from then on; the part fails if none is left. So does a server that was started
    anew meanwhile, as it has lost what was sent before. A file that has not changed since an earlier part is not sent
    again: the server takes the bytes that it has. Of two files with one CRC-32 their fingerprints decide, which are
    computed for those alone, and for each file's first time.

    Attributes:
        name: The part.
        sent: The files so far, by path.
        sent_bytes: Bytes that were sent to servers.
        total_bytes: Bytes of the files, each counted once.
        problems: What is wrong with servers that are left out, by node.
    """

    def __init__(
        self,
        servers: SnapshotServers,
        name: PartName,
        targets: Sequence[ServerAt],
        before: Mapping[str, SentFile],
        fingerprint: Callable[[memoryview], bytes],
    ) -> None:
        self.name = name
        self.sent: dict[str, SentFile] = {}
        self.sent_bytes = self.total_bytes = 0
        self.problems: dict[str, str] = {}
        self._servers = servers
        self._targets = list(targets)
        self._before = before
        self._fingerprint = fingerprint
        self._starts: dict[str, str] = {}  # which start of a server took the first file, by address
        self._files = 0
        self._lock = threading.Lock()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes whose servers have all that was written so far."""
        with self._lock:
            return tuple(server.node for server in self._targets)

    def put(self, path: str, data: memoryview, checksum: int, go_on: Callable[[], None]) -> None:
        """Writes a file to all servers, or has them take the bytes that they have.

        Args:
            path: Its path below the step.
            data: Its bytes, which must not change meanwhile.
            checksum: Their CRC-32.
            go_on: Called again and again. An error that it raises ends the call.

        Raises:
            SnapshotDamaged: The bytes were changed meanwhile.
            OSError: No server has it.
        """
        key, before, fingerprint = self.name.file(path), self._before.get(path), b""
        is_same = before is not None and (before.size_bytes, before.checksum) == (len(data), checksum)
        if len(data) >= LINKED_BYTES and (before is None or is_same):
            fingerprint = self._fingerprint(data)
        source = before if before is not None and fingerprint and before.fingerprint == fingerprint else None
        generations: dict[str, str] = {}

        def send(server: ServerAt, deadline: Deadline) -> StoredValue:
            client = self._servers.client(server)
            if source is not None and server.address in source.generations:
                try:
                    return client.link(key, source.key, source.generations[server.address], deadline)
                except (FileNotFoundError, SnapshotReplaced):
                    pass  # it was started anew, or dropped it
            try:
                stored = client.put(key, [data], deadline, checksum=checksum)
            except SnapshotDamaged as error:
                raise SnapshotDamaged(errno.EIO, f"{key}: its bytes were changed while they were sent") from error
            with self._lock:
                self.sent_bytes += len(data)
            return stored

        for server, stored in self._each(send, go_on):
            generations[server.address] = stored.generation
        with self._lock:
            self.total_bytes += len(data)
            self.sent[path] = SentFile(key, len(data), checksum, fingerprint, generations)

    def finish(self, record: bytes, go_on: Callable[[], None]) -> tuple[str, ...]:
        """Writes the done-record. Returns the nodes whose servers have all of the part.

        Raises:
            OSError: No server has it.
        """

        def send(server: ServerAt, deadline: Deadline) -> StoredValue:
            client = self._servers.client(server)
            stored = client.put(self.name.done, [memoryview(record)], deadline)
            if not self._is_of_first_start(server, stored):
                client.drop(self.name.done, deadline)  # it would say that the files are there
            return stored

        for _ in self._each(send, go_on):
            pass
        return self.nodes

    def _each(
        self, send: Callable[[ServerAt, Deadline], StoredValue], go_on: Callable[[], None]
    ) -> Iterator[tuple[ServerAt, StoredValue]]:
        """Calls ``send`` for each server that is left, and yields what it returned.

        They take turns to be the first, so that the threads which send files keep the links to all of them busy.
        """
        with self._lock:
            first = self._files % max(1, len(self._targets))
            targets = self._targets[first:] + self._targets[:first]
            self._files += 1
        for server in targets:
            try:
                stored = send(server, _following(go_on))
                if not self._is_of_first_start(server, stored):
                    raise SnapshotsUnavailable(errno.ECONNRESET, "it was started anew, and has lost earlier files")
            except _OF_ONE_SERVER as error:
                go_on()  # if the caller must stop, that is why it failed
                self._leave_out(server, error)
            else:
                yield server, stored
        if not self.nodes:
            problems = "; ".join(f"node {node}: {problem}" for node, problem in self.problems.items())
            raise SnapshotsUnavailable(errno.EAGAIN, f"no snapshot server takes the part: {problems}")

    def _is_of_first_start(self, server: ServerAt, stored: StoredValue) -> bool:
        start = stored.generation.rpartition("-")[0]
        with self._lock:
            return self._starts.setdefault(server.address, start) == start

    def _leave_out(self, server: ServerAt, error: OSError) -> None:
        self._servers.note_away(server)
        with self._lock:
            is_first = server in self._targets
            if is_first:
                self._targets.remove(server)
                self.problems[server.node] = error.strerror or str(error)
        if is_first:
            logger.warning(
                "step %d goes on without the snapshot server of node %s: %s", self.name.step, server.node, error
            )


def _done_records(client: SnapshotClient, deadline: Deadline) -> Iterator[tuple[PartName, StoredValue]]:
    """Yields the parts that a server has with their done-records: the first keys of each part."""
    after = ""
    while page := client.page("", after, deadline):
        place = page[0].place
        part = f"{place.step}/{place.attempt}/{place.part}/"
        for value in page:
            if not value.key.startswith(f"{part}{_DONE}/"):
                break
            yield PartName(place.step, place.attempt, place.part, value.key.removeprefix(f"{part}{_DONE}/")), value
        after = f"{part}\x7f"  # behind all keys of the part


def _following(go_on: Callable[[], None]) -> Deadline:
    """Returns a deadline that has passed when ``go_on`` raises."""

    def left_s() -> float:
        try:
            go_on()
        except Exception:  # noqa: BLE001 - whoever gave ``go_on`` calls it again
            return 0.0
        return _CALL_TIMEOUT_S

    return Deadline(_CALL_TIMEOUT_S, time.monotonic, left_s)
