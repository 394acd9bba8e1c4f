"""The signal of an attempt to evict a pod, and how long the eviction waits for the save. Pure.

A client tries to evict a pod again and again until the eviction is allowed. The first attempt is a signal. All attempts
are held while the gang saves. The API server asks any replica, and each may have just started. So the first attempt is
recorded in the Preemption, and only the Preemption and the time decide whether an attempt is held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from gracepoint.wire.messages import Confidence, Mode
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.preemption import PreemptionRecord
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


_MARK = "/eviction"


def mark(pod_uid: str) -> str:
    """Returns the key under which ``cache.indexes.first_seen`` remembers the first attempt."""
    return pod_uid + _MARK


def attempted(marks: Iterable[str]) -> set[str]:
    """Returns the UIDs of the pods that somebody has tried to evict.

    Args:
        marks: Keys of ``cache.indexes.first_seen``.
    """
    return {key.removesuffix(_MARK) for key in marks if key.endswith(_MARK)}


def signal(pod: Pod, policy: PolicyInForce) -> Signal:
    """Returns the signal of an attempt. Its lead is the longest hold, or the pod's grace period if it is not held."""
    bound_s = held_for_s(policy)
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


def hold(epoch: PreemptionRecord | None, pod: Pod, now: float) -> Hold | None:
    """Returns why and until when an eviction of the pod has to wait. None if it is allowed.

    Args:
        epoch: The newest Preemption of the pod's workload that is not a rehearsal. None if there is none.
        pod: A pod of the gang.
        now: Seconds since the epoch.
    """
    if epoch is None or epoch.phase.ended or not epoch.includes(pod) or epoch.spec.mode is not Mode.ENFORCE:
        return None
    bound_s = held_for_s(epoch.spec.policy.spec)
    attempted_at = epoch.spec.eviction_attempted_at
    if bound_s is None or attempted_at is None:
        return None
    until_at = attempted_at.timestamp() + bound_s
    if now >= until_at:
        return None
    message = (
        f"Gracepoint saves the {epoch.workload.kind} {epoch.workload.name} before its pods go "
        f"(Preemption {epoch.name}, {epoch.phase}); try again, the eviction is let through when the save "
        f"is committed, or in {until_at - now:.0f} s at the latest"
    )
    return Hold(until_at, message)
