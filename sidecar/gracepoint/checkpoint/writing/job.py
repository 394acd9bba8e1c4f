"""What one process writes of a save, and what it has written: the input and the result of every writer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk, Format
from gracepoint.checkpoint.format.manifest import StoredFile
from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline


class ChunkSource(Protocol):
    """Supplies the chunks of a save."""

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        """Yields every chunk once. Its values do not change until ``written`` is called for it.

        They may be in any memory order, and of another type than the stored one.
        """

    def written(self, chunk: Chunk) -> None:
        """Is called for each chunk whose values are no longer needed, from any thread."""


class PartSource(ChunkSource, Protocol):
    """Supplies the chunks of one process's part of a save."""

    def check_unchanged(self) -> None:
        """Raises SaveFailed if the values are not those any more that the source was made with."""


class SaveSource(PartSource, Protocol):
    """Supplies the chunks of a save that a worker process may write."""

    def written_elsewhere(self) -> None:
        """Is called in place of the others if a worker process, which has the chunks, too, has written them."""


#: Writes an object of a save: its path, its bytes, their CRC-32, and what ends the write by an error.
Place = Callable[[str, ArrayBytes, int, Callable[[], None]], None]


@dataclasses.dataclass(frozen=True)
class WriteJob:
    """This process's part of a save.

    Attributes:
        folder: The save's temporary folder. It exists.
        item: Name of the train state's folder below ``folder``.
        specs: What is stored of each leaf that the chunks and ``arrays`` refer to, by index of the leaf.
        arrays: Indices of the leaves whose own metadata is written.
        source: Supplies the chunks.
        small_files: Contents of other files by path below ``folder``.
        tree_numbers: Candidate numbers for the chunks' tree in OCDBT. The job uses the first number whose tree does
            not exist yet, so that nobody else writes that tree. In a store that cannot rename, it uses the first
            number, and its trees have random names besides. A job that writes no array has no tree.
        is_urgent: Returns whether somebody waits for the save. Until then, threads that write plain values to a file
            system leave the CPU to other threads. None: they do not.
        place: In a store that cannot rename, writes an object durably where it may be now
            (``steps.object_layout.Placement.place``). None: files are written below ``folder``.
    """

    folder: StoragePath
    item: str
    specs: Mapping[int, ArraySpec]
    arrays: Sequence[int]
    source: ChunkSource
    small_files: Mapping[str, bytes]
    tree_numbers: Iterable[int] = (0,)
    is_urgent: Callable[[], bool] | None = None
    place: Place | None = None

    @property
    def form(self) -> Format:
        """The format of the arrays, which is the same for all arrays of a save."""
        return next(iter(self.specs.values())).format if self.specs else Format()


@dataclasses.dataclass(frozen=True)
class WrittenFiles:
    """What one process wrote of a save.

    Attributes:
        files: Size and checksum of each file, by path below the checkpoint's folder.
        values: CRC-32 of the values of each chunk that has no file (in OCDBT), or whose file is compressed, by path.
        copies: CRC-32 of the values of each chunk that another process writes, by path.
        chunk_bytes: Size of the values of all chunks that were written.
    """

    files: dict[str, StoredFile] = dataclasses.field(default_factory=dict)
    values: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: dict[str, int] = dataclasses.field(default_factory=dict)
    chunk_bytes: int = 0
