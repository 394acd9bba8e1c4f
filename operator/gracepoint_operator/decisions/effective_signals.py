"""Which signals count for a gang. Pure.

The rules:

* **Which pods**: live pods of the workload's current attempt that carry the policy's label, whose Job and workload are
  neither finished nor deleted, while no pod of the gang has ended. A gang in which a process has ended cannot agree on
  anything any more: what follows is its own clean-up. A pod that does not train counts if its end would end or restart
  the workload as a whole (``GangSnapshot.members``): then the processes are notified, and leave before it.
* **Which signals**: kinds that the policy names and that are more certain than a hint. A signal on another object than
  the pod, such as its node, does not count if it existed when the pod was bound: the scheduler chose that node all the
  same, and would again. If the gang has left that very node before, and its end is still ahead, the signal counts again
  when the whole gang runs: then the gang saves and trains on where it is, once for each start. Another exit would end
  in the same place. A signal further ahead than ``signals.HORIZON_S`` does not count, unless it is a request. A
  time limit always exists before; it counts when the whole gang runs, unless it was over when the pod was bound.
* **Deletions of pods are checked**: pods are also deleted when a workload restarts, ends or is deleted, and watches of
  different kinds are not in order with one another. So a deletion is believed only after a fresh look
  (``WorkloadRefresh``). The suspension of a workload that Kueue manages is checked in the same way, because Kueue's own
  Workload says why.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gracepoint.wire.frames import SAME_REVISION
from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator import signals
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model import evictions
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import LEFT_BEFORE, PreemptionRecord, RequestRecord
from gracepoint_operator.resources import (
    CheckpointPolicy,
    PolicyCopy,
    PolicyInForce,
    PreemptionSpec,
    RequestReference,
    SignalKind,
    WorkloadReference,
)
from gracepoint_operator.signals import Cause, On, Signal
from gracepoint_operator.workloads import Workload


@dataclasses.dataclass(frozen=True)
class Timed:
    """A signal, and when it began.

    Attributes:
        since_at: When it began, in seconds since the epoch.
        request: The request that it is. None if it is not a request.
        again: Whether the gang has left that node before, and was put there again while the signal existed.
    """

    signal: Signal
    since_at: float
    request: RequestRecord | None = None
    again: bool = False

    @property
    def stays(self) -> bool:
        """True if the gang saves for it and continues to train."""
        return self.signal.stays or self.again

    @property
    def deadline_at(self) -> float:
        return self.signal.deadline_at(self.since_at)

    @property
    def names_deadline(self) -> bool:
        """True if the object names the time of the deadline; False if the deadline is assumed."""
        return self.signal.until_at == self.deadline_at


def counting(gang: GangSnapshot, policy: PolicyInForce | None, now: float, *, drills: bool) -> list[Timed]:
    """Returns the signals that count under a policy: either those of disruptions, or the requests for drills.

    Args:
        gang: Everything that is known of the workload.
        policy: The current policy, or its copy in the preemption that the signals would join. None: no signal counts.
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
            since_at, bound_at = gang.since[signal.mark], gang.bound_at.get(pod.uid)
            if _is_news(signal, since_at, bound_at, runs):
                timed.append(Timed(signal, since_at, request))
            elif runs and bound_at is not None and _is_back(gang, signal, since_at, bound_at):
                again = dataclasses.replace(
                    signal, text=f"{signal.text[: _TEXT_LIMIT - len(LEFT_BEFORE)]}{LEFT_BEFORE}"
                )
                timed.append(Timed(again, since_at, request, again=True))
    return timed


def _is_back(gang: GangSnapshot, signal: Signal, since_at: float, bound_at: float) -> bool:
    """True if the pod's node goes away later, and an earlier start of the gang has left it."""
    of_node = signal.on in (On.NODE, On.NODE_CLAIM, On.DEVICE) and signal.lasting
    return (
        of_node
        and signal.deadline_at(since_at) > bound_at
        and any(
            preemption.leaves and signal.node in preemption.spec.nodes and not preemption.includes(signal.pod)
            for preemption in gang.preemptions
        )
    )


def _is_news(signal: Signal, since_at: float, bound_at: float | None, runs: bool) -> bool:
    """True unless the signal existed when the pod was bound. ``runs``: whether all pods of the gang run."""
    if signal.lasting:
        return bound_at is not None and since_at >= bound_at
    if signal.limit:
        # Known before there are pods: a preemption of the first ones would be over with the next.
        return runs and bound_at is not None and (signal.until_at or 0.0) > bound_at
    return True


