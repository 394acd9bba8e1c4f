"""Which snapshot servers hold what of a gang, and what is said of its snapshots. Pure.

The parts of the processes of a node go to the server of that node and to that of one other node, its peer. The nodes of
the gang stand in a ring, ordered by their failure domain and then by a digest of their names. The peer of a node is
the one that comes after it at a fixed distance: one if there are no domains, else the size of the largest domain. So
each server has the parts of one other node, and as many peers as possible are of another domain.

A server is used if it is ready and its node has no signal. If not, the ring stays, and only the parts that the server
would have go elsewhere: each to the next server, in the order of the digests, that has less than its share. A server of
a node outside of the gang is used if none inside is of another domain. Nothing has to be remembered: all replicas find
the same.
"""

from __future__ import annotations

import bisect
import collections
import datetime
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from gracepoint.wire.messages import SnapshotReport, one_line
from gracepoint_operator.decisions.preemption_status import Note
from gracepoint_operator.resources import CheckpointPolicy, Condition, ConditionStatus, WorkloadSnapshots
from gracepoint_operator.workloads import ANY_PLURAL, WorkloadIdentity

#: Node -> the values of the labels of its failure domains, the widest first.
Domains = Mapping[str, Sequence[str]]

#: So many servers are looked at for one that has no more than its share. With nearly all in use, more cost seconds.
_LOOKS = 256


class Usable:
    """The nodes whose servers may be used. It is made once for all gangs, as it orders all of them.

    Args:
        nodes: The nodes.
        before: What is already in order: only nodes that come or go cost work.
    """

    def __init__(self, nodes: Iterable[str], before: Usable | None = None) -> None:
        self.nodes = frozenset(nodes)
        known = [] if before is None else [entry for entry in before.ring if entry[1] in self.nodes]
        new = self.nodes if before is None else self.nodes - before.nodes
        self.ring: list[tuple[bytes, str]] = sorted([*known, *((_digest("", node), node) for node in new)])


def place(
    nodes: Collection[str],
    usable: Usable,
    domains: Domains,
    copies: int,
    salt: str,
    *,
    doomed: Set[str] = frozenset(),
    has_room: Callable[[str], bool] = lambda node: True,
) -> dict[str, tuple[str, ...]]:
    """Returns for each node of a gang the nodes whose servers hold its parts, at most ``copies``, the nearest first.

    Args:
        nodes: The nodes of the gang.
        usable: The nodes whose servers may be used, also others than the gang's.
        doomed: Those of them that go away, as only the gang knows.
        domains: The failure domains of all of them. A node that is missing is of an unknown one.
        copies: How many servers are to hold each part.
        salt: Distinguishes gangs, so that not all of them choose the same servers. The UID of the workload.
        has_room: Returns whether the server of a node outside of the gang has room for a part.
    """
    gang = sorted(nodes, key=lambda node: _digest(salt, node))
    available = {node for node in gang if node in usable.nodes and node not in doomed}
    domain_of = _separating(gang, domains)
    members = set(gang)
    inside = _Servers([(_digest(salt, node), node) for node in gang if node in available], domain_of, salt)
    outside = _Servers(
        usable.ring, domain_of, salt, lambda node: node not in members and node not in doomed and has_room(node)
    )
    chosen: dict[str, tuple[str, ...]] = {node: (node,) if node in available else () for node in gang}
    lacking = sum(copies - len(servers) for servers in chosen.values())
    inside.share = math.ceil(lacking / max(1, len(available)))
    peers = _peers(gang, domain_of) if copies > 1 else {}
    for node, peer in peers.items():
        if peer in available and domain_of(node) != domain_of(peer):
            chosen[node] += (inside.take(peer),)
    has_domains = len(set(map(domain_of, gang))) > 1
    # Without one, each look for a server of another domain would go around the ring in vain.
    has_outer_domains = bool(gang) and any(domain_of(node) != domain_of(gang[0]) for node in usable.nodes)
    for node in gang:
        while len(chosen[node]) < copies:
            has = chosen[node]
            server = (
                (inside.next_after(node, has, other_domain=True) if has_domains else None)
                or (outside.next_after(node, has, other_domain=True) if has_outer_domains else None)
                or (inside.take_spare(peers[node], has) if peers.get(node) in available else None)
                or inside.next_after(node, has, other_domain=False)
                or outside.next_after(node, has, other_domain=False)
            )
            if server is None:
                break
            chosen[node] += (server,)
    return chosen


