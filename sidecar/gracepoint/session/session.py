"""The session: what a training loop holds.

All methods of ``Session`` belong to the training thread and are collective: every process makes the same calls in the
same order. The ``Coordinator`` and its threads do everything about preemptions. ``close`` ends all threads. If the
process exits without ``close``, an exit handler ends them, and notifies the other processes that this one broke off.

The sync points are ``step``, ``poll`` and ``reached_preemption``. A loop may pass them at every step or at every k-th,
as long as all processes do so alike. A preemption is acted upon at the next sync point and not before.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gracepoint import machine, trace
from gracepoint.arguments import check_state, shown, step_number
from gracepoint.checkpoint.storage import undeleted
from gracepoint.errors import AgreementError, GracepointError, Preempted, SettingsError, StorageAway
from gracepoint.multihost import Meeting
from gracepoint.multihost.rendezvous import not_joined
from gracepoint.multihost.utilities import set_reached_preemption_hook
from gracepoint.preemption.coordinator import ActiveNotice, Coordinator
from gracepoint.preemption.time_spent import ProcessStart, TimeSpent
from gracepoint.receivers import Receiver
from gracepoint.session.compilation import Compilations, CompiledFunction, ProgramWatch
from gracepoint.session.periodic_saves import PeriodicSaves, PeriodicSnapshots
from gracepoint.session.starting_point import RESTORE_TIMEOUT_S, DataIterator, HostStates, RestoredFrom, start_from
from gracepoint.session.sync_points import LastState, RunAhead, SyncPoints
from gracepoint.settings import Settings
from gracepoint.threads import check_not_forked, forget_in_child, is_forked
from gracepoint.wire.messages import TroubleKind

if TYPE_CHECKING:
    from gracepoint.checkpoint import RestoreOptions, SingleReplica
    from gracepoint.checkpoint.engine import StepCheckpointer
    from gracepoint.checkpoint.storage.locations import UserPath

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 600.0
_ABANDON_TIMEOUT_S = 10.0
#: Seconds for the file of the saves' speed at the exit. It only helps to plan: no exit waits for slow storage.
_THROUGHPUT_S = 0.5
#: Seconds for each host state after a step in a preemption, for the case that the next one breaks off.
_KEPT_WITHIN_S = 0.3

_open: Session | None = None


def check_none_is_open() -> None:
    """Checks that this process may open a session.

    Raises:
        Preempted: The process is to exit. It is raised again, as the training loop swallowed it.
        SettingsError: A session is open.
    """
    if _open is None or not _open.is_of_this_process:
        return
    if _open.preempted is not None:
        logger.error("attach() was called after Preempted: the process is to exit, and only its next start attaches")
        raise _open.preempted
    raise SettingsError("attach(): a session is open in this process; close() it first")


def _how_it_ended() -> tuple[str, BaseException | None]:
    """Returns, at the interpreter's end, why a session that was not closed breaks off."""
    error = getattr(sys, "last_value", None)
    after = "" if error is None else f" after {type(error).__name__}: {error}"
    return f"the process ended without close(){after}", error


@functools.cache
def _watch_the_end() -> None:
    """Has the open session saved, if there is a preemption, while the interpreter that ends still starts threads.

    Python calls ``atexit``'s functions later. ``concurrent.futures`` does the same, and its function comes after ours.
    """
    import concurrent.futures.thread  # noqa: F401

    def save() -> None:
        if _open is not None:
            _open._main_thread_ends()  # noqa: SLF001  of this module

    getattr(threading, "_register_atexit", lambda function: None)(save)


@contextlib.contextmanager
def not_joined_if_away(settings: Settings) -> Iterator[None]:
    """Ends the processes of a job by the exit code for it if the storage is away: the program has not failed."""
    try:
        yield
    except StorageAway as error:
        if settings.pod_name is None:
            raise
        raise not_joined(str(error), settings.not_joined_exit_code) from error


