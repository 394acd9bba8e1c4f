"""One process's part of a save: its files, and the done-record that makes them durable.

``SaveOperation`` describes the part and meets the other processes afterwards. The part itself needs none of them. So it
can be written in a thread of the training process, or in a worker process that outlives it. This module loads no JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from gracepoint.checkpoint.format import layout, ocdbt, records
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import DoneRecord, ManifestPart, StoredFile, file_of
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.storage_path import StoragePath, ended_by
from gracepoint.checkpoint.writing.pool import PartSource, WriteJob, WrittenFiles
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed


@dataclasses.dataclass(frozen=True)
class SavePart:
    """What one process writes in one save, without the values of arrays. It can be sent to another process.

    Attributes:
        paths: Where the checkpoint goes.
        temporary: The folder that is written to.
        begun_ns: When the save began, in nanoseconds since the epoch by this process's clock.
        process_index: Index of the process.
        process_count: Number of processes that save together.
        digest: Digest of the array list.
        specs: What is stored of each leaf that is an array, by index of the leaf.
        arrays: Indices of the leaves whose own metadata this process writes.
        small_files: Contents of other files by path below the folder.
        copies: Checksums of copies of files that another process writes, by path.
        host_state: Names of the host state's values.
        names_replaced: Whether the done-record names the checkpoint that the save replaces.
        chunks: The chunks that this process holds.
        copied: Indices of the leaves that each process has a copy of.
        plan: A checksum of the assignment of all chunks to processes, if the manifest is in parts. None: it is not.
    """

    paths: Layout
    temporary: Temporary
    begun_ns: int
    process_index: int
    process_count: int
    digest: str
    specs: Mapping[int, ArraySpec]
    arrays: Sequence[int]
    small_files: Mapping[str, bytes]
    copies: Mapping[str, int]
    host_state: tuple[str, ...]
    names_replaced: bool
    chunks: Sequence[Chunk]
    copied: frozenset[int]
    plan: int | None

    def without_specs(self) -> SavePart:
        """Returns the part without what is the same in all saves of one form of state."""
        return dataclasses.replace(self, specs={}, arrays=(), chunks=(), copied=frozenset())


@dataclasses.dataclass(frozen=True)
class PartStages:
    """When a part reached its stages, in seconds after it began.

    Attributes:
        written_s: All its files were written.
        durable_s: Its done-record was durable.
        writing_s: Seconds that the writer took.
        chunk_bytes: Size of the values of all chunks that were written.
    """

    written_s: float
    durable_s: float
    writing_s: float
    chunk_bytes: int


class BegunPart:
    """A part whose folder exists. The caller has its ``job`` written, and then calls ``make_durable``.

    Args:
        part: The part.
        source: The values of the chunks. They must be the same when the part begins and when it has been written.
        writing: Its folder.
        deadline: When the part must be durable.
        on_stage: Called with "written" and "durable".
    """

    def __init__(
        self,
        part: SavePart,
        source: PartSource,
        writing: records.Writing,
        deadline: Deadline,
        on_stage: Callable[[str], None],
    ) -> None:
        source.check_unchanged()
        self._part = part
        self._source = source
        self._writing = writing
        self._deadline = deadline
        self._on_stage = on_stage
        self._began_s = deadline.clock()

    def job(self) -> WriteJob:
        """Returns what the writers need."""
        part, writing = self._part, self._writing
        return WriteJob(
            writing.folder,
            part.paths.item,
            part.specs,
            part.arrays,
            self._source,
            part.small_files,
            tree_numbers=[part.process_index],
            place=writing.place,
        )

    def make_durable(self, written: WrittenFiles, handled: Callable[[], Mapping[str, StoredFile]] = dict) -> PartStages:
        """Writes the done-record.

        Args:
            written: What the writer wrote.
            handled: Returns the files that handlers of the user's have written.

        Raises:
            SaveFailed: The deadline was cancelled, or the folder was taken away, or the values were changed.
            OSError: The record cannot be written.
        """
        part, writing, deadline, temporary = self._part, self._writing, self._deadline, self._part.temporary
        writing_s = deadline.clock() - self._began_s
        by_handlers = handled()
        self._on_stage("written")
        deadline.check_not_cancelled()
        written_s = deadline.clock() - self._began_s
        _check_stayed(temporary, writing.stayed)
        self._source.check_unchanged()
        chunk_bytes = written.chunk_bytes
        if part.plan is not None:
            written = write_manifest_part(
                writing.folder, part.paths.item, part.process_index, part.chunks, part.copied, written
            )
        record = DoneRecord(
            step=temporary.step,
            item=part.paths.item,
            attempt=temporary.attempt,
            ordinal=temporary.ordinal,
            process_index=part.process_index,
            process_count=part.process_count,
            digest=part.digest,
            arrays=tuple(part.specs.values()) if part.process_index == 0 else None,
            files={**written.files, **by_handlers},
            values=written.values,
            copies={**written.copies, **part.copies},
            host_state=part.host_state,
            begun_ns=writing.begun_ns,
            replaces=commit.of(part.paths).standing(temporary.target) if part.names_replaced else None,
            generations=dict(writing.generations),
            chunks=None if part.plan is None else sum(chunk.mine for chunk in part.chunks),
            plan=part.plan,
        )
        commit.of(part.paths).record(temporary, record, deadline.check)
        self._on_stage("durable")
        return PartStages(written_s, deadline.clock() - self._began_s, writing_s, chunk_bytes)


@contextlib.contextmanager
def begun(
    part: SavePart, source: PartSource, deadline: Deadline, on_stage: Callable[[str], None]
) -> Iterator[BegunPart]:
    """Makes the folder of a save, so that a part can be written.

    Args:
        part: The part.
        source: The values of its chunks.
        deadline: When the part must be durable.
        on_stage: Called with "written" and "durable".

    Raises:
        SaveFailed: The folder was taken away meanwhile, or the values were changed.
        OSError: The folder cannot be made.
    """
    stays = commit.of(part.paths).writing(part.temporary, part.begun_ns, process_index=part.process_index)
    with ended_by(deadline.check), stays as writing:
        try:
            yield BegunPart(part, source, writing, deadline, on_stage)
        except FileNotFoundError:
            _check_stayed(part.temporary, writing.stayed)
            raise


def write_manifest_part(
    folder: StoragePath,
    item: str,
    process_index: int,
    chunks: Sequence[Chunk],
    copied: Collection[int],
    written: WrittenFiles,
) -> WrittenFiles:
    """Writes a process's part of the manifest durably. Returns what is left for its done-record.

    Args:
        folder: Folder of the save.
        item: Name of the train state's folder below it.
        process_index: The process.
        chunks: The chunks of the process.
        copied: Leaves of which other processes have copies.
        written: What the process has written.
    """
    own_files = {layout.in_item(item, chunk.file): chunk.leaf for chunk in chunks if chunk.mine}
    manifest = ManifestPart({path: file for path, file in written.files.items() if path in own_files}, written.values)
    data, name = manifest.to_bytes(), layout.manifest_part(process_index)
    (folder / name).put(data)
    files = {path: file for path, file in written.files.items() if path not in own_files}
    # Other processes have copies of these chunks, which the commit compares.
    compared = [path for path, leaf in own_files.items() if leaf in copied]
    values = {
        path: manifest.values[path] if path in manifest.values else manifest.files[path].crc32 for path in compared
    }
    return WrittenFiles(files | {name: file_of(data)}, values, written.copies, written.chunk_bytes)


def clear_tree(part: SavePart) -> None:
    """Deletes the OCDBT tree of a writer that has died, so that its part can be written again.

    Other files are written over. In object stores there is nothing to delete: each writer's tree has a separate name.
    """
    if not part.temporary.path.is_far:
        undeleted.delete_folder(part.temporary.path / part.paths.item / ocdbt.process_folder(part.process_index))


def _check_stayed(temporary: Temporary, stayed: Callable[[], bool]) -> None:
    """Raises SaveFailed if the folder was renamed or deleted.

    Writers create missing folders, so the files of the save may then be in several folders.
    """
    if not stayed():
        raise SaveFailed(
            f"{temporary.path} was taken away while it was written, as a later start may do where nothing has "
            "changed for long: was this process stopped meanwhile?"
        )
