"""The status of each request. Pure.

A status follows from the gang and its preemptions: from the state only, not from events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from gracepoint.wire.messages import Mode
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import PreemptionRecord, RequestRecord
from gracepoint_operator.resources import WORKLOAD_FIELD, RequestPhase, RequestStatus, SignalKind


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
    """Returns the answer to a request whose workload does not exist. None if its Preemption is in progress.

    Args:
        request: The request.
        preemptions: The Preemption that its status names, if that is known.
    """
    preemption = request.adopted_by(preemptions)
    if preemption is not None and not preemption.phase.ended:
        return None
    if preemption is not None or request.spec.retracted:
        return Answer(request, _observed(request, _status_by(preemption)))
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
    """A final phase never changes, except Expired, and Superseded if a preemption names the request in spite of that.

    A replica whose view is older may supersede a request of which the other one has notified the gang.
    """
    if request.status.phase is RequestPhase.SUPERSEDED:
        return request.adopted_by(gang.preemptions) is None
    return request.has_ended and request.status.phase is not RequestPhase.EXPIRED


def _status(gang: GangSnapshot, request: RequestRecord) -> RequestStatus | None:
    """Returns None if nothing is decided yet."""
    preemption = request.adopted_by(gang.preemptions)
    if preemption is not None or request.spec.retracted:
        return _status_by(preemption)
    reason = _why_without_effect(gang, request)
    return None if reason is None else _superseded(reason)


def _status_by(preemption: PreemptionRecord | None) -> RequestStatus:
    """The status of a request that a Preemption names, or of one that was withdrawn before."""
    if preemption is None:
        return RequestStatus(phase=RequestPhase.RETRACTED, message="it was withdrawn before a notice was sent")
    phase = RequestPhase(preemption.phase) if preemption.phase.ended else RequestPhase.ADOPTED
    message = preemption.status.message if preemption.phase.ended else f"the Preemption {preemption.name} is about it"
    return RequestStatus(phase=phase, message=message, preemption=preemption.name)


def _why_without_effect(gang: GangSnapshot, request: RequestRecord) -> str | None:
    """Returns why the request has no effect. None if it has one, or may still have one."""
    kind = request.spec.workload.kind
    if not request.is_for(gang.workload_uid):
        uid, expected = request.spec.workload.uid, gang.workload_uid
        return f"spec.{WORKLOAD_FIELD}.uid: found {uid!r}, expected {expected!r}, which the {kind} of that name has"
    if gang.policy is None:
        return f"the CheckpointPolicy that the {kind} names does not exist"
    policy = gang.policy.spec
    if not policy.counts(SignalKind.REQUEST):
        return f"spec.signals of the CheckpointPolicy {gang.policy.name} does not contain Request"
    drill = request.is_drill(policy.mode)
    if drill and policy.mode is Mode.OBSERVE:
        return f"the CheckpointPolicy {gang.policy.name} has mode Observe: no notice is sent, so nothing is rehearsed"
    return _why_not_now(gang, request) or (_in_progress(gang.preemptions) if drill else None)


def _why_not_now(gang: GangSnapshot, request: RequestRecord) -> str | None:
    pods, since_at = gang.members, gang.since[request.mark]
    if not pods:
        return f"no pod of the {request.spec.workload.kind} runs"
    if gang.has_ended:
        return "a pod of the gang has ended, so that its processes cannot agree any more"
    for preemption in gang.preemptions:
        has_left = preemption.leaves and any(preemption.includes(pod) for pod in pods)
        if has_left or since_at <= (preemption.ended_at or 0.0):
            return f"the Preemption {preemption.name} came first and has ended, {preemption.phase}"
    bound = [gang.bound_at.get(pod.uid) for pod in pods]
    if all(at is not None and since_at < at for at in bound):
        return "the pods started after it was made"
    return None


def _in_progress(preemptions: Iterable[PreemptionRecord]) -> str | None:
    preemption = next((preemption for preemption in preemptions if not preemption.phase.ended), None)
    return None if preemption is None else f"the Preemption {preemption.name} is in progress"


def _superseded(message: str) -> RequestStatus:
    return RequestStatus(phase=RequestPhase.SUPERSEDED, message=message)
