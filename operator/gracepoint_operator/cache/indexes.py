"""What is known of the cluster, by how it is looked up. The controller's event loop owns it; there are no locks.

* ``GangObjects``: nodes, pods, Jobs and workloads, by node and by workload.
* ``DeviceIndex``: the devices that pods use, and the taints of devices.
* ``SignalIndex``: the marks of the disruption catalogue. Some objects matter only because of the object that they
  belong to: Karpenter's NodeClaim for a node, Kueue's Workload for a workload. Only their marks and their owner are
  kept.
* ``FirstSeen``: when this replica first saw something for which the API gives no time, or no exact one. For an object
  from a watch, that is now, by this replica's clock. An object from a list (at start, or after a watch lost its place)
  may have changed earlier. Then the time from the API is taken, or the time at which another replica saw it, if that is
  earlier (``recording.first_seen_writer``).
* ``Suspensions``: which suspensions of workloads have a reason that is not known yet.
* ``ResourceVersions``: the known version of each object.

Only ``ClusterCache`` changes the indexes, and the other modules of ``cache`` read them. ``recording`` also uses
``FirstSeen``. The indexes call ``model``, ``signals`` and ``resource_stores``.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

from gracepoint.wire.messages import Confidence
from gracepoint_operator.cache.resource_stores import Key, discard
from gracepoint_operator.kube.objects import KUEUE_WORKLOADS, Kind, Node, Pod, SnapshotServerPod, Toleration
from gracepoint_operator.model.devices import AllocatedDevice, ClaimedDevices, Device, DeviceSelector, DeviceTaints
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.signals import Mark, is_suspension
from gracepoint_operator.workloads import BY_NAME, Job, Workload


@dataclasses.dataclass(frozen=True, slots=True)
class GangPods:
    """The pods of a workload, and what of them does not change until one of them does.

    Attributes:
        pods: The pods, by UID.
        uids: Their UIDs.
        nodes: The names of their nodes.
    """

    pods: tuple[Pod, ...]
    uids: frozenset[str]
    nodes: frozenset[str]

    @classmethod
    def of(cls, pods: Iterable[Pod]) -> GangPods:
        by_uid = tuple(sorted(pods, key=lambda pod: pod.uid))
        return cls(
            by_uid,
            frozenset(pod.uid for pod in by_uid),
            frozenset(pod.node for pod in by_uid if pod.node),
        )


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
        # By workload, until one of its pods changes, and by namespace; None: of all namespaces.
        self._gang_pods: dict[str, dict[str | None, GangPods]] = {}
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
        self._gang_pods.pop(pod.workload_uid, None)
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
        self._gang_pods.pop(pod.workload_uid, None)
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

    def gang_pods(self, workload_uid: str, namespace: str | None = None) -> GangPods:
        """The pods of the workload. If ``namespace`` is given, only those in it."""
        known = self._gang_pods.get(workload_uid, {})
        gang_pods = known.get(namespace)
        if gang_pods is None:
            pods = (self.pods[uid] for uid in self._pods_of.get(workload_uid, ()))
            gang_pods = GangPods.of(pod for pod in pods if namespace in (None, pod.namespace))
            if gang_pods.pods:  # anybody may name a workload that does not exist
                self._gang_pods.setdefault(workload_uid, known)[namespace] = gang_pods
        return gang_pods

    def pods_of(self, workload_uid: str, namespace: str | None = None) -> tuple[Pod, ...]:
        """The pods of the workload, by UID. If ``namespace`` is given, only those in it."""
        return self.gang_pods(workload_uid, namespace).pods

    def pods_on(self, nodes: Iterable[str]) -> set[str]:
        """UIDs of the pods on these nodes, of all workloads."""
        return set().union(*(self._pods_on.get(node, ()) for node in nodes))

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

    def pods_at(self, preemption: PreemptionRecord) -> list[Pod]:
        """The processes' pods at the start of the preemption. Empty once the workload has been restarted."""
        workload = self.workloads.get(preemption.spec.workload.uid)
        if workload is None:
            return []
        attempt = workload.restarts
        return [
            pod
            for pod in self.pods_of(workload.uid, preemption.namespace)
            if pod.membership.restart_attempt == attempt and pod.policy and not pod.helps and preemption.includes(pod)
        ]

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        """The pod of a workload, or None if it is not known."""
        return self.pods.get(self._pod_uids.get((namespace, name), ""))

    def may_be_of_workload(self, namespace: str, pod_name: str) -> bool:
        """True if the pod may be of a known workload, by its name."""
        workloads = (workload for workload in self.workloads.values() if workload.namespace == namespace)
        return any(BY_NAME[workload.kind].may_have_made(workload.name, pod_name) for workload in workloads)


