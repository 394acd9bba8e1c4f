"""Records gangs that make no progress: in the policy's condition, in an Event on the workload, and in metrics.

``take`` and ``resumed`` are called on the controller's event loop by the handler of messages, and do not wait. The
Events are posted by tasks of a write queue. Each replica knows of the stalls that it was told of; the one that was told
last writes the condition. ``close`` ends the queue.

A gang tells of its stall once. A process beside a trainer, which looks at it from outside, tells of that pod alone.
What both say is shown together, the gang's word first. A stall is over when its pod says so, the gang has started
again, or the pod is gone. The other replica may have heard the first two. So a stall is also over when the policy's
status has a newer forecast of the gang, which any replica may have written: only a training thread that goes on sends
one, after each save.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

from gracepoint.wire.messages import Stall
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions.statuses import progress
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.policies.policy_writer import PolicyWriter
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.workloads import Workload

log = logging.getLogger(__name__)

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
    """See the module.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        policy_writer: Writes the condition.
        metrics: Counts stalls.
        clock: Seconds since the epoch.
        replica: This replica's name.
        interval_s: Seconds between two Events of one workload.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        policy_writer: PolicyWriter,
        metrics: Metrics,
        clock: Callable[[], float],
        replica: str,
        interval_s: float,
    ) -> None:
        self._cache = cache
        self._policy_writer = policy_writer
        self._metrics = metrics
        self._clock = clock
        self._events = EventRecorder(api, clock, replica)
        # UID of the workload -> UID of the pod that is looked at, empty for the gang -> its stall.
        self._stalled: dict[str, dict[str, _Told]] = {}
        self._latest: dict[str, _Told] = {}  # UID of the workload -> what is to be posted
        self._write_queue = WriteQueue("stall", self._write, metrics, interval_s)

    def take(self, pod: Pod, stall: Stall) -> str | None:
        """Takes what a gang says of a stall. Returns what is known of all its stalls, in words. None: none goes on."""
        workload = self._cache.objects.workloads.get(stall.workload_uid)
        if workload is None:
            return None if stall.over else progress.in_words(stall)
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
                    stages.setdefault(pod[:_POD_CHARACTERS], progress.stage_of(told.stall))
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
            await self._events.post_on(told.workload, progress.note(told.stall), f"{told.at:.0f}")


def _is_over(progress_at: float, told: _Told) -> bool:
    return progress.is_over(told.stall, told.at, progress_at)


def _shown(stalls: Mapping[str, _Told]) -> list[_Told]:
    """The stalls of one gang that are shown, the gang's own first."""
    return [stalls[about_pod] for about_pod in sorted(stalls)[:_SHOWN]]


def _in_words(stalls: Mapping[str, _Told]) -> str:
    more = len(stalls) - _SHOWN
    said = [progress.in_words(told.stall) for told in _shown(stalls)]
    return "; ".join([*said, f"and {more} more"] if more > 0 else said)
