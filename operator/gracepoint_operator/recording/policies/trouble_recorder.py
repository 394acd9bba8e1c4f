"""Records what goes wrong while training goes on: saves and deletions that fail. In conditions, Events and metrics.

``take``, ``resumed``, ``follow`` and ``forget`` are called on the controller's event loop and do not wait. The Events
are posted by tasks of a write queue, which ``close`` ends. Each replica knows of what it was told, and the one that was
told last writes the condition. If the other one was told of the end, the policy's condition says so (``follow``). A
gang that still has trouble says so again with each failure.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from gracepoint.wire.messages import Trouble, TroubleKind
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions.statuses import troubles
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


@dataclasses.dataclass(frozen=True)
class _KnownTrouble:
    workload: Workload
    trouble: Trouble
    since: float  # when the first word of it came
    at: float


class TroubleRecorder:
    """See the module.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        policy_writer: Writes the conditions.
        metrics: Counts troubles.
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
        for kind in TroubleKind:  # from 0 on, so that increase() sees the first one
            metrics.troubles.labels(kind)
        self._clock = clock
        self._events = EventRecorder(api, clock, replica)
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
            if workload is not None and policy is not None and (said := troubles.said(policy, kind)) and said[0]:
                self._tell_policy(workload, kind)  # the replica that knew of it may be gone

    def follow(self, policy: CheckpointPolicy) -> None:
        """Takes from a policy's status what the other replica heard the end of."""
        for kind in TroubleKind:
            said = troubles.said(policy, kind)
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
        self._policy_writer.troubles(key, kind, {told.workload.name: troubles.in_words(told.trouble) for told in mine})

    async def _write(self, key: Key) -> None:
        for told in self._unposted.pop(key[1], {}).values():
            await self._events.post_on(told.workload, troubles.note(told.trouble), f"{told.since:.0f}")
