"""What a gang waits for before all its processes run, and what is said of it. Pure.

A gang waits for infrastructure: a node, a kubelet that admits its pods, an image, a volume, pods that a quota or a
webhook refuses, the end of a pod of its last attempt. A container that has ended or was started again is never a wait:
that is its program's error, which counts. ``docs/restarts.md`` has the table.

Most is in the pods' statuses. Why a volume cannot be mounted, or why a Job cannot make pods, only Events say: a wait
names the objects whose Events may say more (``StartWait.ask``), and ``explained`` takes these.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from gracepoint_operator.decisions.preemption_status import Note, with_stage
from gracepoint_operator.kube.objects import LONGEST_SAID, HeldUp, Holdup, Pod
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import CONDITION_STARTED, PreemptionRecord, joined_status, place_of
from gracepoint_operator.resources import (
    CheckpointPolicy,
    Condition,
    ConditionStatus,
    PreemptionStatus,
    StartWaitStatus,
    WorkloadWaits,
)
from gracepoint_operator.signals import On
from gracepoint_operator.workloads import ANY_PLURAL, Job, Workload, WorkloadIdentity

#: A wait is named once it has lasted for so many seconds. Every start waits for a moment.
NAMED_AFTER_S = 15.0
#: So many waits of one gang are shown.
_SHOWN = 8
_NAMED = 5


class WaitKind(StrEnum):
    """What a gang waits for, in the order in which starts come past it."""

    SUSPENDED = "Suspended"
    DELETION = "Deletion"
    PODS = "Pods"
    GATE = "Gate"
    NODE = "Node"
    KUBELET = "Kubelet"
    DEVICE = "Device"
    VOLUME = "Volume"
    NETWORK = "Network"
    INIT_CONTAINER = "InitContainer"
    IMAGE = "Image"
    CONTAINER = "Container"
    START = "Start"
    SIDECAR = "Sidecar"


#: In these nothing is missing: a queue, and images and init containers that take their time.
ORDINARY = frozenset({WaitKind.SUSPENDED, WaitKind.START, WaitKind.INIT_CONTAINER})
_ORDER = {kind: number for number, kind in enumerate(WaitKind)}

#: Reasons with which a container waits (pkg/kubelet/images, kuberuntime and container of Kubernetes).
_IMAGE = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "ErrImageNeverPull", "InvalidImageName"),
        *("RegistryUnavailable", "SignatureValidationFailed"),
    }
)
_CREATED = frozenset({"", "ContainerCreating", "PodInitializing"})
#: A container waits with these only after it has run.
_PROGRAM = frozenset({"CrashLoopBackOff"})
#: Reasons of Events on a pod (pkg/kubelet/events of Kubernetes) that say what its start waits for.
_OF_EVENT = {
    **dict.fromkeys(("FailedMount", "FailedAttachVolume", "FailedMapVolume"), WaitKind.VOLUME),
    **dict.fromkeys(("FailedCreatePodSandBox", "NetworkNotReady", "FailedPodSandBoxStatus"), WaitKind.NETWORK),
    "FailedPrepareDynamicResources": WaitKind.DEVICE,
    **dict.fromkeys(("Pulling", "Pulled", "Created"), WaitKind.START),
}
#: Those of Events on a Job or a workload that makes no pods or Jobs.
_REFUSED = frozenset({"FailedCreate", "JobCreationFailed", "HeadlessServiceCreationFailed"})
#: The condition in which Kueue says why it does not admit a workload.
QUOTA_RESERVED = "QuotaReserved"


@dataclasses.dataclass(frozen=True)
class StartWait:
    """One thing that a gang waits for.

    Attributes:
        what: What it waits for, in a few words.
        since: Since when, in seconds since the epoch. None if the objects do not say.
        message: What the scheduler, the kubelet or a controller said last. Empty if they said nothing.
        pod: The pod, or the first of them. Empty if there is none.
        node: Its node. Empty if it has none.
        ask: UIDs of the objects whose Events may say more.
    """

    kind: WaitKind
    what: str
    since: float | None
    message: str = ""
    pod: str = ""
    node: str = ""
    ask: tuple[str, ...] = ()

    def in_words(self, now: float) -> str:
        """Returns the wait in one sentence, for people."""
        return in_words(self.to_status(now), now)

    def to_status(self, now: float) -> StartWaitStatus:
        """Returns the wait as a policy's status keeps it."""
        return StartWaitStatus(
            kind=str(self.kind),
            what=self.what[:512],
            since=_time(now if self.since is None else self.since),
            message=self.message[:1024] or None,
            pod=self.pod or None,
            node=self.node or None,
        )


