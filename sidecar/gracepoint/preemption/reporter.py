"""Reports to the operator, by one process for all, and to the log of every process.

Any thread may call everything here: it builds a message and puts it into the sender's queue. Without an operator (on a
laptop) only the log is written. ``EpochProgress`` is how far the open epoch is: when each stage ended, in this process
and over all of them, and what was reported.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gracepoint import trace
from gracepoint.deadline import Choice, Plan
from gracepoint.errors import WireError
from gracepoint.preemption.forecast import Figures
from gracepoint.preemption.substitute import Substitute
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Disruption, Mailbox, Sender
from gracepoint.settings import Settings
from gracepoint.wire.messages import (
    Forecast,
    Phase,
    Report,
    Resumption,
    SavedFor,
    SnapshotReport,
    StageTiming,
    Stall,
    Trouble,
    TroubleKind,
)
from gracepoint.wire.names import SAVE_AUTO

logger = logging.getLogger(__name__)

#: How long a message is tried that is not about an open preemption.
_UNHURRIED_S = 60.0
#: How long after the deadline a report is still tried: the pod may live longer than announced.
_AFTER_DEADLINE_S = 5.0
#: How long ``flush`` waits in a process that has sent no report: its acknowledgement may still be held back.
_RECEIPT_S = 1.0
#: Seconds between two reports on snapshots at least.
_BETWEEN_SNAPSHOTS_S = 10.0
#: A stall names this many processes, and this much of a stack.
_SUSPECTS = 100
_STACK_CHARACTERS = 3000
_MESSAGE_CHARACTERS = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What a report says next to its phase; see ``wire.messages.Report``. None if it is not known yet."""

    ordinal: int | None = None
    step: int | None = None
    steps_lost: int | None = None
    bytes: int | None = None
    seconds_to_spare: float | None = None
    stages: dict[str, StageTiming] = dataclasses.field(default_factory=dict)
    message: str = ""
    choice: str | None = None
    choice_reason: str = ""


