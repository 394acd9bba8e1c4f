"""A limit on gangs told per minute for signals that are not sure. Pure.

A network partition, say, makes many nodes unreachable at once, most of which come back. Without a limit every gang in
the cluster would save and leave for it. All replicas count the same Preemptions, so that they hold back alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from gracepoint.wire.messages import Confidence, Mode
from gracepoint_operator.epochs import Epoch
from gracepoint_operator.resources import PreemptionSpec

WINDOW_S = 60.0
DEFAULT_LIKELY_GANGS_PER_MINUTE = 10


def holds_back(spec: PreemptionSpec, epochs: Iterable[Epoch], now: float, limit: int) -> bool:
    """True if this epoch must wait, as ``limit`` gangs were told within the last minute of what is not sure.

    Args:
        spec: Of the epoch that would begin.
        epochs: All that are known.
        now: Seconds since the epoch.
        limit: Gangs a minute.
    """

    def counts(of: PreemptionSpec) -> bool:
        return of.confidence is not Confidence.SURE and of.mode is not Mode.OBSERVE

    if not counts(spec):
        return False
    # One that is not made yet has begun just now.
    recent = (epoch for epoch in epochs if epoch.created_at is None or now - epoch.created_at < WINDOW_S)
    return sum(counts(epoch.spec) for epoch in recent) >= limit
