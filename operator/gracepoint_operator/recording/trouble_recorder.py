"""Records what goes wrong while training continues, in conditions, Events and metrics.

``TroubleRecorder`` has saves and deletions that fail, ``SnapshotRecorder`` snapshots that are not safe,
``StallRecorder`` gangs that make no progress, and ``MissingPolicies`` workloads whose policy does not exist.

``take``, ``resumed``, ``follow`` and ``forget`` are called on the controller's event loop and do not wait. The Events
are posted by tasks of a write queue, which ``close`` ends. Each replica knows what pods reported to it, and the one
that got the newest report writes it. If the other one got the report of the end, the policy's status says so
(``follow``). A gang that still has trouble reports it again with each failure.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

from gracepoint.wire.messages import SnapshotReport, Stall, Trouble, TroubleKind
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions import policy_conditions, preemption_status, snapshot_placement
from gracepoint_operator.decisions.preemption_status import Note
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.policy_writer import PolicyWriter
from gracepoint_operator.resources import CheckpointPolicy, WorkloadSnapshots
from gracepoint_operator.workloads import Workload

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RecorderContext:
    """What all recorders read, and where they show what they know.

    Attributes:
        cache: What is known of the cluster.
        policy_writer: Writes the conditions.
        events: Posts Events.
        metrics: Count, and show what is wrong now.
        clock: Seconds since the epoch.
        interval_s: Seconds between two Events of one workload.
    """

    cache: ClusterCache
    policy_writer: PolicyWriter
    events: EventRecorder
    metrics: Metrics
    clock: Callable[[], float]
    interval_s: float


class Recorder(abc.ABC):
    """What the recorders of gangs share: what they read and write, and the queue of their Events.

    Args:
        context: What all recorders share.
        subject: What the Events are about, for the log.
    """

    def __init__(self, context: RecorderContext, subject: str) -> None:
        self._cache = context.cache
        self._policy_writer = context.policy_writer
        self._events = context.events
        self._metrics = context.metrics
        self._clock = context.clock
        self._write_queue = WriteQueue(subject, self._write, context.metrics, context.interval_s)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    @abc.abstractmethod
    async def _write(self, key: Key) -> None:
        """Posts what is new of a workload, by namespace and UID."""


@dataclasses.dataclass(frozen=True)
class _KnownTrouble:
    workload: Workload
    trouble: Trouble
    since: float  # when the first report of it came
    at: float


class TroubleRecorder(Recorder):
    """Records saves and deletions that fail: in conditions, Events and metrics.

    Args:
        context: What all recorders share.
    """

    def __init__(self, context: RecorderContext) -> None:
        super().__init__(context, "trouble")
        for kind in TroubleKind:  # from 0 on, so that increase() sees the first one
            self._metrics.troubles.labels(kind)
        # (UID of the workload, kind) -> the newest report
        self._troubles: dict[tuple[str, TroubleKind], _KnownTrouble] = {}
        self._unposted: dict[str, dict[TroubleKind, _KnownTrouble]] = {}  # UID of the workload -> what is to be posted

    def take(self, pod: Pod, trouble: Trouble) -> None:
        """Takes the report of a gang. A kind that only a later version knows is logged."""
        workload = self._cache.objects.workloads.get(trouble.workload_uid)
        logger.warning(
            "a gang reports failures" if not trouble.over else "a gang reports the end of failures",
            extra=about(pod=pod.name, trouble=trouble.kind, said=trouble.message),
        )
        if workload is None or workload.finished or trouble.kind not in set(TroubleKind):
            return
        kind, now = TroubleKind(trouble.kind), self._clock()
        earlier = self._troubles.pop((workload.uid, kind), None)
        current = _KnownTrouble(workload, trouble, now if earlier is None else earlier.since, now)
        if not trouble.over:
            self._troubles[workload.uid, kind] = current
        self._show(kind)
        if earlier is None and not trouble.over:
            self._metrics.troubles.labels(kind).inc()
        if earlier is None or trouble.over:
            self._unposted.setdefault(workload.uid, {})[kind] = current
            self._write_queue.touch((workload.namespace, workload.uid))
        entry = now if trouble.over else policy_conditions.workload_trouble(workload, trouble, now)
        self._policy_writer.trouble(workload, kind, entry)

    def resumed(self, workload_uid: str) -> None:
        """The gang has started again: if it still has trouble, it will report it."""
        workload = self._cache.objects.workloads.get(workload_uid)
        policy = None if workload is None else self._cache.policies.get((workload.namespace, workload.policy))
        for kind in TroubleKind:
            known = self._end(workload_uid, kind)
            is_shown = policy is not None and policy_conditions.shows_trouble(policy, kind, workload_uid)
            if workload is not None and (known or is_shown):  # the replica that knew of it may be gone
                self._policy_writer.trouble(workload, kind, self._clock())

    def follow(self, policy: CheckpointPolicy) -> None:
        """Takes from a policy's status what the other replica heard the end of."""
        for uid, trouble in self._policy_writer.follow(policy):
            self._end(uid, TroubleKind(trouble))
        if policy.status.troubles is None:
            self._follow_conditions(policy)

    def _follow_conditions(self, policy: CheckpointPolicy) -> None:
        """Follows a policy without entries: the other replica, or the CRD, is of a version without them."""
        for kind in TroubleKind:
            shown = policy_conditions.shown_trouble(policy, kind)
            for (uid, current_kind), current in list(self._troubles.items()):
                key = (current.workload.namespace, current.workload.policy)
                is_over = shown is not None and not shown[0] and shown[1] > current.at
                if current_kind is kind and key == (policy.namespace, policy.name) and is_over:
                    self._end(uid, kind)
                    self._policy_writer.trouble(current.workload, kind, self._clock())

    def forget(self, uid: str) -> None:
        """A workload is gone, or has finished."""
        self._unposted.pop(uid, None)
        self._policy_writer.troubles.forget(uid)
        for kind in TroubleKind:
            if known := self._end(uid, kind):
                self._policy_writer.touch(known.workload.namespace, known.workload.policy)

    def _end(self, workload_uid: str, kind: TroubleKind) -> _KnownTrouble | None:
        """Forgets a trouble. Returns what was known of it."""
        known = self._troubles.pop((workload_uid, kind), None)
        if known is not None:
            self._show(kind)
        return known

    def _show(self, kind: TroubleKind) -> None:
        self._metrics.troubled.labels(kind).set(sum(item_kind is kind for _, item_kind in self._troubles))

    async def _write(self, key: Key) -> None:
        for current in self._unposted.pop(key[1], {}).values():
            await self._events.post_on(
                current.workload, policy_conditions.trouble_note(current.trouble), f"{current.since:.0f}"
            )