@dataclasses.dataclass(frozen=True)
class EventSaid:
    """An Event on one object."""

    reason: str
    message: str
    at: float


def waits(gang: GangSnapshot, now: float) -> tuple[StartWait, ...]:
    """Returns what a gang waits for, in the order in which starts come past it. Empty if it waits for nothing.

    Args:
        gang: The gang.
        now: Seconds since the epoch.
    """
    workload = gang.workload
    if workload is None or workload.deleted or workload.finished:
        return ()
    held = any(pod.holdup is not None or pod.deletion_at is not None for pod in gang.pods)
    if not (held or workload.suspended or _lacks_pods(gang, workload)):
        return ()  # as nearly always
    waits_now = list(_deletions(gang, now))
    if workload.suspended:
        waits_now.append(StartWait(WaitKind.SUSPENDED, f"the admission of the {workload.kind}: it is suspended", None))
    else:
        if all(pod.deletion_at is None for pod in gang.pods):  # what takes their place is made after their end
            waits_now += _missing(gang, workload)
        waits_now += _grouped(gang, _of_pods(gang, workload, now))
    return tuple(sorted(waits_now, key=lambda wait: _ORDER[wait.kind])[:_SHOWN])


def in_words(wait: StartWaitStatus, now: float) -> str:
    """Returns an entry of a policy's status in one sentence, for people. ``now``: seconds since the epoch."""
    detail = f"; last: {wait.message}" if wait.message else ""
    return f"{wait.what}, since {_duration(now - wait.since.timestamp())}{detail}"


def lasting(waits: Iterable[StartWait], now: float) -> tuple[StartWait, ...]:
    """Returns those that have lasted long enough to be named. Each has a time since which it lasts."""
    return tuple(wait for wait in waits if wait.since is not None and now - wait.since >= NAMED_AFTER_S)


def late(pods: Iterable[Pod], now: float) -> list[Pod]:
    """Returns the pods that are being deleted and should have ended. ``now``: seconds since the epoch."""
    return [pod for pod in pods if pod.node and pod.deletion_at is not None and pod.deletion_at <= now]


def late_at(gang: GangSnapshot, now: float) -> float | None:
    """Returns when the next pod that is being deleted will be late, as no event says so. None: there is none."""
    ends = (pod.deletion_at for pod in gang.pods if pod.node and pod.deletion_at is not None)
    return min((at for at in ends if at > now), default=None)


def blocked_since(shown: Iterable[StartWait]) -> float | None:
    """Returns since when something is missing or refused. None: nothing is, and the gang only takes its time."""
    return min((wait.since for wait in shown if wait.kind not in ORDINARY and wait.since is not None), default=None)


def explained(wait: StartWait, events: Iterable[EventSaid]) -> StartWait:
    """Returns the wait with what the newest Event says of it that is about a failure to start.

    Args:
        wait: The wait.
        events: The Events on the objects that it asks.
    """
    reasons = {WaitKind.PODS: _REFUSED, WaitKind.SUSPENDED: {QUOTA_RESERVED}}.get(wait.kind, _OF_EVENT.keys())
    newest = max((event for event in events if event.reason in reasons), key=lambda event: event.at, default=None)
    if newest is None:
        return wait
    message = _one_line(newest.message)
    if newest.reason not in _OF_EVENT:
        return dataclasses.replace(wait, message=message)
    kind = _OF_EVENT[newest.reason]
    if kind is WaitKind.START and wait.kind is not kind:
        return wait
    description = f"{_WORDS[kind]} {wait.what.removeprefix(_WORDS[wait.kind]).strip()}"
    return dataclasses.replace(wait, kind=kind, what=description, message=message)


