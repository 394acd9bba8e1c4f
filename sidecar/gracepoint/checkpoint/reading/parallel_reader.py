"""Reads regions of arrays in parallel, with a bound on the bytes in flight.

The calling thread hands out groups of regions, and takes those back that are complete, to deliver them: it alone
makes JAX arrays, as several threads that do only wait for each other. It counts a group's bytes from the hand-out until
its values are where they were delivered to, and hands out no more than the bound allows. Reading threads live as long
as the call. Each reads pieces and checks them. After an error nothing more is begun. The threads are daemons: storage
that hangs keeps nobody from raising in time, or from leaving.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Iterable
from typing import Any

import jax

from gracepoint import machine
from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.reading.array_source import ArraySource
from gracepoint.checkpoint.reading.read_group import ReadGroup, ReadRequest, groups_of
from gracepoint.deadline import Deadline

#: Pieces that are read at once in a process. More than cores, as readers mostly wait for the disk; not many more, as
#: they compute checksums, too.
CONCURRENT_READS = min(32, 8 * machine.available_cores())
# An array of up to this size is delivered at once, as that takes about as long as delivering one of its regions.
_TOGETHER_BYTES = 64 << 20
# ... but of the bound only this part, so that others are read meanwhile.
_TOGETHER_PART = 8
# Small pieces are handed out together, as handing over costs about as much as reading one.
_JOB_BYTES = 1 << 20
_JOB_PIECES = 64


def read_all(
    requests: Iterable[ReadRequest], source: ArraySource, *, limit_bytes: int | None, deadline: Deadline
) -> int:
    """Reads all ``requests``; returns how many bytes of values that were.

    Args:
        requests: Each array once.
        source: Of the arrays.
        limit_bytes: At most so much host memory is in use at once, for regions that are not delivered yet and for
            decoding. A group of regions that needs more goes alone. None: no bound.
        deadline: Until when.

    Raises:
        CheckpointCorrupt: Something is missing or damaged.
        TimeoutError: The deadline passed; names the leaf that was waited for.
    """
    together_bytes = _TOGETHER_BYTES if limit_bytes is None else min(_TOGETHER_BYTES, limit_bytes // _TOGETHER_PART)
    reading = _Reading(limit_bytes, deadline)
    try:
        for request in requests:
            for group in groups_of(request, source, together_bytes=together_bytes, readers=CONCURRENT_READS):
                reading.hand_out(group)
        reading.finish()
    finally:
        reading.end()
    return reading.total_bytes


class _Reading:
    """What is being read, and delivered; for the calling thread."""

    def __init__(self, limit_bytes: int | None, deadline: Deadline) -> None:
        self._limit_bytes = limit_bytes
        self._deadline = deadline
        self._threads = _Threads(deadline)
        self._taken_bytes = 0
        self._handed_out: dict[ReadGroup, None] = {}  # in order
        self._on_their_way = collections.deque[tuple[ReadGroup, Any]]()
        self.total_bytes = 0

    def hand_out(self, group: ReadGroup) -> None:
        """Has ``group`` read once there is room for it."""
        self._take_back(self._threads.complete())
        while not self._has_room(group):
            self._make_room(group)
        self._taken_bytes += group.bytes
        self.total_bytes += group.own_bytes
        group.begin()
        if not group.pieces:
            self._deliver(group)
            return
        self._handed_out[group] = None
        for piece in group.pieces:
            self._threads.hand_out(group, piece)

    def finish(self) -> None:
        """Returns when everything is delivered."""
        self._threads.flush()
        while self._handed_out:
            self._wait(next(iter(self._handed_out)))
        jax.block_until_ready([arrays for _, arrays in self._on_their_way])

    def end(self) -> None:
        """Ends the threads."""
        self._threads.end()

    def _has_room(self, group: ReadGroup) -> bool:
        if self._limit_bytes is None or self._taken_bytes == 0:
            return True
        return self._taken_bytes + group.bytes <= self._limit_bytes

    def _make_room(self, group: ReadGroup) -> None:
        if self._on_their_way:
            delivered, arrays = self._on_their_way.popleft()
            jax.block_until_ready(arrays)
            self._taken_bytes -= delivered.bytes
        else:
            self._threads.flush()
            self._wait(group)

    def _wait(self, group: ReadGroup) -> None:
        """Waits until something more is complete, and delivers it; ``group`` is why."""
        complete = self._threads.complete(wait=True)
        if not complete:
            raise TimeoutError(f"leaf {group.name!r}")
        self._take_back(complete)

    def _take_back(self, complete: Iterable[ReadGroup]) -> None:
        for group in complete:
            del self._handed_out[group]
            self._deliver(group)

    def _deliver(self, group: ReadGroup) -> None:
        self._on_their_way.append((group, group.deliver()))


class _Threads:
    """Threads that read pieces in order until a read fails."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._jobs: queue.SimpleQueue[list[tuple[ReadGroup, Index]] | None] = queue.SimpleQueue()
        self._complete: queue.SimpleQueue[list[ReadGroup] | BaseException] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._packed: list[tuple[ReadGroup, Index]] = []
        self._packed_bytes = 0
        self._stopped = False

    def hand_out(self, group: ReadGroup, piece: Index) -> None:
        """Has ``piece`` read; small ones wait until some are together, or ``flush``."""
        self._packed.append((group, piece))
        self._packed_bytes += group.piece_bytes(piece)
        if self._packed_bytes >= _JOB_BYTES or len(self._packed) == _JOB_PIECES:
            self.flush()

    def flush(self) -> None:
        if self._packed:
            self._jobs.put(self._packed)
            self._packed, self._packed_bytes = [], 0
            if len(self._threads) < CONCURRENT_READS:
                thread = threading.Thread(target=self._run, name="gracepoint: reading", daemon=True)
                self._threads.append(thread)
                thread.start()

    def complete(self, *, wait: bool = False) -> list[ReadGroup]:
        """Returns groups that are complete now; none if there are none, or there were none until the deadline.

        Raises:
            CheckpointCorrupt: A piece could not be read. As any other error of a read, each once.
        """
        try:
            found = self._complete.get(wait, self._deadline.remaining_s() if wait else None)
        except queue.Empty:
            return []
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self) -> None:
        """Lets no more be begun, and waits for what is, until the deadline."""
        self._stopped = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(self._deadline.remaining_s())

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            complete = []
            try:
                for group, piece in job:
                    if self._stopped:
                        return
                    if group.read(piece, self._deadline):
                        complete.append(group)
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                self._stopped = True
                self._complete.put(TimeoutError(f"leaf {group.name!r}") if isinstance(error, TimeoutError) else error)
                return
            if complete:
                self._complete.put(complete)
