"""The writer of one process's files of a save, in parallel and durably.

``files`` writes chunks whose files hold exactly the bytes of their values. ``tensorstore_writer`` writes chunks that
are compressed or kept in OCDBT. The modules describe their threads. Each file has one writer, so no file is locked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, WriteOptions
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checkpoint.writing.files import FileWriter, WriteJob, WrittenFiles, form_of
from gracepoint.deadline import Deadline

if TYPE_CHECKING:
    from gracepoint.checkpoint.writing.tensorstore_writer import EncodedWriter, TensorStoreWriter


class ChunkWriter:
    """Writes below temporary folders, one save at a time. Keeps resources that saves share."""

    def __init__(self, options: WriteOptions = DEFAULT_OPTIONS) -> None:
        self.options = options
        self._express = FileWriter(options)

    # A worker process imports TensorStore only if a save needs it.

    @functools.cached_property
    def _tensorstore(self) -> TensorStoreWriter:
        from gracepoint.checkpoint.writing.tensorstore_writer import TensorStoreWriter

        return TensorStoreWriter(self.options)

    @functools.cached_property
    def _encoded(self) -> EncodedWriter:
        from gracepoint.checkpoint.writing.tensorstore_writer import EncodedWriter

        return EncodedWriter(self.options)

    def write(self, job: WriteJob, deadline: Deadline) -> WrittenFiles:
        """Makes the chunks, the arrays' metadata and the small files of ``job`` durable.

        Raises:
            SaveFailed: The deadline passed, or was cancelled.
            ValueError, OSError: A file cannot be written. The message names it.
        """
        return self._writer_of(job).write(job, deadline)

    def _writer_of(self, job: WriteJob) -> FileWriter | TensorStoreWriter | EncodedWriter:
        renames, holds_values = job.folder.backend.renames, form_of(job).files_hold_values
        if holds_values and (self.options.express or not renames):
            return self._express
        return self._tensorstore if renames else self._encoded

    def warm(self, folder: StoragePath, deadline: Deadline) -> None:
        """Writes and removes a tiny array below ``folder`` with each writer that a save may use.

        So code is loaded, threads have run and memory is reserved before the first save.
        """
        folder.parent.check_usable()
        folder.make_folder()
        spec = ArraySpec("probe", "numpy", (1,), "<f4", (1,))
        job = WriteJob(folder, layout.NO_ITEM, {0: spec}, [0], _Probe(), {})
        try:
            if self.options.express:
                self._express.reserve(folder)
                self._express.write(job, deadline)
            (self._tensorstore if folder.backend.renames else self._encoded).write(job, deadline)
        finally:
            folder.delete_folder()


class _Probe:
    """The one chunk that ``warm`` writes."""

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        yield Chunk(0, "probe/0", ((0, 1),), mine=True, bytes=4), np.zeros(1, np.float32)

    def written(self, chunk: Chunk) -> None:
        pass
