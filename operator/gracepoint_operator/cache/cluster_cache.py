"""What this replica knows about the cluster. All of it can be rebuilt from the watches.

The controller's event loop owns the cache: every method is called there, so there is no lock and no await. kopf's
handlers run in other threads and only hand objects over (``Controller.feed``).

The nodes, pods, Jobs and workloads are in ``objects``. The cache also keeps when possible signals were first seen
(``first_seen``), the version of each object (``versions``), the preemptions and requests (``preemptions``), and what
cannot be read (``unreadable_objects``). Callers use these parts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from gracepoint_operator import signals
from gracepoint_operator.cache.indexes.device_index import DeviceIndex
from gracepoint_operator.cache.indexes.eviction_index import EvictionIndex
from gracepoint_operator.cache.indexes.first_seen import FirstSeen
from gracepoint_operator.cache.indexes.gang_objects import GangObjects
from gracepoint_operator.cache.indexes.signal_index import SignalIndex
from gracepoint_operator.cache.object_reader import CacheReader, ObjectReading
from gracepoint_operator.cache.policy_store import PolicyStore
from gracepoint_operator.cache.preemption_store import Key, PreemptionStore
from gracepoint_operator.cache.resource_versions import ResourceVersions
from gracepoint_operator.cache.snapshots import Snapshots
from gracepoint_operator.cache.suspensions import Suspensions
from gracepoint_operator.cache.undated_marks import undated_since
from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.objects import Namespace, Node, Pod
from gracepoint_operator.model.devices import ClaimedDevices, DeviceTaints
from gracepoint_operator.model.eviction_requests import EvictionAsked
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.model.requests import RequestRecord
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy
from gracepoint_operator.resources.policy import DEFAULT_LONGEST_HOLD_S
from gracepoint_operator.signals import BUILT_IN, Row
from gracepoint_operator.unreadable_objects import UnreadableObjects
from gracepoint_operator.workloads import BY_PLACE, Job, Workload


class ClusterCache:
    """The objects of the cluster, indexed by workload.

    Args:
        clock: Seconds since the epoch.
        rows: The disruption catalogue, in the order in which its rows are tried.
        unreadable_objects: Keeps what cannot be read. None: a new one, without metrics.
        longest_hold_s: Evictions are held for at most so many seconds, whatever a policy says.

    Attributes:
        policies: The policies in the newest version that can be read, as they apply.
        reader: Reads objects into what is stored. Any thread may use it.
        evictions: The Evictions of lifecycle.k8s.io.
        suspensions: Which suspensions have a reason that is not known yet.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        rows: Sequence[Row] = BUILT_IN,
        unreadable_objects: UnreadableObjects | None = None,
        longest_hold_s: float = DEFAULT_LONGEST_HOLD_S,
    ) -> None:
        self._clock = clock
        self.unreadable_objects = UnreadableObjects() if unreadable_objects is None else unreadable_objects
        self.objects = GangObjects()
        self.policies = PolicyStore(longest_hold_s)
        self.preemptions = PreemptionStore()
        self.first_seen = FirstSeen(clock)
        self.reader = CacheReader(rows)
        self._signal_index = SignalIndex(self.first_seen)
        self.evictions = EvictionIndex(self.first_seen)
        self._devices = DeviceIndex(self.first_seen)
        self.versions = ResourceVersions(clock)
        self._checked: set[str] = set()
        self.suspensions = Suspensions(self.objects, self._signal_index, self.first_seen, self.place)
        self._places: dict[kinds.Kind, dict[str, Key]] = {kind: {} for kind in self.reader.readable}  # UID -> place
        self._doomed: set[str] = set()  # UIDs of workloads whose namespace is being deleted
        self._snapshots = Snapshots(
            objects=self.objects,
            policies=self.policies,
            preemptions=self.preemptions,
            first_seen=self.first_seen,
            signal_index=self._signal_index,
            evictions=self.evictions,
            devices=self._devices,
            versions=self.versions,
            suspensions=self.suspensions,
            place=self.place,
            checked=self._checked,
            doomed=self._doomed,
        )

    def put(self, kind: kinds.Kind, body: Mapping[str, Any], *, listed: bool, fresh: bool = False) -> set[str]:
        """Reads an object and stores it. Returns the UIDs of the workloads that it may matter to.

        Args:
            kind: One of the kinds that are watched (``resync.SELECTORS``).
            body: The object as the API server returned it.
            listed: True if it comes from a list, so that it may have changed before now.
            fresh: True if the API server was asked for it just now.
        """
        found = self.reader.read(kind, body)
        return set() if found is None else self.store(found, listed=listed, fresh=fresh)

    def store(self, found: ObjectReading, *, listed: bool, fresh: bool = False) -> set[str]:
        """Stores what was read of an object. Returns the UIDs of the workloads that it may matter to.

        An object that cannot be read is left out, and the version that was known before stays in force
        (``unreadable_objects``). A policy or a preemption also cannot be read if it does not have this version's
        schema.

        Args:
            found: What was read.
            listed: As in ``put``.
            fresh: As in ``put``.
        """
        uid, kind = found.uid, found.kind
        if not self.versions.take(uid, found.version, fresh=fresh):
            return set()
        self._places[kind][uid] = found.key
        where = f"{found.namespace}/{found.name}".removeprefix("/")
        if found.error is not None:
            self.unreadable_objects.object(kind, uid, where, found.error)
            if kind is kinds.POLICIES:
                self.policies.put_unreadable(found.key)
            return set()
        self.unreadable_objects.parts(kind, uid, where, found.unreadable_parts)
        match found.value:
            case Pod() | Node() | Job() | Workload() as value:
                return self._store_object(value, found, listed)
            case CheckpointPolicy() as policy:
                before = self.policies.put(found.key, policy)
                same = before is not None and before.spec == policy.spec
                return policy.newly_saved(before) if same else self.objects.workloads_with_policy(found.key)
            case ClusterCheckpointPolicy() as cluster_policy:
                return set(self.objects.workloads) if self.policies.put_cluster(cluster_policy) else set()
            case Namespace() as namespace:
                changed = self.policies.put_labels(namespace.name, namespace.labels)
                return self.objects.workloads_in(namespace.name) if changed else set()
            case PreemptionRecord() as epoch:
                self.preemptions.join(epoch)
                return {epoch.spec.workload.uid}
            case RequestRecord() as request:
                wanted = self.preemptions.put_request(request)
                self.first_seen.see(uid, {request.mark: request.created_at}, listed=listed)
                return set(self.objects.workloads_named(wanted))
            case EvictionAsked() as asked:
                changed = self.evictions.put(asked, listed=listed)
                return self.objects.workloads_of_pods([asked.pod_uid]) if changed else set()
            case ClaimedDevices() | DeviceTaints() as devices:
                return self.objects.workloads_of_pods(self._devices.put(devices, listed=listed))
            case str() as owner:
                return self._store_attached(found, owner, listed)
        raise AssertionError(f"{where}: found {found.value!r}, expected a value of {kind.plural}")

    def unreadable_policies(self) -> dict[Key, str]:
        """The policies whose newest version cannot be read, with the reason."""
        places = self._places[kinds.POLICIES]
        return {places[uid]: why for uid, why in self.unreadable_objects.objects(kinds.POLICIES).items()}

    def place(self, uid: str) -> tuple[kinds.Kind, str, str] | None:
        """Kind, namespace and name of a known object."""
        return next(((kind, *places[uid]) for kind, places in self._places.items() if uid in places), None)

    def drop(self, uid: str, version: int = 0) -> set[str]:
        """Removes an object that was deleted. Returns the UIDs of the workloads that it may matter to.

        Args:
            uid: The object's UID.
            version: Its resourceVersion when it was deleted. 0 if that is not known.
        """
        self.versions.drop(uid, version)
        self.first_seen.forget(uid)
        attached_to = self._signal_index.forget(uid)
        self.suspensions.forget(uid)
        self._doomed.discard(uid)
        self.unreadable_objects.forget(uid)
        place = self.place(uid)
        if place is None:
            return set()
        kind, namespace, name = place
        del self._places[kind][uid]
        if kind is kinds.NODES:
            self.objects.drop_node(name, uid)
            return self.objects.workloads_on(name)
        if kind is kinds.NODE_CLAIMS:
            return self.objects.workloads_on(attached_to)
        if kind is kinds.KUEUE_WORKLOADS:
            return self.objects.queued_as(attached_to)
        if kind is kinds.EVICTIONS:
            return self.objects.workloads_of_pods([self.evictions.drop(uid)])
        if kind in kinds.DEVICES:
            return self.objects.workloads_of_pods(self._devices.drop(uid))
        if kind is kinds.PODS:
            self._checked.discard(uid)
            return self.objects.drop_pod(uid)
        if kind is kinds.JOBS:
            return self.objects.drop_job(uid)
        if kind in BY_PLACE:
            self.objects.drop_workload(uid)
            return {uid}
        if (wanted := self.preemptions.drop_request(uid)) is not None:
            return self.objects.workloads_named(wanted)
        if (namespace, name) in self._places[kind].values():
            return set()  # a new object of this name came before the deletion of the old one
        if kind is kinds.CLUSTER_POLICIES:
            self.policies.drop_cluster(name)
            return set(self.objects.workloads)
        if kind is kinds.NAMESPACES:
            self.policies.drop_namespace(name)
            return set()
        if kind is kinds.POLICIES:
            self.policies.drop((namespace, name))
            return self.objects.workloads_with_policy((namespace, name))
        workload_uid = self.preemptions.drop((namespace, name))
        return set() if workload_uid is None else {workload_uid}

    def undated_since(self, *, of_pods: bool = True) -> dict[str, float]:
        """When the marks were first seen whose time the API does not tell. ``of_pods``: only marks about pods."""
        return undated_since(self._signal_index, self.objects, self.first_seen, of_pods=of_pods)

    def uids(self, kind: kinds.Kind) -> Set[str]:
        """UIDs of the known objects of a kind."""
        return self._places[kind].keys()

    def versions_of(self, kind: kinds.Kind) -> dict[str, int]:
        """The resourceVersions of the known objects of a kind, by UID. 0 if a version is not known."""
        return {uid: self.versions.of(uid) for uid in self._places[kind]}

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

    def homeless_requests(self) -> list[tuple[RequestRecord, list[PreemptionRecord]]]:
        """Requests without a final answer whose workloads are not known, each with the Preemption that it names."""
        waiting = (request for request in self.preemptions.requests.values() if not request.has_ended)
        return [(item, self._named_by(item)) for item in waiting if not self._is_known(item)]

    def _named_by(self, request: RequestRecord) -> list[PreemptionRecord]:
        epoch = self.preemptions.epochs.get((request.namespace, request.status.preemption or ""))
        return [] if epoch is None else [epoch]

    def latest_epochs(self, within_s: float) -> list[PreemptionRecord]:
        """The epochs of known workloads whose records were made in the last ``within_s`` seconds.

        Also the epochs that began in that time and have no record in the API yet.

        Args:
            within_s: Seconds. The same in every call.
        """
        found = self.preemptions.latest(self._clock(), within_s)
        return [epoch for epoch in found if self._is_of_known_workload(epoch)]

    def _is_known(self, request: RequestRecord) -> bool:
        found = self.objects.workloads_named((request.namespace, request.spec.workload.name))
        return any(self.objects.workloads[uid].kind == request.spec.workload.kind for uid in found)

    def _is_of_known_workload(self, epoch: PreemptionRecord) -> bool:
        workload = self.objects.workloads.get(epoch.spec.workload.uid)
        return workload is not None and workload.namespace == epoch.namespace

    def gang(self, workload_uid: str) -> GangSnapshot:
        """What the decisions about a workload are based on."""
        return self._snapshots.of(workload_uid)

    def policy_of(self, workload: Workload) -> CheckpointPolicy | None:
        """The policy that applies to a workload: if its own is not known, the one that it was created with."""
        return self._snapshots.policy_of(workload)

    def _store_object(self, value: Pod | Node | Job | Workload, found: ObjectReading, listed: bool) -> set[str]:
        """Stores an object of a gang, or a node. Nothing is affected if nothing that matters has changed in it."""
        if isinstance(value, Pod | Job) and not value.workload_uid:
            return set()
        marks_changed = self._signal_index.see(found.uid, found.marks, listed=listed)
        match value:
            case Pod() as pod:
                changed = self.objects.put_pod(pod)
                if pod.node:
                    self.first_seen.see_bound(pod.uid, pod.bound_at, listed=listed)
                affected = {pod.workload_uid}
            case Job() as job:
                changed = self.objects.put_job(job)
                affected = {job.workload_uid}
            case Workload() as workload:
                changed = self.objects.put_workload(workload)
                affected = {workload.uid}
            case Node() as node:
                changed = self.objects.put_node(node, disrupted=any(map(signals.marks_node, found.marks)))
                affected = self.objects.workloads_on(node.name) if changed or marks_changed else set()
        return affected if changed or marks_changed else set()

    def _store_attached(self, found: ObjectReading, owner: str, listed: bool) -> set[str]:
        """Stores a NodeClaim or a Kueue workload. ``owner``: the node's name, or the workload's UID."""
        self._signal_index.see(found.uid, found.marks, listed=listed)
        before = self._signal_index.attach(found.uid, owner)
        if found.kind is kinds.NODE_CLAIMS:
            return self.objects.workloads_on(owner) | self.objects.workloads_on(before)
        return self.objects.queued_as(owner)
