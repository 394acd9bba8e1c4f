"""What ``benchmarks.notice`` has measured, as figures. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.report import Figure

#: The goals are of so many subscribers.
GOAL_COUNT = 1000
_TOLD_GOALS_S = (0.25, 1.0)  # p50, p99
_MIB = 1 << 20


@dataclasses.dataclass
class Measured:
    """Of one number of subscribers.

    Attributes:
        bare_bytes: The operator's resident memory before anybody subscribed.
        subscribed_bytes: The same with all subscribed.
        subscribing_cpu_s: What subscribing all cost the operator.
        connected_s: From starting the first client until all were connected.
        sent_s: From a taint to when the operator wrote the notice to a connection, of each client and notice.
        told_s: From a taint to the notice in a mailbox.
        acknowledged_s: From a taint to the operator's answer to a receipt.
        cpu_s: What each notice, with its retraction, cost the operator.
        peak_bytes: The most memory after any notice.
        missed: Notices and receipts that did not come.
    """

    bare_bytes: int
    subscribed_bytes: int
    subscribing_cpu_s: float
    connected_s: float
    sent_s: list[float] = dataclasses.field(default_factory=list)
    told_s: list[float] = dataclasses.field(default_factory=list)
    acknowledged_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    missed: int = 0


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The value below which so much lies; None of nothing."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def latencies(who: str, stage: str, seconds: Sequence[float], *goals_s: float) -> list[Figure]:
    """How long after the taint a stage was reached: two quantiles, with goals or without."""
    p50_s, p99_s = goals_s or (None, None)
    return [
        Figure(f"{who}: taint -> {stage}, p50", percentile(seconds, 50), "s", p50_s),
        Figure(f"{who}: taint -> {stage}, p99", percentile(seconds, 99), "s", p99_s),
    ]


def figures(count: int, measured: Measured) -> list[Figure]:
    """In the order of the table."""
    who = f"{count} subscribers"
    return [
        *latencies(who, "sent", measured.sent_s),
        *latencies(who, "told", measured.told_s, *(_TOLD_GOALS_S if count >= GOAL_COUNT else ())),
        *latencies(who, "acknowledged", measured.acknowledged_s),
        Figure(f"{who}: notices or receipts that did not come", measured.missed, "", 0),
        Figure(f"{who}: all connected after", measured.connected_s, "s"),
        Figure(f"{who}: operator's CPU for subscribing", measured.subscribing_cpu_s, "s"),
        Figure(f"{who}: operator's CPU for a notice and its retraction", percentile(measured.cpu_s, 50), "s"),
        Figure(f"{who}: operator's memory before", measured.bare_bytes / _MIB, "MiB"),
        Figure(f"{who}: operator's memory, all subscribed", measured.subscribed_bytes / _MIB, "MiB"),
        Figure(f"{who}: operator's memory, most", measured.peak_bytes / _MIB, "MiB"),
    ]