#: Of so many workloads the age of snapshots is looked at in one turn of the event loop: 2 to 4 ms.
REPORTS_A_LOOK = 100


@dataclasses.dataclass
class _KnownSnapshots:
    workload: Workload
    report: SnapshotReport
    at: float  # when the report came
    skipped: int  # of which the metric has counted
    entry: WorkloadSnapshots | None = None


class SnapshotRecorder(Recorder):
    """Records what of gangs is safe in snapshot servers: in the policy's status, in Events, and in metrics.

    What process 0 reports counts, for as long as it is connected to this replica. ``look`` is called now and then, as a
    snapshot gets old by the time alone.

    Args:
        context: What all recorders share.
    """

    def __init__(self, context: RecorderContext) -> None:
        super().__init__(context, "snapshots")
        self._reported: dict[str, _KnownSnapshots] = {}  # by UID of the workload
        self._lacking: dict[str, str] = {}  # by UID of the workload
        self._unposted: dict[str, WorkloadSnapshots] = {}  # by UID of the workload
        self._to_look_at: list[str] = []  # UIDs of the workloads whose turn comes before it is that of all again

    def take(self, pod: Pod, report: SnapshotReport) -> None:
        """Takes the report of a process.

        Raises:
            pydantic.ValidationError: A figure is impossible.
        """
        workload = self._cache.objects.workloads.get(pod.workload_uid)
        if workload is None or report.process_index != 0:
            return
        before = self._reported.get(workload.uid)
        is_same = before is not None and before.report.session == report.session
        counted = before.skipped if before is not None and is_same else 0
        self._metrics.snapshots_skipped.inc(max(0, report.skipped - counted))
        now = self._clock()
        current = _KnownSnapshots(workload, report, now, max(counted, report.skipped))
        if before is not None and is_same and report.age_s is None and before.report.age_s is None:
            current.at = before.at  # as long as there is none, it counts from the first report
        if before is not None:
            current.entry = before.entry
        self._look_at(current)
        self._reported[workload.uid] = current

    def lacks(self, workload_uid: str, text: str) -> None:
        """Takes why the processes of a gang cannot have as many servers as its policy says. Empty: they can."""
        self._lacking[workload_uid] = text

    def look(self, is_connected: Callable[[str, str], bool]) -> None:
        """Looks whether snapshots have become too old, of some workloads each time: ``REPORTS_A_LOOK``.

        Args:
            is_connected: Returns whether a session of a pod, by UID, is connected to this replica.
        """
        if not self._to_look_at:
            self._to_look_at = list(self._reported)
        turn, self._to_look_at = self._to_look_at[:REPORTS_A_LOOK], self._to_look_at[REPORTS_A_LOOK:]
        for uid in turn:
            if (current := self._reported.get(uid)) is None:
                continue
            if is_connected(current.report.pod_uid, current.report.session):
                self._look_at(current)
            else:
                self.forget(uid)  # the other replica is told from now on
        counts = collections.Counter(
            current.entry.reason for current in self._reported.values() if current.entry is not None
        )
        for reason in snapshot_placement.REASONS if self._reported or self._lacking else ():
            self._metrics.snapshots_unsafe.labels(reason).set(counts[reason])

    def forget(self, uid: str) -> None:
        """A workload is gone, or its process 0."""
        self._lacking.pop(uid, None)
        self._unposted.pop(uid, None)
        current = self._reported.pop(uid, None)
        if current is not None:
            self._metrics.show_snapshot_age(current.workload.namespace, current.workload.name, None)

    def _look_at(self, current: _KnownSnapshots) -> None:
        workload, before = current.workload, current.entry
        policy = self._cache.policy_of(workload)
        memory = None if policy is None else policy.spec.checkpoint.memory
        if memory is None:
            return
        lacking = self._lacking.get(workload.uid, "")
        entry = snapshot_placement.snapshots_of(
            workload, current.report, current.at, memory.copies, lacking, self._clock()
        )
        current.entry = entry
        if entry.passed is not None:
            passed_at = entry.passed.timestamp()
            self._metrics.show_snapshot_age(
                workload.namespace, workload.name, lambda: max(0.0, self._clock() - passed_at)
            )
        self._policy_writer.snapshots(workload, entry)
        is_first_safe = before is None and entry.reason is None
        if not is_first_safe and (before is None or before.reason != entry.reason):
            self._unposted[workload.uid] = entry
            self._write_queue.touch((workload.namespace, workload.uid))

    async def _write(self, key: Key) -> None:
        entry, current = self._unposted.pop(key[1], None), self._reported.get(key[1])
        if entry is not None and current is not None:
            note = snapshot_placement.snapshots_note(entry)
            await self._events.post_on(current.workload, note, f"{entry.time.timestamp():.0f}")


