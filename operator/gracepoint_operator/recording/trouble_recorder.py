"""Records what goes wrong while training goes on: saves and deletions that fail. In conditions, Events and metrics.

``take``, ``resumed``, ``follow`` and ``forget`` are called on the controller's event loop and do not wait. The Events
are posted by tasks of a write queue, which ``close`` ends. Each replica knows of what it was told, and the one that was
told last writes the condition. If the other one was told of the end, the policy's condition says so (``follow``). A
gang that still has trouble says so again with each failure.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

from gracepoint.wire.messages import Stall, Trouble, TroubleKind
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions import policy_conditions, preemption_status
from gracepoint_operator.decisions.preemption_status import Note
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.policy_writer import PolicyWriter
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.workloads import Workload

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _KnownTrouble:
    workload: Workload
    trouble: Trouble
    since: float  # when the first word of it came
    at: float


class TroubleRecorder:
    """Records saves and deletions that fail: in conditions, Events and metrics.

    Args:
        cache: What is known of the cluster.
        policy_writer: Writes the conditions.
        events: Posts Events.
        metrics: Counts troubles.
        clock: Seconds since the epoch.
        interval_s: Seconds between two Events of one workload.
    """

    def __init__(
        self,
        cache: ClusterCache,
        policy_writer: PolicyWriter,
        events: EventRecorder,
        metrics: Metrics,
        clock: Callable[[], float],
        interval_s: float,
    ) -> None:
        self._cache = cache
        self._policy_writer = policy_writer
        self._metrics = metrics
        for kind in TroubleKind:  # from 0 on, so that increase() sees the first one
            metrics.troubles.labels(kind)
        self._clock = clock
        self._events = events
        self._troubles: dict[
            tuple[str, TroubleKind], _KnownTrouble
        ] = {}  # (UID of the workload, kind) -> the newest word
        self._unposted: dict[str, dict[TroubleKind, _KnownTrouble]] = {}  # UID of the workload -> what is to be posted
        self._write_queue = WriteQueue("trouble", self._write, metrics, interval_s)

    def take(self, pod: Pod, trouble: Trouble) -> None:
        """Takes what a gang says. A kind that only a later version knows is logged."""
        workload = self._cache.objects.workloads.get(trouble.workload_uid)
        log.warning(
            "a gang has trouble" if not trouble.over else "a gang's trouble is over",
            extra=about(pod=pod.name, trouble=trouble.kind, said=trouble.message),
        )
        if workload is None or trouble.kind not in set(TroubleKind):
            return
        kind, now = TroubleKind(trouble.kind), self._clock()
        known = self._troubles.pop((workload.uid, kind), None)
        told = _KnownTrouble(workload, trouble, now if known is None else known.since, now)
        if not trouble.over:
            self._troubles[workload.uid, kind] = told
        if known is None and not trouble.over:
            self._metrics.troubles.labels(kind).inc()
        if known is None or trouble.over:
            self._unposted.setdefault(workload.uid, {})[kind] = told
            self._write_queue.touch((workload.namespace, workload.uid))
        self._tell_policy(workload, kind)

    def resumed(self, workload_uid: str) -> None:
        """The gang has started again: if it still has trouble, it will say so."""
        workload = self._cache.objects.workloads.get(workload_uid)
        for kind in TroubleKind:
            self._end(workload_uid, kind)
            policy = None if workload is None else self._cache.policies.get((workload.namespace, workload.policy))
            if (
                workload is not None
                and policy is not None
                and (said := policy_conditions.said(policy, kind))
                and said[0]
            ):
                self._tell_policy(workload, kind)  # the replica that knew of it may be gone

    def follow(self, policy: CheckpointPolicy) -> None:
        """Takes from a policy's status what the other replica heard the end of."""
        for kind in TroubleKind:
            said = policy_conditions.said(policy, kind)
            for (uid, of), told in list(self._troubles.items()):
                key = (told.workload.namespace, told.workload.policy)
                is_over = said is not None and not said[0] and said[1] > told.at
                if of is kind and key == (policy.namespace, policy.name) and is_over:
                    self._end(uid, kind)

    def forget(self, uid: str) -> None:
        """A workload is gone."""
        self._unposted.pop(uid, None)
        for kind in TroubleKind:
            self._end(uid, kind)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    def _end(self, workload_uid: str, kind: TroubleKind) -> None:
        told = self._troubles.pop((workload_uid, kind), None)
        if told is not None:
            self._tell_policy(told.workload, kind)

    def _tell_policy(self, workload: Workload, kind: TroubleKind) -> None:
        of_kind = [told for (_, of), told in self._troubles.items() if of is kind]
        self._metrics.troubled.labels(kind).set(len(of_kind))
        key = (workload.namespace, workload.policy)
        mine = [told for told in of_kind if (told.workload.namespace, told.workload.policy) == key]
        self._policy_writer.troubles(
            key, kind, {told.workload.name: policy_conditions.in_words(told.trouble) for told in mine}
        )

    async def _write(self, key: Key) -> None:
        for told in self._unposted.pop(key[1], {}).values():
            await self._events.post_on(told.workload, policy_conditions.trouble_note(told.trouble), f"{told.since:.0f}")


