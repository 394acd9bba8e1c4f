"""Each save and each call of a handler has an OCDBT tree of its own, and claims the files of that one alone."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk, Format
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.writing.pool import WriteJob, WrittenFiles
from gracepoint.checkpoint.writing.tensorstore_writer import TensorStoreWriter
from gracepoint.deadline import Deadline

SPEC = ArraySpec("w", "numpy", (4,), "<f4", (4,), format=Format(ocdbt=True))


class Given:
    """One chunk, or none."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        for chunk in self._chunks:
            yield chunk, np.arange(4, dtype=np.float32)

    def written(self, chunk: Chunk) -> None:
        pass


CHUNK = Chunk(0, "w/0", ((0, 4),), mine=True, bytes=16)


def job(folder: Path, chunks: Sequence[Chunk], tree_numbers: Sequence[int]) -> WriteJob:
    return WriteJob(
        storage_path(folder), "default", {0: SPEC}, [0] if chunks else [], Given(chunks), {"small": b"x"}, tree_numbers
    )


def write(folder: Path, chunks: Sequence[Chunk], tree_numbers: Sequence[int]) -> WrittenFiles:
    deadline = Deadline.after(60, time.monotonic)
    return TensorStoreWriter(WriteOptions()).write(job(folder, chunks, tree_numbers), deadline)


def files_below(folder: Path, name: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in (folder / name).rglob("*") if path.is_file()}


def test_a_job_claims_the_files_of_its_own_tree_and_no_others(tmp_path: Path) -> None:
    first, second = (write(tmp_path, [CHUNK], numbers) for numbers in ([0], [0, 2]))
    assert set(first.files) == {"small", *files_below(tmp_path, "default/ocdbt.process_0")}
    assert set(second.files) == {"small", *files_below(tmp_path, "default/ocdbt.process_2")}
    for path, file in (first.files | second.files).items():
        data = (tmp_path / path).read_bytes()
        assert (file.bytes, file.crc32) == (len(data), zlib.crc32(data))


def test_job_without_arrays_writes_no_tree_and_claims_nothing(tmp_path: Path) -> None:
    write(tmp_path, [CHUNK], [0])
    assert set(write(tmp_path, [], [0]).files) == {"small"}
    assert set(write(tmp_path / "alone", [], [0]).files) == {"small"}
    assert not (tmp_path / "alone" / "default").exists()


def test_a_tree_that_another_job_has_is_never_written(tmp_path: Path) -> None:
    write(tmp_path, [CHUNK], [0])
    before = {path: (tmp_path / path).read_bytes() for path in files_below(tmp_path, "default")}
    with pytest.raises(FileExistsError, match=r"expected no OCDBT tree here yet.*default/ocdbt\.process_0"):
        write(tmp_path, [CHUNK], [0])
    assert before == {path: (tmp_path / path).read_bytes() for path in files_below(tmp_path, "default")}


def test_a_folder_that_was_taken_away_is_not_made_again(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(FileNotFoundError):
        TensorStoreWriter(WriteOptions()).write(
            dataclasses.replace(job(gone, [CHUNK], [0]), small_files={}), Deadline.after(60, time.monotonic)
        )
    assert not gone.exists()
