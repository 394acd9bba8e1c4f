"""The sync points of training loops that save by their own means, such as with Orbax."""

from __future__ import annotations

import logging
import math

from gracepoint import trace
from gracepoint.arguments import shown, step_number
from gracepoint.errors import SettingsError
from gracepoint.preemption.coordinator import Coordinator
from gracepoint.preemption.forecast import Forecaster
from gracepoint.session.periodic_saves import PeriodicSaves
from gracepoint.session.program_watch import ProgramWatch
from gracepoint.session.sync_points import SyncPoints

log = logging.getLogger(__name__)


class OwnLoop:
    """The part of ``Session`` for these loops. The session sets the attributes."""

    _coordinator: Coordinator
    _forecaster: Forecaster
    _points: SyncPoints
    _programs: ProgramWatch
    _saves: PeriodicSaves
    _began: bool  # restore or a sync point was called
    _own_loop: bool  # reached_preemption was called

    def reached_preemption(self, step: int) -> bool:
        """Passes a sync point of a loop that saves by its own means. Call it in place of ``step``.

            if session.reached_preemption(step):
                manager.save(step, ...); manager.wait_until_finished()
                session.saved(step)  # ends the process; returns only after a drill

        If it has returned True at a step, another call at that step returns True again, and passes no new sync point.
        As the state is not known here, the host is not kept from running ahead of its devices: the caller's save waits
        for them. For the same reason it is not known how long a save takes, until ``own_save_took`` was called or a
        drill was passed. Until then a preemption is acted upon as soon as it is noticed.

        Returns:
            True in all processes at the same step. Save that step now, then call ``saved``.

        Raises:
            Preempted: There is no agreement, or training went on without ``saved``.
            SettingsError: ``step`` is no step's number, or the session is closed.
        """
        if self._points.asked is not None and self._points.asked == step:
            return True
        number = self._points.begin(step, "reached_preemption(step)")
        if not self._own_loop:
            self._own_loop = self._began = True
            self._coordinator.reporter.own_loop(number)
            self._trains()
        if number != self._coordinator.step:
            self._forecaster.passed()
        self._coordinator.step = number
        return self._points.ask()

    def own_save_took(self, duration_s: float, step: int) -> None:
        """Notes that the training loop has saved a step by its own means, and how long that took.

        With it, a loop that saves by its own means has a forecast: a preemption that leaves more time is acted upon as
        late as possible, as with ``step``, and not at once. Not collective, but all processes should call it alike.

        Args:
            duration_s: Seconds that the save took until it was committed.
            step: The step that is committed.

        Raises:
            SettingsError: ``duration_s`` is no positive number, or ``step`` is no step's number.
        """
        if not isinstance(duration_s, int | float) or not 0 < duration_s < math.inf:
            raise SettingsError(f"own_save_took(duration_s, step): expected seconds above 0, found {shown(duration_s)}")
        self._saves.saved_by_the_loop(
            step_number("own_save_took(duration_s, step)", step), duration_s, self._forecaster.own_save_took(duration_s)
        )

    def saved(self, step: int) -> None:
        """Notes that the caller has saved the step at which ``reached_preemption`` returned True. Ends the process.

        After a drill it returns, and training goes on. If a process exits without this call, it reports that nothing
        was saved, and exits with the exit code for that.

        Raises:
            Preempted: The step is committed in all processes, and the process is to exit now. Or ``saved`` is False: a
                process did not call ``saved`` in time.
            SettingsError: ``reached_preemption`` did not return True at this step.
        """
        self._points.saved(step)

    def _trains(self) -> None:
        """Says, after the first step, what that took."""
        programs = self._programs.programs
        log.info("programs until the first step compiled=%d found=%d", programs.compiled, programs.found)
        trace.tell(programs_compiled=programs.compiled, programs_found=programs.found)
        trace.moment("trains")
        trace.write()
