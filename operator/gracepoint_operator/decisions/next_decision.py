"""When time alone may change what is decided about a workload. Pure.

A decision follows from the objects and the time (``decide``). A change of an object is an event. These changes come
without an event:

* an epoch under way expires some time after its deadline;
* a signal that is too far ahead comes nearer than the horizon;
* the exit breaker closes again, so that a gang which only saves may be asked to exit.
"""

from __future__ import annotations

from collections.abc import Iterator

from gracepoint_operator import signals
from gracepoint_operator.decisions.decide import EXPIRE_AFTER_S
from gracepoint_operator.model.gang_snapshot import GangSnapshot

#: Times are compared with "later than", so the decision comes this much later.
_AFTER_S = 0.001


def next_decision_at(gang: GangSnapshot, now: float) -> float | None:
    """Returns when to decide again without an event, in seconds since the epoch. None: not before an event.

    Args:
        gang: What the last decisions were based on.
        now: When they were made, in seconds since the epoch.
    """
    return min((at + _AFTER_S for at in _times(gang) if at + _AFTER_S > now), default=None)


def _times(gang: GangSnapshot) -> Iterator[float]:
    under_way = [epoch for epoch in gang.epochs if not epoch.phase.ended]
    for epoch in under_way:
        yield epoch.spec.deadline.timestamp() + EXPIRE_AFTER_S
    for pod in gang.pods:
        marks = gang.marks.get(pod.uid, ())
        for signal in signals.of_pod(pod, marks) if marks else ():
            yield signal.near_at(gang.since[signal.mark])
    if gang.policy is not None and any(not epoch.asks_to_leave for epoch in under_way):
        for epoch in gang.epochs:
            if (ended_at := epoch.ended_at) is not None:
                yield ended_at + gang.policy.spec.exit_breaker.within_seconds
