"""When periodic saves are due, and what follows from those that were made.

``SaveInterval`` decides at which steps a save is due, and ``DueSaves`` whether it begins: both for all processes.
``CommittedSteps`` knows what is committed and removes what is not kept. ``Throughput`` keeps how fast saves were. This
module has no threads but the one that writes the figures of ``Throughput``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum

from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps.retention import SETTLES_S, DamagedStep, Retention, StepCleaner
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import AgreementError, SettingsError
from gracepoint.process_group import PlansAhead, ProcessGroup
from gracepoint.threads import NoThread, start_thread

_BLOCKS = 20
_HASTENED_S = 60.0


@dataclasses.dataclass(frozen=True)
class _Block:
    """The plan of a block.

    Attributes:
        calls: Number of calls of ``is_due`` in the block.
        save: Number of the call at which a save is due, counted from 1. 0: no call.
    """

    calls: int
    save: int


@dataclasses.dataclass(frozen=True)
class SaveSchedule:
    """When periodic saves are due.

    Attributes:
        every_steps: A save is due at the first step that ``SaveInterval.is_due`` is called with at or after each
            multiple of this number. 0: no save is due for that reason.
        every_s: Seconds after the last save, or after the first call, at which a save is due, by the clock of process
            0. 0: no save is due for that reason.
        hastens: Whether ``SaveInterval.hasten`` will be called.

    Raises:
        SettingsError: An interval is negative or not finite.
    """

    every_steps: int = 0
    every_s: float = 0.0
    hastens: bool = False

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise SettingsError(f"save_every_steps: expected a number of steps from 0, found {self.every_steps}")
        if not 0 <= self.every_s < math.inf:
            raise SettingsError(f"save_every_s: expected a finite number of seconds from 0, found {self.every_s}")


#: No save is due.
ON_REQUEST = SaveSchedule()


class SaveInterval:
    """Decides at which steps to save.

    An interval in steps needs no communication. A loop may call ``is_due`` at every k-th step only. So a save is due at
    the first of these steps at or after each multiple of the interval.

    An interval in seconds needs communication. Clocks and speeds differ between processes, and a process that saves
    alone waits for the others in vain. So the clock of process 0 decides, and all processes learn the decision before
    they need it, without a barrier at every step. Every process makes the same calls of ``is_due``. The calls are
    counted, and divided into blocks, whose plans process 0 publishes one block ahead (``PlansAhead``). A plan says how
    many calls the block has, and which call saves, if any. From its speed in a block, process 0 computes how many calls
    the next block needs to last ``1 / _BLOCKS`` of the interval. The first block has one call, and a block has at most
    twice as many calls as the block before.

    The cost is one read of the store in each ``1 / _BLOCKS`` of the interval. If training slows down, a save is late by
    about two blocks.

    A save may also be brought forward (``hasten``). This needs communication, too. If ``hasten`` may be called, an
    interval in steps also uses blocks, which last at most ``1 / _BLOCKS`` of ``_HASTENED_S``. So the save comes some
    seconds after the call.

    The interval in seconds may be changed while training runs (``follow``). The next plan is made with the new one.

    The training thread calls all methods but ``follow``. This module has no threads.

    Args:
        schedule: When saves are due.
        gang: The processes that save together.
        key: Prefix of the keys of the plans. Nothing else uses it.
        clock: Returns monotonic seconds. Only the clock of process 0 counts.
    """

    def __init__(self, schedule: SaveSchedule, *, gang: ProcessGroup, key: str, clock: Callable[[], float]) -> None:
        self._every_steps = schedule.every_steps
        self._every_s = schedule.every_s or math.inf
        self._by_blocks = schedule.every_s > 0 or (schedule.hastens and schedule.every_steps > 0)
        self._hastens = schedule.hastens
        self._clock = clock
        self._asked: tuple[int, bool] | None = None  # the last step, and the answer
        self._at_once = False  # the next step is due, whatever the interval says
        self._multiples: int | None = None  # number of multiples of every_steps up to the last step; None: not known
        self._plans = PlansAhead(gang, key, _to_text(_Block(1, 0)))
        self._block = _Block(0, 0)
        self._call = 0  # number in the block
        # Used by process 0 only.
        self._entered_s: float | None = None
        self._due_s = 0.0
        self._hastened = False
        self._told_s = self._every_s  # what ``follow`` was told last; only it writes this, from any thread

    @property
    def periodic(self) -> bool:
        """Whether any periodic save can become due."""
        return self._every_steps > 0 or self._every_s < math.inf

    def is_due(self, step: int) -> bool:
        """Returns whether this step must be saved. Collective: all processes call it with the same steps.

        If it is called again with the same step, it returns the same answer.

        Raises:
            BarrierTimeout: Process 0 is so far behind that it has not published the next plan in time.
        """
        if self._asked is None or self._asked[0] != step:
            self._asked = (step, self._due(step))
        return self._asked[1]

    def hasten(self) -> None:
        """Brings the next save forward to the block after this one. Has an effect only in process 0."""
        self._hastened = True

    def follow(self, every_s: float) -> None:
        """Changes the interval in seconds, from the next block on. Has an effect only in process 0.

        Any thread may call it. Ignored without an interval in seconds: the processes would not ask process 0.

        Args:
            every_s: Seconds after the last save.
        """
        if 0 < every_s < math.inf and self._every_s < math.inf:
            self._told_s = every_s

    def saved(self) -> None:
        """Records that the state was saved just now, for any reason. The interval in seconds begins again."""
        self._due_s = self._clock() + self._every_s

    def began_at(self, step: int, *, stored: bool = True) -> None:
        """Sets the step after which training begins: the restored step, or 0. Multiples are counted from there.

        If this is never called, the first step that ``is_due`` is called with is due only if it is a multiple itself.

        Args:
            step: The step; the same in all processes.
            stored: Whether it is in storage. If not, the first step that ``is_due`` is called with is due.
        """
        self._asked, self._at_once = None, not stored and self.periodic
        if self._every_steps > 0:
            self._multiples = step // self._every_steps

    def _due(self, step: int) -> bool:
        at_once, self._at_once = self._at_once, False
        by_time = self._by_blocks and self._due_by_time()  # counts calls, so it must run at every step
        by_steps = self._every_steps > 0 and self._due_by_steps(step)  # counts multiples, so it must run, too
        return at_once or by_time or by_steps

    def _due_by_steps(self, step: int) -> bool:
        before, self._multiples = self._multiples, step // self._every_steps
        return step % self._every_steps == 0 or (before is not None and self._multiples > before)

    def _due_by_time(self) -> bool:
        if self._call == self._block.calls:
            self._enter_block()
        self._call += 1
        return self._call == self._block.save

    def _enter_block(self) -> None:
        length, self._call = self._block.calls, 0
        self._block = _from_text(self._plans.enter(lambda plan: _to_text(self._plan_next(_from_text(plan), length))))

    def _plan_next(self, block: _Block, calls_before: int) -> _Block:
        """Plans the block after ``block``, which process 0 enters now."""
        self._take_told()
        now_s = self._clock()
        entered_s, self._entered_s = self._entered_s, now_s
        if entered_s is None:
            self._due_s = now_s + self._every_s
            return _Block(1, 0)
        call_s = max((now_s - entered_s) / calls_before, 1e-6)
        if block.save:
            self._due_s = now_s + (block.save - 1) * call_s + self._every_s
        elif self._hastened:
            self._due_s = now_s
        self._hastened = False
        begins_s = now_s + block.calls * call_s
        pace_s = min(self._every_s, _HASTENED_S) if self._hastens else self._every_s
        calls = min(max(1, round(pace_s / _BLOCKS / call_s)), 2 * block.calls)
        if self._due_s == math.inf:
            return _Block(calls, 0)
        save = max(1, 1 + math.ceil((self._due_s - begins_s) / call_s))
        return _Block(calls, save if save <= calls else 0)

    def _take_told(self) -> None:
        told_s = self._told_s  # read once: ``follow`` may change it at any time
        if told_s != self._every_s:
            self._due_s += told_s - self._every_s
            self._every_s = told_s


def _to_text(block: _Block) -> str:
    return json.dumps(dataclasses.astuple(block))


def _from_text(text: str) -> _Block:
    return _Block(*json.loads(text))


@dataclasses.dataclass(frozen=True)
class DueSave:
    """The decision of the first process that asks.

    Attributes:
        process: Index of that process.
        step: The step that is due in that process.
        sync_point: Number of the sync point at which it is due.
        begins: Whether the save begins. False: it is skipped.
        saves: How many saves that process has begun. Barriers are named by this count, so all take it over.
        ends: Why training ends here, as saves have failed for too long. Empty: it continues.
        reason: Why it is skipped. Empty: it begins, or that is not said.
    """

    process: int
    step: int
    sync_point: int
    begins: bool
    saves: int = 0
    ends: str = ""
    reason: str = ""


class DueSaves:
    """Counts the saves that are due. The count is the same in all processes.

    The training thread calls ``decide``. The thread that has committed a save calls ``retire``. No process waits for
    another. The first process that asks decides, and records the decision together with its step and sync point.

    Args:
        gang: The processes that save together.
        key: Prefix of the keys of the decisions. Nothing else uses it.
        fail: Called with the step and the error if the other processes began a save that this process cannot begin.
            They would wait for this process's part until the save's timeout.
    """

    def __init__(self, gang: ProcessGroup, key: str, fail: Callable[[int, AgreementError], None]) -> None:
        self._gang = gang
        self._key = key
        self._fail = fail
        self._asked = 0
        self._retired = 0  # written by the thread of the save that was committed last; never by two threads at a time

    def decide(
        self, step: int, *, sync_point: int, ready: bool, saves: int = 0, ends: str = "", reason: str = ""
    ) -> DueSave:
        """Returns what all processes do about the save that is due. The first process that asks decides.

        Collective, for each save that is due. If only some processes began a save, it would never end, and the later
        saves of the processes would not match. The first process also records its step, and all others compare it with
        theirs.

        Args:
            step: The step that is due in this process.
            sync_point: Number of the sync point at which it is due; the same in all processes.
            ready: Whether this process can begin the save. If it cannot, and all begin, it waits for the previous save.
            saves: How many saves this process has begun.
            ends: Why this process would end training here. Empty: it would not.
            reason: Why it is not ready, to be said in all processes.

        Raises:
            AgreementError: The first process asked at another sync point, or for another step; names both. The save
                fails in all processes.
            BarrierError: The other processes cannot be reached.
        """
        self._asked += 1
        proposal = DueSave(self._gang.process_index, step, sync_point, ready and not ends, saves, ends, reason)
        text = self._gang.decide(f"{self._key}/{self._asked}", json.dumps(dataclasses.astuple(proposal)))
        first = DueSave(*json.loads(text))
        if (first.step, first.sync_point) != (step, sync_point):
            error = AgreementError(
                f"periodic save {self._asked} is due in process {first.process} with step {first.step} at sync point "
                f"{first.sync_point}, and in process {proposal.process} with step {step} at sync point {sync_point}: "
                f"every process must call step() once for each step, with the same number"
            )
            if first.begins:
                self._fail(step, error)
            raise error
        return first

    @property
    def asked(self) -> int:
        """Number of saves that were due so far."""
        return self._asked

    def retire(self, number_asked: int) -> None:
        """Removes the first ``number_asked`` decisions, which all processes have read.

        All processes make these calls in the same order.

        Raises:
            BarrierError: The store cannot be reached.
        """
        for number in range(self._retired + 1, number_asked + 1):
            self._gang.retire(f"{self._key}/{number}")
        self._retired = max(self._retired, number_asked)


logger = logging.getLogger(__name__)


class CommittedSteps:
    """The newest step of this gang. Process 0 also removes what is not kept.

    The owner of the checkpointer and the thread of the background save call the methods, never both at a time: the
    owner waits for that save before it saves, restores or closes. The owner may read ``newest`` at any time.

    Args:
        paths: The directory of the steps.
        gang: The processes that save together.
        key: Prefix of the keys of saves.
        attempt: Unique for each start of the gang; the same in all its processes.
        retention: Which steps are kept.

    Attributes:
        newest: The newest step that this process has restored, or knows to be committed. None if there is none.
    """

    def __init__(self, paths: Layout, gang: ProcessGroup, *, key: str, attempt: str, retention: Retention) -> None:
        self._gang = gang
        self._key = key
        self._cleaner = StepCleaner(paths, retention, attempt)
        self._has_tidied = False  # the first call also deletes unfinished saves of earlier starts
        self._retired = 0  # keys are removed up to this save
        self.newest: int | None = None

    def add(self, step: int) -> None:
        """Notes that ``step`` is committed. A newer one stays the newest: an older save may end after it."""
        self.newest = step if self.newest is None else max(step, self.newest)

    def has(self, step: int) -> bool:
        """Returns whether ``step`` is the newest one, so that it need not be saved again."""
        if self.newest != step:
            return False
        logger.info("step %d is committed already", step)
        return True

    def after_restore(self, damaged: Mapping[int, DamagedStep], ordinal: int, *, tidies: bool) -> None:
        """Marks ``damaged`` steps, removes the mark of the newest one, and tidies up; see ``StepCleaner``."""
        if self._gang.process_index == 0:
            self._cleaner.after_restore(
                damaged, self.newest, ordinal=ordinal, tidies=tidies, give_up_old=not self._has_tidied
            )
            self._has_tidied |= tidies

    def tidy(self, newest_good: int | None, ordinal: int) -> None:
        """Has old steps and trash deleted, and does not wait for that; see ``StepCleaner.tidy``."""
        if self._gang.process_index == 0:
            self._cleaner.tidy(newest_good, ordinal=ordinal, give_up_old=not self._has_tidied)
            self._has_tidied = True

    def settle(self, timeout_s: float = SETTLES_S) -> None:
        """Does what ``tidy`` was asked for, except for the deletion of trash; see ``StepCleaner.settle``."""
        if self._gang.process_index == 0:
            self._cleaner.settle(timeout_s)

    def finish(self, deadline: Deadline) -> None:
        """Waits until all trash is deleted, or until ``deadline``."""
        if self._gang.process_index == 0:
            self._cleaner.finish(deadline)

    def retire(self, ordinal: int) -> None:
        """Removes the keys of saves before ``ordinal``, which all processes have committed.

        Keys of the previous save stay: if it was stopped, its thread may still be ending.

        Raises:
            BarrierError: The store cannot be reached.
        """
        while self._retired < ordinal - 2:
            self._retired += 1
            self._gang.retire(f"{self._key}/save/{self._retired}")


_VERSION = 1
_KEPT = 5


class Way(StrEnum):
    """How the bytes of a save get to the disk."""

    STREAMED = "streamed"
    SNAPSHOT = "snapshot"


class Throughput:
    """The speed of the latest saves.

    There are two ways to save, and each has its own figures. An emergency save is *streamed*, while training is
    stopped. A background save is written from a *snapshot*, while training continues. The median of the latest saves
    counts.

    Every process reads the file when it starts. Process 0 writes it after each committed save, as a whole and by a
    rename. After a background save, the thread of the save writes it. After an emergency save, a separate thread writes
    it, so that no caller waits for the storage once the step is committed. That thread ends when the file is written; a
    process that exits waits for it for half a second. If the file cannot be read or written, or the system has no
    thread, the log says so, and no save fails. If more processes made the figures, they are scaled down to the number
    of processes that save now.

    Args:
        writes: Whether this process writes the file.
        process_count: Number of processes that save together.

    Attributes:
        file: The file that keeps the figures. None: they are kept in memory only.
    """

    def __init__(self, file: StoragePath | None, *, writes: bool, process_count: int = 1) -> None:
        self.file = file
        self._writes = writes
        self._process_count = process_count
        self._rates: dict[Way, tuple[float, ...]] = dict.fromkeys(Way, ())
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None  # the latest thread that writes the file

    def read(self) -> None:
        """Reads the figures of earlier starts."""
        if self.file is None:
            return
        try:
            self._rates = _rates_of(self.file.read_bytes(), self._process_count)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.warning(
                "what saves took before is not known: %s cannot be read (%s); the next save writes it again",
                self.file,
                error,
            )

    def learn(self, way: Way, size_bytes: int, duration_s: float) -> None:
        """Records a committed save.

        Args:
            way: How it was saved.
            size_bytes: Bytes of the state over all processes.
            duration_s: Seconds from the start of writing to the commit.
        """
        if size_bytes <= 0 or duration_s <= 0:
            return
        self._rates = {**self._rates, way: (*self._rates[way], size_bytes / duration_s)[-_KEPT:]}
        if self.file is None or not self._writes:
            return
        if way is Way.STREAMED:
            thread = threading.Thread(target=self._write, args=[self.file], name="gracepoint: throughput", daemon=True)
            try:
                start_thread(thread)
            except NoThread as error:  # a limit on threads: the next save writes these figures, too
                logger.warning("what a save took is not remembered: no thread writes %s (%s)", self.file, error)
            else:
                self._thread = thread
        else:
            self._write(self.file)

    def finish(self, timeout_s: float) -> None:
        """Waits until the latest figures are written, for at most ``timeout_s`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, file: StoragePath) -> None:
        try:
            with self._writing:
                fields = {"version": _VERSION, "processes": self._process_count, "bytes_per_s": self._rates}
                file.put(json.dumps(fields).encode())
        except OSError as error:
            logger.warning("what a save took is not remembered: %s cannot be written (%s)", file, error)

    @property
    def streamed_bytes_per_s(self) -> float | None:
        """Speed of emergency saves, in bytes of the state over all processes per second. None if there was none."""
        return self._typical(Way.STREAMED)

    @property
    def snapshot_bytes_per_s(self) -> float | None:
        """Speed of background saves, in bytes of the state over all processes per second. None if there was none."""
        return self._typical(Way.SNAPSHOT)

    def _typical(self, way: Way) -> float | None:
        rates = self._rates[way]
        return statistics.median(rates) if rates else None


def _rates_of(data: bytes, process_count: int) -> dict[Way, tuple[float, ...]]:
    fields = json.loads(data)
    if not isinstance(fields, dict) or fields.get("version") != _VERSION:
        raise ValueError(f"expected an object of version {_VERSION}, found {data[:80]!r}")
    rates = fields.get("bytes_per_s")
    if not isinstance(rates, dict) or set(rates) != set(Way):
        raise ValueError(f"bytes_per_s: expected {[str(way) for way in Way]}, found {rates!r:.80}")
    for way, values in rates.items():
        if not isinstance(values, list) or not all(type(value) in (int, float) and value > 0 for value in values):
            raise ValueError(f"bytes_per_s.{way}: expected positive numbers, found {values!r:.80}")
    processes = fields.get("processes", process_count)
    if type(processes) is not int or processes < 1:
        raise ValueError(f"processes: expected how many saved, found {processes!r:.80}")
    # Whether the processes or the storage limit the speed is not known. So fewer processes count as slower, and more
    # processes as no faster.
    part = min(1.0, process_count / processes)
    return {way: tuple(rate * part for rate in rates[way][-_KEPT:]) for way in Way}
