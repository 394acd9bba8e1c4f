"""How far the open epoch is: when each stage ended, in this process and over all of them, and what was reported."""

from __future__ import annotations

import dataclasses
import json
import statistics
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gracepoint.deadline_plan import Choice, Plan
from gracepoint.preemption.reporting.reporter import Progress, Reporter
from gracepoint.preemption.reporting.substitute import Substitute
from gracepoint.receivers import Mailbox
from gracepoint.wire.messages import Phase, StageTiming

#: In the order in which they come.
STAGES = ("frozen", "agreed", "drained", "written", "durable", "committed")
#: Most processes that a report names.
_SHOWN = 3
#: Ends that are reported even if process 0 does not run. A commit is not among them: if nobody has reported it, the
#: next start does.
_ENDS = frozenset({Phase.FAILED, Phase.PROMOTED})


class Stages:
    """Seconds after the notice at which each stage ended. Any thread may call ``mark``.

    Args:
        since_s: When the notice came, on the clock.
        clock: Returns monotonic seconds.

    Attributes:
        without: What is not saved of this process's part though the save goes on, in words. Empty if nothing lacks.
    """

    def __init__(self, since_s: float, clock: Callable[[], float]) -> None:
        self.without = ""
        self._since_s = since_s
        self._clock = clock
        self._ended_s: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        """Notes that the stage ends now.

        Raises:
            ValueError: There is no such stage.
        """
        if stage not in STAGES:
            raise ValueError(f"stage: expected one of {STAGES}, found {stage!r}")
        self._ended_s[stage] = self._clock() - self._since_s

    def has(self, stage: str) -> bool:
        """Returns True if the stage has ended."""
        return stage in self._ended_s

    @property
    def last(self) -> str | None:
        """The latest stage that has ended. None before the first."""
        return next((stage for stage in reversed(STAGES) if stage in self._ended_s), None)

    def to_json(self) -> str:
        """Returns this process's figures for ``summary``, and what its part lacks for ``lacking``."""
        return json.dumps(self._ended_s | ({"without": self.without} if self.without else {}))

    def own(self) -> dict[str, StageTiming]:
        """Returns this process's figures in the form of the report."""
        return summary([self.to_json()])


def summary(all_stages: Iterable[str]) -> dict[str, StageTiming]:
    """Returns the median and the maximum over all processes, given what ``Stages.to_json`` returned in each.

    A stage that has not ended in some process is left out: the median over some processes would look like the median
    over all.
    """
    read = [json.loads(text) for text in all_stages]
    return {
        stage: StageTiming(
            p50_s=round(statistics.median(times), 4),
            max_s=round(max(times), 4),
        )
        for stage in STAGES
        if len(times := [found[stage] for found in read if stage in found]) == len(read)
    }


def lacking(all_stages: Sequence[str], processes: Sequence[int]) -> str:
    """Returns what the parts of these processes lack, in words. Empty if nothing lacks."""
    found = {process: json.loads(text).get("without") for process, text in zip(processes, all_stages, strict=True)}
    texts = [f"process {process} {text}" if len(found) > 1 else text for process, text in found.items() if text]
    more = f"; and {len(texts) - _SHOWN} more processes" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


class EpochProgress:
    """What this process knows about one epoch. It is reported as it becomes known.

    The threads that ``observer`` and ``outcome`` name write here, each its own stages. ``progress`` is replaced as a
    whole.

    Args:
        number: The epoch's number. -1 if the preemption ends before the processes could agree.
        drill: True if the preemption is only rehearsed.
        stages: When each stage ended in this process.
        mailbox: Names the notice that is reported on.
        reporter: Sends the reports.
        substitute: Has the end reported if process 0 does not run. None: there are no other processes.

    Attributes:
        number: As given.
        drill: As given.
        stages: As given.
        progress: What reports say beside the phase, as far as it is known.
        doubt: Why the save will probably not be done in time. Empty if nothing says so.
        waits_at: Key of the barrier at which training waits for the other processes. None while it does not wait.
        plan: What all processes chose to do at the agreed sync point. None before they have chosen.
    """

    def __init__(
        self,
        number: int,
        drill: bool,
        stages: Stages,
        mailbox: Mailbox,
        reporter: Reporter,
        substitute: Substitute | None = None,
    ) -> None:
        self.number = number
        self.drill = drill
        self.stages = stages
        self.doubt = ""
        self.waits_at: str | None = None
        self.plan: Plan | None = None
        self.progress = Progress()
        self._mailbox = mailbox
        self._reporter = reporter
        self._substitute = substitute
        self._phase: Phase | None = None
        self._ending = threading.Lock()
        self._ended = False  # the outcome is known
        self._told = False  # the end was reported; until then, an outcome that is known has phases to report

    def report(self, phase: Phase, **changes: Any) -> None:
        """Reports that the epoch has reached this phase; ``changes`` are fields of ``Progress``.

        After the end, which another thread may have reported meanwhile, nothing is reported.
        """
        known = {"stages": self.stages.own(), "message": self.doubt, **changes}
        about = self._mailbox.current_drill if self.drill else self._mailbox.current
        with self._ending:
            if self._told:
                return
            self._told = phase.ended
            self.progress = reached = dataclasses.replace(self.progress, **known)
            self._phase = phase
            self._account(phase)
            self._reporter.report(phase, reached, about)

        def report_alone(reason: str) -> None:
            told = dataclasses.replace(reached, message=f"{reached.message}; {reason}")
            self._reporter.report(phase, told, about, alone=True)

        if self._substitute is not None and phase.ended:
            self._substitute.ended(self.number)
            if phase in _ENDS:
                self._substitute.report(self.number, report_alone)

    def _account(self, phase: Phase) -> None:
        """Notes when the save stops the training, and when it is over. A failure may be reported by any thread."""
        time_spent, step = self._reporter.time_spent, self.progress.step
        promotes = self.plan is not None and self.plan.choice is Choice.PROMOTE
        if phase is Phase.DRAINED or (phase is Phase.AGREED and promotes):
            time_spent.stops(step)
        elif phase.ended and self.drill:
            time_spent.goes_on()
        elif phase.ended:
            time_spent.left()

    def note(self) -> str:
        """Returns what is saved with the step, so that the next start can say for which preemption it was saved."""
        about = self._mailbox.current_drill if self.drill else self._mailbox.current
        return self._reporter.note(about, leaves=not self.drill)

    def chose(self, plan: Plan) -> None:
        """Notes what all processes have chosen to do. The next report says so."""
        self.plan = plan
        self.progress = dataclasses.replace(self.progress, choice=str(plan.choice), choice_reason=plan.reason)

    def has_doubt(self, doubt: str) -> None:
        """Reports at once, or with the first report, that the save will probably not be done in time."""
        self.doubt = doubt
        if self._phase is not None:
            self.report(self._phase)

    def with_doubt(self, reason: str) -> str:
        """Returns the reason of an end, together with the doubt that was known before."""
        return f"{reason} ({self.doubt})" if self.doubt else reason

    @property
    def ended(self) -> bool:
        """True once the step is committed, or a failure or the end is reported."""
        return self._ended

    def succeeded(self) -> None:
        """Notes that the step is committed: what fails from now on is no failure of the save."""
        with self._ending:
            self._ended = True

    def told(self) -> None:
        """Notes that there is nothing to save, which is reported otherwise: nothing more is reported here."""
        with self._ending:
            self._ended = self._told = True

    def fail_first(self) -> bool:
        """Returns True to the first caller only, and only before ``succeeded``. The first reported outcome wins."""
        with self._ending:
            first, self._ended = not self._ended, True
        return first
