"""The nodes, pods, Jobs and workloads that are known, indexed by node and by workload.

The controller's event loop owns it; there are no locks. Only ``ClusterCache`` changes it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Set

from gracepoint_operator.cache.preemption_store import Key, discard
from gracepoint_operator.kube.objects import Node, Pod
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.workloads import BY_NAME, Job, Workload


class GangObjects:
    """What the gangs consist of, and the nodes that they run on.

    Attributes:
        nodes: The nodes, by name.
        disrupted_nodes: Names of the nodes with a mark that disrupts. Kept up to date because each new pod needs it.
        pods: The pods of workloads, by UID.
        jobs: The Jobs of workloads, by UID.
        workloads: The workloads, by UID.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.disrupted_nodes: set[str] = set()
        self.pods: dict[str, Pod] = {}
        self.jobs: dict[str, Job] = {}
        self.workloads: dict[str, Workload] = {}
        self._pod_uids: dict[Key, str] = {}
        self._pods_on: dict[str, set[str]] = collections.defaultdict(set)
        self._pods_of: dict[str, set[str]] = collections.defaultdict(set)
        self._sorted: dict[str, tuple[Pod, ...]] = {}  # by workload, until one of its pods changes
        self._jobs_of: dict[str, set[str]] = collections.defaultdict(set)
        self._named: dict[Key, set[str]] = collections.defaultdict(set)  # namespace and name -> UIDs of workloads
        self._with_policy: dict[Key, set[str]] = collections.defaultdict(set)
        self._queued_as: dict[str, set[str]] = collections.defaultdict(set)  # UID of itself or its owner -> UIDs

    def put_node(self, node: Node, *, disrupted: bool) -> bool:
        """Stores a node. Returns whether it changed."""
        before = self.nodes.get(node.name)
        self.nodes[node.name] = node
        if disrupted:
            self.disrupted_nodes.add(node.name)
        else:
            self.disrupted_nodes.discard(node.name)
        return before != node

    def drop_node(self, name: str, uid: str) -> None:
        """Removes the node, unless a new node of this name is known."""
        if name in self.nodes and self.nodes[name].uid == uid:
            del self.nodes[name]
            self.disrupted_nodes.discard(name)

    def put_workload(self, workload: Workload) -> bool:
        """Stores a workload. Returns whether it changed."""
        if self.workloads.get(workload.uid) == workload:
            return False
        self.drop_workload(workload.uid)
        self.workloads[workload.uid] = workload
        self._named[workload.namespace, workload.name].add(workload.uid)
        self._with_policy[workload.namespace, workload.policy].add(workload.uid)
        for uid in workload.queued_as:
            self._queued_as[uid].add(workload.uid)
        return True

    def drop_workload(self, uid: str) -> None:
        workload = self.workloads.pop(uid, None)
        if workload is not None:
            discard(self._named, (workload.namespace, workload.name), uid)
            discard(self._with_policy, (workload.namespace, workload.policy), uid)
            for queued in workload.queued_as:
                discard(self._queued_as, queued, uid)

    def put_pod(self, pod: Pod) -> bool:
        """Stores a pod. Returns whether it changed."""
        before = self.pods.get(pod.uid)
        if before == pod:
            return False
        if before is not None and (before.workload_uid, before.node) != (pod.workload_uid, pod.node):
            self.drop_pod(pod.uid)
        self.pods[pod.uid] = pod
        self._sorted.pop(pod.workload_uid, None)
        self._pod_uids[pod.namespace, pod.name] = pod.uid
        self._pods_of[pod.workload_uid].add(pod.uid)
        if pod.node:
            self._pods_on[pod.node].add(pod.uid)
        return True

    def drop_pod(self, uid: str) -> set[str]:
        """Removes a pod. Returns the UID of its workload; the set is empty if the pod is not known."""
        pod = self.pods.pop(uid, None)
        if pod is None:
            return set()
        if self._pod_uids.get((pod.namespace, pod.name)) == uid:
            del self._pod_uids[pod.namespace, pod.name]
        self._sorted.pop(pod.workload_uid, None)
        discard(self._pods_of, pod.workload_uid, uid)
        discard(self._pods_on, pod.node, uid)
        return {pod.workload_uid}

    def put_job(self, job: Job) -> bool:
        """Stores a Job. Returns whether it changed."""
        before = self.jobs.get(job.uid)
        if before == job:
            return False
        if before is not None:
            self.drop_job(job.uid)
        self.jobs[job.uid] = job
        self._jobs_of[job.workload_uid].add(job.uid)
        return True

    def drop_job(self, uid: str) -> set[str]:
        """Removes a Job. Returns the UID of its workload; the set is empty if the Job is not known."""
        job = self.jobs.pop(uid, None)
        if job is None:
            return set()
        discard(self._jobs_of, job.workload_uid, uid)
        return {job.workload_uid}

    def pods_of(self, workload_uid: str, namespace: str | None = None) -> tuple[Pod, ...]:
        """The pods of the workload, by UID. If ``namespace`` is given, only those in it."""
        known = self._sorted.get(workload_uid)
        if known is None:
            known = tuple(self.pods[uid] for uid in sorted(self._pods_of.get(workload_uid, ())))
            self._sorted[workload_uid] = known
        if namespace is None or all(pod.namespace == namespace for pod in known):
            return known
        return tuple(pod for pod in known if pod.namespace == namespace)

    def jobs_of(self, workload_uid: str) -> Iterator[Job]:
        """The Jobs of the workload, in no order."""
        return (self.jobs[uid] for uid in self._jobs_of.get(workload_uid, ()))

    def workloads_on(self, node: str) -> set[str]:
        """UIDs of the workloads that have pods on the node."""
        return {self.pods[uid].workload_uid for uid in self._pods_on.get(node, ())}

    def workloads_named(self, key: Key) -> set[str]:
        """UIDs of the known workloads of this namespace and name. Workloads of several kinds may have one name."""
        return set(self._named.get(key, ()))

    def workloads_with_policy(self, key: Key) -> set[str]:
        """UIDs of the known workloads that name the policy of this namespace and name."""
        return set(self._with_policy.get(key, ()))

    def named_policies(self) -> set[Key]:
        """Namespaces and names of the policies that known workloads name."""
        return set(self._with_policy)

    def workloads_in(self, namespace: str) -> set[str]:
        """UIDs of the known workloads of a namespace."""
        return {uid for uid, workload in self.workloads.items() if workload.namespace == namespace}

    def queued_as(self, uid: str) -> set[str]:
        """UIDs of the known workloads that are this object, or that it controls."""
        return set(self._queued_as.get(uid, ()))

    def workloads_of_pods(self, pod_uids: Iterable[str]) -> set[str]:
        """UIDs of the workloads of these pods. Pods that are not known are left out."""
        return {self.pods[uid].workload_uid for uid in pod_uids if uid in self.pods}

    def nodes_with_pods(self) -> Set[str]:
        """Names of the nodes that pods are bound to. A node may not be known yet."""
        return self._pods_on.keys()

    def workloads_with_pods(self) -> set[str]:
        """UIDs of the known workloads that have pods."""
        return self._pods_of.keys() & self.workloads.keys()

    def pods_at(self, epoch: PreemptionRecord) -> list[Pod]:
        """The processes' pods at the start of the epoch. Empty once the workload has been restarted."""
        workload = self.workloads.get(epoch.spec.workload.uid)
        if workload is None:
            return []
        attempt = workload.restarts
        return [
            pod
            for pod in self.pods_of(workload.uid, epoch.namespace)
            if pod.membership.restart_attempt == attempt and pod.policy and not pod.helps and epoch.includes(pod)
        ]

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        """The pod of a workload, or None if it is not known."""
        return self.pods.get(self._pod_uids.get((namespace, name), ""))

    def may_be_of_workload(self, namespace: str, pod_name: str) -> bool:
        """True if the pod may be of a known workload, by its name."""
        known = (workload for workload in self.workloads.values() if workload.namespace == namespace)
        return any(BY_NAME[workload.kind].may_have_made(workload.name, pod_name) for workload in known)
