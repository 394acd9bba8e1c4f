"""Counts what is written of a save, for those who watch it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from gracepoint.checkpoint.planning.chunks import Chunk
from gracepoint.checkpoint.writing.write_job import SaveSource
from gracepoint.deadline import Deadline


class CountedChunks:
    """The chunks of a source. The writer's threads count; any thread may read.

    Args:
        source: The source.

    Attributes:
        written_bytes: Bytes of this process's chunks that are written.
    """

    def __init__(self, source: SaveSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self.written_bytes = 0

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        return self._source.chunks(deadline)

    def written(self, chunk: Chunk) -> None:
        if chunk.mine:
            with self._lock:
                self.written_bytes += chunk.bytes
        self._source.written(chunk)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def written_elsewhere(self) -> None:
        self._source.written_elsewhere()
