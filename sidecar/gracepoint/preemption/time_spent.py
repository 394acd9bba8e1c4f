"""What the time of this process goes into: joining, restoring, compiling, training, saving. The operator gets reports.

The training thread calls ``restored``, ``trains``, ``stops``, ``passed`` and ``committed``. A thread that ends an epoch
may call ``goes_on`` and ``left``. Any thread may call ``spent``. Between two saves nothing is called, so that a step
costs nothing. Each value is replaced as a whole; there is no lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gracepoint.wire.messages import Spent

#: For how many of the newest steps the operator is told when they were passed: a restart restores one of them.
_STEPS = 8


@dataclasses.dataclass(frozen=True)
class ProcessStart:
    """When this process was started, and when the last of all processes was.

    Attributes:
        began_s: When ``attach`` was called, in monotonic seconds.
        began_unix_s: The same in seconds since the epoch.
        age_s: For how many seconds the process had run then. None: it is not known.
        last_unix_s: When the last of all processes was started, in seconds since the epoch. None: it is not known.
    """

    began_s: float
    began_unix_s: float = 0.0
    age_s: float | None = None
    last_unix_s: float | None = None

    @property
    def unix_s(self) -> float | None:
        """When this process was started, in seconds since the epoch."""
        return None if self.age_s is None else self.began_unix_s - self.age_s


class TimeSpent:
    """The totals of what the time of this process went into.

    To be made when all processes have joined, as it notes that time.

    Args:
        clock: Returns monotonic seconds.
        start: How the process came to ``attach``. None: ``attach`` was called now, and no more is known.
        newest_program_s: Returns when JAX compiled or loaded the newest program, on the clock. None: there is none.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        start: ProcessStart | None = None,
        newest_program_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._newest_program_s = newest_program_s
        self._joined_s = clock()
        self._start = ProcessStart(self._joined_s) if start is None else start
        self._began_s = self._start.began_s
        self._restored_s: float | None = None
        self._first_step = 0
        self._compiled_s: float | None = None
        self._trained_s: float | None = None
        self._left_s: float | None = None
        self._stopped_s: float | None = None  # since when a save stops the training
        self._saving_s = 0.0
        self._periodic = (0, 0.0)  # number of periodic saves, and their seconds
        self._passed: dict[int, float] = {}  # step -> seconds of training when it was passed
        self._passed_s: dict[int, float] = {}  # step -> when it was passed
        self._saved_s: float | None = None  # when the newest step was passed that is committed

    def restored(self, step: int | None) -> None:
        """Notes that the state of this step is restored. None: there was no checkpoint."""
        if self._restored_s is None:
            self._restored_s, self._first_step = self._clock(), step or 0

    def trains(self, step: int | None = None) -> None:
        """Notes that the first step is done.

        Args:
            step: Its number, if it is not known what was restored.
        """
        if self._trained_s is None:
            if self._restored_s is None and step is not None:
                self._first_step = max(0, step - 1)
            self._compiled_s = self._newest_program_s()
            self._trained_s = self._clock()

    def stops(self, step: int | None) -> None:
        """Notes that a save stops the training at this step. None: its number is not known."""
        if self._stopped_s is None:
            self._stopped_s = self._clock()
        if step is not None:
            self._pass(step, self._stopped_s)

    def goes_on(self, *, periodic: bool = False) -> None:
        """Notes that training continues after a save.

        Args:
            periodic: True after a periodic save that was begun.
        """
        stopped_s, self._stopped_s = self._stopped_s, None
        if stopped_s is not None:
            took_s = self._clock() - stopped_s
            self._saving_s += took_s
            if periodic:
                self._periodic = (self._periodic[0] + 1, self._periodic[1] + took_s)

    def passed(self, step: int, *, ago_s: float = 0.0) -> None:
        """Notes that this step was passed so many seconds ago, and training went on."""
        self._pass(step, self._clock() - ago_s)

    def committed(self, step: int) -> None:
        """Notes that this step, which was passed before, is in a committed checkpoint."""
        passed_s = self._passed_s.get(step)
        if passed_s is not None and (self._saved_s is None or passed_s > self._saved_s):
            self._saved_s = passed_s

    def left(self, stalled_s: float | None = None) -> None:
        """Notes that training has ended for a preemption.

        Args:
            stalled_s: Seconds since the newest step was passed, if training has stalled since then: it ended there.
                None if it went on until now, or until its emergency save.
        """
        now_s, stopped_s = self._clock(), self._stopped_s
        began_s = now_s if self._trained_s is None else self._trained_s
        ended_s = now_s if stalled_s is None else max(began_s, now_s - stalled_s)
        self._stopped_s = None
        if stopped_s is not None:
            self._saving_s += max(0.0, ended_s - stopped_s)
        if self._left_s is None:
            self._left_s = ended_s

    def spent(self) -> Spent:
        """Returns what is reported to the operator."""
        now_s, start = self._clock(), self._start
        stopped_s, saving_s = self._stopped_s, self._saving_s
        if stopped_s is not None:
            saving_s += now_s - stopped_s
        return Spent(
            now_s=now_s - self._began_s,
            joined_s=self._joined_s - self._began_s,
            restored_s=self._since_began(self._restored_s),
            first_step=self._first_step,
            trained_s=self._since_began(self._trained_s),
            age_s=start.age_s,
            compiled_s=self._since_began(self._compiled_s),
            last_started_s=None if start.last_unix_s is None else start.last_unix_s - start.began_unix_s,
            left_s=self._since_began(self._left_s),
            saving_s=saving_s,
            saves=self._periodic[0],
            saves_s=self._periodic[1],
            passed={str(step): seconds for step, seconds in self._passed.items()},
            saved_s=self._since_began(self._saved_s),
        )

    def _pass(self, step: int, now_s: float) -> None:
        newest_s = dict(list(self._passed_s.items())[1 - _STEPS :])
        newest_s.setdefault(step, now_s)
        self._passed_s = newest_s
        if self._trained_s is not None:
            newest = dict(list(self._passed.items())[1 - _STEPS :])
            newest[step] = max(0.0, now_s - self._trained_s - self._saving_s)
            self._passed = newest

    def _since_began(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self._began_s
