"""Decides which committed steps are kept, and marks steps that retention must treat differently.

A step is kept if it is one of the newest, if its number is a multiple of ``keep_every_steps``, or if it is young. These
steps are never deleted: the newest good step, newer steps, steps that are being read, and steps that Gracepoint did not
write.

There are two marks, which are small files:

* **damaged**, in the step's folder: a restore found the step damaged and went back to an older one. The step does not
  count as one of the newest, so that no good step is deleted because of it.
* **reading**, hidden in the root: a process of this or another job is reading the step, which must not be deleted.

In a store that cannot rename, a thread of its own writes the reading mark. It ends before the mark is deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import commit, listing
from gracepoint.checkpoint.steps.object_store.concurrent_reads import look_at
from gracepoint.checkpoint.storage import time_limit, undeleted
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import SettingsError

logger = logging.getLogger(__name__)

#: Seconds after which a reading mark is ignored, as its reader has died.
READING_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which steps are kept.

    Attributes:
        keep_last: How many of the newest good steps are kept, at least 1.
        keep_every_steps: Steps whose number is a multiple of it are kept, too. 0: no step is kept for that reason.
        keep_for_s: Seconds for which every step is kept after its commit. 0: no step is kept for that reason.

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
            ages_s: Complete steps that Gracepoint wrote, each with the seconds since its commit.
            newest_good: The step just committed or restored. Newer steps are those that a restore went back from. They
                do not count as kept, and are not deleted.
            damaged: Steps that a restore went back from. No rule keeps them. They are deleted once the newest
                ``keep_last`` good steps are all newer.
        """
        older = self.older(ages_s, newest_good=newest_good, damaged=damaged)
        return [step for step in older if not self._is_special(step, ages_s[step], damaged)]

    def older(self, steps: Iterable[int], *, newest_good: int, damaged: frozenset[int] = frozenset()) -> list[int]:
        """Returns the steps that are older than the newest ``keep_last`` good ones, newest first."""
        steps = sorted((step for step in steps if step <= newest_good), reverse=True)
        last = [step for step in steps if step not in damaged or step == newest_good][: self.keep_last]
        return [step for step in steps if step < last[-1]] if len(last) == self.keep_last else []

    def _is_special(self, step: int, age_s: float, damaged: frozenset[int]) -> bool:
        if step in damaged:
            return False
        # If ``keep_for_s`` is 0, the age must not count: it is negative if this process's view of the store's clock is
        # a second behind.
        is_young = self.keep_for_s > 0 and age_s < self.keep_for_s
        return is_young or (self.keep_every_steps > 0 and step % self.keep_every_steps == 0)


def apply(
    paths: Layout,
    retention: Retention,
    *,
    newest_good: int,
    attempt: str,
    ordinal: int,
    known: dict[int, StepLook] | None = None,
) -> None:
    """Renames the steps that ``retention`` does not keep to trash.

    Folders that Gracepoint did not write, or that are not complete, are left as they are.

    Args:
        paths: Layout of the directory.
        retention: Which steps are kept.
        newest_good: See ``Retention.to_delete``.
        attempt: The current attempt, which is part of the name of the trash.
        ordinal: Ordinal of its newest save, which is part of that name, too.
        known: What the previous call found out about the older steps that it kept. This call brings it up to date. Such
            steps are looked at again only before they are deleted. None: all steps are looked at.
    """
    known = {} if known is None else known
    there = paths.steps()
    looked = look_at(paths.root, (step for step in there if step not in known), functools.partial(_look, paths))
    found = {step: look for step, look in looked.items() if look is not None}
    found |= {step: known[step] for step in there if step in known}
    now_s = paths.root.now_s()
    ages_s = {step: now_s - look.committed_s for step, look in found.items()}
    damaged = frozenset(step for step, look in found.items() if look.is_damaged)
    deleted = retention.to_delete(ages_s, newest_good=newest_good, damaged=damaged)
    older = retention.older(ages_s, newest_good=newest_good, damaged=damaged)
    changed = {step for step in deleted if step in known and _look(paths, step) != known[step]}
    known.clear()
    known.update({step: found[step] for step in older if step not in deleted})
    for step in deleted:
        if step in changed:
            continue  # the next call looks at it
        if _is_read(paths, step, now_s):
            logger.info("step %d is not deleted yet, as it is being read", step)
            continue
        logger.info("deleting step %d: %s", step, retention)
        with undeleted.telling(paths.step(step)):  # one that stays must not keep the others
            commit.discard(paths.step(step), paths.trash(step, attempt, ordinal), only=found[step].standing)