def _deletions(gang: GangSnapshot, now: float) -> Iterator[StartWait]:
    """Yields a wait for each pod that should have ended; for many with the same cause one together."""
    by_cause: dict[str, list[Pod]] = {}
    for pod in late(gang.pods, now):
        by_cause.setdefault(_why_it_stays(gang, pod), []).append(pod)
    for message, pods in by_cause.items():
        pods.sort(key=lambda pod: (pod.deletion_at or 0.0, pod.name))
        first_ones = pods if len(pods) <= _NAMED else pods[:1]
        more = len(pods) - len(first_ones)
        for pod in first_ones:
            description = f"{_WORDS[WaitKind.DELETION]} {pod.name} on the node {pod.node}"
            description += f", and of {more} more" if more else ""
            yield StartWait(WaitKind.DELETION, description, pod.deletion_at, message, pod.name, pod.node)


def _why_it_stays(gang: GangSnapshot, pod: Pod) -> str:
    if pod.node not in gang.nodes:
        return "its node is gone"
    taints = [mark.text for mark in gang.marks.get(pod.uid, ()) if mark.taint is not None]
    node_marks = [mark.text for mark in gang.marks.get(pod.uid, ()) if mark.row.match.kind is On.NODE]
    causes = taints or node_marks
    return f"its node has the {causes[0]}" if causes else "its kubelet has not said that the containers ended"


def _lacks_pods(gang: GangSnapshot, workload: Workload) -> bool:
    """True if there may be fewer Jobs or pods than there should be."""
    jobs = [job for job in gang.jobs.values() if not job.deleted]
    expected_pods = sum(job.pod_count for job in jobs if not (job.finished or job.suspended))
    return len(jobs) < workload.job_count or len(gang.pods) < expected_pods


def _missing(gang: GangSnapshot, workload: Workload) -> Iterator[StartWait]:
    jobs = [job for job in gang.jobs.values() if not job.deleted]
    if len(jobs) < workload.job_count:
        description = f"Jobs: {len(jobs)} of {workload.job_count} exist"
        yield StartWait(WaitKind.PODS, description, None, ask=(workload.uid,))
        return
    there: dict[str, set[int]] = {}
    for pod in gang.pods:
        if pod.restart_attempt == workload.restarts and pod.deletion_at is None:
            there.setdefault(pod.job_name, set()).add(pod.completion_index)
    for job in sorted(jobs, key=lambda job: job.name):
        if (lacking := _lacks(job, len(there.get(job.name, ())))) is not None:
            yield StartWait(WaitKind.PODS, lacking, None, ask=(job.uid,))


def _lacks(job: Job, there: int) -> str | None:
    if job.finished or job.suspended or there >= job.pod_count:
        return None
    return f"pods of the Job {job.name}: {there} of {job.pod_count} exist"


_Held = tuple[WaitKind, Pod, Holdup, float | None]


def _of_pods(gang: GangSnapshot, workload: Workload, now: float) -> Iterator[_Held]:
    """Yields what holds up each process, with its pod and since when."""
    current = [
        pod
        for pod in gang.pods
        if pod.restart_attempt == workload.restarts and pod.policy and not pod.helps and pod.deletion_at is None
    ]
    at: dict[tuple[str, int], list[Pod]] = {_process(pod): [] for pod in current if pod.holdup is not None}
    for pod in current if at else ():
        if (pods := at.get(_process(pod))) is not None:
            pods.append(pod)
    for pods in at.values():
        if (held := _of_process(gang, sorted(pods, key=lambda pod: (pod.created_at, pod.uid)), now)) is not None:
            yield held


def _process(pod: Pod) -> tuple[str, int]:
    return pod.job_name, pod.completion_index


