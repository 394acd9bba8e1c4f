"""The signal of an attempt to evict a pod, and how long the eviction waits for the save. Pure.

A client tries to evict a pod again and again until the eviction is allowed. The first attempt is a signal. All attempts
are held while the gang saves. The API server asks any replica, and each may have just started. So the first attempt is
recorded in the Preemption, and only the Preemptions and the time decide whether an attempt is held.

Some clients come back only after minutes, such as the descheduler and scripts that rotate nodes. Each of their attempts
may begin another Preemption. So the time for which evictions are held counts from the first of them. It begins again
only after an hour without an attempt: then somebody else begins, or the same one another day. Evictions of a gang that
has answered nothing are held for a minute at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator.kube.objects import Node, Pod
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.resources import PolicyInForce, SignalKind
from gracepoint_operator.signals import Cause, Signal

TEXT = "eviction of the pod"


@dataclasses.dataclass(frozen=True)
class Hold:
    """An eviction that has to wait.

    Attributes:
        until_at: When it is allowed at the latest, in seconds since the epoch.
        message: Message for users: what it waits for.
    """

    until_at: float
    message: str


@dataclasses.dataclass(frozen=True)
class HoldLimit:
    """For how long evictions are held at most.

    Attributes:
        seconds: 0: they are not held.
        set_by: Where an administrator has set it, for messages.
    """

    seconds: float
    set_by: str


_MARK = "/eviction"
#: A gang from which no receipt came has not attached, and saves nothing.
_SILENT_S = 60.0
#: Attempts after an hour without any have a new bound.
QUIET_S = 3600.0


def mark(pod_uid: str) -> str:
    """Returns the key under which ``cache.indexes`` remembers the first attempt."""
    return pod_uid + _MARK


def attempted(marks: Iterable[str]) -> set[str]:
    """Returns the UIDs of the pods that somebody has tried to evict.

    Args:
        marks: Keys of ``cache.indexes``.
    """
    return {key.removesuffix(_MARK) for key in marks if key.endswith(_MARK)}


def signal(pod: Pod, policy: PolicyInForce, preemptions: Iterable[PreemptionRecord], since_at: float) -> Signal:
    """Returns the signal of an attempt. Its lead is the longest hold, or the pod's grace period if it is not held.

    Args:
        pod: The pod.
        policy: The policy that applies.
        preemptions: The Preemptions of the pod's workload.
        since_at: When the attempt was first seen, in seconds since the epoch.
    """
    bound_s = held_for_s(policy)
    if bound_s is not None and since_at >= _first_attempt_at(preemptions, pod, since_at) + bound_s:
        bound_s = None
    return Signal(
        kind=SignalKind.EVICTION,
        mark=mark(pod.uid),
        cause=Cause.DRAIN,
        text=TEXT,
        node=pod.node,
        pod=pod,
        confidence=Confidence.SURE,
        cancelable=False,
        lead_s=pod.grace_s if bound_s is None else bound_s,
        grace_s=pod.grace_s if bound_s is None else 0.0,
    )


def held_for_s(policy: PolicyInForce) -> float | None:
    """Returns for how many seconds evictions are held at most under a policy. None if they are not held."""
    if policy.mode is not Mode.ENFORCE or not policy.eviction_hold.enabled:
        return None
    return float(policy.eviction_hold.bound_seconds)


def hold(
    preemptions: Sequence[PreemptionRecord], pod: Pod, node: Node | None, now: float, longest_s: float | None = None
) -> Hold | None:
    """Returns why and until when an eviction of the pod has to wait. None if it is allowed.

    Args:
        preemptions: The Preemptions of the pod's workload, oldest first.
        pod: A pod of the gang.
        node: Its node. None if it is not known. Nothing is held on a node whose label turns holds off.
        now: Seconds since the epoch.
        longest_s: Evictions are held for at most so many seconds now, also those of a Preemption that began under
            another limit. 0: they are not held. None: there is no limit.
    """
    preemption = next((preemption for preemption in reversed(preemptions) if not preemption.is_rehearsal), None)
    if (
        preemption is None
        or preemption.phase.ended
        or not preemption.includes(pod)
        or preemption.spec.mode is not Mode.ENFORCE
    ):
        return None
    bound_s = held_for_s(preemption.spec.policy.spec)
    if bound_s is not None and longest_s is not None:
        bound_s = min(bound_s, longest_s)
    if not bound_s or preemption.spec.eviction_attempted_at is None or (node is not None and not node.holds_evictions):
        return None
    first_at = _first_attempt_at(preemptions, pod, preemption.spec.eviction_attempted_at.timestamp())
    receipts = preemption.status.acknowledgements
    is_silent = preemption.phase is Phase.NOTICED and (receipts is None or receipts.received == 0)
    until_at = first_at + (min(bound_s, _SILENT_S) if is_silent else bound_s)
    if now >= until_at:
        return None
    message = (
        f"Gracepoint saves the {preemption.workload.kind} {preemption.workload.name} before its pods go "
        f"(Preemption {preemption.name}, {preemption.phase}); try again, the eviction is let through when the save "
        f"is committed, or in {until_at - now:.0f} s at the latest"
    )
    return Hold(until_at, message)


def _first_attempt_at(preemptions: Iterable[PreemptionRecord], pod: Pod, newest_at: float) -> float:
    """When the attempts to evict pods of the gang began that lasted, without a quiet hour, until ``newest_at``.

    Only the first attempt of each Preemption is known, and there may be others until it ends.
    """
    first_at = newest_at
    tried = [
        (
            preemption.spec.eviction_attempted_at.timestamp(),
            math.inf if preemption.ended_at is None else preemption.ended_at,
        )
        for preemption in preemptions
        if not preemption.is_rehearsal
        and preemption.includes(pod)
        and preemption.spec.eviction_attempted_at is not None
    ]
    for attempted_at, ended_at in sorted(tried, reverse=True):
        if first_at - max(attempted_at, ended_at) > QUIET_S:
            break
        first_at = min(first_at, attempted_at)
    return first_at
