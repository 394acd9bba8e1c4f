"""Reads regions of arrays in parallel, with a bound on the bytes in flight.

The calling thread hands out the work, one group of regions after the other: regions of an array that share pieces
are one group. It takes the group's bytes from the limit first; whoever finishes the group gives them back. Reading
threads live as long as the call. Each reads a piece, checks it, and copies it to the regions that it is part of
unless it could be read in place; who reads the last piece of a region delivers that. After an error nothing more is
begun. The threads are daemons: storage that hangs keeps nobody from raising in time, or from leaving.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.byte_limit import ByteLimit
from gracepoint.checkpoint.deadline import Deadline
from gracepoint.checkpoint.sources import Source
from gracepoint.checkpoint.spec import Index

#: Pieces that are read at once in a process. More than cores, as readers mostly wait for the disk.
CONCURRENT_READS = 32
# JAX's CPU backend takes over host memory with this alignment instead of copying it.
_ALIGNMENT_BYTES = 64
# Small pieces are handed out together, as handing over costs about as much as reading one.
_JOB_BYTES = 1 << 20
_JOB_PIECES = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """What is wanted of one array.

    Attributes:
        name: Of the leaf.
        shape: Of the stored array.
        dtype: Of the stored array.
        regions: In its coordinates. What lies outside of the stored array is zero.
        deliver: Called once with each region and its values, whose memory is handed over, from any thread.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    regions: tuple[Index, ...]
    deliver: Callable[[Index, npt.NDArray[Any]], None]


def read_all(requests: Iterable[Request], source: Source, *, limit_bytes: int | None, deadline: Deadline) -> int:
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
    limit = ByteLimit(limit_bytes)
    total_bytes = 0
    with _threads(deadline) as threads:
        for request in requests:
            for pieces_of in _groups(request, source):
                group = _Group(request, pieces_of, source, limit)
                if not limit.take_if_room(group.bytes):
                    threads.flush()
                    if not limit.take(group.bytes, deadline):
                        raise TimeoutError(f"leaf {request.name!r}")
                if threads.error is not None:
                    raise threads.error
                group.begin()
                for piece in group.pieces:
                    threads.hand_out(group, piece)
                total_bytes += group.own_bytes
    return total_bytes


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns an array of undefined values whose memory JAX can take over where host memory is the device's."""
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + size_bytes].view(dtype).reshape(shape)


class _Group:
    """Regions of one array that have pieces in common, or one region."""

    def __init__(
        self, request: Request, pieces_of: Mapping[Index, Sequence[Index]], source: Source, limit: ByteLimit
    ) -> None:
        self.name = request.name
        self._request = request
        self._source = source
        self._limit = limit
        self._regions = tuple(pieces_of)
        self._regions_of: dict[Index, list[Index]] = {}
        for region, pieces in pieces_of.items():
            for piece in pieces:
                self._regions_of.setdefault(piece, []).append(region)
        self.own_bytes = sum(_bytes_of(region, request.dtype) for region in pieces_of)
        beside = [source.extra_bytes(request.name, piece) + self._copied_bytes(piece) for piece in self._regions_of]
        self.bytes = self.own_bytes + sum(sorted(beside)[-CONCURRENT_READS:])
        self._lock = threading.Lock()
        self._regions_left = len(pieces_of)
        self._left = {region: len(pieces) for region, pieces in pieces_of.items()}
        self._values: dict[Index, npt.NDArray[Any]] = {}

    @property
    def pieces(self) -> Iterable[Index]:
        return self._regions_of

    def begin(self) -> None:
        """Reserves memory for the regions, and delivers those that nothing is read for."""
        for region in self._regions:
            shape = [stop - start for start, stop in region]
            self._values[region] = values = aligned_empty(shape, self._request.dtype)
            if region != _clipped(region, self._request.shape):
                values[...] = np.zeros((), self._request.dtype)
        for region in [region for region, left in self._left.items() if left == 0]:
            self._deliver(region)

    def read(self, piece: Index, deadline: Deadline) -> None:
        """Reads ``piece``, and delivers the regions that are complete with it."""
        regions = self._regions_of[piece]
        if self._in_place(piece):
            out = self._values[regions[0]][_within(piece, regions[0])]
            self._source.read(self.name, piece, out, deadline)
        else:
            read = np.empty([stop - start for start, stop in piece], self._request.dtype)
            self._source.read(self.name, piece, read, deadline)
            for region in regions:
                self._values[region][_within(piece, region)] = read[_within(region, piece)]
        for region in regions:
            with self._lock:
                self._left[region] -= 1
                complete = self._left[region] == 0
            if complete:
                self._deliver(region)

    def give_up(self) -> None:
        """Gives back what was taken, as not all of it will be read; may be called again."""
        with self._lock:
            given_up, self._regions_left = self._regions_left > 0, 0
        if given_up:
            self._limit.give_back(self.bytes)

    def _deliver(self, region: Index) -> None:
        self._request.deliver(region, self._values.pop(region))
        with self._lock:
            self._regions_left -= 1
            last = self._regions_left == 0
        if last:
            self._limit.give_back(self.bytes)

    def _copied_bytes(self, piece: Index) -> int:
        return 0 if self._in_place(piece) else _bytes_of(piece, self._request.dtype)

    def _in_place(self, piece: Index) -> bool:
        """True if ``piece`` is all in one region, whose memory has it as a whole."""
        regions = self._regions_of[piece]
        if len(regions) > 1 or _clipped(piece, [stop for _, stop in regions[0]]) != piece:
            return False
        inner_axes_must_be_whole = False
        for part, region in zip(piece, regions[0], strict=True):
            if part[0] < region[0] or (inner_axes_must_be_whole and part != region):
                return False
            inner_axes_must_be_whole |= part[1] - part[0] > 1
        return True