#: After a pause of this length, an attempt begins another series. kubectl drain tries every 5 s.
NEW_SERIES_S = 300.0


@dataclasses.dataclass(frozen=True)
class _Attempts:
    mark: str
    first_at: float
    last_at: float


class FirstSeen:
    """First times of marks (possible signals) and of the binding of pods, by the UID of the object.

    Args:
        clock: Seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[str, dict[str, float]] = {}  # UID of the object -> mark -> when
        self._bound_at: dict[str, float] = {}
        self._attempts: dict[str, _Attempts] = {}
        self._recalled: dict[str, float] = {}  # digest of a mark -> when it was seen before this replica began

    def see(self, uid: str, marks: Mapping[str, float | None], *, listed: bool) -> None:
        """Notes that the object has these marks now and no others.

        Args:
            uid: The object's UID.
            marks: When each mark began, in seconds since the epoch. None if the API does not give that.
            listed: True if the object comes from a list.
        """
        earlier = self._since.pop(uid, {})
        if marks:
            self._since[uid] = {
                mark: earlier[mark] if mark in earlier else self._beginning(hint_at, listed, mark)
                for mark, hint_at in marks.items()
            }

    def recall(self, times: Mapping[str, float]) -> None:
        """Uses the times that replicas saw before this one began, by ``digest``, until ``forget_recalled``."""
        self._recalled = dict(times)
        for marks in self._since.values():
            marks.update({mark: min(at, times.get(digest(mark), at)) for mark, at in marks.items()})

    def forget_recalled(self) -> None:
        """Ends the use of recalled times. Call it when everything is listed: a mark that comes later is new."""
        self._recalled = {}

    def see_bound(self, uid: str, hint_at: float | None, *, listed: bool) -> None:
        """Notes that the pod is bound to its node.

        Args:
            uid: The pod's UID.
            hint_at: When it was bound, in seconds since the epoch. None if the API does not give that.
            listed: True if the pod comes from a list.
        """
        if uid not in self._bound_at:
            self._bound_at[uid] = self._beginning(hint_at, listed)

    def see_attempt(self, uid: str, mark: str) -> None:
        """Notes an attempt that leaves no trace on the object, such as an eviction.

        The first attempt of a series counts. After a pause of ``NEW_SERIES_S`` another series begins.
        """
        now = self._clock()
        series = self._attempts.get(uid)
        first_at = now if series is None or now - series.last_at > NEW_SERIES_S else series.first_at
        self._attempts[uid] = _Attempts(mark, first_at, now)

    def since(self, uids: Iterable[str]) -> dict[str, float]:
        """When each mark on these objects was first seen."""
        unique_uids = set(uids)
        times: dict[str, float] = {}
        for uid in self._since.keys() & unique_uids:
            times.update(self._since[uid])
        for uid in self._attempts.keys() & unique_uids:
            times[self._attempts[uid].mark] = self._attempts[uid].first_at
        return times

    @property
    def bound_at(self) -> Mapping[str, float]:
        """When each pod was first seen bound, by UID; pods that are not bound are left out. It follows all changes."""
        return types.MappingProxyType(self._bound_at)

    def forget(self, uid: str) -> None:
        """Forgets an object that was deleted."""
        self._since.pop(uid, None)
        self._bound_at.pop(uid, None)
        self._attempts.pop(uid, None)

    def _beginning(self, hint_at: float | None, listed: bool, mark: str = "") -> float:
        now = self._clock()
        if not listed:
            return now
        seen_at = self._recalled.get(digest(mark)) if self._recalled else None
        return min(at for at in (now, hint_at, seen_at) if at is not None)


def digest(mark: str) -> str:
    """A short text that identifies a mark."""
    return hashlib.sha256(mark.encode()).hexdigest()[:20]


_TEXT_LIMIT = 512


#: UID of the ResourceSlice or DeviceTaintRule, the selector of the devices that have the taint, and the taint.
_Taint = tuple[str, DeviceSelector, Mark]


@dataclasses.dataclass(frozen=True)
class DeviceMarks:
    """The marks on devices of some pods.

    Attributes:
        of_pods: The marks by the UID of the pod. Pods without marks are left out.
        sources: UIDs of the ResourceSlices and DeviceTaintRules that have these marks.
    """

    of_pods: dict[str, tuple[Mark, ...]] = dataclasses.field(default_factory=dict)
    sources: frozenset[str] = frozenset()


class DeviceIndex:
    """The devices that pods use, and the taints of devices.

    Args:
        first_seen: Keeps when each mark was first seen.
    """

    def __init__(self, first_seen: FirstSeen) -> None:
        self._first_seen = first_seen
        self._claims: dict[str, ClaimedDevices] = {}
        # Namespace and UID of the pod -> UIDs of the claims. A claim is for pods of its namespace.
        self._of_pod: dict[Key, set[str]] = {}
        self._slices: dict[str, DeviceTaints] = {}
        self._of_pool: dict[tuple[str, str], set[str]] = {}  # driver and pool -> UIDs of the slices
        self._rules: dict[str, DeviceTaints] = {}
        self._tainted: set[str] = set()  # UIDs of the slices and rules that have marks

    def put(self, devices: ClaimedDevices | DeviceTaints, *, listed: bool) -> set[str]:
        """Stores an object. Returns the UIDs of the pods to which it may matter."""
        if isinstance(devices, ClaimedDevices):
            return self._put_claim(devices)
        if devices == (self._rules if devices.pool is None else self._slices).get(devices.uid):
            return set()  # as when Kubernetes writes the status of a rule
        before = self._pods_of_source(devices.uid)
        self._remove_source(devices.uid)
        if devices.pool is None:
            self._rules[devices.uid] = devices
        else:
            self._slices[devices.uid] = devices
            self._of_pool.setdefault(devices.pool, set()).add(devices.uid)
        if devices.taints:
            self._tainted.add(devices.uid)
        self._first_seen.see(devices.uid, {mark.id: mark.since_at for _, mark in devices.taints}, listed=listed)
        return before | self._pods_of_source(devices.uid)

    def drop(self, uid: str) -> set[str]:
        """Forgets an object that was deleted. Returns the UIDs of the pods to which it mattered."""
        claim = self._claims.pop(uid, None)
        if claim is not None:
            self._unlink(claim)
            return set(claim.pod_uids)
        affected = self._pods_of_source(uid)
        self._remove_source(uid)
        return affected

    def of(self, pods: Iterable[Pod]) -> DeviceMarks:
        """The marks on the devices of these pods."""
        if not self._tainted:  # nearly always
            return DeviceMarks()
        of_pods: dict[str, tuple[Mark, ...]] = {}
        sources: set[str] = set()
        in_pools: dict[tuple[str, str], list[_Taint]] = {}
        for pod in pods:
            # One taint may be on several devices of a pod, which tolerates it for each of them differently.
            marks: dict[tuple[str, tuple[Toleration, ...] | None], Mark] = {}
            for claim in sorted(self._of_pod.get((pod.namespace, pod.uid), ())):
                for allocated in self._claims[claim].devices:
                    pool = (allocated.device.driver, allocated.device.pool)
                    if (taints := in_pools.get(pool)) is None:
                        taints = in_pools[pool] = self._taints_in(*pool)
                    for uid, mark in _marks_on(allocated, taints):
                        marks.setdefault((mark.id, mark.tolerations), mark)
                        sources.add(uid)
            if marks:
                of_pods[pod.uid] = tuple(marks.values())
        return DeviceMarks(of_pods, frozenset(sources))

    def _taints_in(self, driver: str, pool: str) -> list[_Taint]:
        """The taints that may be on devices of a pool."""
        return [
            (source.uid, selector, mark)
            for source in (*self._newest_slices(driver, pool), *self._rules.values())
            for selector, mark in source.taints
            if selector.may_select(driver, pool)
        ]

    def _newest_slices(self, driver: str, pool: str) -> list[DeviceTaints]:
        """The slices of a pool's highest generation. The others are about to be deleted, and do not count.

        While slices of that generation are missing, all count: a driver writes one after the other, and a device may
        be in one that still has the generation before.
        """
        slices = [self._slices[uid] for uid in sorted(self._of_pool.get((driver, pool), ()))]
        highest = max((item.generation for item in slices), default=0)
        newest = [item for item in slices if item.generation == highest]
        return newest if len(newest) >= max((item.slices for item in newest), default=0) else slices

    def _put_claim(self, claim: ClaimedDevices) -> set[str]:
        before = self._claims.get(claim.uid)
        if before == claim:
            return set()
        if before is not None:
            self._unlink(before)
        self._claims[claim.uid] = claim
        for pod_uid in claim.pod_uids:
            self._of_pod.setdefault((claim.namespace, pod_uid), set()).add(claim.uid)
        return {*claim.pod_uids, *(before.pod_uids if before else ())}

    def _unlink(self, claim: ClaimedDevices) -> None:
        for pod_uid in claim.pod_uids:
            place = (claim.namespace, pod_uid)
            self._of_pod[place].discard(claim.uid)
            if not self._of_pod[place]:
                del self._of_pod[place]

    def _pods_of_source(self, uid: str) -> set[str]:
        """UIDs of the pods to whose devices it matters what a slice or a rule has."""
        if (rule := self._rules.get(uid)) is not None:
            taints = rule.taints
            return self._pods_with(lambda device: any(selector.selects(device) for selector, _ in taints))
        if (device_slice := self._slices.get(uid)) is None or device_slice.pool is None:
            return set()
        pool = device_slice.pool
        if self._tainted.isdisjoint(self._of_pool[pool]):
            return set()
        # The whole pool: a slice of a new generation takes the place of all others.
        return self._pods_with(lambda device: (device.driver, device.pool) == pool)

    def _pods_with(self, concerned: Callable[[Device], bool]) -> set[str]:
        claims = (claim for claim in self._claims.values() if any(concerned(item.device) for item in claim.devices))
        return {pod_uid for claim in claims for pod_uid in claim.pod_uids}

    def _remove_source(self, uid: str) -> None:
        self._tainted.discard(uid)
        self._rules.pop(uid, None)
        device_slice = self._slices.pop(uid, None)
        if device_slice is not None and device_slice.pool is not None:
            self._of_pool[device_slice.pool].discard(uid)
            if not self._of_pool[device_slice.pool]:
                del self._of_pool[device_slice.pool]


def _marks_on(allocated: AllocatedDevice, taints: Iterable[_Taint]) -> Iterator[tuple[str, Mark]]:
    for uid, selector, mark in taints:
        if selector.selects(allocated.device):
            text = f"{mark.text} of device {allocated.device}"[:_TEXT_LIMIT]
            yield uid, dataclasses.replace(mark, text=text, tolerations=allocated.tolerations)


class SignalIndex:
    """Marks by object.

    Args:
        first_seen: Keeps when each mark was first seen.
    """

    def __init__(self, first_seen: FirstSeen) -> None:
        self._first_seen = first_seen
        self._marks: dict[str, tuple[Mark, ...]] = {}  # by UID, of the objects that have any
        self._attached: dict[str, set[str]] = {}  # node's name or workload's UID -> UIDs
        self._attached_to: dict[str, str] = {}

    def see(self, uid: str, marks: tuple[Mark, ...], *, listed: bool) -> bool:
        """Notes that the object has these marks now and no others. Returns True if it had others before."""
        before = self._marks.pop(uid, ())
        if not (marks or before):
            return False  # as nearly all objects
        if marks:
            self._marks[uid] = marks
        self._first_seen.see(uid, {mark.id: mark.since_at for mark in marks}, listed=listed)
        return marks != before

    def attach(self, uid: str, to: str) -> str:
        """Notes that an object belongs to a node (by name) or a workload (by UID). Returns its previous owner."""
        before = self._detach(uid)
        self._attached_to[uid] = to
        self._attached.setdefault(to, set()).add(uid)
        return before

    def forget(self, uid: str) -> str:
        """Forgets an object that was deleted. Returns what it was attached to."""
        self._marks.pop(uid, None)
        return self._detach(uid)

    @property
    def marked(self) -> Set[str]:
        """The UIDs of the objects that have marks."""
        return self._marks.keys()

    def doomed(self) -> set[str]:
        """The nodes (by name) and workloads (by UID) of the attached objects with a mark that is more than a hint."""
        return {
            self._attached_to[uid]
            for uid in self._marks.keys() & self._attached_to.keys()
            if any(mark.row.confidence is not Confidence.HINT for mark in self._marks[uid])
        }

    def on(self, uids: Iterable[str]) -> tuple[Mark, ...]:
        """The marks on these objects."""
        return tuple(mark for uid in uids for mark in self._marks.get(uid, ()))

    def attached_to(self, owners: Iterable[str]) -> set[str]:
        """The UIDs of the objects that belong to these nodes (by name) and workloads (by UID)."""
        if not self._attached_to:  # most clusters have neither kind
            return set()
        return {uid for owner in owners if owner for uid in self._attached.get(owner, ())}

    def _detach(self, uid: str) -> str:
        before = self._attached_to.pop(uid, "")
        uids = self._attached.get(before, set())
        uids.discard(uid)
        if not uids:
            self._attached.pop(before, None)
        return before


class Suspensions:
    """Which suspensions of workloads may have a reason that this replica does not know yet.

    Kueue says in its own Workload why it takes the quota back, and then suspends the job. Two watches bring that, in
    any order. So when a workload that Kueue manages is seen suspended, Kueue's Workload is read again
    (``WorkloadRefresh``). Until then the suspension is unexplained, and nothing is decided by it.

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
        place: Callable[[str], tuple[Kind, str, str] | None],
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
        entries = [place for place in places if place is not None and place[0] is KUEUE_WORKLOADS]
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


