"""Which Preemptions are to be deleted, by age and by count. Pure.

Records and requests that have ended are kept for a time, and only a limited number for one workload name;
a request goes with its record. What is under way stays, and what the operator still decides by:

* of each workload that exists the highest record, from which the number of the next one follows, and the highest one
  that was no rehearsal, which says to which signals the gang has answered;
* what ended so recently that the gang may yet report, or that the policy's exit breaker counts it;
* a record whose request is not told yet how it ended.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Iterable, Iterator
from enum import StrEnum
from typing import TypeVar

from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.model.requests import RequestRecord
from gracepoint_operator.workloads import WorkloadIdentity

#: Whatever the limits: what ended more recently stays.
SHORTEST_S = 3600.0

Key = tuple[str, str]
_T = TypeVar("_T")
_ByName = dict[Key, list[tuple[float, _T]]]  # by namespace and name of the workload, each with when it ended


class DeletionReason(StrEnum):
    """Why it is to be deleted; a label of the metric."""

    AGE = "age"
    COUNT = "count"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is kept.

    Attributes:
        ttl_s: How long after its end.
        history: How many that have ended, records and requests each, of one workload name.
    """

    ttl_s: float = 30 * 86_400.0
    history: int = 50


@dataclasses.dataclass(frozen=True)
class Due:
    """A Preemption that is to be deleted.

    Attributes:
        unless_lives: Delete only if this workload does not exist any more. None: delete in any case.
    """

    key: Key
    reason: DeletionReason
    unless_lives: WorkloadIdentity | None = None


def due(
    epochs: Iterable[PreemptionRecord],
    requests: Iterable[RequestRecord],
    living: Container[str],
    now: float,
    limits: Limits,
) -> list[Due]:
    """The Preemptions that are to be deleted, those of one workload name oldest first, requests before their record.

    Args:
        epochs: All records that are known.
        requests: All requests that are known.
        living: UIDs of the workloads that are known to exist.
        now: Seconds since the epoch.
        limits: What is kept.
    """
    epochs, by_uid = list(epochs), {request.uid: request for request in requests}
    decisive = _decisive(epochs)
    found: list[Due] = []
    of_records: set[str] = set()
    for epoch, reason in _beyond(epochs, now, limits):
        asked = [by_uid[reference.uid] for reference in epoch.spec.requests if reference.uid in by_uid]
        of_records |= {request.uid for request in asked}
        workload = epoch.spec.workload
        is_decisive = epoch.key in decisive
        if not all(request.has_ended for request in asked) or (is_decisive and workload.uid in living):
            continue
        found += [Due(request.key, reason) for request in asked]
        found.append(
            Due(epoch.key, reason, epoch.workload if is_decisive else None),
        )
    recorded = of_records | {reference.uid for epoch in epochs for reference in epoch.spec.requests}
    alone = [request for request in by_uid.values() if request.uid not in recorded]
    return list(dict.fromkeys(found)) + [
        Due(request.key, reason) for request, reason in _left_alone(alone, now, limits)
    ]


def _decisive(epochs: Iterable[PreemptionRecord]) -> set[Key]:
    """Of each workload the highest record, and the highest that was no rehearsal."""
    highest: dict[tuple[str, str, bool], PreemptionRecord] = {}
    for epoch in sorted(epochs, key=lambda epoch: epoch.spec.epoch):
        highest[epoch.namespace, epoch.spec.workload.uid, False] = epoch
        if not epoch.is_rehearsal:
            highest[epoch.namespace, epoch.spec.workload.uid, True] = epoch
    return {epoch.key for epoch in highest.values()}


def _beyond(
    epochs: Iterable[PreemptionRecord], now: float, limits: Limits
) -> Iterator[tuple[PreemptionRecord, DeletionReason]]:
    """The records that ended long ago, or that are more than are kept, oldest first."""
    by_name: _ByName[PreemptionRecord] = collections.defaultdict(list)
    for epoch in epochs:
        if (ended_at := epoch.ended_at) is not None:
            by_name[epoch.namespace, epoch.spec.workload.name].append((ended_at, epoch))
    for age_s, epoch, reason in _overdue(by_name, now, limits):
        if age_s > epoch.spec.policy.spec.exit_breaker.within_seconds:
            yield epoch, reason


def _left_alone(
    requests: Iterable[RequestRecord], now: float, limits: Limits
) -> Iterator[tuple[RequestRecord, DeletionReason]]:
    """The requests of which no record is known, likewise. When they were answered is told nowhere: soon."""
    by_name: _ByName[RequestRecord] = collections.defaultdict(list)
    for request in requests:
        if request.has_ended:
            by_name[request.namespace, request.spec.workload.name].append((request.created_at, request))
    for _, request, reason in _overdue(by_name, now, limits):
        yield request, reason


def _overdue(by_name: _ByName[_T], now: float, limits: Limits) -> Iterator[tuple[float, _T, DeletionReason]]:
    """What is beyond the limits, with its age in seconds: of each workload name, oldest first."""
    for ended in by_name.values():
        ended.sort(key=lambda item: item[0])
        for place, (at, item) in enumerate(ended):
            reason = _reason(now - at, len(ended) - place, limits)
            if reason is not None:
                yield now - at, item, reason


def _reason(age_s: float, place: int, limits: Limits) -> DeletionReason | None:
    """``place``: counted from the newest, which is 1."""
    if age_s <= SHORTEST_S:
        return None
    if age_s > limits.ttl_s:
        return DeletionReason.AGE
    return DeletionReason.COUNT if place > limits.history else None
