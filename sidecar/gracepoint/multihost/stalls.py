"""Which process holds up the others. Every process that makes no progress says so in the store; one reads what all say.

A process that is stopped, or whose host hangs, says nothing. So the processes that say nothing are suspected first,
then those that are behind, then those in another stage. Any thread may call everything here.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence

from gracepoint.multihost.naming import named
from gracepoint.multihost.store import KeyExists, KeyValueStore
from gracepoint.process_group import ProcessGroup

_FOLDER = "stalls"
#: The stack of a process is cut to this number of characters: all stacks lie in the memory of process 0.
_STACK_CHARACTERS = 3000


@dataclasses.dataclass(frozen=True)
class StalledAt:
    """Where a process is that makes no progress.

    Attributes:
        stage: What it does, in words.
        sync_point: Number of the latest sync point that it has passed.
        stack: Where its thread is, as lines of a traceback.
    """

    stage: str
    sync_point: int
    stack: str


@dataclasses.dataclass(frozen=True)
class Suspicion:
    """Which processes hold up the others.

    Attributes:
        processes: Their indices.
        why: Why they are suspected, in words.
        stack: Where the first of them is. Empty if it has not said so.
    """

    processes: list[int]
    why: str
    stack: str


class StallBoard:
    """Where the processes say that they make no progress.

    Args:
        store: The key-value store that all processes share.
        group: The processes that train together.
    """

    def __init__(self, store: KeyValueStore, group: ProcessGroup) -> None:
        self._store = store
        self._group = group
        self._mine = f"{_FOLDER}/places/{group.process_index}"

    def post(self, place: StalledAt) -> bool:
        """Says where this process is. Returns True if it is the one that tells the operator for all.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        place = dataclasses.replace(place, stack=place.stack[-_STACK_CHARACTERS:])
        self._store.delete_folder(self._mine)
        with contextlib.suppress(KeyExists):  # another thread of this process was faster
            self._store.set(f"{self._mine}/place", json.dumps(dataclasses.asdict(place)))
        me = str(self._group.process_index)
        return self._group.decide(f"{_FOLDER}/told/{place.sync_point}", me) == me

    def take_down(self) -> None:
        """Says that this process makes progress again.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        self._store.delete_folder(self._mine)

    def suspicion(self, names: Sequence[str | None] = ()) -> Suspicion:
        """Reads where all processes are. Returns which of them hold up the others.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        found = self._store.list(f"{_FOLDER}/places")
        places = {int(key.partition("/")[0]): StalledAt(**json.loads(value)) for key, value in found.items()}
        return suspicion(places, self._group.process_count, names)


def suspicion(places: Mapping[int, StalledAt], count: int, names: Sequence[str | None] = ()) -> Suspicion:
    """Returns which of ``count`` processes hold up the others.

    Args:
        places: Where the processes are that have said that they make no progress.
        count: How many processes there are.
        names: The pods of the processes, for the words.
    """
    silent = [index for index in range(count) if index not in places]
    if silent and places:
        return Suspicion(
            silent,
            f"{named(silent, names)} did not say so as well: stopped, or busy with something that the others wait for",
            "",
        )
    points = {index: place.sync_point for index, place in places.items()}
    first, last = min(points.values(), default=0), max(points.values(), default=0)
    if first != last:
        behind = sorted(index for index, point in points.items() if point == first)
        why = f"{named(behind, names)} passed sync point {first} last, others sync point {last}"
        return Suspicion(behind, why, places[behind[0]].stack)
    stages = collections.Counter(place.stage for place in places.values())
    (usual, _), *others = stages.most_common() or [("", 0)]
    if others:
        apart = sorted(index for index, place in places.items() if place.stage != usual)
        why = f"{named(apart, names)} {'is' if len(apart) == 1 else 'are'} in another stage than the others ({usual})"
        return Suspicion(apart, f"{why}: {places[apart[0]].stage}", places[apart[0]].stack)
    everybody = sorted(places)
    why = "all processes are at the same sync point, in the same stage"
    return Suspicion(everybody, why, places[everybody[0]].stack if everybody else "")
