"""What ``benchmarks.operator_scale`` has measured, as figures. Pure.

Goals for times and for shares of a core are those of a machine on which the plain list takes ``LIMIT_CPU_S`` for each
object. On a slower one, by the plain list of the same run, they are larger in proportion, but for that of the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.notice_results import percentile
from benchmarks.operator_scale_cluster import Blocked
from benchmarks.operator_scale_objects import Size
from benchmarks.report import Figure

_MIB = 1 << 20
_READY_S = 60.0
_PEAK_MIB, _AFTER_MIB = 512, 300
_IDLE_PERCENT = 2.0
#: CPU time of the plain list for each object, on the machine that goals are for.
LIMIT_CPU_S = 400e-6
#: CPU time of one callback. How long it takes depends on what else the cores do, here everything.
_CALLBACK_S = 0.05
_NOTICE_S, _BIG_S, _EVICTION_S, _FLOODED_EVICTION_S = 1.0, 2.0, 0.2, 0.3


class Limit(NamedTuple):
    """What a minimal client needed to list the same objects."""

    wall_s: float
    cpu_s: float
    requests: int
    objects: int
    bytes: int
    api_cpu_s: float

    @property
    def slowness(self) -> float:
        """How many times slower this machine is than the one that goals are for; 1 on a faster one."""
        return max(1.0, self.cpu_s / self.objects / LIMIT_CPU_S)


@dataclasses.dataclass
class Starts:
    """The starts of the replicas, one after another.

    Attributes:
        wall_s: From the start of the process until it was ready.
        cpu_s: Its CPU seconds until then.
        api_cpu_s: Those of the API server and etcd in that time.
        peak_bytes: The most memory until then.
        blocked: What blocked the event loops until then.
    """

    wall_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    api_cpu_s: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: list[int] = dataclasses.field(default_factory=list)
    blocked: list[Blocked] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Measured:
    """Everything that was measured. Times are in seconds, shares of a core are of 1.

    Attributes:
        start_peak_bytes: The most memory of a replica before clients connected.
        settled_bytes: Memory of each replica a while after its start.
        idle: Share of a core while nothing happened, of the busier replica.
        connected_s: Until all clients were connected.
        placed_s: Until all clients knew their snapshot servers. None: there are no servers.
        unplaced: Clients that were told of none in time.
        connected_bytes: Memory of each replica then.
        notice_s: From a taint to the notice in a client, of each disruption.
        disruptions_busy: Share of a core during the disruptions, of the busier replica.
        open_busy: The same with ``open_gangs`` preemptions open while nothing happened.
        told_by_both_s: From the taint to the notice of each pod of the big JobSet.
        told_by_one_s: The same after a replica was killed.
        reconnected_s: From its death until all clients were connected again.
        failed_over_bytes: Memory of the other replica then.
        eviction_s: How long each answer to an eviction took.
        read_s: How long it took to read the node of each pod from the API server at the same time.
        scrape_s: How long a scrape of both replicas took, if they were scraped.
        missed: Notices that did not come.
        blocked: What blocked the event loops after the start.
    """

    size: Size
    limit: Limit = dataclasses.field(default_factory=lambda: Limit(0, 0, 0, 0, 0, 0))
    starts: Starts = dataclasses.field(default_factory=Starts)
    start_peak_bytes: int = 0
    settled_bytes: list[int] = dataclasses.field(default_factory=list)
    idle: float = 0.0
    connected_s: float = 0.0
    placed_s: float | None = None
    unplaced: int = 0
    connect_cpu_s: float = 0.0
    connections: int = 0
    connected_bytes: list[int] = dataclasses.field(default_factory=list)
    notice_s: list[float] = dataclasses.field(default_factory=list)
    disruptions_busy: float = 0.0
    open_busy: float = 0.0
    open_gangs: int = 0
    told_by_both_s: list[float] = dataclasses.field(default_factory=list)
    told_by_one_s: list[float] = dataclasses.field(default_factory=list)
    big_cpu_s: list[float] = dataclasses.field(default_factory=list)
    reconnected_s: float = 0.0
    failed_over_bytes: int = 0
    most_bytes: int = 0
    eviction_s: list[float] = dataclasses.field(default_factory=list)
    evictions_failed: int = 0
    read_s: list[float] = dataclasses.field(default_factory=list)
    scrape_s: list[float] = dataclasses.field(default_factory=list)
    missed: int = 0
    receipts_missed: int = 0
    blocked: list[Blocked] = dataclasses.field(default_factory=list)


def figures(measured: Measured) -> list[Figure]:
    """In the order of the table."""
    found = _without_clients(measured)
    return found + _with_clients(measured) if measured.connections else found


def _without_clients(measured: Measured) -> list[Figure]:
    limit, starts = measured.limit, measured.starts
    return [
        Figure("limit: a plain list of the same objects", limit.wall_s, "s"),
        Figure("limit: its CPU", limit.cpu_s, "s"),
        Figure("limit: how much slower this machine is than the one of the goals", limit.slowness, "x"),
        Figure("limit: CPU of the API server and etcd", limit.api_cpu_s, "s"),
        Figure("limit: bytes", limit.bytes / _MIB, "MiB"),
        Figure("start: until ready", max(starts.wall_s), "s", _READY_S),
        Figure("start: of the plain list", max(starts.wall_s) / limit.wall_s, "x"),
        Figure("start: CPU", max(starts.cpu_s), "s"),
        Figure("start: CPU of the API server and etcd", max(starts.api_cpu_s), "s"),
        Figure("memory: peak of the start", measured.start_peak_bytes / _MIB, "MiB", _PEAK_MIB),
        Figure("memory: after the start", max(measured.settled_bytes) / _MIB, "MiB", _AFTER_MIB),
        *_blocked("start", starts.blocked, limit.slowness),
        Figure("idle: share of a core", measured.idle * 100, "%", _IDLE_PERCENT * limit.slowness),
    ]


def _with_clients(measured: Measured) -> list[Figure]:
    slowness = measured.limit.slowness
    evictions_s = _FLOODED_EVICTION_S if measured.scrape_s else _EVICTION_S
    return [
        Figure(f"connect: {measured.connections} clients", measured.connected_s, "s"),
        *_placed(measured),
        Figure("connect: CPU of both replicas", measured.connect_cpu_s, "s"),
        Figure("connect: memory of the larger replica", max(measured.connected_bytes) / _MIB, "MiB"),
        *_latencies("disruptions, 100 a minute: told", measured.notice_s, _NOTICE_S * slowness),
        Figure("disruptions: share of a core", measured.disruptions_busy * 100, "%"),
        Figure(f"{measured.open_gangs} open preemptions: share of a core", measured.open_busy * 100, "%"),
        *_latencies(
            f"{measured.size.big} pods of one JobSet, two replicas: told", measured.told_by_both_s, _BIG_S * slowness
        ),
        *_latencies(
            f"{measured.size.big} pods of one JobSet, one replica: told", measured.told_by_one_s, _BIG_S * slowness
        ),
        Figure("big: CPU of the operator, two replicas", measured.big_cpu_s[0], "s"),
        Figure("big: CPU of the operator, one replica", measured.big_cpu_s[1], "s"),
        Figure("failover: all clients connected again", measured.reconnected_s, "s"),
        Figure("failover: memory of the replica that is left", measured.failed_over_bytes / _MIB, "MiB"),
        Figure("memory: the most of the first replica", measured.most_bytes / _MIB, "MiB"),
        *_latencies("evictions: answered", measured.eviction_s, evictions_s * slowness),
        Figure("evictions: a node is read at the same time, p50", percentile(measured.read_s, 50), "s"),
        Figure("evictions: a node is read at the same time, p99", percentile(measured.read_s, 99), "s"),
        Figure("evictions that were not answered", measured.evictions_failed, "", 0),
        *([Figure("scrapes of both replicas: at most", max(measured.scrape_s), "s")] if measured.scrape_s else []),
        Figure("notices that did not come", measured.missed, "", 0),
        Figure("receipts that were not taken", measured.receipts_missed, ""),
        *_blocked("after the start", measured.blocked, slowness),
    ]


def _placed(measured: Measured) -> list[Figure]:
    if measured.placed_s is None:
        return []
    return [
        Figure("connect: all clients know their snapshot servers", measured.placed_s, "s"),
        Figure("clients that were told of no snapshot server", measured.unplaced, "", 0),
    ]


def _latencies(what: str, seconds: Sequence[float], goal_s: float) -> list[Figure]:
    return [
        Figure(f"{what}, p50", percentile(seconds, 50), "s"),
        Figure(f"{what}, p99", percentile(seconds, 99), "s", goal_s),
    ]


def _blocked(when: str, blocked: Sequence[Blocked], slowness: float) -> list[Figure]:
    """The longest that one callback held the controller's loop and the channel's, and how much of that was its work."""
    found = []
    for thread, loop in (("server", "controller's loop"), ("channel", "channel's loop")):
        of_loop = [item for item in blocked if item.thread == thread]
        took_s = max((item.took_s for item in of_loop), default=0.0)
        worked_s = max((item.worked_s for item in of_loop), default=0.0)
        found.append(Figure(f"{when}: {loop} blocked at most", took_s, "s"))
        found.append(Figure(f"{when}: {loop}, CPU of the longest callback", worked_s, "s", _CALLBACK_S * slowness))
    return found
