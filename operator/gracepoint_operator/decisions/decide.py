"""What to do about one workload, decided from a view of it and the time. Pure, and level-based.

``decide`` looks only at the state, never at the event that changed it. So it gives the same answer after any event,
after a restart of the operator, and in each replica. The rules, in order:

* ``effective_signals`` says which signals count. A signal that an earlier preemption of the same pods answered does not
  count again.
* The earliest deadline wins. A signal during an open preemption joins it (``effective_signals``), if it counts under
  the copy of the policy in that preemption.
* A preemption is retracted if the gang has not frozen, all signals are cancelable and went away, and the pods and nodes
  are still there. A replica that learned of the preemption from its record waits for its signals first
  (``signals_come_until``).
* A preemption for a time limit, after which the gang continues to train, is retracted for one that asks it to exit.
* If the workload of an open preemption is not known any more, the API is asked for it. It may only have lost its label;
  then the preemption continues.
* A requested drill gives way: it begins only if no preemption is in progress. A disruption during a drill has its own
  preemption. Signals that are still being checked, or have to wait, do not stop a drill.
* A preemption of signals that are not sure may have to wait (``holds_back``).
* A preemption that no report ends expires some time after its deadline, or when the restarted gang is disrupted.
* Requests are answered (``answers``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator import signals
from gracepoint_operator.decisions import effective_signals
from gracepoint_operator.decisions.effective_signals import Timed, believed, counting, relevant, signals_come_until
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import EndReason, PreemptionRecord, RequestRecord, preemption_name
from gracepoint_operator.resources import (
    WORKLOAD_FIELD,
    PreemptionSpec,
    RequestPhase,
    RequestReference,
    RequestStatus,
    SignalKind,
)
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
    """A final phase never changes, except Expired, Evacuated, and Superseded if a preemption names the request anyway.

    A replica whose view is older may supersede a request of which the other one has notified the gang.
    """
    if request.status.phase is RequestPhase.SUPERSEDED:
        return request.adopted_by(gang.preemptions) is None
    return request.has_ended and request.status.phase not in (RequestPhase.EXPIRED, RequestPhase.EVACUATED)


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


#: Seconds after the deadline for which the operator waits for the last report of a gang.
EXPIRE_AFTER_S = 30.0


@dataclasses.dataclass(frozen=True)
class StartPreemption:
    """Begin a preemption: send the notices and create the Preemption.

    Attributes:
        expected: Number of pods of the gang.
    """

    namespace: str
    name: str
    spec: PreemptionSpec
    expected: int


@dataclasses.dataclass(frozen=True)
class Move:
    """Signals joined a preemption, or its deadline moved: send the notices again."""

    preemption: PreemptionRecord
    spec: PreemptionSpec


@dataclasses.dataclass(frozen=True)
class End:
    """End a preemption without a report of the gang.

    Attributes:
        phase: RETRACTED or EXPIRED.
    """

    preemption: PreemptionRecord
    phase: Phase
    reason: EndReason
    message: str


@dataclasses.dataclass(frozen=True)
class Reached:
    """Record a stage that the cluster shows and the gang does not report."""

    preemption: PreemptionRecord
    stage: str


@dataclasses.dataclass(frozen=True)
class Check:
    """Read the workload and these of its Jobs again, then decide again."""

    workload: WorkloadIdentity
    jobs: tuple[str, ...] = ()
    pod_uids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Wait:
    """A preemption has to wait before it begins: decide again a little later."""


Decision = StartPreemption | Move | End | Reached | Check | Wait | Answer


def decide(
    gang: GangSnapshot, now: float, holds_back: Callable[[PreemptionSpec], bool] = lambda spec: False
) -> list[Decision]:
    """Returns the decisions for one workload. Empty if there is nothing to do.

    Args:
        gang: Everything that is known of the workload.
        now: Seconds since the epoch.
        holds_back: Returns whether a preemption that would begin has to wait.
    """
    latest = next((preemption for preemption in reversed(gang.preemptions) if not preemption.is_rehearsal), None)
    policy = None if gang.policy is None else gang.policy.spec
    decisions: list[Decision] = []
    started: list[Decision] = []
    if latest is not None and not latest.phase.ended:
        fresh: list[Timed] = []
        if not all(latest.includes(pod) for pod in gang.members):
            timed = counting(gang, policy, now, drills=False)
            fresh = [item for item in timed if not latest.includes(item.signal.pod)]
        joined = _joining(gang, latest, now)
        ending = _ending(gang, latest, now, outlived=bool(believed(gang, fresh)))
        if ending is not None:
            started = _started(gang, fresh, now, holds_back)
        elif _gives_way(gang, latest, believed(gang, joined), now):
            started = _started(gang, joined, now, holds_back)
            if _begins(started):
                message = "a disruption came that makes the gang leave"
                ending = End(latest, Phase.RETRACTED, EndReason.GAVE_WAY, message)
        decisions += [ending] if ending is not None else _moved(latest, joined, now)
    else:
        timed = counting(gang, policy, now, drills=False)
        started = _started(gang, timed if latest is None else _unanswered([latest], timed), now, holds_back)
    in_progress = latest is not None and not latest.phase.ended
    decisions += _rehearsed(gang, now, quiet=not (started or in_progress), disrupted=_begins(started) or in_progress)
    for preemption in gang.preemptions:
        if not (preemption.phase.ended or preemption is latest or preemption.is_rehearsal) and is_late(preemption, now):
            decisions.append(_expired(preemption))
    decisions += started
    decisions += _missed(gang)
    if latest is not None:
        decisions += _milestones(gang, latest)
    adopted = [reference.uid for item in decisions for reference in _newly_adopted(item)]
    decisions += [answer for answer in answers(gang) if answer.request.uid not in adopted]
    return decisions


def _newly_adopted(decision: Decision) -> Sequence[RequestReference]:
    """Returns the requests that a decision adopts. They are answered when the preemption names them."""
    match decision:
        case StartPreemption():
            return decision.spec.requests
        case Move():
            return [item for item in decision.spec.requests if item not in decision.preemption.spec.requests]
        case _:
            return []


def _rehearsed(gang: GangSnapshot, now: float, *, quiet: bool, disrupted: bool) -> list[Decision]:
    """Returns the decisions about requested drills.

    Args:
        gang: Everything that is known of the workload.
        now: Seconds since the epoch.
        quiet: Whether no other preemption is in progress or about to begin.
        disrupted: Whether another preemption is in progress, or begins now.
    """
    current = next(
        (preemption for preemption in gang.preemptions if preemption.is_rehearsal and not preemption.phase.ended), None
    )
    timed = counting(gang, None if gang.policy is None else gang.policy.spec, now, drills=True)
    if current is None:
        return _started(gang, _unanswered(gang.preemptions, timed), now, drill=True) if quiet else []
    outlived = any(not current.includes(item.signal.pod) for item in timed)
    ending = _ending(gang, current, now, outlived=outlived)
    if ending is None and disrupted and current.phase.rank < Phase.FROZEN.rank:
        ending = End(current, Phase.RETRACTED, EndReason.GAVE_WAY, "a disruption came that is no drill")
    return [ending] if ending is not None else _moved(current, _joining(gang, current, now), now)


def _joining(gang: GangSnapshot, current: PreemptionRecord, now: float) -> list[Timed]:
    """Returns the signals for the pods of an open preemption, under its own copy of the policy.

    So an edit or deletion of the policy, or the removal of the label, does not change the preemption.
    """
    timed = counting(gang, current.spec.policy.spec, now, drills=current.is_rehearsal)
    return [item for item in timed if current.includes(item.signal.pod)]


def _begins(started: Iterable[Decision]) -> bool:
    return any(isinstance(item, StartPreemption) for item in started)


def _missed(gang: GangSnapshot) -> list[Decision]:
    """If the workload of an open preemption is not known any more, asks the API for it."""
    if gang.workload is not None or gang.workload_gone:
        return []
    lost = [
        preemption
        for preemption in gang.preemptions
        if not preemption.phase.ended and preemption.phase.rank < Phase.FROZEN.rank
    ]
    return [Check(preemption.workload) for preemption in lost[:1]]


def _unanswered(preemptions: Sequence[PreemptionRecord], timed: Sequence[Timed]) -> list[Timed]:
    """Returns the signals that none of these ended preemptions has answered.

    A preemption did not answer a signal that was known at that time but too far ahead, such as a time limit or a
    postponed maintenance. It answered the requests that it names, also those that come to this replica after its end.
    """

    def answered(preemption: PreemptionRecord, item: Timed) -> bool:
        if not preemption.includes(item.signal.pod):
            return False
        if item.request is not None and item.request.reference in preemption.spec.requests:
            return True
        ended_at = preemption.ended_at or 0.0
        was_far = item.request is None and item.signal.is_far(item.since_at, ended_at)
        return preemption.leaves or (item.since_at <= ended_at and not was_far)

    return [item for item in timed if not any(answered(preemption, item) for preemption in preemptions)]


def _started(
    gang: GangSnapshot,
    timed: Sequence[Timed],
    now: float,
    holds_back: Callable[[PreemptionSpec], bool] = lambda spec: False,
    *,
    drill: bool = False,
) -> list[Decision]:
    if not timed or gang.workload is None or gang.policy is None:
        return []
    sound = believed(gang, timed)
    if not sound:
        pods = [item.signal.pod for item in timed]
        jobs = tuple(sorted({pod.job_name for pod in pods}))
        return [Check(gang.workload, jobs, tuple(sorted({pod.uid for pod in pods})))]
    if drill and gang.policy.spec.mode is Mode.OBSERVE:
        return []
    spec = effective_signals.begun(gang.workload, gang.policy, gang.preemptions, gang.pods, sound, now, drill=drill)
    if holds_back(spec):
        return [Wait()]
    name = preemption_name(gang.workload.name, gang.workload.uid, spec.epoch)
    return [StartPreemption(gang.workload.namespace, name, spec, len(gang.processes))]


def _gives_way(gang: GangSnapshot, current: PreemptionRecord, timed: Sequence[Timed], now: float) -> bool:
    return gang.policy is not None and effective_signals.gives_way(
        current, gang.policy.spec, gang.preemptions, timed, now
    )


def _moved(current: PreemptionRecord, timed: Sequence[Timed], now: float) -> list[Decision]:
    spec = effective_signals.moved(current, timed, now)
    return [] if spec is None else [Move(current, spec)]


def _ending(gang: GangSnapshot, current: PreemptionRecord, now: float, *, outlived: bool) -> End | None:
    before_freeze = current.phase.rank < Phase.FROZEN.rank
    if before_freeze and (gang.workload_gone or (gang.workload is not None and gang.workload.deleted)):
        return End(current, Phase.RETRACTED, EndReason.WORKLOAD_DELETED, f"the {current.workload.kind} was deleted")
    if before_freeze and gang.workload is not None and gang.workload.finished:
        return End(current, Phase.RETRACTED, EndReason.WORKLOAD_FINISHED, f"the {current.workload.kind} finished")
    if before_freeze and current.spec.cancelable and _signals_went_away(gang, current, now):
        message = f"the signal went away: {current.spec.signal}"
        return End(current, Phase.RETRACTED, EndReason.SIGNAL_WENT_AWAY, message)
    if outlived:
        message = "its pods were replaced before an end was reported"
        return End(current, Phase.EXPIRED, EndReason.PODS_REPLACED, message)
    return _expired(current) if is_late(current, now) else None


def is_late(preemption: PreemptionRecord, now: float) -> bool:
    """Returns whether no end of the preemption is waited for any more."""
    return now > preemption.spec.deadline.timestamp() + EXPIRE_AFTER_S


def _expired(preemption: PreemptionRecord) -> End:
    message = "the deadline passed, and no end was reported"
    if preemption.spec.mode is Mode.OBSERVE:
        message = "the deadline passed; observed only, nobody was notified"
    return End(preemption, Phase.EXPIRED, EndReason.DEADLINE_PASSED, message)


def _signals_went_away(gang: GangSnapshot, current: PreemptionRecord, now: float) -> bool:
    """True if the pods of the preemption and their nodes still exist and have no signal any more."""
    if not current.seen and now <= signals_come_until(current):
        return False
    named = set(current.spec.pods)
    pods = {pod.name: pod for pod in gang.members if pod.name in named and current.includes(pod)}
    for name in named:
        pod = pods.get(name)
        if pod is None or pod.finished or pod.deletion_at is not None or pod.node not in gang.nodes:
            return False
    policy, drills = current.spec.policy.spec, current.is_rehearsal
    suspects = [pod for pod in gang.suspects if current.includes(pod)]
    return not any(True for pod in suspects for _ in relevant(gang, pod, policy, now, drills=drills))


def sees_signals(gang: GangSnapshot, preemption: PreemptionRecord, now: float) -> bool:
    """Returns whether signals that are known here name all pods and requests of an open preemption, and its signal."""
    timed = _joining(gang, preemption, now)
    if all(item.signal.text != preemption.spec.signal for item in timed):
        return False
    named = {item.signal.pod.name for item in timed}
    asked = {item.request.uid for item in timed if item.request is not None}
    spec = preemption.spec
    return named.issuperset(spec.pods) and asked.issuperset(request.uid for request in spec.requests)


def _milestones(gang: GangSnapshot, latest: PreemptionRecord) -> list[Decision]:
    """Returns the stages after the save that the cluster shows: all pods have exited, all pods are back."""
    if gang.workload is None or latest.phase is Phase.RETRACTED or not latest.asks_to_leave or latest.is_restored:
        return []
    reached: list[Decision] = []
    if latest.timing("exited") is None:
        lives = any(not (pod.finished or pod.helps) and pod.policy and latest.includes(pod) for pod in gang.pods)
        if lives or not latest.knows_its_pods:
            return []
        reached.append(Reached(latest, "exited"))
    acknowledgements = latest.status.acknowledgements
    if acknowledgements and latest.timing("podsBack") is None:
        running = sum(pod.phase == "Running" for pod in gang.processes if not latest.includes(pod))
        if running >= acknowledgements.expected:
            reached.append(Reached(latest, "podsBack"))
    return reached


#: Times are compared with "later than", so the decision comes this much later.
_AFTER_S = 0.001


def next_decision_at(gang: GangSnapshot, now: float) -> float | None:
    """Returns when to decide again without an event, in seconds since the epoch. None: not before an event.

    A decision follows from the objects and the time (``decide``). A change of an object is an event. Time alone brings
    these changes:

    * a preemption in progress expires some time after its deadline;
    * a signal that another replica saw, and that does not come, has gone away;
    * a signal that is too far ahead comes nearer than the horizon;
    * the exit breaker closes again, so that a gang which only saves may be asked to exit.

    Args:
        gang: What the last decisions were based on.
        now: When they were made, in seconds since the epoch.
    """
    return min((at + _AFTER_S for at in _times(gang) if at + _AFTER_S > now), default=None)


def _times(gang: GangSnapshot) -> Iterator[float]:
    in_progress = [preemption for preemption in gang.preemptions if not preemption.phase.ended]
    for preemption in in_progress:
        yield preemption.spec.deadline.timestamp() + EXPIRE_AFTER_S
        yield signals_come_until(preemption)
    for pod in gang.pods:
        marks = gang.marks.get(pod.uid, ())
        for signal in signals.of_pod(pod, marks) if marks else ():
            yield signal.near_at(gang.since[signal.mark])
    if gang.policy is not None and any(not preemption.asks_to_leave for preemption in in_progress):
        for preemption in gang.preemptions:
            if (ended_at := preemption.ended_at) is not None:
                yield ended_at + gang.policy.spec.exit_breaker.within_seconds


WINDOW_S = 60.0
DEFAULT_LIKELY_GANGS_PER_MINUTE = 10


def holds_back(
    spec: PreemptionSpec,
    preemptions: Iterable[PreemptionRecord],
    created_here: Container[tuple[str, str]],
    limit: int,
    replicas: int,
) -> bool:
    """Returns True if a preemption must wait because the limit was reached within the last ``WINDOW_S`` seconds.

    It limits how many gangs per minute get a notice for signals that are not sure. For example, a network partition
    makes many nodes unreachable at once, and most of them come back. Without a limit every gang in the cluster would
    save and exit.

    All replicas see the records, but with a delay. Without a further rule, each of two replicas could use the whole
    limit at the same moment for different gangs. So each replica has a share of the limit, against which only the
    records count that it created or is about to create. Each record is created by one replica, so all replicas together
    stay within the limit.

    Args:
        spec: Spec of the preemption that would begin.
        preemptions: The preemptions that were created within that time, or are not created yet.
        created_here: Namespaces and names of the records that this replica created.
        limit: Number of gangs a minute, for all replicas together.
        replicas: Number of replicas. Each may begin at least one preemption, even if ``limit`` is smaller.
    """

    def counts(of: PreemptionSpec) -> bool:
        return of.confidence is not Confidence.SURE and of.mode is not Mode.OBSERVE

    if not counts(spec):
        return False
    counted = [preemption for preemption in preemptions if counts(preemption.spec)]
    own_counted = [
        preemption for preemption in counted if preemption.created_at is None or preemption.key in created_here
    ]
    return _gangs(counted) >= limit or _gangs(own_counted) >= max(1, limit // replicas)


def _gangs(preemptions: Iterable[PreemptionRecord]) -> int:
    return len({preemption.spec.workload.uid for preemption in preemptions})
