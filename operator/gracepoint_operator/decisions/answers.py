"""The status of each request, and which requests and Preemptions are deleted. Pure.

A status follows from the gang and its preemptions: from the state only, not from events.

Records that have ended are kept for some time, and only a limited number for one workload name. Preemptions that are
under way are kept, and those that the operator still needs:

* for each workload that exists, the record with the highest number, from which the next number follows, and the highest
  one that was no rehearsal, which says to which signals the gang has answered;
* those that ended recently: the gang may still report, or the exit breaker of the policy counts them;
* a record whose request does not have its final status yet.

A request that is over for good is kept for a shorter time: its record says how it ended.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TypeVar

from gracepoint.wire.messages import Mode, Phase
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import PreemptionRecord, RequestRecord
from gracepoint_operator.resources import WORKLOAD_FIELD, RequestPhase, RequestStatus, SignalKind
from gracepoint_operator.workloads import WorkloadIdentity


@dataclasses.dataclass(frozen=True)
class Answer:
    """The new status of a request."""

    request: RequestRecord
    status: RequestStatus


def answers(gang: GangSnapshot) -> Iterator[Answer]:
    """Yields an answer for each request whose status changes."""
    for request in gang.requests:
        if _is_final(gang, request):
            # Only the generation can change. An older operator wrote none.
            status = None if request.status.observed_generation is None else request.status
        else:
            status = _status(gang, request)
        if status is not None and _observed(request, status) != request.status:
            yield Answer(request, _observed(request, status))


def without_workload(request: RequestRecord, preemptions: Sequence[PreemptionRecord]) -> Answer | None:
    """Returns the answer to a request whose workload does not exist. None if its Preemption is under way.

    Args:
        request: The request.
        preemptions: The Preemption that its status names, if that is known.
    """
    preemption = request.adopted_by(preemptions)
    if preemption is not None and not preemption.phase.ended:
        return None
    if preemption is not None or request.spec.retracted:
        return Answer(request, _observed(request, _told(preemption)))
    workload = request.spec.workload
    message = (
        f"there is no {workload.kind} {workload.name} with a CheckpointPolicy in this namespace; "
        f"expected spec.{WORKLOAD_FIELD} to name one"
    )
    return Answer(request, _observed(request, _superseded(message)))


def _observed(request: RequestRecord, status: RequestStatus) -> RequestStatus:
    """The status with the generation from which it was computed."""
    return status.model_copy(update={"observed_generation": request.generation or None})


def _is_final(gang: GangSnapshot, request: RequestRecord) -> bool:
    """A final phase never changes, except Expired, and Superseded if a preemption names the request all the same.

    A replica whose view is older may supersede a request of which the other one has told the gang.
    """
    if request.status.phase is RequestPhase.SUPERSEDED:
        return request.adopted_by(gang.preemptions) is None
    return request.has_ended and request.status.phase is not RequestPhase.EXPIRED


def _status(gang: GangSnapshot, request: RequestRecord) -> RequestStatus | None:
    """Returns None if nothing is decided yet."""
    preemption = request.adopted_by(gang.preemptions)
    if preemption is not None or request.spec.retracted:
        return _told(preemption)
    reason = _why_not(gang, request)
    return None if reason is None else _superseded(reason)


def _told(preemption: PreemptionRecord | None) -> RequestStatus:
    """The status of a request that a Preemption names, or of one that was withdrawn before."""
    if preemption is None:
        return RequestStatus(phase=RequestPhase.RETRACTED, message="it was withdrawn before a notice was sent")
    phase = RequestPhase(preemption.phase) if preemption.phase.ended else RequestPhase.ADOPTED
    message = preemption.status.message if preemption.phase.ended else f"the Preemption {preemption.name} is about it"
    return RequestStatus(phase=phase, message=message, preemption=preemption.name)


def _why_not(gang: GangSnapshot, request: RequestRecord) -> str | None:
    """Returns why the request has no effect. None if it has one, or may still have one."""
    kind = request.spec.workload.kind
    if not request.is_for(gang.workload_uid):
        found, expected = request.spec.workload.uid, gang.workload_uid
        return f"spec.{WORKLOAD_FIELD}.uid: found {found!r}, expected {expected!r}, which the {kind} of that name has"
    if gang.policy is None:
        return f"the CheckpointPolicy that the {kind} names does not exist"
    policy = gang.policy.spec
    if not policy.counts(SignalKind.REQUEST):
        return f"spec.signals of the CheckpointPolicy {gang.policy.name} does not contain Request"
    drill = request.is_drill(policy.mode)
    if drill and policy.mode is Mode.OBSERVE:
        return f"the CheckpointPolicy {gang.policy.name} has mode Observe: no notice is sent, so nothing is rehearsed"
    return _why_not_now(gang, request) or (_under_way(gang.preemptions) if drill else None)


def _why_not_now(gang: GangSnapshot, request: RequestRecord) -> str | None:
    pods, since_at = gang.members, gang.since[request.mark]
    if not pods:
        return f"no pod of the {request.spec.workload.kind} runs"
    if gang.has_ended:
        return "a pod of the gang has ended, so that its processes cannot agree any more"
    for preemption in gang.preemptions:
        left = preemption.leaves and any(preemption.includes(pod) for pod in pods)
        if left or since_at <= (preemption.ended_at or 0.0):
            return f"the Preemption {preemption.name} came first and has ended, {preemption.phase}"
    bound = [gang.bound_at.get(pod.uid) for pod in pods]
    if all(at is not None and since_at < at for at in bound):
        return "the pods started after it was made"
    return None


def _under_way(preemptions: Iterable[PreemptionRecord]) -> str | None:
    preemption = next((preemption for preemption in preemptions if not preemption.phase.ended), None)
    return None if preemption is None else f"the Preemption {preemption.name} is under way"


def _superseded(message: str) -> RequestStatus:
    return RequestStatus(phase=RequestPhase.SUPERSEDED, message=message)


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


def due(
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
    found: list[Due] = []
    for preemption, reason in _beyond(preemptions, now, limits):
        asked = [by_uid[reference.uid] for reference in preemption.spec.requests if reference.uid in by_uid]
        workload = preemption.spec.workload
        is_decisive = preemption.key in decisive
        if not all(request.has_ended for request in asked) or (is_decisive and workload.uid in living):
            continue
        found.append(Due(preemption.key, reason, preemption.workload if is_decisive else None))
    return found


def over(preemptions: Iterable[PreemptionRecord], requests: Iterable[RequestRecord], now: float) -> list[RequestRecord]:
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
