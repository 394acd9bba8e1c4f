"""The spec of a Preemption, from the signals that it is about. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from gracepoint.wire.frames import SAME_REVISION
from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator.decisions.effective_signals import (
    Timed,
    cause,
    ends_pods,
    mode_of,
    root_causes,
    without_limits,
)
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.resources import (
    CheckpointPolicy,
    PolicyCopy,
    PolicyInForce,
    PreemptionSpec,
    RequestReference,
    SignalKind,
    WorkloadReference,
)
from gracepoint_operator.signals import Cause
from gracepoint_operator.workloads import Workload

#: Deadlines closer than this are the same: replicas see a signal at slightly different times. The library, which
#: gets them as revisions, goes by the same figure.
DEADLINE_TOLERANCE_S = SAME_REVISION / 1000
_END_OF_DATES = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC).timestamp()
#: As many as the resource's schema allows.
_NODES_LIMIT, _PODS_LIMIT, _REQUESTS_LIMIT = 1024, 4096, 64


def begun(
    workload: Workload,
    policy: CheckpointPolicy,
    epochs: Sequence[PreemptionRecord],
    pods: Sequence[Pod],
    timed: Sequence[Timed],
    now: float,
    *,
    drill: bool = False,
) -> PreemptionSpec:
    """Returns the spec of a new epoch for these signals. Their pods belong to one attempt.

    Args:
        workload: The workload that is disrupted.
        policy: Its policy.
        epochs: Its earlier epochs.
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
        epoch=1 + max((epoch.spec.epoch for epoch in epochs), default=0),
        restart_attempt=attempt if attempt >= 0 else None,
        newest_pod_at=_time(max(pod.created_at for pod in (first.signal.pod, *pods) if pod.restart_attempt == attempt)),
        cause=cause(timed),
        observed_at=_time(min(item.since_at for item in timed)),
        mode=mode,
        exits=mode is not Mode.ENFORCE or _is_to_leave(policy.spec, epochs, timed, now),
        policy=PolicyCopy(name=policy.name, spec=policy.spec.in_force),
        **_about(timed),
    )


def gives_way(
    current: PreemptionRecord,
    policy: PolicyInForce,
    epochs: Sequence[PreemptionRecord],
    timed: Sequence[Timed],
    now: float,
) -> bool:
    """Returns True if the epoch lets the gang continue to train, but later signals require that it exits.

    An epoch cannot be changed to require it, because its notices, which were sent, ask for something else.
    """
    if current.asks_to_leave or current.spec.mode is Mode.OBSERVE or current.phase.rank >= Phase.FROZEN.rank:
        return False
    limited = current.spec.cause == Cause.TIME_LIMIT and current.spec.mode is Mode.ENFORCE
    return (
        (ends_pods(timed) or (limited and any(item.signal.stays for item in timed)))
        and mode_of(policy, timed) is Mode.ENFORCE
        and _is_to_leave(policy, epochs, timed, now)
    )


def moved(current: PreemptionRecord, timed: Sequence[Timed]) -> PreemptionSpec | None:
    """Returns the spec of an open epoch after signals changed. None if it stays as it is.

    The deadline moves to an earlier time whenever a signal has one. It moves to a later time only if its source says so
    and the gang has not frozen: the provider moved a maintenance, a request was edited, or the time of a signal became
    known after the signal (a row that has the time of another one's object, which comes from another watch).
    """
    timed = without_limits(timed)
    if not timed:
        return None
    spec, about = current.spec, _about(timed)
    first = min(timed, key=lambda item: item.deadline_at)
    by_s = first.deadline_at - spec.deadline.timestamp()
    postponed = (
        by_s > DEADLINE_TOLERANCE_S
        and first.is_told
        and (spec.cancelable or _is_told_by_now(spec.signal, timed))
        and current.phase.rank < Phase.FROZEN.rank
    )
    if not (by_s < -DEADLINE_TOLERANCE_S or postponed):
        about |= {"signal": spec.signal, "deadline": spec.deadline}
    about["confidence"] = Confidence.SURE if spec.confidence is Confidence.SURE else about["confidence"]
    about["cancelable"] = about["cancelable"] and spec.cancelable
    about["nodes"] = sorted({*spec.nodes, *about["nodes"]})[:_NODES_LIMIT]
    about["pods"] = sorted({*spec.pods, *about["pods"]})[:_PODS_LIMIT]
    about["eviction_attempted_at"] = spec.eviction_attempted_at or about["eviction_attempted_at"]
    known = {reference.uid: reference for reference in (*about["requests"], *spec.requests)}
    about["requests"] = sorted(known.values(), key=lambda reference: reference.uid)[:_REQUESTS_LIMIT]
    changed = any(getattr(spec, field) != value for field, value in about.items())
    return spec.model_copy(update={**about, "moves": spec.moves + 1}) if changed else None


def _is_told_by_now(text: str, timed: Sequence[Timed]) -> bool:
    """True if the signal with this text, which set the deadline, still exists and names a time."""
    of_it = [item for item in timed if item.signal.text == text]
    return bool(of_it) and all(item.is_told for item in of_it)


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
    return min(root_causes(timed), key=lambda item: item.deadline_at)


def _is_to_leave(policy: PolicyInForce, epochs: Sequence[PreemptionRecord], timed: Sequence[Timed], now: float) -> bool:
    if ends_pods(timed):
        return True
    return not (all(item.signal.stays for item in timed) or _leaves_too_often(policy, epochs, now))


def _leaves_too_often(policy: PolicyInForce, epochs: Sequence[PreemptionRecord], now: float) -> bool:
    """True if the gang has saved and exited too often recently (exitBreaker of the policy)."""
    breaker = policy.exit_breaker
    left = [epoch for epoch in epochs if epoch.leaves and epoch.phase is not Phase.FAILED]
    recent = sum(now - (epoch.ended_at or 0.0) <= breaker.within_seconds for epoch in left)
    return 0 < breaker.saved_exits <= recent


def _time(at: float) -> datetime.datetime:
    """Returns a date. A time outside the possible dates, from a request or a grace period, becomes the nearest."""
    return datetime.datetime.fromtimestamp(max(0.0, min(at, _END_OF_DATES)), datetime.UTC)
