"""The status of each request, from the gang and its epochs. Pure. It depends on the state only, not on events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from gracepoint.wire.messages import Mode
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.model.requests import RequestRecord
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


def without_workload(request: RequestRecord, epochs: Sequence[PreemptionRecord]) -> Answer | None:
    """Returns the answer to a request whose workload does not exist. None if its Preemption is under way.

    Args:
        request: The request.
        epochs: The Preemption that its status names, if that is known.
    """
    epoch = request.adopted_by(epochs)
    if epoch is not None and not epoch.phase.ended:
        return None
    if epoch is not None or request.spec.retracted:
        return Answer(request, _observed(request, _told(epoch)))
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
    """A final phase never changes, except Expired, and Superseded if an epoch names the request all the same.

    A replica whose view is older may supersede a request of which the other one has told the gang.
    """
    if request.status.phase is RequestPhase.SUPERSEDED:
        return request.adopted_by(gang.epochs) is None
    return request.has_ended and request.status.phase is not RequestPhase.EXPIRED


def _status(gang: GangSnapshot, request: RequestRecord) -> RequestStatus | None:
    """Returns None if nothing is decided yet."""
    epoch = request.adopted_by(gang.epochs)
    if epoch is not None or request.spec.retracted:
        return _told(epoch)
    reason = _why_not(gang, request)
    return None if reason is None else _superseded(reason)


def _told(epoch: PreemptionRecord | None) -> RequestStatus:
    """The status of a request that a Preemption names, or of one that was withdrawn before."""
    if epoch is None:
        return RequestStatus(phase=RequestPhase.RETRACTED, message="it was withdrawn before a notice was sent")
    phase = RequestPhase(epoch.phase) if epoch.phase.ended else RequestPhase.ADOPTED
    message = epoch.status.message if epoch.phase.ended else f"the Preemption {epoch.name} is about it"
    return RequestStatus(phase=phase, message=message, preemption=epoch.name)


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
    return _why_not_now(gang, request) or (_under_way(gang.epochs) if drill else None)


def _why_not_now(gang: GangSnapshot, request: RequestRecord) -> str | None:
    pods, since_at = gang.members, gang.since[request.mark]
    if not pods:
        return f"no pod of the {request.spec.workload.kind} runs"
    if gang.has_ended:
        return "a pod of the gang has ended, so that its processes cannot agree any more"
    for epoch in gang.epochs:
        left = epoch.leaves and any(epoch.includes(pod) for pod in pods)
        if left or since_at <= (epoch.ended_at or 0.0):
            return f"the Preemption {epoch.name} came first and has ended, {epoch.phase}"
    bound = [gang.bound_at.get(pod.uid) for pod in pods]
    if all(at is not None and since_at < at for at in bound):
        return "the pods started after it was made"
    return None


def _under_way(epochs: Iterable[PreemptionRecord]) -> str | None:
    epoch = next((epoch for epoch in epochs if not epoch.phase.ended), None)
    return None if epoch is None else f"the Preemption {epoch.name} is under way"


def _superseded(message: str) -> RequestStatus:
    return RequestStatus(phase=RequestPhase.SUPERSEDED, message=message)