#: At most this number of stalls of one gang is shown, because storage that hangs can stop the trainers of all pods. At
#: most this number of characters of a pod's name is shown, because a pod may say anything.
_SHOWN, _POD_CHARACTERS = 10, 253


@dataclasses.dataclass(frozen=True)
class _Told:
    workload: Workload
    pod: Pod  # that said so
    stall: Stall
    at: float

    @property
    def pods(self) -> list[str]:
        """Names of the pods that hold up the others. A process that looks at one pod from outside tells of it alone."""
        return [self.pod.name] if self.stall.beside else self.stall.pods or []


class StallRecorder:
    """Records gangs that make no progress: in the policy's condition, in an Event on the workload, and in metrics.

    ``take`` and ``resumed`` are called on the controller's event loop by the handler of messages, and do not wait. The
    Events are posted by tasks of a write queue. Each replica knows of the stalls that it was told of; the one that was
    told last writes the condition. ``close`` ends the queue.

    A gang tells of its stall once. A process beside a trainer, which looks at it from outside, tells of that pod alone.
    What both say is shown together, the gang's word first. A stall is over when its pod says so, the gang has started
    again, or the pod is gone. The other replica may have heard the first two. So a stall is also over when the policy's
    status has a newer forecast of the gang, which any replica may have written: only a training thread that goes on
    sends one, after each save.

    Args:
        cache: What is known of the cluster.
        policy_writer: Writes the condition.
        events: Posts Events.
        metrics: Counts stalls.
        clock: Seconds since the epoch.
        interval_s: Seconds between two Events of one workload.
    """

    def __init__(
        self,
        cache: ClusterCache,
        policy_writer: PolicyWriter,
        events: EventRecorder,
        metrics: Metrics,
        clock: Callable[[], float],
        interval_s: float,
    ) -> None:
        self._cache = cache
        self._policy_writer = policy_writer
        self._metrics = metrics
        self._clock = clock
        self._events = events
        # UID of the workload -> UID of the pod that is looked at, empty for the gang -> its stall.
        self._stalled: dict[str, dict[str, _Told]] = {}
        self._latest: dict[str, _Told] = {}  # UID of the workload -> what is to be posted
        self._write_queue = WriteQueue("stall", self._write, metrics, interval_s)

    def take(self, pod: Pod, stall: Stall) -> str | None:
        """Takes what a gang says of a stall. Returns what is known of all its stalls, in words. None: none goes on."""
        workload = self._cache.objects.workloads.get(stall.workload_uid)
        if workload is None:
            return None if stall.over else preemption_status.in_words(stall)
        log.warning(
            "a gang makes no progress" if not stall.over else "a gang makes progress again",
            extra=about(pod=pod.name, stage=stall.stage, suspects=stall.suspects, said=stall.message),
        )
        told = _Told(workload, pod, stall, self._clock())
        about_pod = pod.uid if stall.beside else ""
        stalls = self._stalled.setdefault(workload.uid, {})
        if stall.over:
            stalls.pop(about_pod, None)
        else:
            if not stalls:
                self._metrics.stalls.inc()
            stalls[about_pod] = told
        if not stalls:
            del self._stalled[workload.uid]
        self._latest[workload.uid] = told
        self._write_queue.touch((workload.namespace, workload.uid))
        self._tell_policy(workload)
        return _in_words(stalls) if stalls else None

    def resumed(self, workload_uid: str) -> None:
        """The gang has started again: it is not stalled any more."""
        stalls = self._stalled.pop(workload_uid, None)
        if stalls is not None:
            self._tell_policy(next(iter(stalls.values())).workload)

    def follow(self, policy: CheckpointPolicy) -> None:
        """Takes from a policy's status which gangs make progress again."""
        for forecast in policy.status.forecasts or ():
            self._end(forecast.uid, functools.partial(_is_over, forecast.time.timestamp()))

    def forget(self, uid: str) -> None:
        """A workload or a pod is gone."""
        self.resumed(uid)
        self._latest.pop(uid, None)
        for workload_uid in list(self._stalled):
            self._end(workload_uid, lambda told: told.pod.uid == uid)

    def _end(self, workload_uid: str, is_over: Callable[[_Told], bool]) -> None:
        """Forgets the stalls of a gang that are over."""
        stalls = self._stalled.get(workload_uid, {})
        kept = {about_pod: told for about_pod, told in stalls.items() if not is_over(told)}
        if len(kept) < len(stalls):
            workload = next(iter(stalls.values())).workload
            self._stalled[workload_uid] = kept
            if not kept:
                del self._stalled[workload_uid]
            self._tell_policy(workload)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    def _tell_policy(self, workload: Workload) -> None:
        self._metrics.stalled.set(len(self._stalled))
        self._metrics.stalled_pods.clear()
        for stalls in self._stalled.values():
            of = next(iter(stalls.values())).workload
            stages: dict[str, str] = {}
            for told in _shown(stalls):
                for pod in told.pods:
                    stages.setdefault(pod[:_POD_CHARACTERS], preemption_status.stage_of(told.stall))
            for pod in list(stages)[:_SHOWN]:
                self._metrics.stalled_pods.labels(of.namespace, of.name, pod, stages[pod]).set(1)
        key = (workload.namespace, workload.policy)
        of_policy: dict[str, str] = {}
        for stalls in self._stalled.values():
            of = next(iter(stalls.values())).workload
            if (of.namespace, of.policy) == key:
                of_policy[of.name] = _in_words(stalls)
        self._policy_writer.stalls(key, of_policy)

    async def _write(self, key: Key) -> None:
        told = self._latest.get(key[1])
        if told is not None:
            await self._events.post_on(told.workload, preemption_status.note(told.stall), f"{told.at:.0f}")


