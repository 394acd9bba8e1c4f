"""What to do about one JobSet, decided from a view of it and the time. Pure, and level-based.

``decide`` looks only at how things are, never at what just happened, so it gives the same answer whichever
event brought it about, after a restart of the operator, and in each replica. The rules, in order:

* **Whose signals count**: live pods of the JobSet's current attempt that carry the policy's label, whose Job
  and JobSet are neither finished, deleted nor suspended, while no pod of the gang has ended. A gang in
  which a process has ended cannot agree on anything any more: what follows is its own clean-up.
* **Which signals count**: kinds that the policy names, more certain than a hint. Not one on the node that was
  there when the pod was bound: the scheduler put the pod there all the same, and would again. Not one that an
  earlier epoch of the same pods answered.
* **A deleted pod is suspect**: a JobSet's restart, its end and its deletion look like that too, and watches
  of different kinds are not in order with one another. It is believed after a fresh look (``Check``).
* The earliest deadline wins. A signal during an open epoch joins it.
* An epoch is retracted while nobody has frozen, if all signals may go away, did so, and not because the pod
  or the node went away.
* An epoch that nobody ends expires some time after its deadline, or when the life after it is in danger.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence
from typing import Any

from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator import signals
from gracepoint_operator.epochs import LEAVING, Epoch, epoch_name
from gracepoint_operator.gang import Gang
from gracepoint_operator.objects import JobSet, Pod
from gracepoint_operator.resources import (
    CheckpointPolicy,
    CheckpointPolicySpec,
    JobSetReference,
    PolicyCopy,
    PreemptionSpec,
    SignalKind,
)
from gracepoint_operator.signals import Signal

#: How long after the deadline the last word of a gang is waited for.
EXPIRE_AFTER_S = 30.0
#: Deadlines closer than this are the same: replicas see a signal at slightly different times.
DEADLINE_TOLERANCE_S = 1.0
#: As many as the resource's schema allows.
_NODES_LIMIT, _PODS_LIMIT = 1024, 4096


@dataclasses.dataclass(frozen=True)
class Start:
    """A new epoch: tell the gang and make the Preemption. ``expected``: pods of the gang, now."""

    namespace: str
    name: str
    spec: PreemptionSpec
    expected: int


@dataclasses.dataclass(frozen=True)
class Move:
    """Signals joined an epoch and brought its deadline forward: tell the gang again."""

    epoch: Epoch
    spec: PreemptionSpec


@dataclasses.dataclass(frozen=True)
class End:
    """The operator itself ends an epoch: ``phase`` is RETRACTED or EXPIRED."""

    epoch: Epoch
    phase: Phase
    message: str


@dataclasses.dataclass(frozen=True)
class Reached:
    """A stage that is seen in the cluster rather than reported was reached."""

    epoch: Epoch
    stage: str


@dataclasses.dataclass(frozen=True)
class Check:
    """Look at the JobSet and these of its Jobs afresh, then decide again."""

    jobset: JobSet
    jobs: tuple[str, ...]
    pod_uids: tuple[str, ...]


Decision = Start | Move | End | Reached | Check


@dataclasses.dataclass(frozen=True)
class _Timed:
    signal: Signal
    since_at: float

    @property
    def deadline_at(self) -> float:
        return self.since_at + self.signal.lead_s


def decide(gang: Gang, now: float) -> list[Decision]:
    """The decisions for one JobSet; empty where all is as it should be."""
    latest = gang.epochs[-1] if gang.epochs else None
    current = latest if latest is not None and not latest.phase.ended else None
    decisions: list[Decision] = []
    timed = _counting(gang)
    fresh = [item for item in timed if latest is None or not latest.includes(item.signal.pod)]
    if current is not None:
        joined = [item for item in timed if current.includes(item.signal.pod)]
        ending = _ending(gang, current, now, outlived=bool(_believed(gang, fresh)))
        decisions += [ending] if ending is not None else _moved(current, joined)
        timed = fresh if ending is not None else []
    elif latest is not None:
        timed = [item for item in timed if item in fresh or not _answered(latest, item)]
    decisions += _started(gang, timed)
    if latest is not None:
        decisions += _milestones(gang, latest)
    return decisions


def epoch_spec(
    jobset: JobSet, policy: CheckpointPolicy, epochs: Sequence[Epoch], items: Sequence[tuple[Signal, float]]
) -> PreemptionSpec:
    """The record of a new epoch for these signals, each with when it began."""
    return _spec(jobset, policy, epochs, [_Timed(signal, since_at) for signal, since_at in items])


def _counting(gang: Gang) -> list[_Timed]:
    """The signals that count, each with when it began."""
    pods = gang.members
    if gang.policy is None or any(pod.finished for pod in pods):
        return []
    timed = []
    for pod in pods:
        if not gang.job_goes_on(pod):
            continue
        for signal in _relevant(gang, pod, gang.policy.spec):
            since_at = gang.since[signal.mark]
            bound_at = gang.bound_at.get(pod.uid)
            on_node = signal.kind is SignalKind.NODE_TAINT
            if not (on_node and (bound_at is None or since_at < bound_at)):
                timed.append(_Timed(signal, since_at))
    return timed


def _relevant(gang: Gang, pod: Pod, policy: CheckpointPolicySpec) -> Iterable[Signal]:
    for signal in signals.of_pod(pod, gang.nodes.get(pod.node)):
        if signal.kind in policy.signals and signal.confidence is not Confidence.HINT:
            yield signal


def _answered(latest: Epoch, item: _Timed) -> bool:
    """True if ``latest``, which ended, was about this already."""
    return latest.phase in LEAVING or item.since_at <= (latest.ended_at or 0.0)


def _believed(gang: Gang, timed: Iterable[_Timed]) -> list[_Timed]:
    return [
        item for item in timed if item.signal.kind is not SignalKind.POD_DELETION or item.signal.pod.uid in gang.checked
    ]


def _started(gang: Gang, timed: Sequence[_Timed]) -> list[Decision]:
    if not timed or gang.jobset is None or gang.policy is None:
        return []
    believed = _believed(gang, timed)
    if not believed:
        pods = [item.signal.pod for item in timed]
        jobs = tuple(sorted({pod.job_name for pod in pods}))
        return [Check(gang.jobset, jobs, tuple(sorted({pod.uid for pod in pods})))]
    spec = _spec(gang.jobset, gang.policy, gang.epochs, believed)
    name = epoch_name(gang.jobset.name, gang.jobset.uid, spec.epoch)
    return [Start(gang.jobset.namespace, name, spec, len(gang.members))]


def _spec(jobset: JobSet, policy: CheckpointPolicy, epochs: Sequence[Epoch], timed: Sequence[_Timed]) -> PreemptionSpec:
    first = min(timed, key=lambda item: item.deadline_at)
    return PreemptionSpec(
        job_set=JobSetReference(name=jobset.name, uid=jobset.uid),
        epoch=1 + max((epoch.spec.epoch for epoch in epochs), default=0),
        cause=first.signal.cause,
        observed_at=_time(min(item.since_at for item in timed)),
        mode=policy.spec.mode,
        policy=PolicyCopy(name=policy.name, spec=policy.spec),
        **_about(timed),
    )


def _about(timed: Sequence[_Timed]) -> dict[str, Any]:
    """The part of the record that joining signals change."""
    first = min(timed, key=lambda item: item.deadline_at)
    sure = any(item.signal.confidence is Confidence.SURE for item in timed)
    return {
        "signal": first.signal.text,
        "confidence": Confidence.SURE if sure else Confidence.LIKELY,
        "cancelable": all(item.signal.cancelable for item in timed),
        "nodes": sorted({item.signal.node for item in timed if item.signal.node})[:_NODES_LIMIT],
        "pods": sorted({item.signal.pod.name for item in timed})[:_PODS_LIMIT],
        "deadline": _time(first.deadline_at),
    }


def _moved(current: Epoch, timed: Sequence[_Timed]) -> list[Decision]:
    if not timed:
        return []
    deadline_at = min(item.deadline_at for item in timed)
    if deadline_at >= current.spec.deadline.timestamp() - DEADLINE_TOLERANCE_S:
        return []
    about = _about(timed)
    about["nodes"] = sorted({*current.spec.nodes, *about["nodes"]})[:_NODES_LIMIT]
    about["pods"] = sorted({*current.spec.pods, *about["pods"]})[:_PODS_LIMIT]
    return [Move(current, current.spec.model_copy(update=about))]


def _ending(gang: Gang, current: Epoch, now: float, *, outlived: bool) -> End | None:
    before_freeze = current.phase.rank < Phase.FROZEN.rank
    if before_freeze and (gang.jobset is None or gang.jobset.deleted):
        return End(current, Phase.RETRACTED, "the JobSet was deleted")
    if before_freeze and gang.jobset is not None and gang.jobset.finished:
        return End(current, Phase.RETRACTED, "the JobSet finished")
    if before_freeze and current.spec.cancelable and _signals_went_away(gang, current):
        return End(current, Phase.RETRACTED, f"the signal went away: {current.spec.signal}")
    if outlived:
        return End(current, Phase.EXPIRED, "its pods were replaced before anybody said how it ended")
    if now > current.spec.deadline.timestamp() + EXPIRE_AFTER_S:
        if current.spec.mode is Mode.OBSERVE:
            return End(current, Phase.EXPIRED, "the deadline passed; observed only, nobody was told")
        return End(current, Phase.EXPIRED, "the deadline passed and nobody said how it ended")
    return None


def _signals_went_away(gang: Gang, current: Epoch) -> bool:
    """True if the pods that were in danger are there, on nodes that are there, without any signal."""
    pods = {pod.name: pod for pod in gang.members if current.includes(pod)}
    for name in current.spec.pods:
        pod = pods.get(name)
        if pod is None or pod.finished or pod.deletion_at is not None or pod.node not in gang.nodes:
            return False
    return not any(True for pod in pods.values() for _ in _relevant(gang, pod, current.spec.policy.spec))


def _milestones(gang: Gang, latest: Epoch) -> list[Decision]:
    """The stages after the save that the cluster shows: pods left, pods back."""
    if gang.jobset is None or latest.phase is Phase.RETRACTED or latest.spec.mode is Mode.OBSERVE:
        return []
    acknowledgements = latest.status.acknowledgements
    old = [pod for pod in gang.pods if pod.policy and latest.includes(pod)]
    new = [pod for pod in gang.members if not latest.includes(pod)]
    reached: list[Decision] = []
    exited = latest.timing("exited") is not None
    if not exited and all(pod.finished for pod in old) and latest.created_at is not None:
        exited = True
        reached.append(Reached(latest, "exited"))
    running = sum(pod.phase == "Running" for pod in new)
    if exited and acknowledgements and running >= acknowledgements.expected and latest.timing("podsBack") is None:
        reached.append(Reached(latest, "podsBack"))
    return reached


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)
