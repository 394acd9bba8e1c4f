"""What the operator writes to pods: annotations that protect them, and the end of those that sidecars keep running.

Everything runs on the controller's event loop, as tasks of a write queue.

``PodProtector`` protects pods from autoscalers while the newest checkpoint of their gang is too old
(``voluntaryDisruption``). ``protect`` is called with each gang that is decided about. It decides by what the policy's
status says, so both replicas decide the same. A pod is written only if its annotations have to change:

* when a gang starts, at most twice for each pod: to protect it once a process reports its times, and to end that once
  the state is restored. If the first report comes after the restore, nothing is written;
* twice for each checkpoint that comes late. While checkpoints come in time, nothing is written.

Both replicas may write the same. Each takes the pods of a gang in a random order, and leaves out those on which the
watch shows the other replica's annotations by then. At most ``_AT_ONCE`` writes are in progress: those of a large gang
must not take all threads of ``KubeClient``, which others need without delay.

``SidecarEnder`` deletes pods that only sidecars keep running, if the policy wants it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.goodput import accounts
from gracepoint_operator.goodput.pods_seen import Exposure, exposure
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import HeldUp, Pod, changes
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.workloads import Workload

_AT_ONCE = 2
_chance = random.Random()


class PodProtector:
    """Protects pods from autoscalers while the newest checkpoint is old.

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
        self._protected: dict[str, bool] = {}  # the workload's UID -> whether its pods are to be protected
        self._written: dict[str, tuple[Pod, bool]] = {}  # the pod's UID -> the pod as it was, and what was written
        self._turns = asyncio.Semaphore(_AT_ONCE)  # first come, first served
        self._write_queue = WriteQueue("protection of a pod", self._write, metrics, interval_s)

    def protect(self, gang: GangSnapshot) -> float | None:
        """Sets or clears the annotations of a gang's pods soon. Returns when to call again even if nothing changes."""
        if not self._allowed or gang.workload is None or self._is_undecidable(gang.workload):
            return None
        needed = self._exposure(gang)
        self._protected[gang.workload_uid] = needed.protect
        stale = [pod for pod in gang.members if not pod.finished and pod.deletion_at is None and self._changes(pod)]
        _chance.shuffle(stale)
        for pod in stale:
            self._write_queue.touch((pod.namespace, pod.name))
        return None if needed.until_ms is None else needed.until_ms / 1000

    def forget(self, uid: str) -> None:
        """Forgets a workload or a pod."""
        self._protected.pop(uid, None)
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
        life = None if entry is None else accounts.read(entry).current
        return exposure(life, younger_than_s * 1000, round(self._clock() * 1000))

    def _changes(self, pod: Pod) -> dict[str, str | None]:
        protect = self._protected.get(pod.workload_uid, False)
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
            protect = self._protected.get(pod.workload_uid, False)
            # The UID, because a pod of this name may be another one by now.
            body: JsonObject = {"metadata": {"uid": pod.uid, "annotations": annotations}}
            try:
                await self._api.merge(objects.PODS, pod.namespace, pod.name, body)
            except client.NotFound:
                return
        if pod.uid in self._cache.objects.pods:  # else nobody would forget it
            self._written[pod.uid] = (pod, protect)


class SidecarEnder:
    """Deletes pods whose training has left while another container keeps them running (``sidecars.endWithTraining``).

    Such a pod ends only when all its containers have ended, and so the gang does not come back elsewhere. ``look`` is
    called with each gang that is decided about. Both replicas may delete the same pod; the second finds it deleted.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        metrics: Counts failures.
        interval_s: Seconds between two attempts for one pod.
        allowed: Whether the operator has the right to delete pods. Without it, nothing is deleted.
    """

    def __init__(
        self, api: KubeClient, cache: ClusterCache, metrics: Metrics, interval_s: float, *, allowed: bool
    ) -> None:
        self._api = api
        self._cache = cache
        self._allowed = allowed
        self._write_queue = WriteQueue("end of a sidecar", self._delete, metrics, interval_s)

    def look(self, gang: GangSnapshot) -> None:
        """Deletes the pods of a gang soon that only sidecars keep running."""
        policy = gang.policy
        if not self._allowed or policy is None or not policy.spec.sidecars.end_with_training:
            return
        for pod in kept_by_sidecars(gang.processes, policy.spec):
            self._write_queue.touch((pod.namespace, pod.name))

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    async def _delete(self, key: Key) -> None:
        pod = self._cache.objects.pod_named(*key)
        if pod is None or pod.deletion_at is not None or pod.holdup is None or pod.holdup.at is not HeldUp.SIDECAR:
            return
        body: JsonObject = {"metadata": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid}}
        with contextlib.suppress(client.NotFound, client.Conflict):
            await self._api.delete(objects.PODS, body)


def kept_by_sidecars(processes: Sequence[Pod], policy: CheckpointPolicySpec) -> list[Pod]:
    """Returns the pods of a gang that are to be deleted because only sidecars run in them.

    After a save these are all, once every process has left: until then some may report, or write. A process that did
    not get into the job is replaced alone.
    """
    leaving_codes, not_joined_code = frozenset(policy.after_save.exit_codes), policy.not_joined_exit_code
    codes = {pod.uid: pod.holdup.exit_code for pod in processes if pod.holdup and pod.holdup.at is HeldUp.SIDECAR}
    all_left = all(pod.finished or codes.get(pod.uid) in leaving_codes for pod in processes)
    return [
        pod
        for pod in processes
        if pod.deletion_at is None
        and (codes.get(pod.uid) == not_joined_code or (all_left and codes.get(pod.uid) in leaving_codes))
    ]