class SnapshotServerIndex:
    """The snapshot servers of this installation.

    Args:
        installation: The value of the label of their pods.

    Attributes:
        by_uid: The servers by the UIDs of their pods.
        changed: The nodes of which something has changed that matters to the use of their servers: the server, signals,
            failure domains. Whoever looks empties it.
        touched: UIDs of the servers that came, changed or went. ``SnapshotHoldings`` empties it.
    """

    def __init__(self, installation: str) -> None:
        self._installation = installation
        self.by_uid: dict[str, SnapshotServerPod] = {}
        self.changed: set[str] = set()
        self.touched: set[str] = set()
        self._uids_on: dict[str, set[str]] = collections.defaultdict(set)

    def on(self, node: str) -> list[SnapshotServerPod]:
        """The servers of a node, by UID."""
        return [self.by_uid[uid] for uid in sorted(self._uids_on.get(node, ()))]

    def note(self, node: str) -> None:
        """Something of a node has changed. Where there are no servers nobody looks, and nothing is kept."""
        if self._installation:
            self.changed.add(node)

    def put(self, server: SnapshotServerPod) -> None:
        """Stores a server, unless another installation in the namespace has it."""
        if server.installation == self._installation and self.by_uid.get(server.uid) != server:
            self.drop(server.uid)
            self.by_uid[server.uid] = server
            self._uids_on[server.node].add(server.uid)
            self.changed.add(server.node)
            self.touched.add(server.uid)

    def drop(self, uid: str) -> None:
        """Removes a server whose pod was deleted."""
        server = self.by_uid.pop(uid, None)
        if server is not None:
            discard(self._uids_on, server.node, uid)
            self.changed.add(server.node)
            self.touched.add(uid)


