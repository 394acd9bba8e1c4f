"""Limits how many gangs per minute get a notice for signals that are not sure. Pure.

For example, a network partition makes many nodes unreachable at once, and most of them come back. Without a limit every
gang in the cluster would save and exit.

All replicas see the records, but with a delay. Without a further rule, each of two replicas could use the whole limit
at the same moment for different gangs. So each replica has a share of the limit, against which only the records count
that it created or is about to create. Each record is created by one replica, so all replicas together stay within the
limit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from gracepoint.wire.messages import Confidence, Mode
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.resources import PreemptionSpec

WINDOW_S = 60.0
DEFAULT_LIKELY_GANGS_PER_MINUTE = 10


def holds_back(
    spec: PreemptionSpec, epochs: Iterable[PreemptionRecord], own: Container[tuple[str, str]], limit: int, replicas: int
) -> bool:
    """Returns True if an epoch must wait because the limit was reached within the last ``WINDOW_S`` seconds.

    Args:
        spec: Spec of the epoch that would begin.
        epochs: The epochs that were created within that time, or are not created yet.
        own: Namespaces and names of the records that this replica created.
        limit: Number of gangs a minute, for all replicas together.
        replicas: Number of replicas. Each may begin at least one epoch, even if ``limit`` is smaller than this number.
    """

    def counts(of: PreemptionSpec) -> bool:
        return of.confidence is not Confidence.SURE and of.mode is not Mode.OBSERVE

    if not counts(spec):
        return False
    told = [epoch for epoch in epochs if counts(epoch.spec)]
    ours = [epoch for epoch in told if epoch.created_at is None or epoch.key in own]
    return _gangs(told) >= limit or _gangs(ours) >= max(1, limit // replicas)


def _gangs(epochs: Iterable[PreemptionRecord]) -> int:
    return len({epoch.spec.workload.uid for epoch in epochs})
