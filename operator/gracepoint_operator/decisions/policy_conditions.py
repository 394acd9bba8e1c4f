"""The status of a policy: its conditions with all reasons and messages, its forecasts and the last save. Pure."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping, Set

from gracepoint.wire.messages import Mode, Phase, Trouble, TroubleKind, one_line
from gracepoint_operator import signals
from gracepoint_operator.decisions.preemption_status import Note
from gracepoint_operator.kube.objects import Node, Pod
from gracepoint_operator.model.evictions import HoldLimit
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.resources import (
    CheckpointPolicy,
    Condition,
    ConditionStatus,
    LastSave,
    PolicyReplica,
    WorkloadConnections,
    WorkloadForecast,
    WorkloadTrouble,
)
from gracepoint_operator.workloads import ANY_NAME, ANY_PLURAL, Workload, WorkloadIdentity

CONDITION_READY = "Ready"
CONDITION_FITS_GRACE = "FitsGrace"
CONDITION_INJECTED = "Injected"
CONDITION_RECORDED = "Recorded"
#: With this name, tools that wait for an object (kstatus) see that waiting is in vain.
CONDITION_STALLED = "Stalled"

_FORECASTS = 50  # the limit in the schema of the resource


@dataclasses.dataclass(frozen=True)
class PodRights:
    """What the operator may do to pods.

    Attributes:
        protects: Whether it has the right to annotate them.
        deletes: Whether it has the right to delete them.
    """

    protects: bool = False
    deletes: bool = False


def readiness(
    policy: CheckpointPolicy,
    applied: CheckpointPolicy,
    now: float,
    *,
    rights: PodRights,
    hold_limit: HoldLimit,
    withdrawn: str | None,
) -> Condition:
    """Returns the condition Ready of a policy that could be read.

    Args:
        policy: The policy.
        applied: The same under the limits of administrators.
        now: Seconds since the epoch.
        rights: What the operator may do to pods.
        hold_limit: For how long evictions are held at most.
        withdrawn: Why the default that the policy is the copy of is none any more. None: it is one, or was none.
    """
    if withdrawn is not None:
        message = (
            f"the default that this is the copy of was withdrawn: it applies as it is to the {ANY_PLURAL} that name it "
            f"already, and new ones are refused. {withdrawn}"
        )
        return _condition(CONDITION_READY, ConditionStatus.FALSE, "DefaultWithdrawn", message, policy, now)
    message = f"the {ANY_PLURAL} that name this policy are notified of every signal"
    if policy.spec.mode is Mode.OBSERVE:
        message = "signals are recorded and nobody is notified (mode Observe)"
    elif policy.spec.signals == []:
        message = "no kind of signal counts (spec.signals is empty)"
    reason, unknown = "Watching", [item for item in policy.unknown if item.startswith("spec")]
    if policy.spec.voluntary_disruption.checkpoint_younger_than_seconds and not rights.protects:
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
    if policy.spec.sidecars.end_with_training and not rights.deletes:
        reason = "SidecarsStay"
        message += (
            "; found spec.sidecars.endWithTraining, but the operator may not delete pods, so a sidecar that does not "
            "end keeps a gang on its nodes; install the chart with podDeletion.enabled=true, or remove the field"
        )
    if policy.spec.lost_nodes.delete_pods and not rights.deletes:
        reason = "LostPodsNotDeleted"
        message += (
            "; found spec.lostNodes.deletePods, but the operator may not delete pods, so those of lost nodes are only "
            "named; install the chart with podDeletion.enabled=true, or remove the field"
        )
    hold, applied_hold = policy.spec.eviction_hold, applied.spec.eviction_hold
    if hold.enabled and not applied_hold.enabled:
        reason = "HoldsOff"
        message += f"; no eviction is held now ({hold_limit.set_by} is 0)"
    elif hold.enabled and applied_hold.bound_seconds < hold.bound_seconds:
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


def unreadable(generation: int, problem: str, now: float) -> Condition:
    """Returns the condition Ready of a policy that cannot be read."""
    message = (
        "the policy cannot be read: gangs are notified by the version that was read last, if there was one, and new "
        f"{ANY_PLURAL} that name it are refused. Correct it: {problem}"
    )
    return Condition(
        type=CONDITION_READY,
        status=ConditionStatus.FALSE,
        reason="Unreadable",
        message=message[:4096],
        last_transition_time=_time(now).replace(microsecond=0),
        observed_generation=generation,
    )


def stalled(generation: int, problem: str | None, now: float) -> Condition:
    """Returns the condition Stalled: True with the reason ``problem`` if the policy cannot be read, else False."""
    return Condition(
        type=CONDITION_STALLED,
        status=ConditionStatus.FALSE if problem is None else ConditionStatus.TRUE,
        reason="Readable" if problem is None else "Unreadable",
        message="" if problem is None else problem[:4096],
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
        "cannot be notified; delete and create them again"
    )
    return _condition(CONDITION_INJECTED, ConditionStatus.FALSE, "CreatedBeforePolicy", message, policy, now)


def recording(
    policy: CheckpointPolicy,
    refused: Mapping[str, str],
    preemptions: Iterable[PreemptionRecord],
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
        preemptions: The known records of the policy.
        before: The current condition. None if there is none.
        now: Seconds since the epoch.
        mended: True if records of this replica were refused before, and none is refused any more.
    """
    if refused:
        names = sorted(refused)
        message = (
            f"{len(names)} Preemptions cannot be recorded ({', '.join(names[:5])}), as the API server refuses them; "
            "gangs get notices nevertheless. Correct the quota, the admission policy or the role that it names; the "
            f"operator tries again at least once a minute. {refused[names[0]]}"
        )
        return _condition(CONDITION_RECORDED, ConditionStatus.FALSE, "Refused", message[:4096], policy, now)
    if before is not None and before.status is ConditionStatus.FALSE and not mended:
        since_at = before.last_transition_time.timestamp()
        if not any(
            preemption.created_at is not None and preemption.created_at > since_at for preemption in preemptions
        ):
            return None
    message = f"the API server takes the Preemptions of the {ANY_PLURAL} that name this policy"
    return _condition(CONDITION_RECORDED, ConditionStatus.TRUE, "Recorded", message, policy, now)


