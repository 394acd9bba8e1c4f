"""The transfers from one device. Several are under way at once, and their values are taken in order.

Also groups shards by device, and says how many bytes may be under way. This module has no threads.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning.chunks import Shard
from gracepoint.checkpoint.transfer.device_to_host import Pull, device_of, pulls_of, start

#: Default bound on the bytes in transfer from one or two devices at once. It is enough to keep the links busy.
AHEAD_BYTES = 256 << 20
# Bound on the number of pending transfers. Transfers of small leaves hardly count in bytes, but each takes time.
_MOST_AHEAD = 256

#: Takes room for a transfer; returns False if there is none. The second argument says whether it may wait for room.
HasRoom = Callable[[Pull, bool], bool]


def transfers(
    shards: Sequence[Shard], data: Sequence[Any], options: WriteOptions, has_room: HasRoom
) -> Iterator[tuple[Pull, Any]]:
    """Yields the transfers of ``shards`` in order. As many are started ahead as ``has_room`` allows.

    ``has_room`` may wait only if no other transfer of these shards is under way. Otherwise it could wait for the room
    of a transfer that is not yielded yet.
    """
    waiting = collections.deque(shards)
    pulls, started = collections.deque[Pull](), collections.deque[tuple[Pull, Any]]()
    while waiting or pulls or started:
        while (waiting or pulls) and len(started) < _MOST_AHEAD:
            if not pulls:
                shard = waiting.popleft()
                pulls.extend(pulls_of(shard, data[shard.leaf], options))
            if not has_room(pulls[0], not started):
                break
            pull = pulls.popleft()
            started.append((pull, start(pull, data[pull.shard.leaf], options)))
        yield started.popleft()


class Devices:
    """Knows the device of each shard."""

    def __init__(self, data: Sequence[Any], far: Collection[int]) -> None:
        """``far`` are the indices of the leaves that are not in host memory."""
        self._data = data
        self._far = far
        self._known: dict[Any, Any] = {}  # device by sharding and position: there are few of them, and many leaves

    def split(self, shards: Sequence[Shard]) -> list[list[Shard]]:
        """Returns the shards by device. Shards in host memory are a group of their own."""
        groups: dict[Any, list[Shard]] = {}
        for shard in shards:
            groups.setdefault(self._device_of(shard), []).append(shard)
        return list(groups.values())

    def ahead_bytes(self, shards: Sequence[Shard]) -> int:
        """Returns the default bound on the bytes of ``shards`` that are in transfer at once.

        Each device has room for two of the largest transfers: one is on its way while the other is copied or written.
        """
        devices = {self._device_of(shard) for shard in shards} - {None}
        return AHEAD_BYTES * max(2, len(devices)) // 2

    def _device_of(self, shard: Shard) -> Any:
        if shard.leaf not in self._far:
            return None
        data = self._data[shard.leaf]
        key = (data.sharding, shard.position)
        if key not in self._known:
            self._known[key] = device_of(shard, data)
        return self._known[key]
