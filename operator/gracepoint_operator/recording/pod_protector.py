"""Protects pods from autoscalers while the newest checkpoint of their gang is too old (``voluntaryDisruption``).

Runs as tasks of a write queue on the controller's event loop. ``protect`` is called with each gang that is decided
about. It decides by what the policy's status says, so both replicas decide the same. A pod is written only if its
annotations have to change:

* when a gang starts, at most twice for each pod: to protect it once a process reports its times, and to end that once
  the state is restored. If the first report comes after the restore, nothing is written;
* twice for each checkpoint that comes late. While checkpoints come in time, nothing is written.

Both replicas may write the same. Each takes the pods of a gang in an order of its own, and leaves out those on which
the watch shows the other replica's annotations by then. At most ``_AT_ONCE`` writes are under way: those of a large
gang must not take all threads of ``KubeClient``, which others need without delay.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.goodput import status_codec
from gracepoint_operator.goodput.exposure import Exposure, exposure
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.autoscaler_annotations import changes
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.workloads import Workload

_AT_ONCE = 2
_chance = random.Random()


class PodProtector:
    """See the module.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        metrics: Counts failures.
        clock: Seconds since the epoch.
        interval_s: Seconds between two writes of one pod.
        allowed: Whether the operator has the right to annotate pods. Without it, nothing is written.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        metrics: Metrics,
        clock: Callable[[], float],
        interval_s: float,
        *,
        allowed: bool,
    ) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self._allowed = allowed
        self._wanted: dict[str, bool] = {}  # the workload's UID -> whether its pods are to be protected
        self._written: dict[str, tuple[Pod, bool]] = {}  # the pod's UID -> the pod as it was, and what was written
        self._turns = asyncio.Semaphore(_AT_ONCE)  # first come, first served
        self._write_queue = WriteQueue("protection of a pod", self._write, metrics, interval_s)

    def protect(self, gang: GangSnapshot) -> float | None:
        """Sets or clears the annotations of a gang's pods soon. Returns when to call again even if nothing changes."""
        if not self._allowed or gang.workload is None or self._is_undecidable(gang.workload):
            return None
        wanted = self._exposure(gang)
        self._wanted[gang.workload_uid] = wanted.protect
        stale = [pod for pod in gang.members if not pod.finished and pod.deletion_at is None and self._changes(pod)]
        _chance.shuffle(stale)
        for pod in stale:
            self._write_queue.touch((pod.namespace, pod.name))
        return None if wanted.until_ms is None else wanted.until_ms / 1000

    def forget(self, uid: str) -> None:
        """Forgets a workload or a pod."""
        self._wanted.pop(uid, None)
        self._written.pop(uid, None)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    def _is_undecidable(self, workload: Workload) -> bool:
        """True if the policy is not known, and so no account. Then the annotations stay as they are."""
        return (workload.namespace, workload.policy) not in self._cache.policies

    def _exposure(self, gang: GangSnapshot) -> Exposure:
        """Whether the pods are to be protected. Without the setting, what was set before is taken away."""
        policy = gang.policy
        younger_than_s = 0 if policy is None else policy.spec.voluntary_disruption.checkpoint_younger_than_seconds
        if policy is None or not younger_than_s:
            return Exposure(False)
        entry = next((entry for entry in policy.status.goodput or () if entry.uid == gang.workload_uid), None)
        life = None if entry is None else status_codec.read(entry).current
        return exposure(life, younger_than_s * 1000, round(self._clock() * 1000))

    def _changes(self, pod: Pod) -> dict[str, str | None]:
        protect = self._wanted.get(pod.workload_uid, False)
        before, written = self._written.get(pod.uid, (None, None))
        if before is not None and before.protection == pod.protection and written is protect:
            return {}  # the watch has not brought it yet
        return changes(dict(pod.protection), protect=protect)

    async def _write(self, key: Key) -> None:
        async with self._turns:
            # Read after the wait: meanwhile the gang may have saved, or the other replica may have written.
            pod = self._cache.objects.pod_named(*key)
            annotations = {} if pod is None else self._changes(pod)
            if pod is None or not annotations:
                return
            protect = self._wanted.get(pod.workload_uid, False)
            # The UID, because a pod of this name may be another one by now.
            body: JsonObject = {"metadata": {"uid": pod.uid, "annotations": annotations}}
            try:
                await self._api.merge(kinds.PODS, pod.namespace, pod.name, body)
            except client.NotFound:
                return
        if pod.uid in self._cache.objects.pods:  # else nobody would forget it
            self._written[pod.uid] = (pod, protect)
