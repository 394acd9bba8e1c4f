"""Decides when a periodic save is due, at the same step in all processes.

An interval in steps needs no communication. A loop may call ``is_due`` at every k-th step only. So a save is due at
the first of these steps at or after each multiple of the interval.

An interval in seconds needs communication. Clocks and speeds differ between processes, and a process that saves alone
waits for the others in vain. So the clock of process 0 decides, and all processes learn the decision before they need
it, without a barrier at every step. Every process makes the same calls of ``is_due``. The calls are counted, and
divided into blocks, whose plans process 0 publishes one block ahead (``plans_ahead``). A plan says how many calls the
block has, and which call saves, if any. From its speed in a block, process 0 computes how many calls the next block
needs to last ``1 / _BLOCKS`` of the interval. The first block has one call, and a block has at most twice as many calls
as the block before.

The cost is one read of the store in each ``1 / _BLOCKS`` of the interval. If training slows down, a save is late by
about two blocks.

A save may also be brought forward (``hasten``). This needs communication, too. If ``hasten`` may be called, an interval
in steps also uses blocks, which last at most ``1 / _BLOCKS`` of ``_HASTENED_S``. So the save comes some seconds after
the call.

The interval in seconds may be changed while training runs (``follow``). The next plan is made with the new one.

The training thread calls all methods but ``follow``. This module has no threads of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

from gracepoint.errors import SettingsError
from gracepoint.plans_ahead import PlansAhead
from gracepoint.process_group import ProcessGroup

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


class SaveInterval:
    """Decides at which steps to save.

    Args:
        every_steps: A save is due at the first step that ``is_due`` is called with at or after each multiple of this
            number. 0: no save is due for that reason.
        every_s: Seconds after the last save, or after the first call, at which a save is due, by the clock of process
            0. 0: no save is due for that reason.
        gang: The processes that save together.
        key: Prefix of the keys of the plans. Nothing else uses it.
        clock: Returns monotonic seconds. Only the clock of process 0 counts.
        hastens: Whether ``hasten`` will be called.

    Raises:
        SettingsError: An interval is negative or not finite.
    """

    def __init__(
        self,
        *,
        every_steps: int,
        every_s: float,
        gang: ProcessGroup,
        key: str,
        clock: Callable[[], float],
        hastens: bool = False,
    ) -> None:
        if every_steps < 0:
            raise SettingsError(f"save_every_steps: expected a number of steps from 0, found {every_steps}")
        if not 0 <= every_s < math.inf:
            raise SettingsError(f"save_every_s: expected a finite number of seconds from 0, found {every_s}")
        self._every_steps = every_steps
        self._every_s = every_s or math.inf
        self._by_blocks = every_s > 0 or (hastens and every_steps > 0)
        self._hastens = hastens
        self._clock = clock
        self._asked: tuple[int, bool] | None = None  # the last step, and the answer
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

    def began_at(self, step: int) -> None:
        """Sets the step after which training begins: the restored step, or 0. Multiples are counted from there.

        If this is never called, the first step that ``is_due`` is called with is due only if it is a multiple itself.
        """
        self._asked = None
        if self._every_steps > 0:
            self._multiples = step // self._every_steps

    def _due(self, step: int) -> bool:
        by_time = self._by_blocks and self._due_by_time()  # counts calls, so it must run at every step
        by_steps = self._every_steps > 0 and self._due_by_steps(step)  # counts multiples, so it must run, too
        return by_time or by_steps

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
