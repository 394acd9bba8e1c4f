"""What process 0 clears away: old steps, what was never finished, and trash.

The caller's thread makes trash, by renaming; one thread deletes it, and ends when there is none. No save waits for
it; what a process leaves behind, the next start deletes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

from gracepoint.checkpoint.background_thread import BackgroundThread
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.steps import commit, retention
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

#: How long a save that was never finished is left alone before it is deleted.
UNFINISHED_KEPT_S = 3600.0


class StepCleaner:
    """Tidies one checkpoint directory; ``tidy`` and ``finish`` are not called at the same time."""

    def __init__(self, paths: Layout, retention: Retention, attempt: str) -> None:
        self._paths = paths
        self._retention = retention
        self._attempt = attempt
        self._sweeper = BackgroundThread()

    def tidy(self, newest_good: int | None, *, ordinal: int, give_up_old: bool = False) -> None:
        """Makes trash of old steps, and of what was never finished, and has it deleted. Fails nothing.

        Args:
            newest_good: The step just committed or restored; None: no step is deleted.
            ordinal: Of this attempt's newest save, to name trash by.
            give_up_old: Whether unfinished saves of other attempts go.
        """
        try:
            if newest_good is not None:
                retention.apply(
                    self._paths, self._retention, newest_good=newest_good, attempt=self._attempt, ordinal=ordinal
                )
            if give_up_old:
                commit.give_up_old(self._paths, attempt=self._attempt, older_than_s=UNFINISHED_KEPT_S)
        except OSError as error:
            logger.warning("%s was not tidied up: %s", self._paths.root, error)
        self._sweep()

    def mark(self, damaged: Mapping[int, str], good: int | None) -> None:
        """Marks the steps that a restore went back from, and takes the mark off the one it restored. Fails nothing."""
        try:
            retention.mark_damaged(self._paths, damaged)
            if good is not None:
                retention.unmark_damaged(self._paths, good)
        except OSError as error:
            logger.warning("damaged steps of %s were not marked: %s", self._paths.root, error)

    def finish(self, deadline: Deadline) -> None:
        """Waits until all trash is deleted, at most until ``deadline``: the next start deletes the rest."""
        with contextlib.suppress(SaveFailed):
            self._sweeper.wait(deadline.remaining_s())
            self._sweep()  # what was made trash while it was busy
            self._sweeper.wait(deadline.remaining_s())

    def _sweep(self) -> None:
        if not self._sweeper.busy:  # else what is new is left to the next time
            try:
                self._sweeper.start("deletion of trash", lambda: commit.empty_trash(self._paths))
            except RuntimeError as error:  # as once the interpreter is about to end: no reason to fail a save
                logger.info("trash in %s is left to the next start: %s", self._paths.root, error)


def tidy_beside(temporary: Temporary, paths: Layout) -> None:
    """Deletes what older saves left beside a checkpoint that has a path to itself. Fails nothing."""
    try:
        commit.give_up_old(paths, attempt=temporary.attempt, older_than_s=UNFINISHED_KEPT_S)
        commit.empty_trash(paths)
    except OSError as error:
        logger.warning("beside %s was not tidied up: %s", temporary.target, error)
