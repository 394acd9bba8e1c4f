"""Decides which committed steps are kept, and marks steps that retention must treat differently.

A step is kept if it is one of the newest, if its number is a multiple of ``keep_every_steps``, or if it is young. These
steps are never deleted: the newest good step, newer steps, steps that are being read, and steps that Gracepoint did not
write.

There are two marks, which are small files:

* **damaged**, in the step's folder: a restore found the step damaged and went back to an older one. The step does not
  count as one of the newest, so that no good step is deleted because of it.
* **reading**, hidden in the root: a process of this or another job is reading the step, which must not be deleted.

In a store that is far, a separate thread writes the reading mark. It ends before the mark is deleted.

``StepCleaner`` deletes what is not kept, unfinished saves and trash.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.steps import commit, listing
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.storage_path import StoragePath, current_limit, ended_by, look_at
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed, SettingsError
from gracepoint.threads import BackgroundThread, NoThread, start_thread

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
        newest = [step for step in steps if step not in damaged or step == newest_good][: self.keep_last]
        return [step for step in steps if step < newest[-1]] if len(newest) == self.keep_last else []

    def _is_special(self, step: int, age_s: float, damaged: frozenset[int]) -> bool:
        if step in damaged:
            return False
        # If ``keep_for_s`` is 0, the age must not count: it is negative if this process's view of the store's clock is
        # a second behind.
        is_young = self.keep_for_s > 0 and age_s < self.keep_for_s
        return is_young or (self.keep_every_steps > 0 and step % self.keep_every_steps == 0)


DEFAULT_RETENTION = Retention()


def apply(
    paths: Layout,
    retention: Retention,
    *,
    newest_good: int,
    attempt: str,
    ordinal: int,
    looks_before: dict[int, StepLook] | None = None,
) -> None:
    """Renames the steps that ``retention`` does not keep to trash.

    Folders that Gracepoint did not write, or that are not complete, are left as they are.

    Args:
        paths: Layout of the directory.
        retention: Which steps are kept.
        newest_good: See ``Retention.to_delete``.
        attempt: The current attempt, which is part of the name of the trash.
        ordinal: Ordinal of its newest save, which is part of that name, too.
        looks_before: What the previous call found out about the older steps that it kept. This call brings it up to
            date. Such steps are looked at again only before they are deleted. None: all steps are looked at.
    """
    looks_before = {} if looks_before is None else looks_before
    there = paths.steps()
    looked = look_at(paths.root, (step for step in there if step not in looks_before), functools.partial(_look, paths))
    looks = {step: look for step, look in looked.items() if look is not None}
    looks |= {step: looks_before[step] for step in there if step in looks_before}
    now_s = paths.root.now_s()
    ages_s = {step: now_s - look.committed_s for step, look in looks.items()}
    damaged = frozenset(step for step, look in looks.items() if look.is_damaged)
    deleted = retention.to_delete(ages_s, newest_good=newest_good, damaged=damaged)
    older = retention.older(ages_s, newest_good=newest_good, damaged=damaged)
    changed = {step for step in deleted if step in looks_before and _look(paths, step) != looks_before[step]}
    looks_before.clear()
    looks_before.update({step: looks[step] for step in older if step not in deleted})
    for step in deleted:
        if step in changed:
            continue  # the next call looks at it
        if _is_read(paths, step, now_s):
            logger.info("step %d is not deleted yet, as it is being read", step)
            continue
        logger.info("deleting step %d: %s", step, retention)
        with undeleted.deleting(paths.step(step)):  # one that stays must not keep the others
            commit.of(paths).discard(paths.step(step), paths.trash(step, attempt, ordinal), only=looks[step].standing)


@dataclasses.dataclass(frozen=True)
class StepLook:
    """A complete step that Gracepoint wrote.

    Attributes:
        standing: Identifier of the checkpoint, as ``Commit.standing`` returns it.
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
        standing: Identifier of the checkpoint that was read, as ``Commit.standing`` returns it.
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

    In a store that is far, the block begins while the mark is written.
    """
    mark, limit, marked = paths.reading_mark(step), current_limit(), False

    def touch() -> None:
        nonlocal marked
        try:
            with ended_by(limit):
                mark.touch()
            marked = True
        except OSError as error:
            logger.info("%s cannot be marked as being read: %s", paths.step(step), error)

    marking = threading.Thread(target=touch, name="gracepoint: reading mark", daemon=True)
    is_marked = paths.root.is_far
    if is_marked:
        try:
            start_thread(marking)
        except NoThread:  # the system has no more threads
            is_marked = False
    if not is_marked:
        touch()
    try:
        yield
    finally:
        if is_marked:
            marking.join()  # the store's timeout ends it
        if marked:
            with undeleted.deleting(mark):
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
    """Tidies one checkpoint directory. ``tidy`` and ``finish`` must not be called at the same time.

    Deletes old steps, unfinished saves and trash. Only process 0 does this.

    One background thread, the sweeper, looks at the steps, renames the steps that are not kept to trash, and deletes
    the trash. It ends when nothing is left to do. A save only notes that this is due. It does not wait for the sweeper,
    which takes longer the more steps are kept, as an emergency save may be waiting for the save. A caller that must see
    the outcome calls ``settle``, which does in its own thread what is due. A lock keeps two threads from doing so at
    once. If the process ends before all is done, the next start does the rest.

    After a restore from a file system, the calling thread marks and renames steps, and the sweeper deletes the trash.
    In an object store each look takes a round trip. So there the sweeper does all of it, unless a step must be marked
    as damaged.
    """

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

        # Damage is marked before training continues: the process may end before a thread has done so.
        if not self._paths.root.is_far or damaged or not tidies or self._sweeps:
            work()
            if tidies:
                self.settle(SETTLES_S)
                self._sweep()
        else:
            self._sweep(work)

    def _discard(self, newest_good: int | None, ordinal: int, *, give_up_old: bool) -> None:
        try:
            if newest_good is not None:
                apply(
                    self._paths,
                    self._retention,
                    newest_good=newest_good,
                    attempt=self._attempt,
                    ordinal=ordinal,
                    looks_before=self._known,
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
            mark_damaged(self._paths, damaged)
            if good is not None:
                unmark_damaged(self._paths, good)
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
        except (NoThread, SaveFailed) as error:  # for example at the interpreter's end: no reason to fail a save
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
                commit.of(self._paths).empty_trash()
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
        commit.of(paths).empty_trash()  # first, as the next call needs a little room itself
        commit.give_up_old(paths, attempt=attempt, older_than_s=DEAD_S, hidden_older_than_s=UNFINISHED_KEPT_S)
        commit.of(paths).empty_trash()
        return bool(before - _leftovers(paths))
    except OSError as error:
        logger.warning("%s is full, and could not be tidied up: %s", paths.root, error)
        return False


def _leftovers(paths: Layout) -> set[StoragePath]:
    return {*paths.trashed(), *(temporary.path for temporary in paths.temporaries())}


def tidy_beside(temporary: Temporary, paths: Layout) -> None:
    """Deletes what earlier saves left next to a checkpoint that has its own path. An OSError is logged, not raised."""
    try:
        commit.give_up_old(paths, attempt=temporary.attempt, older_than_s=UNFINISHED_KEPT_S)
        commit.of(paths).empty_trash()
    except OSError as error:
        logger.warning("beside %s was not tidied up: %s", temporary.target, error)