def relevant(
    gang: GangSnapshot, pod: Pod, policy: PolicyInForce, now: float, *, drills: bool
) -> Iterator[tuple[Signal, RequestRecord | None]]:
    """Yields the signals for a pod under a policy, including older ones, each with its request if it is one."""
    candidates: list[tuple[Signal, RequestRecord | None]] = []
    if not pod.finished:
        for open_request in gang.requests:
            is_relevant = open_request.is_signal(gang.preemptions) and open_request.is_for(gang.workload_uid)
            if is_relevant and open_request.is_drill(policy.mode) is drills:
                candidates.append((open_request.signal(pod), open_request))
    if not drills:
        candidates += [(signal, None) for signal in signals.of_pod(pod, gang.marks.get(pod.uid, ()))]
        if (since_at := gang.since.get(evictions.mark(pod.uid))) is not None and not pod.finished:
            attempt = evictions.signal(pod, policy, gang.preemptions, since_at)
            candidates.append((dataclasses.replace(attempt, cause=_announced_cause(gang, pod)), None))
    for signal, request in candidates:
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
    """Returns the cause of several signals together: that of the earliest one which does not follow from another one.

    What takes a node away evicts its pods, often within milliseconds, and the evictions have the nearer deadline.
    """
    return _earliest(_causing(timed)).signal.cause


def _causing(timed: Sequence[Timed]) -> list[Timed]:
    """Returns the signals that may give the cause."""
    leaving = {item.signal.node for item in timed if _takes_the_node(item.signal)}
    own = [item for item in timed if item.signal.kind is not SignalKind.EVICTION or item.signal.node not in leaving]
    return root_causes(own)


def _earliest(timed: Iterable[Timed]) -> Timed:
    return min(timed, key=lambda item: item.deadline_at)


def _corrected_cause(current: PreemptionRecord, timed: Sequence[Timed]) -> str:
    """Returns the cause of an open preemption: another one if what it began with follows from a signal that came late.

    Watches of different kinds and evictions are not in order with one another. So the object must say that its signal
    began before the preemption: what happens later is not the cause. If the signal that the preemption began with is
    not known here, the cause stays, since another replica may know more.

    A gang that freezes at its SIGTERM does not know why it got one. If its node says at about the same time that it is
    going away, that is why.
    """
    if current.cause_is_assumed:
        ended_at = current.spec.observed_at.timestamp()
        leaving = [item for item in timed if _takes_the_node(item.signal) and _began_about(item.signal, ended_at)]
        return _earliest(leaving).signal.cause if leaving else current.spec.cause
    causing = _causing(timed)
    first = _earliest(causing).signal
    if first.cause == current.spec.cause or current.phase.rank >= Phase.FROZEN.rank:
        return current.spec.cause
    kept = set(map(id, causing))
    following = [item.signal for item in timed if id(item) not in kept]
    known = {signal.cause for signal in following}
    if any(signal.kind is SignalKind.EVICTION for signal in following):
        known.add(Cause.DRAIN)  # before a taint was seen that announces another cause
    is_late = first.began_at is not None and first.began_at <= current.spec.observed_at.timestamp()
    return first.cause if is_late and current.spec.cause in known else current.spec.cause


#: A kubelet that shuts its node down writes the condition while it ends the pods. Its times are whole seconds.
_ABOUT_S = 2.0


def _began_about(signal: Signal, at: float) -> bool:
    return signal.began_at is not None and abs(signal.began_at - at) <= _ABOUT_S


def _takes_the_node(signal: Signal) -> bool:
    """True if the node itself, or its NodeClaim, says that it is going away. Not for a time limit of its life."""
    final = signal.confidence is Confidence.SURE and not signal.cancelable and not signal.limit
    return final and signal.on in (On.NODE, On.NODE_CLAIM)


def root_causes(timed: Sequence[Timed]) -> list[Timed]:
    """Returns the signals without those that follow from another one of them.

    A suspended workload deletes its pods, and Kueue suspends a workload that it evicts. Karpenter deletes the Node of a
    deleted NodeClaim, and only the NodeClaim says why. Several watches bring these, in any order. What began it gives
    the cause.
    """
    claims = {item.signal.node for item in timed if item.signal.on is On.NODE_CLAIM and _takes_the_node(item.signal)}
    if claims:
        timed = [item for item in timed if not (item.signal.deletes_node and item.signal.node in claims)]
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
    """Returns the mode of a preemption. A pod that is being deleted cannot continue, so a Drill becomes Enforce."""
    return Mode.ENFORCE if policy.mode is Mode.DRILL and ends_pods(timed) else policy.mode


