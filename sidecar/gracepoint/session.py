"""What a training loop holds.

``attach`` joins the cluster, brings the processes together and opens a ``Session``, which owns every thread of
the library: the agreement's (``multihost.agreement``), the receivers' (``receivers``) and the watchdog's
(``leaving``). All methods of ``Session`` belong to the training thread and are collective: every process makes
the same calls in the same order. ``close`` ends all threads; if the process ends without it, an exit handler does,
and tells the others that this process broke off.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import gracepoint
from gracepoint.emergency import Emergency, call_everybody
from gracepoint.errors import AgreementError, CheckpointMismatch, Preempted, SettingsError
from gracepoint.forecast import Pace, figures
from gracepoint.leaving import Leaving
from gracepoint.multihost import Agreement, Meeting, initialize, meet, raise_jax_notice
from gracepoint.receivers import Mailbox, Operator, SigtermReceiver
from gracepoint.reporting import Reporter
from gracepoint.runahead import RunAhead
from gracepoint.settings import Settings
from gracepoint.wire.names import Env

if TYPE_CHECKING:
    from gracepoint.checkpoint import Checkpointer

log = logging.getLogger(__name__)

#: Where a single process without any setting keeps its checkpoints, below the current folder.
LOCAL_DIRECTORY = "gracepoint-checkpoints"
_CHECK_TIMEOUT_S = 60.0
_RESTORE_TIMEOUT_S = 3600.0
_CLOSE_TIMEOUT_S = 600.0
_ABANDON_TIMEOUT_S = 10.0
_FLUSH_S = 3.0

_open: Session | None = None


def attach(
    directory: str | os.PathLike[str] | None = None,
    *,
    save_every_steps: int | None = None,
    keep_last: int | None = None,
    saved_exit_code: int | None = None,
    unsaved_exit_code: int | None = None,
    grace_period_s: float | None = None,
    margin: float | None = None,
) -> Session:
    """Joins the training processes and starts to listen for preemptions. Collective.

    Every argument overrides what the policy (through the environment) says. Joins the JAX cluster unless it is
    initialised already, and initialises JAX's backend.

    Args:
        directory: Path or ``file://`` URI below which the steps are kept, the same storage for all processes.
        save_every_steps: Periodic saves; 0 for none.
        keep_last: How many committed steps are kept.
        saved_exit_code: With which the process ends after an emergency save.
        unsaved_exit_code: With which it ends if the save failed.
        grace_period_s: How long the pod lives after a SIGTERM.
        margin: Factor on predicted durations.

    Raises:
        SettingsError: A setting is missing, unknown or wrong, or a session is open already.
        CheckpointError: The directory cannot be written to, or is not the same storage for all processes.
        BarrierTimeout: A process did not come.
    """
    if _open is not None:
        raise SettingsError("attach(): a session is open in this process; close() it first")
    settings = Settings.from_environment(os.environ).override(
        directory=None if directory is None else os.fspath(directory),
        save_every_steps=save_every_steps,
        keep_last=keep_last,
        saved_exit_code=saved_exit_code,
        unsaved_exit_code=unsaved_exit_code,
        grace_period_s=grace_period_s,
        margin=margin,
    )
    initialize(settings)
    meeting = meet(settings)
    where = _directory(settings, meeting.gang.process_count)
    from gracepoint.checkpoint import Checkpointer

    checkpointer = Checkpointer(
        where, gang=meeting.gang, attempt=meeting.attempt, keep_last=settings.keep_last, clock=time.monotonic
    )
    checkpointer.check_shared(timeout_s=_CHECK_TIMEOUT_S)
    log.info(
        "attached process=%d of=%d attempt=%s directory=%s",
        meeting.gang.process_index,
        meeting.gang.process_count,
        meeting.attempt,
        where,
    )
    return Session(settings, meeting, checkpointer, clock=time.monotonic)


class Session:
    """A training run's connection to Gracepoint; made by ``attach``."""

    def __init__(
        self,
        settings: Settings,
        meeting: Meeting,
        checkpointer: Checkpointer,
        *,
        clock: Callable[[], float],
    ) -> None:
        global _open
        self._settings = settings
        self._checkpointer = checkpointer
        self._clock = clock
        self._host_state: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._began = False  # restore or step was called
        self._closed = False
        self._preempted: Preempted | None = None  # what was raised
        self._step = 0
        self._restored_step: int | None = None
        self._state_bytes: int | None = None
        self._run_ahead = RunAhead()
        self._pace = Pace()
        self._forecast_of: object = None  # the save that the last forecast was made of
        self._forecast_made = False
        self._pid = os.getpid()
        self.nonce = secrets.token_hex(8)

        gang = meeting.gang
        self._process_count = gang.process_count
        self._mailbox = Mailbox(clock)
        self._operator = Operator.known_to(settings, clock)
        sender = self._operator.sender if self._operator else None
        self._reporter = Reporter(sender, settings, self.nonce, gang, self._mailbox)
        self._emergency = Emergency(gang, settings, self._mailbox, self._reporter, clock)
        self._leaving = Leaving(
            meeting.store,
            meeting.me.service_id,
            gang.process_count,
            clock=clock,
            on_overdue=self._emergency.overdue,
        )
        self._emergency.leave_by(self._leaving)
        self._agreement = Agreement(meeting.store, gang, self._emergency)
        self._mailbox.listen(call_everybody(self._agreement))
        client = meeting.client
        self._sigterm = SigtermReceiver(
            self._mailbox,
            settings.grace_period_s,
            on_signal=lambda: None if client is None else raise_jax_notice(client),
        )
        self._sigterm.install()
        if self._operator is not None:
            self._operator.subscribe(self.nonce, gang, self._mailbox, gracepoint.__version__)
        atexit.register(self._at_exit)
        _open = self

    def host_state(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        """Registers per-process state that is no array of the train state: a data iterator, a host's RNG.

        Args:
            name: The item's name in the checkpoint.
            get: Returns the state as of now: JSON values, numpy arrays, bytes. Called at each save.
            set: Takes such a value; called by ``restore``.

        Raises:
            SettingsError: The name is taken, or ``restore`` or ``step`` was called before.
        """
        if name in self._host_state:
            raise SettingsError(f"host_state({name!r}): registered before")
        if self._began:
            raise SettingsError(f"host_state({name!r}): must be registered before restore() and step()")
        self._host_state[name] = (get, set)

    def restore(self, like: Any) -> tuple[Any, int]:
        """Restores the newest complete step that all processes see.

        Args:
            like: A train state with the tree, shapes, dtypes and shardings that are wanted.

        Returns:
            The state and its step; ``(like, 0)`` and a log line when there is no checkpoint yet.

        Raises:
            CheckpointError: One is there that cannot be read, or does not fit.
        """
        self._began = True
        restored = self._checkpointer.restore(like, timeout_s=_RESTORE_TIMEOUT_S)
        if restored is None:
            log.warning("no checkpoint was restored, training begins at step 0")
            self._reporter.resumption(None, training=False)
            return like, 0
        missing = sorted(self._host_state.keys() - restored.host_state.keys())
        if missing:
            raise CheckpointMismatch(
                f"host_state {missing[0]!r} is not in the checkpoint of step {restored.step}, which has "
                f"{sorted(restored.host_state) or 'none'}: register the names that it was saved with"
            )
        for name in sorted(restored.host_state.keys() - self._host_state.keys()):
            log.warning("a host_state of the checkpoint is not registered and was dropped name=%s", name)
        for name, (_, set_value) in self._host_state.items():
            set_value(restored.host_state[name])
        self._step = self._restored_step = restored.step
        log.info("restored step=%d", restored.step)
        self._reporter.resumption(restored.step, training=False)
        return restored.state, restored.step

    def step(self, step: int, state: Any) -> None:
        """A step is done: the sync point. Call it after every step, with the same number in all processes.

        Waits for older steps so that at most two are in flight. Saves if it is time; returns when the state
        may be donated.

        Args:
            step: How many steps ``state`` has seen.
            state: The train state after that step.

        Raises:
            Preempted: This was the agreed point: the state is saved (or ``saved`` is False and ``reason`` says
                why not), and the process is to end now.
            CheckpointError: The periodic save before this one failed.
            SettingsError: ``step`` is no step's number, or the session is closed.
        """
        if self._closed:
            raise self._after_the_end()
        first = self._state_bytes is None
        self._began = True
        self._step = _checked(step)
        self._throttle(state)
        self._pace.passed(self._clock())
        self._sync_point(state)
        if first:
            self._state_bytes = self._checkpointer.prepare(state, in_background=self._settings.save_every_steps > 0)
            self._reporter.resumption(self._restored_step, training=True)
        every = self._settings.save_every_steps
        if every and self._step % every == 0:
            self._checkpointer.save_in_background(self._step, state, self._gather_host_state())
        self._forecast()

    def poll(self, state: Any) -> None:
        """A sync point that is no step (an evaluation loop): saves at the last step's number if it is time.

        Raises:
            Preempted: As ``step``.
        """
        if self._closed:
            raise self._after_the_end()
        self._sync_point(state)

    def close(self) -> None:
        """Training is finished: the last sync point. Waits for a save that is under way. Safe to repeat.

        Raises:
            CheckpointError: A background save failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            over = self._finish()
            self._checkpointer.close(_CLOSE_TIMEOUT_S)
            if self._agreement.in_epoch and not over:  # it was opened after this process had passed its last sync point
                self._emergency.over()
        finally:
            self._end_threads()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, Preempted):
            self._break_off(f"{type(error).__name__}: {error}")

    def _finish(self) -> bool:
        """Passes the last sync point; True if that ended a preemption."""
        try:
            over = self._agreement.finish()
        except AgreementError as error:
            # Some process is gone in the middle of a preemption. This one has nothing left to lose.
            log.warning("training finished during a preemption without agreement error=%s", error)
            over = True
        if over:
            self._emergency.over()
        return over

    def _after_the_end(self) -> BaseException:
        """Code that swallowed ``Preempted`` gets it again: the process is to end."""
        return self._preempted or SettingsError("the session is closed: call step() and poll() before close()")

    def _throttle(self, state: Any) -> None:
        try:
            self._run_ahead.throttle(state)
        except RuntimeError as error:
            if not self._agreement.in_epoch:
                raise
            # A collective broke in the middle of a preemption: a peer is gone already.
            raise self._leave_unsaved(error) from error

    def _leave_unsaved(self, error: Exception) -> Preempted:
        self._closed = True  # all that is left to do is to leave
        self._preempted = self._emergency.failed(self._step, error, self._steps_at_risk())
        self._agreement.tell_gone(str(error))
        return self._preempted

    def _sync_point(self, state: Any) -> None:
        try:
            agreed = self._agreement.arrive()
        except AgreementError as error:
            raise self._leave_unsaved(error) from error
        if agreed:
            self._closed = True
            self._run_ahead.forget()
            self._preempted = self._emergency.save(
                self._checkpointer, self._agreement, self._step, state, self._gather_host_state
            )
            raise self._preempted

    def _gather_host_state(self) -> dict[str, Any]:
        return {name: get() for name, (get, _) in self._host_state.items()}

    def _steps_at_risk(self) -> int | None:
        """Steps since what is committed; None where nothing is known to be."""
        last = self._checkpointer.last_save
        saved = last.step if last is not None else self._restored_step
        return None if saved is None else self._step - saved

    def _forecast(self) -> None:
        """After the first steps, and after each save that was measured."""
        last = self._checkpointer.last_save
        if self._state_bytes is None or not self._pace.known:
            return
        if self._forecast_made and last is self._forecast_of:
            return
        self._forecast_made, self._forecast_of = True, last
        count = self._process_count
        self._reporter.forecast(figures(self._pace, self._state_bytes, count, last), self._settings.margin)

    def _break_off(self, reason: str) -> None:
        """Ends the session; the error that is on its way is not masked, and waits for a save under way at most."""
        if self._closed:
            return
        self._closed = True
        self._agreement.abandon(reason)
        self._checkpointer.abandon(reason, timeout_s=_ABANDON_TIMEOUT_S)
        self._end_threads()

    def _end_threads(self) -> None:
        global _open
        _open = None
        atexit.unregister(self._at_exit)
        self._run_ahead.forget()
        self._agreement.close()
        if self._operator is not None:
            self._operator.stop_listening()
        self._sigterm.close()
        self._leaving.cancel()
        self._reporter.flush(_FLUSH_S)
        if self._operator is not None:
            self._operator.close()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child that ends says nothing of its parent
        self._leaving.leave()  # does not return after a preemption
        self._break_off("the process ended without close()")


def _checked(step: Any) -> int:
    """The step as a plain integer: one of numpy's or JAX's could be neither compared nor written in time."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise SettingsError(f"step(): expected how many steps the state has seen, an integer from 0, found {step!r}")
    return number


def _directory(settings: Settings, process_count: int) -> str:
    if settings.directory is not None:
        is_uri = "://" in settings.directory
        return settings.directory if is_uri else str(Path(settings.directory).absolute())
    if process_count > 1:
        raise SettingsError(
            f"{Env.DIRECTORY}: expected a path or file:// URI on storage that all {process_count} processes share, "
            f"found none. Set it in the policy, or call attach(directory)"
        )
    where = str(Path.cwd() / LOCAL_DIRECTORY)
    log.warning("no directory was given, checkpoints go below the current one directory=%s", where)
    return where
