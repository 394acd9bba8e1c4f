"""Reads regions of arrays in parallel, with a bound on the bytes in flight.

The calling thread hands out groups of regions (``ReadGroup``). It takes back complete groups and delivers them. It
alone makes JAX arrays, as several threads that do so would only wait for each other. A group's bytes count from the
hand-out until the delivered values have arrived on their devices. The thread hands out no more than the bound allows.

Reading threads live as long as the call. Several may read a group at once, each its own pieces, and check them; the
thread that reads the last piece of a group returns it. After an error no more reads are started. The threads are
daemons: if storage hangs, the call still raises in time, and the process can still exit. If the system allows no thread
at all, the calling thread reads each piece when it hands it out.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.memory import JAX_ALIGNMENT_BYTES, aligned_empty, padded
from gracepoint.checkpoint.reading.stored_arrays import ArraySource
from gracepoint.deadline import Deadline
from gracepoint.threads import NoThread, start_thread

#: Values by region.
Values = dict[Index, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class ReadRequest:
    """The regions of one array that a caller requests.

    Attributes:
        name: Name of the leaf.
        shape: Shape of the stored array.
        dtype: Type of the stored array.
        regions: The regions, in coordinates of the array. Values outside of the stored array are zero.
        deliver: Called in the requesting thread with the values of some regions, each region once. It takes over the
            memory of the values, and returns a tree of the JAX arrays that they are copied to.
        cast: The type to deliver. None: the stored type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    regions: tuple[Index, ...]
    deliver: Callable[[Values], Any]
    cast: np.dtype[Any] | None = None


class ReadGroup:
    """Regions of one array that are delivered together.

    Attributes:
        name: Name of the leaf.
        own_bytes: Size of the regions' values in bytes.
        bytes: ``own_bytes`` plus the memory in bytes that reading needs.
        pieces: The pieces to read, each once.
    """

    def __init__(
        self, request: ReadRequest, pieces_of: Mapping[Index, Sequence[Index]], source: ArraySource, *, readers: int
    ) -> None:
        """``pieces_of`` has the pieces that each region needs. At most ``readers`` pieces are read at once."""
        self.name = request.name
        self._request = request
        self._source = source
        self._regions = tuple(pieces_of)
        regions_of: dict[Index, list[Index]] = {}
        for region, pieces in pieces_of.items():
            for piece in pieces:
                regions_of.setdefault(piece, []).append(region)
        self._regions_of = regions_of
        self.own_bytes = sum(bytes_of(region, request.dtype) for region in pieces_of)
        extra_bytes = [source.extra_bytes(request.name, piece) + self._copied_bytes(piece) for piece in regions_of]
        self.bytes = self.own_bytes + sum(sorted(extra_bytes)[-readers:])
        self._values: Values = {}
        self._left = len(regions_of)
        self._lock = threading.Lock()  # protects _left

    @property
    def pieces(self) -> Sequence[Index]:
        return tuple(self._regions_of)

    def piece_bytes(self, piece: Index) -> int:
        """Returns the size of a piece's values."""
        return bytes_of(piece, self._request.dtype)

    def begin(self) -> None:
        """Reserves memory for the regions.

        All regions share one block. From 4 MiB on, numpy asks for huge pages, whose first touch is far faster.
        """
        dtype = self._request.dtype
        starts = [
            0,
            *itertools.accumulate(padded(bytes_of(region, dtype), JAX_ALIGNMENT_BYTES) for region in self._regions),
        ]
        block = aligned_empty((starts.pop(),), np.dtype(np.uint8))
        for region, start in zip(self._regions, starts, strict=True):
            shape = [stop - start for start, stop in region]
            values = block[start : start + bytes_of(region, dtype)].view(dtype).reshape(shape)
            if region != clipped(region, self._request.shape):
                values[...] = np.zeros((), dtype)
            self._values[region] = values

    def read(self, piece: Index, deadline: Deadline) -> bool:
        """Reads ``piece``. Returns True if it was the last piece."""
        regions = self._regions_of[piece]
        if self._in_place(piece):
            out = self._values[regions[0]][within(piece, regions[0])]
            self._source.read(self.name, piece, out, deadline)
        else:
            read = np.empty([stop - start for start, stop in piece], self._request.dtype)
            self._source.read(self.name, piece, read, deadline)
            for region in regions:
                self._values[region][within(piece, region)] = read[within(region, piece)]
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last and self._request.cast is not None:
            cast = self._request.cast
            self._values = {region: values.astype(cast, copy=False) for region, values in self._values.items()}
        return is_last

    def deliver(self) -> Any:
        """Delivers the values. Returns the arrays that they are copied to."""
        values, self._values = self._values, {}
        return self._request.deliver(values)

    def _copied_bytes(self, piece: Index) -> int:
        return 0 if self._in_place(piece) else self.piece_bytes(piece)

    def _in_place(self, piece: Index) -> bool:
        """True if ``piece`` lies in one region, and is contiguous in the memory of that region."""
        regions = self._regions_of[piece]
        if len(regions) > 1:
            return False
        if piece == regions[0]:
            return True
        if clipped(piece, [stop for _, stop in regions[0]]) != piece:
            return False
        inner_axes_must_be_whole = False
        for part, region in zip(piece, regions[0], strict=True):
            if part[0] < region[0] or (inner_axes_must_be_whole and part != region):
                return False
            inner_axes_must_be_whole |= part[1] - part[0] > 1
        return True