#: As long as the resource's schema allows.
_TEXT_LIMIT = 512
#: Deadlines closer than this are the same: replicas see a signal at slightly different times. The library, which
#: gets them as revisions, goes by the same figure.
DEADLINE_TOLERANCE_S = SAME_REVISION / 1000
_END_OF_DATES = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC).timestamp()
#: As many as the resource's schema allows.
_NODES_LIMIT, _PODS_LIMIT, _REQUESTS_LIMIT = 1024, 4096, 64


def begun(
    workload: Workload,
    policy: CheckpointPolicy,
    preemptions: Sequence[PreemptionRecord],
    pods: Sequence[Pod],
    timed: Sequence[Timed],
    now: float,
    *,
    drill: bool = False,
) -> PreemptionSpec:
    """Returns the spec of a new preemption for these signals. Their pods belong to one attempt.

    Args:
        workload: The workload that is disrupted.
        policy: Its policy.
        preemptions: Its earlier preemptions.
        pods: All pods of the workload.
        timed: The signals.
        now: Seconds since the epoch.
        drill: Whether the signals are requests for a drill.
    """
    timed = without_limits(timed)
    first = _first(timed)
    attempt = first.signal.pod.restart_attempt
    mode = Mode.DRILL if drill else mode_of(policy.spec, timed)
    return PreemptionSpec(
        workload=WorkloadReference(
            name=workload.name, uid=workload.uid, workload_kind=WorkloadReference.named(workload.kind)
        ),
        epoch=1 + max((preemption.spec.epoch for preemption in preemptions), default=0),
        restart_attempt=attempt if attempt >= 0 else None,
        newest_pod_at=_time(max(pod.created_at for pod in (first.signal.pod, *pods) if pod.restart_attempt == attempt)),
        cause=cause(timed),
        observed_at=_time(min(item.since_at for item in timed)),
        mode=mode,
        exits=mode is not Mode.ENFORCE or _is_to_leave(policy.spec, preemptions, timed, now),
        policy=PolicyCopy(name=policy.name, spec=policy.spec.in_force),
        **_about(timed),
    )


def gives_way(
    current: PreemptionRecord,
    policy: PolicyInForce,
    preemptions: Sequence[PreemptionRecord],
    timed: Sequence[Timed],
    now: float,
) -> bool:
    """Returns True if the preemption lets the gang continue to train, but later signals require that it exits.

    A preemption cannot be changed to require it, because its notices, which were sent, ask for something else.
    """
    if current.asks_to_leave or current.spec.mode is Mode.OBSERVE or current.phase.rank >= Phase.FROZEN.rank:
        return False
    for_signals = current.spec.cause == Cause.TIME_LIMIT or current.spec.signal.endswith(LEFT_BEFORE)
    stays = current.spec.mode is Mode.ENFORCE and for_signals
    return (
        (ends_pods(timed) or (stays and any(item.stays for item in timed)))
        and mode_of(policy, timed) is Mode.ENFORCE
        and _is_to_leave(policy, preemptions, timed, now)
    )


#: A replica waits so many seconds for the signals of which the record of another one tells. A watch that is lost
#: without a sign is noticed within 30 s (``watches``); then its kind is listed.
SIGNALS_COME_S = 45.0


def signals_come_until(preemption: PreemptionRecord) -> float:
    """Until when this replica may not know all signals of a preemption, in seconds since the epoch.

    Watches of different kinds are not in order with one another. So the record of another replica may come before what
    that one has seen, such as a taint. What is missing here has not gone away.
    """
    return 0.0 if preemption.learned_at is None else preemption.learned_at + SIGNALS_COME_S


