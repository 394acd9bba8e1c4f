"""What this replica knows about the cluster. All of it can be rebuilt from the watches.

The controller's event loop owns the cache: every method is called there, so there is no lock and no await. kopf's
handlers run in other threads and only hand objects over (``Controller.feed``).

The nodes, pods, Jobs and workloads are in ``objects``. The cache also keeps when possible signals were first seen
(``first_seen``), the version of each object (``versions``), the preemptions and requests (``preemptions``), and what
cannot be read (``left_out``). Callers use these parts themselves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gracepoint_operator import signals
from gracepoint_operator.cache.first_seen import FirstSeen
from gracepoint_operator.cache.gang_objects import GangObjects
from gracepoint_operator.cache.preemption_store import Key, PreemptionStore
from gracepoint_operator.cache.resource_versions import ResourceVersions
from gracepoint_operator.cache.signal_index import SignalIndex
from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.objects import Pod, read_node
from gracepoint_operator.left_out import LeftOut
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.model.requests import RequestRecord
from gracepoint_operator.resources import CheckpointPolicy, PreemptionRequest
from gracepoint_operator.signals import BUILT_IN, Mark, On, Row
from gracepoint_operator.unreadable import Unreadable, reading
from gracepoint_operator.workloads import BY_NAME, BY_PLACE, Job, WorkloadType, read_job, read_pod


class ClusterCache:
    """The objects of the cluster, indexed by workload.

    Args:
        clock: Seconds since the epoch.
        rows: The disruption catalogue, in the order in which its rows are tried.
        left_out: Keeps what cannot be read. None: a new one, without metrics.
    """

    def __init__(
        self, clock: Callable[[], float], rows: Sequence[Row] = BUILT_IN, left_out: LeftOut | None = None
    ) -> None:
        self._clock = clock
        self.left_out = LeftOut() if left_out is None else left_out
        self.objects = GangObjects()
        self.policies: dict[Key, CheckpointPolicy] = {}
        self.preemptions = PreemptionStore()
        self.first_seen = FirstSeen(clock)
        self._signal_index = SignalIndex(rows, self.first_seen)
        self.versions = ResourceVersions(clock)
        self._checked: set[str] = set()
        self._places: dict[str, tuple[kinds.Kind, str, str]] = {}  # UID -> kind, namespace, name
        self._doomed: set[str] = set()  # UIDs of workloads whose namespace is being deleted
        self._readers: dict[kinds.Kind, Callable[[Mapping[str, Any], bool], set[str]]] = {
            kinds.NODES: self._put_node,
            kinds.NODE_CLAIMS: self._put_node_claim,
            kinds.KUEUE_WORKLOADS: self._put_kueue_workload,
            kinds.PODS: self._put_pod,
            kinds.JOBS: self._put_job,
            **{place: functools.partial(self._put_workload, known) for place, known in BY_PLACE.items()},
            kinds.POLICIES: self._put_policy,
            kinds.PREEMPTIONS: self._put_preemption,
        }

    def put(self, kind: kinds.Kind, body: Mapping[str, Any], *, listed: bool, fresh: bool = False) -> set[str]:
        """Stores an object. Returns the UIDs of the workloads that it may matter to.

        An object that cannot be read is left out, and the version that was known before stays in force (``left_out``).
        A policy or a preemption also cannot be read if it does not have this version's schema.

        Args:
            kind: One of the kinds that are watched (``resync.SELECTORS``).
            body: The object as the API server returned it.
            listed: True if it comes from a list, so that it may have changed before now.
            fresh: True if the API server was asked for it just now.
        """
        try:
            with reading("metadata"):
                meta = body["metadata"]
                uid, name, namespace = (meta.get(field, "") for field in ("uid", "name", "namespace"))
                if not (uid and name and all(isinstance(text, str) for text in (uid, name, namespace))):
                    return set()  # it has no name under which it could be reported
                if not self.versions.take(meta, fresh=fresh):
                    return set()
        except Unreadable:
            return set()
        self._places[uid] = (kind, namespace, name)
        where = f"{namespace}/{name}".removeprefix("/")
        self._signal_index.left_out = {}
        try:
            with reading(where):
                affected = self._readers[kind](body, listed)
        except Unreadable as error:
            self.left_out.object(kind, uid, where, str(error))
            return set()
        self.left_out.parts(kind, uid, where, self._signal_index.left_out)
        return affected

    def unreadable_policies(self) -> dict[Key, str]:
        """The policies whose newest version cannot be read, with the reason."""
        return {self._places[uid][1:]: why for uid, why in self.left_out.objects(kinds.POLICIES).items()}

    def place(self, uid: str) -> tuple[kinds.Kind, str, str] | None:
        """Kind, namespace and name of a known object."""
        return self._places.get(uid)

    def drop(self, uid: str, version: int = 0) -> set[str]:
        """Removes an object that was deleted. Returns the UIDs of the workloads that it may matter to.

        Args:
            uid: The object's UID.
            version: Its resourceVersion when it was deleted. 0 if that is not known.
        """
        self.versions.drop(uid, version)
        self.first_seen.forget(uid)
        attached_to = self._signal_index.forget(uid)
        self._doomed.discard(uid)
        self.left_out.forget(uid)
        if uid not in self._places:
            return set()
        kind, namespace, name = self._places.pop(uid)
        if kind is kinds.NODES:
            self.objects.drop_node(name, uid)
            return self.objects.workloads_on(name)
        if kind is kinds.NODE_CLAIMS:
            return self.objects.workloads_on(attached_to)
        if kind is kinds.KUEUE_WORKLOADS:
            return {attached_to} & self.objects.workloads.keys()
        if kind is kinds.PODS:
            self._checked.discard(uid)
            return self.objects.drop_pod(uid)
        if kind is kinds.JOBS:
            return self.objects.drop_job(uid)
        if kind in BY_PLACE:
            self.objects.workloads.pop(uid, None)
            return {uid}
        if (kind, namespace, name) in self._places.values():
            return set()  # a new object of this name came before the deletion of the old one
        if kind is kinds.POLICIES:
            self.policies.pop((namespace, name), None)
            return self.objects.workloads_with_policy((namespace, name))
        if (wanted := self.preemptions.drop_request((namespace, name))) is not None:
            return self.objects.workloads_named(wanted)
        workload_uid = self.preemptions.drop((namespace, name))
        return set() if workload_uid is None else {workload_uid}

    def untold_since(self) -> dict[str, float]:
        """When the marks that concern a pod were first seen. Only for marks whose time the API server does not tell."""
        objects = self.objects
        nodes, gangs = objects.nodes_with_pods(), objects.workloads_with_pods()
        about = {objects.nodes[name].uid for name in nodes & objects.nodes.keys()}
        about |= gangs | {job.uid for gang in gangs for job in objects.jobs_of(gang)}
        about |= self._signal_index.attached_to([*nodes, *gangs])
        untold = {mark.id for mark in self._signal_index.on(about) if not (mark.is_exact or mark.row.limit)}
        return {mark: at for mark, at in self.first_seen.since(about).items() if mark in untold}

    def uids(self, kind: kinds.Kind) -> set[str]:
        """UIDs of the known objects of a kind."""
        return {uid for uid, place in self._places.items() if place[0] is kind}

    def versions_of(self, kind: kinds.Kind) -> dict[str, int]:
        """The resourceVersions of the known objects of a kind, by UID. 0 if a version is not known."""
        return {uid: self.versions.of(uid) for uid in self.uids(kind)}

    def doom(self, workload_uid: str) -> None:
        """Notes that the workload's namespace is being deleted. Everything in it will be deleted, in any order."""
        if workload_uid in self.objects.workloads:
            self._doomed.add(workload_uid)

    def mark_checked(self, pod_uids: Iterable[str]) -> None:
        """Notes that the Job and the workload of these deleted pods were read from the API server."""
        self._checked |= set(pod_uids) & self.objects.pods.keys()

    def workload_uids(self) -> set[str]:
        """Every workload for which there is something to decide."""
        return self.objects.workloads.keys() | self.preemptions.disrupted_workload_uids()

    def homeless_requests(self) -> list[RequestRecord]:
        """Open requests without an answer whose workloads are not known."""
        waiting = (
            request
            for request in self.preemptions.requests.values()
            if request.is_open and request.status.phase is None
        )
        return [item for item in waiting if not self.objects.workloads_named((item.namespace, item.spec.workload.name))]

    def latest_epochs(self, within_s: float) -> list[PreemptionRecord]:
        """The epochs of known workloads whose records were made in the last ``within_s`` seconds.

        Also the epochs that began in that time and have no record in the API yet.

        Args:
            within_s: Seconds. The same in every call.
        """
        found = self.preemptions.latest(self._clock(), within_s)
        return [epoch for epoch in found if self._is_of_known_workload(epoch)]

    def _is_of_known_workload(self, epoch: PreemptionRecord) -> bool:
        workload = self.objects.workloads.get(epoch.spec.workload.uid)
        return workload is not None and workload.namespace == epoch.namespace

    def gang(self, workload_uid: str) -> GangSnapshot:
        """What the decisions about a workload are based on."""
        objects = self.objects
        workload = objects.workloads.get(workload_uid)
        namespace = workload.namespace if workload is not None else None
        if workload is not None and workload_uid in self._doomed:
            workload = dataclasses.replace(workload, deleted=True)
        ours = (pod for pod in objects.pods_of(workload_uid) if namespace in (None, pod.namespace))
        pods = tuple(sorted(ours, key=lambda pod: pod.uid))
        nodes = {pod.node: objects.nodes[pod.node] for pod in pods if pod.node in objects.nodes}
        pod_uids = [pod.uid for pod in pods]
        jobs = {job.name: job for job in objects.jobs_of(workload_uid) if namespace in (None, job.namespace)}
        requests = () if workload is None else self.preemptions.requests_for((workload.namespace, workload.name))
        marked = {workload_uid, *pod_uids, *(request.uid for request in requests)}
        marked |= {node.uid for node in nodes.values()} | {job.uid for job in jobs.values()}
        # By the node names in the pods, because a NodeClaim outlives its node.
        marked |= self._signal_index.attached_to([workload_uid, *(pod.node for pod in pods)])
        return GangSnapshot(
            workload_uid=workload_uid,
            workload=workload,
            workload_gone=workload is None and self.preemptions.is_gone(workload_uid),
            jobs=jobs,
            pods=pods,
            nodes=nodes,
            policy=self.policies.get((workload.namespace, workload.policy)) if workload else None,
            epochs=tuple(self.preemptions.epochs_of(workload_uid, namespace)),
            requests=requests,
            marks={pod.uid: self._concerning(pod, jobs.get(pod.job_name)) for pod in pods},
            since=self.first_seen.since(marked),
            bound_at=self.first_seen.bound_at(pod_uids),
            checked=frozenset(pod_uids) & self._checked,
        )

    def _put_node(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        node = read_node(body)
        marks = self._signal_index.see(On.NODE, body, listed=listed)
        self.objects.put_node(node, disrupted=any(map(signals.marks_node, marks)))
        return self.objects.workloads_on(node.name)

    def _put_node_claim(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        node = str((body.get("status") or {}).get("nodeName") or "")
        self._signal_index.see(On.NODE_CLAIM, body, listed=listed)
        before = self._signal_index.attach(body["metadata"]["uid"], node)
        return self.objects.workloads_on(node) | self.objects.workloads_on(before)

    def _put_kueue_workload(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        meta = body["metadata"]
        owner = next((str(ref["uid"]) for ref in meta.get("ownerReferences") or () if ref["kind"] in list(BY_NAME)), "")
        self._signal_index.see(On.WORKLOAD, body, listed=listed)
        self._signal_index.attach(meta["uid"], owner)
        return {owner} & self.objects.workloads.keys()

    def _put_pod(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        pod = read_pod(body)
        if not pod.workload_uid:
            return set()
        self._signal_index.see(On.POD, body, listed=listed)
        self.objects.put_pod(pod)
        if pod.node:
            self.first_seen.see_bound(pod.uid, pod.bound_at, listed=listed)
        return {pod.workload_uid}

    def _put_job(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        job = read_job(body)
        if not job.workload_uid:
            return set()
        self._signal_index.see(On.JOB, body, listed=listed)
        self.objects.put_job(job)
        return {job.workload_uid}

    def _put_workload(self, known: WorkloadType, body: Mapping[str, Any], listed: bool) -> set[str]:
        workload = known.read(body)
        self._signal_index.see(On(known.name), body, listed=listed)
        self.objects.workloads[workload.uid] = workload
        return {workload.uid}

    def _put_policy(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        policy = CheckpointPolicy.of(body)
        key = (policy.namespace, policy.name)
        self.policies[key] = policy
        return self.objects.workloads_with_policy(key)

    def _put_preemption(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        if PreemptionRequest.is_one(body["spec"]):
            return self._put_request(RequestRecord.of(body), listed)
        epoch = PreemptionRecord.of(body)
        self.preemptions.join(epoch)
        return {epoch.spec.workload.uid}

    def _put_request(self, request: RequestRecord, listed: bool) -> set[str]:
        wanted = self.preemptions.put_request(request)
        self.first_seen.see(request.uid, {request.mark: request.created_at}, listed=listed)
        return self.objects.workloads_named(wanted)

    def _concerning(self, pod: Pod, job: Job | None) -> tuple[Mark, ...]:
        """The marks on everything that the pod depends on."""
        node = self.objects.nodes.get(pod.node)
        attached = self._signal_index.attached_to([pod.node, pod.workload_uid])
        # Only objects in the pod's namespace or in none, because anybody may write any owner.
        attached = {uid for uid in attached if self._places[uid][1] in ("", pod.namespace)}
        uids = [pod.uid, pod.workload_uid, *sorted(attached)]
        uids += [] if node is None else [node.uid]
        uids += [] if job is None else [job.uid]
        return self._signal_index.on(uids)
