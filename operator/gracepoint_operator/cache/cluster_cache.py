"""What this replica knows of the cluster: the one place of state, rebuildable from the watches.

Owned by the core's event loop: every method is called there and nowhere else, so there is no lock and no
await. kopf's handlers, which run in another thread, only hand raw objects over (``core.Core.feed``).

Beside the objects themselves it is remembered since when what may be a signal is seen (``sightings``), and
which version of each object that was (``versions``).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gracepoint_operator import signals
from gracepoint_operator.cache.first_seen import FirstSeen
from gracepoint_operator.cache.preemption_store import Key, PreemptionStore, discard
from gracepoint_operator.cache.resource_versions import ResourceVersions
from gracepoint_operator.cache.signal_index import SignalIndex
from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.objects import Node, Pod, read_node
from gracepoint_operator.left_out import LeftOut
from gracepoint_operator.model import evictions
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.model.requests import RequestRecord
from gracepoint_operator.resources import CheckpointPolicy, PreemptionRequest
from gracepoint_operator.signals import BUILT_IN, Mark, On, Row
from gracepoint_operator.unreadable import Unreadable, reading
from gracepoint_operator.workloads import BY_NAME, BY_PLACE, Job, Workload, WorkloadType, read_job, read_pod


class ClusterCache:
    """The objects that were seen, indexed by workload.

    Args:
        clock: Seconds since the epoch.
        rows: The disruption catalogue, in the order in which rows are tried.
        left_out: Is told what cannot be read.
    """

    def __init__(
        self, clock: Callable[[], float], rows: Sequence[Row] = BUILT_IN, left_out: LeftOut | None = None
    ) -> None:
        self._clock = clock
        self._left_out = LeftOut() if left_out is None else left_out
        self.nodes: dict[str, Node] = {}
        self.disrupted_nodes: set[str] = set()  # names; kept, as it is asked for each pod that is made
        self.pods: dict[str, Pod] = {}
        self.jobs: dict[str, Job] = {}
        self.workloads: dict[str, Workload] = {}
        self.policies: dict[Key, CheckpointPolicy] = {}
        self._archive = PreemptionStore()
        self.epochs = self._archive.epochs
        self.requests = self._archive.requests
        self._pod_uids: dict[Key, str] = {}
        self._pods_on: dict[str, set[str]] = collections.defaultdict(set)
        self._pods_of: dict[str, set[str]] = collections.defaultdict(set)
        self._jobs_of: dict[str, set[str]] = collections.defaultdict(set)
        self._sightings = FirstSeen(clock)
        self._markings = SignalIndex(rows, self._sightings)
        self._versions = ResourceVersions(clock)
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
        """Takes an object in; returns the UIDs of the workloads that it may matter to.

        Args:
            kind: One of those that are watched (``refresh.SELECTORS``).
            body: The object as the API gives it.
            listed: It comes from a listing: what is on it may be older than now.
            fresh: The API was asked for it just now.

        Raises:
            Unreadable: It cannot be read; a policy or a preemption also where it is not of this version's schema. What
                was known of it before stays in force; see ``left_out``.
        """
        with reading("metadata"):
            meta = body["metadata"]
            uid, name, namespace = (meta.get(field, "") for field in ("uid", "name", "namespace"))
            if not (uid and name and all(isinstance(text, str) for text in (uid, name, namespace))):
                raise Unreadable("metadata: expected texts as name, UID and namespace")
            if not self._versions.take(meta, fresh=fresh):
                return set()
        self._places[uid] = (kind, namespace, name)
        where = f"{namespace}/{name}".removeprefix("/")
        self._markings.left_out = {}
        try:
            with reading(where):
                affected = self._readers[kind](body, listed)
        except Unreadable as error:
            self._left_out.object(kind, uid, where, str(error))
            raise
        self._left_out.parts(kind, uid, where, self._markings.left_out)
        return affected

    def why_unreadable(self, uid: str) -> str | None:
        """Why the newest version of an object cannot be read; None where it can."""
        return self._left_out.why(uid)

    def unreadable_policies(self) -> dict[Key, str]:
        """The policies of which the newest version cannot be read, and why."""
        return {self._places[uid][1:]: why for uid, why in self._left_out.objects(kinds.POLICIES).items()}

    def place(self, uid: str) -> tuple[kinds.Kind, str, str] | None:
        """Kind, namespace and name of a known object."""
        return self._places.get(uid)

    def drop(self, uid: str, version: int = 0) -> set[str]:
        """Forgets an object that is gone; returns the UIDs of the workloads that it may matter to.

        Args:
            uid: The object's.
            version: Its resourceVersion when it went; 0 where that is not known.
        """
        self._versions.drop(uid, version)
        self._sightings.forget(uid)
        attached_to = self._markings.forget(uid)
        self._doomed.discard(uid)
        self._left_out.forget(uid)
        if uid not in self._places:
            return set()
        kind, namespace, name = self._places.pop(uid)
        if kind is kinds.NODES:
            if name in self.nodes and self.nodes[name].uid == uid:
                del self.nodes[name]
                self.disrupted_nodes.discard(name)
            return self._on_node(name)
        if kind is kinds.NODE_CLAIMS:
            return self._on_node(attached_to)
        if kind is kinds.KUEUE_WORKLOADS:
            return {attached_to} & self.workloads.keys()
        if kind is kinds.PODS:
            return self._drop_pod(uid)
        if kind is kinds.JOBS:
            job = self.jobs.pop(uid, None)
            if job is None:
                return set()
            discard(self._jobs_of, job.workload_uid, uid)
            return {job.workload_uid}
        if kind in BY_PLACE:
            self.workloads.pop(uid, None)
            return {uid}
        if (kind, namespace, name) in self._places.values():
            return set()  # made anew under its name before the news of the old one's deletion came
        if kind is kinds.POLICIES:
            self.policies.pop((namespace, name), None)
            return self._of_policy((namespace, name))
        if (wanted := self._archive.drop_request((namespace, name))) is not None:
            return self._named(wanted)
        workload_uid = self._archive.drop_epoch((namespace, name))
        return set() if workload_uid is None else {workload_uid}

    def recall(self, seen: Mapping[str, float]) -> None:
        """Takes what was seen of signs before this replica began; see ``recollection``."""
        self._sightings.recall(seen)

    def forget_recalled(self) -> None:
        """Everything is listed."""
        self._sightings.forget_recalled()

    def untold_since(self) -> dict[str, float]:
        """Since when those signs are there which concern a pod and of which the API does not tell that."""
        nodes, gangs = self._pods_on.keys(), self._pods_of.keys() & self.workloads.keys()
        about = {self.nodes[name].uid for name in nodes & self.nodes.keys()}
        about |= gangs | {job for gang in gangs for job in self._jobs_of.get(gang, ())}
        about |= self._markings.attached_to([*nodes, *gangs])
        untold = {mark.id for mark in self._markings.on(about) if not (mark.is_exact or mark.row.limit)}
        return {mark: at for mark, at in self._sightings.since(about).items() if mark in untold}

    def uids(self, kind: kinds.Kind) -> set[str]:
        """UIDs of the known objects of a kind."""
        return {uid for uid, place in self._places.items() if place[0] is kind}

    def versions(self, kind: kinds.Kind) -> dict[str, int]:
        """The known objects of a kind: UID -> resourceVersion, 0 where that is not known."""
        return {uid: self._versions.of(uid) for uid in self.uids(kind)}

    def rewind(self) -> None:
        """The API server has gone back to an older state: what comes next counts, whatever its version."""
        self._versions.rewind()

    def put_epoch(self, epoch: PreemptionRecord) -> None:
        self._archive.put_epoch(epoch)

    def epochs_of(self, workload_uid: str, namespace: str | None = None) -> list[PreemptionRecord]:
        """The workload's epochs, oldest first; only those in its namespace, where that is told."""
        return self._archive.epochs_of(workload_uid, namespace)

    def pods_at(self, epoch: PreemptionRecord) -> list[Pod]:
        """The pods of the gang that were there when the epoch began; none once its next life has begun."""
        workload = self.workloads.get(epoch.spec.workload.uid)
        if workload is None:
            return []
        pods = (self.pods[uid] for uid in self._pods_of.get(workload.uid, ()))
        return [
            pod
            for pod in pods
            if pod.namespace == epoch.namespace and pod.policy and pod.restart_attempt == workload.restarts
            if epoch.includes(pod)
        ]

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        """The pod of a workload, where it is known."""
        return self.pods.get(self._pod_uids.get((namespace, name), ""))

    def may_be_of_workload(self, namespace: str, pod_name: str) -> bool:
        """True if the pod may be of a known workload, by its name."""
        known = (workload for workload in self.workloads.values() if workload.namespace == namespace)
        return any(BY_NAME[workload.kind].may_have_made(workload.name, pod_name) for workload in known)

    def see_eviction(self, pod: Pod) -> None:
        """Somebody asked to evict the pod, just now."""
        self._sightings.see_attempt(pod.uid, evictions.mark(pod.uid))

    def doom(self, workload_uid: str) -> None:
        """The workload's namespace is being deleted, and everything in it will be, in any order."""
        if workload_uid in self.workloads:
            self._doomed.add(workload_uid)

    def drop_unmade(self, epoch_key: Key) -> None:
        """Forgets a record that the API server never took."""
        self._archive.drop_unmade(epoch_key)

    def mark_gone(self, workload_uid: str) -> None:
        """The API was asked for this workload, and it is not there."""
        self._archive.mark_gone(workload_uid)

    def mark_checked(self, pod_uids: Iterable[str]) -> None:
        """Job and workload of these deleted pods were looked at afresh."""
        self._checked |= set(pod_uids) & self.pods.keys()

    def workload_uids(self) -> set[str]:
        """Every workload with anything to decide about."""
        return self.workloads.keys() | self.disrupted_workload_uids()

    def homeless_requests(self) -> list[RequestRecord]:
        """Requests that nobody has answered, for workloads that are not known."""
        waiting = (request for request in self.requests.values() if request.is_open and request.status.phase is None)
        return [item for item in waiting if not self._named((item.namespace, item.spec.workload.name))]

    def disrupted_workload_uids(self) -> set[str]:
        """The workloads with an epoch under way."""
        return self._archive.disrupted_workload_uids()

    def latest_epochs(self, within_s: float) -> list[PreemptionRecord]:
        """The epochs of known workloads that were made within so many seconds, or began within these and are not made.

        Args:
            within_s: The same in every call.
        """
        found = self._archive.latest(self._clock(), within_s)
        return [epoch for epoch in found if self._is_of_known_workload(epoch)]

    def _is_of_known_workload(self, epoch: PreemptionRecord) -> bool:
        workload = self.workloads.get(epoch.spec.workload.uid)
        return workload is not None and workload.namespace == epoch.namespace

    def gang(self, workload_uid: str) -> GangSnapshot:
        """The view on which is decided."""
        workload = self.workloads.get(workload_uid)
        namespace = workload.namespace if workload is not None else None
        if workload is not None and workload_uid in self._doomed:
            workload = dataclasses.replace(workload, deleted=True)
        pods = tuple(
            self.pods[uid]
            for uid in sorted(self._pods_of.get(workload_uid, ()))
            if namespace in (None, self.pods[uid].namespace)
        )
        nodes = {pod.node: self.nodes[pod.node] for pod in pods if pod.node in self.nodes}
        pod_uids = [pod.uid for pod in pods]
        all_jobs = (self.jobs[uid] for uid in self._jobs_of.get(workload_uid, ()))
        jobs = {job.name: job for job in all_jobs if namespace in (None, job.namespace)}
        requests = () if workload is None else self._archive.requests_for((workload.namespace, workload.name))
        marked = {workload_uid, *pod_uids, *(request.uid for request in requests)}
        marked |= {node.uid for node in nodes.values()} | {job.uid for job in jobs.values()}
        # By the pods' own word, as a NodeClaim outlives its node.
        marked |= self._markings.attached_to([workload_uid, *(pod.node for pod in pods)])
        return GangSnapshot(
            workload_uid=workload_uid,
            workload=workload,
            workload_gone=workload is None and self._archive.is_gone(workload_uid),
            jobs=jobs,
            pods=pods,
            nodes=nodes,
            policy=self.policies.get((workload.namespace, workload.policy)) if workload else None,
            epochs=tuple(self.epochs_of(workload_uid, namespace)),
            requests=requests,
            marks={pod.uid: self._concerning(pod, jobs.get(pod.job_name)) for pod in pods},
            since=self._sightings.since(marked),
            bound_at=self._sightings.bound_at(pod_uids),
            checked=frozenset(pod_uids) & self._checked,
        )

    def _put_node(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        node = read_node(body)
        marks = self._markings.see(On.NODE, body, listed=listed)
        self.nodes[node.name] = node
        if any(map(signals.marks_node, marks)):
            self.disrupted_nodes.add(node.name)
        else:
            self.disrupted_nodes.discard(node.name)
        return self._on_node(node.name)

    def _put_node_claim(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        node = str((body.get("status") or {}).get("nodeName") or "")
        self._markings.see(On.NODE_CLAIM, body, listed=listed)
        before = self._markings.attach(body["metadata"]["uid"], node)
        return self._on_node(node) | self._on_node(before)

    def _put_kueue_workload(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        meta = body["metadata"]
        owner = next((str(ref["uid"]) for ref in meta.get("ownerReferences") or () if ref["kind"] in list(BY_NAME)), "")
        self._markings.see(On.WORKLOAD, body, listed=listed)
        self._markings.attach(meta["uid"], owner)
        return {owner} & self.workloads.keys()

    def _put_pod(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        pod = read_pod(body)
        if not pod.workload_uid:
            return set()
        self._markings.see(On.POD, body, listed=listed)
        self.pods[pod.uid] = pod
        self._pod_uids[pod.namespace, pod.name] = pod.uid
        self._pods_of[pod.workload_uid].add(pod.uid)
        if pod.node:
            self._pods_on[pod.node].add(pod.uid)
            self._sightings.see_bound(pod.uid, pod.bound_at, listed=listed)
        return {pod.workload_uid}

    def _drop_pod(self, uid: str) -> set[str]:
        pod = self.pods.pop(uid, None)
        if pod is None:
            return set()
        if self._pod_uids.get((pod.namespace, pod.name)) == uid:
            del self._pod_uids[pod.namespace, pod.name]
        discard(self._pods_of, pod.workload_uid, uid)
        discard(self._pods_on, pod.node, uid)
        self._checked.discard(uid)
        return {pod.workload_uid}

    def _put_job(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        job = read_job(body)
        if not job.workload_uid:
            return set()
        self._markings.see(On.JOB, body, listed=listed)
        self.jobs[job.uid] = job
        self._jobs_of[job.workload_uid].add(job.uid)
        return {job.workload_uid}

    def _put_workload(self, known: WorkloadType, body: Mapping[str, Any], listed: bool) -> set[str]:
        workload = known.read(body)
        self._markings.see(On(known.name), body, listed=listed)
        self.workloads[workload.uid] = workload
        return {workload.uid}

    def _put_policy(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        policy = CheckpointPolicy.of(body)
        key = (policy.namespace, policy.name)
        self.policies[key] = policy
        return self._of_policy(key)

    def _put_preemption(self, body: Mapping[str, Any], listed: bool) -> set[str]:
        if PreemptionRequest.is_one(body["spec"]):
            return self._put_request(RequestRecord.of(body), listed)
        epoch = PreemptionRecord.of(body)
        known = self.epochs.get(epoch.key)
        self.put_epoch(epoch if known is None else known.joined(epoch))
        return {epoch.spec.workload.uid}

    def _put_request(self, request: RequestRecord, listed: bool) -> set[str]:
        wanted = self._archive.put_request(request)
        self._sightings.see(request.uid, {request.mark: request.created_at}, listed=listed)
        return self._named(wanted)

    def _named(self, key: Key) -> set[str]:
        return {workload.uid for workload in self.workloads.values() if (workload.namespace, workload.name) == key}

    def _concerning(self, pod: Pod, job: Job | None) -> tuple[Mark, ...]:
        """The marks on everything that the pod depends on."""
        node = self.nodes.get(pod.node)
        attached = self._markings.attached_to([pod.node, pod.workload_uid])
        # Of the pod's namespace, or of none: anybody may write any owner.
        attached = {uid for uid in attached if self._places[uid][1] in ("", pod.namespace)}
        uids = [pod.uid, pod.workload_uid, *sorted(attached)]
        uids += [] if node is None else [node.uid]
        uids += [] if job is None else [job.uid]
        return self._markings.on(uids)

    def _on_node(self, name: str) -> set[str]:
        return {self.pods[uid].workload_uid for uid in self._pods_on.get(name, ())}

    def _of_policy(self, key: Key) -> set[str]:
        return {workload.uid for workload in self.workloads.values() if (workload.namespace, workload.policy) == key}
