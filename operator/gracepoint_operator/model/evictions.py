"""What an attempt to evict a pod means, and how long it waits for the save. Pure.

An eviction is asked for before anything happens to the pod, again and again until it is let through. So the first
attempt is a signal, and all of them are held while the gang saves. Two replicas are asked in turn, and each may be
new: that is why the first attempt is recorded in the Preemption, and why whether one is held follows from the
Preemption and the time alone.
"""

from __future__ import annotations

import dataclasses

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
        until_at: When it is let through in any case, in seconds since the epoch.
        message: For people: what is waited for.
    """

    until_at: float
    message: str


def mark(pod_uid: str) -> str:
    """The mark under which the first attempt is remembered; see ``sightings``."""
    return f"{pod_uid}/eviction"


def signal(pod: Pod, policy: PolicyInForce) -> Signal:
    """The signal that an attempt is. Its lead is the bound; what is not held has the pod's own grace period."""
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
    """The longest that evictions are held under a policy; None where they are not."""
    if policy.mode is not Mode.ENFORCE or not policy.eviction_hold.enabled:
        return None
    return float(policy.eviction_hold.bound_seconds)


def hold(epoch: PreemptionRecord | None, pod: Pod, now: float) -> Hold | None:
    """Whether an eviction of the pod has to wait, and for what; None: it goes through.

    Args:
        epoch: The newest Preemption of the pod's workload that is not a rehearsal.
        pod: Of the gang.
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
