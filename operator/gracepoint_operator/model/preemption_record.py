"""One preemption: one disruption of one workload, as a Preemption object records it. Immutable values. Pure.

A pod sends its receipt to one of the replicas, so no replica alone knows which receipts are missing. Each replica
writes into its own entry to which pods it sent the notice and which pods sent a receipt. Pods are listed by their
place: the name without its random end, so that a thousand pods of one Job fit into one line such as
``train-workers-0-[0-499,501-999]``.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from gracepoint.wire import names
from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator import workloads
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.objects import LABEL_COMPLETION_INDEX, Pod, parse_time
from gracepoint_operator.read_errors import Unreadable, reading
from gracepoint_operator.resources import (
    Acknowledgements,
    CheckpointPolicy,
    Condition,
    Preemption,
    PreemptionRequest,
    PreemptionSpec,
    PreemptionStatus,
    RequestPhase,
    RequestReference,
    RequestSpec,
    RequestStatus,
    SignalKind,
)
from gracepoint_operator.resources.preemption import STAGES, STAGES_LIMIT, Laggard, Lags, StageTime
from gracepoint_operator.signals import REPORTED_BY_GANG, Cause, Signal
from gracepoint_operator.workloads import Workload, WorkloadIdentity

#: Condition of a Preemption that is over; its lastTransitionTime is when.
CONDITION_ENDED = "Ended"
#: Condition of a policy or a Preemption. False: processes make no progress. In a Preemption, it may change again.
CONDITION_PROGRESSING = "Progressing"
#: False while the gang waits for infrastructure before all its processes run.
CONDITION_STARTED = "Started"
#: The conditions that come and go.
_PASSING = frozenset({CONDITION_PROGRESSING, CONDITION_STARTED})

#: The end of the description of a signal on a node that the gang has left before, and where it was started again.
LEFT_BEFORE = ", on a node that the gang left before"

#: A record that is made so many seconds after its deadline, without a status, was restored from a backup.
RESTORED_AFTER_S = 60.0

#: Final phases after which every process exits, if the gang was to exit.
_LEAVING = frozenset({Phase.EVACUATED, Phase.COMMITTED, Phase.PROMOTED, Phase.FAILED})

#: Final phases after which the step may still be committed. The operator sets the first two by itself, and a late
#: report may correct them; what is evacuated, the next start saves.
_CORRECTED = frozenset({Phase.EXPIRED, Phase.RETRACTED, Phase.EVACUATED})
#: Those that correct them.
_SAVED = frozenset({Phase.EVACUATED, Phase.COMMITTED, Phase.PROMOTED})


class EndReason(StrEnum):
    """Why the operator itself ends a preemption: the reason of the condition Ended.

    If the gang reports the end, the reason is the phase instead.
    """

    SIGNAL_WENT_AWAY = "SignalWentAway"
    GAVE_WAY = "GaveWay"  # to a preemption that asks for more
    WORKLOAD_DELETED = workloads.REASON_DELETED
    WORKLOAD_FINISHED = workloads.REASON_FINISHED
    DEADLINE_PASSED = "DeadlinePassed"
    PODS_REPLACED = "PodsReplaced"
    NEXT_START_RESTORED = "NextStartRestored"  # the step that was saved for it, though nobody reported the commit


#: The fields of a Preemption's spec that a signal which joins the preemption may change; all others but the cause are
#: immutable.
MOVABLE = (
    *("signal", "confidence", "cancelable", "nodes", "pods"),
    *("deadline", "eviction_attempted_at", "requests", "moves"),
)
#: The fields that an eviction changes when it joins, even if the deadline stays.
_EVICTED = ("confidence", "cancelable", "nodes", "pods", "eviction_attempted_at")

#: Most of a status: parts that nothing is decided by once a later record of the workload exists.
_DETAILS = frozenset({"message", "acknowledgements", "timings", "choice_reason", "replicas"})

_T = TypeVar("_T")
_NAME_LIMIT = 40  # of the workload's part, so that the whole fits into a label


@dataclasses.dataclass(frozen=True)
class PreemptionRecord:
    """A Preemption as this replica knows it.

    Attributes:
        created_at: ``creationTimestamp``, by the clock of the API server. None until the object was created.
        generation: Counts the changes of the object's spec. 0 if that is not known.
        corrected: Whether this replica has corrected the cause.
        learned_at: When this replica got the spec from another one, with the record in the API: seconds since the
            epoch. None: it decided so by itself.
        seen: Whether signals that this replica has seen since then have named all its pods and requests. Not set if the
            preemption cannot be retracted.
    """

    namespace: str
    name: str
    created_at: float | None
    spec: PreemptionSpec
    status: PreemptionStatus
    generation: int = dataclasses.field(default=0, compare=False)
    corrected: bool = dataclasses.field(default=False, compare=False)
    learned_at: float | None = None
    seen: bool = False

    @staticmethod
    def of(body: Mapping[str, Any]) -> PreemptionRecord:
        """Reads the object of the API server.

        Raises:
            Unreadable: It is not of this version's schema.
        """
        read = Preemption.of(body)
        with reading(f"Preemption {read.namespace}/{read.name}: metadata.creationTimestamp"):
            created_at = parse_time(read.metadata.get("creationTimestamp"))
        return PreemptionRecord(read.namespace, read.name, created_at, read.spec, read.status, read.generation)

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)

    def summary(self) -> PreemptionRecord:
        """Returns the record without the parts of its status that only the record in the API is needed for.

        To join it with that record gives the whole status again.
        """
        status = self.status
        if status.timings is None and status.replicas is None:
            return self
        kept = {name: value for name, value in _given(status).items() if name not in _DETAILS}
        return dataclasses.replace(self, status=PreemptionStatus.model_construct(**kept))

    def same_details(self, other: PreemptionRecord) -> bool:
        """Returns whether ``other`` has what a summary of this record would leave out."""
        return all(getattr(self.status, name) == getattr(other.status, name) for name in _DETAILS)

    @property
    def workload(self) -> WorkloadIdentity:
        """The workload that it is about."""
        workload = self.spec.workload
        return WorkloadIdentity(workload.kind, self.namespace, workload.name, workload.uid)

    @property
    def phase(self) -> Phase:
        return self.status.phase or (Phase.EXPIRED if self.is_restored else Phase.NOTICED)

    @property
    def is_restored(self) -> bool:
        """True if the object was made long after its deadline and has no status: from a backup, by an administrator.

        The operator writes a status right after the object, in a phase that it knew before.
        """
        if self.status.phase is not None or self.created_at is None:
            return False
        return self.created_at > self.spec.deadline.timestamp() + RESTORED_AFTER_S

    @functools.cached_property
    def ended_at(self) -> float | None:
        """When it ended, in seconds since the epoch. None while it is in progress."""
        if not self.phase.ended:
            return None
        condition = self._ended
        return (self.spec.deadline if condition is None else condition.last_transition_time).timestamp()

    @property
    def end_reason(self) -> str:
        """Why it ended: an ``EndReason``, or the phase that the gang reported. Empty while it is in progress."""
        condition = self._ended
        return "" if condition is None else condition.reason

    @property
    def is_rehearsal(self) -> bool:
        """True for a requested drill under a policy whose mode is not Drill."""
        return self.spec.mode is Mode.DRILL and self.spec.policy.spec.mode is not Mode.DRILL

    @property
    def may_be_committed(self) -> bool:
        """True if no end is known, or only one after which the step may still be committed."""
        return not self.phase.ended or self.phase in _CORRECTED

    @property
    def asks_to_leave(self) -> bool:
        """True if the gang is to exit after the save."""
        return self.spec.mode is Mode.ENFORCE and self.spec.exits

    @property
    def leaves(self) -> bool:
        """True if every process of the gang exits, or has exited. In Observe mode pods get no notice; they exit on
        SIGTERM."""
        trains_on = self.spec.mode is Mode.DRILL or not self.spec.exits
        return self.phase in _LEAVING and not trains_on

    def includes(self, pod: Pod) -> bool:
        """True if the pod existed when the preemption began.

        The fields of the spec decide that, because the object may be created much later, or never. All times come from
        the API server, so clocks of different machines are not compared. They are whole seconds. A pod of the same
        second existed before: no gang saves, exits and starts again within one second.
        """
        attempt, until_at = self._bounds
        return pod.membership.restart_attempt <= attempt and pod.created_at <= until_at

    @functools.cached_property
    def _bounds(self) -> tuple[float, float]:
        """The highest attempt, and the latest creation, of a pod that is included. Thousands are compared with it."""
        attempt, newest_pod_at = self.spec.restart_attempt, self.spec.newest_pod_at
        until_at = self.created_at if newest_pod_at is None else newest_pod_at.timestamp()
        return (math.inf if attempt is None else attempt, math.inf if until_at is None else until_at)

    @property
    def knows_its_pods(self) -> bool:
        """True if ``includes`` can distinguish the pods of the gang from those after its restart."""
        return self.created_at is not None or self.spec.newest_pod_at is not None

    @property
    def cause_is_assumed(self) -> bool:
        """True if only the gang knows of the preemption, by a SIGTERM, which does not say the cause."""
        return (self.spec.signal, self.spec.cause) == (REPORTED_BY_GANG, Cause.POD_DELETION)

    def is_of_another_life(self, other: PreemptionRecord) -> bool:
        """True if both have the same name but are about different attempts of the gang.

        This happens if a replica starts while the API server refuses records: it starts to count from the beginning.
        """
        own_attempt, other_attempt = self.spec.restart_attempt, other.spec.restart_attempt
        return own_attempt is not None and other_attempt is not None and own_attempt != other_attempt

    def joined(self, other: PreemptionRecord) -> PreemptionRecord:
        """Joins what this replica knows with ``other``, the record in the API.

        Of two versions of the spec, the one with more moves wins, then the one with the earlier deadline. The earlier
        attempt to evict wins. The cause is that of ``other``, unless this replica has corrected it and has more moves,
        and the gang has not frozen or did not know the cause. The status is joined by ``joined_status``. If the records
        are about different attempts of the gang, ``other`` wins.
        """
        if self.is_of_another_life(other):
            return other
        spec = other.spec
        attempted = [at for at in (self.spec.eviction_attempted_at, spec.eviction_attempted_at) if at is not None]
        if self.spec.eviction_attempted_at is not None and spec.eviction_attempted_at is None:
            spec = spec.model_copy(update={field: getattr(self.spec, field) for field in _EVICTED})
        if (-self.spec.moves, self.spec.deadline) < (-spec.moves, spec.deadline):
            # Only the fields that a joining signal may change. Two replicas saw the first signal at slightly different
            # times, and the API server refuses to change observedAt.
            spec = spec.model_copy(update={field: getattr(self.spec, field) for field in MOVABLE})
        may_correct = other.cause_is_assumed or other.phase.rank < Phase.FROZEN.rank
        if self.corrected and self.spec.moves > other.spec.moves and may_correct:
            spec = spec.model_copy(update={"cause": self.spec.cause})
        if attempted:
            spec = spec.model_copy(update={"eviction_attempted_at": min(attempted)})
        status = joined_status(self.status, other.status)
        return dataclasses.replace(
            other, spec=spec, status=status, corrected=self.corrected, learned_at=self.learned_at, seen=self.seen
        )

    @property
    def _ended(self) -> Condition | None:
        return next((item for item in self.status.conditions or () if item.type == CONDITION_ENDED), None)

    def timing(self, stage: str) -> float | None:
        """Seconds from the signal until the stage was reached. None if it was not reached or not reported."""
        return next((item.seconds for item in self.status.timings or () if item.stage == stage), None)


def joined_status(local: PreemptionStatus, stored: PreemptionStatus) -> PreemptionStatus:
    """Joins what two replicas know of one preemption. It only adds, so the order of joining does not matter.

    The phase only moves forward. A final phase is never replaced, with two exceptions: Evacuated, Committed or Promoted
    replaces Expired or Retracted, and Committed or Promoted replaces Evacuated. The figures come from the status that
    is further on. Of two entries of a stage, that over more processes wins, else that of ``stored``, which was written
    first; of ``firstAck`` the earlier one. The number of receipts never decreases.
    Of two conditions Progressing or Started, the one that changed later wins. Lists keep the order of ``stored``: if
    each replica wrote its own order, the replicas would write the same record in turn for ever.
    """
    ahead, behind = (local, stored) if _is_ahead(local, stored) else (stored, local)
    figures = {**_given(behind), **_given(ahead)}
    figures["acknowledgements"] = _joined_receipts(local.acknowledgements, stored.acknowledgements)
    timings = _fitting(_joined_stages(local.timings or (), stored.timings or ()))
    figures["timings"] = sorted(timings, key=lambda item: item.seconds) or None
    figures["conditions"] = _joined_conditions(behind.conditions, ahead.conditions)
    figures["replicas"] = stored.replicas
    return PreemptionStatus.model_construct(**figures)


def _joined_stages(local: Iterable[StageTime], stored: Iterable[StageTime]) -> list[StageTime]:
    stages = {item.stage: item for item in stored}
    for item in local:
        stored_item = stages.setdefault(item.stage, item)
        if _reach(item) != _reach(stored_item):
            times = [at for at in (item.time, stored_item.time) if at is not None]
            further = max(item, stored_item, key=_reach)
            stages[item.stage] = further.model_copy(update={"time": min(times, default=None)})
    return list(stages.values())


def _reach(item: StageTime) -> tuple[float, float]:
    """Greater for the entry that is to be kept. Process 0 first reports itself alone, then all processes.

    With more processes, the maximum grows. If it stays, as process 0 is the last, the median falls.
    """
    if item.stage == "firstAck":
        return (-item.seconds, 0.0)
    return (-1.0 if item.max_seconds is None else item.max_seconds, -(item.p50_seconds or 0.0))


def _fitting(timings: list[StageTime]) -> list[StageTime]:
    """As many stages as a record may have. Those that this version does not know, and pods may report, go first."""
    if len(timings) <= STAGES_LIMIT:
        return timings
    return sorted(timings, key=lambda item: (item.stage not in STAGES, item.stage))[:STAGES_LIMIT]


def _is_ahead(local: PreemptionStatus, stored: PreemptionStatus) -> bool:
    if local.phase is None or stored.phase is None:
        return stored.phase is None
    if stored.phase.ended:
        return stored.phase in _CORRECTED and local.phase in _SAVED and local.phase is not stored.phase
    return local.phase.rank > stored.phase.rank


def _joined_conditions(behind: Iterable[Condition] | None, ahead: Iterable[Condition] | None) -> list[Condition] | None:
    joined = _union(behind, ahead, lambda item: item.type)
    latest: dict[str, Condition] = {}
    for item in (*(behind or ()), *(ahead or ())):
        # Times are whole seconds; a stall ends after it has begun.
        if item.type in _PASSING and (item.type not in latest or _age(item) > _age(latest[item.type])):
            latest[item.type] = item
    return None if joined is None else [latest.get(item.type, item) for item in joined]


def _age(condition: Condition) -> tuple[datetime.datetime, str, str]:
    """The greater, the later the condition was written."""
    return condition.last_transition_time, condition.status, condition.message


def _joined_receipts(local: Acknowledgements | None, stored: Acknowledgements | None) -> Acknowledgements | None:
    if local is None or stored is None:
        return local or stored
    more = local if local.received > stored.received else stored
    return more.model_copy(update={"expected": max(local.expected, stored.expected)})


def _given(status: PreemptionStatus) -> dict[str, Any]:
    fields = {name: getattr(status, name) for name in PreemptionStatus.model_fields}
    return {name: value for name, value in fields.items() if value is not None}


def _union(local: Iterable[_T] | None, stored: Iterable[_T] | None, key: Callable[[_T], str]) -> list[_T] | None:
    """All items, first those of ``stored``. Of two with the same key, that of ``stored``."""
    items = {key(item): item for item in stored or ()}
    for item in local or ():
        items.setdefault(key(item), item)
    return list(items.values()) or None


def preemption_name(workload_name: str, workload_uid: str, number: int) -> str:
    """Returns the name of a record. It is deterministic, so that two replicas create the same object."""
    short = re.sub(r"[^a-z0-9]+$", "", workload_name[:_NAME_LIMIT])
    return f"{short}-{workload_uid[:8]}-{number}"


#: The label of a request that is over and never opens again: since when, in seconds since the epoch. Requests with it
#: are not watched, so that the memory for requests does not grow with their number. A request that is restored from a
#: backup still has the label, though not its status, and is not carried out again.
LABEL_ENDED_AT = f"{names.GROUP}/ended-at"


@dataclasses.dataclass(frozen=True)
class RequestRecord:
    """A request for a preemption, which a user or another controller created, as this replica knows it.

    A request is a signal. Like every other signal it starts its own preemption or joins the one in progress. The record
    of that preemption has its usual deterministic name, so that two replicas which see a request and a taint in
    different order still create one object. The outcome of a request is written to its own status
    (``decisions.decide``).

    Attributes:
        kind: PreemptionRequests. Preemptions for a request that was made under version 0.2.
        created_at: ``creationTimestamp``, by the clock of the API server.
        generation: Counts the changes of its spec. 0 if the object does not say.
    """

    namespace: str
    name: str
    uid: str
    created_at: float
    spec: RequestSpec
    status: RequestStatus
    generation: int = 0
    kind: objects.Kind = objects.REQUESTS

    @staticmethod
    def of(body: Mapping[str, Any]) -> RequestRecord:
        """Reads the object of the API server.

        Raises:
            Unreadable: It is not of this version's schema.
        """
        read = PreemptionRequest.of(body)
        with reading(f"{read.kind} {read.namespace}/{read.name}: metadata.creationTimestamp"):
            created_at = parse_time(read.metadata.get("creationTimestamp")) or 0.0
        kind = objects.REQUESTS if read.kind == PreemptionRequest.kind_name else objects.PREEMPTIONS
        return RequestRecord(
            *(read.namespace, read.name, read.uid, created_at, read.spec, read.status, read.generation, kind)
        )

    @property
    def reference(self) -> RequestReference:
        return RequestReference(name=self.name, uid=self.uid)

    @property
    def mark(self) -> str:
        """The key under which ``cache.indexes`` remembers when it was first seen."""
        return f"{self.uid}/request"

    @property
    def deadline_at(self) -> float:
        if self.spec.deadline is not None:
            return self.spec.deadline.timestamp()
        return self.created_at + (self.spec.deadline_seconds or 0.0)

    @property
    def is_open(self) -> bool:
        """False if it was withdrawn, or its status has a final phase."""
        return not (self.spec.retracted or self.has_ended)

    @property
    def has_ended(self) -> bool:
        """True if its status has a final phase."""
        return self.status.phase is not None and self.status.phase.ended

    def is_signal(self, preemptions: Sequence[PreemptionRecord]) -> bool:
        """True if it counts as a signal: it is open, or a replica with an older view superseded it after the notice.

        Args:
            preemptions: The preemptions of the workload, oldest first.
        """
        if self.status.phase is not RequestPhase.SUPERSEDED or self.spec.retracted:
            return self.is_open
        preemption = self.adopted_by(preemptions)
        return preemption is not None and not preemption.phase.ended

    def adopted_by(self, preemptions: Sequence[PreemptionRecord]) -> PreemptionRecord | None:
        """Returns the newest of the preemptions, oldest first, that names it. None: none does."""
        return next(
            (preemption for preemption in reversed(preemptions) if self.reference in preemption.spec.requests), None
        )

    def is_for(self, workload_uid: str) -> bool:
        """True if it is for this workload, and not for another one that had the same name."""
        return self.spec.workload.uid in (None, workload_uid)

    def is_drill(self, policy_mode: Mode) -> bool:
        """True if it asks for a drill under a policy whose mode is not Drill."""
        return self.spec.mode is Mode.DRILL and policy_mode is not Mode.DRILL

    def signal(self, pod: Pod) -> Signal:
        """Returns the signal for a pod of the gang."""
        return Signal(
            kind=SignalKind.REQUEST,
            mark=self.mark,
            cause=self.spec.cause,
            text=f"request {self.name}",
            node="",
            pod=pod,
            confidence=Confidence.SURE,
            cancelable=True,
            lead_s=0.0,
            until_at=self.deadline_at,
            lasting=True,
        )


#: The copy in a Preemption has only what the operator decides by. The rest is in the pods.
_ELSEWHERE = {"checkpoint": {"directory": "/in-the-pods"}}


def kept_policy(workload: Workload, preemptions: Sequence[PreemptionRecord]) -> CheckpointPolicy | None:
    """Returns the policy that a workload was created with, for when it does not exist any more. None: it is not known.

    The webhook writes the policy's spec into the workload. So all replicas know it, also after a restart. Workloads
    that an older version prepared lack it; then the copy in their newest Preemption counts, if there is one.

    Args:
        workload: The workload.
        preemptions: Its Preemptions, oldest first.
    """
    if not workload.injected:
        return None
    policy = _read(workload.namespace, workload.policy, workload.created_with) if workload.created_with else None
    if policy is None and preemptions:
        spec = {**preemptions[-1].spec.policy.spec.to_json(), **_ELSEWHERE}
        policy = _read(workload.namespace, workload.policy, json.dumps(spec))
    return policy


@functools.lru_cache(maxsize=128)  # of texts that tenants may choose
def _read(namespace: str, name: str, spec: str) -> CheckpointPolicy | None:
    """Reads a spec that is kept in an object, where anybody may have written something else."""
    try:
        return CheckpointPolicy.of(
            {
                "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
                "kind": CheckpointPolicy.kind_name,
                "metadata": {"namespace": namespace, "name": name},
                "spec": json.loads(spec),
            }
        )
    except (Unreadable, ValueError, RecursionError):
        return None


#: As many as the resource's schema allows.
_LAGGARDS_LIMIT, _LINES_LIMIT = 50, 4096
_SPANS_PER_LINE = 64
_LINE = re.compile(r"(.+)-\[([0-9,-]+)\]")
#: Places with a higher index are kept as texts: anybody may write any index into a label.
_INDEX_LIMIT = 1 << 20


def place_of(pod: Pod) -> str:
    """Returns the pod's place in the gang: its Job and completion index, or its name if it has no index."""
    return f"{pod.job_name}-{pod.completion_index}" if LABEL_COMPLETION_INDEX in pod.labels else pod.name


