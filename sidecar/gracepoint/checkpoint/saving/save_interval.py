"""When a periodic save is due, alike in all processes.

By steps that is arithmetic: a save is due at the first step that is asked for from each multiple on, as sync points may
be passed at every k-th step only. By seconds it is not: clocks and paces differ, and a process that saves alone waits
for the others in vain. So process 0's clock decides, and all learn of it before they are there, without meeting at
every step. Calls of ``is_due`` are counted (every process makes the same ones) and divided into **blocks**. On entering
a block, process 0 publishes the length of the *next* one and which of its calls saves, if any; on entering a block the
others read what was published for it. So nobody guesses: a process that has run a whole block ahead of process 0
waits for its word, and all others find it there already. The pace of process 0 in a block says how many calls the
next one should have to last ``1 / _BLOCKS`` of the interval; from one call at the start, a block at most doubles.

What all have read is removed, a **shelf** of ``_SHELF`` blocks at a time: on entering the first block of the next one,
each process says that it is done with the one before.

That costs one read of the store in ``1 / _BLOCKS`` of the interval, and a save is late by about two blocks where
training slows down.

A save may also be asked for early (``hasten``), which is not arithmetic either: where that is possible, there are
blocks by steps, too, of at most ``1 / _BLOCKS`` of ``_HASTENED_S``, so that it comes some seconds later.

All methods belong to the training thread; there are no others here.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

from gracepoint.errors import SettingsError
from gracepoint.process_group import ProcessGroup

_BLOCKS = 20
_HASTENED_S = 60.0
_SHELF = 32
#: How long a process may be a block ahead of process 0: what an evaluation by process 0 alone may take.
_WAIT_S = 1800.0


@dataclasses.dataclass(frozen=True)
class _Block:
    """``calls`` of ``is_due``, of which the one numbered ``save`` (from 1) is to save; 0 for none."""

    calls: int
    save: int


class SaveInterval:
    """Says at which steps to save.

    Args:
        every_steps: Save at the first step that is asked for from each of its multiples on; 0: never for that reason.
        every_s: Save when so many seconds have passed since the last save (or the first call), by process 0's
            clock; 0: never for that reason.
        gang: The processes.
        key: Below which the blocks are published; used by nothing else.
        clock: Monotonic seconds; only process 0's counts.
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
        self._pace_s = min(self._every_s, _HASTENED_S) if hastens else every_s
        self._gang = gang
        self._key = key
        self._clock = clock
        self._asked: tuple[int, bool] | None = None  # the last step, and the answer
        self._multiples: int | None = None  # of every_steps up to the last step; None: that is not known
        self._blocks = 0  # entered so far
        self._block = _Block(0, 0)
        self._call = 0  # number in the block
        # Process 0's alone.
        self._next = _Block(1, 0)
        self._entered_s: float | None = None
        self._due_s = 0.0
        self._hastened = False

    @property
    def periodic(self) -> bool:
        """False if nothing is ever due."""
        return self._every_steps > 0 or self._every_s < math.inf

    def is_due(self, step: int) -> bool:
        """True if this step is to be saved. Collective: asked at the same steps in all processes.

        Asked again for the same step, it gives the same answer.

        Raises:
            BarrierTimeout: Process 0 is so far behind that it has not said what comes next.
        """
        if self._asked is None or self._asked[0] != step:
            self._asked = (step, self._due(step))
        return self._asked[1]

    def hasten(self) -> None:
        """Brings the next save forward to the block after this one; only process 0's word counts."""
        self._hastened = True

    def saved(self) -> None:
        """The state was saved just now, for whatever reason: seconds count from here."""
        self._due_s = self._clock() + self._every_s

    def began_at(self, step: int) -> None:
        """Training begins after this step: the one that was restored, or 0. Multiples count from there.

        Where nobody says so, the first step that is asked for is due only if it is a multiple itself.
        """
        self._asked = None
        if self._every_steps > 0:
            self._multiples = step // self._every_steps

    def _due(self, step: int) -> bool:
        by_time = self._by_blocks and self._due_by_time()  # counts calls: asked for at every step
        by_steps = self._every_steps > 0 and self._due_by_steps(step)  # counts multiples: likewise
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
        first = self._blocks == 0
        length, self._call = self._block.calls, 0
        if self._gang.process_index == 0:
            self._block = self._next
            self._next = self._plan_next(length)
            self._gang.broadcast(self._key_of(self._blocks + 1), _to_text(self._next), timeout_s=_WAIT_S)
        elif first:
            self._block = self._next
        else:
            self._block = _from_text(self._gang.broadcast(self._key_of(self._blocks), None, timeout_s=_WAIT_S))
        shelf, place = divmod(self._blocks, _SHELF)
        if place == 0 and shelf > 0:
            self._gang.leave(f"{self._key}/{shelf - 1}")
        self._blocks += 1

    def _key_of(self, block: int) -> str:
        return f"{self._key}/{block // _SHELF}/{block}"

    def _plan_next(self, calls_before: int) -> _Block:
        """Plans the block after the one that process 0 enters now, in which a save is planned already."""
        now_s = self._clock()
        entered_s, self._entered_s = self._entered_s, now_s
        if entered_s is None:
            self._due_s = now_s + self._every_s
            return _Block(1, 0)
        call_s = max((now_s - entered_s) / calls_before, 1e-6)
        if self._block.save:
            self._due_s = now_s + (self._block.save - 1) * call_s + self._every_s
        elif self._hastened:
            self._due_s = now_s
        self._hastened = False
        begins_s = now_s + self._block.calls * call_s
        calls = min(max(1, round(self._pace_s / _BLOCKS / call_s)), 2 * self._block.calls)
        if self._due_s == math.inf:
            return _Block(calls, 0)
        save = max(1, 1 + math.ceil((self._due_s - begins_s) / call_s))
        return _Block(calls, save if save <= calls else 0)


def _to_text(block: _Block) -> str:
    return json.dumps(dataclasses.astuple(block))


def _from_text(text: str) -> _Block:
    return _Block(*json.loads(text))
