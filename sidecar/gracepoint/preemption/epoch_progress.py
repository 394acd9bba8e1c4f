"""What is known of one epoch, and told as it becomes known.

Written by the threads that ``emergency`` names, each at its own stages; ``progress`` is replaced as a whole.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from gracepoint.deadline_plan import Plan
from gracepoint.preemption.reporter import Progress, Reporter
from gracepoint.preemption.stages import Stages
from gracepoint.receivers import Mailbox
from gracepoint.wire.messages import Phase


class EpochProgress:
    """See the module.

    Args:
        number: The epoch's.
        drill: It is only rehearsed.
        stages: When each stage ended here.
        mailbox: Says which notice is spoken of.
        reporter: Whom to tell.

    Attributes:
        doubt: Why it will not be done in time, as far as is known.
        waits_at: The barrier at which training waits for the other processes.
        plan: What all processes chose to do at the agreed point.
    """

    def __init__(self, number: int, drill: bool, stages: Stages, mailbox: Mailbox, reporter: Reporter) -> None:
        self.number = number
        self.drill = drill
        self.stages = stages
        self.doubt = ""
        self.waits_at: str | None = None
        self.plan: Plan | None = None
        self.progress = Progress()
        self._mailbox = mailbox
        self._reporter = reporter
        self._phase: Phase | None = None
        self._ending = threading.Lock()
        self._ended = False

    def report(self, phase: Phase, **changes: Any) -> None:
        """It has come this far."""
        known = {"stages": self.stages.own(), "message": self.doubt, **changes}
        self.progress = dataclasses.replace(self.progress, **known)
        self._phase = phase
        about = self._mailbox.current_drill if self.drill else self._mailbox.current
        self._reporter.report(phase, self.progress, about)

    def chose(self, plan: Plan) -> None:
        """All processes have chosen; told with the next report."""
        self.plan = plan
        self.progress = dataclasses.replace(self.progress, choice=str(plan.choice), choice_reason=plan.reason)

    def has_doubt(self, doubt: str) -> None:
        """Says at once that it will not be done in time; the first report does where there was none yet."""
        self.doubt = doubt
        if self._phase is not None:
            self.report(self._phase)

    def with_doubt(self, reason: str) -> str:
        """The reason of an end, and what was known before."""
        return f"{reason} ({self.doubt})" if self.doubt else reason

    @property
    def ended(self) -> bool:
        """True once it was committed, or a failure was told."""
        return self._ended

    def succeeded(self) -> None:
        """It is committed: what fails from now on is no failure of the save."""
        with self._ending:
            self._ended = True

    def fail_first(self) -> bool:
        """True for the first that calls: the first word of the end is the one that counts."""
        with self._ending:
            first, self._ended = not self._ended, True
        return first