def moved(current: PreemptionRecord, timed: Sequence[Timed], now: float) -> PreemptionSpec | None:
    """Returns the spec of an open preemption after signals changed. None if it stays as it is.

    The deadline moves to an earlier time whenever a signal has one. It moves to a later time only if its source says so
    and the gang has not frozen: the provider moved a maintenance, a request was edited, or the time of a signal became
    known after the signal (a row that has the time of another one's object, which comes from another watch). A replica
    that learned of the earlier time from a record waits for the signal first (``signals_come_until``).

    The cause is corrected if the signal that it follows from came late (``_corrected_cause``).
    """
    timed = without_limits(timed)
    if not timed:
        return None
    spec, about = current.spec, _about(timed)
    first = min(timed, key=lambda item: item.deadline_at)
    by_s = first.deadline_at - spec.deadline.timestamp()
    postponed = (
        by_s > DEADLINE_TOLERANCE_S
        and first.names_deadline
        and (spec.cancelable or _is_named_now(spec.signal, timed))
        and current.phase.rank < Phase.FROZEN.rank
        and now > signals_come_until(current)
    )
    about["cause"] = _corrected_cause(current, timed)
    corrected = about["cause"] != spec.cause and by_s <= 0
    if not (by_s < -DEADLINE_TOLERANCE_S or postponed or corrected):
        about |= {"signal": spec.signal, "deadline": spec.deadline}
    about["confidence"] = Confidence.SURE if spec.confidence is Confidence.SURE else about["confidence"]
    about["cancelable"] = about["cancelable"] and spec.cancelable
    about["nodes"] = sorted({*spec.nodes, *about["nodes"]})[:_NODES_LIMIT]
    about["pods"] = sorted({*spec.pods, *about["pods"]})[:_PODS_LIMIT]
    about["eviction_attempted_at"] = spec.eviction_attempted_at or about["eviction_attempted_at"]
    references = {reference.uid: reference for reference in (*about["requests"], *spec.requests)}
    about["requests"] = sorted(references.values(), key=lambda reference: reference.uid)[:_REQUESTS_LIMIT]
    changed = any(getattr(spec, field) != value for field, value in about.items())
    return spec.model_copy(update={**about, "moves": spec.moves + 1}) if changed else None


def _is_named_now(text: str, timed: Sequence[Timed]) -> bool:
    """True if the signal with this text, which set the deadline, still exists and names a time."""
    of_it = [item for item in timed if item.signal.text == text]
    return bool(of_it) and all(item.names_deadline for item in of_it)


def _about(timed: Sequence[Timed]) -> dict[str, Any]:
    """The part of the spec that joining signals change."""
    deadline_at = min(item.deadline_at for item in timed)
    sure = any(item.signal.confidence is Confidence.SURE for item in timed)
    requests: dict[str, RequestReference] = {item.request.uid: item.request.reference for item in timed if item.request}
    attempts = [item.since_at for item in timed if item.signal.kind is SignalKind.EVICTION]
    return {
        "signal": _first(timed).signal.text,
        "confidence": Confidence.SURE if sure else Confidence.LIKELY,
        "cancelable": all(item.signal.cancelable for item in timed),
        "nodes": sorted({item.signal.node for item in timed if item.signal.node})[:_NODES_LIMIT],
        "pods": sorted({item.signal.pod.name for item in timed})[:_PODS_LIMIT],
        "deadline": _time(deadline_at),
        "eviction_attempted_at": _time(min(attempts)) if attempts else None,
        "requests": [requests[uid] for uid in sorted(requests)][:_REQUESTS_LIMIT],
    }


def _first(timed: Sequence[Timed]) -> Timed:
    """Returns the signal that sets the deadline: the earliest of those that do not follow from another one."""
    return _earliest(root_causes(timed))


def _is_to_leave(
    policy: PolicyInForce, preemptions: Sequence[PreemptionRecord], timed: Sequence[Timed], now: float
) -> bool:
    if ends_pods(timed):
        return True
    return not (all(item.stays for item in timed) or _leaves_too_often(policy, preemptions, now))


def _leaves_too_often(policy: PolicyInForce, preemptions: Sequence[PreemptionRecord], now: float) -> bool:
    """True if the gang has saved and exited too often recently (exitBreaker of the policy)."""
    breaker = policy.exit_breaker
    exits = [preemption for preemption in preemptions if preemption.leaves and preemption.phase is not Phase.FAILED]
    recent = sum(now - (preemption.ended_at or 0.0) <= breaker.within_seconds for preemption in exits)
    return 0 < breaker.saved_exits <= recent


def _time(at: float) -> datetime.datetime:
    """Returns a date. A time outside the possible dates, from a request or a grace period, becomes the nearest."""
    return datetime.datetime.fromtimestamp(max(0.0, min(at, _END_OF_DATES)), datetime.UTC)
