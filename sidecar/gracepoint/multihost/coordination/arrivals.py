"""Counts arrivals in a tree of counters: each process makes one request, and the last to arrive learns that it is last.

A counter of the store has 31 bits (``store``). Here it has one **slot** for each member of a group. A process arrives
by adding its **mark** to its own slot, so the sum says who has arrived, and with which mark. The process that completes
a group joins the marks of the group, adds the result to the group's slot one level above, and so on. The process that
completes the counter at the top is the last of all, and knows the joined mark of all.

The keys below the folder are ``<level>/<group>``. With 4,096 processes there are 139 of them if marks have one bit, and
685 if they have four. So one small answer tells who has arrived.

No thread and no state: everything is in the store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from gracepoint.multihost.coordination.store import KeyValueStore


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """How arrivals are counted. All processes use the same.

    Attributes:
        bits: Size of a mark. A mark is a number from 1 to ``most``.
        fan_out: How many members a group has at most. ``bits * fan_out`` is at most 31.
        join: Returns one mark for several. The order and the grouping of the marks must not matter.
    """

    bits: int
    fan_out: int
    join: Callable[[Iterable[int]], int]

    @property
    def most(self) -> int:
        """The largest mark."""
        return (1 << self.bits) - 1

    def arrive(self, store: KeyValueStore, folder: str, rank: int, count: int, mark: int = 1) -> int | None:
        """Notes that a process has arrived. Each process calls it once for a folder.

        Args:
            store: The store that all processes share.
            folder: The folder of the counters. Nothing else is in it.
            rank: This process, 0 to ``count - 1``.
            count: How many processes arrive.
            mark: What this process has to say.

        Returns:
            The joined mark of all processes if this process was the last. None if others are missing.
        """
        level, width = 0, count
        while True:
            group, slot = divmod(rank, self.fan_out)
            counter = store.increment(f"{folder}/{level}/{group}", mark << slot * self.bits)
            marks = self._marks(counter, min(self.fan_out, width - group * self.fan_out))
            if not all(marks):
                return None
            mark = self.join(marks)
            if width <= self.fan_out:
                return mark
            level, width, rank = level + 1, -(-width // self.fan_out), group

    def marks(self, counters: Mapping[str, str], count: int) -> Sequence[int]:
        """Returns the marks of all processes by rank; 0 where one has not arrived.

        Args:
            counters: What the store lists in the folder.
            count: How many processes arrive.
        """
        found: list[int] = []
        for group, start in enumerate(range(0, count, self.fan_out)):
            found += self._marks(int(counters.get(f"0/{group}", "0")), min(self.fan_out, count - start))
        return found

    def _marks(self, counter: int, members: int) -> Sequence[int]:
        return [counter >> slot * self.bits & self.most for slot in range(members)]


#: Arrivals that say nothing but that they have happened.
PLAIN = Arrivals(1, 31, max)
