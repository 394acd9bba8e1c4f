"""What this replica knows about the cluster. All of it can be rebuilt from the watches.

The controller's event loop owns the cache: every method is called there, so there is no lock and no await. kopf's
handlers run in other threads and only hand objects over (``Controller.feed``).

The nodes, pods, Jobs and workloads are in ``objects``. The cache also keeps when possible signals were first seen
(``first_seen``), the version of each object (``versions``), the preemptions and requests (``preemptions``), and what
cannot be read (``unreadable_objects``). Callers use these parts themselves.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from gracepoint_operator import read_errors, signals
from gracepoint_operator.cache.indexes import (
    DeviceIndex,
    FirstSeen,
    GangObjects,
    GangPods,
    ResourceVersions,
    SignalIndex,
    SnapshotServerIndex,
    Suspensions,
    version_of,
)
from gracepoint_operator.cache.resource_stores import Key, PolicyStore, PreemptionStore
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.objects import (
    LONGEST_NAME,
    Kind,
    Namespace,
    Node,
    Pod,
    SnapshotServerPod,
    read_namespace,
    read_node,
    read_snapshot_server,
)
from gracepoint_operator.logs import about
from gracepoint_operator.model.devices import ClaimedDevices, DeviceTaints, read_claim, read_rule, read_slice
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import PreemptionRecord, RequestRecord, kept_policy
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy, PreemptionRequest
from gracepoint_operator.resources.policy import DEFAULT_LONGEST_HOLD_S
from gracepoint_operator.signals import BUILT_IN, Mark, On, Row
from gracepoint_operator.workloads import BY_PLACE, Job, Workload, read_job, read_pod

#: What is read of an object. A text for objects that only matter because of what they belong to: the name of the node
#: of a NodeClaim, the UID of the owner of a Kueue workload.
Value = (Namespace | Node | Pod | Job | Workload | ClaimedDevices | DeviceTaints) | (
    CheckpointPolicy | ClusterCheckpointPolicy | PreemptionRecord | RequestRecord | SnapshotServerPod | str
)


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectReading:
    """What was read of one object.

    Attributes:
        version: Its resourceVersion. 0 if it is not a number.
        value: None if the object cannot be read.
        marks: The marks of the catalogue on it.
        unreadable_parts: The parts that could not be read.
        error: Why the object cannot be read. None if it can.
    """

    kind: objects.Kind
    namespace: str
    name: str
    uid: str
    version: int
    value: Value | None
    marks: tuple[Mark, ...] = ()
    unreadable_parts: tuple[str, ...] = ()
    error: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return (self.namespace, self.name)


class CacheReader:
    """Reads objects of the API server into what the cache keeps of them.

    An object of 20 kB becomes a record of some hundred bytes. It is read where it arrives: in the threads of
    ``KubeClient`` for lists, in the threads that watch for events. So the controller's event loop neither decodes nor
    holds whole objects. A reader has no state but the catalogue, and any thread may use it.

    Args:
        rows: The disruption catalogue, in the order in which its rows are tried.
        spread: The labels of nodes that name failure domains, the widest first.
    """

    def __init__(self, rows: Sequence[Row], spread: Sequence[str] = ()) -> None:
        self._rows = {on: tuple(row for row in rows if row.match.kind is on) for on in On}
        self._marked = {
            objects.NODES: On.NODE,
            objects.NODE_CLAIMS: On.NODE_CLAIM,
            objects.KUEUE_WORKLOADS: On.WORKLOAD,
            objects.PODS: On.POD,
            objects.JOBS: On.JOB,
            **{place: On(workload_type.name) for place, workload_type in BY_PLACE.items()},
        }
        self._values: dict[objects.Kind, Callable[[Mapping[str, Any]], Value]] = {
            objects.NAMESPACES: read_namespace,
            objects.NODES: functools.partial(read_node, spread=spread),
            objects.NODE_CLAIMS: _node_of_claim,
            objects.KUEUE_WORKLOADS: _owner_of_kueue_workload,
            objects.RESOURCE_CLAIMS: read_claim,
            objects.PODS: read_pod,
            objects.JOBS: read_job,
            **{place: workload_type.read for place, workload_type in BY_PLACE.items()},
            objects.CLUSTER_POLICIES: ClusterCheckpointPolicy.of,
            objects.POLICIES: CheckpointPolicy.of,
            objects.PREEMPTIONS: _read_preemption,
            objects.REQUESTS: RequestRecord.of,
            objects.SNAPSHOT_SERVERS: read_snapshot_server,
        }
        self._with_taints = {objects.RESOURCE_SLICES: read_slice, objects.DEVICE_TAINT_RULES: read_rule}

    @property
    def readable(self) -> Iterable[objects.Kind]:
        """The kinds that can be read."""
        return (*self._values, *self._with_taints)

    def read(self, kind: objects.Kind, body: Mapping[str, Any]) -> ObjectReading | None:
        """Reads an object. Returns None if it has no name under which it could be reported.

        Args:
            kind: One of the kinds that are watched (``relister.SELECTORS``).
            body: The object as the API server returned it.
        """
        try:
            with read_errors.reading("metadata"):
                meta = body["metadata"]
                uid, name, namespace = (meta.get(field, "") for field in ("uid", "name", "namespace"))
                if not (uid and name and all(map(_is_short, (uid, name, namespace)))):
                    return None
                version = version_of(meta)
        except read_errors.Unreadable:
            return None
        unreadable_parts: dict[str, None] = {}
        try:
            with read_errors.reading(f"{namespace}/{name}".removeprefix("/")):
                value = self._value(kind, body, unreadable_parts)
                on = self._marked.get(kind)
                marks = () if on is None else signals.marks(self._rows[on], on, body, unreadable_parts)
        except read_errors.Unreadable as error:
            return ObjectReading(kind, namespace, name, uid, version, None, error=str(error))
        return ObjectReading(kind, namespace, name, uid, version, value, marks, tuple(unreadable_parts))

    def _value(self, kind: objects.Kind, body: Mapping[str, Any], unreadable_parts: dict[str, None]) -> Value:
        if (read_taints := self._with_taints.get(kind)) is None:
            return self._values[kind](body)
        of_device = functools.partial(
            signals.marks, self._rows[On.DEVICE], On.DEVICE, unreadable_parts=unreadable_parts
        )
        return read_taints(body, of_device)


def _is_short(text: object) -> bool:
    return isinstance(text, str) and len(text) <= LONGEST_NAME


def _node_of_claim(body: Mapping[str, Any]) -> str:
    return str((body.get("status") or {}).get("nodeName") or "")


def _owner_of_kueue_workload(body: Mapping[str, Any]) -> str:
    # A workload of ours, or what made it (``Workload.queued_as``).
    owners = body["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners), "")


def _read_preemption(body: Mapping[str, Any]) -> PreemptionRecord | RequestRecord:
    if PreemptionRequest.is_one(body["spec"]):
        return RequestRecord.of(body)
    return PreemptionRecord.of(body)


logger = logging.getLogger(__name__)

#: At most this number of parts of one object is named.
_AT_MOST_PARTS = 5


@dataclasses.dataclass(frozen=True)
class _Entry:
    kind: Kind
    whole: bool
    reason: str


class UnreadableObjects:
    """Which objects, and which parts of objects, this replica cannot read. No locks: see ``cache.cluster_cache``.

    Each is logged once, and again only if the reason changes. A metric counts them by kind. The last version of an
    object that could be read stays in use: if the operator forgot a node's taint or a gang's policy because of another
    error in the object, the gang would get no notice. A deletion of the object takes effect as usual. If only a part of
    an object cannot be read, the rest is used.

    Args:
        count: Called with the kind's plural, ``object`` or ``part``, and the current number.
    """

    def __init__(self, count: Callable[[str, str, int], None] = lambda kind, extent, number: None) -> None:
        self._count = count
        self._entries: dict[str, _Entry] = {}  # by UID
        self._numbers: collections.Counter[tuple[str, str]] = collections.Counter()

    def object(self, kind: Kind, uid: str, where: str, reason: str) -> None:
        """Records that an object cannot be read. ``where`` is its namespace and name."""
        self._note(uid, _Entry(kind, True, reason), where)

    def parts(self, kind: Kind, uid: str, where: str, errors: Sequence[str]) -> None:
        """Records which parts of an object cannot be read, and why. Empty: the whole object can be read."""
        if errors:
            self._note(uid, _Entry(kind, False, "; ".join(errors[:_AT_MOST_PARTS])), where)
        else:
            self.forget(uid)

    def forget(self, uid: str) -> None:
        """Forgets an object that was deleted, or can be read again."""
        entry = self._entries.pop(uid, None)
        if entry is not None:
            self._add(entry, -1)

    def why(self, uid: str) -> str | None:
        """Returns why the newest version of an object cannot be read. None if it can be read, at least in part."""
        entry = self._entries.get(uid)
        return entry.reason if entry is not None and entry.whole else None

    def objects(self, kind: Kind) -> dict[str, str]:
        """Returns the objects of a kind whose newest version cannot be read: UID -> reason."""
        return {uid: entry.reason for uid, entry in self._entries.items() if entry.whole and entry.kind == kind}

    def _note(self, uid: str, entry: _Entry, where: str) -> None:
        before = self._entries.get(uid)
        if entry == before:
            return
        self._entries[uid] = entry
        if before is not None:
            self._add(before, -1)
        self._add(entry, 1)
        message = (
            "object left out, it cannot be read" if entry.whole else "a part of an object left out, it cannot be read"
        )
        logger.error(message, extra=about(kind=entry.kind.title, object=where, error=entry.reason))

    def _add(self, entry: _Entry, number: int) -> None:
        kind_and_extent = (entry.kind.title, "object" if entry.whole else "part")
        self._numbers[kind_and_extent] += number
        self._count(*kind_and_extent, self._numbers[kind_and_extent])


class ClusterCache:
    """The objects of the cluster, indexed by workload.

    Args:
        clock: Seconds since the epoch.
        rows: The disruption catalogue, in the order in which its rows are tried.
        unreadable_objects: Keeps what cannot be read. None: a new one, without metrics.
        longest_hold_s: Evictions are held for at most so many seconds, whatever a policy says.
        spread: As of ``CacheReader``.
        installation: As of ``SnapshotServerIndex``.

    Attributes:
        policies: The policies in the newest version that can be read, as they apply.
        reader: Reads objects into what is stored. Any thread may use it.
        snapshot_servers: The snapshot servers.
        suspensions: Which suspensions have a reason that is not known yet.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        rows: Sequence[Row] = BUILT_IN,
        unreadable_objects: UnreadableObjects | None = None,
        longest_hold_s: float = DEFAULT_LONGEST_HOLD_S,
        spread: Sequence[str] = (),
        installation: str = "",
    ) -> None:
        self._clock = clock
        self.unreadable_objects = UnreadableObjects() if unreadable_objects is None else unreadable_objects
        self.objects = GangObjects()
        self.policies = PolicyStore(longest_hold_s)
        self.preemptions = PreemptionStore(clock)
        self.first_seen = FirstSeen(clock)
        self.reader = CacheReader(rows, spread)
        self.snapshot_servers = SnapshotServerIndex(installation)
        self._signal_index = SignalIndex(self.first_seen)
        self._devices = DeviceIndex(self.first_seen)
        self.versions = ResourceVersions(clock)
        self._checked: set[str] = set()
        self.suspensions = Suspensions(self.objects, self._signal_index, self.first_seen, self.place)
        self._places: dict[objects.Kind, dict[str, Key]] = {kind: {} for kind in self.reader.readable}  # UID -> place
        self._doomed: set[str] = set()  # UIDs of workloads whose namespace is being deleted
        self._last_gang: GangSnapshot | None = None

    def put(self, kind: objects.Kind, body: Mapping[str, Any], *, listed: bool, fresh: bool = False) -> set[str]:
        """Reads an object and stores it. Returns the UIDs of the workloads that it may matter to.

        Args:
            kind: One of the kinds that are watched (``relister.SELECTORS``).
            body: The object as the API server returned it.
            listed: True if it comes from a list, so that it may have changed before now.
            fresh: True if the API server was asked for it just now.
        """
        reading = self.reader.read(kind, body)
        return set() if reading is None else self.store(reading, listed=listed, fresh=fresh)

    def store(self, reading: ObjectReading, *, listed: bool, fresh: bool = False) -> set[str]:
        """Stores what was read of an object. Returns the UIDs of the workloads that it may matter to.

        An object that cannot be read is left out, and the version that was known before stays in force
        (``unreadable_objects``). A policy or a preemption also cannot be read if it does not have this version's
        schema.

        Args:
            reading: What was read.
            listed: As in ``put``.
            fresh: As in ``put``.
        """
        uid, kind = reading.uid, reading.kind
        if not self.versions.take(uid, reading.version, fresh=fresh):
            return set()
        self._places[kind][uid] = reading.key
        where = f"{reading.namespace}/{reading.name}".removeprefix("/")
        if reading.error is not None:
            self.unreadable_objects.object(kind, uid, where, reading.error)
            if kind is objects.POLICIES:
                self.policies.put_unreadable(reading.key)
            return set()
        self.unreadable_objects.parts(kind, uid, where, reading.unreadable_parts)
        match reading.value:
            case Pod() | Node() | Job() | Workload() as value:
                return self._store_object(value, reading, listed)
            case CheckpointPolicy() as policy:
                before = self.policies.put(reading.key, policy)
                same_spec = before is not None and before.spec == policy.spec
                return policy.newly_saved(before) if same_spec else self.objects.workloads_with_policy(reading.key)
            case ClusterCheckpointPolicy() as cluster_policy:
                return set(self.objects.workloads) if self.policies.put_cluster(cluster_policy) else set()
            case Namespace() as namespace:
                changed = self.policies.put_labels(namespace.name, namespace.labels)
                return self.objects.workloads_in(namespace.name) if changed else set()
            case PreemptionRecord() as preemption:
                self.preemptions.join(preemption)
                return {preemption.spec.workload.uid}
            case RequestRecord() as request:
                workload_key = self.preemptions.put_request(request)
                self.first_seen.see(uid, {request.mark: request.created_at}, listed=listed)
                return set(self.objects.workloads_named(workload_key))
            case ClaimedDevices() | DeviceTaints() as devices:
                return self.objects.workloads_of_pods(self._devices.put(devices, listed=listed))
            case SnapshotServerPod() as server:
                self.snapshot_servers.put(server)
                return set()
            case str() as owner:
                return self._store_attached(reading, owner, listed)
        raise AssertionError(f"{where}: found {reading.value!r}, expected a value of {kind.plural}")

    def doomed_nodes(self) -> set[str]:
        """Names of the nodes that go away, surely or likely, as they or their NodeClaims say."""
        return self.objects.disrupted_nodes | self._signal_index.doomed()

    def unreadable_policies(self) -> dict[Key, str]:
        """The policies whose newest version cannot be read, with the reason."""
        places = self._places[objects.POLICIES]
        return {places[uid]: reason for uid, reason in self.unreadable_objects.objects(objects.POLICIES).items()}

    def place(self, uid: str) -> tuple[objects.Kind, str, str] | None:
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
        if kind is objects.SNAPSHOT_SERVERS:
            self.snapshot_servers.drop(uid)
            return set()
        if kind is objects.NODES:
            self.objects.drop_node(name, uid)
            self.snapshot_servers.note(name)
            return self.objects.workloads_on(name)
        if kind is objects.NODE_CLAIMS:
            self.snapshot_servers.note(attached_to)
            return self.objects.workloads_on(attached_to)
        if kind is objects.KUEUE_WORKLOADS:
            return self.objects.queued_as(attached_to)
        if kind in objects.DEVICES:
            return self.objects.workloads_of_pods(self._devices.drop(uid))
        if kind is objects.PODS:
            self._checked.discard(uid)
            return self.objects.drop_pod(uid)
        if kind is objects.JOBS:
            return self.objects.drop_job(uid)
        if kind in BY_PLACE:
            self.objects.drop_workload(uid)
            return {uid}
        if (workload_key := self.preemptions.drop_request(uid)) is not None:
            return self.objects.workloads_named(workload_key)
        if (namespace, name) in self._places[kind].values():
            return set()  # a new object of this name came before the deletion of the old one
        if kind is objects.CLUSTER_POLICIES:
            self.policies.drop_cluster(name)
            return set(self.objects.workloads)
        if kind is objects.NAMESPACES:
            self.policies.drop_namespace(name)
            return set()
        if kind is objects.POLICIES:
            self.policies.drop((namespace, name))
            return self.objects.workloads_with_policy((namespace, name))
        workload_uid = self.preemptions.drop((namespace, name))
        return set() if workload_uid is None else {workload_uid}

    def undated_since(self, *, of_pods: bool = True) -> dict[str, float]:
        """When the marks were first seen whose time the API does not give. ``of_pods``: only marks about pods."""
        index, first_seen = self._signal_index, self.first_seen
        mark_ids = {mark.id for mark in index.on(index.marked) if not (mark.is_exact or mark.row.limit)}
        if not (mark_ids and of_pods):
            return {mark: at for mark, at in first_seen.since(index.marked).items() if mark in mark_ids}
        nodes, gangs = self.objects.nodes_with_pods(), self.objects.workloads_with_pods()
        uids = {self.objects.nodes[name].uid for name in nodes & self.objects.nodes.keys()}
        uids |= gangs | {job.uid for gang in gangs for job in self.objects.jobs_of(gang)}
        uids |= index.attached_to([*nodes, *(uid for gang in gangs for uid in self.objects.workloads[gang].queued_as)])
        return {mark: at for mark, at in first_seen.since(uids & index.marked).items() if mark in mark_ids}

    def uids(self, kind: objects.Kind) -> Set[str]:
        """UIDs of the known objects of a kind."""
        return self._places[kind].keys()

    def versions_of(self, kind: objects.Kind) -> dict[str, int]:
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
        open_requests = (request for request in self.preemptions.requests.values() if not request.has_ended)
        return [(request, self._named_by(request)) for request in open_requests if not self._is_known(request)]

    def _named_by(self, request: RequestRecord) -> list[PreemptionRecord]:
        preemption = self.preemptions.records.get((request.namespace, request.status.preemption or ""))
        return [] if preemption is None else [preemption]

    def latest_preemptions(self, within_s: float) -> list[PreemptionRecord]:
        """The preemptions of known workloads whose records were made in the last ``within_s`` seconds.

        Also the preemptions that began in that time and have no record in the API yet.

        Args:
            within_s: Seconds. The same in every call.
        """
        latest = self.preemptions.latest(self._clock(), within_s)
        return [preemption for preemption in latest if self._is_of_known_workload(preemption)]

    def _is_known(self, request: RequestRecord) -> bool:
        uids = self.objects.workloads_named((request.namespace, request.spec.workload.name))
        return any(self.objects.workloads[uid].kind == request.spec.workload.kind for uid in uids)

    def _is_of_known_workload(self, preemption: PreemptionRecord) -> bool:
        workload = self.objects.workloads.get(preemption.spec.workload.uid)
        return workload is not None and workload.namespace == preemption.namespace

    def policy_of(self, workload: Workload) -> CheckpointPolicy | None:
        """The policy that applies to a workload: if its own is not known, the one that it was created with."""
        policy = self.policies.get((workload.namespace, workload.policy))
        if policy is not None:
            return policy
        stored_policy = kept_policy(workload, list(self.preemptions.of_workload(workload.uid, workload.namespace)))
        return None if stored_policy is None else self.policies.limited(stored_policy)

    def gang(self, workload_uid: str) -> GangSnapshot:
        """What the decisions about a workload are based on.

        If nothing has changed since the last call, and that was for the same workload, it is the same object: it keeps
        what it has computed about thousands of pods.
        """
        workload = self.objects.workloads.get(workload_uid)
        namespace = workload.namespace if workload is not None else None
        if workload is not None and workload_uid in self._doomed:
            workload = dataclasses.replace(workload, deleted=True)
        gang_pods = self.objects.gang_pods(workload_uid, namespace)
        nodes = {name: self.objects.nodes[name] for name in gang_pods.nodes if name in self.objects.nodes}
        # If a watch has missed the deletion of a Job, the one that was made in its place has the same name.
        by_age = sorted(self.objects.jobs_of(workload_uid), key=lambda job: self.versions.of(job.uid))
        jobs = {job.name: job for job in by_age if namespace in (None, job.namespace)}
        if workload is not None and workload.job is not None:
            jobs[workload.job.name] = workload.job
        requests = () if workload is None else self.preemptions.requests_for(workload)
        queued_as = (workload_uid,) if workload is None else workload.queued_as
        marks = self._marks_of_pods(queued_as, gang_pods, nodes, jobs)
        of_devices = self._devices.of(gang_pods.pods)
        for pod_uid, device_marks in of_devices.of_pods.items():
            marks[pod_uid] = (*marks.get(pod_uid, ()), *device_marks)
        uids = {workload_uid, *(request.uid for request in requests)} | {job.uid for job in jobs.values()}
        uids |= {node.uid for node in nodes.values()} & self._signal_index.marked
        # By the node names in the pods, because a NodeClaim outlives its node.
        uids |= self._signal_index.attached_to([*queued_as, *gang_pods.nodes])
        since = self.first_seen.since(uids | gang_pods.uids | of_devices.sources)
        gang = GangSnapshot(
            workload_uid=workload_uid,
            workload=workload,
            workload_gone=workload is None and self.preemptions.is_gone(workload_uid),
            jobs=jobs,
            pods=gang_pods.pods,
            nodes=nodes,
            policy=None if workload is None else self.policy_of(workload),
            preemptions=tuple(self.preemptions.of_workload(workload_uid, namespace)),
            requests=requests,
            marks=marks,
            since=since,
            bound_at=self.first_seen.bound_at,
            checked=frozenset(uid for uid in self._checked if self.objects.pods[uid].workload_uid == workload_uid),
            unexplained=self.suspensions.unexplained(workload_uid, since),
        )
        if gang != self._last_gang:
            self._last_gang = gang
        return self._last_gang

    def _marks_of_pods(
        self, queued_as: Sequence[str], gang_pods: GangPods, nodes: Mapping[str, Node], jobs: Mapping[str, Job]
    ) -> dict[str, tuple[Mark, ...]]:
        """Returns the marks on everything that each pod depends on, by its UID. Pods without marks are left out.

        Args:
            queued_as: UID of the workload, and of what controls it.
            gang_pods: Its pods.
            nodes: Their nodes, by name.
            jobs: Their Jobs, by name.
        """
        marked, attached_to = self._signal_index.marked, self._signal_index.attached_to
        if queued_as[0] in marked or attached_to(queued_as):
            affected_uids: Set[str] = gang_pods.uids
        else:
            marked_nodes = {name for name, node in nodes.items() if node.uid in marked}
            marked_nodes |= {name for name in gang_pods.nodes if attached_to([name])}
            marked_jobs = {name for name, job in jobs.items() if job.uid in marked}
            affected_uids = gang_pods.uids & (marked | self.objects.pods_on(marked_nodes))
            if marked_jobs:
                affected_uids |= {pod.uid for pod in gang_pods.pods if pod.job_name in marked_jobs}
        by_pod = {
            pod.uid: self._marks_of_pod(queued_as, pod, nodes.get(pod.node), jobs.get(pod.job_name))
            for pod in (gang_pods.pods if affected_uids else ())
            if pod.uid in affected_uids
        }
        return {uid: marks for uid, marks in by_pod.items() if marks}

    def _marks_of_pod(self, queued_as: Sequence[str], pod: Pod, node: Node | None, job: Job | None) -> tuple[Mark, ...]:
        attached_uids = self._signal_index.attached_to([pod.node, *queued_as])
        # Only objects in the pod's namespace or in none, because anybody may write any owner.
        attached_uids = {
            uid for uid in attached_uids if (where := self.place(uid)) is None or where[1] in ("", pod.namespace)
        }
        uids = [pod.uid, pod.workload_uid, *sorted(attached_uids)]
        uids += [] if node is None else [node.uid]
        uids += [] if job is None or job.uid == pod.workload_uid else [job.uid]
        return self._signal_index.on(uids)

    def _store_object(self, value: Pod | Node | Job | Workload, reading: ObjectReading, listed: bool) -> set[str]:
        """Stores an object of a gang, or a node. Nothing is affected if nothing that matters has changed in it."""
        if isinstance(value, Pod | Job) and not value.workload_uid:
            return set()
        marks_changed = self._signal_index.see(reading.uid, reading.marks, listed=listed)
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
                changed = self.objects.put_node(node, disrupted=any(map(signals.marks_node, reading.marks)))
                if changed or marks_changed:
                    self.snapshot_servers.note(node.name)
                affected = self.objects.workloads_on(node.name) if changed or marks_changed else set()
        return affected if changed or marks_changed else set()

    def _store_attached(self, reading: ObjectReading, owner: str, listed: bool) -> set[str]:
        """Stores a NodeClaim or a Kueue workload. ``owner``: the node's name, or the workload's UID."""
        if self._signal_index.see(reading.uid, reading.marks, listed=listed):
            self.snapshot_servers.note(owner)
        before = self._signal_index.attach(reading.uid, owner)
        if reading.kind is objects.NODE_CLAIMS:
            for node in {before, owner} if before != owner else ():
                self.snapshot_servers.note(node)
            return self.objects.workloads_on(owner) | self.objects.workloads_on(before)
        return self.objects.queued_as(owner)
