"""Six hours of two replicas' metrics, as Prometheus would have scraped them.

The operator's own ``Metrics`` count what the script below says, so that names, labels and buckets are the operator's.
Label values are the operator's too, where it has a list of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gracepoint.wire.messages import Mode, Phase, TroubleKind
from gracepoint_operator.cache.relister import ALWAYS
from gracepoint_operator.channel.authentication import AuthenticationFailure
from gracepoint_operator.decisions.waiting import WaitKind
from gracepoint_operator.limited_port import CloseReason
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.recording import preemption_writer
from gracepoint_operator.signals import Cause

#: When the recording begins, in seconds since the epoch. A fixed time, so that the pictures are comparable.
BEGIN_S = 1_790_000_000
HOURS = 6
#: The chart's ``podMonitor.interval``.
SCRAPE_S = 30
END_S = BEGIN_S + HOURS * 3600

_PODS = 480
_CERTIFICATE_S = 42 * 86_400
#: Where the time of the recorded job goes.
_TIME_SHARES = {
    "training": 0.94,
    "saving": 0.01,
    "recomputation": 0.01,
    "waiting": 0.02,
    "restore": 0.01,
    "compile": 0.01,
}


class _Disruption(NamedTuple):
    """One preemption: at which minute, why, and how it ends."""

    minute: int
    cause: Cause
    lead_s: float
    end: Phase
    spare_s: float = 0.0


_CAUSES = ((Cause.SPOT_TERMINATION, 25.0), (Cause.DRAIN, 600.0), (Cause.MAINTENANCE, 3600.0))


def _disruptions(chance: random.Random) -> list[_Disruption]:
    """Some single ones, and a wave of many in the fourth hour."""
    minutes = [*chance.sample(range(HOURS * 60), 24), *(chance.randrange(195, 215) for _ in range(60))]
    made = []
    for minute in minutes:
        cause, lead_s = chance.choice(_CAUSES)
        end = chance.choices(
            (Phase.COMMITTED, Phase.PROMOTED, Phase.RETRACTED, Phase.EXPIRED, Phase.FAILED), (80, 6, 8, 4, 2)
        )[0]
        made.append(_Disruption(minute, cause, lead_s, end, lead_s * chance.uniform(0.1, 0.7)))
    return made


class _Replica:
    """One replica and its counters."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self._chance = chance
        self._metrics = Metrics()
        preemption_writer.show_losses(self._metrics)

    def live(self, at_s: int, *, alone: bool) -> None:
        """What happens between two scrapes.

        Args:
            at_s: The time of the second one.
            alone: True while the other replica is down.
        """
        metrics, chance = self._metrics, self._chance
        metrics.subscriptions.set(_PODS if alone else _PODS / 2 + chance.randint(-2, 2))
        metrics.pods_not_connected.set(3 if _hour(at_s, 4.5, 4.8) else 0)
        metrics.workloads_without_policy.set(1 if _hour(at_s, 3.0, 3.2) else 0)
        metrics.longest_hold_s.labels(set_by="evictions.longestHoldSeconds").set(600)
        metrics.unrecorded.set(2 if _hour(at_s, 2.0, 2.1) else 0)
        metrics.certificate_expiry.labels(certificate="server").set(BEGIN_S + _CERTIFICATE_S)
        metrics.certificate_expiry.labels(certificate="authority").set(BEGIN_S + 3650 * 86_400)
        metrics.canary_age_s.set(chance.uniform(0, 15))
        metrics.canary_s.observe(chance.uniform(0.001, 0.02))
        metrics.stalled.set(1 if _hour(at_s, 5.0, 5.2) else 0)
        metrics.troubled.labels(kind=TroubleKind.SAVES).set(1 if _hour(at_s, 4.0, 4.2) else 0)
        metrics.troubles.labels(kind=TroubleKind.SAVES).inc(1 if at_s == BEGIN_S + 4 * 3600 else 0)
        for kind in WaitKind:
            waits = kind is WaitKind.NODE and _hour(at_s, 3.5, 3.8)
            metrics.waiting.labels(kind).set(1 if waits else 0)
            metrics.waiting_s.labels(kind).set(at_s - BEGIN_S - 3.5 * 3600 if waits else 0)
        for state, number in {"ready": 15, "ending": 1, "not_ready": 0}.items():
            metrics.snapshot_servers.labels(state).set(number)
        for extent, size_bytes in {"capacity": 16 << 38, "used": 9 << 38}.items():
            metrics.snapshot_bytes.labels(extent).set(size_bytes)
        age_s = (at_s - BEGIN_S) % 60 if not _hour(at_s, 5.0, 5.2) else 900.0
        metrics.show_snapshot_age("research", "llm", lambda: age_s)
        metrics.snapshots_unsafe.labels("SnapshotsLate").set(1 if _hour(at_s, 5.0, 5.2) else 0)
        metrics.snapshots_skipped.inc(1 if chance.random() < 0.02 else 0)
        metrics.snapshot_placements.inc(16 if at_s % 3600 < SCRAPE_S else 0)
        metrics.stalled_pods.clear()
        if _hour(at_s, 5.0, 5.2):
            metrics.stalled_pods.labels("research", "llm", "llm-workers-0-1", "training").set(1)
        spent_s = {category: (at_s - BEGIN_S) * share for category, share in _TIME_SHARES.items()}
        metrics.show_accounts(lambda: [("research", "llm", *spent) for spent in spent_s.items()])
        for loop in ("controller", "channel"):
            for _ in range(60):
                metrics.loop_lag_s.labels(loop=loop).observe(chance.expovariate(200))
        for watched in sorted(ALWAYS, key=lambda watched: watched.title):
            metrics.watch_age_s.labels(kind=watched.title).set(chance.uniform(0, 25))
        if _hour(at_s, 1.0, HOURS):  # the series begins with the first object that cannot be read
            metrics.count_left_out("pods", "part", 1 if _hour(at_s, 1.0, 1.5) else 0)
        for _ in range(chance.randint(2, 6)):
            metrics.count_api_request(chance.choice(("GET", "PATCH", "POST")), "ok")
        metrics.sweep_s.labels(extent="some" if chance.random() < 0.2 else "all").observe(chance.uniform(0.2, 1.5))
        self._fail(at_s)

    def _fail(self, at_s: int) -> None:
        """What goes wrong now and then, and in an outage of the API server in the third hour."""
        metrics, chance = self._metrics, self._chance
        metrics.watch_restarts.labels(thread="watch required")
        if _hour(at_s, 2.0, 2.1):
            metrics.count_api_request("GET", "Unavailable")
            metrics.watch_failures.labels(kind="nodes").inc(6)
            metrics.watch_restarts.labels(thread="watch required").inc()
            metrics.write_failures.inc()
            metrics.trust_failures.labels(what="secret").inc()
            metrics.canary_failures.inc()
        if chance.random() < 0.05:
            metrics.refused.labels(reason=chance.choice(list(AuthenticationFailure))).inc()
            metrics.count_connection_closed(chance.choice(list(CloseReason)))
            metrics.port_connections_closed.labels(port="webhooks", reason=chance.choice(list(CloseReason))).inc()
            metrics.count_webhook_refused("unknown_path")
        if at_s % 3600 < SCRAPE_S:
            metrics.preemptions_deleted.labels(reason="age").inc(4)
            metrics.preemptions_not_deleted.labels(outcome="Refused").inc()

    def begins(self, found: _Disruption) -> None:
        metrics, chance = self._metrics, self._chance
        metrics.phases.labels(phase=Phase.NOTICED, cause=found.cause, mode=Mode.ENFORCE).inc()
        metrics.lead_s.labels(cause=found.cause).observe(found.lead_s)
        for _ in range(16):
            metrics.signal_to_notice_s.observe(chance.uniform(0.01, 0.2))
            metrics.notice_to_ack_s.observe(chance.uniform(0.01, 0.3))
        for answer in ("wait", "go"):
            metrics.evictions.labels(answer=answer).inc(3)

    def ends(self, found: _Disruption) -> None:
        metrics, chance = self._metrics, self._chance
        metrics.phases.labels(phase=found.end, cause=found.cause, mode=Mode.ENFORCE).inc()
        if found.end in (Phase.COMMITTED, Phase.PROMOTED):
            for part, seconds in zip(preemption_writer.PARTS, (0.3, 0.8, 9.0, 0.2), strict=True):
                metrics.emergency_s.labels(part=part).observe(seconds * chance.uniform(0.5, 1.5))
            metrics.spare_s.observe(found.spare_s)
        if found.end is Phase.PROMOTED:
            metrics.steps_lost.inc(chance.randint(1, 40))
        if found.end is Phase.RETRACTED:
            metrics.false_alarms.labels(cause=found.cause, phase=found.end).inc()
        if found.end is Phase.EXPIRED:
            metrics.undelivered.inc()
            metrics.stalls.inc()

    def samples(self) -> Iterator[tuple[str, str, str]]:
        """Each sample: the metric and its type, the series, the value."""
        for family in self._metrics.families():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    series = f'{sample.name}{{pod="{self.name}",job="gp"{"," + labels if labels else ""}}}'
                    yield f"# TYPE {family.name} {family.type}", series, repr(sample.value)


