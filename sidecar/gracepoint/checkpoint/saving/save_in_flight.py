"""The background save that is under way, as the thread that began it deals with it: waits, asks, stops.

One thread owns this object; the save runs in the one of ``Background`` and ends with it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from gracepoint.checkpoint.background_thread import BackgroundThread
from gracepoint.checkpoint.saving.snapshot_status import SnapshotSave
from gracepoint.deadline import Deadline
from gracepoint.deadline_plan import NewestSnapshot
from gracepoint.errors import BarrierCancelled, SaveFailed

logger = logging.getLogger(__name__)

#: How long the thread of a save needs to notice that it is waited for no longer.
_ABANDONED_ENDS_S = 1.0
#: How long one needs that is told to stop: it looks several times in 0.1 s, but for an operation of the disk.
_STOPPED_ENDS_S = 1.0
#: How long after its deadline one may end: it tells the others, and looks whether all have finished.
_LATE_ENDS_S = 5.0


class SaveInFlight:
    """At most one save in the background at a time, and the snapshot that it is of."""

    def __init__(self) -> None:
        self._background = BackgroundThread()
        self._newest: SnapshotSave | None = None  # what the background was started with last
        self._is_told = False  # that it hangs

    def _start(self, newest: SnapshotSave, run: Callable[[], None]) -> None:
        """Starts ``run``, which saves ``newest``; nothing else is under way."""
        self._newest, self._is_told = newest, False
        self._background.start(f"the save of {newest.save.temporary.what}", run)

    def _forget(self) -> None:
        """The memory of the newest snapshot is about to be filled anew."""
        self._newest = None

    @property
    def busy(self) -> bool:
        """True while the thread of a save runs."""
        return self._background.busy

    @property
    def newest_snapshot(self) -> NewestSnapshot | None:
        """What host memory holds beside the state itself; None before the first background save."""
        return None if self._newest is None else self._newest.seen(busy=self.busy)

    def stop(self, reason: str) -> None:
        """Stops the background save under way, and waits until its thread has ended, for a second at most.

        Its folder is left to be cleared away. If it was durable in all processes by then, it is committed.
        Collective, as the processes that still write would fail otherwise.
        """
        if self._newest is None or not self.busy:
            return
        self._newest.stop(reason)
        try:
            self._background.wait(_STOPPED_ENDS_S)
        except SaveFailed as error:
            logger.warning("a save was told to stop, and is left behind: %s", error)
        else:
            self.check_for_errors()

    def is_busy(self, after_s: float) -> bool:
        """True while the thread of a save runs, after its end was waited for so long at most."""
        with contextlib.suppress(SaveFailed):
            self._background.wait(after_s)
        return self.busy

    @property
    def hangs(self) -> bool:
        """True while the thread of a save runs that should have ended: in a call of the file system, most likely.

        Nothing can break such a call off. The snapshot is read from as long as it takes, so no other one is taken.
        """
        return self.busy and self._may_take_s() == 0

    def wait(self, timeout_s: float) -> None:
        """Waits for the background save under way; ``take_error`` then tells how it ended.

        Raises:
            SaveFailed: It still ran after ``timeout_s``.
        """
        self._background.wait(timeout_s)

    def wait_until(self, deadline: Deadline) -> None:
        """As ``wait``; not for a save that was stopped.

        Raises:
            SaveFailed: It still ran at the deadline.
        """
        if self._newest is None or not self._newest.deadline.cancelled:
            self._background.wait_until(deadline)

    def take_error(self) -> Exception | None:
        """Returns the error of a background save that has ended, once; None if it went well or still runs."""
        return self._background.take_error()

    def check_for_errors(self) -> None:
        """Raises SaveFailed if a background save has failed; each failure once. Does not wait.

        One that was stopped, here or in another process, has not failed, however late it ended: training may go on, as
        after a drill.
        """
        error = self.take_error()
        if error is None:
            return
        if self._is_told:
            logger.warning("a background save that hung has ended: %s", error)
        elif not self._was_stopped(error):
            raise SaveFailed(f"a background save failed: {error}") from error
        else:
            logger.warning("a background save was stopped: %s", error)

    def wait_until_finished(self, timeout_s: float | None) -> None:
        """Waits for the background save under way.

        Raises:
            SaveFailed: It failed, or did not end within ``timeout_s``; None: it hangs, a few seconds after its own
                deadline.
        """
        if timeout_s is not None:
            self.wait(timeout_s)
        else:
            while self.is_busy(self._may_take_s()):
                if self.hangs:
                    self._is_told = True
                    raise self._hanging()
        self.check_for_errors()

    def abandon(self, reason: str, *, timeout_s: float) -> None:
        """The last call where training broke off: the save under way has ``timeout_s`` to end.

        A thread that is inside of TensorStore or the coordination service while the interpreter ends would abort the
        process, and its exit code would not be that of the error. Not collective; never raises.
        """
        with contextlib.suppress(SaveFailed):
            self._background.wait(timeout_s)
        if self.busy and self._newest is not None:
            self._newest.save.fail(SaveFailed(reason))
            with contextlib.suppress(SaveFailed):
                self._background.wait(_ABANDONED_ENDS_S)
        if error := self.take_error():
            logger.error("the background save failed: %s", error)

    def _was_stopped(self, error: Exception) -> bool:
        if isinstance(error.__cause__, BarrierCancelled):
            return True
        return self._newest is not None and self._newest.deadline.cancelled

    def _may_take_s(self) -> float:
        """How long the save under way may still take."""
        if self._newest is None:
            return 0.0
        deadline = self._newest.deadline
        until_s = deadline.timeout_s + _LATE_ENDS_S
        if self._newest.committed:
            until_s += deadline.timeout_s  # for what is called then, which waits for other processes
        return max(0.0, until_s - deadline.elapsed_s())

    def _hanging(self) -> SaveFailed:
        assert self._newest is not None
        temporary, committed = self._newest.save.temporary, self._newest.committed
        where = "after its commit" if committed else f"at work below {temporary.path}"
        return SaveFailed(
            f"the save of {temporary.what} hangs: it did not end within {self._newest.deadline.timeout_s:.1f} s and "
            f"{_LATE_ENDS_S:.0f} s more, and its thread is still {where}. It reads the snapshot's memory, so nothing "
            "else is saved before it has ended: is the storage stuck?"
        )