def _of_process(gang: GangSnapshot, pods: Sequence[Pod], now: float) -> _Held | None:
    """What holds up one process. ``pods``: all that were made for it in this attempt, oldest first."""
    newest = pods[-1]
    if newest.holdup is None:
        return None
    refused: list[Pod] = []  # since the last one that ran
    for pod in pods:
        if pod.holdup is not None and pod.holdup.at is HeldUp.REFUSED:
            if _may_have_run(pod):
                refused.clear()
            refused.append(pod)
        elif pod.started_at is not None:
            refused.clear()
    if (kind := _kind(gang, newest, newest.holdup)) is None:
        return None
    since = _since(newest, newest.holdup)
    # A pod that a kubelet refuses is replaced at once, and its successor waits for a moment only.
    if refused and (kind is WaitKind.KUBELET or kind is WaitKind.DEVICE or _is_young(since, now)):
        last_refused = refused[-1]
        assert last_refused.holdup is not None
        return _refusal(last_refused.holdup), last_refused, last_refused.holdup, _since(refused[0], last_refused.holdup)
    return kind, newest, newest.holdup, since


def _may_have_run(refused: Pod) -> bool:
    """True if a kubelet refused a pod long after it was bound: what its status said of its containers is dropped."""
    ended_at, bound_at = refused.ended_at, refused.bound_at
    return ended_at is not None and bound_at is not None and ended_at - bound_at >= NAMED_AFTER_S


def _is_young(since: float | None, now: float) -> bool:
    return since is not None and now - since < NAMED_AFTER_S


def _since(pod: Pod, holdup: Holdup) -> float | None:
    if holdup.at is HeldUp.SIDECAR:
        return None
    if holdup.at is HeldUp.ENDED or (holdup.at is HeldUp.REFUSED and pod.ended_at is not None):
        return pod.ended_at
    if holdup.at in (HeldUp.INIT, HeldUp.CONTAINER) and pod.bound_at is not None:
        return pod.bound_at
    return pod.created_at or None


def _kind(gang: GangSnapshot, pod: Pod, holdup: Holdup) -> WaitKind | None:
    """None: it is no wait, but the error of a program."""
    match holdup.at:
        case HeldUp.UNSCHEDULED:
            return WaitKind.NODE
        case HeldUp.GATED:
            return WaitKind.GATE
        case HeldUp.REFUSED:
            return _refusal(holdup)
        case HeldUp.SIDECAR:
            return WaitKind.SIDECAR if _has_left(gang, holdup.exit_code) else None
        case HeldUp.ENDED:
            return WaitKind.PODS if _has_left(gang, holdup.exit_code) else None
    if holdup.reason in _PROGRAM:
        return None
    if holdup.reason in _IMAGE:
        return WaitKind.IMAGE
    if holdup.at is HeldUp.INIT:
        return WaitKind.INIT_CONTAINER
    return WaitKind.START if holdup.reason in _CREATED else WaitKind.CONTAINER


def _refusal(holdup: Holdup) -> WaitKind:
    """A kubelet refuses a pod. Resources with a slash in their names are devices."""
    lacks = holdup.reason.removeprefix("OutOf")
    device = "/" in lacks or (holdup.reason == "UnexpectedAdmissionError" and "device" in holdup.message.lower())
    return WaitKind.DEVICE if device else WaitKind.KUBELET


def _has_left(gang: GangSnapshot, exit_code: int | None) -> bool:
    """True if a process has ended as it should, or did not join: another exit code is a program's error."""
    spec = None if gang.policy is None else gang.policy.spec
    codes = () if spec is None else (*spec.after_save.exit_codes, spec.not_joined_exit_code)
    return exit_code == 0 or exit_code in codes


_WORDS = {
    WaitKind.DELETION: "the end of the pod",
    WaitKind.PODS: "another pod for",
    WaitKind.GATE: "scheduling gates of",
    WaitKind.NODE: "node for",
    WaitKind.KUBELET: "the kubelet to admit",
    WaitKind.DEVICE: "a device for",
    WaitKind.VOLUME: "a volume of",
    WaitKind.NETWORK: "the network of",
    WaitKind.INIT_CONTAINER: "an init container of",
    WaitKind.IMAGE: "the image of",
    WaitKind.CONTAINER: "a container of",
    WaitKind.START: "the start of",
    WaitKind.SIDECAR: "the end of a sidecar of",
}