def _groups(request: Request, source: Source) -> Iterator[dict[Index, list[Index]]]:
    """Yields the regions of each group, each with its pieces."""
    boxes = {region: _clipped(region, request.shape) for region in request.regions}
    full = [region for region, box in boxes.items() if all(start < stop for start, stop in box)]
    found = source.pieces(request.name, [boxes[region] for region in full])
    pieces_of: dict[Index, list[Index]] = {region: [] for region in boxes} | dict(zip(full, found, strict=True))
    if len({piece for pieces in found for piece in pieces}) < sum(map(len, found)):
        yield pieces_of
    else:
        for region, pieces in pieces_of.items():
            yield {region: pieces}


def _clipped(region: Index, shape: Sequence[int]) -> Index:
    return tuple((start, min(stop, length)) for (start, stop), length in zip(region, shape, strict=True))


def _within(part: Index, region: Index) -> tuple[Any, ...]:
    """Returns the slices, in ``region``'s own coordinates, of what it has in common with ``part``."""
    slices = [
        slice(max(start, first) - first, min(stop, last) - first)
        for (start, stop), (first, last) in zip(part, region, strict=True)
    ]
    return (*slices, ...)  # without the last, numpy gives the value of an array without axes, and no view of it


def _bytes_of(index: Index, dtype: np.dtype[Any]) -> int:
    return math.prod(stop - start for start, stop in index) * dtype.itemsize


class _Threads:
    """Threads that read pieces in order until a read fails."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._jobs: queue.SimpleQueue[list[tuple[_Group, Index]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._packed: list[tuple[_Group, Index]] = []
        self._packed_bytes = 0
        self._last = ""
        self.error: BaseException | None = None  # the first, or one that came about then

    def hand_out(self, group: _Group, piece: Index) -> None:
        """Has ``piece`` read; small ones wait until some are together, or ``flush``."""
        self._packed.append((group, piece))
        self._packed_bytes += group.own_bytes
        self._last = group.name
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

    def end(self) -> None:
        """Waits for all pieces, and raises the error of one that could not be read."""
        self.flush()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(self._deadline.remaining_s())
        if self.error is None and any(thread.is_alive() for thread in self._threads):
            self.error = TimeoutError(f"leaf {self._last!r} or one before it")
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while (jobs := self._jobs.get()) is not None:
            for group, piece in jobs:
                try:
                    if self.error is None:
                        group.read(piece, self._deadline)
                except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                    if isinstance(error, TimeoutError):
                        error = TimeoutError(f"leaf {group.name!r}")
                    self.error = self.error or error
                if self.error is not None:
                    group.give_up()


@contextlib.contextmanager
def _threads(deadline: Deadline) -> Iterator[_Threads]:
    threads = _Threads(deadline)
    try:
        yield threads
    except BaseException as error:
        threads.error = threads.error or error
        with contextlib.suppress(BaseException):
            threads.end()
        raise
    threads.end()
