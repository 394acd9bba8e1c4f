"""Reads a workload and the objects around it again, to learn why its pods were deleted or why it is suspended.

A watch shows a past state, and watches of different kinds show different ones. A read that begins after an event sees
whatever caused the event. The controller's event loop owns a ``WorkloadRefresh`` and runs its tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.logs import about
from gracepoint_operator.workloads import BY_NAME, WorkloadIdentity

logger = logging.getLogger(__name__)

_WITHIN_S = 2.0
_BACKOFF = client.RetryPauses(0.25, 0.5)


class WorkloadRefresh:
    """The workloads that are being read again, one task for each.

    A task ends with the API server's answer, or after a bounded time.

    Args:
        api: The API server.
        cache: Stores what is read.
        decide: Called with the workload's UID once it was read, or could not be.
    """

    def __init__(self, api: KubeClient, cache: ClusterCache, decide: Callable[[str], None]) -> None:
        self._api = api
        self._cache = cache
        self._decide = decide
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the workload's UID

    def begin(self, workload: WorkloadIdentity, jobs: Iterable[str], pod_uids: Iterable[str]) -> None:
        """Begins to read the workload, unless that is in progress. The pods are those that were deleted."""
        uid = workload.uid
        if uid not in self._tasks:
            self._tasks[uid] = asyncio.create_task(self._refresh(workload, jobs, pod_uids), name=f"check {uid}")

    def cancel(self) -> None:
        """Cancels all tasks."""
        for task in list(self._tasks.values()):
            task.cancel()

    async def _refresh(self, workload: WorkloadIdentity, jobs: Iterable[str], pod_uids: Iterable[str]) -> None:
        """Asks the API server. If it does not answer in time, what is known counts: deleted pods are disrupted ones."""
        uid = workload.uid

        async def read() -> None:
            try:
                await refresh_workload(self._api, self._cache, workload, jobs, pod_uids)
            except client.KubeError as error:
                logger.warning(
                    "a workload could not be read again yet", extra=about(workload=workload.name, error=str(error))
                )
                raise

        try:
            async with asyncio.timeout(_WITHIN_S):
                await _BACKOFF.retried(read, on=client.KubeError)
        except TimeoutError:
            logger.warning(
                "a workload was not read again in time, its deleted pods count as disrupted",
                extra=about(workload=workload.name, waited_s=_WITHIN_S),
            )
            self._cache.mark_checked(pod_uids)
            self._cache.suspensions.explain(self._cache.suspensions.of(uid))
        finally:
            del self._tasks[workload.uid]
        self._decide(workload.uid)


async def refresh_workload(
    api: KubeClient, cache: ClusterCache, workload: WorkloadIdentity, jobs: Iterable[str], pod_uids: Iterable[str] = ()
) -> None:
    """Reads the workload, these of its Jobs and Kueue's Workload into ``cache``, and notes the deleted pods as checked.

    A workload that lost the label by which it is watched becomes known by this read, until the next sweep.

    The namespace is read too. When it is being deleted, its pods, Jobs and workloads are deleted in any order, but the
    namespace shows this before the first of them is deleted.

    Raises:
        kube.KubeError: A request to the API server failed. Then nothing was noted.
    """
    kind = BY_NAME[workload.kind].kind
    try:
        body = await api.get(kind, workload.namespace, workload.name)
        cache.put(kind, body, listed=True, fresh=True)
        is_there = body["metadata"]["uid"] == workload.uid and cache.unreadable_objects.why(workload.uid) is not None
        gone_uids = [] if is_there or workload.uid in cache.objects.workloads else [workload.uid]
    except client.NotFound:
        gone_uids = [workload.uid]
    for name in jobs if BY_NAME[workload.kind].makes_jobs else ():
        job_uids = [
            job.uid for job in cache.objects.jobs.values() if (job.namespace, job.name) == (workload.namespace, name)
        ]
        try:
            body = await api.get(objects.JOBS, workload.namespace, name)
            cache.put(objects.JOBS, body, listed=True)
            gone_uids += [uid for uid in job_uids if uid != body["metadata"]["uid"]]
        except client.NotFound:
            gone_uids += job_uids
    for uid in gone_uids:
        cache.drop(uid)
    if workload.uid in gone_uids:
        cache.preemptions.mark_gone(workload.uid)
    await _explain_suspensions(api, cache, workload.uid)
    if await _is_being_deleted(api, workload.namespace):
        cache.doom(workload.uid)
    cache.mark_checked(pod_uids)


async def _explain_suspensions(api: KubeClient, cache: ClusterCache, workload_uid: str) -> None:
    """Reads Kueue's Workload if the workload is suspended: Kueue says there who took the quota, before it suspends."""
    suspended = cache.suspensions.of(workload_uid)  # before the reads: a later suspension needs another read
    if not suspended:
        return
    try:
        kind = await api.preferred(objects.KUEUE_WORKLOADS)
        for namespace, name in cache.suspensions.queue_entries(workload_uid):
            cache.put(objects.KUEUE_WORKLOADS, await api.get(kind, namespace, name), listed=True, fresh=True)
    except (client.NotFound, client.Refused) as error:
        logger.warning("why a workload is suspended could not be read from Kueue", extra=about(error=str(error)))
    cache.suspensions.explain(suspended)


async def _is_being_deleted(api: KubeClient, name: str) -> bool:
    try:
        return "deletionTimestamp" in (await api.get(objects.NAMESPACES, None, name))["metadata"]
    except client.NotFound:
        return True
