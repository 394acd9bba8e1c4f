"""When this replica first saw something for which the API gives no time, or no exact one.

For an object from a watch, that is now, by this replica's clock. An object from a list (at start, or after a watch
lost its place) may have changed earlier. Then the time from the API is taken, or the time at which another replica saw
it, if that is earlier (``recording.first_seen_writer``). The controller's event loop owns it; there are no locks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping

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
            marks: When each mark began, in seconds since the epoch. None if the API does not tell.
            listed: True if the object comes from a list.
        """
        known = self._since.pop(uid, {})
        if marks:
            self._since[uid] = {
                mark: known[mark] if mark in known else self._beginning(hint_at, listed, mark)
                for mark, hint_at in marks.items()
            }

    def recall(self, seen: Mapping[str, float]) -> None:
        """Uses the times that replicas saw before this one began, by ``digest``, until ``forget_recalled``."""
        self._recalled = dict(seen)
        for marks in self._since.values():
            marks.update({mark: min(at, seen.get(digest(mark), at)) for mark, at in marks.items()})

    def forget_recalled(self) -> None:
        """Ends the use of recalled times. Call it when everything is listed: a mark that comes later is new."""
        self._recalled = {}

    def see_bound(self, uid: str, hint_at: float | None, *, listed: bool) -> None:
        """Notes that the pod is bound to its node.

        Args:
            uid: The pod's UID.
            hint_at: When it was bound, in seconds since the epoch. None if the API does not tell.
            listed: True if the pod comes from a list.
        """
        if uid not in self._bound_at:
            self._bound_at[uid] = self._beginning(hint_at, listed)

    def see_attempt(self, uid: str, mark: str) -> None:
        """Notes an attempt that leaves no trace on the object, such as an eviction.

        The first attempt of a series counts. After a pause of ``NEW_SERIES_S`` another series begins.
        """
        now = self._clock()
        known = self._attempts.get(uid)
        first_at = now if known is None or now - known.last_at > NEW_SERIES_S else known.first_at
        self._attempts[uid] = _Attempts(mark, first_at, now)

    def since(self, uids: Iterable[str]) -> dict[str, float]:
        """When each mark on these objects was first seen."""
        wanted = set(uids)
        found: dict[str, float] = {}
        for uid in self._since.keys() & wanted:
            found.update(self._since[uid])
        for uid in self._attempts.keys() & wanted:
            found[self._attempts[uid].mark] = self._attempts[uid].first_at
        return found

    def bound_at(self, uids: Iterable[str]) -> dict[str, float]:
        """When each of these pods was first seen bound; pods that are not bound are left out."""
        return {uid: self._bound_at[uid] for uid in uids if uid in self._bound_at}

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
