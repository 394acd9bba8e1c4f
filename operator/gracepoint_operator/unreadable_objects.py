"""Which objects, and which parts of objects, this replica cannot read. No locks: see ``cache.cluster_cache``.

Each is logged once, and again only if the reason changes. A metric counts them by kind. The last version of an object
that could be read stays in use: if the operator forgot a node's taint or a gang's policy because of another error in
the object, the gang would get no notice. A deletion of the object takes effect as usual. If only a part of an object
cannot be read, the rest is used.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterable

from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.observability.logs import about

log = logging.getLogger(__name__)

#: At most this number of parts of one object is named.
_AT_MOST_PARTS = 5


@dataclasses.dataclass(frozen=True)
class _Entry:
    kind: Kind
    whole: bool
    why: str


class UnreadableObjects:
    """See the module.

    Args:
        count: Called with the kind's plural, ``object`` or ``part``, and the current number.
    """

    def __init__(self, count: Callable[[str, str, int], None] = lambda kind, extent, number: None) -> None:
        self._count = count
        self._entries: dict[str, _Entry] = {}  # by UID
        self._numbers: collections.Counter[tuple[str, str]] = collections.Counter()

    def object(self, kind: Kind, uid: str, where: str, why: str) -> None:
        """Records that an object cannot be read. ``where`` is its namespace and name."""
        self._note(uid, _Entry(kind, True, why), where)

    def parts(self, kind: Kind, uid: str, where: str, why: Iterable[str]) -> None:
        """Records that these parts of an object cannot be read. Empty: the whole object can be read."""
        found = list(why)
        if found:
            self._note(uid, _Entry(kind, False, "; ".join(found[:_AT_MOST_PARTS])), where)
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
        return entry.why if entry is not None and entry.whole else None

    def objects(self, kind: Kind) -> dict[str, str]:
        """Returns the objects of a kind whose newest version cannot be read: UID -> reason."""
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
        log.error(said, extra=about(kind=entry.kind.title, object=where, error=entry.why))

    def _add(self, entry: _Entry, number: int) -> None:
        what = (entry.kind.title, "object" if entry.whole else "part")
        self._numbers[what] += number
        self._count(*what, self._numbers[what])
