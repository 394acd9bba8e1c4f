"""Whether the pods of the gangs are connected, so that a mistake in the network shows before the first loss. Pure.

Each replica knows the pods that are connected to it. It writes their number for each workload into the policy's
status, and adds the numbers of all replicas. A pod is connected to one replica at a time. While it moves from one to
the other, it may count twice for some seconds.

A replica that ends writes an entry without pods. The entry of one that died counts as long as its Lease says that it
lives (``recording.replica_lease``). So an entry is written only if it changes.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping

from gracepoint_operator.decisions.statuses.event_notes import Note
from gracepoint_operator.resources import (
    CheckpointPolicy,
    Condition,
    ConditionStatus,
    PolicyReplica,
    WorkloadConnections,
)
from gracepoint_operator.workloads import ANY_NAME, WorkloadIdentity

CONDITION_CONNECTED = "Connected"
REASON_NOT_CONNECTED = "PodsNotConnected"
REASON_CONNECTED = "PodsConnected"

#: A pod that runs may not be connected for this long: its process has to start, and ``attach()`` to be called. A pod
#: that starts has this time of its own. Then pods of its workload must have been missing for this time, too: a pod that
#: was connected may be connecting to another replica.
GRACE_S = 180.0
#: A replica that was out of reach of the API server for longer judges nothing.
RENEWED_S = 60.0

_NAMED = 5
_JOBS = 64  # the limit in the schema
_CHECK = (
    "what is not connected is told of no disruption, and reacts to SIGTERM alone. Check that the training code calls "
    "attach(), the pods' logs for 'not subscribed to the operator', NetworkPolicies, and the DNS"
)


@dataclasses.dataclass(frozen=True)
class GangConnection:
    """How many pods of a gang are connected.

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
    made = PolicyReplica(name=replica, time=_time(now), workloads=counts[:1000])
    there = next((entry for entry in before if entry.name == replica), None)
    if there is None:
        return made if counts else None
    return None if there.workloads == made.workloads else made


def empty_entry(replica: str, now: float) -> PolicyReplica:
    """Returns the entry of a replica that ends."""
    return PolicyReplica(name=replica, time=_time(now), workloads=[])


def total(entries: Iterable[PolicyReplica]) -> dict[str, int]:
    """Adds the numbers of several replicas: UID of the workload -> number of connected pods."""
    found: dict[str, int] = {}
    for entry in entries:
        for item in entry.workloads:
            found[item.uid] = found.get(item.uid, 0) + item.connected
    return found


def of_others(
    entries: Iterable[PolicyReplica], replica: str, lives: Callable[[str, float], bool]
) -> Mapping[str, WorkloadConnections]:
    """Returns what is connected to living replicas other than ``replica``, by UID of the workload."""
    found: dict[str, WorkloadConnections] = {}
    for entry in entries:
        if entry.name == replica or not lives(entry.name, entry.time.timestamp()):
            continue
        for item in entry.workloads:
            known = found.get(item.uid)
            found[item.uid] = item if known is None else _sum(known, item)
    return found


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
    known = there.replicated_jobs is not None or not there.connected  # an older operator does not tell
    silent = [name for name in gang.silent if known and name not in (there.replicated_jobs or ())]
    return dataclasses.replace(
        gang, connected=connected, late=gang.late and connected < gang.expected, silent=tuple(silent)
    )


def condition(
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
        said = f"{connected} of {expected} running pods are connected ({names}); {_CHECK}{_silent(late)}"
        return _condition(ConditionStatus.FALSE, REASON_NOT_CONNECTED, said, policy, now)
    if not expected:
        said = f"no pod of a {ANY_NAME} that names this policy runs"
        return _condition(ConditionStatus.UNKNOWN, "NoPods", said, policy, now)
    # Without numbers, so that replicas whose watches differ by some seconds write the same.
    if connected == expected:
        said = "all running pods are connected"
        return _condition(ConditionStatus.TRUE, REASON_CONNECTED, said, policy, now)
    if before is not None and before.status is not ConditionStatus.UNKNOWN:
        return None  # they may just have started; this becomes False if it lasts
    said = "not all running pods are connected; the others may just have started"
    return _condition(ConditionStatus.UNKNOWN, "Connecting", said, policy, now)


def note(gang: GangConnection) -> Note:
    """The Event on a workload whose pods are not connected, or are connected again."""
    if gang.late:
        said = f"{min(gang.connected, gang.expected)} of {gang.expected} running pods are connected to the operator; "
        return Note(REASON_NOT_CONNECTED, said + _CHECK + _silent([gang]), warning=True)
    return Note(REASON_CONNECTED, f"all {gang.expected} running pods are connected to the operator")


def _silent(late: Iterable[GangConnection]) -> str:
    """What to do about replicatedJobs that were taken for processes, and of which no pod has introduced itself."""
    found = [f"{', '.join(gang.silent[:_NAMED])} of {gang.workload.name}" for gang in late if gang.silent]
    if not found:
        return ""
    return (
        f". No pod of {'; '.join(found[:_NAMED])} has introduced itself, and the others wait for them: if they do not "
        "train, name those that do in the policy's spec.training.replicatedJobs, and create the workload again"
    )


def _condition(status: ConditionStatus, reason: str, message: str, policy: CheckpointPolicy, now: float) -> Condition:
    return Condition(
        type=CONDITION_CONNECTED,
        status=status,
        reason=reason,
        message=message[:4096],
        last_transition_time=_time(now),
        observed_generation=policy.generation,
    )


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).replace(microsecond=0)
