"""Which changes of a policy's status are written soon, and which figures have moved too far to stay. Pure.

Figures are forecasts, the seconds of accounts, and when a save was. They move while a job only trains. The metrics have
them; each write of a policy costs the API server a revision, and all who watch policies a refresh.
"""

from __future__ import annotations

from collections.abc import Iterator

from gracepoint_operator.decisions.statuses import policy_status
from gracepoint_operator.goodput import status_codec
from gracepoint_operator.goodput.ledger import stages
from gracepoint_operator.model.preemption import CONDITION_PROGRESSING
from gracepoint_operator.resources import (
    CheckpointPolicy,
    CheckpointPolicyStatus,
    ConditionStatus,
    WorkloadForecast,
    WorkloadGoodput,
)

#: How far a duration, or a share of an account, has to move until the figure that is written misleads.
_PART, _LEAST_S, _SHARE = 0.25, 1.0, 0.01


def is_news(policy: CheckpointPolicy, after: CheckpointPolicyStatus, now: float) -> bool:
    """Returns whether a new status of a policy says anything that people or programs act on.

    Figures are no news: forecasts, the seconds of accounts, when a save was. Only where pods are protected until the
    next checkpoint, the time of the newest one is news before the operator acts on the one that is written.
    """
    before = policy.status
    if _facts(before) != _facts(after) or (is_stalled(before) and before.forecasts != after.forecasts):
        return True
    younger_than_s = policy.spec.voluntary_disruption.checkpoint_younger_than_seconds
    return bool(younger_than_s) and any(
        _saved_at(entry) > _saved_at(known) and now - _saved_at(known) >= younger_than_s / 2
        for entry, known in _pairs(before, after)
    )


def moved_far(before: CheckpointPolicyStatus, after: CheckpointPolicyStatus, now: float) -> bool:
    """Returns whether figures are so far from those that are written that these mislead."""
    if any(tells_more(before, forecast) for forecast in after.forecasts or ()):
        return True
    for entry, known in _pairs(before, after):
        ours, theirs = (
            status_codec.read(entry).spent(round(now * 1000)),
            status_codec.read(known).spent(round(now * 1000)),
        )
        whole = sum(ours.values())
        if any(abs(ours.get(part, 0) - theirs.get(part, 0)) > _SHARE * whole for part in ours.keys() | theirs.keys()):
            return True
        if (new := entry.suggestion) and (old := known.suggestion) and _is_far(new.every_seconds, old.every_seconds):
            return True
    return False


def tells_more(before: CheckpointPolicyStatus, forecast: WorkloadForecast) -> bool:
    """Returns whether a forecast is the first of its workload, or far from the one that is written."""
    known = next((item for item in before.forecasts or () if item.uid == forecast.uid), None)
    return known is None or _is_far(forecast.needed_s, known.needed_s)


def is_stalled(status: CheckpointPolicyStatus) -> bool:
    """Returns whether a gang makes no progress, as far as is written. A newer forecast of it shows that it does."""
    conditions = status.conditions or ()
    return any(item.type == CONDITION_PROGRESSING and item.status is ConditionStatus.FALSE for item in conditions)


def _facts(status: CheckpointPolicyStatus) -> object:
    """What is in a status beside figures."""
    conditions = {
        item.type: (item.status, item.reason, item.observed_generation, item.message)
        if item.type != policy_status.CONDITION_FITS_GRACE
        else (item.status, item.reason, item.observed_generation)
        for item in status.conditions or ()
    }
    return (
        (status.observed_generation, status.workloads, status.last_save, status.replicas, conditions),
        {item.uid for item in status.forecasts or ()},
        {entry.uid: (entry.suggestion is None, *stages(status_codec.read(entry))) for entry in status.goodput or ()},
    )


def _pairs(
    before: CheckpointPolicyStatus, after: CheckpointPolicyStatus
) -> Iterator[tuple[WorkloadGoodput, WorkloadGoodput]]:
    """The accounts that are in both, the new one first."""
    known = {entry.uid: entry for entry in before.goodput or ()}
    return ((entry, known[entry.uid]) for entry in after.goodput or () if entry.uid in known)


def _saved_at(entry: WorkloadGoodput) -> float:
    """When the newest checkpoint of the current life was saved or restored. 0 if there is none."""
    times = [at for life in entry.lives[-1:] for at in (life.restored, life.saved) if at is not None]
    return max((at.timestamp() for at in times), default=0.0)


def _is_far(new: float, old: float) -> bool:
    return abs(new - old) > max(_LEAST_S, _PART * old)
