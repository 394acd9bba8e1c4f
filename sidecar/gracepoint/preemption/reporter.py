"""What one process tells the operator for the whole gang, and every process its log.

Everything here may be called from any thread: it builds a message and hands it to the sender's queue. Without
an operator (a laptop) only the log remains.
"""

from __future__ import annotations

import dataclasses
import logging
import math

from gracepoint.preemption.forecast import Figures
from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Disruption, Mailbox, Sender
from gracepoint.settings import Settings
from gracepoint.wire.messages import Forecast, Phase, Report, Resumption, StageTiming

log = logging.getLogger(__name__)

#: For word that is not about a preemption that is going on.
_UNHURRIED_S = 60.0
#: A report is still tried this long after the deadline: the pod may live on, and the word is worth it.
_AFTER_DEADLINE_S = 5.0
#: For the receipt of a process that has nothing else to say: it may still be held back.
_RECEIPT_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What a report says beside its phase; what is not known yet is None."""

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
    """Speaks for the gang where this process is to do so, and for itself in the log.

    Args:
        sender: To the operator; None without one.
        settings: Who this pod is.
        session: The session's nonce.
        gang: Process 0 is the primary.
        mailbox: Tells how long word counts.
    """

    def __init__(
        self, sender: Sender | None, settings: Settings, session: str, gang: ProcessGroup, mailbox: Mailbox
    ) -> None:
        self._sender = sender
        self._is_primary = gang.process_index == 0
        self._spoke = self._is_primary
        self._settings = settings
        self._session = session
        self._gang = gang
        self._mailbox = mailbox

    def report(self, phase: Phase, progress: Progress, about: Disruption | None, *, alone: bool = False) -> None:
        """The preemption has come this far.

        Args:
            phase: How far.
            progress: What is known.
            about: The notice that is spoken of.
            alone: This process speaks, also if it is not the primary one, as no other can or will.
        """
        preemption, cause = (about.preemption, about.cause) if about else ("", "")
        log.info(
            "preemption phase=%s preemption=%s cause=%s choice=%s ordinal=%s step=%s bytes=%s seconds_to_spare=%s "
            "message=%s",
            phase,
            preemption,
            cause,
            progress.choice,
            progress.ordinal,
            progress.step,
            progress.bytes,
            progress.seconds_to_spare,
            progress.message,
        )
        if self._sender is None or not (self._is_primary or alone):
            return
        self._spoke = True
        remaining_s = self._mailbox.remaining_s()
        message = Report(
            pod_uid=self._settings.pod_uid or "",
            session=self._session,
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
        )
        left_s = remaining_s + _AFTER_DEADLINE_S if math.isfinite(remaining_s) else _UNHURRIED_S
        self._sender.send(message, within_s=left_s)

    def forecast(self, figures: Figures, margin: float) -> None:
        """An emergency would take this much now."""
        log.info(
            "forecast state_bytes=%d step_s=%.4f drain_s=%.4f save_s=%.4f",
            figures.state_bytes,
            figures.step_s,
            figures.drain_s,
            figures.save_s,
        )
        if self._sender is not None and self._is_primary:
            message = Forecast(
                pod_uid=self._settings.pod_uid or "",
                session=self._session,
                workload_uid=self._settings.jobset_uid or "",
                state_bytes=figures.state_bytes,
                step_s=figures.step_s,
                drain_s=figures.drain_s,
                save_s=figures.save_s,
                margin=margin,
            )
            self._sender.send(message, within_s=_UNHURRIED_S)

    def resumption(self, restored_step: int | None, *, training: bool) -> None:
        """The state is restored, or training goes on from it."""
        log.info("resumed restored_step=%s training=%s", restored_step, training)
        if self._sender is not None and self._is_primary:
            message = Resumption(
                pod_uid=self._settings.pod_uid or "",
                session=self._session,
                workload_uid=self._settings.jobset_uid or "",
                restart_attempt=self._settings.restart_attempt,
                restored_step=restored_step,
                training=training,
                age_s=0.0,
            )
            self._sender.send(message, within_s=_UNHURRIED_S)

    def flush(self, timeout_s: float) -> None:
        """Waits until the operator has everything, bounded."""
        if self._sender is None:
            return
        wait_s = timeout_s if self._spoke else min(timeout_s, _RECEIPT_S)
        if not self._sender.flush(wait_s) and self._spoke:
            log.warning("the operator was not told everything waited_s=%g", wait_s)
