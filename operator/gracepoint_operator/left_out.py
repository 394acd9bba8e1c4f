"""Which objects, and which parts of objects, this replica cannot read. No locks: see ``world``.

Each is said once in the log, and again only when it cannot be read for another reason; a metric has how many there are
of each kind. The last version of an object that could be read stays in force meanwhile: to forget a node's taint, or
the policy of a gang, because of something else that was written on the object would make gangs deaf. Its deletion is
noticed as ever. Of an object of which a part cannot be read, everything else counts.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterable

from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.observability.logs import about

log = logging.getLogger(__name__)

#: So many parts of one object are named.
_AT_MOST_PARTS = 5


@dataclasses.dataclass(frozen=True)
class _Entry:
    kind: Kind
    whole: bool
    why: str


class LeftOut:
    """See the module.

    Args:
        count: Is told, by the kind's plural and ``object`` or ``part``, how many there are now.
    """

    def __init__(self, count: Callable[[str, str, int], None] = lambda kind, extent, number: None) -> None:
        self._count = count
        self._entries: dict[str, _Entry] = {}  # by UID
        self._numbers: collections.Counter[tuple[str, str]] = collections.Counter()

    def object(self, kind: Kind, uid: str, where: str, why: str) -> None:
        """An object cannot be read; ``where``: namespace and name."""
        self._note(uid, _Entry(kind, True, why), where)

    def parts(self, kind: Kind, uid: str, where: str, why: Iterable[str]) -> None:
        """An object was read but for these parts; none: everything on it can be read."""
        found = list(why)
        if found:
            self._note(uid, _Entry(kind, False, "; ".join(found[:_AT_MOST_PARTS])), where)
        else:
            self.forget(uid)

    def forget(self, uid: str) -> None:
        """The object is gone, or can be read again."""
        entry = self._entries.pop(uid, None)
        if entry is not None:
            self._add(entry, -1)

    def why(self, uid: str) -> str | None:
        """Why nothing of this version of an object can be read; None where something can."""
        entry = self._entries.get(uid)
        return entry.why if entry is not None and entry.whole else None

    def objects(self, kind: Kind) -> dict[str, str]:
        """The objects of a kind of which nothing new can be read, by UID, and why."""
        return {uid: entry.why for uid, entry in self._entries.items() if entry.whole and entry.kind == kind}

    def _note(self, uid: str, entry: _Entry, where: str) -> None:
        before = self._entries.get(uid)
        if entry == before:
            return
        self._entries[uid] = entry
        if before is not None:
            self._add(before, -1)
        self._add(entry, 1)
        said = (
            "object left out, it cannot be read" if entry.whole else "a part of an object left out, it cannot be read"
        )
        log.error(said, extra=about(kind=entry.kind.plural, object=where, error=entry.why))

    def _add(self, entry: _Entry, number: int) -> None:
        what = (entry.kind.plural, "object" if entry.whole else "part")
        self._numbers[what] += number
        self._count(*what, self._numbers[what])
