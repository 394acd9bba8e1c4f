"""The devices that pods use, and the taints of devices.

The controller's event loop owns the index; there are no locks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from gracepoint_operator.cache.indexes.first_seen import FirstSeen
from gracepoint_operator.cache.preemption_store import Key
from gracepoint_operator.kube.objects import Pod, Toleration
from gracepoint_operator.model.devices import AllocatedDevice, ClaimedDevices, Device, DeviceSelector, DeviceTaints
from gracepoint_operator.signals import Mark

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
    """See the module.

    Args:
        first_seen: Is told when each mark was first seen.
    """

    def __init__(self, first_seen: FirstSeen) -> None:
        self._first_seen = first_seen
        self._claims: dict[str, ClaimedDevices] = {}
        # Namespace and UID of the pod -> UIDs of the claims. A claim is for pods of its own namespace.
        self._of_pod: dict[Key, set[str]] = {}
        self._slices: dict[str, DeviceTaints] = {}
        self._of_pool: dict[tuple[str, str], set[str]] = {}  # driver and pool -> UIDs of the slices
        self._rules: dict[str, DeviceTaints] = {}
        self._tainted: set[str] = set()  # UIDs of the slices and rules that have marks

    def put(self, found: ClaimedDevices | DeviceTaints, *, listed: bool) -> set[str]:
        """Stores an object. Returns the UIDs of the pods to which it may matter."""
        if isinstance(found, ClaimedDevices):
            return self._put_claim(found)
        if found == (self._rules if found.pool is None else self._slices).get(found.uid):
            return set()  # as when Kubernetes writes the status of a rule
        before = self._pods_of_source(found.uid)
        self._remove_source(found.uid)
        if found.pool is None:
            self._rules[found.uid] = found
        else:
            self._slices[found.uid] = found
            self._of_pool.setdefault(found.pool, set()).add(found.uid)
        if found.taints:
            self._tainted.add(found.uid)
        self._first_seen.see(found.uid, {mark.id: mark.since_at for _, mark in found.taints}, listed=listed)
        return before | self._pods_of_source(found.uid)

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
        """The slices of a pool's highest generation. The others are about to be deleted, and do not count."""
        slices = [self._slices[uid] for uid in sorted(self._of_pool.get((driver, pool), ()))]
        newest = max((item.generation for item in slices), default=0)
        return [item for item in slices if item.generation == newest]

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
        if (found := self._rules.get(uid)) is not None:
            rule = found
            return self._pods_with(lambda device: any(selector.selects(device) for selector, _ in rule.taints))
        if (found := self._slices.get(uid)) is None or found.pool is None:
            return set()
        pool = found.pool
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
        gone = self._slices.pop(uid, None)
        if gone is not None and gone.pool is not None:
            self._of_pool[gone.pool].discard(uid)
            if not self._of_pool[gone.pool]:
                del self._of_pool[gone.pool]


def _marks_on(allocated: AllocatedDevice, taints: Iterable[_Taint]) -> Iterator[tuple[str, Mark]]:
    for uid, selector, mark in taints:
        if selector.selects(allocated.device):
            text = f"{mark.text} of device {allocated.device}"[:_TEXT_LIMIT]
            yield uid, dataclasses.replace(mark, text=text, tolerations=allocated.tolerations)
