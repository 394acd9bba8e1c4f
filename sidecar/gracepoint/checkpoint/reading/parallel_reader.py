"""Reads regions of arrays in parallel, with a bound on the bytes in flight.

The calling thread hands out groups of regions. It takes back complete groups and delivers them. It alone makes JAX
arrays, as several threads that do so would only wait for each other. A group's bytes count from the hand-out until the
delivered values have arrived on their devices. The thread hands out no more than the bound allows.

Reading threads live as long as the call. Each reads pieces and checks them. After an error no more reads are started.
The threads are daemons: if storage hangs, the call still raises in time, and the process can still exit. If the system
allows no thread at all, the calling thread reads each piece when it hands it out.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax

from gracepoint import machine
from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.reading.array_source import ArraySource
from gracepoint.checkpoint.reading.read_group import ReadGroup, ReadRequest, groups_of
from gracepoint.deadline import Deadline

logger = logging.getLogger(__name__)

#: Pieces that a process reads at once. There may be more than cores, as readers mostly wait for the disk. There are
#: not many more, as readers also compute checksums.
CONCURRENT_READS = min(32, 8 * machine.available_cores())
#: The same if each piece takes a round trip over a network. Readers then mostly wait, however few cores there are.
FAR_READS = 32
# An array up to this size is delivered in one call, which takes about as long as delivering one of its regions.
_TOGETHER_BYTES = 64 << 20
# Its size must also be at most the bound divided by this, so that other arrays are read meanwhile.
_TOGETHER_PART = 8
# Small pieces are handed out together, up to so many bytes or pieces: a hand-out costs about as much as reading one.
_JOB_BYTES = 1 << 20
_JOB_PIECES = 64


def read_all(
    requests: Iterable[ReadRequest],
    source: ArraySource,
    *,
    limit_bytes: int | None,
    deadline: Deadline,
    far: bool = False,
    first: int = 0,
    then: Callable[[], None] = lambda: None,
) -> int:
    """Reads all ``requests``, in order. Returns the total size of their values in bytes.

    Args:
        requests: The requests, one for each array.
        source: The source of the arrays.
        limit_bytes: Upper bound on the host memory in use at once, for regions that are not delivered yet and for
            decoding. A group of regions that needs more is read alone. None: no bound.
        deadline: The deadline for all reads.
        far: Whether each piece takes a round trip over a network, which is longer than the time for a small piece.
        first: Number of requests, from the beginning, that ``then`` waits for.
        then: Called once by the calling thread when the first ``first`` requests are delivered. The others are read
            meanwhile. An error that it raises ends the call.

    Raises:
        CheckpointCorrupt: A piece is missing or damaged.
        TimeoutError: The deadline passed. The message names the leaf that was waited for.
    """
    together_bytes = _TOGETHER_BYTES if limit_bytes is None else min(_TOGETHER_BYTES, limit_bytes // _TOGETHER_PART)
    readers = FAR_READS if far else CONCURRENT_READS
    reading = _Reading(limit_bytes, _Threads(deadline, readers, job_bytes=0 if far else _JOB_BYTES), deadline, then)
    try:
        for number, request in enumerate(requests):
            if number == first:
                reading.first_are_handed_out()
            for group in groups_of(request, source, together_bytes=together_bytes, readers=readers):
                reading.hand_out(group)
        reading.finish()
    finally:
        reading.end()
    return reading.total_bytes


class _Reading:
    """The groups that are being read and delivered. Only the calling thread uses it."""

    def __init__(
        self, limit_bytes: int | None, threads: _Threads, deadline: Deadline, then: Callable[[], None]
    ) -> None:
        self._limit_bytes = limit_bytes
        self._deadline = deadline
        self._threads = threads
        self._then: Callable[[], None] | None = then
        # Groups of the first requests that are not delivered yet. None until all of these groups are handed out.
        self._first: set[ReadGroup] | None = None
        self._taken_bytes = 0
        self._handed_out: dict[ReadGroup, None] = {}  # in order
        self._on_their_way = collections.deque[tuple[ReadGroup, Any]]()
        self.total_bytes = 0

    def hand_out(self, group: ReadGroup) -> None:
        """Waits for room, and hands out ``group`` to the reading threads."""
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

    def first_are_handed_out(self) -> None:
        """Notes that ``then`` does not wait for groups that are handed out from now on."""
        self._threads.flush()
        self._first = set(self._handed_out)

    def finish(self) -> None:
        """Returns when everything is delivered."""
        if self._first is None:
            self.first_are_handed_out()
        self._threads.flush()
        self._go_on()
        while self._handed_out:
            self._wait(next(iter(self._handed_out)))
            self._go_on()
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
            self._go_on()
            self._wait(group)

    def _go_on(self) -> None:
        """Calls ``then`` if all groups that it waits for are delivered, and if it was not called yet.

        The caller has handed out all that the bound allows, so that the reading threads have work meanwhile.
        """
        if self._then is not None and self._first is not None and not self._first:
            then, self._then = self._then, None
            then()

    def _wait(self, group: ReadGroup) -> None:
        """Waits until more groups are complete, and delivers them. A timeout names ``group``."""
        complete = self._threads.complete(wait=True)
        if not complete:
            raise TimeoutError(f"leaf {group.name!r}")
        self._take_back(complete)

    def _take_back(self, complete: Iterable[ReadGroup]) -> None:
        for group in complete:
            del self._handed_out[group]
            if self._first is not None:
                self._first.discard(group)
            self._deliver(group)

    def _deliver(self, group: ReadGroup) -> None:
        self._on_their_way.append((group, group.deliver()))


class _Threads:
    """Threads that read pieces in order until a read fails.

    Args:
        deadline: The deadline for all reads.
        count: Most threads.
        job_bytes: Smaller pieces are handed out together until they have so many bytes.
    """

    def __init__(self, deadline: Deadline, count: int, *, job_bytes: int) -> None:
        self._deadline = deadline
        self._count = count
        self._job_bytes = job_bytes
        self._jobs: queue.SimpleQueue[list[tuple[ReadGroup, Index]] | None] = queue.SimpleQueue()
        self._complete: queue.SimpleQueue[list[ReadGroup] | BaseException] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._packed: list[tuple[ReadGroup, Index]] = []
        self._packed_bytes = 0
        self._stopped = False

    def hand_out(self, group: ReadGroup, piece: Index) -> None:
        """Hands out ``piece``. Small pieces are collected until there are enough of them, or until ``flush``."""
        self._packed.append((group, piece))
        self._packed_bytes += group.piece_bytes(piece)
        if self._packed_bytes >= self._job_bytes or len(self._packed) == _JOB_PIECES:
            self.flush()

    def flush(self) -> None:
        if not self._packed:
            return
        job, self._packed, self._packed_bytes = self._packed, [], 0
        if len(self._threads) < self._count:
            self._start()
        if self._threads:
            self._jobs.put(job)
        else:
            self._read(job)

    def _start(self) -> None:
        """Starts another thread. If the system does not allow it, there are no more threads than now."""
        thread = threading.Thread(target=self._run, name="gracepoint: reading", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit on threads, or no memory for their stacks
            logger.warning("a restore reads in %d threads and not %d: %s", len(self._threads), self._count, error)
            self._count = len(self._threads)
        else:
            self._threads.append(thread)

    def complete(self, *, wait: bool = False) -> list[ReadGroup]:
        """Returns groups that are complete. Empty if there are none. With ``wait``, waits for some until the deadline.

        Raises:
            CheckpointCorrupt: A piece could not be read. Any other error of a read is raised, too, each once.
        """
        try:
            found = self._complete.get(wait, self._deadline.remaining_s() if wait else None)
        except queue.Empty:
            return []
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self) -> None:
        """Starts no more reads, and waits for those under way until the deadline."""
        self._stopped = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(self._deadline.remaining_s())

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and self._read(job):
            pass

    def _read(self, job: list[tuple[ReadGroup, Index]]) -> bool:
        """Reads these pieces. Returns False if no more is to be read."""
        complete = []
        try:
            for group, piece in job:
                if self._stopped:
                    return False
                if group.read(piece, self._deadline):
                    complete.append(group)
        except BaseException as error:  # noqa: BLE001 - raised by the calling thread
            self._stopped = True
            self._complete.put(TimeoutError(f"leaf {group.name!r}") if isinstance(error, TimeoutError) else error)
            return False
        if complete:
            self._complete.put(complete)
        return True
