"""Puts together what the decisions about one workload are based on.

It only reads what the cache keeps, on the controller's event loop; there are no locks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

from gracepoint_operator.cache.indexes import DeviceIndex, FirstSeen, GangObjects, ResourceVersions, SignalIndex
from gracepoint_operator.cache.resource_stores import Key, PolicyStore, PreemptionStore
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import Kind, Node, Pod
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import kept_policy
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.signals import Mark, is_suspension
from gracepoint_operator.workloads import Job, Workload

_Place = Callable[[str], tuple[Kind, str, str] | None]


def marks_of_pods(
    index: SignalIndex,
    place: _Place,
    queued_as: Sequence[str],
    pods: Sequence[Pod],
    nodes: Mapping[str, Node],
    jobs: Mapping[str, Job],
) -> dict[str, tuple[Mark, ...]]:
    """Returns the marks on everything that each pod depends on, by its UID. Pods without marks are left out.

    Args:
        index: The marks of all objects.
        place: Returns kind, namespace and name of the object with a UID.
        queued_as: UID of the workload, and of what controls it.
        pods: Its pods.
        nodes: Their nodes, by name.
        jobs: Their Jobs, by name.
    """
    marked = index.marked
    if queued_as[0] in marked or index.attached_to(queued_as):
        affected_pods = list(pods)
    else:
        marked_nodes = {name for name, node in nodes.items() if node.uid in marked}
        marked_nodes |= {name for name in {pod.node for pod in pods} if index.attached_to([name])}
        marked_jobs = {name for name, job in jobs.items() if job.uid in marked}
        affected_pods = [
            pod
            for pod in pods
            if pod.uid in marked or pod.node in marked_nodes or (marked_jobs and pod.job_name in marked_jobs)
        ]
    by_pod = {
        pod.uid: _concerning(index, place, queued_as, pod, nodes.get(pod.node), jobs.get(pod.job_name))
        for pod in affected_pods
    }
    return {uid: marks for uid, marks in by_pod.items() if marks}


def _concerning(
    index: SignalIndex, place: _Place, queued_as: Sequence[str], pod: Pod, node: Node | None, job: Job | None
) -> tuple[Mark, ...]:
    attached_uids = index.attached_to([pod.node, *queued_as])
    # Only objects in the pod's namespace or in none, because anybody may write any owner.
    attached_uids = {uid for uid in attached_uids if (where := place(uid)) is None or where[1] in ("", pod.namespace)}
    uids = [pod.uid, pod.workload_uid, *sorted(attached_uids)]
    uids += [] if node is None else [node.uid]
    uids += [] if job is None or job.uid == pod.workload_uid else [job.uid]
    return index.on(uids)


class Suspensions:
    """Which suspensions of workloads may have a reason that this replica does not know yet.

    Kueue says in its own Workload why it takes the quota back, and then suspends the job. Two watches bring that, in
    any order. So when a workload that Kueue manages is seen suspended, Kueue's Workload is read again
    (``WorkloadRefresh``). Until then the suspension is unexplained, and nothing is decided by it.

    The controller's event loop owns this; there are no locks.

    Args:
        objects: The known objects.
        index: The marks on them.
        first_seen: When each mark was first seen.
        place: Returns kind, namespace and name of the object with a UID.
    """

    def __init__(
        self,
        objects: GangObjects,
        index: SignalIndex,
        first_seen: FirstSeen,
        place: Callable[[str], tuple[kinds.Kind, str, str] | None],
    ) -> None:
        self._objects = objects
        self._index = index
        self._first_seen = first_seen
        self._place = place
        self._explained: dict[str, float] = {}  # mark -> since when it exists; a later time is another suspension

    def queue_entries(self, workload_uid: str) -> list[Key]:
        """Namespaces and names of Kueue's Workloads that belong to a workload."""
        workload = self._objects.workloads.get(workload_uid)
        if workload is None:
            return []
        places = [self._place(uid) for uid in sorted(self._index.attached_to(workload.queued_as))]
        entries = [place for place in places if place is not None and place[0] is kinds.KUEUE_WORKLOADS]
        return [(namespace, name) for _, namespace, name in entries if namespace == workload.namespace]

    def of(self, workload_uid: str) -> dict[str, float]:
        """The suspensions on a workload and its Jobs: when each mark was first seen, in seconds since the epoch."""
        uids = [workload_uid, *(job.uid for job in self._objects.jobs_of(workload_uid))]
        marks = {mark.id for mark in self._index.on(uids) if is_suspension(mark)}
        return {mark: at for mark, at in self._first_seen.since(uids).items() if mark in marks}

    def explain(self, marks: Mapping[str, float]) -> None:
        """Notes that Kueue's Workload was read after these suspensions, which ``of`` has returned."""
        self._explained.update(marks)

    def unexplained(self, workload_uid: str, since: Mapping[str, float]) -> frozenset[str]:
        """The suspensions after which Kueue's Workload was not read. Empty if Kueue does not manage the workload.

        Args:
            workload_uid: UID of the workload.
            since: When each mark that concerns the workload was first seen, in seconds since the epoch.
        """
        suspensions = self.of(workload_uid)
        if not suspensions or not self.queue_entries(workload_uid):
            return frozenset()
        return frozenset(mark for mark in suspensions if self._explained.get(mark) != since.get(mark))

    def forget(self, uid: str) -> None:
        """Forgets an object that was deleted."""
        for mark in [mark for mark in self._explained if mark.startswith(f"{uid}/")]:
            del self._explained[mark]


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """Puts together what the decisions about one workload are based on.

    Attributes:
        place: Returns kind, namespace and name of the object with a UID.
        checked: UIDs of deleted pods whose Job and workload were read again.
        doomed: UIDs of workloads whose namespace is being deleted.
    """

    objects: GangObjects
    policies: PolicyStore
    preemptions: PreemptionStore
    first_seen: FirstSeen
    signal_index: SignalIndex
    devices: DeviceIndex
    versions: ResourceVersions
    suspensions: Suspensions
    place: Callable[[str], tuple[Kind, str, str] | None]
    checked: Set[str]
    doomed: Set[str]

    def policy_of(self, workload: Workload) -> CheckpointPolicy | None:
        """Returns the policy that applies to a workload: if its own is not known, the one that it was created with."""
        policy = self.policies.get((workload.namespace, workload.policy))
        if policy is not None:
            return policy
        stored_policy = kept_policy(workload, list(self.preemptions.of_workload(workload.uid, workload.namespace)))
        return None if stored_policy is None else self.policies.limited(stored_policy)

    def of(self, workload_uid: str) -> GangSnapshot:
        """Returns everything that is known of a workload."""
        objects = self.objects
        workload = objects.workloads.get(workload_uid)
        namespace = workload.namespace if workload is not None else None
        if workload is not None and workload_uid in self.doomed:
            workload = dataclasses.replace(workload, deleted=True)
        pods = objects.pods_of(workload_uid, namespace)
        nodes = {name: objects.nodes[name] for name in {pod.node for pod in pods} if name in objects.nodes}
        # If a watch has missed the deletion of a Job, the one that was made in its place has the same name.
        by_age = sorted(objects.jobs_of(workload_uid), key=lambda job: self.versions.of(job.uid))
        jobs = {job.name: job for job in by_age if namespace in (None, job.namespace)}
        if workload is not None and workload.job is not None:
            jobs[workload.job.name] = workload.job
        requests = () if workload is None else self.preemptions.requests_for(workload)
        queued_as = (workload_uid,) if workload is None else workload.queued_as
        marks = marks_of_pods(self.signal_index, self.place, queued_as, pods, nodes, jobs)
        of_devices = self.devices.of(pods)
        for pod_uid, device_marks in of_devices.of_pods.items():
            marks[pod_uid] = (*marks.get(pod_uid, ()), *device_marks)
        uids = {workload_uid, *(request.uid for request in requests)} | {job.uid for job in jobs.values()}
        uids |= {node.uid for node in nodes.values()} & self.signal_index.marked
        uids.update(pod.uid for pod in pods)
        # By the node names in the pods, because a NodeClaim outlives its node.
        uids |= self.signal_index.attached_to([*queued_as, *{pod.node for pod in pods}])
        since = self.first_seen.since(uids | of_devices.sources)
        return GangSnapshot(
            workload_uid=workload_uid,
            workload=workload,
            workload_gone=workload is None and self.preemptions.is_gone(workload_uid),
            jobs=jobs,
            pods=pods,
            nodes=nodes,
            policy=None if workload is None else self.policy_of(workload),
            preemptions=tuple(self.preemptions.of_workload(workload_uid, namespace)),
            requests=requests,
            marks=marks,
            since=since,
            bound_at=self.first_seen.bound_at(pod.uid for pod in pods),
            checked=frozenset(uid for uid in self.checked if objects.pods[uid].workload_uid == workload_uid),
            unexplained=self.suspensions.unexplained(workload_uid, since),
        )


def undated_since(
    index: SignalIndex, objects: GangObjects, first_seen: FirstSeen, *, of_pods: bool
) -> dict[str, float]:
    """When marks were first seen. Only for marks whose time the API server does not give.

    Args:
        index: The marks of all objects.
        objects: The objects of the gangs.
        first_seen: When each mark was first seen.
        of_pods: Only for marks that concern a pod.
    """
    mark_ids = {mark.id for mark in index.on(index.marked) if not (mark.is_exact or mark.row.limit)}
    if not (mark_ids and of_pods):
        return {mark: at for mark, at in first_seen.since(index.marked).items() if mark in mark_ids}
    nodes, gangs = objects.nodes_with_pods(), objects.workloads_with_pods()
    about = {objects.nodes[name].uid for name in nodes & objects.nodes.keys()}
    about |= gangs | {job.uid for gang in gangs for job in objects.jobs_of(gang)}
    about |= index.attached_to([*nodes, *(uid for gang in gangs for uid in objects.workloads[gang].queued_as)])
    return {mark: at for mark, at in first_seen.since(about & index.marked).items() if mark in mark_ids}