#: At most this number of stalls of one gang is shown, because storage that hangs can stop the trainers of all pods. At
#: most this number of characters of a pod's name is shown, because a pod may say anything.
_SHOWN, _POD_CHARACTERS = 10, 253


@dataclasses.dataclass(frozen=True)
class _KnownStall:
    workload: Workload
    pod: Pod  # that reported it
    stall: Stall
    at: float

    @property
    def pods(self) -> list[str]:
        """Names of the pods that hold up the others. A process that watches one pod from outside reports it alone."""
        return [self.pod.name] if self.stall.beside else self.stall.pods or []


class StallRecorder(Recorder):
    """Records gangs that make no progress: in the policy's condition, in an Event on the workload, and in metrics.

    A gang reports its stall once. A process next to a trainer, which watches it from outside, reports that pod alone.
    Both reports are shown together, the gang's first. A stall is over when its pod reports so, the gang has started
    again, or the pod is gone. The other replica may have got the first two. So a stall is also over when the policy's
    status has a newer forecast of the gang, which any replica may have written: only a training thread that continues
    sends one, after each save.

    Args:
        context: What all recorders share.
    """

    def __init__(self, context: RecorderContext) -> None:
        super().__init__(context, "stall")
        # UID of the workload -> UID of the pod that is looked at, empty for the gang -> its stall.
        self._stalled: dict[str, dict[str, _KnownStall]] = {}
        self._latest: dict[str, _KnownStall] = {}  # UID of the workload -> what is to be posted

    def take(self, pod: Pod, stall: Stall) -> str | None:
        """Takes the report of a stall. Returns all stalls of the gang, in sentences. None: there is none."""
        workload = self._cache.objects.workloads.get(stall.workload_uid)
        if workload is None:
            return None if stall.over else preemption_status.stall_sentence(stall)
        logger.warning(
            "a gang makes no progress" if not stall.over else "a gang makes progress again",
            extra=about(pod=pod.name, stage=stall.stage, suspects=stall.suspects, said=stall.message),
        )
        current = _KnownStall(workload, pod, stall, self._clock())
        about_pod = pod.uid if stall.beside else ""
        stalls = self._stalled.setdefault(workload.uid, {})
        if stall.over:
            stalls.pop(about_pod, None)
        else:
            if not stalls:
                self._metrics.stalls.inc()
            stalls[about_pod] = current
        if not stalls:
            del self._stalled[workload.uid]
        self._latest[workload.uid] = current
        self._write_queue.touch((workload.namespace, workload.uid))
        self._show(workload)
        return _sentences(stalls) if stalls else None

    def resumed(self, workload_uid: str) -> None:
        """The gang has started again: it is not stalled any more."""
        stalls = self._stalled.pop(workload_uid, None)
        if stalls is not None:
            self._show(next(iter(stalls.values())).workload)

    def follow(self, policy: CheckpointPolicy) -> None:
        """Takes from a policy's status which gangs make progress again."""
        for forecast in policy.status.forecasts or ():
            self._end(forecast.uid, functools.partial(_is_over, forecast.time.timestamp()))

    def forget(self, uid: str) -> None:
        """A workload or a pod is gone."""
        self.resumed(uid)
        self._latest.pop(uid, None)
        for workload_uid in list(self._stalled):
            self._end(workload_uid, lambda item: item.pod.uid == uid)

    def _end(self, workload_uid: str, is_over: Callable[[_KnownStall], bool]) -> None:
        """Forgets the stalls of a gang that are over."""
        stalls = self._stalled.get(workload_uid, {})
        kept = {about_pod: stall for about_pod, stall in stalls.items() if not is_over(stall)}
        if len(kept) < len(stalls):
            workload = next(iter(stalls.values())).workload
            self._stalled[workload_uid] = kept
            if not kept:
                del self._stalled[workload_uid]
            self._show(workload)

    def _show(self, workload: Workload) -> None:
        self._metrics.stalled.set(len(self._stalled))
        self._metrics.stalled_pods.clear()
        for stalls in self._stalled.values():
            stalled = next(iter(stalls.values())).workload
            stages: dict[str, str] = {}
            for item in _shown(stalls):
                for pod in item.pods:
                    stages.setdefault(pod[:_POD_CHARACTERS], preemption_status.stall_stage(item.stall))
            for pod in list(stages)[:_SHOWN]:
                self._metrics.stalled_pods.labels(stalled.namespace, stalled.name, pod, stages[pod]).set(1)
        key = (workload.namespace, workload.policy)
        sentences: dict[str, str] = {}
        for stalls in self._stalled.values():
            stalled = next(iter(stalls.values())).workload
            if (stalled.namespace, stalled.policy) == key:
                sentences[stalled.name] = _sentences(stalls)
        self._policy_writer.stalls(key, sentences)

    async def _write(self, key: Key) -> None:
        latest = self._latest.get(key[1])
        if latest is not None:
            await self._events.post_on(latest.workload, preemption_status.stall_note(latest.stall), f"{latest.at:.0f}")