#: Seconds for which the version of a deleted object is kept.
_REMEMBER_GONE_S = 600.0


class ResourceVersions:
    """The known resourceVersion of each object, by UID. It shows whether a version that arrives is new.

    A direct read may be newer than the watch, and the watch must not undo it. The versions of deleted objects are kept
    for ten minutes.

    Args:
        clock: Seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, int] = {}
        self._gone: dict[str, tuple[float, int]] = {}  # when it was deleted, and its version then

    def take(self, uid: str, version: int, *, fresh: bool = False) -> bool:
        """Notes the version of an object that arrived. Returns False if a newer one is known.

        Args:
            uid: The object's UID.
            version: Its resourceVersion. 0 if it is not a number.
            fresh: True if the API server was asked just now. Then a version equal to that of the deletion counts: an
                object that lost the label by which it is watched seems deleted at its current version.
        """
        if uid in self._gone:
            gone_version = self._gone[uid][1]
            if version < gone_version or (version == gone_version and not fresh):
                return False
            del self._gone[uid]
        if version and version < self._known.get(uid, 0):
            return False
        self._known[uid] = version
        return True

    def of(self, uid: str) -> int:
        """The known version of the object. 0 if it is not known."""
        return self._known.get(uid, 0)

    def is_behind(self, uid: str, version: int) -> bool:
        """True if the object exists in a newer version than the one that is known here."""
        return max(self._known.get(uid, 0), self._gone.get(uid, (0.0, 0))[1]) < version

    def rewind(self) -> None:
        """Forgets all versions. Call it when the API server has gone back to an older state (etcd was restored)."""
        self._known.clear()
        self._gone.clear()

    def drop(self, uid: str, version: int) -> None:
        """Notes that the object was deleted. Only a newer version brings it back.

        An object that lost the label by which it is watched looks deleted, and may get the label again.

        Args:
            uid: The object's UID.
            version: Its resourceVersion when it was deleted. 0 if that is not known.
        """
        now = self._clock()
        while self._gone and now - next(iter(self._gone.values()))[0] >= _REMEMBER_GONE_S:
            del self._gone[next(iter(self._gone))]
        before = self._gone.pop(uid, (now, 0))[1]
        self._gone[uid] = (now, max(before, version, self._known.pop(uid, 0)))


def version_of(meta: Mapping[str, Any]) -> int:
    """The resourceVersion as a number, which can be compared (KEP-5504). 0 if it is not a number."""
    try:
        return int(meta["resourceVersion"])
    except (KeyError, TypeError, ValueError):
        return 0
