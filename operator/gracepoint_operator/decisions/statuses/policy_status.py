"""The status of a policy: its conditions with all reasons and messages, its forecasts and the last save. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Set

from gracepoint.wire.messages import Mode, Phase
from gracepoint_operator import signals
from gracepoint_operator.kube.objects import Node, Pod
from gracepoint_operator.model.evictions import HoldLimit
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.resources import CheckpointPolicy, Condition, ConditionStatus, LastSave, WorkloadForecast
from gracepoint_operator.workloads import ANY_NAME, ANY_PLURAL, Workload

CONDITION_READY = "Ready"
CONDITION_FITS_GRACE = "FitsGrace"
CONDITION_INJECTED = "Injected"
CONDITION_RECORDED = "Recorded"
#: With this name, tools that wait for an object (kstatus) see that waiting is in vain.
CONDITION_STALLED = "Stalled"

_FORECASTS = 50  # the limit in the schema of the resource


def readiness(
    policy: CheckpointPolicy,
    applied: CheckpointPolicy,
    now: float,
    *,
    protects_pods: bool,
    hold_limit: HoldLimit,
    withdrawn: str | None,
) -> Condition:
    """Returns the condition Ready of a policy that could be read.

    Args:
        policy: The policy.
        applied: The same under the limits of administrators.
        now: Seconds since the epoch.
        protects_pods: Whether the operator has the right to annotate pods.
        hold_limit: For how long evictions are held at most.
        withdrawn: Why the default that the policy is the copy of is none any more. None: it is one, or was none.
    """
    if withdrawn is not None:
        message = (
            f"the default that this is the copy of was withdrawn: it applies as it is to the {ANY_PLURAL} that name it "
            f"already, and new ones are refused. {withdrawn}"
        )
        return _condition(CONDITION_READY, ConditionStatus.FALSE, "DefaultWithdrawn", message, policy, now)
    message = f"every signal is told to the {ANY_PLURAL} that name this policy"
    if policy.spec.mode is Mode.OBSERVE:
        message = "signals are recorded and nobody is told (mode Observe)"
    elif policy.spec.signals == []:
        message = "no kind of signal counts (spec.signals is empty)"
    reason, unknown = "Watching", [item for item in policy.unknown if item.startswith("spec")]
    if policy.spec.voluntary_disruption.checkpoint_younger_than_seconds and not protects_pods:
        reason = "PodsNotProtected"
        message += (
            "; found spec.voluntaryDisruption, but the operator may not annotate pods, so autoscalers move them at any "
            "time; install the chart with protection.enabled=true, or remove the field"
        )
    elif policy.spec.voluntary_disruption != applied.spec.voluntary_disruption:
        reason = "PodsNotProtected"
        message += (
            "; found spec.voluntaryDisruption, but an administrator does not allow it here "
            "(spec.limits.protection of a ClusterCheckpointPolicy), so autoscalers move the pods at any time"
        )
    hold, ours = policy.spec.eviction_hold, applied.spec.eviction_hold
    if hold.enabled and not ours.enabled:
        reason = "HoldsOff"
        message += f"; no eviction is held now ({hold_limit.set_by} is 0)"
    elif hold.enabled and ours.bound_seconds < hold.bound_seconds:
        reason = "HoldShortened"
        message += (
            f"; found spec.evictionHold.boundSeconds {hold.bound_seconds}, but evictions are held for "
            f"{hold_limit.seconds:g} s at most ({hold_limit.set_by}), and that applies"
        )
    if unknown:
        reason = "UnknownValues"
        message += (
            f"; found {', '.join(unknown)[:2048]}, which this version of the operator does not know and passes over; "
            "upgrade the operator, or remove it"
        )
    return _condition(CONDITION_READY, ConditionStatus.TRUE, reason, message, policy, now)


def unreadable(generation: int, why: str, now: float) -> Condition:
    """Returns the condition Ready of a policy that cannot be read."""
    message = (
        "the policy cannot be read: gangs are told by the version that could be read last, if there was one, and new "
        f"{ANY_PLURAL} that name it are refused. Correct it: {why}"
    )
    return Condition(
        type=CONDITION_READY,
        status=ConditionStatus.FALSE,
        reason="Unreadable",
        message=message[:4096],
        last_transition_time=_time(now).replace(microsecond=0),
        observed_generation=generation,
    )


def stalled(generation: int, why: str | None, now: float) -> Condition:
    """Returns the condition Stalled: True with the reason ``why`` if the policy cannot be read, else False."""
    return Condition(
        type=CONDITION_STALLED,
        status=ConditionStatus.FALSE if why is None else ConditionStatus.TRUE,
        reason="Readable" if why is None else "Unreadable",
        message="" if why is None else why[:4096],
        last_transition_time=_time(now).replace(microsecond=0),
        observed_generation=generation,
    )


def injection(policy: CheckpointPolicy, workloads: Iterable[Workload], now: float) -> Condition:
    """Returns the condition Injected."""
    bare = [workload.name for workload in workloads if not workload.injected]
    if not bare:
        message = f"every {ANY_NAME} was given at its creation what its pods need to be told"
        return _condition(CONDITION_INJECTED, ConditionStatus.TRUE, "Injected", message, policy, now)
    message = (
        f"{len(bare)} {ANY_PLURAL} were created before the policy or its label ({', '.join(bare[:5])}): their pods "
        "cannot be told; delete and create them again"
    )
    return _condition(CONDITION_INJECTED, ConditionStatus.FALSE, "CreatedBeforePolicy", message, policy, now)


def recording(
    policy: CheckpointPolicy,
    refused: Mapping[str, str],
    epochs: Iterable[PreemptionRecord],
    before: Condition | None,
    now: float,
    *,
    mended: bool,
) -> Condition | None:
    """Returns the condition Recorded. None if it does not change.

    In the end, both replicas report the same. If the condition is False and no record of this replica is refused, this
    replica changes it to True only after a record was created since then, or if ``mended``.

    Args:
        policy: The policy.
        refused: Why the API server refuses this replica's records, by the name of the Preemption.
        epochs: The known records of the policy.
        before: The current condition. None if there is none.
        now: Seconds since the epoch.
        mended: True if records of this replica were refused before, and none is refused any more.
    """
    if refused:
        names = sorted(refused)
        message = (
            f"{len(names)} Preemptions cannot be recorded ({', '.join(names[:5])}), as the API server refuses them; "
            "the gangs are told all the same. Correct the quota, the admission policy or the role that it names; the "
            f"operator tries again at least once a minute. {refused[names[0]]}"
        )
        return _condition(CONDITION_RECORDED, ConditionStatus.FALSE, "Refused", message[:4096], policy, now)
    if before is not None and before.status is ConditionStatus.FALSE and not mended:
        since_at = before.last_transition_time.timestamp()
        if not any(epoch.created_at is not None and epoch.created_at > since_at for epoch in epochs):
            return None
    message = f"the API server takes the Preemptions of the {ANY_PLURAL} that name this policy"
    return _condition(CONDITION_RECORDED, ConditionStatus.TRUE, "Recorded", message, policy, now)


def newest_forecasts(
    ours: Iterable[WorkloadForecast], theirs: Iterable[WorkloadForecast], workload_uids: Set[str]
) -> list[WorkloadForecast]:
    """Merges the forecasts that two replicas were told, so that both report the same.

    Returns the newest forecast of each workload that exists.
    """
    newest: dict[str, WorkloadForecast] = {}
    for item in sorted((*theirs, *ours), key=lambda item: item.time):
        if item.uid in workload_uids:
            newest[item.uid] = item
    kept = sorted(newest.values(), key=lambda item: item.time)[-_FORECASTS:]
    return sorted(kept, key=lambda item: item.name)


def fit(policy: CheckpointPolicy, worst: tuple[WorkloadForecast, float] | None, now: float) -> Condition:
    """Returns the condition FitsGrace.

    Args:
        policy: The policy.
        worst: Forecast and grace period, in seconds, of the gang with the least time to spare. None if no gang has sent
            a forecast.
        now: Seconds since the epoch.
    """
    if worst is None:
        message = f"no {ANY_NAME} has saved yet, so that nothing can be predicted"
        return _condition(CONDITION_FITS_GRACE, ConditionStatus.UNKNOWN, "NoForecast", message, policy, now)
    forecast, grace_s = worst
    need_s = forecast.needed_s
    said = (
        f"{forecast.kind} {forecast.name}: {need_s:.1f} s needed (drain {forecast.drain_seconds:.1f} s + save "
        f"{forecast.save_seconds:.1f} s, times the margin {forecast.margin:g}), {grace_s:.0f} s granted"
    )
    if need_s <= grace_s:
        return _condition(CONDITION_FITS_GRACE, ConditionStatus.TRUE, "Fits", said, policy, now)
    said += "; raise terminationGracePeriodSeconds where the provider grants it, or use more processes"
    return _condition(CONDITION_FITS_GRACE, ConditionStatus.FALSE, "TooSlow", said, policy, now)


def grace_s(pods: Iterable[Pod], nodes: Mapping[str, Node]) -> float | None:
    """Returns the shortest grace period of the pods, in seconds. None if there are no pods."""
    graces = []
    for pod in pods:
        node = nodes.get(pod.node)
        spot = node is not None and node.spot
        graces.append(min(pod.grace_s, signals.GKE_SPOT_GRACE_S) if spot else pod.grace_s)
    return min(graces, default=None)


def last_save(epochs: Iterable[PreemptionRecord], known: LastSave | None) -> LastSave | None:
    """Returns the newest epoch that ended with a checkpoint.

    Returns ``known`` if it is newer, as its record may have been deleted. None if there is neither.
    """
    ends = (Phase.COMMITTED, Phase.PROMOTED)
    saved = [
        LastSave(
            preemption=epoch.name,
            workload=epoch.spec.workload.name,
            step=epoch.status.step,
            time=_time(epoch.ended_at or 0.0),
        )
        for epoch in epochs
        if epoch.phase in ends and epoch.status.step is not None
    ]
    # By name too: replicas that chose differently among saves of one moment would replace each other's choice forever.
    found = [*saved, *([] if known is None else [known])]
    return max(found, key=lambda save: (save.time, save.preemption), default=None)


def joined_conditions(ours: Iterable[Condition], theirs: Iterable[Condition]) -> list[Condition]:
    """Returns their conditions, replaced by ours of the same type.

    If the status of a condition does not change, its transition time stays.
    """
    joined = {condition.type: condition for condition in theirs}
    for condition in ours:
        known = joined.get(condition.type)
        if known is not None and known.status is condition.status:
            update = {"last_transition_time": known.last_transition_time}
            condition = condition.model_copy(update=update)
        joined[condition.type] = condition
    return list(joined.values())


def _condition(
    kind: str, status: ConditionStatus, reason: str, message: str, policy: CheckpointPolicy, now: float
) -> Condition:
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=_time(now).replace(microsecond=0),
        observed_generation=policy.generation,
    )


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)