def _is_over(progress_at: float, told: _Told) -> bool:
    return preemption_status.is_over(told.stall, told.at, progress_at)


def _shown(stalls: Mapping[str, _Told]) -> list[_Told]:
    """The stalls of one gang that are shown, the gang's own first."""
    return [stalls[about_pod] for about_pod in sorted(stalls)[:_SHOWN]]


def _in_words(stalls: Mapping[str, _Told]) -> str:
    more = len(stalls) - _SHOWN
    said = [preemption_status.in_words(told.stall) for told in _shown(stalls)]
    return "; ".join([*said, f"and {more} more"] if more > 0 else said)


EVERY_S = 30.0
REASON_MISSING = "PolicyMissing"
REASON_FOUND = "PolicyFound"


class MissingPolicies:
    """Says which workloads name a policy that does not exist: in Events on them, in the log and in a metric.

    One task on the controller's event loop looks twice a minute. A policy counts as missing if it is not there at two
    looks: GitOps tools replace objects by deleting and creating them, and the end of a namespace takes its policies
    along.

    Args:
        cache: What is known of the cluster.
        events: Posts Events.
        metrics: Shows how many workloads are concerned.
    """

    def __init__(self, cache: ClusterCache, events: EventRecorder, metrics: Metrics) -> None:
        self._cache = cache
        self._metrics = metrics
        self._events = events
        self._uids: dict[Key, str] = {}  # policy -> its UID when it was last seen
        self._missing: dict[str, str] = {}  # UID of the workload -> the policy that it lacked at the last look
        self._told: dict[str, str] = {}  # UID of the workload -> the policy of which an Event says that it is missing

    async def look(self) -> None:
        """Looks once, and says what has changed. To be called every ``EVERY_S``."""
        known, workloads = self._cache.policies, self._cache.objects.workloads
        self._uids |= {key: policy.uid for key in known if (policy := known.get(key)) is not None}
        named = self._cache.objects.named_policies()
        self._uids = {key: uid for key, uid in self._uids.items() if key in known or key in named}
        unreadable = self._cache.unreadable_policies()

        def is_there(workload: Workload) -> bool:
            key = (workload.namespace, workload.policy)
            return key in unreadable or known.get(key) is not None

        lacking = {
            uid: workload.policy
            for uid, workload in workloads.items()
            if workload.policy and not (workload.finished or workload.deleted) and not is_there(workload)
        }
        missing = {uid for uid, policy in lacking.items() if self._missing.get(uid) == policy}
        self._missing = lacking
        self._metrics.workloads_without_policy.set(len(missing))
        for uid in missing:
            if self._told.get(uid) != workloads[uid].policy:
                self._told[uid] = workloads[uid].policy
                await self._say_missing(workloads[uid])
        for uid in list(self._told):
            workload = workloads.get(uid)
            if workload is None or is_there(workload):
                del self._told[uid]
                if workload is not None and not (workload.finished or workload.deleted):
                    await self._say_found(workload)

    async def _say_missing(self, workload: Workload) -> None:
        log.warning(
            "a workload names a policy that does not exist",
            extra=about(workload=f"{workload.namespace}/{workload.name}", policy=workload.policy),
        )
        if self._cache.policy_of(workload) is not None:
            said = "The settings that it was created with go on to apply"
        else:
            said = "It was created without the settings that would go on to apply, so no disruption is announced to it"
        note = Note(
            REASON_MISSING,
            f"the CheckpointPolicy {workload.policy} does not exist. {said}; new workloads that name it are refused. "
            "Create it again, or correct the label",
            warning=True,
        )
        await self._events.post_on(workload, note, self._episode(workload))

    async def _say_found(self, workload: Workload) -> None:
        note = Note(REASON_FOUND, f"the CheckpointPolicy {workload.policy} exists again, and applies")
        await self._events.post_on(workload, note, self._episode(workload))

    def _episode(self, workload: Workload) -> str:
        """The same in all replicas that have seen the policy: which one of that name is missing, or is there again."""
        return f"{workload.policy} {self._uids.get((workload.namespace, workload.policy), '')}"