def _grouped(gang: GangSnapshot, held: Iterable[_Held]) -> Iterator[StartWait]:
    """Yields one wait for all processes that are held up by the same kind."""
    by_kind: dict[WaitKind, list[_Held]] = {}
    for item in held:
        by_kind.setdefault(item[0], []).append(item)
    for kind, items in by_kind.items():
        _, pod, holdup, _ = first = min(items, key=lambda item: (item[3] or 0.0, item[1].name))
        processes = _who(gang, [item[1] for item in items])
        description = f"{_WORDS[kind]} {processes}" + (
            f" on {pod.node}" if kind in (WaitKind.KUBELET, WaitKind.DEVICE) else ""
        )
        message = _held_up_message(holdup)
        ask = (pod.uid,) if kind in (WaitKind.START, WaitKind.INIT_CONTAINER) and holdup.reason in _CREATED else ()
        if holdup.at is HeldUp.INIT and not holdup.reason:  # it runs
            ask = ()
        elif holdup.at is HeldUp.ENDED:
            ask = (pod.job_uid,) if pod.job_uid else ()
        yield StartWait(kind, description, first[3], message, pod.name, pod.node, ask)


def _held_up_message(holdup: Holdup) -> str:
    container = f"container {holdup.container}: " if holdup.container else ""
    if holdup.at is HeldUp.SIDECAR:
        return f"container {holdup.container} runs on after the others ended with exit code {holdup.exit_code}"
    if holdup.at is HeldUp.ENDED:
        message = f": {holdup.message}" if holdup.message else ""
        return _one_line(f"the last one has left with exit code {holdup.exit_code}{message}")
    if holdup.at in (HeldUp.UNSCHEDULED, HeldUp.GATED):
        return holdup.message
    details = ": ".join(part for part in (holdup.reason, holdup.message) if part and part not in _CREATED)
    if not details:
        return f"container {holdup.container} has not ended" if holdup.at is HeldUp.INIT and holdup.container else ""
    return _one_line(container + details)


def _who(gang: GangSnapshot, pods: Sequence[Pod]) -> str:
    """Returns which processes these pods are. By their numbers, if one replicatedJob trains."""
    if len({pod.replicated_job for pod in gang.processes}) > 1:
        names = sorted(place_of(pod) for pod in pods)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more
    numbers = sorted(_number(gang, pod) for pod in pods)
    return f"process {numbers[0]}" if len(numbers) == 1 else f"processes {_ranges(numbers)}"


def _number(gang: GangSnapshot, pod: Pod) -> int:
    job = gang.jobs.get(pod.job_name)
    of_each = 1 if job is None or job.completions is None else job.completions
    return pod.membership.job_index * of_each + pod.completion_index


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7`` of sorted numbers."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number <= spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return ", ".join(texts[:_NAMED]) + (", ..." if len(texts) > _NAMED else "")


def _one_line(message: str) -> str:
    return " ".join(message.split())[:LONGEST_SAID]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).replace(microsecond=0)


REASON_WAITING = "WaitingToStart"
REASON_WAIT_ENDED = "WaitEnded"
REASON_POD_DELETED = "LostPodDeleted"


def note(workload: Workload, waits: Sequence[StartWait], now: float) -> Note:
    """Returns the Event on a workload that waits."""
    sentences = "; ".join(wait.in_words(now) for wait in waits[:_NAMED])
    is_ordinary = all(wait.kind in ORDINARY for wait in waits)
    # A Job by itself has one limit for pods that a kubelet refused and for programs that failed.
    counts = workload.job is not None and any(wait.kind in (WaitKind.KUBELET, WaitKind.DEVICE) for wait in waits)
    counted = "Each refused pod counts towards backoffLimitPerIndex" if counts else "No restart is counted for it"
    return Note(REASON_WAITING, f"waits for: {sentences}. {counted}", warning=not is_ordinary)