class Reporter:
    """Sends the reports of all processes if this is the primary process, and logs them in any case.

    Args:
        sender: Sends messages to the operator. None if there is no operator.
        settings: Say which pod this is.
        session: The session's nonce.
        gang: The processes that train together. Process 0 is the primary process.
        mailbox: Says how long a report is worth sending.
        time_spent: What the time of this process goes into. It is part of all messages except stalls.
        stalled_s: Returns the seconds since the newest step was passed if training stalls. None: it does not.

    Attributes:
        session: As given.
        time_spent: As given.
        stalled_s: As given.
    """

    def __init__(
        self,
        sender: Sender | None,
        settings: Settings,
        session: str,
        gang: ProcessGroup,
        mailbox: Mailbox,
        time_spent: TimeSpent,
        stalled_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._sender = sender
        self._is_primary = gang.process_index == 0
        self._spoke = self._is_primary
        self._settings = settings
        self.session = session
        self._gang = gang
        self._mailbox = mailbox
        self.time_spent = time_spent
        self.stalled_s = stalled_s
        self._saved_for: SavedFor | None = None  # for which preemption the restored step was saved
        self._snapshots_at_s = -math.inf  # when the last report on snapshots was sent, or is going to be

    def report(self, phase: Phase, progress: Progress, about: Disruption | None, *, alone: bool = False) -> None:
        """Reports that the preemption has reached a phase.

        Args:
            phase: How far the preemption is.
            progress: What is known about it.
            about: The notice that the report is about. None if there is none.
            alone: True if this process reports even if it is not the primary one, as no other process does.
        """
        preemption, cause = (about.preemption, about.cause) if about else ("", "")
        trace.moment(f"preemption: {phase}", step=progress.step)
        fields = {
            "preemption": preemption,
            "cause": cause,
            "choice": progress.choice,
            "ordinal": progress.ordinal,
            "step": progress.step,
            "bytes": progress.bytes,
            "seconds_to_spare": progress.seconds_to_spare,
            "message": progress.message,
        }
        text = " ".join(f"{name}={value}" for name, value in fields.items() if value not in (None, ""))
        logger.info("preemption phase=%s %s", phase, text)
        if self._sender is None or not (self._is_primary or alone):
            return
        self._spoke = True
        remaining_s = self._mailbox.remaining_s()
        message = Report(
            pod_uid=self._settings.pod_uid or "",
            session=self.session,
            workload_uid=self._settings.jobset_uid or "",
            preemption=preemption,
            phase=phase,
            cause=cause,
            process_count=self._gang.process_count,
            participants=list(range(self._gang.process_count)),
            ordinal=progress.ordinal,
            step=progress.step,
            steps_lost=progress.steps_lost,
            bytes=progress.bytes,
            seconds_to_spare=progress.seconds_to_spare,
            stages=progress.stages,
            message=progress.message,
            choice=progress.choice,
            choice_reason=progress.choice_reason,
            spent=self.time_spent.spent(),
        )
        left_s = remaining_s + _AFTER_DEADLINE_S if math.isfinite(remaining_s) else _UNHURRIED_S
        self._sender.send(message, within_s=left_s)

    def forecast(self, figures: Figures, margin: float, step: int, saved_step: int | None) -> None:
        """Reports what an emergency save would take now, at this step, and that ``saved_step`` is committed."""
        self.time_spent.passed(step)
        if saved_step is not None:
            self.time_spent.committed(saved_step)
        logger.info(
            "forecast state_bytes=%d step_s=%.4f drain_s=%.4f save_s=%.4f",
            figures.state_bytes,
            figures.step_s,
            figures.drain_s,
            figures.save_s,
        )
        if self._sender is not None and self._is_primary:
            message = Forecast(
                pod_uid=self._settings.pod_uid or "",
                session=self.session,
                workload_uid=self._settings.jobset_uid or "",
                state_bytes=figures.state_bytes,
                step_s=figures.step_s,
                drain_s=figures.drain_s,
                save_s=figures.save_s,
                margin=margin,
                spent=self.time_spent.spent(),
                takes_interval=self._settings.save_interval == SAVE_AUTO,
                send_s=figures.send_s,
            )
            self._sender.send(message, within_s=_UNHURRIED_S)

    def follow_interval(self, follow: Callable[[float], None]) -> None:
        """Has ``follow`` called, by another thread, with the seconds between two saves that the operator suggests."""
        if self._sender is not None:
            self._sender.on_interval = follow

    def note(self, about: Disruption | None, *, leaves: bool) -> str:
        """Returns the note of a step that is saved now for a preemption; see ``wire.messages.SavedFor``.

        Args:
            about: The notice for which it is saved. None if there is none.
            leaves: True if training ends here, False if it continues.
        """
        spent = self.time_spent.spent()
        return SavedFor(
            preemption=about.preemption if about else "",
            session=self.session,
            restart_attempt=self._settings.restart_attempt,
            spent=dataclasses.replace(spent, left_s=spent.now_s) if leaves else spent,
        ).to_json()

    def resumption(
        self, restored_step: int | None, *, training: bool, note: str | None = None, from_memory: bool = False
    ) -> None:
        """Reports that the state is restored, or that training continues from it.

        Args:
            restored_step: The step that was restored. None: there was no checkpoint.
            training: False after the restore, True after the first step.
            note: What ``note`` returned when the step was saved. None: there is none, or it was told before.
            from_memory: Whether the step came from the memory of nodes.
        """
        if note is not None:
            try:
                self._saved_for = SavedFor.from_json(note)
            except WireError as error:  # a newer library wrote it
                logger.warning("it is not known for which preemption the step was saved error=%s", error)
        if training:
            self.time_spent.trains()
        else:
            self.time_spent.restored(restored_step)
        logger.info("resumed restored_step=%s training=%s", restored_step, training)
        if self._sender is not None and self._is_primary:
            message = Resumption(
                pod_uid=self._settings.pod_uid or "",
                session=self.session,
                workload_uid=self._settings.jobset_uid or "",
                restart_attempt=self._settings.restart_attempt,
                restored_step=restored_step,
                training=training,
                age_s=0.0,
                spent=self.time_spent.spent(),
                saved_for=self._saved_for,
                from_memory=from_memory,
            )
            self._sender.send(message, within_s=_UNHURRIED_S)

    def own_loop(self, step: int) -> None:
        """Reports that a loop trains, which saves by its own means. ``step`` is the first one that it has passed."""
        self.time_spent.trains(step)
        self.resumption(None, training=True)

    def stall(
        self,
        stage: str,
        step: int,
        for_s: float,
        suspects: Sequence[int],
        message: str,
        stack: str,
        pods: Sequence[str] = (),
    ) -> None:
        """Reports that the processes make no progress, by whichever process finds that out.

        Args:
            stage: What this process does, as text.
            step: The step that this process has reached.
            for_s: Seconds for which it has made no progress.
            suspects: The processes that hold up the others.
            message: Why they are suspected.
            stack: Where the first of them is.
            pods: Names of their pods, as far as they are known.
        """
        logger.error(
            "stall stage=%s step=%d seconds=%.0f suspects=%s message=%s", stage, step, for_s, suspects, message
        )
        self._send_stall(stage, step, message, for_s, suspects, stack, pods)

    def stall_over(self, stage: str, step: int) -> None:
        """Reports that there is progress again, by the process that reported the stall.

        Args:
            stage: The part of this process that was stalled.
            step: The step that this process has reached.
        """
        logger.warning("stall is over stage=%s step=%d", stage, step)
        self._send_stall(stage, step, "there is progress again", over=True)

    def _send_stall(
        self,
        stage: str,
        step: int,
        message: str,
        for_s: float = 0.0,
        suspects: Sequence[int] = (),
        stack: str = "",
        pods: Sequence[str] = (),
        *,
        over: bool = False,
    ) -> None:
        if self._sender is not None:
            stall = Stall(
                pod_uid=self._settings.pod_uid or "",
                session=self.session,
                workload_uid=self._settings.jobset_uid or "",
                over=over,
                stage=stage,
                step=step,
                for_s=for_s,
                suspects=list(suspects[:_SUSPECTS]),
                message=message,
                stack=stack[-_STACK_CHARACTERS:],
                pods=list(pods),
            )
            self._sender.send(stall, within_s=_UNHURRIED_S)

    def trouble(
        self,
        kind: TroubleKind,
        message: str,
        *,
        over: bool = False,
        for_s: float = 0.0,
        times: int = 0,
        left_s: float | None = None,
    ) -> None:
        """Reports what goes wrong without ending the training; see ``wire.messages.Trouble``. The caller logs it."""
        if self._sender is not None and self._is_primary:
            trouble = Trouble(
                pod_uid=self._settings.pod_uid or "",
                session=self.session,
                workload_uid=self._settings.jobset_uid or "",
                kind=kind,
                over=over,
                for_s=for_s,
                times=times,
                left_s=left_s,
                message=message[:_MESSAGE_CHARACTERS],
            )
            self._sender.send(trouble, within_s=_UNHURRIED_S)

    def snapshots(
        self,
        *,
        safe_step: int | None,
        copies: int,
        age_s: float | None,
        interval_s: float | None,
        skipped: int,
        skipped_reason: str,
        size_bytes: int,
        servers: Sequence[str],
    ) -> None:
        """Reports what snapshots there are of this process; see ``wire.messages.SnapshotReport``.

        To be called at every change, by one thread at a time. What comes soon after a report takes the place of what
        waits, and is sent together.
        """
        if self._sender is None:
            return
        report = SnapshotReport(
            pod_uid=self._settings.pod_uid or "",
            session=self.session,
            workload_uid=self._settings.jobset_uid or "",
            process_index=self._gang.process_index,
            safe_step=safe_step,
            copies=copies,
            age_s=age_s,
            interval_s=interval_s,
            skipped=skipped,
            skipped_reason=skipped_reason[:_MESSAGE_CHARACTERS],
            bytes=size_bytes,
            servers=list(servers),
        )
        now_s = time.monotonic()
        if now_s > self._snapshots_at_s:  # none waits
            self._snapshots_at_s = max(now_s, self._snapshots_at_s + _BETWEEN_SNAPSHOTS_S)
        self._sender.send(report, within_s=_UNHURRIED_S, after_s=max(0.0, self._snapshots_at_s - now_s))

    def flush(self, timeout_s: float) -> None:
        """Waits until the operator has all messages, for ``timeout_s`` at most."""
        if self._sender is None:
            return
        wait_s = timeout_s if self._spoke else min(timeout_s, _RECEIPT_S)
        if not self._sender.flush(wait_s) and self._spoke:
            logger.warning("could not send everything to the operator waited_s=%g", wait_s)


#: In the order in which they come. A step is evacuated, or written and all that follows.
STAGES = ("frozen", "agreed", "drained", "evacuated", "written", "durable", "committed")
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
        without: What is not saved of this process's part though the save continues, as text. Empty if nothing lacks.
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
        if len(times := [stages[stage] for stages in read if stage in stages]) == len(read)
    }


