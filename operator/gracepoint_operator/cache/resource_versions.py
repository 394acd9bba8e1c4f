"""The known version of each object, and which objects were deleted. It tells whether a version that arrives is new.

A direct read may be newer than the watch, and the watch must not undo it. The controller's event loop owns it; there
are no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_REMEMBER_GONE_S = 600.0


class ResourceVersions:
    """resourceVersions by UID. Those of deleted objects are kept for ten minutes.

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