def groups_of(request: ReadRequest, source: ArraySource, *, together_bytes: int, readers: int) -> Iterator[ReadGroup]:
    """Yields the groups of ``request``: one group if it is small or its regions share pieces, else one per region.

    Args:
        request: The request for one array.
        source: The source of the array.
        together_bytes: A request up to this size is small.
        readers: Number of pieces that are read at once.
    """
    if not request.regions:
        return
    boxes = {region: clipped(region, request.shape) for region in request.regions}
    full = [region for region, box in boxes.items() if all(start < stop for start, stop in box)]
    pieces_of_full = source.pieces(request.name, [boxes[region] for region in full])
    pieces_of: dict[Index, list[Index]] = {region: [] for region in boxes} | dict(
        zip(full, pieces_of_full, strict=True)
    )
    total_bytes = sum(bytes_of(region, request.dtype) for region in boxes)
    if total_bytes <= together_bytes or len({piece for pieces in pieces_of_full for piece in pieces}) < sum(
        map(len, pieces_of_full)
    ):
        yield ReadGroup(request, pieces_of, source, readers=readers)
    else:
        for region, pieces in pieces_of.items():
            yield ReadGroup(request, {region: pieces}, source, readers=readers)


def clipped(region: Index, shape: Sequence[int]) -> Index:
    """Returns the part of ``region`` that lies inside of ``shape``."""
    return tuple((start, min(stop, length)) for (start, stop), length in zip(region, shape, strict=True))


def within(part: Index, region: Index) -> tuple[Any, ...]:
    """Returns the overlap of ``part`` and ``region`` as slices relative to the start of ``region``."""
    slices = [
        slice(max(start, region_start) - region_start, min(stop, region_stop) - region_start)
        for (start, stop), (region_start, region_stop) in zip(part, region, strict=True)
    ]
    return (*slices, ...)  # without the ellipsis, numpy returns a value and no view if there are no axes


def bytes_of(index: Index, dtype: np.dtype[Any]) -> int:
    """Returns the size of the values at ``index``."""
    return math.prod(stop - start for start, stop in index) * dtype.itemsize


logger = logging.getLogger(__name__)

#: Pieces that a process reads at once. There may be more than cores, as readers mostly wait for the disk. There are
#: not many more, as readers also compute checksums.
CONCURRENT_READS = min(32, 8 * machine.available_cores())
#: The same if each piece takes a round trip over a network. Readers then mostly wait, however few cores there are.
FAR_READS = 32
# An array up to this size is delivered in one call, which takes about as long as delivering one of its regions.
TOGETHER_BYTES = 64 << 20
# Its size must also be at most the bound divided by this, so that other arrays are read meanwhile.
_TOGETHER_PART = 8
# Small pieces are handed out together, up to so many bytes or pieces: a hand-out costs about as much as reading one.
JOB_BYTES = 1 << 20
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
    together_bytes: int = TOGETHER_BYTES,
    job_bytes: int = JOB_BYTES,
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
        together_bytes: An array of at most this size is delivered at once, a larger one by region.
        job_bytes: Pieces of at least this size together are read by another thread.

    Raises:
        CheckpointCorrupt: A piece is missing or damaged.
        TimeoutError: The deadline passed. The message names the leaf that was waited for.
    """
    if limit_bytes is not None:
        together_bytes = min(together_bytes, limit_bytes // _TOGETHER_PART)
    readers = FAR_READS if far else CONCURRENT_READS
    reading = _Reading(limit_bytes, _Threads(deadline, readers, job_bytes=0 if far else job_bytes), deadline, then)
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
            start_thread(thread)
        except NoThread as error:  # a limit on threads, or no memory for their stacks
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
            group = self._complete.get(wait, self._deadline.remaining_s() if wait else None)
        except queue.Empty:
            return []
        if isinstance(group, BaseException):
            raise group
        return group

    def end(self) -> None:
        """Starts no more reads, and waits for those in progress until the deadline."""
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