def lacking(all_stages: Sequence[str], processes: Sequence[int]) -> str:
    """Returns what the parts of these processes lack, as text. Empty if nothing lacks."""
    lacks = {process: json.loads(text).get("without") for process, text in zip(processes, all_stages, strict=True)}
    texts = [f"process {process} {text}" if len(lacks) > 1 else text for process, text in lacks.items() if text]
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
        progress: What reports say next to the phase, as far as it is known.
        doubt: Why the save will probably not be done in time. Empty if nothing says so.
        waits_at: Key of the barrier at which training waits for the other processes. None while it does not wait.
        plan: What all processes chose to do at the agreed sync point. None before they have chosen.
        alone: Whether this process reports though it is not process 0, which is known not to answer.
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
        self.alone = False
        self.progress = Progress()
        self._mailbox = mailbox
        self._reporter = reporter
        self._substitute = substitute
        self._phase: Phase | None = None
        self._ending = threading.Lock()
        self._ended = False  # the outcome is known
        self._saves = False  # a save of this library has stopped the training
        self._is_over = False  # the end was reported; until then, an outcome that is known has phases to report

    def report(self, phase: Phase, **changes: Any) -> None:
        """Reports that the epoch has reached this phase; ``changes`` are fields of ``Progress``.

        After the end, which another thread may have reported meanwhile, nothing is reported.
        """
        fields = {"stages": self.stages.own(), "message": self.doubt, **changes}
        about = self._mailbox.current_drill if self.drill else self._mailbox.current
        with self._ending:
            if self._is_over:
                return
            self._is_over = phase.ended
            self.progress = reached = dataclasses.replace(self.progress, **fields)
            self._phase = phase
            self._account(phase)
            self._reporter.report(phase, reached, about, alone=self.alone)

        def report_alone(reason: str) -> None:
            message = dataclasses.replace(reached, message=f"{reached.message}; {reason}")
            self._reporter.report(phase, message, about, alone=True)

        if self._substitute is not None and phase.ended:
            self._substitute.ended(self.number)
            if phase in _ENDS:
                self._substitute.report(self.number, report_alone)

    def _account(self, phase: Phase) -> None:
        """Notes when the save stops the training, and when it is over. A failure may be reported by any thread.

        If no save stopped it, such as when another process was lost before, it may have ended long before the epoch.
        """
        time_spent, step = self._reporter.time_spent, self.progress.step
        promotes = self.plan is not None and self.plan.choice is Choice.PROMOTE
        if phase is Phase.DRAINED or (phase is Phase.AGREED and promotes):
            self._saves = True
            time_spent.stops(step)
        elif phase.ended and self.drill:
            time_spent.goes_on()
        elif phase.ended:
            until_now = self._saves or phase is Phase.COMMITTED  # by the loop's own save
            time_spent.left(None if until_now else self._reporter.stalled_s())

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

    def nothing_to_save(self) -> None:
        """Notes that there is nothing to save, which is reported otherwise: nothing more is reported here."""
        with self._ending:
            self._ended = self._is_over = True

    def fail_first(self) -> bool:
        """Returns True to the first caller only, and only before ``succeeded``. The first reported outcome wins."""
        with self._ending:
            first, self._ended = not self._ended, True
        return first
