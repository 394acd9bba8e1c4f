"""The agreed sync point: all processes meet, choose what to save, save it, and report. Runs in the training thread.

If a snapshot could be saved in place of the current step, or there are snapshot servers, the processes meet: each sends
its ``Situation``, and all choose alike by that (``deadline.plan``). Otherwise there is nothing to choose, and each
begins to save separately. If a part of the step goes to no snapshot server, all choose once more, without these.

Every wait for other processes ends at the deadline, even if the deadline moves to an earlier time meanwhile:
``EpochProgress.waits_at`` names the barrier, and ``PreemptionObserver.looked`` cancels it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gracepoint.deadline import (
    Choice,
    Deadline,
    Plan,
    Situation,
    SnapshotState,
    kept_s,
    merged,
    must_choose,
    plan,
)
from gracepoint.errors import BarrierError, GracepointError, HostStateLost, Preempted, SaveFailed
from gracepoint.multihost import Agreement
from gracepoint.preemption.forecast import Forecaster
from gracepoint.preemption.outcome import Outcome, Shared
from gracepoint.preemption.reporter import lacking, summary
from gracepoint.wire.messages import Phase

if TYPE_CHECKING:
    from gracepoint.checkpoint.engine import StepCheckpointer

logger = logging.getLogger(__name__)

_FLUSH_S = 3.0
_GATHER_S = 3.0
#: With fewer seconds left, nothing is begun in place of an evacuation that failed.
_BEGUN_S = 0.5
#: Stages are reported over at most so many processes, evenly spread.
_STAGES_OF = 32


class EmergencySave:
    """Saves at the agreed sync point, and reports.

    Args:
        shared: What the parts of a preemption share.
        checkpointer: The checkpoint engine.
        outcome: Holds the open epoch, and ends it if the step is not saved.
        agreement: Compares the steps of all processes.
        forecaster: Predicts durations.
    """

    def __init__(
        self,
        shared: Shared,
        checkpointer: StepCheckpointer,
        outcome: Outcome,
        agreement: Agreement,
        forecaster: Forecaster,
    ) -> None:
        self._gang = shared.gang
        self._code = shared.settings.saved_exit_code
        self._node = shared.settings.node_name
        self._mailbox = shared.mailbox
        self._budget = shared.budget
        self._reporter = shared.reporter
        self._checkpointer = checkpointer
        self._outcome = outcome
        self._agreement = agreement
        self._forecaster = forecaster
        self._everywhere: Situation | None = None  # of all processes at the agreed point; None: they did not meet

    def save(
        self, step: int, state: Any, host_state: Callable[[], Mapping[str, Any]], reason: str = ""
    ) -> Preempted | None:
        """Saves what there is time for. Never raises.

        Args:
            step: This process's step.
            state: The train state of that step. The devices may still be computing it.
            host_state: Returns the per-process state that is not in ``state``. A ``HostStateLost`` stands for a value
                that cannot be had: the step is saved without it, and the report says so.
            reason: Why this step is saved, for the report. Empty if all processes had agreed on it.

        Returns:
            What to raise. None after a drill.
        """
        epoch, checkpointer = self._outcome.epoch, self._checkpointer
        try:
            chosen, values = self._choose(step), None
            if chosen.choice is Choice.EVACUATE:
                with self._failing(functools.partial(self._gang.fail, self._key("evacuated"))):
                    values = self._drain(step, state, host_state)
                sent = self._evacuate(step, state, values)
                if not sent.error:
                    return self._committed(step, step, sent.bytes, reason, sent.copies)
                chosen = self._choose_instead(sent)
            if chosen.choice is Choice.PROMOTE:
                with self._waiting_to_commit() as on_stage:
                    saved = checkpointer.promote(deadline=self._budget.deadline(), on_stage=on_stage)
            else:
                if chosen.choice is Choice.CANCEL_AND_SAVE:
                    checkpointer.executor.stop(chosen.reason)
                if values is None:
                    with self._failing(functools.partial(checkpointer.refuse, step)):
                        values = self._drain(step, state, host_state)
                deadline, note = self._budget.deadline(), epoch.note()
                with self._waiting_to_commit() as on_stage:
                    saved = checkpointer.save(step, state, values, deadline=deadline, on_stage=on_stage, note=note)
        except Exception as error:  # noqa: BLE001 - the process exits whatever the error is, and reports it
            return self._outcome.failed(step, error)
        return self._committed(step, saved.step, saved.bytes, reason)

    def meet(self, step: int, message: str = "", merge: Callable[[list[str]], str] = lambda messages: "") -> str | None:
        """Waits for the other processes, and returns what the last of them merged from the texts of all.

        Returns None at once if the processes need not meet.

        Raises:
            AgreementError: As ``Agreement.confirm``.
            BarrierError: As ``Agreement.confirm``.
        """
        with self._waiting_at(self._agreement.steps_key) as deadline:
            return self._agreement.confirm(step, message, merge, deadline=deadline)

    def _choose(self, step: int) -> Plan:
        """Returns the choice of all processes."""
        snapshot = self._checkpointer.newest_snapshot
        memory = self._checkpointer.memory
        evacuation = None if memory is None else memory.evacuation(self._mailbox.leaving(self._node))
        own = self._forecaster.situation(step, self._budget.time_left_s(), snapshot, evacuation)
        together = self.meet(step, own.to_json(), _merged)
        if together is not None:
            self._everywhere = everywhere = Situation.from_json(together)
            chosen, stops = plan(everywhere), self._stops(everywhere)
        else:
            # All save the current step. A save that was begun after the freeze began is stopped first, in all of them.
            chosen, stops = plan(dataclasses.replace(own, snapshot=None, evacuation=None)), must_choose(snapshot)
        chosen = self._chose(chosen, stops=stops)
        if chosen.choice is not Choice.SAVE_NOW:  # else the next stage's report, which comes at once, says it
            self._outcome.epoch.report(Phase.AGREED)
        return chosen

    def _choose_instead(self, sent: _Sent) -> Plan:
        """Returns what all processes do after some part of the step could not be sent, in the time that is left.

        Raises:
            SaveFailed: There is hardly any.
        """
        assert self._everywhere is not None  # else it was not sent
        if sent.left_s < _BEGUN_S:
            raise SaveFailed(f"the step was not sent to snapshot servers: {sent.error}")
        now = dataclasses.replace(self._everywhere, evacuation=None, left_s=sent.left_s, drain_s=0.0)
        instead = plan(now)
        instead = dataclasses.replace(instead, reason=f"{sent.error}; {instead.reason}")
        return self._chose(instead, stops=self._stops(now))

    def _stops(self, everywhere: Situation) -> bool:
        """Whether a save has failed in another process, and this one may still write its part of it."""
        newest = everywhere.snapshot
        is_gone = newest is not None and newest.state is SnapshotState.GONE
        return is_gone and must_choose(self._checkpointer.newest_snapshot)

    def _chose(self, chosen: Plan, *, stops: bool) -> Plan:
        if stops and chosen.choice is not Choice.EVACUATE:
            chosen = dataclasses.replace(chosen, choice=Choice.CANCEL_AND_SAVE)
        self._outcome.epoch.chose(chosen)
        logger.warning("chosen choice=%s step=%d reason=%s", chosen.choice, chosen.step, chosen.reason)
        return chosen

    def saved(self, step: int) -> Preempted | None:
        """Waits until the training loops of all processes have saved this step by their own means.

        Returns:
            What to raise. None after a drill.
        """
        key = self._key("saved")
        try:
            with self._waiting_at(key) as deadline:
                self._gang.barrier(key, timeout_s=deadline.remaining_s())
        except BarrierError as error:
            return self._outcome.failed(step, error)
        for stage in ("drained", "written", "durable", "committed"):
            self._outcome.epoch.stages.mark(stage)
        return self._committed(step, step, None)

    def _evacuate(self, step: int, state: Any, values: Mapping[str, Any]) -> _Sent:
        """Has the parts of all processes in the memory of nodes that stay, or says in all why one is not there."""
        memory, key = self._checkpointer.memory, self._key("evacuated")
        assert memory is not None  # else it is not chosen
        assert self._everywhere is not None
        leaving = self._mailbox.leaving(self._node)
        deadline = self._budget.deadline(kept_s(self._everywhere, _BEGUN_S))  # as a server may hang
        copies, part_bytes, error = 0, 0, ""
        try:
            own = memory.send_now(step, state, values, deadline=deadline, leaving=leaving)
            copies, part_bytes = own.copies, own.part_bytes
        except Exception as failure:  # whatever it is, storage or an older step is left
            error = f"process {self._gang.process_index}: {failure}"
            logger.error("the step goes to no snapshot server: %s", failure, exc_info=failure)
        is_safe = False
        try:
            with self._waiting_at(key) as deadline:
                word = _Sent(copies, part_bytes, self._budget.time_left_s(), error).to_json()
                sent = _Sent.from_json(self._gang.reduce(key, word, _sent_by_all, timeout_s=deadline.remaining_s()))
            is_safe = not sent.error
        finally:
            if self._outcome.epoch.drill:
                memory.make_room(is_safe=is_safe)
        if is_safe:
            self._outcome.epoch.stages.mark("evacuated")
        return sent

    def _drain(self, step: int, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Waits until the devices are done, and reports it. Returns the host state."""
        import jax

        epoch = self._outcome.epoch
        jax.block_until_ready(state)
        values = host_state()
        epoch.stages.without = _lost(values)
        epoch.stages.mark("drained")
        epoch.report(Phase.DRAINED, step=step)
        return values

    @contextlib.contextmanager
    def _failing(self, fail: Callable[[Exception], None]) -> Iterator[None]:
        """Tells the other processes of an error, so that they do not wait for this one until the deadline."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(GracepointError):
                fail(error)
            raise

    def _committed(
        self, current: int, step: int, written_bytes: int | None, cause: str = "", copies: int | None = None
    ) -> Preempted | None:
        """Reports that a step is committed; or, if ``copies`` says in how many servers, that it is safe in memory."""
        epoch = self._outcome.epoch
        epoch.succeeded()
        self._outcome.exit_with(self._code)
        spare_s, steps_lost = round(self._mailbox.remaining_s(), 3), current - step
        when = f"{abs(spare_s):.1f} s {'before' if spare_s >= 0 else 'after'} the deadline"
        where = "committed" if copies is None else f"safe in snapshot servers ({copies} copies)"
        reason = f"{'drill: ' if epoch.drill else ''}step {step} is {where}, {when}"
        if copies is not None and not epoch.drill:
            reason = f"{reason}: the next start restores it from there, and saves it to storage"
        if steps_lost > 0 and epoch.plan is not None:
            reason = f"{reason}, in place of step {current}: {epoch.plan.reason}"
        if cause:
            reason = f"{reason}; {cause}"
        if spare_s < 0:
            reason = epoch.with_doubt(reason)
        # The commit proves that the step is written and durable in all processes. Until then each knew only of itself.
        stages, without = self._gathered()
        if without:
            reason = f"{reason}; {without}"
        figures = {"step": step, "bytes": written_bytes, "stages": stages}
        if copies is None:
            epoch.report(Phase.WRITTEN, **figures)
            epoch.report(Phase.DURABLE, stages=stages)
        end = Phase.EVACUATED if copies is not None else Phase.PROMOTED if steps_lost > 0 else Phase.COMMITTED
        epoch.report(end, **figures, steps_lost=steps_lost, seconds_to_spare=spare_s, message=reason)
        logger.warning(
            "preempted saved=True drill=%s step=%d steps_lost=%d seconds_to_spare=%.1f%s",
            epoch.drill,
            step,
            steps_lost,
            spare_s,
            f" {without}" if without else "",
        )
        if epoch.drill:
            return None
        self._reporter.flush(min(_FLUSH_S, max(0.0, self._budget.time_left_s())))
        return Preempted(self._code, saved=True, step=step, reason=reason, steps_lost=steps_lost)

    def _gathered(self) -> tuple[dict[str, Any], str]:
        """Returns the stages over some processes, and what their parts lack, as text.

        Of this process alone if a peer is gone: the save is committed.
        """
        own = self._outcome.epoch.stages
        count = self._gang.process_count
        some = range(0, count, -(-count // _STAGES_OF))
        if self._gang.process_index not in some:
            return own.own(), own.without
        wait_s = min(_GATHER_S, self._budget.deadline().remaining_s())
        try:
            answers = self._gang.gather(self._key("stages"), own.to_json(), timeout_s=wait_s, processes=some)
        except BarrierError as error:
            logger.warning("stages of this process only error=%s", error)
            return own.own(), own.without
        return summary(answers), lacking(answers, some)

    @contextlib.contextmanager
    def _waiting_at(self, key: str) -> Iterator[Deadline]:
        """Gives the deadline of a barrier. ``PreemptionObserver.looked`` cancels the barrier if the deadline moves."""
        epoch = self._outcome.epoch
        epoch.waits_at = key
        try:
            yield self._budget.deadline()
        finally:
            epoch.waits_at = None

    @contextlib.contextmanager
    def _waiting_to_commit(self) -> Iterator[Callable[[str], None]]:
        """Gives ``on_stage`` of a save. After "durable" the save waits for the other processes."""
        epoch = self._outcome.epoch

        def on_stage(stage: str) -> None:
            epoch.stages.mark(stage)
            if stage == "durable":
                epoch.waits_at = self._checkpointer.executor.commit_key

        try:
            yield on_stage
        finally:
            epoch.waits_at = None

    def _key(self, stage: str) -> str:
        return f"epoch/{self._outcome.epoch.number}/{stage}"


@dataclasses.dataclass(frozen=True)
class _Sent:
    """What was sent to snapshot servers, by one process or by all.

    Attributes:
        copies: In how many servers each part is, at least.
        bytes: Bytes of the parts.
        left_s: Seconds that are left.
        error: Why a part is in none. Empty: all are there.
    """

    copies: int
    bytes: int
    left_s: float
    error: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def from_json(cls, text: str) -> _Sent:
        return cls(*json.loads(text))


def _sent_by_all(texts: list[str]) -> str:
    parts = [_Sent.from_json(text) for text in texts]
    return _Sent(
        copies=min(part.copies for part in parts),
        bytes=sum(part.bytes for part in parts),
        left_s=min(part.left_s for part in parts),
        error=next((part.error for part in parts if part.error), ""),
    ).to_json()


def _lost(values: Mapping[str, Any]) -> str:
    """Returns which values of the host state are lost, as text. Empty if none is."""
    lost = [f"{name!r} ({value})" for name, value in values.items() if isinstance(value, HostStateLost)]
    return f"WITHOUT host_state {', '.join(lost)}" if lost else ""


def _merged(situations: list[str]) -> str:
    return merged([Situation.from_json(text) for text in situations]).to_json()