class Places:
    """A set of places. The indices of one Job are the bits of one number, so that thousands of places are cheap.

    Args:
        lines: Lines that ``lines`` made, or single places.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._indices: dict[str, int] = {}  # a place without its index -> the bits of its indices
        self._others: set[str] = set()
        self._lines: list[str] | None = None  # until a place is added
        for line in lines:
            match = _LINE.fullmatch(line)
            if match is None:
                self.add(line)
            elif (bits := _bits(match[2])) is None:
                self._others.add(line)
            else:
                self._indices[match[1]] = self._indices.get(match[1], 0) | bits

    def add(self, place: str) -> None:
        self._lines = None
        head, index = _split(place)
        if index is None:
            self._others.add(place)
        else:
            self._indices[head] = self._indices.get(head, 0) | 1 << index

    def __or__(self, other: Places) -> Places:
        both = Places()
        both._others = self._others | other._others
        both._indices = dict(self._indices)
        for head, bits in other._indices.items():
            both._indices[head] = both._indices.get(head, 0) | bits
        return both

    def __contains__(self, place: object) -> bool:
        if not isinstance(place, str):
            return False
        head, index = _split(place)
        return place in self._others if index is None else bool(self._indices.get(head, 0) >> index & 1)

    def __len__(self) -> int:
        return len(self._others) + sum(bits.bit_count() for bits in self._indices.values())

    def lines(self) -> list[str]:
        """The places as sorted lines of ranges."""
        if self._lines is None:
            lines = list(self._others)
            for head, bits in self._indices.items():
                spans = list(_spans(bits))
                for at in range(0, len(spans), _SPANS_PER_LINE):
                    text = ",".join(spans[at : at + _SPANS_PER_LINE])
                    lines.append(f"{head}-{text}" if text.isdecimal() else f"{head}-[{text}]")
            self._lines = sorted(lines)[:_LINES_LIMIT]
        return list(self._lines)


def missing(names: Iterable[str], notified: Container[str], acknowledging: Container[str]) -> list[Laggard]:
    """Returns the first 50 of these pods that have sent no receipt.

    Args:
        names: Names of the pods of the gang.
        notified: Places of the pods to which any replica has sent the notice.
        acknowledging: Places of the pods that have sent a receipt to any replica.
    """
    lagging = sorted(name for name in set(names) if not _is_of(name, acknowledging))[:_LAGGARDS_LIMIT]
    return [
        Laggard(pod=name, lags=Lags.NOT_ACKNOWLEDGED if _is_of(name, notified) else Lags.NOT_CONNECTED)
        for name in lagging
    ]


def _is_of(name: str, places: Container[str]) -> bool:
    return name.rpartition("-")[0] in places or name in places


@functools.lru_cache(maxsize=1 << 17)  # the same thousands of places are looked up for each write
def _split(place: str) -> tuple[str, int | None]:
    """Returns a place without its index, and the index. None: it has none that can be a bit."""
    head, _, tail = place.rpartition("-")
    if not (head and tail.isdecimal() and len(tail) < 8 and (tail[0] != "0" or tail == "0") and tail.isascii()):
        return place, None
    index = int(tail)
    return (head, index) if index < _INDEX_LIMIT else (place, None)


def _bits(spans: str) -> int | None:
    """Returns the bits of the indices in spans such as ``0-3,5``. None: anybody may have written this."""
    bits = 0
    for span in spans.split(","):
        first_text, _, last_text = span.partition("-")
        begin, end = (
            int(text) if len(text) < 8 and text.isdecimal() else -1 for text in (first_text, last_text or first_text)
        )
        if not 0 <= begin <= end < _INDEX_LIMIT:
            return None
        bits |= ((1 << (end - begin + 1)) - 1) << begin
    return bits


def _spans(bits: int) -> Iterator[str]:
    """``0-3`` for neighbours, ``5`` for one alone."""
    for run in re.finditer("1+", f"{bits:b}"[::-1]):
        first, end = run.span()
        yield str(first) if end == first + 1 else f"{first}-{end - 1}"
