"""One save in one process: it writes files, makes the done-record durable, and commits together with the others.

Background saves and emergency saves differ only in where the chunks come from, and in who waits for them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from gracepoint.checkpoint.format import layout, orbax_metadata, pytree
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.manifest import DoneRecord, StoredFile, file_of
from gracepoint.checkpoint.planning.chunk_grid import args_by_name
from gracepoint.checkpoint.saving import small_files
from gracepoint.checkpoint.saving.commit_apart import commit_apart
from gracepoint.checkpoint.saving.handled_parts import HandledParts
from gracepoint.checkpoint.saving.save_extras import NO_EXTRAS, SaveExtras
from gracepoint.checkpoint.saving.save_planner import PreparedSave
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.checkpoint.writing.write_job import ChunkSource, WriteJob
from gracepoint.deadline import Deadline
from gracepoint.errors import GracepointError, SaveFailed
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)


class Barrier(Protocol):
    """Brings the processes of a save together. ``ProcessGroup.barrier`` is one."""

    def __call__(self, key: str, *, timeout_s: float, on_last: Callable[[], None]) -> None:
        """Blocks until all have come and ``on_last`` has returned in one of them.

        Raises:
            BarrierError: They did not come in time, or one failed.
        """


@dataclasses.dataclass(frozen=True)
class SaveStages:
    """When a save reached each stage in this process, seconds after it began."""

    written_s: float
    durable_s: float
    committed_s: float


class SaveOperation:
    """A save of one step by this process: ``describe``, then ``run``, each once.

    If it fails in this process, it fails in all processes. The others are told, even if they do not wait yet.
    """

    def __init__(
        self,
        paths: Layout,
        temporary: Temporary,
        gang: ProcessGroup,
        writer: ChunkWriter,
        *,
        replace: bool = True,
        barrier: Barrier | None = None,
        extras: SaveExtras = NO_EXTRAS,
    ) -> None:
        """Begins the save, without touching a file.

        Args:
            paths: Where the checkpoint goes.
            temporary: The folder that is written to before the commit.
            gang: The processes that save together.
            writer: Writes the chunks.
            replace: Whether to replace a checkpoint that has the final name at the commit.
            barrier: Where the processes meet to commit. None: the gang's own barrier.
            extras: What is saved beside the state.
        """
        self._extras = extras
        self.temporary = temporary
        self._paths = paths
        self._gang = gang
        self._writer = writer
        self._replace = replace
        self._barrier = gang.barrier if barrier is None else barrier
        self._begun_ns = time.time_ns()
        self._handled: HandledParts | None = None

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tells the other processes of any error that leaves the block."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tells all processes that the save failed, so that none waits any more.

        Any thread may call it. Never raises.
        """
        try:
            if self._handled:
                self._gang.fail(self._handled_key, error)
            self._gang.fail(self.key, error)
        except GracepointError as unreachable:
            logger.warning("the other processes could not be told that a save failed: %s", unreachable)

    def cancel(self, reason: str) -> None:
        """Ends the wait of all processes. The save is committed only if it is already durable in all of them.

        Any thread may call it. Never raises.
        """
        try:
            if self._handled:
                self._gang.cancel(self._handled_key, reason)
            self._gang.cancel(self.key, reason)
        except GracepointError as unreachable:
            logger.warning("the other processes could not be told that a save is given up: %s", unreachable)

    def again(self, temporary: Temporary) -> SaveOperation:
        """Returns a save of the same state to another folder. ``describe`` need not be called again."""
        save = copy.copy(self)
        save.temporary = temporary
        save._begun_ns = time.time_ns()  # noqa: SLF001  of this class
        return save

    @property
    def _replaces(self) -> bool:
        """True if this process's done-record names the checkpoint that is replaced."""
        return self._replace and self._gang.process_index == 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the state over all processes."""
        return self._prepared.plan.total_bytes

    @property
    def mine_bytes(self) -> int:
        """Bytes that this process writes."""
        return sum(chunk.bytes for chunk in self._prepared.plan.chunks if chunk.mine)

    def describe(self, leaves: Sequence[pytree.Leaf], prepared: PreparedSave, host_state: Mapping[str, Any]) -> None:
        """Sets what is saved, except for the values of arrays.

        Encodes the host state, and has handlers copy or write their parts, as the caller may change both afterwards.

        Raises:
            CheckpointError: A value of the host state cannot be saved.
        """
        self._prepared = prepared
        self._host_state_names = tuple(host_state)
        self._small_files = small_files.small_files(
            self.temporary, self._paths.item, self._gang, prepared, self._extras, host_state
        )
        self._copies: dict[str, int] = {}
        if strings := orbax_metadata.strings(leaves):
            path = layout.in_item(self._paths.item, layout.STRINGS)
            if self._gang.process_index == 0:
                self._small_files[path] = strings
            else:
                self._copies[path] = file_of(strings).crc32
        self._handled = HandledParts(self.temporary, self._paths, leaves, prepared.handlers, self._extras)
        if self._handled:
            self._handled.begin(args_by_name(leaves, prepared.save_args))

    @property
    def key(self) -> str:
        """Key of the barrier at which the processes commit."""
        return f"checkpoint/{self.temporary.attempt}/save/{self.temporary.ordinal}/commit"

    @property
    def _handled_key(self) -> str:
        return f"checkpoint/{self.temporary.attempt}/save/{self.temporary.ordinal}/handled"

    @property
    def has_handled_parts(self) -> bool:
        """True if handlers of the user's write a part, which is not in the snapshot."""
        return bool(self._handled)

    def run(self, source: ChunkSource, deadline: Deadline, on_stage: Callable[[str], None]) -> SaveStages:
        """Writes the chunks of ``source``, and returns when the save of all processes is committed.

        All processes that are alive and can reach each other end with the same outcome, even if some are late.

        Raises:
            SaveFailed: The save was not committed in time, or a process failed. If the save is durable nevertheless,
                the next start commits it.
        """
        clock, folder = deadline.clock, self.temporary.path
        started_s = clock()
        try:
            with self.failing_together(), contextlib.ExitStack() as until_recorded:
                writing = until_recorded.enter_context(
                    commit.writing(self.temporary, self._begun_ns, process_index=self._gang.process_index)
                )
                stayed = writing.stayed
                try:
                    written = self._writer.write(self._job(writing.folder, source), deadline)
                    handled: dict[str, StoredFile] = {}
                    if self._handled:
                        handled = self._handled.record(self._gang, self._handled_key, deadline)
                except FileNotFoundError:
                    self._check_stayed(stayed)
                    raise
                on_stage("written")
                deadline.check_not_cancelled()
                written_s = clock() - started_s
                self._check_stayed(stayed)
                plan, chunks = self._prepared.plan, None
                if small_files.is_in_parts(self._prepared, self.temporary):
                    chunks = sum(chunk.mine for chunk in plan.chunks)
                    written = small_files.write_part(
                        writing.folder, self._paths.item, self._gang.process_index, plan, written
                    )
                record = DoneRecord(
                    step=self.temporary.step,
                    item=self._paths.item,
                    attempt=self.temporary.attempt,
                    ordinal=self.temporary.ordinal,
                    process_index=self._gang.process_index,
                    process_count=self._gang.process_count,
                    digest=self._prepared.digest,
                    arrays=self._prepared.arrays if self._gang.process_index == 0 else None,
                    files=written.files | handled,
                    values=written.values,
                    copies=written.copies | self._copies,
                    host_state=self._host_state_names,
                    begun_ns=writing.begun_ns,
                    replaces=commit.standing(self.temporary.target) if self._replaces else None,
                    generations=dict(writing.generations),
                    chunks=chunks,
                    plan=None if chunks is None else plan.checksum,
                )
                commit.record(self.temporary, record, functools.partial(_check_time, deadline))
                on_stage("durable")
                durable_s = clock() - started_s
        except SaveFailed:
            raise
        except Exception as error:
            raise SaveFailed(f"{self.temporary.what} was not written to {folder}: {error}") from error
        self._commit(deadline)
        on_stage("committed")
        return SaveStages(written_s, durable_s, clock() - started_s)

    def _job(self, folder: StoragePath, source: ChunkSource) -> WriteJob:
        return WriteJob(
            folder,
            self._paths.item,
            {leaf: spec for leaf, spec in enumerate(self._prepared.specs) if spec is not None},
            self._prepared.plan.arrays,
            source,
            self._small_files,
            tree_numbers=[self._gang.process_index],
        )

    def _check_stayed(self, stayed: Callable[[], bool]) -> None:
        """Raises SaveFailed if the folder was renamed or deleted.

        Writers create missing folders, so the files of the save may then be in several folders.
        """
        if not stayed():
            raise SaveFailed(
                f"{self.temporary.path} was taken away while it was written, as a later start may do where nothing has "
                "changed for long: was this process stopped meanwhile?"
            )

    def _commit(self, deadline: Deadline) -> None:
        on_last = functools.partial(self._finalize, deadline)
        try:
            self._barrier(self.key, timeout_s=deadline.remaining_s(), on_last=on_last)
        except (GracepointError, OSError) as error:
            commit_apart(self._paths, self.temporary, self._gang, self.key, error)

    def _finalize(self, deadline: Deadline) -> None:
        if not commit.finalize(self._paths, self.temporary, replace=self._replace, go_on=lambda: _check_time(deadline)):
            raise SaveFailed(f"{self.temporary.path} is not durable, or {self.temporary.target} already exists")


def _check_time(deadline: Deadline) -> None:
    if deadline.passed():
        raise SaveFailed(f"not done {deadline.ended}")
