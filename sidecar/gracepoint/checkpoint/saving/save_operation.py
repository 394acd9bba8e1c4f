"""One save in one process: files written, done-record durable, committed together.

The same for a background save and an emergency; they differ in where the chunks come from and in who waits.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gracepoint.checkpoint.format import host_state, layout, orbax_metadata, pytree
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.manifest import DoneRecord, file_of
from gracepoint.checkpoint.planning.chunk_grid import args_by_name
from gracepoint.checkpoint.saving.handled_leaves import HandledLeaves
from gracepoint.checkpoint.saving.save_planner import PreparedSave
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.posix import make_folders, staying, write_durably
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.checkpoint.writing.write_job import ChunkSource, WriteJob
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierError, GracepointError, SaveFailed
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)

_DURABLE = "durable"


class Barrier(Protocol):
    """Brings the processes of a save together; ``Gang.barrier`` is one."""

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

    Whatever fails in this process fails the save in all: the others, who wait at the barrier or will, are
    told.
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
    ) -> None:
        """Begins the save, without touching a file.

        Args:
            paths: Where it goes.
            temporary: Until it is committed.
            gang: The processes that save together.
            writer: Of the chunks.
            replace: Whether it takes the place of what has its final name by then.
            barrier: Where the processes meet to commit, in place of the gang's own.
        """
        self.temporary = temporary
        self._paths = paths
        self._gang = gang
        self._writer = writer
        self._replace = replace
        self._barrier = gang.barrier if barrier is None else barrier
        self._begun_ns = time.time_ns()
        self._handled: HandledLeaves | None = None

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tells the other processes of any error that leaves the block."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Ends the wait of all processes, this one too, for the others' part. From any thread; never raises."""
        try:
            if self._handled is not None:
                self._gang.fail(self._handled_key, error)
            self._gang.fail(self.key, error)
        except GracepointError as unreachable:
            logger.warning("the other processes could not be told that a save failed: %s", unreachable)

    def cancel(self, reason: str) -> None:
        """Lets nobody wait for the others' part any more: what is not durable in all by now is not committed.

        From any thread; never raises.
        """
        try:
            if self._handled is not None:
                self._gang.cancel(self._handled_key, reason)
            self._gang.cancel(self.key, reason)
        except GracepointError as unreachable:
            logger.warning("the other processes could not be told that a save is given up: %s", unreachable)

    def again(self, temporary: Temporary) -> SaveOperation:
        """Returns a save of the same, described already, into another folder."""
        save = copy.copy(self)
        save.temporary = temporary
        save._begun_ns = time.time_ns()  # noqa: SLF001  of this class
        return save

    @property
    def _replaces(self) -> bool:
        """True if this process's done-record says what is to give way."""
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
        """Takes what is to be saved, but for the arrays' values.

        The host state is encoded at once, as its owner goes on to change it.

        Raises:
            CheckpointError: A value of the host state cannot be saved.
        """
        self._prepared = prepared
        self._host_state_names = tuple(host_state)
        self._small_files = self._small_files_of(prepared, host_state)
        self._copies: dict[str, int] = {}
        if strings := orbax_metadata.strings(leaves):
            path = layout.in_item(self._paths.item, layout.STRINGS)
            if self._gang.process_index == 0:
                self._small_files[path] = strings
            else:
                self._copies[path] = file_of(strings).crc32
        handled = [leaf for leaf in leaves if leaf.is_handled]
        if handled and prepared.handlers is not None:
            self._handled = HandledLeaves(self.temporary, self._paths, handled, prepared.handlers)
            self._handled.serialize(args_by_name(leaves, prepared.save_args))

    @property
    def key(self) -> str:
        """Of the barrier that the processes meet at to commit."""
        return f"checkpoint/{self.temporary.attempt}/save/{self.temporary.ordinal}/commit"

    @property
    def _handled_key(self) -> str:
        return f"checkpoint/{self.temporary.attempt}/save/{self.temporary.ordinal}/handled"

    @property
    def has_handled_leaves(self) -> bool:
        """True if type handlers write some leaves, which are not in the snapshot."""
        return self._handled is not None

    def run(self, source: ChunkSource, deadline: Deadline, on_stage: Callable[[str], None]) -> SaveStages:
        """Writes the chunks of ``source``, and returns when all processes' are committed.

        All processes that live and reach each other come to the same end, whichever of them is late.

        Raises:
            SaveFailed: Not committed in time, or a process failed. If it is durable all the same, the next
                start commits it.
        """
        clock = deadline.clock
        started_s = clock()
        folder = self.temporary.path
        try:
            with self.failing_together(), contextlib.ExitStack() as until_recorded:
                make_folders(folder)
                stayed = until_recorded.enter_context(staying(folder))
                try:
                    written = self._writer.write(self._job(folder, source), deadline)
                    handled = {}
                    if self._handled is not None:
                        handled = self._handled.record(self._gang, self._handled_key, deadline)
                except FileNotFoundError:
                    self._check_stayed(stayed)
                    raise
                on_stage("written")
                deadline.check_not_cancelled()
                written_s = clock() - started_s
                self._check_stayed(stayed)
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
                    begun_ns=self._begun_ns,
                    replaces=commit.standing(self.temporary.target) if self._replaces else None,
                )
                write_durably(folder / layout.done_record(self._gang.process_index), record.to_bytes())
                on_stage("durable")
                durable_s = clock() - started_s
        except SaveFailed:
            raise
        except Exception as error:
            raise SaveFailed(f"{self.temporary.what} was not written to {folder}: {error}") from error
        self._commit(deadline)
        on_stage("committed")
        return SaveStages(written_s, durable_s, clock() - started_s)

    def _job(self, folder: Path, source: ChunkSource) -> WriteJob:
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
        """Raises SaveFailed if the folder is gone: writers make missing ones, so that its files may be in several."""
        if not stayed():
            raise SaveFailed(
                f"{self.temporary.path} was taken away while it was written, as a later start may do where nothing has "
                "changed for long: was this process stopped meanwhile?"
            )

    def _commit(self, deadline: Deadline) -> None:
        try:
            self._barrier(self.key, timeout_s=deadline.remaining_s(), on_last=self._finalize)
        except (GracepointError, OSError) as error:
            self._commit_apart(error)

    def _commit_apart(self, error: Exception) -> None:
        """Ends the save where the processes did not meet: whoever is missing may have died when its part was durable.

        A process that is merely late would find the save durable after the others have found that it is not. So the
        first to look decides for all.
        """
        what = self.temporary.what
        try:
            durable = commit.is_durable(self._paths, self.temporary)
        except (GracepointError, OSError) as reason:
            raise SaveFailed(f"{what} is not committed: {reason} (after: {error})") from error
        decided = found = _DURABLE if durable else str(error)
        try:
            decided = self._gang.decide(f"{self.key}/apart", found)
        except BarrierError as unreachable:
            # Process 0, where the store is, has died, and JAX ends the others now. What is on the disk counts.
            logger.warning("the processes cannot agree on the end of a save: %s", unreachable)
        if decided != _DURABLE:
            late = f", and was durable too late: the next start commits {self.temporary.path}" if durable else ""
            raise SaveFailed(f"{what} is not committed: {decided}{late}") from error
        try:
            # Others may be at it just now, so nothing is replaced.
            if not commit.finalize(self._paths, self.temporary, replace=False):
                raise SaveFailed(f"{self.temporary.target} is in the way of {self.temporary.path} (after: {error})")
        except (GracepointError, OSError) as reason:
            raise SaveFailed(f"{what} is durable and not committed: {reason} (after: {error})") from error
        logger.warning("%s is committed, though the processes did not meet: %s", what, error)

    def _finalize(self) -> None:
        if not commit.finalize(self._paths, self.temporary, replace=self._replace):
            raise SaveFailed(f"{self.temporary.path} is not durable, or {self.temporary.target} is there by now")

    def _small_files_of(self, prepared: PreparedSave, values: Mapping[str, Any]) -> dict[str, bytes]:
        """Returns contents by path below the checkpoint's folder."""
        item = self._paths.item
        files = {}
        if self._gang.process_index == 0:
            for name, data in prepared.metadata.items():
                files[layout.in_item(item, name)] = data
        return files | self._files_of_items(values) if item else files

    def _files_of_items(self, values: Mapping[str, Any]) -> dict[str, bytes]:
        """Returns what a checkpoint with items has beside the train state."""
        files = {layout.host_state_file(self._gang.process_index): host_state.encode(values)}
        if self._gang.process_index == 0:
            success = f"Checkpoint commit was successful to {self.temporary.target / self._paths.item}"
            files[layout.in_item(self._paths.item, layout.COMMIT_SUCCESS)] = success.encode()
            summary = {"processes": self._gang.process_count, "names": list(self._host_state_names)}
            files[f"{layout.HOST_STATE_ITEM}/metadata"] = json.dumps(summary).encode()
        return files
