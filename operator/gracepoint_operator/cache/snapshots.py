"""Puts together what the decisions about one workload are based on.

It only reads what the cache keeps, on the controller's event loop; there are no locks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set

from gracepoint_operator.cache.indexes.device_index import DeviceIndex
from gracepoint_operator.cache.indexes.eviction_index import EvictionIndex
from gracepoint_operator.cache.indexes.first_seen import FirstSeen
from gracepoint_operator.cache.indexes.gang_objects import GangObjects
from gracepoint_operator.cache.indexes.signal_index import SignalIndex
from gracepoint_operator.cache.pod_marks import marks_of_pods
from gracepoint_operator.cache.policy_store import PolicyStore
from gracepoint_operator.cache.preemption_store import PreemptionStore
from gracepoint_operator.cache.resource_versions import ResourceVersions
from gracepoint_operator.cache.suspensions import Suspensions
from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.kept_policies import kept_policy
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.workloads import Workload


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """See the module.

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
    evictions: EvictionIndex
    devices: DeviceIndex
    versions: ResourceVersions
    suspensions: Suspensions
    place: Callable[[str], tuple[Kind, str, str] | None]
    checked: Set[str]
    doomed: Set[str]

    def policy_of(self, workload: Workload) -> CheckpointPolicy | None:
        """Returns the policy that applies to a workload: if its own is not known, the one that it was created with."""
        found = self.policies.get((workload.namespace, workload.policy))
        if found is not None:
            return found
        kept = kept_policy(workload, list(self.preemptions.epochs_of(workload.uid, workload.namespace)))
        return None if kept is None else self.policies.limited(kept)

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
        for pod_uid, found in of_devices.of_pods.items():
            marks[pod_uid] = (*marks.get(pod_uid, ()), *found)
        marked = {workload_uid, *(request.uid for request in requests)} | {job.uid for job in jobs.values()}
        marked |= {node.uid for node in nodes.values()} & self.signal_index.marked
        marked.update(pod.uid for pod in pods)
        # By the node names in the pods, because a NodeClaim outlives its node.
        marked |= self.signal_index.attached_to([*queued_as, *{pod.node for pod in pods}])
        asked = self.evictions.of(pods)
        marked.update(eviction.uid for eviction in asked.values())
        since = self.first_seen.since(marked | of_devices.sources)
        return GangSnapshot(
            workload_uid=workload_uid,
            workload=workload,
            workload_gone=workload is None and self.preemptions.is_gone(workload_uid),
            jobs=jobs,
            pods=pods,
            nodes=nodes,
            policy=None if workload is None else self.policy_of(workload),
            longest_hold_s=None if namespace is None else self.policies.hold_limit(namespace).seconds,
            epochs=tuple(self.preemptions.epochs_of(workload_uid, namespace)),
            requests=requests,
            marks=marks,
            since=since,
            bound_at=self.first_seen.bound_at(pod.uid for pod in pods),
            checked=frozenset(uid for uid in self.checked if objects.pods[uid].workload_uid == workload_uid),
            evictions=asked,
            unexplained=self.suspensions.unexplained(workload_uid, since),
        )