@dataclasses.dataclass(frozen=True)
class StepLook:
    """A complete step that Gracepoint wrote.

    Attributes:
        standing: Identifier of the checkpoint, as ``records.standing`` returns it.
        committed_s: When the step was committed, in seconds since the epoch by the store's clock.
        is_damaged: Whether a restore has marked the step as damaged.
    """

    standing: str
    committed_s: float
    is_damaged: bool


def _look(paths: Layout, step: int) -> StepLook | None:
    """Returns what is known of a step. None if it is not a complete step that Gracepoint wrote."""
    folder = paths.step(step)
    standing = listing.ours(folder, step)
    committed_s = 0.0 if standing is None else _committed_s(folder)
    if standing is None or not committed_s:
        return None
    return StepLook(standing, committed_s, paths.damage_mark(step).is_value())


@dataclasses.dataclass(frozen=True)
class DamagedStep:
    """What a restore found in a step that it went back from.

    Attributes:
        reason: What is wrong.
        standing: Identifier of the checkpoint that was read, as ``records.standing`` returns it.
    """

    reason: str
    standing: str


def mark_damaged(paths: Layout, steps: Mapping[int, DamagedStep]) -> None:
    """Marks steps that a restore went back from, unless another checkpoint has replaced the damaged one."""
    for step, damage in steps.items():
        if listing.ours(paths.step(step), step) == damage.standing:
            paths.damage_mark(step).put(damage.reason.encode())


def unmark_damaged(paths: Layout, step: int) -> None:
    """Removes the damage mark of a step that could be restored."""
    mark = paths.damage_mark(step)
    if mark.is_value():  # in a read-only directory, deleting a file that does not exist is an error, too
        mark.delete()


@contextlib.contextmanager
def reading(paths: Layout, step: int) -> Iterator[None]:
    """Keeps retention from deleting a step while it is read. Has no effect in a directory that is read-only.

    In a store that cannot rename, writing the mark takes a round trip. There the block begins while the mark is
    written.
    """
    mark, limit, marked = paths.reading_mark(step), time_limit.current(), False

    def touch() -> None:
        nonlocal marked
        try:
            with time_limit.ended_by(limit):
                mark.touch()
            marked = True
        except OSError as error:
            logger.info("%s cannot be marked as being read: %s", paths.step(step), error)

    marking = threading.Thread(target=touch, name="gracepoint: reading mark", daemon=True)
    begun = not paths.root.backend.renames
    if begun:
        try:
            marking.start()
        except RuntimeError:  # the system has no more threads
            begun = False
    if not begun:
        touch()
    try:
        yield
    finally:
        if begun:
            marking.join()  # the store's timeout ends it
        if marked:
            with undeleted.telling(mark):
                mark.delete()
        else:  # it may be there nevertheless: a request can reach the store though its answer was lost
            with contextlib.suppress(OSError):
                mark.delete()


def _is_read(paths: Layout, step: int, now_s: float) -> bool:
    return any(now_s - mark.last_change_s() < READING_S for mark in paths.reading_marks(step))


def _committed_s(folder: StoragePath) -> float:
    """Returns when a step was committed, in seconds since the epoch by the store's clock. 0 if it was not.

    If the step has lost its mark, for example in a copy, the manifest tells.
    """
    for name in (layout.COMMIT_SUCCESS, layout.MANIFEST):
        if (entry := (folder / name).entry()) is not None:
            return entry.changed_s
    return 0.0
