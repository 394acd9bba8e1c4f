"""The marks of the disruption catalogue on the known objects.

Some objects matter only because of the object that they belong to: Karpenter's NodeClaim for a node, Kueue's Workload
for a workload. Only their marks and their owner are kept. The controller's event loop owns the index; there are no
locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from gracepoint_operator.cache.indexes.first_seen import FirstSeen
from gracepoint_operator.signals import Mark


class SignalIndex:
    """Marks by object.

    Args:
        first_seen: Is told when each mark was first seen.
    """

    def __init__(self, first_seen: FirstSeen) -> None:
        self._first_seen = first_seen
        self._marks: dict[str, tuple[Mark, ...]] = {}  # by UID, of the objects that have any
        self._attached: dict[str, set[str]] = {}  # node's name or workload's UID -> UIDs
        self._attached_to: dict[str, str] = {}

    def see(self, uid: str, found: tuple[Mark, ...], *, listed: bool) -> bool:
        """Notes that the object has these marks now and no others. Returns True if it had others before."""
        before = self._marks.pop(uid, ())
        if not (found or before):
            return False  # as nearly all objects
        if found:
            self._marks[uid] = found
        self._first_seen.see(uid, {mark.id: mark.since_at for mark in found}, listed=listed)
        return found != before

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
        others = self._attached.get(before, set())
        others.discard(uid)
        if not others:
            self._attached.pop(before, None)
        return before
