"""The background save under way: how far it is, how it ended, and how to stop it.

The owner of the ``SaveExecutor`` makes all calls. The save's thread is a ``BackgroundThread``, and ends with the save.
"""

from __future__ import annotations

import contextlib
import logging

from gracepoint import machine
from gracepoint.checkpoint.background_thread import BackgroundThread
from gracepoint.checkpoint.saving.background.snapshot_save import SnapshotSave
from gracepoint.deadline import Deadline
from gracepoint.deadline_plan import NewestSnapshot
from gracepoint.errors import BarrierFailed, SaveFailed
from gracepoint.forks import check_not_forked
from gracepoint.save_progress import SaveProgress

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
