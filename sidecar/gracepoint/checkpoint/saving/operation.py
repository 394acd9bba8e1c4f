"""One save in one process: it writes files, makes the done-record durable, and commits together with the others.

Background saves and emergency saves differ only in where the chunks come from, and in who waits for them. If the
processes did not meet at the barrier, ``commit_apart`` commits the save if it is durable in all of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.format import host_state, layout, orbax_metadata, pytree
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import StoredFile, file_of
from gracepoint.checkpoint.planning.grid import args_by_name
from gracepoint.checkpoint.saving.extras import NO_EXTRAS, HandledParts, SaveExtras
from gracepoint.checkpoint.saving.part import PartStages, SavePart, begun, clear_tree
from gracepoint.checkpoint.saving.planner import PreparedSave
from gracepoint.checkpoint.saving.save_worker import HandedOver, WriterDied
from gracepoint.checkpoint.steps import commit, retention
from gracepoint.checkpoint.storage import checks
from gracepoint.checkpoint.storage.storage_path import ended_by
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.checkpoint.writing.pool import SaveSource
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierError, BarrierFailed, GracepointError, HostStateLost, SaveFailed
from gracepoint.process_group import ProcessGroup


def is_in_parts(prepared: PreparedSave, paths: Layout) -> bool:
    """Returns whether the manifest of a save is in parts. It is the same in all processes."""
    return prepared.has_many_chunks and commit.of(paths).takes_parts


def small_files(
    paths: Layout,
    temporary: Temporary,
    gang: ProcessGroup,
    prepared: PreparedSave,
    extras: SaveExtras,
    values: Mapping[str, Any],
) -> dict[str, bytes]:
    """Returns the contents of this process's small files, by path below the checkpoint's folder.

    Args:
        paths: Layout of the directory.
        temporary: The save.
        gang: The processes that save together.
        prepared: The plan.
        extras: What is saved next to the state.
        values: The host state of this process.

    Raises:
        CheckpointError: A value of the host state cannot be saved.
    """
    files, item = {}, paths.item
    if gang.process_index == 0:
        for name, data in prepared.metadata.items():
            files[layout.in_item(item, name)] = data
        files |= extras.files(item, prepared.metadata[layout.TREE_METADATA])
        if is_in_parts(prepared, paths):
            files[layout.CHUNK_WRITERS] = prepared.chunk_writers
    return files | _of_items(temporary, item, gang, values) if item else files


def _of_items(temporary: Temporary, item: str, gang: ProcessGroup, values: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the files that a checkpoint with items has next to the train state, by path."""
    files = {layout.host_state_file(gang.process_index): host_state.encode(values)}
    if gang.process_index == 0:
        success = f"Checkpoint commit was successful to {temporary.target / item}"
        files[layout.in_item(item, layout.COMMIT_SUCCESS)] = success.encode()
        summary = {"processes": gang.process_count, "names": list(values)}
        if lost := {name: str(value) for name, value in values.items() if isinstance(value, HostStateLost)}:
            summary["lost_in_process_0"] = lost
        files[f"{layout.HOST_STATE_ITEM}/metadata"] = json.dumps(summary).encode()
    return files


logger = logging.getLogger(__name__)

#: Seconds that the requests of a process have at least. The other processes wait for its result for so long.
SECONDS = 10.0
_DURABLE = "durable"
_COMMITTED = "committed"
# With more processes, the error does not say whether the save was durable too late: each would read all records. And
# one of them deletes for all what a failed save has written: each would list it.
_FEW = 16


