"""Runs the saves of one gang, one at a time. The one place that knows which save is under way.

One thread owns a ``SaveExecutor``: the training thread, or the one that owns the checkpointer. A background save runs
in a thread of its own (``BackgroundThread``), which ends with the save. That thread reads the snapshot. The owner fills
the snapshot only while no background save runs, and while nothing uses it that an interrupted save has left behind. The
writers' threads end with each save. Every wait for another process has a timeout.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gracepoint import machine
from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.background_thread import BackgroundThread
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.metrics import SaveStats
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, WriteOptions
from gracepoint.checkpoint.saving.background import BackgroundSave, CountedChunks, SnapshotSave, WorkerHandoff
from gracepoint.checkpoint.saving.extras import NO_EXTRAS, SaveExtras
from gracepoint.checkpoint.saving.host_snapshot import Transfer
from gracepoint.checkpoint.saving.operation import Barrier, SaveOperation
from gracepoint.checkpoint.saving.planner import SavePlanner
from gracepoint.checkpoint.saving.save_worker import HandedOver
from gracepoint.checkpoint.storage import checks
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.checkpoint.writing.files import SaveSource
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from gracepoint.process_group import ProcessGroup
from gracepoint.threads import check_not_forked

logger = logging.getLogger(__name__)

#: Seconds to write a probe file before training begins.
WARM_UP_TIMEOUT_S = 60.0

#: A process's values by name, or a function that returns them.
HostState = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class SaveExecutor:
    """Saves states, and knows which save is under way.

    ``begin``, ``in_background``, ``now`` and ``promote`` are collective: all processes make these calls in the same
    order.

    Args:
        gang: The processes that save together.
        attempt: Unique for each start of the gang; the same in all its processes.
        clock: Returns monotonic seconds.
        processes: ``jax.process_index()`` of each process of the gang. None: the index in the gang is the same.
        options: How arrays are written. None: the defaults.
        host_memory_limit_bytes: Largest size of a snapshot in this process. None: the available memory of the host.
        handlers: Handlers of types that are not saved without one. None: there are none.

    Attributes:
        background: The background save under way.
        handing: Hands saves to worker processes.
        planner: Plans the saves. Its ``prepare`` does what the first save would otherwise spend time on.
        saves: How many saves were begun; the same in all processes.
        last_save: Figures of the last committed save in this process. None before the first.
    """

    def __init__(
        self,
        gang: ProcessGroup,
        attempt: str,
        *,
        clock: Callable[[], float],
        processes: Sequence[int] | None = None,
        options: WriteOptions | None = None,
        host_memory_limit_bytes: int | None = None,
        handlers: HandlerRegistry | None = None,
    ) -> None:
        self._gang = gang
        self._attempt = attempt
        self._clock = clock
        self._pid = machine.process_id()
        self._writer = ChunkWriter(options or DEFAULT_OPTIONS)
        self.handing = WorkerHandoff(self._writer.options)
        self.planner = SavePlanner(
            gang,
            attempt,
            self._writer.options,
            processes=processes,
            host_memory_limit_bytes=host_memory_limit_bytes,
            handlers=handlers,
        )
        self._thread = BackgroundThread()
        self.background = BackgroundSave(self._thread)
        self._now: SaveOperation | None = None  # the save that the caller waits for
        self._now_written: Callable[[], int] = int  # the bytes of it that are written
        self._failed: collections.deque[SaveOperation] = collections.deque()  # of the save's thread
        self.saves = 0
        self.last_save: SaveStats | None = None

    def warm(self, paths: Layout, *, timeout_s: float = WARM_UP_TIMEOUT_S) -> None:
        """Starts the worker process if the options ask for one, and writes and removes a file below ``paths``.

        The file is written in the same way as those of a save.

        Raises:
            OSError: The directory cannot be written to.
            SaveFailed: The file was not written in time.
        """
        self.handing.start()
        paths.root.make_folder_durably()
        probe = paths.probe(self._attempt, self._gang.process_index)
        try:
            self._writer.warm(probe, Deadline.after(timeout_s, self._clock))
        except OSError as error:
            if not checks.knows(error):
                raise
            raise OSError(
                error.errno, f"{paths.root} cannot be written to: {checks.explained(error, probe)}"
            ) from error

    def begin(
        self,
        paths: Layout,
        step: int | None,
        *,
        replace: bool = True,
        barrier: Barrier | None = None,
        extras: SaveExtras = NO_EXTRAS,
    ) -> SaveOperation:
        """Returns the next save. Pass it to ``in_background`` or ``now``.

        Args:
            paths: Where the checkpoint goes.
            step: The step that is saved. None for a checkpoint that has a path to itself.
            replace: Whether the save replaces a checkpoint that already exists at its final name.
            barrier: Where the processes meet to commit. None: the gang's own barrier.
            extras: What is saved beside the state.

        Raises:
            ForkedChild: This process was forked from the one that made this object.
        """
        check_not_forked(self._pid, "this checkpointer")
        self.saves += 1  # before anything can fail, so that the processes' counts never differ
        temporary = paths.temporary(step, self._attempt, self.saves)
        return SaveOperation(
            paths,
            temporary,
            self._gang,
            self._writer,
            replace=replace,
            barrier=barrier,
            extras=extras,
            give_up_failed=self.give_up_failed,
        )

    def in_background(
        self,
        save: SaveOperation,
        state: Any,
        host_state: HostState,
        *,
        timeout_s: float,
        began_s: float,
        then: Callable[[], None],
        save_args: Any = None,
    ) -> None:
        """Copies the state to host memory, and writes it while the caller goes on.

        Args:
            save: What ``begin`` returned. No other save is under way.
            state: The state. The caller may donate it after this returns.
            host_state: This process's values by name, or what returns them. The caller may change them after this
                returns.
            timeout_s: Seconds for the part in the background.
            began_s: Time on the clock at which the caller began to wait.
            then: Called in the save's thread after the commit. If it raises, the save fails with that error.
            save_args: ``SaveArgs`` for all leaves, or a tree of them. None: the defaults.

        Raises:
            CheckpointError: The state or the host state cannot be saved; names the leaf. Or there is no memory for a
                snapshot.
        """
        waited_s = self._clock() - began_s
        self.background.newest = None  # its memory is filled again below
        with save.failing_together():
            self._tell_started(save, in_background=True)
            leaves, prepared = self.planner.plan(state, save_args)
            save.describe(leaves, prepared, host_state() if callable(host_state) else host_state)
            snapshot = self.planner.snapshot(leaves, prepared, save.key)
            started_s = self._clock()
            transfer = Transfer(leaves, prepared.specs, prepared.plan, self._writer.options, snapshot)
            snapshot_s = self._clock() - started_s
            deadline = Deadline.after(timeout_s, self._clock)
            handed = self.handing.hand_over(save, transfer.copied, transfer.filled, deadline, urgent=False)
        newest = SnapshotSave(save, transfer, deadline, handed)
        blocked_s = self._clock() - began_s

        def run() -> None:
            try:
                stages = save.run(newest.source, deadline, newest.reached, handed)
            except SaveFailed:
                self._failed.append(save)
                raise
            newest.committed = True
            stats = SaveStats(
                save.temporary.step, save.total_bytes, blocked_s, snapshot_s, stages.durable_s, stages.committed_s
            )
            self.last_save = stats  # before ``then``, which may read it
            then()
            total_s = self._clock() - began_s if self._gang.process_index == 0 else None
            chunks = sum(chunk.mine for chunk in prepared.plan.chunks)
            metrics.tell_background(stats, save.temporary.target, chunks=chunks, total_s=total_s)

        name = f"the save of {save.temporary.what}"
        with save.failing_together():
            self.background.begun(newest)  # before the start: if that is interrupted, the thread may run
            try:
                self._thread.start(name, run)
            except RuntimeError as error:
                raise SaveFailed(f"{name} was not begun, as the system has no thread for it: {error}") from error
        metrics.tell_blocked(blocked_s, waited_s=waited_s, snapshot_s=snapshot_s)

    def now(
        self,
        save: SaveOperation,
        state: Any,
        host_state: Mapping[str, Any],
        *,
        deadline: Deadline,
        on_stage: Callable[[str], None],
        save_args: Any = None,
    ) -> int:
        """Saves, and returns when the save is committed.

        Chunks go from the devices to the disk without a snapshot, unless a worker process writes them.

        Args:
            save: What ``begin`` returned. No other save is under way.
            state: The state. The caller must not donate it before this returns.
            host_state: This process's values by name.
            deadline: When the whole call must have ended.
            on_stage: Called with the name of each stage; see ``SaveOperation.run``.
            save_args: ``SaveArgs`` for all leaves, or a tree of them. None: the defaults.

        Returns:
            Bytes of the state over all processes.

        Raises:
            SaveFailed: The save was not committed in time, or a process failed.
            CheckpointError: The state or the host state cannot be saved; names the leaf.
        """
        began_s = self._clock()
        with save.failing_together():
            self._tell_started(save, in_background=False)
            leaves, prepared = self.planner.plan(state, save_args)
            save.describe(leaves, prepared, host_state)
            snapshot = None
            if prepared.snapshot is not None and self.handing.is_for(save) and not self.background.busy:
                self.background.newest = None  # its memory is filled again
                snapshot = self.planner.snapshot(leaves, prepared, save.key)
            transfer = Transfer(leaves, prepared.specs, prepared.plan, self._writer.options, snapshot, deadline)
            handed = self.handing.hand_over(save, transfer.copied, transfer.filled, deadline, urgent=True)
        return self._run_now(save, transfer, deadline, on_stage, began_s, handed)

    def promote(self, paths: Layout, deadline: Deadline, on_stage: Callable[[str], None]) -> tuple[int, int]:
        """Commits the newest snapshot: waits for its save, or writes it again if its save failed.

        Args:
            paths: Where the checkpoint goes.
            deadline: When the whole call must have ended.
            on_stage: Called with the name of each stage; see ``SaveOperation.run``.

        Returns:
            The step, and the bytes of the state over all processes.

        Raises:
            SaveFailed: There is no snapshot, or it was not committed in time.
        """
        began_s, newest = self._clock(), self.background.newest
        step = None if newest is None else newest.save.temporary.step
        # Whether it is needed or not, so that the processes' counts never differ. It touches no file.
        again = self.begin(paths, step or 0)
        with again.failing_together():
            if newest is None or step is None:
                raise SaveFailed("there is no snapshot in host memory that could be saved in place of the state")
            self.background.wait_until(deadline)
            error = self.background.take_error()
            source = None if newest.committed else newest.once_more()
            if not newest.committed and source is None:
                raise SaveFailed(f"the snapshot of step {step} was not saved, and is not in memory any more: {error}")
        if source is None:
            for stage in ("written", "durable", "committed"):
                on_stage(stage)
            return step, newest.save.total_bytes
        logger.warning("the snapshot of step %d is written once more, as its save failed: %s", step, error)
        save = newest.save.again(again.temporary)
        with save.failing_together():
            handed = self.handing.hand_over(save, newest.chunks, newest.filled, deadline, urgent=True)
        return step, self._run_now(save, source, deadline, on_stage, began_s, handed)

    def give_up_failed(self) -> None:
        """Deletes what is left of saves that failed or were stopped.

        Called once a later save is committed, or if a save needs the room.
        """
        while self._failed:
            self._failed.popleft().give_up()

    def close(self) -> None:
        """Ends the worker process, if there is one, after the save under way. Does not wait for it."""
        self.handing.close()

    @property
    def commit_key(self) -> str | None:
        """Key of the barrier at which ``now`` or ``promote`` commits; cancelling it ends the wait. None: not saving."""
        return None if self._now is None else self._now.key

    @property
    def written_bytes(self) -> int:
        """Bytes that this process has written of the save in ``now`` or ``promote``. 0: not saving."""
        return self._now_written()

    def _run_now(
        self,
        save: SaveOperation,
        source: SaveSource,
        deadline: Deadline,
        on_stage: Callable[[str], None],
        began_s: float,
        handed: HandedOver | None,
    ) -> int:
        counted = CountedChunks(source)
        self._now = save
        self._now_written = lambda: counted.written_bytes + (0 if handed is None else handed.done_bytes)
        try:
            # A step that is saved while somebody waits is saved before the process ends.
            stages = save.run(counted, deadline, on_stage, handed, deletes=save.temporary.step is None)
        finally:
            self._now, self._now_written = None, int
        size_bytes, blocked_s = save.total_bytes, self._clock() - began_s
        step = save.temporary.step
        self.last_save = SaveStats(step, size_bytes, blocked_s, 0.0, stages.durable_s, stages.committed_s)
        metrics.tell_now(self.last_save, save.temporary.target)
        return size_bytes

    def _tell_started(self, save: SaveOperation, *, in_background: bool) -> None:
        here, count, temporary = self._gang.process_index, self._gang.process_count, save.temporary
        how = "in the background" if in_background else "and waits for it"
        where = (temporary.target, how, temporary.path, save.key)
        logger.info("process %d of %d saves %s %s, through %s; the processes meet at %r", here, count, *where)
        metrics.tell_started(in_background=in_background)
