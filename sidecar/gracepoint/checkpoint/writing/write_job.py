"""What every writer of a save's files is given, and what it gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from gracepoint.checkpoint.format.array_spec import ArraySpec, Format
from gracepoint.checkpoint.format.manifest import StoredFile
from gracepoint.checkpoint.planning.write_plan import Chunk
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline


class ChunkSource(Protocol):
    """Where a save's chunks come from."""

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        """Yields every chunk once; its values don't change until ``written``.

        They may be in any order in memory, and of another type than is stored.
        """

    def written(self, chunk: Chunk) -> None:
        """Is told of each chunk whose values are needed no longer, from any thread."""


@dataclasses.dataclass(frozen=True)
class WriteJob:
    """This process's part of a save.

    Attributes:
        folder: The save's temporary folder; it exists.
        item: The train state's folder below it.
        specs: Of the leaves that the chunks and ``arrays`` refer to.
        arrays: The leaves whose own metadata is written.
        source: Of the chunks.
        small_files: Contents by path below ``folder``.
        tree_numbers: In OCDBT the chunks' tree is the first of these that does not exist yet, so that nobody else
            writes it. A job that writes no array has no tree.
    """

    folder: StoragePath
    item: str
    specs: Mapping[int, ArraySpec]
    arrays: Sequence[int]
    source: ChunkSource
    small_files: Mapping[str, bytes]
    tree_numbers: Iterable[int] = (0,)


@dataclasses.dataclass(frozen=True)
class WrittenFiles:
    """What one process wrote of a save.

    Attributes:
        files: By path below the checkpoint's folder.
        values: CRC-32 of the values of chunks whose files hold something else, or that have none, by path.
        copies: The same of the chunks that another process writes.
        chunk_bytes: Size of the values of all chunks that were written.
    """

    files: dict[str, StoredFile] = dataclasses.field(default_factory=dict)
    values: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: dict[str, int] = dataclasses.field(default_factory=dict)
    chunk_bytes: int = 0


def form_of(job: WriteJob) -> Format:
    """Returns how arrays are put into files, which is the same for all of a save."""
    return next(iter(job.specs.values())).format if job.specs else Format()
