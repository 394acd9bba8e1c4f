"""Requests for regions of an array, and groups of regions that are read together: their memory and their pieces.

Several threads read a group at once, each its own pieces. No thread owns the group. ``read`` returns True to the
thread that reads the last piece. All other methods are for one thread, before the first piece is read or after the
last.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.memory.aligned_memory import JAX_ALIGNMENT_BYTES, aligned_empty, padded
from gracepoint.checkpoint.reading.array_source import ArraySource
from gracepoint.deadline import Deadline

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
        beside = [source.extra_bytes(request.name, piece) + self._copied_bytes(piece) for piece in regions_of]
        self.bytes = self.own_bytes + sum(sorted(beside)[-readers:])
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
            last = self._left == 0
        if last and self._request.cast is not None:
            cast = self._request.cast
            self._values = {region: values.astype(cast, copy=False) for region, values in self._values.items()}
        return last

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
    found = source.pieces(request.name, [boxes[region] for region in full])
    pieces_of: dict[Index, list[Index]] = {region: [] for region in boxes} | dict(zip(full, found, strict=True))
    total_bytes = sum(bytes_of(region, request.dtype) for region in boxes)
    if total_bytes <= together_bytes or len({piece for pieces in found for piece in pieces}) < sum(map(len, found)):
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
        slice(max(start, first) - first, min(stop, last) - first)
        for (start, stop), (first, last) in zip(part, region, strict=True)
    ]
    return (*slices, ...)  # without the ellipsis, numpy returns a value and no view if there are no axes


def bytes_of(index: Index, dtype: np.dtype[Any]) -> int:
    """Returns the size of the values at ``index``."""
    return math.prod(stop - start for start, stop in index) * dtype.itemsize
