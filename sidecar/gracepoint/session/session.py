"""What a training loop holds.

``Session`` owns every thread of the library: the agreement's (``multihost.agreement``), the receivers'
(``listening``) and the watchdog's (``leaving``). All methods of ``Session`` belong to the training thread and are
collective: every process makes the same calls in the same order. ``close`` ends all threads; if the process ends
without it, an exit handler does, and tells the others that this process broke off.

The sync points are ``step``, ``poll`` and ``reached_preemption``. They may be passed at every step or at every k-th,
as long as all processes do so alike; a preemption can be acted upon at the next one and not before.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gracepoint.errors import AgreementError, Preempted, SettingsError
from gracepoint.multihost import Meeting
from gracepoint.multihost.current import set_reached_preemption_hook
from gracepoint.preemption.coordinator import Coordinator
from gracepoint.preemption.forecast import Forecaster
from gracepoint.preemption.run_ahead import RunAhead
from gracepoint.session.host_states import HostStates
from gracepoint.session.periodic_saves import PeriodicSaves
from gracepoint.session.sync_points import SyncPoints
from gracepoint.settings import Settings

if TYPE_CHECKING:
    from gracepoint.checkpoint import SingleReplica
    from gracepoint.checkpoint.step_checkpointer import StepCheckpointer

log = logging.getLogger(__name__)

_RESTORE_TIMEOUT_S = 3600.0
_CLOSE_TIMEOUT_S = 600.0
_ABANDON_TIMEOUT_S = 10.0
#: What Python ends with after an exception that nobody caught.
_UNCAUGHT_CODE = 1

_open: Session | None = None


def is_open() -> bool:
    """True while a session is open in this process."""
    return _open is not None


class Session:
    """A training run's connection to Gracepoint; made by ``attach``."""

    def __init__(
        self,
        settings: Settings,
        meeting: Meeting,
        checkpointer: StepCheckpointer,
        directory: str,
        *,
        clock: Callable[[], float],
    ) -> None:
        global _open
        self._checkpointer = checkpointer
        self._values = HostStates()
        self._began = False  # restore or a sync point was called
        self._run_ahead = RunAhead()
        throughput = checkpointer.throughput
        self._forecaster = Forecaster(meeting.gang.process_count, throughput, settings.margin, clock)
        self._pid = os.getpid()
        self.nonce = secrets.token_hex(8)
        standby = Coordinator(settings, meeting, self.nonce, self._forecaster, clock)
        self._standby = standby
        self._saves = PeriodicSaves(checkpointer, directory, standby.agreement, standby.outlook)
        self._points = SyncPoints(standby.agreement, standby.saving, standby.emergency, self._steps_at_risk)
        standby.emergency.look_for_commits(lambda: checkpointer.committed_step, lambda: self._points.step)
        atexit.register(self._at_exit)
        set_reached_preemption_hook(self.reached_preemption)
        _open = self

    def host_state(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], None],
        reshard: Callable[[Sequence[Any], int, int], Any] | None = None,
    ) -> None:
        """Registers per-process state that is no array of the train state: a data iterator, a host's RNG.

        Args:
            name: The item's name in the checkpoint.
            get: Returns the state as of now: JSON values, numpy arrays, bytes. Called at each save.
            set: Takes such a value; called by ``restore``.
            reshard: Called in place of taking this process's own value where the checkpoint was made by another
                number of processes: with the values of all of them, this process's index and the number of
                processes; returns this process's value. Without it such a checkpoint is not restored.

        Raises:
            SettingsError: The name is taken, or ``restore`` or a sync point was called before.
        """
        if self._began:
            raise SettingsError(f"host_state({name!r}): must be registered before restore() and step()")
        self._values.register(name, get, set, reshard)

    def restore(
        self,
        like: Any = None,
        *,
        init: Callable[[], Any] | None = None,
        single_replica: bool | SingleReplica = False,
        donate: bool = True,
    ) -> tuple[Any, int]:
        """Restores the newest complete step that all processes see, or begins at step 0.

        The devices never hold two states: ``init`` is called only where there is no checkpoint, and the arrays of
        ``like`` are deleted before what replaces them is read.

        Args:
            like: A train state with the tree, shapes, dtypes and shardings that are wanted. If a checkpoint is
                restored, its arrays are deleted; arrays that are used elsewhere, too, must not be in it. In their
                place it may have ``jax.ShapeDtypeStruct`` with a sharding. None: as ``init`` makes it.
            init: Makes the state of step 0. Without ``like`` it is a function compiled with ``out_shardings``, as
                ``jax.eval_shape`` must tell the shardings; with ``like``, any function that makes such a state.
            single_replica: For jobs of several slices: one of them reads what is replicated over all, and hands it to
                the others over the devices' network. True: the slices are the first axis of the mesh; a
                ``gracepoint.checkpoint.SingleReplica`` names another. Arrays that are not replicated so are read
                by all that need them.
            donate: False leaves the arrays of ``like`` alone: the devices then hold both.

        Returns:
            The state and its step; where there is no checkpoint yet, ``(init(), 0)`` or ``(like, 0)`` and a log line.

        Raises:
            CheckpointError: A checkpoint is there that cannot be read, or does not fit. A note on it says whether the
                arrays of ``like`` are deleted.
            CheckpointNotFound: None is there, ``like`` has no values, and there is no ``init``.
            InvalidSharding: With these shardings no array can be read by one replica for all.
            SettingsError: The arguments contradict each other, or ``init`` does not tell the shardings.
        """
        from gracepoint.checkpoint.loading import start_state

        self._began = True
        asked = start_state.asked(like, init, single_replica, donate=donate)
        with asked.telling():
            restored = self._checkpointer.restore(
                asked.like,
                timeout_s=_RESTORE_TIMEOUT_S,
                restore_args=asked.restore_args,
                options=asked.options,
                reshard=self._values.reshard,
            )
            if restored is not None:
                self._values.set(restored.host_state, restored.step)
        if restored is None:
            log.warning("no checkpoint was restored, training begins at step 0")
            state = asked.first_state()
            self._standby.reporter.resumption(None, training=False)
            return state, 0
        self._points.step = self._saves.restored_step = restored.step
        log.info("restored step=%d", restored.step)
        self._standby.reporter.resumption(restored.step, training=False)
        return restored.state, restored.step

    def step(self, step: int, state: Any) -> None:
        """A step is done: a sync point. Call it after every step (or every k-th), alike in all processes.

        Waits for older steps so that at most two are in flight, and one where steps take a second or longer. Saves if
        it is time; returns when the state may be donated.

        Args:
            step: How many steps ``state`` has seen.
            state: The train state after that step.

        Raises:
            Preempted: This was the agreed point: the state is saved (or ``saved`` is False and ``reason`` says
                why not), and the process is to end now.
            CheckpointError: The periodic save before this one failed; or this is the first step, ``restore`` was
                not called, and the directory has a step that is as new or newer.
            AgreementError: A periodic save is due, and another process is at another step; names both.
            SettingsError: ``step`` is no step's number, or the session is closed.
        """
        number = self._points.begin(step)
        if not self._began:
            self._saves.check_that_nothing_newer_is_there(number)
        self._began = True
        self._points.step = number
        self._throttle(state)
        self._forecaster.passed()
        self._save_if_agreed(state)
        if not self._forecaster.prepared:
            total_bytes = self._checkpointer.prepare(state, in_background=self._checkpointer.save_interval.periodic)
            self._forecaster.prepare(total_bytes)
            self._standby.reporter.resumption(self._saves.restored_step, training=True)
        if self._standby.hints.due():
            self._checkpointer.hasten()
        self._saves.save_if_due(number, state, self._values.get)
        if (figures := self._forecaster.news(self._checkpointer.executor.last_save)) is not None:
            self._standby.reporter.forecast(figures, self._forecaster.margin)

    def poll(self, state: Any) -> None:
        """A sync point that is no step (an evaluation loop): saves at the last step's number if it is time.

        Raises:
            Preempted: As ``step``.
        """
        self._points.begin(self._points.step)
        self._save_if_agreed(state)

    def reached_preemption(self, step: int) -> bool:
        """A sync point of a loop that saves by its own means, in the place of ``step``.

            if session.reached_preemption(step):
                manager.save(step, ...); manager.wait_until_finished()
                session.saved(step)  # ends the process; returns only after a drill

        Asked again at the step at which it said True, it says so again and is no other sync point. It knows no state,
        so it does not keep the host from running ahead of its devices: the caller's save waits for them. How long that
        takes is not known either, so a preemption is acted upon as soon as it is noticed.

        Returns:
            True in all processes at the same step: save it now, then call ``saved``.

        Raises:
            Preempted: There is no agreement, or training went on without ``saved``.
            SettingsError: ``step`` is no step's number, or the session is closed.
        """
        if self._points.asked is not None and self._points.asked == step:
            return True
        number = self._points.begin(step)
        self._began = True
        if number != self._points.step:
            self._forecaster.passed()
        self._points.step = number
        return self._points.ask()

    def saved(self, step: int) -> None:
        """The caller has saved what ``reached_preemption`` asked for. Collective; ends the process.

        After a drill it returns, and training goes on. A process that leaves in another way than by this call
        reports that nothing was saved, and ends with that exit code.

        Raises:
            Preempted: The step is committed in all processes, and the process is to end now. Or ``saved`` is False:
                a process did not say so in time.
            SettingsError: ``reached_preemption`` did not say True at this step.
        """
        self._points.saved(step)

    def close(self) -> None:
        """Training is finished: the last sync point. Waits for a save that is under way. Safe to repeat.

        Raises:
            CheckpointError: A background save failed.
            Preempted: ``reached_preemption`` said that it is time, and ``saved`` was not called.
        """
        if self._points.closed:
            return
        self._points.settle("the session was closed")
        self._points.closed = True
        try:
            self._finish()
            self._checkpointer.close(_CLOSE_TIMEOUT_S)
        finally:
            self._end_threads(well=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, Preempted):
            self._break_off(f"{type(error).__name__}: {error}")

    # Within sync points.

    def _throttle(self, state: Any) -> None:
        try:
            self._run_ahead.throttle(state, self._forecaster.run_ahead)
        except RuntimeError as error:
            if self._standby.mailbox.current is None:
                raise
            # A collective broke in the middle of a preemption: a peer is gone already.
            if not self._standby.agreement.in_epoch or self._standby.emergency.drill:
                self._standby.emergency.begin_without_agreement()
            self._points.not_saved(error)

    def _save_if_agreed(self, state: Any) -> None:
        if self._points.arrive():
            self._run_ahead.forget()
            save = self._standby.saving.save
            self._points.end_epoch(save(self._checkpointer, self._points.step, state, self._values.get))

    def _steps_at_risk(self) -> int | None:
        return self._saves.steps_at_risk(self._points.step)

    # The end of the session.

    def _finish(self) -> None:
        try:
            over = self._standby.agreement.finish()
        except AgreementError as error:
            # Some process is gone in the middle of a preemption. This one has nothing left to lose.
            log.warning("training finished during a preemption without agreement error=%s", error)
            over = True
        if over:
            self._standby.emergency.over()

    def _break_off(self, reason: str) -> None:
        """Ends the session; the error that is on its way is not masked, and waits for a save under way at most."""
        if self._points.closed:
            return
        self._points.closed = True
        if self._points.asked is not None:  # then it is the preemption that the process ends for
            error = AgreementError(f"{reason}, without saved({self._points.asked})")
            self._standby.emergency.failed(self._points.asked, error, self._steps_at_risk())
        self._standby.agreement.abandon(reason)
        self._checkpointer.abandon(reason, timeout_s=_ABANDON_TIMEOUT_S)
        self._end_threads(well=False)

    def _end_threads(self, *, well: bool) -> None:
        global _open
        _open = None
        set_reached_preemption_hook(None)
        self._run_ahead.forget()
        if self._standby.end(well=well):
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child that ends says nothing of its parent
        self._break_off("the process ended without close()")
        self._standby.leaving.leave()  # does not return after a preemption
        if getattr(sys, "last_value", None) is not None:  # an exception that nobody caught
            self._standby.leaving.hurry(_UNCAUGHT_CODE)
