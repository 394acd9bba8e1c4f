"""A limit on gangs told per minute for signals that are not sure. Pure.

A network partition, say, makes many nodes unreachable at once, most of which come back. Without a limit every gang in
the cluster would save and leave for it.

The records are what all replicas see, but a moment late: at one and the same moment each of two replicas might tell as
many gangs as the limit allows, and each others. So each has a share of the limit, against which counts what it began
itself: the records that it made, and those that it is about to make. Each record is made by one replica, which is
why all together tell no more than the limit; and what two replicas begin alike is of one share as soon as it is made.
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
    """True if this epoch must wait, as enough gangs were told of what is not sure within the last ``WINDOW_S``.

    Args:
        spec: Of the epoch that would begin.
        epochs: Those that were made within that time, or are not made yet.
        own: Namespaces and names of the records that this replica made.
        limit: Gangs a minute, told by all replicas together.
        replicas: How many there are. Each tells one at least, also where ``limit`` is less than this.
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
