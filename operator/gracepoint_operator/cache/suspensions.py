"""Which suspensions of workloads may have a reason that this replica does not know yet.

Kueue says in its own Workload why it takes the quota back, and then suspends the job. Two watches bring that, in any
order. So when a workload that Kueue manages is seen suspended, Kueue's Workload is read afresh (``workload_refresh``).
Until then the suspension is unexplained, and nothing is decided by it.

The controller's event loop owns this; there are no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gracepoint_operator.cache.indexes.first_seen import FirstSeen
from gracepoint_operator.cache.indexes.gang_objects import GangObjects
from gracepoint_operator.cache.indexes.signal_index import SignalIndex
from gracepoint_operator.cache.preemption_store import Key
from gracepoint_operator.kube import kinds
from gracepoint_operator.signals import is_suspension


class Suspensions:
    """See the module.

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
        found = [place for place in places if place is not None and place[0] is kinds.KUEUE_WORKLOADS]
        return [(namespace, name) for _, namespace, name in found if namespace == workload.namespace]

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
        found = self.of(workload_uid)
        if not found or not self.queue_entries(workload_uid):
            return frozenset()
        return frozenset(mark for mark in found if self._explained.get(mark) != since.get(mark))

    def forget(self, uid: str) -> None:
        """Forgets an object that was deleted."""
        for mark in [mark for mark in self._explained if mark.startswith(f"{uid}/")]:
            del self._explained[mark]
