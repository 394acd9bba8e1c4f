"""The background save under way: how far it is, how it ended, and how to stop it.

The owner of the ``SaveExecutor`` makes all calls. The save's thread is a ``BackgroundThread``, and ends with the save.

A background save and the snapshot that it writes: its progress, whether it hangs, and how to stop it.

The training thread creates it when a background save begins. The save's thread sets ``committed``, and the writer's
threads count the written bytes. The training thread reads the progress, stops the save, or writes the snapshot again.
The snapshot's memory is not changed before the next background save.

Counts what is written of a save, for those who watch it.

Decides whether a worker process writes a save, and hands the save over to it.

The thread that owns the ``SaveExecutor`` makes all calls. The worker writes a save if the options ask for it and if all
that the save needs is in shared memory. Otherwise threads of this process write it:

* if handlers of the user's write a part of it, or leaves are copied from their devices in the background;
* if the checkpoint goes to ``memory://``, which belongs to one process;
* if the worker cannot be started or does not take the save. This is logged.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint.background_thread import BackgroundThread
from gracepoint.checkpoint.options import IN_THREADS, WriteOptions
from gracepoint.checkpoint.planning.chunks import Chunk
from gracepoint.checkpoint.saving.host_snapshot import Filling, Transfer
from gracepoint.checkpoint.saving.operation import SaveOperation
from gracepoint.checkpoint.saving.save_worker import CallFailed, HandedOver, SaveWorker
from gracepoint.checkpoint.writing.files import SaveSource
from gracepoint.deadline import Deadline, NewestSnapshot, SnapshotState
from gracepoint.errors import BarrierCancelled, BarrierFailed, SaveFailed
from gracepoint.process_group import SaveProgress
from gracepoint.threads import check_not_forked


class CountedChunks:
    """The chunks of a source. The writer's threads count; any thread may read.

    Args:
        source: The source.

    Attributes:
        written_bytes: Bytes of this process's chunks that are written.
    """

    def __init__(self, source: SaveSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self.written_bytes = 0

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        return self._source.chunks(deadline)

    def written(self, chunk: Chunk) -> None:
        if chunk.mine:
            with self._lock:
                self.written_bytes += chunk.bytes
        self._source.written(chunk)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def written_elsewhere(self) -> None:
        self._source.written_elsewhere()


#: Seconds after its deadline in which a save must end. It tells the other processes, and checks whether all finished.
_LATE_ENDS_S = 5.0

_Chunks = Sequence[tuple[Chunk, npt.NDArray[Any]]]


class SnapshotSave:
    """One background save, and its snapshot.

    Args:
        save: The save.
        transfer: The snapshot's chunks, none of which is written yet.
        deadline: When the save must have ended.
        handed: The save in the worker process that writes it. None: a thread of this process writes it.

    Attributes:
        filled: The snapshot, as this save has filled it.
        source: The chunks that the save must write from; it counts what is written.
        chunks: The chunks in the snapshot. None if they are not all of the state.
        committed: Whether the save is committed. Set by the save's thread.
        stage: The stage that this process's part has reached, as in ``SaveOperation.run``. Set by the save's thread.
    """

    def __init__(
        self,
        save: SaveOperation,
        transfer: Transfer,
        deadline: Deadline,
        handed: HandedOver | None,
    ) -> None:
        self.save = save
        self.deadline = deadline
        self.filled = transfer.filled
        self.handed = handed
        self.source = CountedChunks(transfer)
        self.committed = False
        self.stage = ""
        # What handlers write is not in the snapshot, so it cannot be written again.
        self.chunks = None if save.has_handled_parts else transfer.copied

    def seen(self, *, busy: bool) -> NewestSnapshot | None:
        """Returns the progress of the save. None if the checkpoint is not a step.

        Args:
            busy: Whether the save's thread runs.
        """
        step = self.save.temporary.step
        if step is None:
            return None
        if self.committed:
            state = SnapshotState.COMMITTED
        elif busy:
            state = SnapshotState.WRITING
        else:
            state = SnapshotState.GONE if self.chunks is None else SnapshotState.HELD
        return NewestSnapshot(
            step=step,
            state=state,
            done_bytes=self.done_bytes,
            left_bytes=self.save.mine_bytes - self.done_bytes,
            elapsed_s=self.deadline.elapsed_s(),
        )

    @property
    def done_bytes(self) -> int:
        """Bytes that are written, by a thread or by the worker process."""
        return max(self.source.written_bytes, 0 if self.handed is None else self.handed.done_bytes)

    def reached(self, stage: str) -> None:
        """Notes that this process's part has reached a stage. The save's thread calls it."""
        self.stage = stage

    def hurry(self) -> None:
        """Says that somebody waits for the save. Any thread may call it."""
        if self.handed is not None:
            self.handed.hurry()

    def stop(self, reason: str) -> None:
        """Tells the save's thread to end, between two chunks or during a wait for other processes."""
        self.deadline.cancel(reason)
        self.save.cancel(reason)

    def was_stopped(self, error: Exception) -> bool:
        """Returns whether the save ended with ``error`` because it was stopped, here or in another process."""
        return self.deadline.cancelled or isinstance(error.__cause__, BarrierCancelled)

    def may_take_s(self) -> float:
        """Returns how many seconds the save may still take before it counts as hanging."""
        until_s = self.deadline.timeout_s + _LATE_ENDS_S
        if self.committed:
            until_s += self.deadline.timeout_s  # the function called after the commit waits for other processes
        return max(0.0, until_s - self.deadline.elapsed_s())

    def hanging(self) -> SaveFailed:
        """Returns the error that says where the save hangs."""
        temporary = self.save.temporary
        where = "after its commit" if self.committed else f"at work below {temporary.path}"
        return SaveFailed(
            f"the save of {temporary.what} hangs: it did not end within {self.deadline.timeout_s:.1f} s and "
            f"{_LATE_ENDS_S:.0f} s more, and its thread is still {where}. It reads the snapshot's memory, so nothing "
            "else is saved before it has ended: is the storage stuck?"
        )

    def once_more(self) -> InMemory | None:
        """Returns the snapshot's chunks, to write them again. None if they are not in memory any more."""
        return None if self.chunks is None else InMemory(self.chunks, self.source.check_unchanged)


