"""The sync points of a session: where the training thread takes part in a preemption.

All of this belongs to the training thread. At the agreed sync point either the session saves, or the training loop does
(``asked``). Both raise ``Preempted`` then, or let training go on after a drill.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from gracepoint import machine, trace
from gracepoint.arguments import check_state, shown, step_number
from gracepoint.errors import AgreementError, GracepointError, Preempted, SettingsError
from gracepoint.forks import check_not_forked
from gracepoint.preemption.coordinator import Coordinator

log = logging.getLogger(__name__)

#: A save counts as having taken at least this many seconds: 0 is not a duration that ``own_save_took`` accepts.
_LEAST_S = 1e-3


class SyncPoints:
    """See the module.

    Args:
        coordinator: Says where all processes stop, and saves there.
        steps_at_risk: Returns the steps since the last committed one. None if no step is known to be committed.
        on_own_save: Called with the seconds that the training loop took to save, and with the step.
        clock: Returns monotonic seconds.

    Attributes:
        asked: The step at which the training loop was told to save and has not called ``saved``. None otherwise.
        closed: True once there are no sync points any more.
        preempted: What was raised because the process is to exit. Raised again if the training loop swallowed it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        steps_at_risk: Callable[[], int | None],
        on_own_save: Callable[[float, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._arrive = coordinator.arrive
        self._look = coordinator.look
        self._steps_at_risk = steps_at_risk
        self._on_own_save = on_own_save
        self._clock = clock
        self._asked_at_s = 0.0
        self._grows = True  # False once a step was not above the one before
        self._pid = machine.process_id()
        self.asked: int | None = None
        self.closed = False
        self.preempted: Preempted | None = None

    def begin_step(self, step: Any, state: Any) -> int:
        """Begins the sync point after a step, and returns the step. Warns once if steps do not grow.

        Raises:
            As ``begin``. And ``SettingsError`` if ``state`` is none.
        """
        number = self.begin(step)
        check_state("step(step, state)", state)
        if number <= (before := self._coordinator.step) and self._grows:
            self._grows = False
            log.warning(
                "step(%d) was called after step %d: expected the number of finished steps, which is 1 after the first "
                "step and grows with each. For a sync point that is not a step, call poll()",
                number,
                before,
            )
        return number

    def begin(self, step: Any, call: str = "step(step, state)") -> int:
        """Begins a sync point and returns its step.

        Raises:
            Preempted: The process is to exit. It is raised again if the training loop swallowed it.
            SettingsError: ``step`` is no step's number, or there are no sync points any more.
        """
        if self.closed:
            check_not_forked(self._pid, "the session")
            raise self.preempted or SettingsError("the session is closed: pass no sync points after close()")
        number = step if type(step) is int and step >= 0 else step_number(call, step)
        self._look()
        if self.asked is not None:  # checked here, too: settle's text would be built at every quiet step
            self.settle(f"training went on to step {number}")
        return number

    def arrive(self) -> bool:
        """Passes the sync point. Returns True if it is the agreed one.

        Raises:
            Preempted: There is no agreement. Not after a drill.
        """
        try:
            return self._arrive()
        except AgreementError as error:
            self.not_saved(error)
            return False

    def save(self, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> None:
        """Saves at the agreed sync point.

        Raises:
            Preempted: Unless it is a drill.
        """
        self._leave(self._coordinator.save(state, host_state))

    def ask(self) -> bool:
        """Passes the sync point. Returns True if the training loop is to save now.

        Raises:
            Preempted: There is no agreement. Not after a drill.
        """
        try:
            if not self._arrive():
                return False
            self._coordinator.meet()
        except GracepointError as error:
            self.not_saved(error)
            return False
        self.asked, self._asked_at_s = self._coordinator.step, self._clock()
        return True

    def saved(self, step: Any) -> None:
        """Notes that the training loop has saved.

        Raises:
            Preempted: Unless it is a drill.
            SettingsError: The training loop was not told to save this step.
        """
        if self.asked is None or self.asked != step_number("saved(step)", step):
            found = "nowhere" if self.asked is None else f"at step {self.asked}"
            raise SettingsError(
                f"saved({shown(step)}): expected the step at which reached_preemption() is True, found that {found}"
            )
        self._on_own_save(max(self._clock() - self._asked_at_s, _LEAST_S), self.asked)
        self.asked = None
        self._leave(self._coordinator.saved())

    def settle(self, what: str) -> None:
        """Ends an epoch in which the training loop did not call ``saved``. Does nothing if it was not told to save.

        Raises:
            Preempted: Unless it is a drill.
        """
        if self.asked is not None:
            asked, self.asked = self.asked, None
            self.not_saved(AgreementError(f"{what} without saved({asked}), which reached_preemption() had asked for"))

    def not_saved(self, error: Exception) -> None:
        """Ends the epoch, or a preemption before its epoch, without a save.

        Raises:
            Preempted: Unless it is a drill.
        """
        self._leave(self._coordinator.not_saved(error, self._steps_at_risk()))

    def _leave(self, outcome: Preempted | None) -> None:
        if outcome is not None:
            self.closed = True
            self.preempted = outcome
            trace.moment("Preempted is raised")
            raise outcome