def commit_apart(
    paths: Layout, temporary: Temporary, gang: ProcessGroup, key: str, error: Exception, deadline: Deadline
) -> None:
    """Ends a save whose processes did not meet at the barrier.

    A missing process may have died after its part was durable. A process that is only late could find the save durable
    after the others found that it is not. So the first process that checks decides for all. The check and the commit
    read the record of each process. So one process at a time does this, and the others wait for it.

    Args:
        paths: Where the checkpoint goes.
        temporary: The folder that was written to.
        gang: The processes that save together.
        key: Key of the barrier at which they did not meet.
        error: Why they did not meet.
        deadline: The deadline of the save. If it is near or over, requests to an object store have a few seconds.

    Raises:
        SaveFailed: The save is not committed. If it is durable nevertheless, the next start commits it.
    """
    limit = Deadline.after(max(deadline.remaining_s(), SECONDS), time.monotonic)
    with ended_by(limit.check):
        _Apart(paths, temporary, gang, f"{key}/apart", error).commit()


class _Apart:
    """Ends one save. The arguments are those of ``commit_apart``."""

    def __init__(self, paths: Layout, temporary: Temporary, gang: ProcessGroup, key: str, error: Exception) -> None:
        self._paths = paths
        self._temporary = temporary
        self._gang = gang
        self._key = key
        self._error = error

    def commit(self) -> None:
        subject, error = self._temporary.what, self._error
        try:
            decided = self._in_turn(self._key, self._durable)
        except (GracepointError, OSError) as reason:
            raise SaveFailed(f"{subject} is not committed: {reason} (after: {error})") from error
        if decided != _DURABLE:
            with contextlib.suppress(GracepointError, OSError):
                decided += self._late()
            raise SaveFailed(f"{subject} is not committed: {decided}") from error
        try:
            # The others need not do what one has done. If it failed, each reports the outcome of its own attempt.
            if self._in_turn(f"{self._key}/commit", self._tried) != _COMMITTED:
                self._finalize()
        except (GracepointError, OSError) as reason:
            raise SaveFailed(f"{subject} is durable and not committed: {reason} (after: {error})") from error
        logger.warning("%s is committed, though the processes did not meet: %s", subject, error)

    def _in_turn(self, key: str, find: Callable[[], str]) -> str:
        try:
            return self._gang.decide_in_turn(key, find, timeout_s=SECONDS)
        except BarrierError as unreachable:
            # Process 0, which has the store, has died, and JAX ends the other processes now. Only the disk counts.
            logger.warning("the processes cannot agree on the end of a save: %s", unreachable)
            return find()

    def _durable(self) -> str:
        return _DURABLE if commit.is_durable(self._paths, self._temporary) else str(self._error)

    def _late(self) -> str:
        """Returns the rest of a message: whether the save was durable too late."""
        if self._gang.process_count > _FEW or not commit.is_durable(self._paths, self._temporary):
            return ""
        return f", and was durable too late: the next start commits {self._temporary.path}"

    def _tried(self) -> str:
        try:
            self._finalize()
        except (GracepointError, OSError) as reason:
            return str(reason)
        return _COMMITTED

    def _finalize(self) -> None:
        path, target = self._temporary.path, self._temporary.target
        # Other processes may commit at the same time, so nothing is replaced.
        if not commit.of(self._paths).finalize(self._temporary, replace=False):
            raise SaveFailed(f"{path} cannot be committed: {target} already exists (after: {self._error})")


# Seconds for the requests that delete it. What is left is deleted once a later save is committed.
_GIVES_UP_S = 30.0
# Seconds for the answer of the coordination service, which another process has given before.
_FIRST_ERROR_S = 10.0


class Barrier(Protocol):
    """Brings the processes of a save together. ``ProcessGroup.barrier`` is one."""

    def __call__(self, key: str, *, timeout_s: float, on_last: Callable[[], None]) -> None:
        """Blocks until all have come and ``on_last`` has returned in one of them.

        Raises:
            BarrierError: They did not come in time, or one failed.
        """


@dataclasses.dataclass(frozen=True)
class CommitOptions:
    """How a save is committed.

    Attributes:
        replace: Whether to replace a checkpoint that has the final name at the commit.
        barrier: Where the processes meet to commit. None: the gang's own barrier.
        kind: Names the keys at which the processes meet. Saves of one attempt that may run at the same time have
            different kinds, and each kind has its own ordinals.
    """

    replace: bool = True
    barrier: Barrier | None = None
    kind: str = "save"


