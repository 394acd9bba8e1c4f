"""What the snapshot servers hold, as far as this replica knows, and that they drop what is left of workloads that end.

A workload's values are where a placement has put them, where its processes report that they are, and where the servers
say so. Nothing of it is stored: a replica that starts asks every server once, and every one again now and then. So it
also finds what was left while nobody looked.

``look`` runs on the controller's event loop, once a second, and lists what is due. Of the servers, it looks only at
those that have changed, and at those for which it is time. Requests to servers are tasks of that loop, at most
``_AT_ONCE`` at a time, each with a connection of its own; the end of one begins the next. A request ends in time or
fails. ``close`` cancels all of them. What ends with a server, such as its pod, is forgotten with it.

A workload has ended if it is gone, has finished, or has no policy any more that asks for snapshots. Its values are
dropped a little later, as a policy may be deleted and made again, and until a server says that there are none.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import heapq
import json
import logging
import random
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from gracepoint.wire.snapshot_requests import LONGEST_HEADER_BYTES, MAGIC, PREFIX, Capability, Right, frame
from gracepoint_operator.cache.indexes import SnapshotServerIndex
from gracepoint_operator.kube.objects import SnapshotServerPod
from gracepoint_operator.logs import about, seldom
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.trust.certificates import CapabilityKeys

logger = logging.getLogger(__name__)

#: Requests to servers that run at a time.
_AT_ONCE = 32
#: Seconds for a connection, a request and its answer.
_WITHIN_S = 5.0
#: Each server is asked again after this time, or later if there are many: these requests cost no more than a hundredth
#: of a processor.
ASKED_AGAIN_S = 600.0
PAUSE_OF_EACH_S = 0.5
#: If it has not answered, after this time.
_FAILED_AGAIN_S = 30.0
#: What is left of a workload is dropped so long after its end.
DROPPED_AFTER_S = 15.0
#: A server is asked again to drop: something may have been on its way.
DROPPED_AGAIN_S = 5.0
#: Placements wait so long after the start for servers that do not answer.
_KNOWN_AFTER_S = 10.0
#: Each workload is looked at once in so many looks, which are a second apart, whether it has ended: but no more than so
#: many at a time. Those that have ended are looked at each time.
LOOKS_AT_ALL, WORKLOADS_A_LOOK = 10, 256
#: The states of servers, and what of their figures is added up, as the metrics name them.
_STATES = ("ready", "ending", "not_ready")
_TOTALS = ("capacity_bytes", "used_bytes")
_LONGEST_ANSWER_BYTES = 16 << 20
_CAPABILITY_S = 300.0
#: Every attempt.
_ANY_ATTEMPT = 1 << 53


class NotAnswered(Exception):
    """A server was not reached, refused, or answered something that cannot be read."""


@dataclasses.dataclass(frozen=True)
class SnapshotSettings:
    """What administrators set for snapshots.

    Attributes:
        installation: The name of the servers' DaemonSet and Secret, and the value of the label of their pods.
        port: The port of every server.
        spread: The labels of nodes that name failure domains, the widest first.
        certificate: Whether the operator makes the servers' certificate.
    """

    installation: str
    port: int
    spread: tuple[str, ...] = ()
    certificate: bool = True

    def server_name(self, namespace: str) -> str:
        """The name in the certificates of the servers, which run in this namespace."""
        return f"{self.installation}.{namespace}.svc"

    def address(self, server: SnapshotServerPod) -> str:
        """The address of a server."""
        return f"[{server.host}]:{self.port}" if ":" in server.host else f"{server.host}:{self.port}"


@dataclasses.dataclass
class _Held:
    """Where values of a workload may be.

    Attributes:
        namespace: Its namespace.
        placed: UIDs of the servers that its processes may write to now.
        others: UIDs of other servers that have, or may have, values of it.
        ended_at: Since when it is known to have ended. None: it has not.
        not_before_s: When each server may be asked to drop, by the loop's clock.
    """

    namespace: str
    placed: set[str] = dataclasses.field(default_factory=set)
    others: set[str] = dataclasses.field(default_factory=set)
    ended_at: float | None = None
    not_before_s: dict[str, float] = dataclasses.field(default_factory=dict)


class SnapshotHoldings:
    """What the servers hold.

    Args:
        index: The servers.
        settings: Their port.
        server_name: The name in their certificates.
        keys: Make the operator's own capabilities.
        authorities: Returns the authorities to trust, as PEM.
        metrics: Gets figures.
        clock: Seconds since the epoch.

    Attributes:
        settings, server_name, keys: As above.
    """

    def __init__(
        self,
        index: SnapshotServerIndex,
        settings: SnapshotSettings,
        server_name: str,
        keys: CapabilityKeys,
        authorities: Callable[[], str],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self.settings = settings
        self.server_name = server_name
        self.keys = keys
        self._authorities = authorities
        self._metrics = metrics
        self._clock = clock
        self._held: dict[str, _Held] = {}  # by UID of the workload
        self._figures: dict[str, Mapping[str, Any]] = {}  # by UID of the server: what it said last
        self._totals = dict.fromkeys(_TOTALS, 0)  # of these figures
        self._states: dict[str, str] = {}  # by UID of the server
        self._numbers = dict.fromkeys(_STATES, 0)  # of servers, by state
        self._next_s: dict[str, float] = {}  # by UID of the server: when it is asked again, by the loop's clock
        self._times: list[tuple[float, str]] = []  # the same, with 0 for those never asked: a heap; the newest counts
        self._unasked: set[str] = set()  # UIDs of the servers that can be asked, and have not answered or failed yet
        self._random = random.Random()
        self._began_s: float | None = None
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}  # by UIDs of the server and of the workload, or ""
        self._to_drop: collections.deque[tuple[SnapshotServerPod, str]] = collections.deque()
        self._to_ask: dict[str, None] = {}  # UIDs of the servers for whose figures it is time, in this order
        self._ending: set[str] = set()  # UIDs of the workloads that have ended
        self._to_look_at: list[str] = []  # UIDs of the others whose turn comes before it is that of all again
        self._context: tuple[str, ssl.SSLContext] | None = None

    @property
    def is_known(self) -> bool:
        """Whether it is known where values are: every server was asked, or has not answered for long."""
        if self._began_s is None or not self.keys.keys:
            return False
        self._follow_servers()
        return not self._unasked or asyncio.get_running_loop().time() - self._began_s >= _KNOWN_AFTER_S

    def placed(self, workload: str, namespace: str, servers: Iterable[str]) -> None:
        """Notes to which servers the processes of a workload may write from now on, by UID."""
        held = self._held.setdefault(workload, _Held(namespace))
        uids = set(servers)
        held.others |= held.placed - uids
        held.placed = uids

    def reported(self, workload: str, namespace: str, nodes: Collection[str]) -> None:
        """Notes that a process says that it has a part in the servers of these nodes."""
        held = self._held.setdefault(workload, _Held(namespace))
        held.others |= {server.uid for node in nodes for server in self._index.on(node)} - held.placed

    def holding(self, workload: str) -> list[SnapshotServerPod]:
        """The servers that may have values of a workload, by node."""
        held = self._held.get(workload)
        if held is None:
            return []
        known = self._index.by_uid
        servers = (known[uid] for uid in held.placed | held.others if uid in known)
        return sorted((server for server in servers if server.serves), key=lambda server: server.node)

    def has_room(self, workload: str, uid: str, size_bytes: int) -> bool:
        """Whether a server has room for so many bytes of a workload, counting what it has of it. True if not known."""
        figures = self._figures.get(uid)
        if figures is None:
            return True
        own = figures["workloads"].get(workload, {})
        free_bytes = figures["capacity_bytes"] - figures["used_bytes"] + int(own.get("used_bytes", 0))
        return bool(free_bytes >= size_bytes)

    def look(self, lives: Callable[[str], bool]) -> None:
        """Begins what is due.

        Args:
            lives: Returns whether a workload, by UID, exists, has not finished, and has snapshots.
        """
        now_s = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._began_s = now_s
        self._follow_servers()
        self._show()
        if self.keys.keys and self._authorities():
            self._to_drop = collections.deque(self._due_to_drop(lives, now_s))
            while self._times and self._times[0][0] <= now_s:
                at_s, uid = heapq.heappop(self._times)
                if self._next_s.get(uid, 0.0) == at_s:
                    self._to_ask[uid] = None
            self._begin_waiting()

    def _follow_servers(self) -> None:
        """Takes which servers came, changed or went. What went is forgotten, with what it held."""
        index = self._index
        if not index.touched:
            return
        touched, index.touched = index.touched, set()
        gone = touched - index.by_uid.keys()
        for uid in touched:
            if (before := self._states.pop(uid, None)) is not None:
                self._numbers[before] -= 1
            self._unasked.discard(uid)
            if uid in gone:
                self._next_s.pop(uid, None)
                self._take_figures(uid, None)
                continue
            server = index.by_uid[uid]
            state = self._states[uid] = _state(server)
            self._numbers[state] += 1
            if server.serves:
                self._note_due(uid)
                if uid not in self._next_s:
                    self._unasked.add(uid)
        for held in self._held.values() if gone else ():
            held.placed -= gone
            held.others -= gone

    def _note_due(self, uid: str) -> None:
        """Has a server asked at its time, or at the next look if it has none."""
        heapq.heappush(self._times, (self._next_s.get(uid, 0.0), uid))

    def _due_to_drop(self, lives: Callable[[str], bool], now_s: float) -> list[tuple[SnapshotServerPod, str]]:
        """The servers to be asked now to drop what is left of a workload, with its UID."""
        if not self._to_look_at:
            self._to_look_at = list(self._held)
        number = min(WORKLOADS_A_LOOK, -(-len(self._held) // LOOKS_AT_ALL))
        turn, self._to_look_at = self._to_look_at[:number], self._to_look_at[number:]
        due: list[tuple[SnapshotServerPod, str]] = []
        servers = self._index.by_uid
        for workload in self._ending.union(turn):
            held = self._held.get(workload)
            if held is None or lives(workload):
                self._ending.discard(workload)
                if held is not None:
                    held.ended_at = None
                continue
            self._ending.add(workload)
            if held.ended_at is None:
                held.ended_at = now_s
            if now_s - held.ended_at < DROPPED_AFTER_S:
                continue
            uids = held.placed | held.others
            if not uids:
                del self._held[workload]
            due += [
                (servers[uid], workload)
                for uid in sorted(uids)
                if servers[uid].serves and held.not_before_s.get(uid, 0.0) <= now_s
            ]
        return [(server, workload) for server, workload in due if (server.uid, workload) not in self._tasks]

    def _begin_waiting(self) -> None:
        """Begins requests while there may be more of them: first to drop something."""
        while self._to_drop and len(self._tasks) < _AT_ONCE:
            self._begin(*self._to_drop.popleft())
        while self._to_ask and len(self._tasks) < _AT_ONCE:
            uid = next(iter(self._to_ask))
            del self._to_ask[uid]
            server = self._index.by_uid.get(uid)
            # One that cannot be asked now is noted again when it has changed, and one that is asked now, after that.
            if server is not None and server.serves and (uid, "") not in self._tasks:
                self._begin(server, "")

    def _begin(self, server: SnapshotServerPod, workload: str) -> None:
        work = self._drop(server, workload) if workload else self._ask_figures(server)
        task = asyncio.get_running_loop().create_task(work, name=f"snapshot server of {server.node}")
        self._tasks[server.uid, workload] = task
        task.add_done_callback(functools.partial(self._ended, (server.uid, workload)))

    def _ended(self, key: tuple[str, str], _: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if not key[1]:
            self._note_due(key[0])
        self._begin_waiting()

    async def close(self) -> None:
        """Cancels all requests."""
        self._to_drop.clear()
        self._to_ask.clear()
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _ask_figures(self, server: SnapshotServerPod) -> None:
        loop = asyncio.get_running_loop()
        try:
            figures = _checked(await self._ask(server, Right.STAT, "all", "all", op="stat"))
        except NotAnswered as error:
            logger.warning(
                "a snapshot server did not say what it holds", extra=seldom("stat", node=server.node, error=str(error))
            )
            self._note_asked(server.uid, loop.time() + _FAILED_AGAIN_S)
            return
        if server.uid not in self._index.by_uid:
            return  # it has gone meanwhile, with what it held
        pause_s = max(ASKED_AGAIN_S, PAUSE_OF_EACH_S * len(self._index.by_uid))
        self._note_asked(server.uid, loop.time() + pause_s * (0.5 + self._random.random()))  # not all of them at once
        self._take_figures(server.uid, figures)
        for workload, row in figures["workloads"].items():
            if row["values"]:
                held = self._held.setdefault(workload, _Held(str(row["namespace"])))
                if server.uid not in held.placed:
                    held.others.add(server.uid)
        for workload, held in self._held.items():
            if not figures["workloads"].get(workload, {}).get("values"):
                held.others.discard(server.uid)

    def _note_asked(self, uid: str, again_s: float) -> None:
        """Notes that a server was asked, and when it is asked again. Not if it has gone meanwhile."""
        if uid in self._index.by_uid:
            self._next_s[uid] = again_s
            self._unasked.discard(uid)

    def _take_figures(self, uid: str, figures: Mapping[str, Any] | None) -> None:
        """Keeps what a server said last. None: it is gone."""
        before = self._figures.pop(uid, None)
        if figures is not None:
            self._figures[uid] = figures
        for name in _TOTALS:
            self._totals[name] += (figures or {}).get(name, 0) - (before or {}).get(name, 0)

    async def _drop(self, server: SnapshotServerPod, workload: str) -> None:
        held = self._held[workload]
        try:
            answer = await self._ask(server, Right.DROP, held.namespace, workload, op="drop", under="")
        except NotAnswered as error:
            logger.warning(
                "a snapshot server did not drop what is left of a workload, trying again",
                extra=seldom("drop", node=server.node, workload_uid=workload, error=str(error)),
            )
            answer = {"values": 1}
        if answer.get("values"):
            held.not_before_s[server.uid] = asyncio.get_running_loop().time() + DROPPED_AGAIN_S
            return
        held.placed.discard(server.uid)
        held.others.discard(server.uid)
        logger.info("nothing is left of a workload", extra=about(node=server.node, workload_uid=workload))

    async def _ask(
        self, server: SnapshotServerPod, right: Right, namespace: str, workload: str, **request: object
    ) -> dict[str, Any]:
        """Asks a server with a capability of the operator's own.

        Raises:
            NotAnswered: There is no answer, or it is a refusal.
        """
        capability = self.keys.write(
            Capability(
                namespace=namespace,
                workload=workload,
                attempt=_ANY_ATTEMPT,
                rights=frozenset({right}),
                until=int(self._clock() + _CAPABILITY_S),
                max_bytes=0,
            ),
            self._clock(),
        )
        try:
            async with asyncio.timeout(_WITHIN_S):
                return await _conversation(
                    server.host, self.settings.port, self._tls(), self.server_name, capability or "", request
                )
        except TimeoutError as error:
            raise NotAnswered(f"no answer within {_WITHIN_S:.0f} s") from error
        except (OSError, EOFError, ValueError, RecursionError) as error:  # ssl.SSLError is an OSError
            raise NotAnswered(repr(error)) from error

    def _tls(self) -> ssl.SSLContext:
        authorities = self._authorities()
        if self._context is None or self._context[0] != authorities:
            context = ssl.create_default_context(cadata=authorities)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            self._context = (authorities, context)
        return self._context[1]

    def _show(self) -> None:
        for state, number in self._numbers.items():
            self._metrics.snapshot_servers.labels(state).set(number)
        for name, total in self._totals.items():
            self._metrics.snapshot_bytes.labels(name.removesuffix("_bytes")).set(total)


def _state(server: SnapshotServerPod) -> str:
    """One of ``_STATES``."""
    if server.ending:
        return "ending"
    return "ready" if server.serves else "not_ready"


def _checked(figures: dict[str, Any]) -> dict[str, Any]:
    """Returns what a server says of itself, if it can be read.

    Raises:
        NotAnswered: It cannot.
    """
    workloads = figures.get("workloads")
    numbers = [figures.get("capacity_bytes"), figures.get("used_bytes")]
    if isinstance(workloads, dict):
        rows = [row if isinstance(row, dict) else {} for row in workloads.values()]
        numbers += [row.get(name) for row in rows for name in ("values", "used_bytes")]
        if all(type(number) is int for number in numbers) and all(
            isinstance(row.get("namespace"), str) for row in rows
        ):
            return figures
    raise NotAnswered(f"expected figures, found {str(figures)[:200]!r}")


async def _conversation(
    host: str,
    port: int,
    context: ssl.SSLContext,
    server_name: str,
    capability: str,
    request: Mapping[str, object],
) -> dict[str, Any]:
    """Asks a server one question on a connection of its own. Returns the answer's body if it has one, else its header.

    Raises:
        NotAnswered: The server refuses, or its answer is none.
        OSError, EOFError, ValueError: It cannot be reached, or its answer cannot be read.
    """
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=server_name)
    try:
        writer.write(frame(op="hello", capability=capability))
        await _answer(reader)
        writer.write(frame(**request))
        answer = await _answer(reader)
        if request["op"] != "stat":
            return answer
        size_bytes = answer.get("bytes")
        if type(size_bytes) is not int or not 0 <= size_bytes <= _LONGEST_ANSWER_BYTES:
            raise NotAnswered(
                f"expected an answer of up to {_LONGEST_ANSWER_BYTES} bytes, found {str(size_bytes)[:80]}"
            )
        return _object(await reader.readexactly(size_bytes))
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    magic, length = PREFIX.unpack(await reader.readexactly(PREFIX.size))
    if magic != MAGIC or length > LONGEST_HEADER_BYTES:
        raise NotAnswered(f"expected {MAGIC!r} and at most {LONGEST_HEADER_BYTES} bytes, found {magic!r} and {length}")
    answer = _object(await reader.readexactly(length))
    if "refused" in answer:
        raise NotAnswered(f"{answer['refused']}: {answer.get('message')}"[:500])
    return answer


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise NotAnswered(f"expected a JSON object, found {data[:80]!r}")
    return value