def _hour(at_s: int, begin: float, end: float) -> bool:
    return begin <= (at_s - BEGIN_S) / 3600 < end


def write(path: Path) -> None:
    """Writes the recording as OpenMetrics text."""
    chance = random.Random(7)
    replicas = [_Replica(f"gp-gracepoint-{name}", chance) for name in ("5f6d-abcde", "5f6d-fghij")]
    disruptions = _disruptions(chance)
    found: dict[str, dict[str, list[str]]] = {}
    for at_s in range(BEGIN_S, END_S + 1, SCRAPE_S):
        alone = _hour(at_s, 5.5, 5.6)  # the second replica is down
        minute = (at_s - BEGIN_S) / 60
        for each in disruptions:
            if each.minute == minute:
                replicas[0].begins(each)
            if each.minute + 1 == minute:
                replicas[0].ends(each)
        for replica in replicas[: 1 if alone else 2]:
            replica.live(at_s, alone=alone)
            for kind, series, value in replica.samples():
                found.setdefault(kind, {}).setdefault(series, []).append(f"{series} {value} {at_s}")
    with path.open("w") as file:
        for kind, lines in found.items():
            file.write(kind + "\n")
            for each_series in lines.values():
                file.writelines(f"{line}\n" for line in each_series)
        file.write("# EOF\n")