def _is_over(progress_at: float, stall: _KnownStall) -> bool:
    return preemption_status.stall_is_over(stall.stall, stall.at, progress_at)


def _shown(stalls: Mapping[str, _KnownStall]) -> list[_KnownStall]:
    """The stalls of one gang that are shown, the gang's own first."""
    return [stalls[about_pod] for about_pod in sorted(stalls)[:_SHOWN]]


def _sentences(stalls: Mapping[str, _KnownStall]) -> str:
    more = len(stalls) - _SHOWN
    sentences = [preemption_status.stall_sentence(item.stall) for item in _shown(stalls)]
    return "; ".join([*sentences, f"and {more} more"] if more > 0 else sentences)


EVERY_S = 30.0
REASON_MISSING = "PolicyMissing"
REASON_FOUND = "PolicyFound"


class MissingPolicies:
    """Shows which workloads name a policy that does not exist: in Events on them, in the log and in a metric.

    One task on the controller's event loop looks twice a minute. A policy counts as missing if it is not there at two
    looks: GitOps tools replace objects by deleting and creating them, and the end of a namespace takes its policies
    along.

    Args:
        context: What all recorders share.
    """

    def __init__(self, context: RecorderContext) -> None:
        self._cache = context.cache
        self._metrics = context.metrics
        self._events = context.events
        self._uids: dict[Key, str] = {}  # policy -> its UID when it was last seen
        self._missing: dict[str, str] = {}  # UID of the workload -> the policy that it lacked at the last look
        self._announced: dict[str, str] = {}  # UID of the workload -> the policy that an Event calls missing

    async def look(self) -> None:
        """Looks once, and shows what has changed. To be called every ``EVERY_S``."""
        policies, workloads = self._cache.policies, self._cache.objects.workloads
        self._uids |= {key: policy.uid for key in policies if (policy := policies.get(key)) is not None}
        named = self._cache.objects.named_policies()
        self._uids = {key: uid for key, uid in self._uids.items() if key in policies or key in named}
        unreadable = self._cache.unreadable_policies()

        def is_there(workload: Workload) -> bool:
            key = (workload.namespace, workload.policy)
            return key in unreadable or policies.get(key) is not None

        lacking = {
            uid: workload.policy
            for uid, workload in workloads.items()
            if workload.policy and not (workload.finished or workload.deleted) and not is_there(workload)
        }
        missing = {uid for uid, policy in lacking.items() if self._missing.get(uid) == policy}
        self._missing = lacking
        self._metrics.workloads_without_policy.set(len(missing))
        for uid in missing:
            if self._announced.get(uid) != workloads[uid].policy:
                self._announced[uid] = workloads[uid].policy
                await self._announce_missing(workloads[uid])
        for uid in list(self._announced):
            workload = workloads.get(uid)
            if workload is None or is_there(workload):
                del self._announced[uid]
                if workload is not None and not (workload.finished or workload.deleted):
                    await self._announce_found(workload)

    async def _announce_missing(self, workload: Workload) -> None:
        logger.warning(
            "a workload names a policy that does not exist",
            extra=about(workload=f"{workload.namespace}/{workload.name}", policy=workload.policy),
        )
        if self._cache.policy_of(workload) is not None:
            consequence = "The settings that it was created with still apply"
        else:
            consequence = (
                "It was created without the settings that would still apply, so no disruption is announced to it"
            )
        note = Note(
            REASON_MISSING,
            f"the CheckpointPolicy {workload.policy} does not exist. {consequence}; new workloads that name it are "
            "refused. Create it again, or correct the label",
            warning=True,
        )
        await self._events.post_on(workload, note, self._episode(workload))

    async def _announce_found(self, workload: Workload) -> None:
        note = Note(REASON_FOUND, f"the CheckpointPolicy {workload.policy} exists again, and applies")
        await self._events.post_on(workload, note, self._episode(workload))

    def _episode(self, workload: Workload) -> str:
        """The same in all replicas that have seen the policy: which one of that name is missing, or is there again."""
        return f"{workload.policy} {self._uids.get((workload.namespace, workload.policy), '')}"
