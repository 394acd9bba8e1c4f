"""Which committed steps are kept, and marks on steps that must be treated in another way.

A step is kept for any of these reasons: it is one of the newest; its number is a multiple; it is young. Never deleted
are the newest good one, what is newer than that, what somebody reads just now, and what Gracepoint did not write.

Two marks, small files: **damaged** (in a step's folder: a restore found it so and went back) keeps a step from counting
as one of the newest, so that a good one is not deleted in its favour; **reading** (in the root, hidden) keeps a step
from being deleted under a reader, in whichever job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import commit, listing
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import SettingsError

logger = logging.getLogger(__name__)

#: A mark of a reader that is older than this was left by one that died.
READING_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Retention:
    """What is kept.

    Attributes:
        keep_last: The newest so many good steps, at least 1.
        keep_every_steps: Also steps whose number is a multiple of it; 0: none for that reason.
        keep_for_s: Also steps that were committed less than so many seconds ago; 0: none for that reason.

    Raises:
        SettingsError: A value is out of range.
    """

    keep_last: int = 3
    keep_every_steps: int = 0
    keep_for_s: float = 0.0

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise SettingsError(f"keep_last is {self.keep_last}; expected at least 1, as the newest is never deleted")
        if self.keep_every_steps < 0:
            raise SettingsError(f"keep_every_steps: expected a number of steps from 0, found {self.keep_every_steps}")
        if not 0 <= self.keep_for_s < math.inf:
            raise SettingsError(f"keep_for_s: expected a finite number of seconds from 0, found {self.keep_for_s}")

    def to_delete(
        self, ages_s: Mapping[int, float], *, newest_good: int, damaged: frozenset[int] = frozenset()
    ) -> list[int]:
        """Returns the steps to delete, newest first.

        Args:
            ages_s: Complete steps of ours, with the seconds since each was committed.
            newest_good: The step just committed or restored. Newer ones are what a restore went back from: they
                neither count as kept, nor are they deleted.
            damaged: Steps that a restore went back from. They count for no reason to be kept, and go once the
                newest ``keep_last`` good ones are all newer.
        """
        steps = sorted((step for step in ages_s if step <= newest_good), reverse=True)
        last = [step for step in steps if step not in damaged or step == newest_good][: self.keep_last]
        if len(last) < self.keep_last:
            return []
        return [step for step in steps if step < last[-1] and not self._is_special(step, ages_s[step], damaged)]

    def _is_special(self, step: int, age_s: float, damaged: frozenset[int]) -> bool:
        if step in damaged:
            return False
        return (self.keep_every_steps > 0 and step % self.keep_every_steps == 0) or age_s < self.keep_for_s


def apply(paths: Layout, retention: Retention, *, newest_good: int, attempt: str, ordinal: int) -> None:
    """Makes trash of what ``retention`` says; folders that are not ours, or not complete, are left."""
    ours = [step for step in paths.steps() if listing.is_ours(paths.step(step), step)]
    now_s = paths.root.now_s()
    ages_s = {step: now_s - committed_s for step in ours if (committed_s := _committed_s(paths.step(step)))}
    damaged = frozenset(step for step in ages_s if paths.damage_mark(step).exists())
    for step in retention.to_delete(ages_s, newest_good=newest_good, damaged=damaged):
        if _is_read(paths, step, now_s):
            logger.info("step %d is not deleted yet, as it is being read", step)
            continue
        logger.info("deleting step %d: %s", step, retention)
        commit.discard(paths.step(step), paths.trash(step, attempt, ordinal))


def mark_damaged(paths: Layout, steps: Mapping[int, str]) -> None:
    """Marks steps that a restore went back from, each with what was found; those that it could restore lose it."""
    for step, reason in steps.items():
        if listing.is_ours(paths.step(step), step):
            paths.damage_mark(step).put(reason.encode())


def unmark_damaged(paths: Layout, step: int) -> None:
    """Takes the mark off a step that could be restored after all."""
    mark = paths.damage_mark(step)
    if mark.exists():  # where nothing may be written, removing nothing is an error, too
        mark.delete()


@contextlib.contextmanager
def reading(paths: Layout, step: int) -> Iterator[None]:
    """Keeps a step from being deleted by retention while it is read. Without effect where we may not write."""
    mark = paths.reading_mark(step)
    try:
        mark.touch()
    except OSError as error:
        logger.info("%s cannot be marked as being read: %s", paths.step(step), error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.delete()


def _is_read(paths: Layout, step: int, now_s: float) -> bool:
    return any(now_s - mark.last_change_s() < READING_S for mark in paths.reading_marks(step))


def _committed_s(folder: StoragePath) -> float:
    """Returns when a step was committed, by the file system's clock; 0 if it is gone."""
    entry = (folder / layout.COMMIT_SUCCESS).entry()
    return 0.0 if entry is None else entry.changed_s
