"""What the operator answers to an Eviction in which it is its turn. Pure.

It is at work as long as an attempt to evict the pod would be held (``evictions.hold``): one rule for both ways in which
pods are evicted. It is done when the save is committed, when the time for it is over, or if there is nothing to save.
"""

from __future__ import annotations

import dataclasses

from gracepoint.wire.messages import Phase
from gracepoint_operator.model import evictions
from gracepoint_operator.model.eviction_requests import EvictionAsked
from gracepoint_operator.model.gang_snapshot import GangSnapshot

#: Pause between two signs of life. Kubernetes passes over a responder that gives none for 20 minutes.
HEARTBEAT_S = 60.0


@dataclasses.dataclass(frozen=True)
class EvictionAnswer:
    """What is written into the Eviction.

    Attributes:
        done: Whether the pod may be evicted.
        message: For people.
        until_at: When the pod may be evicted at the latest, in seconds since the epoch. None if that is now.
    """

    done: bool
    message: str
    until_at: float | None = None


def answer(gang: GangSnapshot, asked: EvictionAsked, now: float) -> EvictionAnswer | None:
    """Returns what to answer. None if it is not the operator's turn, or the pod is not of this gang.

    Args:
        gang: The gang, after it was decided about.
        asked: The Eviction.
        now: Seconds since the epoch.
    """
    pod = next((pod for pod in gang.pods if pod.uid == asked.pod_uid), None)
    if pod is None or not asked.active:
        return None
    epoch = next((epoch for epoch in reversed(gang.epochs) if not epoch.is_rehearsal), None)
    node = gang.nodes.get(pod.node)
    held = None if pod.finished else evictions.hold(gang.epochs, pod, node, now, gang.longest_hold_s)
    if held is not None and epoch is not None:
        what = f"the {epoch.workload.kind} {epoch.workload.name} (Preemption {epoch.name}, {epoch.phase})"
        return EvictionAnswer(False, f"Gracepoint saves {what}", held.until_at)
    if epoch is None or not epoch.includes(pod):
        return EvictionAnswer(True, "nothing is saved for this pod: its policy or its gang asks for none")
    if epoch.phase is Phase.COMMITTED:
        return EvictionAnswer(True, f"step {epoch.status.step} is saved (Preemption {epoch.name})")
    return EvictionAnswer(True, f"not held any longer (Preemption {epoch.name}, {epoch.phase})")


def next_at(gang: GangSnapshot, now: float) -> float | None:
    """Returns when to answer again without an event, in seconds since the epoch. None: there is no need to."""
    times = []
    for asked in gang.evictions.values():
        found = answer(gang, asked, now)
        if found is not None and found.until_at is not None:
            times.append(min(found.until_at, now + HEARTBEAT_S))
    return min(times, default=None)