def _peers(gang: Sequence[str], domain_of: Callable[[str], str]) -> dict[str, str]:
    """Returns the peer of each node in the ring. Empty if there is only one."""
    largest, count = max(collections.Counter(map(domain_of, gang)).values(), default=0), len(gang)
    ring = sorted(gang, key=domain_of) if largest > 1 else gang
    # If more than half are of one domain, the most of them have a peer of another one at half of the ring.
    distance = max(1, min(largest, count // 2))
    return {node: ring[(index + distance) % count] for index, node in enumerate(ring)} if count > 1 else {}


class _Servers:
    """Servers of which peers are chosen.

    Args:
        ring: Their nodes with the digests by which they are ordered.
        domain_of: Returns the failure domain of a node.
        salt: Distinguishes gangs.
        may_use: Returns whether the server of a node may be chosen.

    Attributes:
        share: How many nodes' parts each is to have at most.
    """

    def __init__(
        self,
        ring: Sequence[tuple[bytes, str]],
        domain_of: Callable[[str], str],
        salt: str,
        may_use: Callable[[str], bool] = lambda node: True,
    ) -> None:
        self._ring = ring
        self._domain_of = domain_of
        self._salt = salt
        self._may_use = may_use
        self._used: collections.Counter[str] = collections.Counter()
        self.share = 1

    def take(self, node: str) -> str:
        """Counts one more use of a server. Returns its node."""
        self._used[node] += 1
        return node

    def take_spare(self, node: str, has: Collection[str]) -> str | None:
        """Takes a server if it has less than its share, and is not taken already. None: it has, or is."""
        return None if node in has or self._used[node] >= self.share else self.take(node)

    def next_after(self, node: str, has: Collection[str], *, other_domain: bool) -> str | None:
        """Takes the first server after a node, in the order of the digests, that has less than its share.

        If all have it and ``other_domain`` is false, the one that has the least. None: there is none.
        """
        domain = self._domain_of(node)
        begin = bisect.bisect_right(self._ring, (_digest(self._salt, node), node))
        least: str | None = None
        for step in range(min(len(self._ring), _LOOKS)):
            _, server = self._ring[(begin + step) % len(self._ring)]
            if server == node or server in has or (other_domain and self._domain_of(server) == domain):
                continue
            if not self._may_use(server):
                continue
            if self._used[server] < self.share:
                return self.take(server)
            if not other_domain and (least is None or self._used[server] < self._used[least]):
                least = server
        return None if least is None else self.take(least)


def _separating(nodes: Collection[str], domains: Domains) -> Callable[[str], str]:
    """Returns what finds the failure domain of a node.

    That is the first label by which each of the nodes can have a peer of another domain, else the one that separates
    the most of them. Without labels, each node is a domain.
    """
    keys = max((len(domains.get(node, ())) for node in nodes), default=0)
    best, least = -1, math.inf
    for key in range(keys):
        largest = max(collections.Counter(_value(domains, node, key) for node in nodes).values())
        if largest < least:
            best, least = key, largest
        if largest * 2 <= len(nodes):
            break
    return (lambda node: _value(domains, node, best)) if best >= 0 else (lambda node: node)


def _value(domains: Domains, node: str, key: int) -> str:
    values = domains.get(node, ())
    return values[key] if key < len(values) else ""


@functools.lru_cache(maxsize=1 << 17)
def _digest(salt: str, node: str) -> bytes:
    return hashlib.blake2b(f"{salt}/{node}".encode(), digest_size=8).digest()


def shortfall(chosen: int, copies: int, servers: int) -> str:
    """Returns why a part has fewer copies than the policy says, as text. Empty if it has not.

    Args:
        chosen: In how many servers it is.
        copies: In how many it is to be.
        servers: How many servers the installation has.
    """
    if chosen >= copies:
        return ""
    if not servers:
        return "there is no snapshot server: expected its DaemonSet to have pods (snapshots.nodeSelector of the chart)"
    return (
        f"{chosen} of {copies} copies: no other node has a snapshot server that is ready, and no signal "
        f"({servers} servers are known)"
    )


CONDITION_SNAPSHOTS_SAFE = "SnapshotsSafe"
REASON_SAFE, REASON_NONE = "SnapshotsSafe", "NoSnapshots"
REASON_LATE, REASON_FEWER, REASON_NO_SERVERS = "SnapshotsLate", "FewerSnapshotCopies", "NoSnapshotServers"
REASONS = (REASON_LATE, REASON_FEWER, REASON_NO_SERVERS)

#: A snapshot is late once its age is so many intervals, and at least so many seconds.
_LATE_INTERVALS, _LATE_AFTER_S = 3.0, 120.0
#: The same in seconds if the interval is not known.
_LATE_WITHOUT_INTERVAL_S = 1800.0
_ENTRIES = 50  # the limit in the schema


def snapshots_of(
    workload: WorkloadIdentity,
    report: SnapshotReport,
    reported_at: float,
    copies: int,
    lacking: str,
    now: float,
) -> WorkloadSnapshots:
    """Returns what is known of the snapshots of a gang.

    Args:
        workload: The workload.
        report: The newest report of process 0.
        reported_at: When it came, in seconds since the epoch.
        copies: How many copies the policy wants.
        lacking: Why its processes cannot have as many servers (``shortfall``). Empty: they can.
        now: Seconds since the epoch.

    Raises:
        pydantic.ValidationError: A figure is impossible.
    """
    passed_at = None if report.age_s is None else reported_at - report.age_s
    reason, message = _unsafe(report, reported_at, passed_at, copies, lacking, now)
    return WorkloadSnapshots(
        name=workload.name,
        uid=workload.uid,
        workload_kind=WorkloadSnapshots.named(workload.kind),
        safe_step=report.safe_step,
        copies=report.copies,
        passed=None if passed_at is None else _time(passed_at),
        every_seconds=report.interval_s,
        skipped=report.skipped,
        reason=reason,
        message=None if message is None else one_line(message)[:1000],
        time=_time(reported_at),
    )


def _unsafe(
    report: SnapshotReport, reported_at: float, passed_at: float | None, copies: int, lacking: str, now: float
) -> tuple[str | None, str | None]:
    """Returns why the snapshots are not safe, in a word and as a sentence. Neither: they are."""
    interval_s = report.interval_s
    late_s = _LATE_WITHOUT_INTERVAL_S if not interval_s else max(_LATE_AFTER_S, _LATE_INTERVALS * interval_s)
    age_s = now - (reported_at if passed_at is None else passed_at)
    if age_s > late_s:
        which = f"the newest safe snapshot is of step {report.safe_step}, {age_s:.0f} s ago"
        if report.safe_step is None or passed_at is None:
            which = f"no snapshot is safe, {age_s:.0f} s after this was said first"
        due = "" if not interval_s else f"; one is due every {interval_s:.0f} s"
        skipped = f"; {report.skipped} were skipped, the last one as {report.skipped_reason}" if report.skipped else ""
        return REASON_NO_SERVERS if lacking.startswith("there is no") else REASON_LATE, f"{which}{due}{skipped}" + (
            f"; {lacking}" if lacking else ""
        )
    if report.safe_step is not None and report.copies < copies:
        return REASON_FEWER, f"step {report.safe_step} is in {report.copies} of {copies} servers" + (
            f"; {lacking}" if lacking else ""
        )
    return None, None


def newest_snapshots(
    local: Iterable[WorkloadSnapshots], stored: Iterable[WorkloadSnapshots], workload_uids: Set[str]
) -> list[WorkloadSnapshots]:
    """Merges what two replicas know, so that both report the same: the newest of each workload that exists."""
    newest: dict[str, WorkloadSnapshots] = {}
    for item in sorted((*stored, *local), key=lambda item: item.time):
        if item.uid in workload_uids:
            newest[item.uid] = item
    kept = sorted(newest.values(), key=lambda item: item.time)[-_ENTRIES:]
    return sorted(kept, key=lambda item: (item.name, item.uid))


def snapshots_condition(policy: CheckpointPolicy, entries: Sequence[WorkloadSnapshots], now: float) -> Condition:
    """Returns the condition SnapshotsSafe of a policy with these entries."""
    unsafe = [item for item in entries if item.reason is not None]
    if not entries:
        status, reason = ConditionStatus.UNKNOWN, REASON_NONE
        message = f"none of the {ANY_PLURAL} has reported snapshots"
    elif unsafe:
        status, reason = ConditionStatus.FALSE, unsafe[0].reason or REASON_LATE
        names = ", ".join(item.name for item in unsafe[:5])
        message = (
            f"the snapshots of {len(unsafe)} {ANY_PLURAL} are not safe ({names}): an end without notice loses more "
            f"than one interval. {unsafe[0].name}: {unsafe[0].message}"
        )
    else:
        status, reason = ConditionStatus.TRUE, REASON_SAFE
        message = f"the snapshots of {len(entries)} {ANY_PLURAL} are in the memory of nodes"
    return Condition(
        type=CONDITION_SNAPSHOTS_SAFE,
        status=status,
        reason=reason,
        message=message[:4096],
        last_transition_time=_time(now).replace(microsecond=0),
        observed_generation=policy.generation,
    )


def snapshots_note(entry: WorkloadSnapshots) -> Note:
    """Returns the Event on the workload when it has changed whether, or why, its snapshots are not safe."""
    if entry.reason is not None:
        return Note(entry.reason, entry.message or "", warning=True)
    return Note(REASON_SAFE, f"step {entry.safe_step} is in {entry.copies} snapshot servers")


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)