def newest_forecasts(
    local: Iterable[WorkloadForecast], stored: Iterable[WorkloadForecast], workload_uids: Set[str]
) -> list[WorkloadForecast]:
    """Merges the forecasts that two replicas received, so that both report the same.

    Returns the newest forecast of each workload that exists.
    """
    newest: dict[str, WorkloadForecast] = {}
    for item in sorted((*stored, *local), key=lambda item: item.time):
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
    message = (
        f"{forecast.kind} {forecast.name}: {forecast.storage_s:.1f} s needed (drain {forecast.drain_seconds:.1f} s + "
        f"save {forecast.save_seconds:.1f} s, times the margin {forecast.margin:g}), {grace_s:.0f} s granted"
    )
    if forecast.storage_s <= grace_s:
        return _condition(CONDITION_FITS_GRACE, ConditionStatus.TRUE, "Fits", message, policy, now)
    if forecast.send_seconds is not None:
        message += f"; sending the step to snapshot servers takes {forecast.send_seconds:.1f} s in place of the save"
    if forecast.needed_s <= grace_s:
        return _condition(CONDITION_FITS_GRACE, ConditionStatus.TRUE, "FitsInMemory", message, policy, now)
    message += "; raise terminationGracePeriodSeconds where the provider grants it, or use more processes"
    return _condition(CONDITION_FITS_GRACE, ConditionStatus.FALSE, "TooSlow", message, policy, now)


def grace_s(pods: Iterable[Pod], nodes: Mapping[str, Node]) -> float | None:
    """Returns the shortest grace period of the pods, in seconds. None if there are no pods."""
    graces = []
    for pod in pods:
        node = nodes.get(pod.node)
        spot = node is not None and node.spot
        graces.append(min(pod.grace_s, signals.GKE_SPOT_GRACE_S) if spot else pod.grace_s)
    return min(graces, default=None)


def last_save(preemptions: Iterable[PreemptionRecord], recorded: LastSave | None) -> LastSave | None:
    """Returns the newest preemption that ended with a checkpoint in storage.

    Returns ``recorded`` if it is newer, as its record may have been deleted. None if there is neither.
    """
    ends = (Phase.COMMITTED, Phase.PROMOTED)
    saved = [
        LastSave(
            preemption=preemption.name,
            workload=preemption.spec.workload.name,
            step=preemption.status.step,
            time=_time(preemption.ended_at or 0.0),
        )
        for preemption in preemptions
        if preemption.phase in ends and preemption.status.step is not None
    ]
    # By name too: replicas that chose differently among saves of one moment would replace each other's choice forever.
    saves = [*saved, *([] if recorded is None else [recorded])]
    return max(saves, key=lambda save: (save.time, save.preemption), default=None)


