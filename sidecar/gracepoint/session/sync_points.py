"""The sync points of a session: where the training thread meets a preemption, and how it leaves one.

Everything here belongs to the training thread. At the agreed point either the session saves, or the caller does
(``asked``); both end the epoch by ``end_epoch``, which raises ``Preempted``, or lets training go on after a drill.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from gracepoint.errors import AgreementError, GracepointError, Preempted, SettingsError
from gracepoint.multihost import Agreement
from gracepoint.preemption.emergency import Emergency
from gracepoint.preemption.emergency_save import EmergencySave


class SyncPoints:
    """See the module.

    Args:
        agreement: Says where all stop.
        saving: What is done there.
        emergency: Says how it ended where nothing was saved.
        steps_at_risk: Steps since what is committed; None where nothing is known to be.

    Attributes:
        step: The last one that was told.
        asked: The step at which the caller was told to save, and did not say yet that it has.
        closed: True: there are none any more.
    """

    def __init__(
        self,
        agreement: Agreement,
        saving: EmergencySave,
        emergency: Emergency,
        steps_at_risk: Callable[[], int | None],
    ) -> None:
        self._agreement = agreement
        self._saving = saving
        self._emergency = emergency
        self._steps_at_risk = steps_at_risk
        self._preempted: Preempted | None = None  # what was raised
        self.step = 0
        self.asked: int | None = None
        self.closed = False

    def begin(self, step: Any) -> int:
        """The step of the sync point that begins.

        Raises:
            Preempted: The process is to end: code that swallowed it gets it again.
            SettingsError: ``step`` is no step's number, or there are no sync points any more.
        """
        if self.closed:
            raise self._preempted or SettingsError("the session is closed: pass no sync points after close()")
        number = step if type(step) is int and step >= 0 else checked(step)
        if self.asked is not None:  # asked here too, as the text would be made at every quiet step
            self.settle(f"training went on to step {number}")
        return number

    def arrive(self) -> bool:
        """True at the agreed one.

        Raises:
            Preempted: There is no agreement.
        """
        try:
            return self._agreement.arrive()
        except AgreementError as error:
            self.not_saved(error)
            return False

    def ask(self) -> bool:
        """Arrives; True if the caller is to save now.

        Raises:
            Preempted: There is no agreement.
        """
        if not self.arrive():
            return False
        try:
            self._saving.meet(self.step)
        except GracepointError as error:
            self.not_saved(error)
            return False
        self.asked = self.step
        return True

    def saved(self, step: Any) -> None:
        """The caller has saved.

        Raises:
            Preempted: Unless it is a drill.
            SettingsError: The caller was not told to save this step.
        """
        if self.asked is None or self.asked != checked(step):
            found = "nowhere" if self.asked is None else f"at step {self.asked}"
            raise SettingsError(
                f"saved({step}): expected the step at which reached_preemption() is True, found that {found}"
            )
        self.asked = None
        self.end_epoch(self._saving.saved(self.step))

    def settle(self, what: str) -> None:
        """Ends an epoch whose caller did not say that it has saved.

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
        outcome = self._emergency.failed(self.step, error, self._steps_at_risk())
        if outcome is not None:
            self._agreement.tell_gone(str(error))
        self.end_epoch(outcome)

    def end_epoch(self, outcome: Preempted | None) -> None:
        """Ends the epoch of a drill; after a preemption, the process.

        Raises:
            Preempted: The outcome, if there is one.
        """
        if outcome is None:
            return self._agreement.end_epoch()
        self.closed = True
        self._preempted = outcome
        raise outcome


def checked(step: Any) -> int:
    """The step as a plain integer: one of numpy's or JAX's could be neither compared nor written in time.

    Raises:
        SettingsError: It is no number of steps.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise SettingsError(f"step(): expected how many steps the state has seen, an integer from 0, found {step!r}")
    return number
