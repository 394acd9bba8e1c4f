"""Which requests and Preemptions are deleted. Pure.

Records that have ended are kept for some time, and only a limited number for one workload name. Preemptions that are
in progress are kept, and those that the operator still needs:

* for each workload that exists, the record with the highest number, from which the next number follows, and the highest
  one that was no rehearsal, which says to which signals the gang has answered;
* those that ended recently: the gang may still report, or the exit breaker of the policy counts them;
* a record whose request does not have its final status yet.

A request that is over is kept for a shorter time: its record says how it ended.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Iterable, Iterator
from enum import StrEnum
from typing import TypeVar

from gracepoint.wire.messages import Phase
from gracepoint_operator.model.preemption_record import PreemptionRecord, RequestRecord
from gracepoint_operator.resources import RequestPhase
from gracepoint_operator.workloads import WorkloadIdentity

#: Preemptions that ended less than this number of seconds ago are kept, whatever the limits are.
SHORTEST_S = 3600.0

Key = tuple[str, str]
_T = TypeVar("_T")
_ByName = dict[Key, list[tuple[float, _T]]]  # by namespace and name of the workload, each with when it ended


class DeletionReason(StrEnum):
    """Why a Preemption is deleted: a label of the metric."""

    AGE = "age"
    COUNT = "count"


@dataclasses.dataclass(frozen=True)
class Limits:
    """How many Preemptions are kept, and for how long.

    Attributes:
        ttl_s: Seconds after the end for which a Preemption is kept.
        history: Number of ended records that are kept for one workload name.
        request_ttl_s: Seconds after the end for which a request is kept.
    """

    ttl_s: float = 30 * 86_400.0
    history: int = 50
    request_ttl_s: float = 3600.0


@dataclasses.dataclass(frozen=True)
class Due:
    """A Preemption to delete.

    Attributes:
        unless_lives: Delete only if this workload does not exist any more. None: delete in any case.
    """

    key: Key
    reason: DeletionReason
    unless_lives: WorkloadIdentity | None = None


def due_for_deletion(
    preemptions: Iterable[PreemptionRecord],
    requests: Iterable[RequestRecord],
    living: Container[str],
    now: float,
    limits: Limits,
) -> list[Due]:
    """Returns the Preemptions to delete, for one workload name oldest first.

    Args:
        preemptions: All known records.
        requests: All known requests.
        living: UIDs of the workloads that are known to exist.
        now: Seconds since the epoch.
        limits: How many are kept, and for how long.
    """
    preemptions, by_uid = list(preemptions), {request.uid: request for request in requests}
    decisive = _decisive(preemptions)
    deletable: list[Due] = []
    for preemption, reason in _beyond(preemptions, now, limits):
        its_requests = [by_uid[reference.uid] for reference in preemption.spec.requests if reference.uid in by_uid]
        workload = preemption.spec.workload
        is_decisive = preemption.key in decisive
        if not all(request.has_ended for request in its_requests) or (is_decisive and workload.uid in living):
            continue
        deletable.append(Due(preemption.key, reason, preemption.workload if is_decisive else None))
    return deletable


def final_requests(
    preemptions: Iterable[PreemptionRecord], requests: Iterable[RequestRecord], now: float
) -> list[RequestRecord]:
    """Returns the requests whose status will not change any more.

    Args:
        preemptions: All known records.
        requests: All known requests.
        now: Seconds since the epoch.
    """
    asked_by = {reference.uid: preemption for preemption in preemptions for reference in preemption.spec.requests}
    return [item for item in requests if item.has_ended and _stays_ended(item, asked_by.get(item.uid), now)]


def _stays_ended(request: RequestRecord, preemption: PreemptionRecord | None, now: float) -> bool:
    """A late report corrects a record that has Expired, and a record may name a request that was Superseded."""
    if preemption is None:
        return True
    if preemption.ended_at is None:
        return False
    same = RequestPhase(preemption.phase) is request.status.phase
    return (same and preemption.phase is not Phase.EXPIRED) or now - preemption.ended_at > SHORTEST_S


def _decisive(preemptions: Iterable[PreemptionRecord]) -> set[Key]:
    """For each workload, the keys of its highest record and of its highest record that was no rehearsal."""
    highest: dict[tuple[str, str, bool], PreemptionRecord] = {}
    for preemption in sorted(preemptions, key=lambda preemption: preemption.spec.epoch):
        highest[preemption.namespace, preemption.spec.workload.uid, False] = preemption
        if not preemption.is_rehearsal:
            highest[preemption.namespace, preemption.spec.workload.uid, True] = preemption
    return {preemption.key for preemption in highest.values()}


def _beyond(
    preemptions: Iterable[PreemptionRecord], now: float, limits: Limits
) -> Iterator[tuple[PreemptionRecord, DeletionReason]]:
    """Yields the records that are older than the limit, or beyond the number to keep, oldest first."""
    by_name: _ByName[PreemptionRecord] = collections.defaultdict(list)
    for preemption in preemptions:
        if (ended_at := preemption.ended_at) is not None:
            by_name[preemption.namespace, preemption.spec.workload.name].append((ended_at, preemption))
    for age_s, preemption, reason in _overdue(by_name, now, limits):
        if age_s > preemption.spec.policy.spec.exit_breaker.within_seconds:
            yield preemption, reason


def _overdue(by_name: _ByName[_T], now: float, limits: Limits) -> Iterator[tuple[float, _T, DeletionReason]]:
    """Yields the items beyond the limits with their age in seconds, for each workload name oldest first."""
    for of_name in by_name.values():
        of_name.sort(key=lambda item: item[0])
        for place, (at, item) in enumerate(of_name):
            reason = _reason(now - at, len(of_name) - place, limits)
            if reason is not None:
                yield now - at, item, reason


def _reason(age_s: float, place: int, limits: Limits) -> DeletionReason | None:
    """``place``: counted from the newest, which is 1."""
    if age_s <= SHORTEST_S:
        return None
    if age_s > limits.ttl_s:
        return DeletionReason.AGE
    return DeletionReason.COUNT if place > limits.history else None