class Session:
    """A training run's connection to Gracepoint; made by ``attach``.

    Attributes:
        restored: What ``restore`` has restored. None before that, and if there was nothing to restore.
    """

    restored: RestoredFrom | None = None

    def __init__(
        self,
        settings: Settings,
        meeting: Meeting,
        checkpointer: StepCheckpointer,
        *,
        clock: Callable[[], float],
        programs: ProgramWatch,
        start: ProcessStart | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        global _open
        self._settings = settings
        self._programs = programs
        self._checkpointer = checkpointer
        self._values = HostStates()
        self._began = False  # restore or a sync point was called
        self._own_loop = False  # reached_preemption was called
        self._tried_last = False
        self._process_count = meeting.gang.process_count
        self._pid = machine.process_id()
        self._run_ahead = RunAhead(clock)
        self._last = LastState(self._host_state_now, self._is_pressing, self._may_others_break_off, clock)
        self._coordinator = Coordinator(
            settings,
            meeting,
            checkpointer,
            self._last,
            clock=clock,
            time_spent=TimeSpent(clock, start, lambda: programs.programs.newest_s),
            receiver=receiver,
        )
        self._forecaster = self._coordinator.forecaster
        self._hints = self._coordinator.hints
        self.nonce = self._coordinator.reporter.session
        self._compilations = Compilations(self._coordinator.activities.at, programs)
        self._saves = PeriodicSaves(
            checkpointer, self._coordinator, tolerate_s=settings.tolerate_failures_s, clock=clock
        )
        memory = checkpointer.memory
        self._snapshots = None if memory is None else PeriodicSnapshots(memory, self._coordinator, clock)
        self._points = SyncPoints(self._coordinator, self._saves.steps_at_risk, self.own_save_took, clock)
        undeleted.listen(self._tell_undeleted)
        atexit.register(self._at_exit)
        _watch_the_end()
        forget_in_child(self, Session._forget)
        set_reached_preemption_hook(self.reached_preemption)
        _open = self

    def host_state(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], None],
        reshard: Callable[[Sequence[Any], int, int], Any] | None = None,
        missing: Callable[[int], None] | None = None,
    ) -> None:
        """Registers per-process state that is not in the train state, such as a data iterator or a host's RNG.

        Args:
            name: The item's name in the checkpoint.
            get: Returns the current value: JSON values, numpy arrays, bytes, JAX keys, tuples, dicts with any keys,
                sets. Called at the first step, at each save and, if it is quick, after steps (see ``LastState``). It
                must not wait for other processes. If it fails or takes long when a preemption saves, the step is saved
                without this value.
            set: Takes such a value. Called by ``restore``.
            reshard: Returns this process's value, given the values of all processes that saved, this process's index
                and the number of processes now. Called if the checkpoint was saved by another number of processes.
                None: such a checkpoint is not restored.
            missing: Called by ``restore`` in place of ``set``, with the step, if a preemption saved the step without
                this value. None: ``restore`` raises ``HostStateLost`` then.

        Raises:
            SettingsError: The name is taken, an argument is no function, or ``restore`` or a sync point was called
                before.
        """
        if self._began:
            raise SettingsError(f"host_state({shown(name)}): must be registered before restore() and step()")
        self._values.register(name, get, set, reshard, missing)

    def compile(
        self,
        function: Callable[..., Any],
        /,
        *like: Any,
        keywords: Mapping[str, Any] | None = None,
        **jit_options: Any,
    ) -> CompiledFunction:
        """Compiles a function in the background, so that ``restore`` reads meanwhile.

            step = session.compile(train_step, jax.eval_shape(init_state), batch, donate_argnums=0)
            state, number = session.restore(init=init_state)  # compilation and restore take place at the same time
            state, loss = step(state, next(loader))           # waits until it is compiled

        Call it alike in all processes, as the function itself. Several functions are compiled in the order of the
        calls. What is called later in another way than announced here is compiled again, and a warning says so.

        Args:
            function: A function, or one that ``jax.jit`` returned.
            *like: The arguments that it will be called with: arrays, ``jax.ShapeDtypeStruct`` with the shardings of the
                arrays, or trees of them. Static arguments as they are.
            keywords: The keyword arguments, likewise. None: there are none.
            **jit_options: Arguments of ``jax.jit``, such as ``donate_argnums``. None if ``function`` is jitted already.

        Returns:
            The jitted function. Its first call waits for the compilation, and raises what that has raised.

        Raises:
            SettingsError: The arguments contradict each other, or the session is closed.
            Exception: What ``function`` raises while it is traced.
        """
        return self._compilations.begin(function, like, keywords or {}, jit_options)

    def restore(
        self,
        like: Any = None,
        *,
        init: Callable[[], Any] | None = None,
        from_: UserPath | None = None,
        single_replica: bool | SingleReplica = False,
        donate: bool = True,
        restore_args: Any = None,
        options: RestoreOptions | None = None,
        data: DataIterator | None = None,
    ) -> tuple[Any, int]:
        """Restores the newest complete step that all processes see, or begins at step 0.

        ``restored`` says afterwards where the state came from.

        The devices never hold two states: a compiled ``init`` is called only if there is no checkpoint, and the arrays
        of ``like`` are deleted before the arrays that replace them are read.

        Args:
            like: A train state with the tree, shapes, dtypes and shardings of the result. Its leaves may be
                ``jax.ShapeDtypeStruct`` with a sharding. If a checkpoint is restored, the arrays of ``like`` are
                deleted, so they must not be used elsewhere. None: the result is like the state that ``init`` returns.
            init: Returns the state of step 0. Without ``like`` and with several devices it is a function compiled with
                ``out_shardings``, as ``jax.eval_shape`` must return the shardings. With one device it may be any
                function; one that is not compiled is called at each start, and its arrays are dropped before a
                checkpoint is read.
            from_: Where the state of step 0 comes from if this job has no checkpoint yet: a directory of steps, or the
                folder of one step, that another run wrote. It is only read, and may be read-only. The step count begins
                at 0, and host state is not taken over. None: the state of step 0 is ``init()`` or ``like``.
            single_replica: For jobs of several slices. One slice reads the arrays that are replicated over all slices,
                and sends them to the others over the devices' network. True: the slices are the first axis of the
                mesh. A ``gracepoint.checkpoint.SingleReplica`` names another axis. All other arrays are read by all
                processes that need them.
            donate: False keeps the arrays of ``like``: the devices hold two states then.
            restore_args: ``RestoreArgs`` for all leaves, or a tree of them. None: the defaults.
            options: How the tree is restored. Its ``donate`` and ``single_replica`` do not count: the arguments above
                do. None: the defaults.
            data: A data iterator with ``get_state`` and ``set_state``, such as Grain's: host state of the name
                ``data``. If the number of processes differs, all must have been at the same state. None: there is none.

        Returns:
            The state and its step. If there is no checkpoint, ``(init(), 0)`` or ``(like, 0)``, and a line in the log.
            With ``from_``, the state that is there, and 0.

        Raises:
            CheckpointError: A checkpoint cannot be read, or does not fit. A note on the error says whether the arrays
                of ``like`` are deleted.
            CheckpointRefused: ``init`` made a leaf that cannot be saved.
            HostStateLost: The step was saved in an emergency without a host state that is registered without
                ``missing``.
            CheckpointNotFound: There is no checkpoint, ``like`` has no values, and there is no ``init``. Or there is no
                checkpoint of this job, and none at ``from_``.
            InvalidSharding: With these shardings one replica cannot read any array for all.
            SettingsError: The arguments contradict each other, or ``init`` does not return the shardings.
        """
        from gracepoint.checkpoint.restoring import start_state

        check_not_forked(self._pid, "the session")
        if data is not None:
            self._values.register_iterator(data)
        self._began = True
        request = start_state.asked(
            like, init, single_replica, donate=donate, restore_args=restore_args, options=options
        )
        with (
            self._coordinator.activities.at("restore", computes=True),
            request.noting_deletions(),
            not_joined_if_away(self._settings),  # ``attach`` goes on without it where snapshots may be in memory
        ):
            restored = self._checkpointer.restore(
                request.like,
                timeout_s=RESTORE_TIMEOUT_S,
                restore_args=request.restore_args,
                options=request.options,
                reshard=self._values.reshard,
                required=self._values.required,
                base=from_,
                same_devices=True,
            )
            start = start_from(restored, self._checkpointer, request, from_, self._values)
        self.restored = start.restored
        if start.step is not None:
            self._coordinator.step = self._saves.restored_step = start.step
        self._coordinator.reporter.resumption(
            start.step, training=False, note=start.note, from_memory=self._is_from_memory
        )
        return start.state, start.step or 0

    def step(self, step: int, state: Any) -> None:
        """Passes a sync point after a step. Call it after every step, or after every k-th, alike in all processes.

        Waits for older steps so that at most two are in flight, or one if steps take a second or longer. Saves if a
        save is due. When it returns, the state may be donated.

        Args:
            step: How many steps ``state`` has seen.
            state: The train state after that step.

        Raises:
            Preempted: This was the agreed sync point, and the process is to exit now. The state is saved, or ``saved``
                is False and ``reason`` says why.
            SaveFailed: Periodic saves have failed for longer than ``attach(tolerate_failures_s=...)``. It is raised in
                all processes, at the same step.
            CheckpointError: This is the first step, ``restore`` was not called, and the directory has a step that is as
                new or newer. Or another job has taken the directory over.
            CheckpointRefused: The state or a host state cannot be saved; names the leaf. Found at the first step.
            AgreementError: A periodic save is due, and another process is at another step. The message names both.
            SettingsError: ``step`` is no step's number, or the session is closed.
            jax.errors.JaxRuntimeError: The devices have failed to compute this step or one before, as they do when
                another process dies.
        """
        number = self._points.begin_step(step, state)
        if not self._began:
            self._saves.check_that_nothing_newer_is_there(number)
        self._began = True
        self._coordinator.step = number
        self._last.begin(self._coordinator.sync_point, number, state)
        if steps := self._throttle(state):
            self._forecaster.passed(steps)
        self._save_if_agreed(state)
        if not self._forecaster.prepared:
            total_bytes = self._checkpointer.prepare(
                state, in_background=self._checkpointer.save_interval.periodic, host_state=self._values.get_first
            )
            self._forecaster.prepare(total_bytes)
            self._coordinator.reporter.resumption(
                self._saves.restored_step, training=True, from_memory=self._is_from_memory
            )
            self._trains()
        if self._hints.due():
            self._checkpointer.hasten()
        self._save_periodically(number, state)
        if (figures := self._forecaster.news(last_save := self._checkpointer.executor.last_save)) is not None:
            self._coordinator.report_forecast(figures, None if last_save is None else last_save.step)

    def poll(self, state: Any) -> None:
        """Passes a sync point that is no step, such as in an evaluation loop. Saves as the last step if it is time.

        Raises:
            Preempted: As ``step``.
        """
        step = self._points.begin(self._coordinator.step)
        check_state("poll(state)", state)
        self._last.begin(self._coordinator.sync_point, step, state)
        self._save_if_agreed(state)

    # Loops that save by their own means, such as with Orbax.

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

        After a drill it returns, and training continues. If a process exits without this call, it reports that nothing
        was saved, and exits with the exit code for that.

        Raises:
            Preempted: The step is committed in all processes, and the process is to exit now. Or ``saved`` is False: a
                process did not call ``saved`` in time.
            SettingsError: ``reached_preemption`` did not return True at this step.
        """
        self._points.saved(step)

    def close(self) -> None:
        """Passes the last sync point: training has finished. Waits for the save in progress. Safe to repeat.

        After a SIGTERM, and in a ``finally`` or ``except`` block during a preemption, the loop may have ended because
        its data did. So the newest step is saved then, and the next start continues from it.

        Raises:
            CheckpointError: The newest periodic save failed.
            Preempted: ``reached_preemption`` returned True, and ``saved`` was not called. Or the loop ended after a
                SIGTERM, or another process broke off in a preemption: the process is to exit, and the newest step is
                saved, or not.
        """
        if self._points.closed:
            return
        self._points.settle("the session was closed")
        if (error := sys.exception()) is not None:
            self._save_where_it_broke_off(f"{type(error).__name__}: {error}", error)
            if self._points.closed:
                return  # that error is raised on, and printed
        elif self._coordinator.is_signalled and not self._last.lost(self._coordinator.sync_point):
            self._save_where_it_broke_off("close() was called after a SIGTERM", None)
            if self.preempted is not None:
                raise self.preempted
        self._points.closed = True
        try:
            with self._coordinator.activities.at("close"):
                if self._coordinator.finish():
                    self._save_last()
                self._checkpointer.close(_CLOSE_TIMEOUT_S)
            self._saves.check_newest()
        except Preempted:  # another process broke off; the threads end with this one
            raise
        except BaseException:
            self._end_threads(well=True)
            raise
        self._end_threads(well=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, Preempted):
            self._break_off(f"{type(error).__name__}: {error}", error)

    @property
    def preempted(self) -> Preempted | None:
        """What was raised because the process is to exit. None before."""
        return self._points.preempted

    @property
    def is_of_this_process(self) -> bool:
        """False in a child that was forked while the session was open: the session is its parent's."""
        return not is_forked(self._pid)

    @property
    def notice(self) -> ActiveNotice | None:
        """The preemption that this process has been notified of. None if there is none.

        An evaluation or an upload can look here and be brief. Processes are told at different moments: act alike in all
        processes only at a sync point. Drills are not mentioned.
        """
        return self._coordinator.notice

    @property
    def _is_from_memory(self) -> bool:
        return self.restored is not None and self.restored.from_memory

    # Within sync points.

    def _throttle(self, state: Any) -> int:
        try:
            return self._run_ahead.throttle(state, self._forecaster.run_ahead)
        except Exception as error:
            if not self._fails_in_a_preemption(error):
                raise
            self._points.not_saved(error)
            return 1

    def _save_periodically(self, step: int, state: Any) -> None:
        """Saves, and takes snapshots, if that is due."""
        try:
            if self._saves.begins(step):
                self._saves.save(step, state, self._values.get)
            if self._snapshots is not None:
                self._snapshots.pass_step(step, state, self._values.get)
        except Exception as error:
            if not self._fails_in_a_preemption(error):
                raise
            self._points.not_saved(error)

    def _fails_in_a_preemption(self, error: Exception) -> bool:
        """Returns whether it is the devices that fail, in a preemption, as they do when a peer is killed."""
        of_devices = not isinstance(error, GracepointError) and self._coordinator.is_of_devices(error)
        return of_devices and self._coordinator.peer_lost()

    def _trains(self) -> None:
        """Says, after the first step, what that took."""
        programs = self._programs.programs
        logger.info("programs until the first step compiled=%d found=%d", programs.compiled, programs.found)
        trace.tell(programs_compiled=programs.compiled, programs_found=programs.found)
        trace.moment("trains")
        trace.write()

    def _save_if_agreed(self, state: Any) -> None:
        if self._points.arrive():
            self._run_ahead.forget()
            if self._coordinator.point != self._coordinator.sync_point:
                self._save_last()
            self._last.saves_at = self._coordinator.sync_point
            self._points.save(state, lambda: self._values.get_in_time(self._coordinator.time_to_spare_s()))
            self._last.saves_at = None  # that was a drill
        self._last.keep(self._coordinator.sync_point, self._coordinator.step, state)

    def _save_last(self) -> None:
        """Saves what was handed at the agreed sync point, after which the training of a process broke off.

        Raises:
            Preempted: Always.
        """
        point = self._coordinator.point
        assert point is not None
        try:
            handed = self._last.take(point)
        except AgreementError as error:
            self._points.not_saved(error)
            raise
        self._last.saves_at, self._coordinator.step = point, handed.step
        self._points.save(handed.state, lambda: handed.host_state)

    def _host_state_now(self) -> Mapping[str, Any]:
        return self._values.get_now(_KEPT_WITHIN_S if self._is_pressing() else None)

    def _is_pressing(self) -> bool:
        return self._coordinator.is_pressing

    def _may_others_break_off(self) -> bool:
        return self._process_count > 1 and self._coordinator.is_signalled

    # The end of the session.

    def _save_where_it_broke_off(self, reason: str, error: BaseException | None) -> None:
        """Has all processes save what they handed where this one is, if a preemption is why the loop broke off.

        Never raises. The session is over if the preemption has ended here, saved or not.
        """
        if self._points.closed or self._own_loop or self._tried_last:
            return
        self._tried_last = True  # an interrupt may end this, too
        if self._coordinator.is_of_peers(error):
            return
        if (interrupted := self._last.interrupted()) is not None:
            before, step, state = interrupted
            if self._coordinator.sync_point == before:
                self._coordinator.pass_on()
            self._last.keep(self._coordinator.sync_point, step, state)
        if not self._last.has(self._coordinator.sync_point):
            return
        try:
            if self._coordinator.stop(reason):
                self._save_last()
        except Preempted as preempted:
            logger.error("training broke off during a preemption reason=%s outcome=%s", reason, preempted.reason)
            if error is not None:
                error.add_note(f"gracepoint: the process exits with code {preempted.code}: {preempted.reason}")
        except GracepointError as not_saved:
            logger.error(
                "training broke off during a preemption, and nothing is saved reason=%s: %s", reason, not_saved
            )

    def _break_off(self, reason: str, because_of: BaseException | None = None) -> None:
        """Ends the session because of an error. Never raises.

        Waits for the save in progress, and in a preemption for the save of what was handed last.
        """
        if not self.is_of_this_process:
            return
        self._save_where_it_broke_off(reason, because_of)
        if self._points.closed:
            return
        self._points.closed = True
        error = None
        if self._points.asked is not None:  # the process exits for a preemption
            error = AgreementError(f"{reason}, without saved({self._points.asked})")
        self._coordinator.abandon(reason, error, self._saves.steps_at_risk())
        self._checkpointer.abandon(reason, timeout_s=_ABANDON_TIMEOUT_S)
        self._end_threads(well=False)

    def _tell_undeleted(self, stays: Sequence[str]) -> None:
        """Reports what cannot be deleted. Any thread may call it."""
        message = f"{len(stays)} cannot be deleted. {stays[0]}" if stays else "all that could not be deleted is gone"
        self._coordinator.reporter.trouble(TroubleKind.DELETIONS, message, over=not stays, times=len(stays))

    def _end_threads(self, *, well: bool) -> None:
        global _open
        _open = None
        set_reached_preemption_hook(None)
        undeleted.end()
        self._run_ahead.forget()
        self._last.forget()
        if self._coordinator.end(well=well):
            atexit.unregister(self._at_exit)
        self._compilations.close(_CLOSE_TIMEOUT_S if well else 0.0)
        self._programs.close()
        trace.end()

    def _forget(self) -> None:
        """In a forked child: there is no session, and what the child does or how it ends says nothing of its parent."""
        global _open
        _open = None
        set_reached_preemption_hook(None)
        self._points.closed = True

    def _main_thread_ends(self) -> None:
        if self.is_of_this_process and self._last.handed_in is threading.current_thread():
            self._save_where_it_broke_off(*_how_it_ended())

    def _at_exit(self) -> None:
        if not self.is_of_this_process:
            return
        trace.moment("the interpreter ends")
        self._break_off(*_how_it_ended())
        # Without the release, a job elsewhere waits until the lease has expired. A save in progress still needs it.
        if self._checkpointer.executor.progress is None:
            self._checkpointer.access.release()
        self._checkpointer.throughput.finish(_THROUGHPUT_S)
        self._coordinator.exit_process(getattr(sys, "last_value", None))
        self._compilations.close(_CLOSE_TIMEOUT_S)  # an interpreter must not end while a thread compiles
