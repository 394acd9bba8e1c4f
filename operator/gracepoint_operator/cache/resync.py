"""Looking at the API instead of waiting for its watches: at start, now and then, and where order matters.

* ``sweep`` lists everything. At start it tells when this replica knows the cluster; later it finds what was
  deleted while a watch had lost its place, which no watch ever announces.
* ``look_afresh`` reads one JobSet, its namespace and some Jobs. A watch shows the past, and watches of different
  kinds show different pasts; a read that begins after an event sees whatever caused that event.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from gracepoint.wire import names
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.objects import Named
from gracepoint_operator.unreadable import Unreadable

#: What is watched, each with the label that its objects must have. Preemptions come before what they explain.
SELECTORS: dict[kinds.Kind, str | None] = {
    kinds.PREEMPTIONS: None,
    kinds.POLICIES: None,
    kinds.JOBSETS: names.LABEL_POLICY,
    kinds.JOBS: names.JOBSET_LABEL_UID,
    kinds.NODES: None,
    kinds.NODE_CLAIMS: None,
    kinds.KUEUE_WORKLOADS: None,
    kinds.PODS: names.JOBSET_LABEL_UID,
}


async def sweep(api: KubeClient, world: ClusterCache, drop: Callable[[str], object]) -> None:
    """Lists all kinds into ``world``. A kind that the cluster does not have yet has no objects.

    Args:
        api: The API server.
        world: Gets what is there.
        drop: Called with the UID of each object that is not there any more.

    Raises:
        kube.KubeError: The API server cannot be asked.
    """
    for kind, selector in SELECTORS.items():
        before = world.uids(kind)
        try:
            bodies = await api.list(kind, label_selector=selector)
        except client.NotFound:
            bodies = []
        for uid in before - {body["metadata"]["uid"] for body in bodies}:
            drop(uid)
        for body in bodies:
            put(world, kind, body, listed=True)


def put(world: ClusterCache, kind: kinds.Kind, body: client.JsonObject, *, listed: bool) -> set[str]:
    """``World.put``, for objects of whatever version: one that cannot be read is left out."""
    try:
        return world.put(kind, body, listed=listed)
    except Unreadable:
        return set()  # the world says it and counts it


async def look_afresh(
    api: KubeClient, world: ClusterCache, workload: Named, jobs: Iterable[str], pod_uids: Iterable[str] = ()
) -> None:
    """Reads the JobSet and these of its Jobs into ``world``, and notes the deleted pods as checked.

    A JobSet that lost the label by which it is watched is known again then, until the next sweep.

    The namespace too: one that is being deleted takes its pods, Jobs and JobSets with it in any order, but says so
    before the first of them goes.

    Raises:
        kube.KubeError: The API server cannot be asked; nothing was noted then.
    """
    try:
        body = await api.get(kinds.JOBSETS, workload.namespace, workload.name)
        with contextlib.suppress(Unreadable):  # it is there; what was known of it stays
            world.put(kinds.JOBSETS, body, listed=True, fresh=True)
        is_there = body["metadata"]["uid"] == workload.uid and world.why_unreadable(workload.uid) is not None
        gone = [] if is_there or workload.uid in world.workloads else [workload.uid]
    except client.NotFound:
        gone = [workload.uid]
    for name in jobs:
        known = [job.uid for job in world.jobs.values() if (job.namespace, job.name) == (workload.namespace, name)]
        try:
            body = await api.get(kinds.JOBS, workload.namespace, name)
            put(world, kinds.JOBS, body, listed=True)
            gone += [uid for uid in known if uid != body["metadata"]["uid"]]
        except client.NotFound:
            gone += known
    for uid in gone:
        world.drop(uid)
    if workload.uid in gone:
        world.mark_gone(workload.uid)
    if await _namespace_goes(api, workload.namespace):
        world.doom(workload.uid)
    world.mark_checked(pod_uids)


async def _namespace_goes(api: KubeClient, name: str) -> bool:
    try:
        return "deletionTimestamp" in (await api.get(kinds.NAMESPACES, None, name))["metadata"]
    except client.NotFound:
        return True