def joined_conditions(new: Iterable[Condition], stored: Iterable[Condition]) -> list[Condition]:
    """Returns their conditions, replaced by ours of the same type.

    If the status of a condition does not change, its transition time stays.
    """
    joined = {condition.type: condition for condition in stored}
    for condition in new:
        before = joined.get(condition.type)
        if before is not None and before.status is condition.status:
            update = {"last_transition_time": before.last_transition_time}
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


CONDITION_CONNECTED = "Connected"
REASON_NOT_CONNECTED = "PodsNotConnected"
REASON_CONNECTED = "PodsConnected"

#: A pod that runs may not be connected for this long: its process has to start, and ``attach()`` to be called. A pod
#: that starts has this time, too. Then pods of its workload must have been missing for this time as well: a pod that
#: was connected may be connecting to another replica.
GRACE_S = 180.0
#: A replica that was out of reach of the API server for longer judges nothing.
RENEWED_S = 60.0

_NAMED = 5
_JOBS = 64  # the limit in the schema
_CHECK = (
    "what is not connected gets no notice, and reacts to SIGTERM alone. Check that the training code calls "
    "attach(), the pods' logs for 'not subscribed to the operator', NetworkPolicies, and the DNS"
)


@dataclasses.dataclass(frozen=True)
class GangConnection:
    """How many pods of a gang are connected, so that a mistake in the network shows before the first loss.

    Each replica knows the pods that are connected to it. It writes their number for each workload into the policy's
    status, and adds the numbers of all replicas. A pod is connected to one replica at a time. While it moves from one
    to the other, it may count twice for some seconds.

    A replica that ends writes an entry without pods. The entry of one that died counts as long as its Lease says that
    it lives (``recording.replica_lease``). So an entry is written only if it changes.

    Attributes:
        workload: The workload.
        attempt: Its restart attempt.
        connected: The number of its pods that are connected to any replica.
        expected: The number of its pods that run.
        late: True if pods have been missing for longer than ``GRACE_S``.
        here: The number of its pods that are connected to this replica.
        silent: Of a gang of several replicatedJobs, the names of those of which no pod is connected.
    """

    workload: WorkloadIdentity
    attempt: int
    connected: int
    expected: int
    late: bool = False
    here: int = 0
    silent: tuple[str, ...] = ()


def own_entry(
    replica: str, connected: Mapping[str, Mapping[str, int]], before: Iterable[PolicyReplica], now: float
) -> PolicyReplica | None:
    """Returns the entry that a replica writes. None if the one that is there will do.

    Args:
        replica: The replica's name.
        connected: How many pods are connected to it, by UID of the workload and name of the replicatedJob.
        before: The entries that are there.
        now: Seconds since the epoch.
    """
    counts = [
        WorkloadConnections(
            uid=uid,
            connected=sum(jobs.values()),
            replicated_jobs=sorted(name for name, number in jobs.items() if name and number)[:_JOBS] or None,
        )
        for uid, jobs in sorted(connected.items())
        if sum(jobs.values())
    ]
    entry = PolicyReplica(name=replica, time=_whole_second(now), workloads=counts[:1000])
    there = next((entry for entry in before if entry.name == replica), None)
    if there is None:
        return entry if counts else None
    return None if there.workloads == entry.workloads else entry


def empty_entry(replica: str, now: float) -> PolicyReplica:
    """Returns the entry of a replica that ends."""
    return PolicyReplica(name=replica, time=_whole_second(now), workloads=[])


def total(entries: Iterable[PolicyReplica]) -> dict[str, int]:
    """Adds the numbers of several replicas: UID of the workload -> number of connected pods."""
    numbers: dict[str, int] = {}
    for entry in entries:
        for item in entry.workloads:
            numbers[item.uid] = numbers.get(item.uid, 0) + item.connected
    return numbers


def of_others(
    entries: Iterable[PolicyReplica], replica: str, lives: Callable[[str, float], bool]
) -> Mapping[str, WorkloadConnections]:
    """Returns what is connected to living replicas other than ``replica``, by UID of the workload."""
    connections: dict[str, WorkloadConnections] = {}
    for entry in entries:
        if entry.name == replica or not lives(entry.name, entry.time.timestamp()):
            continue
        for item in entry.workloads:
            earlier = connections.get(item.uid)
            connections[item.uid] = item if earlier is None else _sum(earlier, item)
    return connections


