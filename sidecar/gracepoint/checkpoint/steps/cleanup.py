"""Deletes old steps, unfinished saves and trash. Only process 0 does this.

The caller's thread renames folders to trash. One background thread deletes the trash, and ends when none is left. In an
object store, that thread also does all that a restore leaves to do, as each look takes a round trip. No save waits for
that thread. The next start deletes what a process leaves behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gracepoint.checkpoint.background_thread import BackgroundThread
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.steps import commit, retention
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

#: Seconds without a change after which an unfinished save is deleted.
UNFINISHED_KEPT_S = 3600.0
#: The same if a newer step can be restored. A job that is disrupted often would else fill the store with them.
OVERTAKEN_KEPT_S = 600.0


class StepCleaner:
    """Tidies one checkpoint directory. ``tidy`` and ``finish`` must not be called at the same time."""

    def __init__(self, paths: Layout, retention: Retention, attempt: str) -> None:
        self._paths = paths
        self._retention = retention
        self._attempt = attempt
        self._sweeper = BackgroundThread()

    def tidy(self, newest_good: int | None, *, ordinal: int, give_up_old: bool = False) -> None:
        """Renames old steps to trash, and starts the deletion of trash. An OSError is logged, not raised.

        Args:
            newest_good: The step just committed or restored. None: no step is deleted.
            ordinal: Ordinal of this attempt's newest save, which is part of the name of the trash.
            give_up_old: Whether old unfinished saves of other attempts are deleted, too.
        """
        self._discard(newest_good, ordinal, give_up_old=give_up_old)
        self._sweep()

    def after_restore(
        self, damaged: Mapping[int, str], restored: int | None, *, ordinal: int, tidies: bool, give_up_old: bool
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
                self._discard(restored, ordinal, give_up_old=give_up_old)

        # Damage is marked before training goes on: the process may end before a thread has done so.
        if self._paths.root.backend.renames or damaged or not tidies or self._sweeper.busy:
            work()
            if tidies:
                self._sweep()
        else:
            self._sweep(work)

    def _discard(self, newest_good: int | None, ordinal: int, *, give_up_old: bool) -> None:
        try:
            if newest_good is not None:
                retention.apply(
                    self._paths, self._retention, newest_good=newest_good, attempt=self._attempt, ordinal=ordinal
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

    def _mark(self, damaged: Mapping[int, str], good: int | None) -> None:
        """Marks ``damaged`` steps, and removes the mark of the step ``good``. An OSError is logged, not raised."""
        try:
            retention.mark_damaged(self._paths, damaged)
            if good is not None:
                retention.unmark_damaged(self._paths, good)
        except OSError as error:
            logger.warning("damaged steps of %s were not marked: %s", self._paths.root, error)

    def finish(self, deadline: Deadline) -> None:
        """Waits until all trash is deleted, or until ``deadline``. The next start deletes the rest, which is logged."""
        try:
            self._sweeper.wait(deadline.remaining_s())
            self._sweep()  # deletes what became trash while the thread was busy
            self._sweeper.wait(deadline.remaining_s())
        except SaveFailed as error:
            logger.warning("trash in %s is left to the next start: %s", self._paths.root, error)
        self._tell_error()

    def _sweep(self, first: Callable[[], None] = lambda: None) -> None:
        def work() -> None:
            first()
            commit.empty_trash(self._paths)

        if not self._sweeper.busy:  # otherwise the next call deletes the new trash
            self._tell_error()
            try:
                self._sweeper.start("deletion of trash", work)
            except RuntimeError as error:  # for example at the end of the interpreter: no reason to fail a save
                logger.info("trash in %s is left to the next start: %s", self._paths.root, error)

    def _tell_error(self) -> None:
        """Logs why the last deletion has failed, if it has. No error of a deletion fails a save."""
        if error := self._sweeper.take_error():
            logger.warning("trash in %s was not deleted: %s", self._paths.root, error, exc_info=error)


def tidy_beside(temporary: Temporary, paths: Layout) -> None:
    """Deletes what older saves left beside a checkpoint that has its own path. An OSError is logged, not raised."""
    try:
        commit.give_up_old(paths, attempt=temporary.attempt, older_than_s=UNFINISHED_KEPT_S)
        commit.empty_trash(paths)
    except OSError as error:
        logger.warning("beside %s was not tidied up: %s", temporary.target, error)
