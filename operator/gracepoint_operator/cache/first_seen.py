"""When this replica first saw what the API gives no, or no exact, time for. No locks: see ``world``.

Of what comes by a watch that is now, by this replica's clock. Of what comes by a listing (at start, or after a
watch lost its place) it began earlier: then the API's own times are taken, which are of one clock as well, or what
another replica saw, if that is earlier (``recollection``).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping

#: Whoever still tries, tries more often than this (kubectl drain: every 5 s).
NEW_SERIES_S = 300.0


@dataclasses.dataclass(frozen=True)
class _Attempts:
    mark: str
    first_at: float
    last_at: float


class FirstSeen:
    """Of marks (things that may be signals) and of pods' bindings, by the UID of the object.

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
        """The object has these marks now and no others.

        Args:
            uid: The object's.
            marks: Each mark, with the time at which it began where the API tells one.
            listed: They come from a listing.
        """
        known = self._since.get(uid, {})
        self._since[uid] = {
            mark: known[mark] if mark in known else self._beginning(hint_at, listed, mark)
            for mark, hint_at in marks.items()
        }

    def recall(self, seen: Mapping[str, float]) -> None:
        """Takes what was seen before this replica began, by ``digest``, until ``forget_recalled``."""
        self._recalled = dict(seen)
        for marks in self._since.values():
            marks.update({mark: min(at, seen.get(digest(mark), at)) for mark, at in marks.items()})

    def forget_recalled(self) -> None:
        """All is listed: what was seen before and is not there now went away, and is new when it comes again."""
        self._recalled = {}

    def see_bound(self, uid: str, hint_at: float | None, *, listed: bool) -> None:
        """The pod is bound to its node; ``hint_at`` and ``listed`` as for ``see``."""
        if uid not in self._bound_at:
            self._bound_at[uid] = self._beginning(hint_at, listed)

    def see_attempt(self, uid: str, mark: str) -> None:
        """Something was tried on the object, which itself does not tell of it: an eviction.

        The first of a series is what counts; after a pause of ``NEW_SERIES_S`` another series begins.
        """
        now = self._clock()
        known = self._attempts.get(uid)
        first_at = now if known is None or now - known.last_at > NEW_SERIES_S else known.first_at
        self._attempts[uid] = _Attempts(mark, first_at, now)

    def since(self, uids: Iterable[str]) -> dict[str, float]:
        """When each mark on these objects was first seen."""
        found: dict[str, float] = {}
        for uid in uids:
            found.update(self._since.get(uid, {}))
            if (attempts := self._attempts.get(uid)) is not None:
                found[attempts.mark] = attempts.first_at
        return found

    def bound_at(self, uids: Iterable[str]) -> dict[str, float]:
        """When each of these pods was first seen bound; those that are not bound are left out."""
        return {uid: self._bound_at[uid] for uid in uids if uid in self._bound_at}

    def forget(self, uid: str) -> None:
        """The object is gone."""
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
    """A mark as short as it can be told apart by."""
    return hashlib.sha256(mark.encode()).hexdigest()[:20]
