"""Writes one process's files of a save with TensorStore, in parallel, durably.

TensorStore's own threads do the writing and syncing; the calling thread only computes checksums meanwhile.
Each file has one writer, in a folder that no other save uses, so there are no locks.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from gracepoint.checkpoint import layout
from gracepoint.checkpoint.deadline import Deadline
from gracepoint.checkpoint.files import folders_up_to, sync_folders
from gracepoint.checkpoint.plan import Chunk
from gracepoint.checkpoint.records import File, file_of
from gracepoint.checkpoint.spec import ArraySpec, as_bytes
from gracepoint.errors import SaveFailed

# Chunks that are being written at once in a process. More than cores, as writers mostly wait for the disk.
_CONCURRENT_WRITES = 32


class Writer:
    """Writes below temporary folders; keeps TensorStore's context warm between saves."""

    def __init__(self) -> None:
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "file_io_concurrency": {"limit": _CONCURRENT_WRITES},
                "file_io_locking": {"mode": "none"},
                "file_io_sync": True,
            }
        )

    def write(
        self,
        folder: Path,
        specs: Mapping[int, ArraySpec],
        chunks: Iterable[tuple[Chunk, npt.NDArray[Any]]],
        small_files: Mapping[str, bytes],
        deadline: Deadline,
    ) -> tuple[dict[str, File], dict[str, int]]:
        """Makes ``chunks`` and ``small_files`` durable below ``folder``.

        Args:
            folder: The save's temporary folder; it exists.
            specs: Of the leaves that ``chunks`` refer to.
            chunks: With their values, which must not change until this returns.
            small_files: Contents by path below ``folder``.
            deadline: Until when.

        Returns:
            What was written, by path below ``folder``, and the checksums of the chunks that are not this
            process's.

        Raises:
            SaveFailed: The deadline passed.
        """
        pending: list[ts.Future[Any]] = []
        files: dict[str, File] = {}
        copies: dict[str, int] = {}
        names = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}, context=self._context)
        store = names.result(timeout=deadline.remaining_s())
        for path, data in small_files.items():
            pending.append(store.write(path, data))
            files[path] = file_of(data)
        arrays: dict[int, ts.TensorStore] = {}
        for chunk, values in chunks:
            path = f"{layout.STATE_ITEM}/{chunk.file}"
            if chunk.mine:
                if chunk.leaf not in arrays:
                    arrays[chunk.leaf] = self._open(folder, specs[chunk.leaf], deadline)
                region = arrays[chunk.leaf][tuple(slice(start, stop) for start, stop in chunk.index)]
                pending.append(region.write(values, can_reference_source_data_indefinitely=True).commit)
            file = file_of(as_bytes(values))
            if chunk.mine:
                files[path] = file
            else:
                copies[path] = file.crc32
        _wait_for(pending, folder, deadline)
        # TensorStore synced each file and its folder; folders above those hold the entries of new folders.
        sync_folders(
            itertools.chain.from_iterable(folders_up_to((folder / path).parent, folder.parent) for path in files)
        )
        return files, copies

    def _open(self, folder: Path, spec: ArraySpec, deadline: Deadline) -> ts.TensorStore:
        opening = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{folder}/{layout.STATE_ITEM}/{spec.name}/"},
            "metadata": spec.zarray,
            # The file .zarray is written beside, by one process; here nothing is read or created.
            "assume_metadata": True,
            # Otherwise a chunk of zeros would have no file, and could not be told from a lost one.
            "store_data_equal_to_fill_value": True,
        }
        return ts.open(opening, context=self._context).result(timeout=deadline.remaining_s())

    def warm(self, folder: Path, deadline: Deadline) -> None:
        """Writes and removes a tiny array below ``folder``, so that code and threads are there when it
        counts."""
        spec = ArraySpec("probe", "numpy", (1,), "<f4", (1,))
        chunk = Chunk(0, "probe/0", ((0, 1),), mine=True)
        try:
            self.write(folder, {0: spec}, [(chunk, np.zeros(1, np.float32))], {}, deadline)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _wait_for(pending: Sequence[ts.Future[Any]], folder: Path, deadline: Deadline) -> None:
    for done, future in enumerate(pending):
        try:
            future.result(timeout=deadline.remaining_s())
        except TimeoutError as error:
            raise SaveFailed(
                f"only {done} of {len(pending)} files were written to {folder} within {deadline.timeout_s:.1f} s"
            ) from error
