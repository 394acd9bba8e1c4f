"""Writes one process's files of a save, in parallel, durably.

``file_writer`` writes where each chunk is a file of its values' bytes; ``tensorstore_writer`` writes where chunks are
compressed or kept in OCDBT. Both say what their threads do. Each file has one writer, so there are no locks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import ArraySpec
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, WriteOptions
from gracepoint.checkpoint.planning.write_plan import Chunk
from gracepoint.checkpoint.writing.file_writer import FileWriter
from gracepoint.checkpoint.writing.tensorstore_writer import TensorStoreWriter
from gracepoint.checkpoint.writing.write_job import WriteJob, WrittenFiles, form_of
from gracepoint.deadline import Deadline


class ChunkWriter:
    """Writes below temporary folders, one save at a time; keeps what saves have in common."""

    def __init__(self, options: WriteOptions = DEFAULT_OPTIONS) -> None:
        self.options = options
        self._express = FileWriter(options)
        self._tensorstore = TensorStoreWriter(options)

    def write(self, job: WriteJob, deadline: Deadline) -> WrittenFiles:
        """Makes the chunks, the arrays' metadata and the small files of ``job`` durable.

        Raises:
            SaveFailed: The deadline passed, or was cancelled.
            ValueError, OSError: A file cannot be written; names it.
        """
        started_s = deadline.elapsed_s()
        is_express = self.options.express and form_of(job).files_hold_values
        written = (self._express if is_express else self._tensorstore).write(job, deadline)
        metrics.tell_written(written.chunk_bytes, deadline.elapsed_s() - started_s, job.folder)
        return written

    def warm(self, folder: Path, deadline: Deadline) -> None:
        """Writes and removes a tiny array below ``folder`` in each way that saves may take, so that code, threads and
        memory are there when it counts."""
        folder.mkdir(parents=True, exist_ok=True)
        spec = ArraySpec("probe", "numpy", (1,), "<f4", (1,))
        job = WriteJob(folder, layout.NO_ITEM, {0: spec}, [0], _Probe(), {})
        try:
            if self.options.express:
                self._express.reserve(folder)
                self._express.write(job, deadline)
            self._tensorstore.write(job, deadline)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _Probe:
    """The one chunk that ``warm`` writes."""

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        yield Chunk(0, "probe/0", ((0, 1),), mine=True, bytes=4), np.zeros(1, np.float32)

    def written(self, chunk: Chunk) -> None:
        pass
