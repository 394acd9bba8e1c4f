"""Deletes old steps, unfinished saves and trash. Only process 0 does this.

One background thread, the sweeper, looks at the steps, renames the steps that are not kept to trash, and deletes the
trash. It ends when nothing is left to do. A save only notes that this is due. It does not wait for the sweeper, which
takes longer the more steps are kept, as an emergency save may be waiting for the save. A caller that must see the
outcome calls ``settle``, which does in its own thread what is due. A lock keeps two threads from doing so at once. If
the process ends before all is done, the next start does the rest.

After a restore from a file system, the calling thread marks and renames steps, and the sweeper deletes the trash. In an
object store each look takes a round trip. So there the sweeper does all of it, unless a step must be marked as damaged.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gracepoint.checkpoint.background_thread import BackgroundThread
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.steps import commit, retention
from gracepoint.checkpoint.steps.retention import DamagedStep, Retention, StepLook
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

#: Seconds without a change after which an unfinished save is deleted.
UNFINISHED_KEPT_S = 3600.0
#: The same if a newer step can be restored. Otherwise a job that is disrupted often would fill the store with them.
OVERTAKEN_KEPT_S = 600.0
#: Seconds without a change after which the writer of an unfinished save counts as dead, if its room is needed.
DEAD_S = 30.0
#: Seconds to wait for another thread that tidies up.
SETTLES_S = 60.0
#: Seconds to wait for the thread of a sweeper that has nothing more to do. It ends at once, if it can run.
_ENDS_S = 5.0


class _Due(NamedTuple):
    """What ``StepCleaner.tidy`` was asked for."""

    newest_good: int | None
    ordinal: int
    give_up_old: bool


class StepCleaner:
    """Tidies one checkpoint directory. ``tidy`` and ``finish`` must not be called at the same time."""

    def __init__(self, paths: Layout, retention: Retention, attempt: str) -> None:
        self._paths = paths
        self._retention = retention
        self._attempt = attempt
        self._sweeper = BackgroundThread()
        self._due: collections.deque[_Due] = collections.deque()  # any thread appends
        self._known: dict[int, StepLook] = {}  # see ``retention.apply``
        self._settling = threading.RLock()  # held while what is due is taken and done
        self._sweeps = False  # whether the sweeper will look again at what is due
        self._ending = threading.Lock()  # guards ``_sweeps``, so that nothing becomes due unseen as the sweeper ends

    def tidy(self, newest_good: int | None, *, ordinal: int, give_up_old: bool = False) -> None:
        """Has the sweeper rename old steps to trash and delete the trash. Does not wait for it.

        What becomes due while the sweeper deletes trash is done after that, or by ``settle``.

        Args:
            newest_good: The step just committed or restored. None: no step is deleted.
            ordinal: Ordinal of this attempt's newest save, which is part of the name of the trash.
            give_up_old: Whether old unfinished saves of other attempts are deleted, too.
        """
        self._due.append(_Due(newest_good, ordinal, give_up_old))
        self._sweep()

    def settle(self, timeout_s: float) -> None:
        """Renames the steps to trash that are due, in this thread. An OSError is logged, not raised.

        If the sweeper does so already, this waits for the sweeper, at most ``timeout_s`` seconds. If that is too short,
        what is due stays due. Once the work has begun, only the timeouts of single requests bound it.
        """
        try:  # a signal handler may raise as soon as the lock is taken
            if not self._settling.acquire(timeout=timeout_s):
                logger.warning("%s was not tidied up within %.1f s", self._paths.root, timeout_s)
                return
            due = [self._due.popleft() for _ in range(len(self._due))]
            if due:
                self._discard(due[-1].newest_good, due[-1].ordinal, give_up_old=any(each.give_up_old for each in due))
        finally:
            try:  # noqa: SIM105 - nothing is called before the lock is released
                self._settling.release()
            except RuntimeError:
                pass  # not taken

    def after_restore(
        self, damaged: Mapping[int, DamagedStep], restored: int | None, *, ordinal: int, tidies: bool, give_up_old: bool
    ) -> None:
        """Does what a restore leaves to do: marks of damaged steps, and what ``tidy`` does. No OSError is raised.

        Args:
            damaged: The steps that the restore went back from, with the damage.
            restored: The step that was restored. None if there was none.
            ordinal: As in ``tidy``.
            tidies: False if only the marks are to be written.
            give_up_old: As in ``tidy``.
        """

        def work() -> None:
            self._mark(damaged, restored)
            if tidies:
                self._due.append(_Due(restored, ordinal, give_up_old))

        # Damage is marked before training goes on: the process may end before a thread has done so.
        if self._paths.root.backend.renames or damaged or not tidies or self._sweeps:
            work()
            if tidies:
                self.settle(SETTLES_S)
                self._sweep()
        else:
            self._sweep(work)

    def _discard(self, newest_good: int | None, ordinal: int, *, give_up_old: bool) -> None:
        try:
            if newest_good is not None:
                retention.apply(
                    self._paths,
                    self._retention,
                    newest_good=newest_good,
                    attempt=self._attempt,
                    ordinal=ordinal,
                    known=self._known,
                )
            if give_up_old:
                commit.give_up_old(
                    self._paths,
                    attempt=self._attempt,
                    older_than_s=UNFINISHED_KEPT_S,
                    newest_good=newest_good,
                    overtaken_for_s=OVERTAKEN_KEPT_S,
                )
        except OSError as error:
            logger.warning("%s was not tidied up: %s", self._paths.root, error)

    def _mark(self, damaged: Mapping[int, DamagedStep], good: int | None) -> None:
        """Marks ``damaged`` steps, and removes the mark of the step ``good``. An OSError is logged, not raised."""
        self._known = {}
        try:
            retention.mark_damaged(self._paths, damaged)
            if good is not None:
                retention.unmark_damaged(self._paths, good)
        except OSError as error:
            logger.warning("damaged steps of %s were not marked: %s", self._paths.root, error)

    def finish(self, deadline: Deadline) -> None:
        """Waits until all is done, or until ``deadline``. The next start does the rest, which is logged."""
        try:
            self._sweeper.wait(deadline.remaining_s())
            self._sweep()  # does what became due, and deletes what became trash, while the thread was busy
            self._sweeper.wait(deadline.remaining_s())
        except SaveFailed as error:
            logger.warning("trash in %s is left to the next start: %s", self._paths.root, error)
        self._tell_error()

    def _sweep(self, first: Callable[[], None] = lambda: None) -> None:
        """Starts the sweeper, which calls ``first`` before all else. Does nothing if the sweeper runs already.

        If no thread can be started, this thread does the work. The trash is then left to the next start.
        """
        try:
            with self._ending:
                if self._sweeps:
                    return
                self._sweeps = True
            self._sweeper.wait(_ENDS_S)  # the previous sweeper has nothing more to do, but its thread may still run
            self._tell_error()
            self._sweeper.start("deletion of trash", functools.partial(self._sweep_all, first))
        except (RuntimeError, SaveFailed) as error:  # for example at the interpreter's end: no reason to fail a save
            logger.info("trash in %s is left to the next start: %s", self._paths.root, error)
            self._sweeps = False
            first()
            self.settle(SETTLES_S)
        except BaseException:  # a signal handler's: the sweeper may never run
            self._sweeps = self._sweeper.busy
            raise

    def _sweep_all(self, first: Callable[[], None]) -> None:
        try:
            first()
            while True:
                self.settle(SETTLES_S)
                commit.empty_trash(self._paths)
                self._recheck()
                # Under the lock of ``_sweep``: what is added before is seen here, and later calls start a new sweeper.
                with self._ending:
                    if not self._due:
                        self._sweeps = False
                        return
        except BaseException:  # the trash could not be deleted
            self._sweeps = False
            raise

    def _recheck(self) -> None:
        """Forgets what somebody else has deleted of what could not be deleted here."""
        top = f"{self._paths.root}/"
        undeleted.recheck(lambda path: not path.startswith(top) or (self._paths.root / path[len(top) :]).exists())

    def _tell_error(self) -> None:
        """Logs why the last deletion has failed, if it has. No error of a deletion fails a save."""
        if error := self._sweeper.take_error():
            logger.warning("trash in %s was not deleted: %s", self._paths.root, error, exc_info=error)


def make_room(paths: Layout, attempt: str) -> bool:
    """Deletes what no restore would choose: trash, and unfinished saves of other attempts whose writers are dead.

    Returns whether something is gone. Raises no OSError: the write that needs the room says what is wrong.
    """
    try:
        before = _leftovers(paths)
        commit.empty_trash(paths)  # first, as the next call needs a little room itself
        commit.give_up_old(paths, attempt=attempt, older_than_s=DEAD_S, hidden_older_than_s=UNFINISHED_KEPT_S)
        commit.empty_trash(paths)
        return bool(before - _leftovers(paths))
    except OSError as error:
        logger.warning("%s is full, and could not be tidied up: %s", paths.root, error)
        return False


def _leftovers(paths: Layout) -> set[StoragePath]:
    return {*paths.trashed(), *(temporary.path for temporary in paths.temporaries())}


def tidy_beside(temporary: Temporary, paths: Layout) -> None:
    """Deletes what earlier saves left beside a checkpoint that has its own path. An OSError is logged, not raised."""
    try:
        commit.give_up_old(paths, attempt=temporary.attempt, older_than_s=UNFINISHED_KEPT_S)
        commit.empty_trash(paths)
    except OSError as error:
        logger.warning("beside %s was not tidied up: %s", temporary.target, error)