def _sum(one: WorkloadConnections, other: WorkloadConnections) -> WorkloadConnections:
    jobs = sorted({*(one.replicated_jobs or ()), *(other.replicated_jobs or ())})
    return WorkloadConnections(uid=one.uid, connected=one.connected + other.connected, replicated_jobs=jobs or None)


def recounted(gang: GangConnection, others: Mapping[str, WorkloadConnections]) -> GangConnection:
    """Returns the gang with the newest numbers of the other replicas.

    Args:
        gang: What this replica counted.
        others: What is connected to other replicas, by UID of the workload.
    """
    there = others.get(gang.workload.uid)
    if there is None:
        return dataclasses.replace(gang, connected=gang.here, late=gang.late and gang.here < gang.expected)
    connected = gang.here + there.connected
    names_jobs = there.replicated_jobs is not None or not there.connected  # an older operator does not say
    silent = [name for name in gang.silent if names_jobs and name not in (there.replicated_jobs or ())]
    return dataclasses.replace(
        gang, connected=connected, late=gang.late and connected < gang.expected, silent=tuple(silent)
    )


def connected_condition(
    policy: CheckpointPolicy, gangs: Iterable[GangConnection], before: Condition | None, now: float
) -> Condition | None:
    """Returns the condition Connected. None if it does not change.

    Args:
        policy: The policy.
        gangs: The gangs whose pods run.
        before: The current condition. None if there is none.
        now: Seconds since the epoch.
    """
    gangs = list(gangs)
    expected = sum(gang.expected for gang in gangs)
    connected = sum(min(gang.connected, gang.expected) for gang in gangs)
    late = [gang for gang in gangs if gang.late]
    if late:
        names = ", ".join(
            f"{gang.workload.name}: {min(gang.connected, gang.expected)} of {gang.expected}" for gang in late[:_NAMED]
        )
        names += ", ..." if len(late) > _NAMED else ""
        message = f"{connected} of {expected} running pods are connected ({names}); {_CHECK}{_silent(late)}"
        return _connected(ConditionStatus.FALSE, REASON_NOT_CONNECTED, message, policy, now)
    if not expected:
        message = f"no pod of a {ANY_NAME} that names this policy runs"
        return _connected(ConditionStatus.UNKNOWN, "NoPods", message, policy, now)
    # Without numbers, so that replicas whose watches differ by some seconds write the same.
    if connected == expected:
        message = "all running pods are connected"
        return _connected(ConditionStatus.TRUE, REASON_CONNECTED, message, policy, now)
    if before is not None and before.status is not ConditionStatus.UNKNOWN:
        return None  # they may just have started; this becomes False if it lasts
    message = "not all running pods are connected; the others may just have started"
    return _connected(ConditionStatus.UNKNOWN, "Connecting", message, policy, now)


def connection_note(gang: GangConnection) -> Note:
    """The Event on a workload whose pods are not connected, or are connected again."""
    if gang.late:
        counts = f"{min(gang.connected, gang.expected)} of {gang.expected} running pods are connected to the operator; "
        return Note(REASON_NOT_CONNECTED, counts + _CHECK + _silent([gang]), warning=True)
    return Note(REASON_CONNECTED, f"all {gang.expected} running pods are connected to the operator")


def _silent(late: Iterable[GangConnection]) -> str:
    """What to do about replicatedJobs that were taken for processes, and of which no pod has introduced itself."""
    silent_jobs = [f"{', '.join(gang.silent[:_NAMED])} of {gang.workload.name}" for gang in late if gang.silent]
    if not silent_jobs:
        return ""
    return (
        f". No pod of {'; '.join(silent_jobs[:_NAMED])} has introduced itself, and the others wait for them: if "
        "they do not train, name those that do in the policy's spec.training.replicatedJobs, and create the workload "
        "again"
    )


def _connected(status: ConditionStatus, reason: str, message: str, policy: CheckpointPolicy, now: float) -> Condition:
    return Condition(
        type=CONDITION_CONNECTED,
        status=status,
        reason=reason,
        message=message[:4096],
        last_transition_time=_whole_second(now),
        observed_generation=policy.generation,
    )


def _whole_second(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).replace(microsecond=0)


TroubleKey = tuple[str, str]  # UID of the workload, trouble
#: What came to a replica. A number: when the trouble was over, in seconds since the epoch.
TroubleNews = WorkloadTrouble | float