class InMemory:
    """A source of chunks that are in memory."""

    def __init__(self, chunks: _Chunks, check_unchanged: Callable[[], None]) -> None:
        self._chunks = chunks
        self.check_unchanged = check_unchanged

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        yield from self._chunks

    def written(self, chunk: Chunk) -> None:
        pass

    def written_elsewhere(self) -> None:
        pass


logger = logging.getLogger(__name__)

#: Seconds for the thread of an abandoned save to end.
_ABANDONED_ENDS_S = 1.0
#: Seconds for the thread of a stopped save to end. It checks several times in 0.1 s, except during a file system call.
_STOPPED_ENDS_S = 1.0


class NotBegun(SaveFailed):
    """What the other processes are told if this one begins no save, as it raises the error of the one before.

    That save has failed in them, too. So they raise nothing for the one that was not begun: otherwise each failure
    would be the reason of the next one, for ever.
    """


class BackgroundSave:
    """The newest background save. At most one is under way.

    Args:
        thread: Runs the saves.

    Attributes:
        newest: The newest snapshot, whose save the thread ran last. None before the first, and once the snapshot's
            memory is filled for another save, until that save has begun in the background.
    """

    def __init__(self, thread: BackgroundThread) -> None:
        self._thread = thread
        self._pid = machine.process_id()
        self.newest: SnapshotSave | None = None
        self._told_hanging = False  # whether the caller knows that this save hangs

    def begun(self, newest: SnapshotSave) -> None:
        """Notes that the thread is started with this save."""
        self.newest, self._told_hanging = newest, False

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
        """How far the background save is. None if no background save of a step is under way. Any thread may ask."""
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
        """Waits for the background save. ``take_error`` then tells how it ended.

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

        A save that was stopped, here or in another process, has not failed, however late it ended: training may go on,
        for example after a drill.

        Raises:
            SaveFailed: A background save has failed.
            ForkedChild: The save is the parent's, and a forked child cannot know how it ends.
        """
        check_not_forked(self._pid, "this checkpointer")
        error = self.take_error()
        if error is None:
            return
        if self._told_hanging:
            logger.warning("a background save that hung has ended: %s", error)
        elif isinstance(error.__cause__, BarrierFailed) and f" reported {NotBegun.__name__}: " in str(error):
            logger.warning("a background save was left out: %s", error)
        elif self.newest is None or not self.newest.was_stopped(error):
            raise SaveFailed(f"a background save failed: {error}") from error
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
            logger.warning("a save was told to stop, and is left behind: %s", error)
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


class WorkerHandoff:
    """Hands saves to the worker process of one ``SaveExecutor``. There is no process before ``start``.

    Args:
        options: How arrays are written.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._worker = SaveWorker(options) if options.writer not in IN_THREADS else None

    @property
    def worker_process_ids(self) -> list[int]:
        """The worker process, while there is one."""
        return [] if self._worker is None else self._worker.process_ids

    def in_every_worker(self, function: Callable[..., object], *arguments: object) -> None:
        """Has each worker process call a function once, also those that are started later. An error is logged."""
        if self._worker is not None:
            try:
                self._worker.in_every_worker(function, *arguments)
            except (OSError, CallFailed) as error:
                logger.warning("the worker process does not take a call: %s", error)

    def start(self) -> None:
        """Starts the worker process, if the options ask for one. An error is logged: the next save tries again."""
        if self._worker is None:
            return
        try:
            self._worker.start()
        except (OSError, CallFailed) as error:
            logger.warning("no worker process was started: %s", error)

    def is_for(self, save: SaveOperation) -> bool:
        """Returns whether a worker may write this save."""
        within_this_process = str(save.temporary.path).startswith("memory://")
        return self._worker is not None and not save.has_handled_parts and not within_this_process

    def hand_over(
        self,
        save: SaveOperation,
        chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]] | None,
        filled: Filling | None,
        deadline: Deadline,
        *,
        urgent: bool,
    ) -> HandedOver | None:
        """Hands a save to the worker. When this returns a ``HandedOver``, it is written even if this process dies.

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
        if chunks is None or not self.is_for(save):
            return None
        try:
            handed = self._worker.hand_over(save.part(), chunks, filled, deadline=deadline, urgent=urgent)
        except (OSError, CallFailed) as error:
            what = save.temporary.what
            logger.warning("the worker process does not take the save of %s, a thread writes it: %s", what, error)
            return None
        logger.info("%s is handed over to the worker process", save.temporary.what)
        return handed

    def close(self) -> None:
        """Ends the worker process after its last save. Does not wait for it."""
        if self._worker is not None:
            self._worker.close()