DEFAULT_COMMIT = CommitOptions()


@dataclasses.dataclass(frozen=True)
class SaveStages:
    """When a save reached each stage in this process, in seconds after it began."""

    written_s: float
    durable_s: float
    committed_s: float


class SaveOperation:
    """One save in this process. The caller calls ``describe``, then ``run``, each once.

    If it fails in this process, it fails in all processes. The others are notified, even if they do not wait yet.

    Attributes:
        paths: Where the checkpoint goes.
        temporary: The folder that is written to before the commit.
    """

    def __init__(
        self,
        paths: Layout,
        temporary: Temporary,
        gang: ProcessGroup,
        writer: ChunkWriter,
        *,
        how: CommitOptions = DEFAULT_COMMIT,
        extras: SaveExtras = NO_EXTRAS,
        give_up_failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins the save, without touching a file.

        Args:
            paths: Where the checkpoint goes.
            temporary: The folder that is written to before the commit.
            gang: The processes that save together.
            writer: Writes the chunks.
            how: How the save is committed.
            extras: What is saved next to the state.
            give_up_failed: Deletes what earlier saves of this attempt have left that failed or were stopped.
        """
        self._give_up_failed = give_up_failed
        self._extras = extras
        self.temporary = temporary
        self.paths = paths
        self._gang = gang
        self._writer = writer
        self._replace = how.replace
        self._kind = how.kind
        self._barrier = gang.barrier if how.barrier is None else how.barrier
        self._begun_ns = time.time_ns()
        self._handled: HandledParts | None = None

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tells the other processes of any error that leaves the block."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            if self.has_handled_parts:  # handlers may have written files already
                self.give_up()
            raise

    def fail(self, error: BaseException) -> None:
        """Tells all processes that the save failed, so that none waits any more.

        Any thread may call it. Never raises.
        """
        try:
            if self._may_meet_for_handlers:
                self._gang.fail(self._handled_key, error)
            self._gang.fail(self.key, error)
        except GracepointError as unreachable:
            logger.warning("could not notify the other processes that a save failed: %s", unreachable)

    def cancel(self, reason: str) -> None:
        """Ends the wait of all processes. The save is committed only if it is already durable in all of them.

        Any thread may call it. Never raises.
        """
        try:
            if self._may_meet_for_handlers:
                self._gang.cancel(self._handled_key, reason)
            self._gang.cancel(self.key, reason)
        except GracepointError as unreachable:
            logger.warning("could not notify the other processes that a save is given up: %s", unreachable)

    def again(self, temporary: Temporary) -> SaveOperation:
        """Returns a save of the same state to another folder. ``describe`` need not be called again."""
        save = copy.copy(self)
        save.temporary = temporary
        save._begun_ns = time.time_ns()  # noqa: SLF001  of this class
        return save

    @property
    def prepared(self) -> PreparedSave:
        """The plan, once ``describe`` was called."""
        return self._prepared

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
            SaveFailed: TensorStore could not read what would be written.
        """
        self._prepared = prepared
        unreadable = self.temporary.target.tensorstore_error
        if unreadable and any(spec is not None and not spec.format.files_hold_values for spec in prepared.specs):
            raise SaveFailed(
                f"{self.temporary.target}: {unreadable}. Save without OCDBT and without compression, or mend that"
            )
        self._host_state_names = tuple(host_state)
        self._small_files = small_files(self.paths, self.temporary, self._gang, prepared, self._extras, host_state)
        self._copies: dict[str, int] = {}
        if strings := orbax_metadata.strings(leaves):
            path = layout.in_item(self.paths.item, layout.STRINGS)
            if self._gang.process_index == 0:
                self._small_files[path] = strings
            else:
                self._copies[path] = file_of(strings).crc32
        self._handled = HandledParts(self.temporary, self.paths, leaves, prepared.handlers, self._extras)
        if self._handled:
            self._handled.begin(args_by_name(leaves, prepared.save_args))

    @property
    def key(self) -> str:
        """Key of the barrier at which the processes commit."""
        return f"checkpoint/{self.temporary.attempt}/{self._kind}/{self.temporary.ordinal}/commit"

    @property
    def _handled_key(self) -> str:
        return f"checkpoint/{self.temporary.attempt}/{self._kind}/{self.temporary.ordinal}/handled"

    @property
    def _may_meet_for_handlers(self) -> bool:
        """True if other processes may wait for this one's handlers. That is not known before ``describe``."""
        return self._handled is None or bool(self._handled)

    @property
    def has_handled_parts(self) -> bool:
        """True if handlers of the user's write a part of the save. That part is not in the snapshot."""
        return bool(self._handled)

    def run(
        self,
        source: SaveSource,
        deadline: Deadline,
        on_stage: Callable[[str], None],
        handed: HandedOver | None = None,
        *,
        deletes: bool = True,
    ) -> SaveStages:
        """Writes the chunks of ``source``, and returns when the save of all processes is committed.

        If the part was handed over to a worker process (``handed``), this waits for the worker. ``source`` is then
        written only if the worker dies.

        All processes that are alive and can reach each other end with the same outcome, even if some are late. What a
        save that fails has written goes at once, so that it does not take the room of the next one.

        Args:
            source: The chunks.
            deadline: When the save must have ended.
            on_stage: Called with "written", "durable" and "committed".
            handed: See above.
            deletes: False if there is no time to delete what a failed save has written. It becomes trash then.

        Raises:
            SaveFailed: The save was not committed in time, or a process failed. If the save is durable nevertheless,
                the next start commits it.
        """
        clock, started_s = deadline.clock, deadline.clock()
        can_be_durable = False  # before this process's part is durable, the save is not, and never if it fails
        try:
            part = self._written(source, deadline, on_stage, handed)
            can_be_durable = True
            if self._kind == DEFAULT_COMMIT.kind:
                metrics.tell_written(part.chunk_bytes, part.writing_s, self.temporary.path)
            self._commit(deadline)
        except SaveFailed as error:
            # A process that is missing may still end its part, but not one that has failed, unless a worker writes it.
            if not can_be_durable or (isinstance(error.__cause__, BarrierFailed) and handed is None):
                self.give_up(deletes=deletes and not deadline.cancelled)
            raise
        on_stage("committed")
        return SaveStages(part.written_s, part.durable_s, clock() - started_s)

    def _written(
        self,
        source: SaveSource,
        deadline: Deadline,
        on_stage: Callable[[str], None],
        handed: HandedOver | None,
    ) -> PartStages:
        """Has this process's part written and made durable.

        Raises:
            SaveFailed: It was not, here or in the process that failed first.
        """
        try:
            with self.failing_together():
                self._make_room()
                part = self._written_elsewhere(handed, deadline, on_stage) if handed is not None else None
                if part is not None:
                    source.written_elsewhere()
                else:
                    with begun(self.part(), source, deadline, on_stage) as writing:
                        written = self._writer.write(writing.job(), deadline)
                        part = writing.make_durable(written, self._record_handled(deadline))
                return part
        except Exception as error:
            if (first := self._first_error(error)) is not error:
                raise first from first.__cause__
            if isinstance(error, SaveFailed):
                raise
            where = self.temporary.path
            reason = checks.explained(error, where, self.total_bytes)
            raise SaveFailed(f"{self.temporary.what} was not written to {where}: {reason}") from error

    def _make_room(self) -> None:
        """Deletes what nobody needs if the file system seems too full for the save. Process 0 does it for all."""
        if self._gang.process_index != 0 or self.temporary.step is None:
            return
        space = checks.room_at(self.temporary.path)
        if space is None or space.free_bytes >= self.total_bytes:
            return
        self._give_up_failed()
        retention.make_room(self.paths, self.temporary.attempt)
        space = checks.room_at(self.temporary.path) or space
        if space.free_bytes < self.total_bytes:
            # It is tried nevertheless: file systems and formats that compress need less.
            logger.warning(
                "%s may not fit: it has %d bytes, and %d of %d are free on the file system of %s",
                self.temporary.what,
                self.total_bytes,
                space.free_bytes,
                space.total_bytes,
                self.paths.root,
            )

    def _first_error(self, error: Exception) -> Exception:
        """Returns the error of the process that failed first: it may have deleted what this one was writing."""
        if self._gang.process_count == 1 or checks.knows(error):
            return error
        try:
            self._gang.barrier(self.key, timeout_s=_FIRST_ERROR_S)  # does not wait: one process has failed it
        except GracepointError as first_error:
            if str(error) not in str(first_error):  # this process was not the first
                first = SaveFailed(f"{self.temporary.what} is not committed: {first_error}")
                first.__cause__ = first_error
                return first
        return error

    def give_up(self, *, deletes: bool = True) -> None:
        """Deletes what the save has written, once it has failed. In a large gang, process 0 does it for all."""
        if self._gang.process_index == 0 or self._gang.process_count <= _FEW:
            limit = Deadline.after(_GIVES_UP_S, time.monotonic)  # a store that is away has longer timeouts
            try:
                with ended_by(limit.check):
                    commit.give_up_failed(self.paths, self.temporary, deletes=deletes)
            except GracepointError as error:
                logger.warning("what %s has written was not deleted: %s", self.temporary.what, error)

    def part(self) -> SavePart:
        """Returns what this process writes, once ``describe`` was called."""
        plan = self._prepared.plan
        return SavePart(
            paths=self.paths,
            temporary=self.temporary,
            begun_ns=self._begun_ns,
            process_index=self._gang.process_index,
            process_count=self._gang.process_count,
            digest=self._prepared.digest,
            specs={leaf: spec for leaf, spec in enumerate(self._prepared.specs) if spec is not None},
            arrays=plan.arrays,
            small_files=self._small_files,
            copies=self._copies,
            host_state=self._host_state_names,
            names_replaced=self._replace and self._gang.process_index == 0,
            chunks=plan.chunks,
            copied=plan.copied,
            plan=plan.checksum if is_in_parts(self._prepared, self.paths) else None,
        )

    def _record_handled(self, deadline: Deadline) -> Callable[[], Mapping[str, StoredFile]]:
        if not self._handled:
            return dict
        return functools.partial(self._handled.record, self._gang, self._handled_key, deadline)

    def _written_elsewhere(
        self, handed: HandedOver, deadline: Deadline, on_stage: Callable[[str], None]
    ) -> PartStages | None:
        """Returns the stages of a part that a worker process writes. None if the worker died: nobody writes it then."""
        try:
            return handed.wait(deadline, on_stage)
        except WriterDied as error:
            logger.warning(
                "%s is written by a thread of this process, as its worker died: %s", self.temporary.what, error
            )
            clear_tree(self.part())
            return None

    def _commit(self, deadline: Deadline) -> None:
        on_last = functools.partial(self._finalize, deadline)
        try:
            self._barrier(self.key, timeout_s=deadline.remaining_s(), on_last=on_last)
        except (GracepointError, OSError) as error:
            commit_apart(self.paths, self.temporary, self._gang, self.key, error, deadline)

    def _finalize(self, deadline: Deadline) -> None:
        with ended_by(deadline.check):
            finished = commit.of(self.paths).finalize(self.temporary, replace=self._replace, go_on=deadline.check)
        if not finished:
            raise SaveFailed(f"{self.temporary.path} is not durable, or {self.temporary.target} already exists")