#: As long as the resource's schema allows, and as many entries.
_SENTENCE, _TROUBLES = 1024, 50
#: The condition of each kind, which is False while there is such trouble.
CONDITIONS = {TroubleKind.SAVES: "Saving", TroubleKind.DELETIONS: "CleanedUp"}
REASONS_FAIL = {TroubleKind.SAVES: "SavesFail", TroubleKind.DELETIONS: "DeletionsFail"}
REASONS_SUCCEED = {TroubleKind.SAVES: "SavesSucceed", TroubleKind.DELETIONS: "DeletionsSucceed"}
_FAILING = {
    TroubleKind.SAVES: "have periodic saves that fail",
    TroubleKind.DELETIONS: "have checkpoints or remains of saves that cannot be deleted",
}
_NONE = {TroubleKind.SAVES: "no periodic save fails", TroubleKind.DELETIONS: "no deletion fails"}


def trouble_sentence(trouble: Trouble) -> str:
    """Returns what is known of it, in one sentence."""
    if trouble.left_s is None:
        return trouble.message
    return f"{trouble.message}; training ends if this lasts another {trouble.left_s:.0f} s"


def trouble_note(trouble: Trouble) -> Note:
    """Returns the Event on the workload."""
    kind = TroubleKind(trouble.kind)
    if trouble.over:
        return Note(REASONS_SUCCEED[kind], trouble.message)
    return Note(REASONS_FAIL[kind], trouble_sentence(trouble), warning=True)


def workload_trouble(workload: WorkloadIdentity, trouble: Trouble, now: float) -> WorkloadTrouble:
    """Returns the entry of a workload in the status of its policy."""
    return WorkloadTrouble(
        name=workload.name,
        uid=workload.uid,
        workload_kind=WorkloadTrouble.named(workload.kind),
        trouble=trouble.kind,
        message=one_line(trouble_sentence(trouble))[:_SENTENCE],
        time=datetime.datetime.fromtimestamp(now, datetime.UTC),
    )


def joined_troubles(
    news: Mapping[TroubleKey, TroubleNews], stored: Iterable[WorkloadTrouble], workload_uids: Set[str]
) -> list[WorkloadTrouble]:
    """Returns the entries of a policy after what has come to this replica.

    An entry that is stored keeps its place, so that none is pushed out of the list by another one.

    Args:
        news: What this replica was told.
        stored: The entries of the policy.
        workload_uids: UIDs of its workloads that have not finished.
    """
    joined = {(item.uid, item.trouble): item for item in stored}
    for key, item in news.items():
        if isinstance(item, WorkloadTrouble):
            joined[key] = item
        elif key in joined and joined[key].time.timestamp() <= item:
            del joined[key]
    return [item for item in joined.values() if item.uid in workload_uids][:_TROUBLES]


def trouble_condition(
    policy: CheckpointPolicy, kind: TroubleKind, entries: Iterable[WorkloadTrouble], now: float
) -> Condition:
    """Returns the condition of one kind.

    Args:
        policy: The policy.
        kind: The kind.
        entries: Its entries of all kinds.
        now: Seconds since the epoch.
    """
    failing = sorted((item for item in entries if item.trouble == kind), key=lambda item: (item.name, item.kind))
    message = _NONE[kind]
    if failing:
        names = ", ".join(item.name for item in failing[:5])
        first = f"{failing[0].name}: {failing[0].message}"
        message = f"{len(failing)} {ANY_PLURAL} {_FAILING[kind]} ({names}). {first}"
    return Condition(
        type=CONDITIONS[kind],
        status=ConditionStatus.FALSE if failing else ConditionStatus.TRUE,
        reason=(REASONS_FAIL if failing else REASONS_SUCCEED)[kind],
        message=message[:4096],
        last_transition_time=datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0),
        observed_generation=policy.generation,
    )


def shows_trouble(policy: CheckpointPolicy, kind: TroubleKind, workload_uid: str) -> bool:
    """Returns whether the policy's status says that a workload has trouble of a kind, or may have."""
    entries = policy.status.troubles
    if entries is None:
        shown = shown_trouble(policy, kind)
        return shown is not None and shown[0]
    return any((item.uid, item.trouble) == (workload_uid, kind) for item in entries)


def shown_trouble(policy: CheckpointPolicy, kind: TroubleKind) -> tuple[bool, float] | None:
    """Returns whether the policy's condition says that there is trouble, and since when. None: it has none."""
    for condition in policy.status.conditions or ():
        if condition.type == CONDITIONS[kind]:
            return condition.status is ConditionStatus.FALSE, condition.last_transition_time.timestamp()
    return None
