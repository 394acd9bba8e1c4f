"""The marks of the disruption catalogue on the known objects.

Some objects matter only because of the object that they belong to: Karpenter's NodeClaim for a node, Kueue's Workload
for a workload. Only their marks and their owner are kept. The controller's event loop owns the index; there are no
locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gracepoint_operator import signals
from gracepoint_operator.cache.first_seen import FirstSeen
from gracepoint_operator.signals import Mark, On, Row


class SignalIndex:
    """Marks by object.

    Args:
        rows: The catalogue, users' rows first.
        first_seen: Is told when each mark was first seen.
    """

    def __init__(self, rows: Sequence[Row], first_seen: FirstSeen) -> None:
        self.left_out: dict[str, None] = {}  # the parts of the object seen last that could not be read
        self._rows = {on: tuple(row for row in rows if row.match.kind is on) for on in On}
        self._first_seen = first_seen
        self._marks: dict[str, tuple[Mark, ...]] = {}  # by UID
        self._attached: dict[str, set[str]] = {}  # node's name or workload's UID -> UIDs
        self._attached_to: dict[str, str] = {}

    def see(self, on: On, body: Mapping[str, Any], *, listed: bool) -> tuple[Mark, ...]:
        """Notes the marks on an object, and returns them."""
        uid = body["metadata"]["uid"]
        self.left_out = {}
        found = signals.marks(self._rows[on], on, body, self.left_out)
        if found:
            self._marks[uid] = found
        else:
            self._marks.pop(uid, None)
        self._first_seen.see(uid, {mark.id: mark.since_at for mark in found}, listed=listed)
        return found

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
