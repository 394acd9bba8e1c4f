"""Which signals count for a gang. Pure.

The rules:

* **Which pods**: live pods of the workload's current attempt that carry the policy's label, whose Job and workload are
  neither finished nor deleted, while no pod of the gang has ended. A gang in which a process has ended cannot agree on
  anything any more: what follows is its own clean-up. A pod that does not train counts if its end would end or restart
  the workload as a whole (``GangSnapshot.members``): then the processes are told, and leave before it.
* **Which signals**: kinds that the policy names and that are more certain than a hint. A signal on another object than
  the pod, such as its node, does not count if it existed when the pod was bound: the scheduler chose that node all the
  same, and would again. A signal further ahead than ``signals.HORIZON_S`` does not count, unless it is a request. A
  time limit always exists before; it counts when the whole gang runs, unless it was over when the pod was bound.
* **Deletions of pods are checked**: pods are also deleted when a workload restarts, ends or is deleted, and watches of
  different kinds are not in order with one another. So a deletion is believed only after a fresh look
  (``WorkloadRefresh``). The suspension of a workload that Kueue manages is checked in the same way, because Kueue's own
  Workload says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from gracepoint.wire.messages import Confidence, Mode
from gracepoint_operator import signals
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model import eviction_requests, evictions
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.requests import RequestRecord
from gracepoint_operator.resources import PolicyInForce, SignalKind
from gracepoint_operator.signals import Cause, On, Signal


@dataclasses.dataclass(frozen=True)
class Timed:
    """A signal, and when it began.

    Attributes:
        since_at: When it began, in seconds since the epoch.
        request: The request that it is. None if it is not a request.
    """

    signal: Signal
    since_at: float
    request: RequestRecord | None = None

    @property
    def deadline_at(self) -> float:
        return self.signal.deadline_at(self.since_at)

    @property
    def is_told(self) -> bool:
        """True if the object names the time of the deadline; False if the deadline is assumed."""
        return self.signal.until_at == self.deadline_at


def counting(gang: GangSnapshot, policy: PolicyInForce | None, now: float, *, drills: bool) -> list[Timed]:
    """Returns the signals that count under a policy: either those of disruptions, or the requests for drills.

    Args:
        gang: Everything that is known of the workload.
        policy: The current policy, or its copy in the epoch that the signals would join. None: no signal counts.
        now: Seconds since the epoch.
        drills: True for requests for drills, False for disruptions.
    """
    if policy is None or not gang.suspects or not gang.processes or gang.has_ended:
        return []
    if drills and not any(request.is_drill(policy.mode) for request in gang.requests):
        return []
    timed, runs = [], all(pod.phase == "Running" for pod in gang.processes)
    for pod in gang.suspects:
        if not gang.job_goes_on(pod):
            continue
        for signal, request in relevant(gang, pod, policy, now, drills=drills):
            since_at = gang.since[signal.mark]
            if _is_news(signal, since_at, gang.bound_at.get(pod.uid), runs):
                timed.append(Timed(signal, since_at, request))
    return timed


def _is_news(signal: Signal, since_at: float, bound_at: float | None, runs: bool) -> bool:
    """True unless the signal existed when the pod was bound. ``runs``: whether all pods of the gang run."""
    if signal.lasting:
        return bound_at is not None and since_at >= bound_at
    if signal.limit:
        # Known before there are pods: an epoch of the first ones would be over with the next.
        return runs and bound_at is not None and (signal.until_at or 0.0) > bound_at
    return True


def relevant(
    gang: GangSnapshot, pod: Pod, policy: PolicyInForce, now: float, *, drills: bool
) -> Iterator[tuple[Signal, RequestRecord | None]]:
    """Yields the signals for a pod under a policy, including older ones, each with its request if it is one."""
    found: list[tuple[Signal, RequestRecord | None]] = []
    if not pod.finished:
        for asked in gang.requests:
            mine = asked.is_signal(gang.epochs) and asked.is_for(gang.workload_uid)
            if mine and asked.is_drill(policy.mode) is drills:
                found.append((asked.signal(pod), asked))
    if not drills:
        found += [(signal, None) for signal in signals.of_pod(pod, gang.marks.get(pod.uid, ()))]
        if (since_at := gang.since.get(evictions.mark(pod.uid))) is not None and not pod.finished:
            attempt = evictions.signal(pod, policy, gang.epochs, since_at)
            found.append((dataclasses.replace(attempt, cause=_announced_cause(gang, pod)), None))
        if (eviction := gang.evictions.get(pod.uid)) is not None and not pod.finished:
            found.append(
                (eviction_requests.signal(pod, policy, eviction, gang.epochs, gang.since[eviction.mark]), None)
            )
    for signal, request in found:
        far = request is None and signal.is_far(gang.since[signal.mark], now)
        if policy.counts(signal.kind) and signal.confidence is not Confidence.HINT and not far:
            yield signal, request


def _announced_cause(gang: GangSnapshot, pod: Pod) -> Cause:
    """Returns why the pod is evicted: what a taint has announced that closes its node to new pods."""
    for mark in gang.marks.get(pod.uid, ()):
        if mark.row.confidence is Confidence.HINT and mark.taint is not None and mark.taint.effect == "NoSchedule":
            return mark.row.cause
    return Cause.DRAIN


def believed(gang: GangSnapshot, timed: Iterable[Timed]) -> list[Timed]:
    """Returns the signals that need no check, or were checked."""
    return [
        item
        for item in timed
        if (item.signal.kind is not SignalKind.POD_DELETION or item.signal.pod.uid in gang.checked)
        and item.signal.mark not in gang.unexplained
    ]


def cause(timed: Sequence[Timed]) -> str:
    """Returns the cause that signals tell together: that of the earliest one which does not follow from another one.

    What takes a node away evicts its pods, often within milliseconds, and the evictions have the nearer deadline.
    """
    leaving = {item.signal.node for item in timed if _takes_the_node(item.signal)}
    own = [item for item in timed if item.signal.kind is not SignalKind.EVICTION or item.signal.node not in leaving]
    return min(root_causes(own), key=lambda item: item.deadline_at).signal.cause


def _takes_the_node(signal: Signal) -> bool:
    """True if the node itself, or its NodeClaim, says that it is going away. Not for a time limit of its life."""
    final = signal.confidence is Confidence.SURE and not signal.cancelable and not signal.limit
    return final and signal.on in (On.NODE, On.NODE_CLAIM)


def root_causes(timed: Sequence[Timed]) -> list[Timed]:
    """Returns the signals without those that follow from another one of them.

    A suspended workload deletes its pods, and Kueue suspends a workload that it evicts. Several watches bring these, in
    any order. What began it tells the cause.
    """
    suspended = [item for item in timed if item.signal.kind is SignalKind.SUSPENSION]
    if not suspended:
        return list(timed)
    by_queue = [item for item in suspended if item.signal.on is On.WORKLOAD]
    follows = {SignalKind.POD_DELETION} | ({SignalKind.SUSPENSION} if by_queue else set())
    return [*by_queue, *(item for item in timed if item.signal.kind not in follows)]


def without_limits(timed: Sequence[Timed]) -> list[Timed]:
    """Returns the signals without time limits, if the pods are ended already.

    A time limit says when this begins. The pods then have their grace period, also if the limit is over.
    """
    kinds = {SignalKind.SUSPENSION, SignalKind.POD_DELETION, SignalKind.DISRUPTION_TARGET}
    if not any(item.signal.kind in kinds for item in timed):
        return list(timed)
    return [item for item in timed if not item.signal.limit]


def ends_pods(timed: Iterable[Timed]) -> bool:
    """True if a pod is being deleted, or an eviction will delete it, whatever the gang does."""
    kinds = {SignalKind.POD_DELETION, SignalKind.DISRUPTION_TARGET, SignalKind.EVICTION}
    return any(item.signal.kind in kinds for item in timed)


def mode_of(policy: PolicyInForce, timed: Iterable[Timed]) -> Mode:
    """Returns the mode of an epoch. A pod that is being deleted cannot continue, so a Drill becomes Enforce."""
    return Mode.ENFORCE if policy.mode is Mode.DRILL and ends_pods(timed) else policy.mode
