"""Which marks of the disruption catalogue are on the objects that are known. No locks: see ``world``.

Some objects matter only for what they belong to: Karpenter's NodeClaim for a node, Kueue's Workload for a JobSet. Of
those nothing is kept but their marks and that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gracepoint_operator import signals
from gracepoint_operator.cache.first_seen import FirstSeen
from gracepoint_operator.signals import Mark, On, Row


class SignalIndex:
    """See the module.

    Args:
        rows: The catalogue, users' rows first.
        sightings: Is told since when each mark is there.
    """

    def __init__(self, rows: Sequence[Row], first_seen: FirstSeen) -> None:
        self.left_out: dict[str, None] = {}  # what could not be read of the object that was seen last
        self._rows = {on: tuple(row for row in rows if row.match.kind is on) for on in On}
        self._first_seen = first_seen
        self._marks: dict[str, tuple[Mark, ...]] = {}  # by UID
        self._attached: dict[str, set[str]] = {}  # node's name or JobSet's UID -> UIDs
        self._attached_to: dict[str, str] = {}

    def see(self, on: On, body: Mapping[str, Any], *, listed: bool) -> tuple[Mark, ...]:
        """Notes what is on an object now; returns it."""
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
        """An object (NodeClaim, Workload) belongs to a node, by name, or a JobSet, by UID; returns to which before."""
        before = self._detach(uid)
        self._attached_to[uid] = to
        self._attached.setdefault(to, set()).add(uid)
        return before

    def forget(self, uid: str) -> str:
        """The object is gone; returns what it was attached to."""
        self._marks.pop(uid, None)
        return self._detach(uid)

    def on(self, uids: Iterable[str]) -> tuple[Mark, ...]:
        """What is on these objects."""
        return tuple(mark for uid in uids for mark in self._marks.get(uid, ()))

    def attached_to(self, owners: Iterable[str]) -> set[str]:
        """The UIDs of what is attached to these nodes, by name, and JobSets, by UID."""
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
