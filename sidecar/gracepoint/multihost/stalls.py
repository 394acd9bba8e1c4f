"""Finds which process holds up the others. Each that makes no progress writes so to the store, and one reads all.

Each part of a process, such as the training or the background save, reports separately, and is compared with the same
part of the other processes. A process that is stopped, or whose host hangs, reports nothing. So the processes that
report nothing are suspected first, then those that are behind, then those in another stage. Any thread may call
everything here.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Mapping

from gracepoint.multihost.store import KeyExists, KeyValueStore, Pods, named
from gracepoint.process_group import ProcessGroup

_FOLDER = "stalls"
#: The stack of a process is cut to this number of characters: all stacks lie in the memory of process 0.
_STACK_CHARACTERS = 3000


@dataclasses.dataclass(frozen=True)
class StalledAt:
    """Where a part of a process is if it makes no progress.

    Attributes:
        stage: What the part does, as text.
        order: How far it is, as numbers that can be compared with those of other processes: less is further back. The
            first one is the same in all processes that stall together, as a rule.
        reached: The same as text.
        stack: Where its thread is, as lines of a traceback.
    """

    stage: str
    order: tuple[int, ...]
    reached: str
    stack: str


@dataclasses.dataclass(frozen=True)
class Suspicion:
    """Which processes hold up the others.

    Attributes:
        processes: Their indices.
        why: Why they are suspected, as text.
        stack: Where the first of them is. Empty if it has not said so.
    """

    processes: list[int]
    why: str
    stack: str


def host_is_silent(host: int, pods: Pods, reason: str = "does not answer") -> Suspicion:
    """Returns the suspicion for a store that does not answer: the process that hosts it is suspected."""
    return Suspicion([host], f"{named([host], pods)}, which hosts the coordination service, {reason}", "")


class StallBoard:
    """Where the processes say that they make no progress.

    Args:
        store: The key-value store that all processes share.
        gang: The processes that train together.
        host: Index of the process that hosts the store.
        pods: Names of the pods by process index.

    Attributes:
        pods: As given.
        is_host: True in the process that hosts the store.
    """

    def __init__(self, store: KeyValueStore, gang: ProcessGroup, host: int = 0, pods: Pods = ()) -> None:
        self._store = store
        self._gang = gang
        self._host = host
        self.pods = pods
        self.is_host = gang.process_index == host

    def post(self, part: str, place: StalledAt) -> bool:
        """Says where a part of this process is now. Returns True if this process reports to the operator for all.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        self._store.delete_folder(self._place(part))
        self.say(part, place)
        me = str(self._gang.process_index)
        return self._gang.decide(f"{_FOLDER}/told/{_key(part)}/{place.order[0]}", me) == me

    def say(self, part: str, place: StalledAt) -> None:
        """Says where a part of this process is, unless that was said before.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        place = dataclasses.replace(place, stack=place.stack[-_STACK_CHARACTERS:])
        with contextlib.suppress(KeyExists):  # another thread of this process was faster
            self._store.set(f"{self._place(part)}/place", json.dumps(dataclasses.asdict(place)))

    def take_down(self, part: str) -> None:
        """Says that a part of this process makes progress again, or has ended.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        self._store.delete_folder(self._place(part))

    def silent(self, reason: str = "does not answer") -> Suspicion:
        """Returns the suspicion if the store does not answer: the process that hosts it is suspected."""
        return host_is_silent(self._host, self.pods, reason)

    def suspicion(self, part: str) -> Suspicion:
        """Reads where this part is in each process. Returns which processes hold up the others.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        listing = self._store.list(f"{_FOLDER}/places/{_key(part)}")
        places = {int(key.partition("/")[0]): _read(value) for key, value in listing.items()}
        return suspicion(places, self._gang.process_count, self.pods)

    def _place(self, part: str) -> str:
        return f"{_FOLDER}/places/{_key(part)}/{self._gang.process_index}"


def _key(part: str) -> str:
    return part.replace(" ", "-")


def _read(value: str) -> StalledAt:
    fields = json.loads(value)
    return StalledAt(**{**fields, "order": tuple(fields["order"])})


def suspicion(places: Mapping[int, StalledAt], count: int, names: Pods = ()) -> Suspicion:
    """Returns which of ``count`` processes hold up the others.

    Args:
        places: Where the processes are that have said that they make no progress.
        count: How many processes there are.
        names: The pods of the processes, for the text.
    """
    if not places:
        return Suspicion([], "no process says any more that it makes no progress", "")
    silent = [index for index in range(count) if index not in places]
    if silent:
        return Suspicion(
            silent,
            f"{named(silent, names)} did not say so as well: stopped, or busy with something that the others wait for",
            "",
        )
    orders = {index: place.order for index, place in places.items()}
    lowest, highest = min(orders.values()), max(orders.values())
    if lowest != highest:
        behind = sorted(index for index, order in orders.items() if order == lowest)
        ahead = next(place for place in places.values() if place.order == highest)
        be = "is" if len(behind) == 1 else "are"
        reason = f"{named(behind, names)} {be} at {places[behind[0]].reached}, others at {ahead.reached}"
        return Suspicion(behind, reason, places[behind[0]].stack)
    stages = collections.Counter(place.stage for place in places.values())
    (usual, _), *others = stages.most_common()
    if others:
        apart = sorted(index for index, place in places.items() if place.stage != usual)
        reason = (
            f"{named(apart, names)} {'is' if len(apart) == 1 else 'are'} in another stage than the others ({usual})"
        )
        return Suspicion(apart, f"{reason}: {places[apart[0]].stage}", places[apart[0]].stack)
    everybody = sorted(places)
    reason = f"all processes are at {places[everybody[0]].reached}, in the same stage"
    return Suspicion(everybody, reason, places[everybody[0]].stack)