def deleted_note(pod: str, node: str, reason: str) -> Note:
    """Returns the Event of a pod that was deleted by force."""
    message = f"the pod {pod} on the node {node} was deleted by force (the policy's lostNodes.deletePods): {reason}"
    return Note(REASON_POD_DELETED, message, warning=True)


def ended_note() -> Note:
    """Returns the Event on a workload that waits for nothing any more."""
    return Note(REASON_WAIT_ENDED, "what it waited for is there")


def in_status(workload: WorkloadIdentity, waits: Sequence[StartWait], now: float) -> WorkloadWaits:
    """Returns the entry of a workload in the status of its policy."""
    return WorkloadWaits(
        name=workload.name,
        uid=workload.uid,
        workload_kind=WorkloadWaits.named(workload.kind),
        waits=[wait.to_status(now) for wait in waits],
    )


def start_condition(policy: CheckpointPolicy, entries: Sequence[WorkloadWaits], now: float) -> Condition:
    """Returns the condition Started of a policy. A workload that is suspended is not meant to start."""
    held = [entry for entry in entries if any(wait.kind != WaitKind.SUSPENDED for wait in entry.waits)]
    if not held:
        return _condition(None, f"no {ANY_PLURAL} of this policy wait for infrastructure", now, policy.generation)
    first = held[0]
    names = ", ".join(entry.name for entry in held[:_NAMED])
    message = f"{len(held)} {ANY_PLURAL} wait to start ({names}). {first.name} waits for: {_sentence(first.waits)}"
    return _condition(first.waits[0].kind, message, now, policy.generation)


_AWAITS, _IS_THERE = "the restart waits for: ", "what the restart waited for is there: "


def of_preemption(preemption: PreemptionRecord, waits: Sequence[StartWait], now: float) -> PreemptionStatus:
    """Returns the status of a Preemption while the gang that it restarts waits, or waits no more."""
    status = preemption.status
    before = next((item for item in status.conditions or () if item.type == CONDITION_STARTED), None)
    if not waits and (before is None or before.status is ConditionStatus.TRUE):
        return status
    entries = [wait.to_status(now) for wait in waits]
    if waits:
        after = _condition(str(waits[0].kind), f"{_AWAITS}{_sentence(entries)}", now, None)
    else:
        awaited = "" if before is None else before.message.removeprefix(_AWAITS)
        after = _condition(None, f"{_IS_THERE}{awaited}", now, None)
        status = with_stage(status, "unblocked", preemption.spec.observed_at.timestamp(), now)
    if before is not None and (before.status, before.message) == (after.status, after.message):
        return status
    return joined_status(PreemptionStatus(conditions=[after]), status)


def awaited_by(condition: Mapping[str, Any]) -> str:
    """Returns, from the condition Started of a Preemption, what the restart waits for, or has waited for."""
    return str(condition.get("message") or "").removeprefix(_AWAITS).removeprefix(_IS_THERE)


def restarting(preemptions: Sequence[PreemptionRecord]) -> PreemptionRecord | None:
    """Returns the Preemption whose gang has left and does not train again yet. None if there is none.

    Args:
        preemptions: Those of one workload, oldest first.
    """
    newest = next((item for item in reversed(preemptions) if not item.is_rehearsal), None)
    if newest is None or not newest.leaves or newest.timing("training") is not None:
        return None
    return newest


def _sentence(entries: Sequence[StartWaitStatus]) -> str:
    """What is waited for, without figures that move."""
    return "; ".join(
        f"{item.what}, since {item.since:%Y-%m-%dT%H:%M:%SZ}" + (f"; last: {item.message}" if item.message else "")
        for item in entries
    )


def _condition(kind: str | None, message: str, now: float, generation: int | None) -> Condition:
    return Condition(
        type=CONDITION_STARTED,
        status=ConditionStatus.TRUE if kind is None else ConditionStatus.FALSE,
        reason="NothingAwaited" if kind is None else f"WaitingFor{kind}",
        message=message[:4096],
        last_transition_time=_time(now),
        observed_generation=generation,
    )
