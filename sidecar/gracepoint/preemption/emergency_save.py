"""The agreed sync point: all processes meet, choose, save and say how it went. The training thread's part.

When they meet each tells the others what it knows, and all choose alike by it (``deadline_plan``). What waits for
other processes then is given up when the time is over, also if the deadline has moved meanwhile: by
``Emergency.looked``, which finds in the account what is waited at.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from gracepoint.deadline_plan import Choice, NewestSnapshot, Plan, Situation, merged, plan
from gracepoint.errors import BarrierError, GracepointError, Preempted
from gracepoint.multihost import Agreement
from gracepoint.preemption.emergency import Emergency
from gracepoint.preemption.forecast import Forecaster
from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.stages import summary
from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Mailbox
from gracepoint.settings import Settings
from gracepoint.wire.messages import Phase

log = logging.getLogger(__name__)

_FLUSH_S = 3.0
_GATHER_S = 3.0


class StepSaver(Protocol):
    """The part of the checkpoint engine that an emergency needs."""

    def save(
        self,
        step: int,
        state: Any,
        host_state: Mapping[str, Any],
        *,
        timeout_s: Callable[[], float],
        on_stage: Callable[[str], None],
    ) -> Any:
        """Saves and commits; the result has ``step``, and ``bytes`` over all processes."""

    def promote(self, *, timeout_s: Callable[[], float], on_stage: Callable[[str], None]) -> Any:
        """Commits the newest snapshot; the result is like that of ``save``."""

    def stop(self, reason: str) -> None:
        """Stops the background save under way."""

    @property
    def newest_snapshot(self) -> NewestSnapshot | None:
        """What host memory holds beside the state itself."""

    @property
    def commit_key(self) -> str | None:
        """The barrier at which ``save`` or ``promote`` waits for the other processes."""


class EmergencySave:
    """See the module.

    Args:
        gang: The processes.
        settings: The exit code.
        mailbox: Says how much time there was to spare.
        reporter: Whom to tell.
        emergency: What is known, and who decides the end.
        agreement: To hold the steps of all processes against each other.
        forecaster: What is known of durations.
    """

    def __init__(
        self,
        gang: ProcessGroup,
        settings: Settings,
        mailbox: Mailbox,
        reporter: Reporter,
        emergency: Emergency,
        agreement: Agreement,
        forecaster: Forecaster,
    ) -> None:
        self._gang = gang
        self._code = settings.saved_exit_code
        self._mailbox = mailbox
        self._reporter = reporter
        self._emergency = emergency
        self._agreement = agreement
        self._forecaster = forecaster

    def save(
        self, saver: StepSaver, step: int, state: Any, host_state: Callable[[], Mapping[str, Any]]
    ) -> Preempted | None:
        """Saves what there is time for and returns what to raise, None after a drill; never raises by itself.

        Args:
            saver: The checkpoint engine.
            step: This process's step.
            state: The train state of that step, perhaps still being computed.
            host_state: Gives the state that is no array.
        """
        epoch = self._emergency.epoch
        try:
            situation = self._forecaster.situation(step, self._emergency.time_left_s(), saver.newest_snapshot)
            chosen = self._choose(self.meet(step, situation.to_json()))
            if chosen.choice is Choice.PROMOTE:
                with self._waiting_to_commit(saver) as on_stage:
                    saved = saver.promote(timeout_s=self._wait_s, on_stage=on_stage)
            else:
                if chosen.choice is Choice.CANCEL_AND_SAVE:
                    saver.stop(chosen.reason)
                values = self._drain(state, host_state)
                epoch.stages.mark("drained")
                epoch.report(Phase.DRAINED, step=step)
                with self._waiting_to_commit(saver) as on_stage:
                    saved = saver.save(step, state, values, timeout_s=self._wait_s, on_stage=on_stage)
        except Exception as error:  # noqa: BLE001 - whatever it is, the process leaves, and says why
            return self._emergency.failed(step, error)
        return self._committed(step, saved.step, saved.bytes)

    def meet(self, step: int, word: str = "") -> list[str]:
        """Waits for the others; returns every process's word.

        Raises:
            AgreementError: As ``Agreement.confirm``.
            BarrierError: As ``Agreement.confirm``.
        """
        with self._waiting_at(self._agreement.steps_key) as timeout_s:
            return self._agreement.confirm(step, word, timeout_s=timeout_s)

    def _choose(self, situations: Sequence[str]) -> Plan:
        epoch = self._emergency.epoch
        chosen = plan(merged([Situation.from_json(text) for text in situations]))
        epoch.chose(chosen)
        log.warning("chosen choice=%s step=%d reason=%s", chosen.choice, chosen.step, chosen.reason)
        if chosen.choice is not Choice.SAVE_NOW:  # that is told with the next stage, in a moment
            epoch.report(Phase.AGREED)
        return chosen

    def saved(self, step: int) -> Preempted | None:
        """The callers of all processes have saved; returns what to raise, None after a drill."""
        key = self._key("saved")
        try:
            with self._waiting_at(key) as timeout_s:
                self._gang.barrier(key, timeout_s=timeout_s)
        except BarrierError as error:
            return self._emergency.failed(step, error)
        for stage in ("drained", "written", "durable", "committed"):
            self._emergency.epoch.stages.mark(stage)
        return self._committed(step, step, None)

    def _drain(self, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Waits until the devices of all processes are done; one that fails lets the others wait no longer."""
        import jax

        key = self._key("drained")
        try:
            jax.block_until_ready(state)
            values = host_state()
        except Exception as error:
            with contextlib.suppress(GracepointError):  # the error itself says more
                self._gang.fail(key, error)
            raise
        with self._waiting_at(key) as timeout_s:
            self._gang.barrier(key, timeout_s=timeout_s)
        return values

    def _committed(self, current: int, step: int, written_bytes: int | None) -> Preempted | None:
        epoch = self._emergency.epoch
        epoch.succeeded()
        self._emergency.decide(self._code)
        spare_s, lost = round(self._mailbox.remaining_s(), 3), current - step
        when = f"{abs(spare_s):.1f} s {'before' if spare_s >= 0 else 'after'} the deadline"
        reason = f"{'drill: ' if epoch.drill else ''}step {step} is committed, {when}"
        if lost > 0 and epoch.plan is not None:
            reason = f"{reason}, in place of step {current}: {epoch.plan.reason}"
        if spare_s < 0:
            reason = epoch.with_doubt(reason)
        # That the step is committed says of all processes what was known before of this one only.
        stages = self._gathered()
        epoch.report(Phase.WRITTEN, step=step, bytes=written_bytes, stages=stages)
        epoch.report(Phase.DURABLE, stages=stages)
        end = Phase.PROMOTED if lost > 0 else Phase.COMMITTED
        epoch.report(end, steps_lost=lost, seconds_to_spare=spare_s, stages=stages, message=reason)
        log.warning(
            "preempted saved=True drill=%s step=%d steps_lost=%d seconds_to_spare=%.1f",
            epoch.drill,
            step,
            lost,
            spare_s,
        )
        if epoch.drill:
            return None
        self._reporter.flush(min(_FLUSH_S, max(0.0, self._emergency.time_left_s())))
        return Preempted(self._code, saved=True, step=step, reason=reason, steps_lost=lost)

    def _gathered(self) -> dict[str, Any]:
        """The stages of all processes; of this one alone if a process is gone by now (the save is committed)."""
        own = self._emergency.epoch.stages
        wait_s = max(0.001, min(_GATHER_S, self._emergency.time_left_s()))
        try:
            return summary(self._gang.gather(self._key("stages"), own.to_json(), timeout_s=wait_s))
        except BarrierError as error:
            log.warning("stages of this process only error=%s", error)
            return own.own()

    @contextlib.contextmanager
    def _waiting_at(self, key: str) -> Iterator[float]:
        """Gives the seconds to wait at a barrier, which ``Emergency.looked`` ends if the deadline moves meanwhile."""
        epoch = self._emergency.epoch
        epoch.waits_at = key
        try:
            yield self._wait_s()
        finally:
            epoch.waits_at = None

    @contextlib.contextmanager
    def _waiting_to_commit(self, saver: StepSaver) -> Iterator[Callable[[str], None]]:
        """Gives what takes the stages of a save, after whose second one the others are waited for."""
        epoch = self._emergency.epoch

        def on_stage(stage: str) -> None:
            epoch.stages.mark(stage)
            if stage == "durable":
                epoch.waits_at = saver.commit_key

        try:
            yield on_stage
        finally:
            epoch.waits_at = None

    def _wait_s(self) -> float:
        return max(0.001, self._emergency.time_left_s())

    def _key(self, what: str) -> str:
        return f"epoch/{self._emergency.epoch.number}/{what}"
