"""Runs the saves of one gang, one at a time. The one place that knows which save is in progress, and how to stop it.

One thread owns a ``SaveExecutor``: the training thread, or the one that owns the checkpointer. A background save runs
in a separate thread (``BackgroundThread``), which ends with the save. That thread reads the snapshot. The owner fills
the snapshot only while no background save runs, and while nothing uses it that an interrupted save has left behind. The
writers' threads end with each save. Every wait for another process has a timeout.

A worker process writes a save if the options ask for it and if all that the save needs is in shared memory. Otherwise
threads of this process write it:

* if handlers of the user's write a part of it, or leaves are copied from their devices in the background;
* if the checkpoint goes to ``memory://``, which belongs to one process;
* if the worker cannot be started or does not take the save. This is logged.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.format.array_spec import Chunk
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.metrics import SaveStats
from gracepoint.checkpoint.options import IN_THREADS
from gracepoint.checkpoint.saving.device_copy import NotComputed, knowing_devices
from gracepoint.checkpoint.saving.extras import NO_EXTRAS, SaveExtras
from gracepoint.checkpoint.saving.host_snapshot import Filling, Transfer
from gracepoint.checkpoint.saving.operation import DEFAULT_COMMIT, CommitOptions, SaveOperation
from gracepoint.checkpoint.saving.planner import DEFAULT_SETTINGS, SavePlanner, SaveSettings
from gracepoint.checkpoint.saving.save_worker import HandedOver, SaveWorker
from gracepoint.checkpoint.saving.snapshot_save import CountedChunks, SnapshotSave
from gracepoint.checkpoint.storage import checks
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.checkpoint.writing.pool import SaveSource
from gracepoint.deadline import Deadline, NewestSnapshot
from gracepoint.errors import BarrierFailed, SaveFailed
from gracepoint.process_group import ProcessGroup, SaveProgress
from gracepoint.threads import BackgroundThread, NoThread, check_not_forked

logger = logging.getLogger(__name__)

#: Seconds to write a probe file before training begins.
WARM_UP_TIMEOUT_S = 60.0

#: A process's values by name, or a function that returns them.
HostState = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


#: Seconds for the thread of an abandoned save to end.
_ABANDONED_ENDS_S = 1.0
#: Seconds for the thread of a stopped save to end. It checks several times in 0.1 s, except during a file system call.
_STOPPED_ENDS_S = 1.0


class NotBegun(SaveFailed):
    """What the other processes are told if this one begins no save, as it raises the error of the one before.

    That save has failed in them, too. So they raise nothing for the one that was not begun: otherwise each failure
    would be the reason of the next one, for ever.
    """


def _is_told(kind: type[SaveFailed], error: Exception) -> bool:
    """Returns whether another process has said that its save failed with an error of this kind."""
    return isinstance(error.__cause__, BarrierFailed) and f" reported {kind.__name__}: " in str(error)


class SaveExecutor:
    """Saves states, and knows which save is in progress.

    ``begin``, ``in_background``, ``now`` and ``promote`` are collective: all processes make these calls in the same
    order.

    Args:
        gang: The processes that save together.
        attempt: Unique for each start of the gang; the same in all its processes.
        settings: What holds for all saves.
        clock: Returns monotonic seconds.

    Attributes:
        newest: The newest background save and its snapshot. None before the first, and once the snapshot's memory is
            filled for another save, until that save has begun in the background.
        planner: Plans the saves. Its ``prepare`` does what the first save would otherwise spend time on.
        saves: How many saves were begun; the same in all processes.
        last_save: Figures of the last committed save in this process. None before the first.
    """

    def __init__(
        self,
        gang: ProcessGroup,
        attempt: str,
        settings: SaveSettings = DEFAULT_SETTINGS,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._gang = gang
        self._attempt = attempt
        self._clock = clock
        self._pid = machine.process_id()
        self._writer = ChunkWriter(settings.options)
        self._worker = None if settings.options.writer in IN_THREADS else SaveWorker(settings.options)
        self.planner = SavePlanner(gang, attempt, settings)
        self._thread = BackgroundThread()
        self.newest: SnapshotSave | None = None
        self._told_hanging = False  # whether the caller knows that the newest background save hangs
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
        if self._worker is not None:
            self._worker.start()
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
        how: CommitOptions = DEFAULT_COMMIT,
        extras: SaveExtras = NO_EXTRAS,
    ) -> SaveOperation:
        """Returns the next save. Pass it to ``in_background`` or ``now``.

        Args:
            paths: Where the checkpoint goes.
            step: The step that is saved. None for a checkpoint that has a path to itself.
            how: How the save is committed.
            extras: What is saved next to the state.

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
            how=how,
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
        """Copies the state to host memory, and writes it while the caller continues.

        Args:
            save: What ``begin`` returned. No other save is in progress.
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
            NotComputed: The devices have failed to compute the state.
        """
        waited_s = self._clock() - began_s
        self.newest = None  # its memory is filled again below
        with save.failing_together(), knowing_devices(state):
            self._tell_started(save, in_background=True)
            leaves, prepared = self.planner.plan(state, save_args)
            save.describe(leaves, prepared, host_state() if callable(host_state) else host_state)
            snapshot = self.planner.snapshot(leaves, prepared, save.key)
            started_s = self._clock()
            transfer = Transfer(leaves, prepared.specs, prepared.plan, self._writer.options, snapshot)
            snapshot_s = self._clock() - started_s
            deadline = Deadline.after(timeout_s, self._clock)
            handed = self._hand_over(save, transfer.copied, transfer.filled, deadline, urgent=False)
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
            # Before the start: if that is interrupted, the thread may run.
            self.newest, self._told_hanging = newest, False
            try:
                self._thread.start(name, run)
            except NoThread as error:
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
            save: What ``begin`` returned. No other save is in progress.
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
            if prepared.snapshot is not None and self._may_hand_over(save) and not self.busy:
                self.newest = None  # its memory is filled again
                snapshot = self.planner.snapshot(leaves, prepared, save.key)
            transfer = Transfer(leaves, prepared.specs, prepared.plan, self._writer.options, snapshot, deadline)
            handed = self._hand_over(save, transfer.copied, transfer.filled, deadline, urgent=True)
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
        began_s, newest = self._clock(), self.newest
        step = None if newest is None else newest.save.temporary.step
        # Whether it is needed or not, so that the processes' counts never differ. It touches no file.
        again = self.begin(paths, step or 0)
        with again.failing_together():
            if newest is None or step is None:
                raise SaveFailed("there is no snapshot in host memory that could be saved in place of the state")
            self.wait_until(deadline)
            error = self.take_error()
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
            handed = self._hand_over(save, newest.chunks, newest.filled, deadline, urgent=True)
        return step, self._run_now(save, source, deadline, on_stage, began_s, handed)

    def give_up_failed(self) -> None:
        """Deletes what is left of saves that failed or were stopped.

        Called once a later save is committed, or if a save needs the room.
        """
        while self._failed:
            self._failed.popleft().give_up()

    def close(self) -> None:
        """Ends the worker process, if there is one, after the save in progress. Does not wait for it."""
        if self._worker is not None:
            self._worker.close()

    @property
    def worker_process_ids(self) -> list[int]:
        """The worker process that writes saves, while there is one."""
        return [] if self._worker is None else self._worker.process_ids

    def in_every_worker(self, function: Callable[..., object], *arguments: object) -> None:
        """Has each worker process call a function once, also those that are started later. An error is logged.

        Does nothing if threads write the saves.
        """
        if self._worker is not None:
            self._worker.in_every_worker(function, *arguments)

    @property
    def busy(self) -> bool:
        """True while the thread of a background save runs."""
        return self._thread.busy

    @property
    def has_failed(self) -> bool:
        """True if a background save has ended with an error that nobody has taken yet."""
        return self._thread.has_failed

    @property
    def newest_snapshot(self) -> NewestSnapshot | None:
        """What is known of ``newest``. None if there is none, or if it is not a step."""
        return None if self.newest is None else self.newest.seen(busy=self.busy)

    @property
    def progress(self) -> SaveProgress | None:
        """How far the background save is. None if no background save of a step is in progress. Any thread may ask."""
        newest = self.newest
        step = None if newest is None else newest.save.temporary.step
        if newest is None or step is None or not self.busy:
            return None
        return SaveProgress(step, newest.stage, newest.done_bytes, newest.save.mine_bytes, self._thread.thread_id)

    @property
    def hangs(self) -> bool:
        """True while a background save runs that should have ended, most likely because a file system call hangs.

        Nothing can interrupt such a call. The save may still read the snapshot, so no other one is taken meanwhile.
        """
        return self.busy and self._may_take_s() == 0

    def is_busy(self, after_s: float) -> bool:
        """Waits up to ``after_s`` seconds for the background save. Returns True if it still runs."""
        self._hurry()
        with contextlib.suppress(SaveFailed):
            self._thread.wait(after_s)
        return self.busy

    def wait(self, timeout_s: float) -> None:
        """Waits for the background save. ``take_error`` then says how it ended.

        Raises:
            SaveFailed: It still ran after ``timeout_s``.
        """
        self._hurry()
        self._thread.wait(timeout_s)

    def wait_until(self, deadline: Deadline) -> None:
        """Waits for the background save until a deadline that may move. Does not wait if the save was stopped.

        Raises:
            SaveFailed: It still ran at the deadline.
        """
        if self.newest is None or not self.newest.deadline.cancelled:
            self._hurry()
            self._thread.wait_until(deadline)

    def wait_until_finished(self, timeout_s: float | None) -> None:
        """Waits for the background save, and raises its error.

        Args:
            timeout_s: Seconds to wait. None: until a few seconds after the save's own deadline.

        Raises:
            SaveFailed: The save failed, did not end within ``timeout_s``, or hangs.
            ForkedChild: The save is the parent's, and a forked child cannot know how it ends.
        """
        check_not_forked(self._pid, "this checkpointer")
        if timeout_s is not None:
            self.wait(timeout_s)
        else:
            while self.is_busy(self._may_take_s()):
                if self.newest is not None and self.hangs:
                    self._told_hanging = True
                    raise self.newest.hanging()
        self.check_for_errors()

    def take_error(self) -> Exception | None:
        """Returns the error of a background save that has ended, once. None if it succeeded or still runs."""
        return self._thread.take_error()

    def check_for_errors(self) -> None:
        """Raises SaveFailed if a background save has failed; each failure once. Does not wait.

        A save that was stopped, here or in another process, has not failed, however late it ended: training may
        continue, for example after a drill.

        Raises:
            SaveFailed: A background save has failed. NotComputed if the devices of another process have.
            ForkedChild: The save is the parent's, and a forked child cannot know how it ends.
        """
        check_not_forked(self._pid, "this checkpointer")
        error = self.take_error()
        if error is None:
            return
        if self._told_hanging:
            logger.warning("a background save that hung has ended: %s", error)
        elif _is_told(NotBegun, error):
            logger.warning("a background save was left out: %s", error)
        elif self.newest is None or not self.newest.was_stopped(error):
            kind = NotComputed if _is_told(NotComputed, error) else SaveFailed
            raise kind(f"a background save failed: {error}") from error
        else:
            logger.warning("a background save was stopped: %s", error)

    def stop(self, reason: str) -> None:
        """Stops the background save, and waits at most one second for its thread. Collective.

        The thread ends between two chunks. The folder of the save stays, and is deleted later. If the save is already
        durable in all processes, it is committed nevertheless. If only some processes made this call, the save would
        fail in the others.
        """
        if self.newest is None or not self.busy:
            return
        self.newest.stop(reason)
        try:
            self._thread.wait(_STOPPED_ENDS_S)
        except SaveFailed as error:
            logger.warning("a stopped save does not end, and is left behind: %s", error)
        else:
            self.check_for_errors()

    def abandon(self, reason: str, *, timeout_s: float) -> None:
        """Gives the background save ``timeout_s`` to end, as the last call after training broke off.

        If a thread is in a call of TensorStore or of the coordination service when the interpreter ends, the process
        aborts, and its exit code is not that of the error. Not collective. Never raises.
        """
        if self.is_busy(timeout_s) and self.newest is not None:
            self.newest.save.fail(SaveFailed(reason))
            self.is_busy(_ABANDONED_ENDS_S)
        if error := self.take_error():
            logger.error("the background save failed: %s", error)

    def _hurry(self) -> None:
        # Until somebody waits for the save, a worker process that writes it leaves the CPU to the training.
        if self.newest is not None:
            self.newest.hurry()

    def _may_take_s(self) -> float:
        """Returns how many seconds the background save may still take."""
        return 0.0 if self.newest is None else self.newest.may_take_s()

    @property
    def commit_key(self) -> str | None:
        """Key of the barrier at which ``now`` or ``promote`` commits; cancelling it ends the wait. None: not saving."""
        return None if self._now is None else self._now.key

    @property
    def written_bytes(self) -> int:
        """Bytes that this process has written of the save in ``now`` or ``promote``. 0: not saving."""
        return self._now_written()

    def _may_hand_over(self, save: SaveOperation) -> bool:
        """Returns whether a worker process may write this save."""
        within_this_process = str(save.temporary.path).startswith("memory://")
        return self._worker is not None and not save.has_handled_parts and not within_this_process

    def _hand_over(
        self,
        save: SaveOperation,
        chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]] | None,
        filled: Filling | None,
        deadline: Deadline,
        *,
        urgent: bool,
    ) -> HandedOver | None:
        """Hands a save to the worker process. When this returns a ``HandedOver``, it is written even if this one dies.

        Args:
            save: The save, described.
            chunks: All chunks of this process, in the snapshot. None: some are not in memory.
            filled: The snapshot. None: the chunks are in other memory.
            deadline: When the save must have ended.
            urgent: Whether somebody waits for the save.

        Returns:
            The save in the worker. None: threads of this process must write it.
        """
        if self._worker is None or filled is None or filled.snapshot.arena is None:
            return None
        if chunks is None or not self._may_hand_over(save):
            return None
        return self._worker.hand_over(save.part(), chunks, filled, deadline=deadline, urgent=urgent)

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
        logger.info(
            "process %d of %d saves %s %s, through %s; the processes meet at %r",
            self._gang.process_index,
            self._gang.process_count,
            save.temporary.target,
            "in the background" if in_background else "and waits for it",
            save.temporary.path,
            save.key,
        )
        metrics.tell_started(in_background=in_background)
