"""Which version of which object is known, and which objects are gone: so that old news are told from new ones.

A fresh read may overtake the watch, which must not undo it. No locks: see ``world``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_REMEMBER_GONE_S = 600.0


class ResourceVersions:
    """resourceVersions by UID, those of objects that went for some time longer.

    Args:
        clock: Seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, int] = {}
        self._gone: dict[str, tuple[float, int]] = {}  # when, and the version at which it went

    def take(self, meta: Mapping[str, Any], *, fresh: bool = False) -> bool:
        """Notes the version of an object that came; False if it is old news.

        ``fresh``: the API was asked just now. An object that lost the label by which it is watched has the very version
        at which it seemed to go, as the deletion of an object has a version of its own.
        """
        uid, version = meta["uid"], version_of(meta)
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
        """The version in which the object is known; 0 where that is not known."""
        return self._known.get(uid, 0)

    def rewind(self) -> None:
        """The API server has gone back to an older state, as after etcd was restored: no version of before counts."""
        self._known.clear()
        self._gone.clear()

    def drop(self, uid: str, version: int) -> None:
        """The object is gone. Late news of it will be old ones, and newer ones bring it back: an object that lost
        the label by which it is watched looks deleted, and may get the label again.

        Args:
            uid: The object's.
            version: Its resourceVersion when it went; 0 where that is not known.
        """
        now = self._clock()
        while self._gone and now - next(iter(self._gone.values()))[0] >= _REMEMBER_GONE_S:
            del self._gone[next(iter(self._gone))]
        before = self._gone.pop(uid, (now, 0))[1]
        self._gone[uid] = (now, max(before, version, self._known.pop(uid, 0)))


def version_of(meta: Mapping[str, Any]) -> int:
    """The resourceVersion, comparable by KEP-5504 and ever since in etcd; 0 where it is no number."""
    try:
        return int(meta["resourceVersion"])
    except (KeyError, TypeError, ValueError):
        return 0
