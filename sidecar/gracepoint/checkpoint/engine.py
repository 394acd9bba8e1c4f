"""Saves and restores the steps of one directory. This is the checkpoint engine's interface for the session.

One thread, the training thread, owns a ``StepCheckpointer`` and makes all calls. All processes make the same calls in
the same order. A checkpointer uses these threads: those of the writers, that of the background save
(``saving.executor``), that of a snapshot in the memory of nodes (``saving.memory_snapshots``), and in process 0 those
that delete old steps (``steps.retention``), renew the lease (``steps.lease``) and write the speed of saves to a file
(``saving.schedule.Throughput``). Every wait has a timeout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gracepoint import machine
from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.metrics import Saved
from gracepoint.checkpoint.options import DEFAULT_RESTORE_OPTIONS, RestoreOptions
from gracepoint.checkpoint.restoring import transforms
from gracepoint.checkpoint.restoring.restore_step import (
    NO_ITEMS,
    NONE_IN_MEMORY,
    ItemsRequest,
    Reshard,
    Restored,
    StateRequest,
    find_in_memory,
    restore_base,
    restore_from_memory,
    restore_newest,
)
from gracepoint.checkpoint.saving.executor import HostState, NotBegun, SaveExecutor
from gracepoint.checkpoint.saving.extras import NO_EXTRAS, SaveExtras
from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings, MemorySnapshots
from gracepoint.checkpoint.saving.operation import SaveOperation
from gracepoint.checkpoint.saving.planner import DEFAULT_SETTINGS, SaveSettings
from gracepoint.checkpoint.saving.schedule import (
    ON_REQUEST,
    CommittedSteps,
    DueSaves,
    SaveInterval,
    SaveSchedule,
    Throughput,
    Way,
)
from gracepoint.checkpoint.steps.lease import SHARED_TIMEOUT_S, DirectoryAccess
from gracepoint.checkpoint.steps.retention import DEFAULT_RETENTION, DamagedStep, Retention
from gracepoint.checkpoint.steps.snapshot_steps import steps_of
from gracepoint.checkpoint.storage.locations import UserPath, storage_path
from gracepoint.checkpoint.storage.storage_path import ended_by
from gracepoint.deadline import Deadline, NewestSnapshot, SnapshotState
from gracepoint.errors import GracepointError, SaveFailed, StorageAway
from gracepoint.process_group import ProcessGroup
from gracepoint.threads import check_not_forked, is_forked

logger = logging.getLogger(__name__)

#: Seconds for a background save. Long, as no caller waits for it before the next save is due.
BACKGROUND_TIMEOUT_S = 900.0
# Seconds for a snapshot that is not needed any more to end.
_SNAPSHOT_ENDS_S = 1.0
# Seconds for storage that was away at the start to answer a save: training waits for it.
_ANSWERS_S = 5.0
# Seconds for ``hasten`` to warm the writer. Short, as training waits for it.
_HASTEN_TIMEOUT_S = 3.0


class StepCheckpointer:
    """Saves and restores the train state of a gang. A call is collective unless its docstring says otherwise.

    Attributes:
        access: Checks that all processes share the directory, and claims it for this job.
        due_saves: Decides for all processes whether a periodic save begins.
        executor: Runs the saves, and knows which one is in progress.
        memory: Takes snapshots in the memory of nodes. None: there are none.
        save_interval: Says when a periodic save is due.
        throughput: How fast saves have been.
    """

    def __init__(
        self,
        paths: Layout,
        *,
        gang: ProcessGroup,
        attempt: str,
        schedule: SaveSchedule = ON_REQUEST,
        retention: Retention = DEFAULT_RETENTION,
        settings: SaveSettings = DEFAULT_SETTINGS,
        memory: MemorySettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no file yet.

        Args:
            paths: The steps of a directory that all processes share.
            gang: The processes that save together.
            attempt: Unique for each start of the gang, equal in all its processes; letters, digits, '-', '_'.
            schedule: When periodic saves are due.
            retention: Which steps are kept.
            settings: What holds for all saves.
            memory: Snapshots in the memory of nodes. None: there are none.
            clock: Returns monotonic seconds.

        Raises:
            SettingsError: The attempt has other characters.
        """
        key = f"checkpoint/{layout.checked_attempt(attempt)}"
        self._paths = paths
        self._gang = gang
        self._attempt = attempt
        self._handlers = settings.handlers
        self._clock = clock
        self._pid = machine.process_id()
        self._restore_key = f"{key}/restore"
        self._restores = 0
        self._committed = CommittedSteps(paths, gang, key=key, attempt=attempt, retention=retention)
        self.save_interval = SaveInterval(schedule, gang=gang, key=f"{key}/cadence", clock=clock)
        self.executor = executor = SaveExecutor(gang, attempt, settings, clock=clock)
        self.memory: MemorySnapshots | None = None
        if memory is not None:
            self.memory = MemorySnapshots(
                memory,
                gang,
                attempt=attempt,
                paths=paths,
                saves=settings,
                clock=clock,
                newest_save=lambda: executor.newest,
            )
        self.access = DirectoryAccess(paths, gang, key=key, attempt=attempt, clock=clock)
        self.due_saves = DueSaves(gang, f"{key}/due", fail=self.refuse)
        self.throughput = Throughput(None, writes=gang.process_index == 0, process_count=gang.process_count)

    def remember_throughput(self) -> None:
        """Has the speed of saves kept in a file in the directory, for the next start. ``prepare`` reads it."""
        self.throughput.file = self._paths.throughput()

    def refuse(self, step: int, error: Exception) -> None:
        """Fails the save of a step that the other processes begin and this one cannot. Never raises."""
        # ``begin`` counts the save, so that its key is the one at which the other processes wait.
        self.executor.begin(self._paths, step).fail(error)

    @property
    def is_primary(self) -> bool:
        """True in process 0, which logs what concerns all processes."""
        return self._gang.process_index == 0

    @property
    def committed_step(self) -> int | None:
        """The newest step that this process has restored, or knows to be committed. None if there is none."""
        return self._committed.newest

    @property
    def newest_snapshot(self) -> NewestSnapshot | None:
        """As ``SaveExecutor.newest_snapshot``. If its step or a newer one is committed, its state is COMMITTED."""
        newest, committed = self.executor.newest_snapshot, self._committed.newest
        if newest is None or committed is None or committed < newest.step:
            return newest
        return dataclasses.replace(newest, state=SnapshotState.COMMITTED)

    def hasten(self) -> None:
        """Prepares for a disruption that may be near: warms the writer, and brings the next periodic save forward.

        Not collective. Process 0 decides when the save is due. It is due in all processes at the same step.
        """
        # If a save is in progress, the writer is warm, and the save's thread owns it.
        if not self.executor.busy and not self.access.is_put_off:
            try:
                deadline = Deadline.after(_HASTEN_TIMEOUT_S, self._clock)
                with ended_by(deadline.check):  # also the store's requests, which have a minute otherwise
                    self.executor.warm(self._paths, timeout_s=_HASTEN_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - training continues, and the save itself will raise the error
                logger.error("the directory cannot be written to, and a disruption may be near: %s", error)
        self.save_interval.hasten()

    def prepare(
        self,
        state: Any,
        *,
        in_background: bool = True,
        save_args: Any = None,
        host_state: Callable[[], Mapping[str, Any]] = dict,
    ) -> int:
        """Does in advance what would take too long in an emergency.

        Plans the saves, reserves and touches memory, and warms the writer.

        Args:
            state: A state of the form that will be saved.
            in_background: Whether there will be background saves, which need memory for a snapshot.
            save_args: The argument that these saves will get. None: no arguments.
            host_state: Returns this process's values by name, which are only checked. All processes have these names.

        Returns:
            Bytes of the state over all processes.

        Raises:
            CheckpointError: The state or the host state cannot be saved, or is not the same in all processes; names the
                leaf. Or there is no memory for snapshots.
            OSError: The directory cannot be written to.
            BarrierError: Another process did not come in time, or has failed.
        """
        if not self.access.is_put_off:
            self.throughput.read()
        total_bytes = self.executor.planner.prepare(
            state, in_background=in_background, save_args=save_args, host_state=host_state
        )
        if self.memory is not None:
            self.memory.prepare(state, host_state=host_state, held_bytes=self.executor.planner.held_bytes)
        if not self.access.is_put_off:
            self.executor.warm(self._paths)
        return total_bytes

    def save_in_background(
        self,
        step: int,
        state: Any,
        host_state: HostState,
        *,
        save_args: Any = None,
        extras: SaveExtras = NO_EXTRAS,
        timeout_s: float = BACKGROUND_TIMEOUT_S,
        anew: bool = False,
    ) -> None:
        """Copies the state to host memory and writes it while training continues.

        Waits for the previous save. When this returns, the state may be donated and the host state changed.

        Args:
            step: The step that ``state`` is at; the same in all processes.
            state: The train state.
            host_state: This process's values by name, or what returns them. If it raises, the save fails in all
                processes.
            save_args: ``SaveArgs`` for all leaves, or a tree of them. None: the defaults.
            extras: What is saved next to the state.
            timeout_s: Seconds for the part in the background.
            anew: Whether to save the step even if this gang has already committed or restored it.

        Raises:
            SaveFailed: The save before this one failed, or hangs; this one was not begun. Or the devices have failed to
                compute the state (``NotComputed``).
            CheckpointError: The state or the host state cannot be saved; names the leaf. Or another job has taken
                the directory over.
            Exception: What ``host_state`` raises.
        """
        began_s = self._clock()
        save = self.executor.begin(self._paths, step, extras=extras)
        with save.failing_together():
            try:
                self.executor.wait_until_finished(None)
            except SaveFailed as error:
                if not self.executor.busy:  # else it hangs here, and has not failed elsewhere
                    save.fail(NotBegun(str(error)))
                raise
            if not anew and self._committed.has(step):
                return
            self.access.claim_later(answer_s=_ANSWERS_S)
            self.access.check_lease()

        # Not in ``then``: by then the next save may be due, and other processes may not have read that decision yet.
        number_asked = self.due_saves.asked

        def then() -> None:
            self._committed.add(step)
            self._learn(Way.SNAPSHOT)
            self.executor.give_up_failed()
            self._committed.tidy(step, save.temporary.ordinal)
            self._retire(save, number_asked)

        self.executor.in_background(
            save, state, host_state, timeout_s=timeout_s, began_s=began_s, then=then, save_args=save_args
        )
        self.save_interval.saved()

    def save(
        self,
        step: int,
        state: Any,
        host_state: Mapping[str, Any],
        *,
        deadline: Deadline,
        on_stage: Callable[[str], None],
        note: str | None = None,
    ) -> Saved:
        """Saves now, and returns when the step is committed.

        If a background save is in progress and was not stopped by ``stop``, this waits for it first, until the
        deadline. If the background save has not ended by then, this save fails in all processes. If the background save
        failed, its error is logged, and this save is tried nevertheless. A step that this gang has already committed or
        restored is not saved again. Chunks go from the devices to the disk without a snapshot, unless a worker process
        writes them.

        Args:
            step: The step that ``state`` is at; the same in all processes.
            state: The train state. Must not be donated until this returns.
            host_state: This process's values by name.
            deadline: When the step must be committed. A preemption's deadline may move to an earlier time meanwhile.
            on_stage: Called with "written" (this process's files are written), "durable" (its done-record is durable)
                and "committed" (the step is committed in all processes).
            note: See ``SaveExtras``.

        Raises:
            SaveFailed: The step is not committed in time, or a process failed.
            CheckpointError: The state or the host state cannot be saved; names the leaf.
        """
        save = self.executor.begin(self._paths, step, extras=SaveExtras(note=note))
        with save.failing_together():
            self.executor.wait_until(deadline)
            if error := self.executor.take_error():
                logger.error("the background save before the one of step %d failed: %s", step, error, exc_info=error)
            if self._committed.has(step):
                for stage in ("written", "durable", "committed"):
                    on_stage(stage)
                return Saved(step, self.executor.planner.plan(state)[1].plan.total_bytes)
            left_s = deadline.remaining_s()
            self.access.claim_later(answer_s=min(_ANSWERS_S, left_s), within_s=min(SHARED_TIMEOUT_S, left_s))
        total_bytes = self.executor.now(save, state, host_state, deadline=deadline, on_stage=on_stage)
        self._committed.add(step)
        self._learn(Way.STREAMED)
        self.save_interval.saved()
        self._retire(save, self.due_saves.asked)
        return Saved(step, total_bytes)

    def promote(self, *, deadline: Deadline, on_stage: Callable[[str], None]) -> Saved:
        """Commits the newest snapshot in host memory in place of the current state, for which there is no time.

        If the background save of the snapshot is in progress, this waits for it. If that save failed, the snapshot is
        written once more.

        Args:
            deadline: When the step must be committed. A preemption's deadline may move to an earlier time meanwhile.
            on_stage: Called with "written", "durable" and "committed"; see ``save``.

        Raises:
            SaveFailed: There is no snapshot, or it was not committed in time.
        """
        step, total_bytes = self.executor.promote(self._paths, deadline, on_stage)
        self._committed.add(step)
        return Saved(step, total_bytes)

    @property
    def directory(self) -> str:
        """The directory of the steps, as messages show it."""
        return str(self._paths.root)

    def restore(
        self,
        like: Any,
        *,
        timeout_s: float,
        step: int | None = None,
        restore_args: Any = None,
        options: RestoreOptions = DEFAULT_RESTORE_OPTIONS,
        reshard: Mapping[str, Reshard] | None = None,
        required: Collection[str] = (),
        items: ItemsRequest = NO_ITEMS,
        tidy: bool = True,
        base: UserPath | None = None,
        same_devices: bool = False,
    ) -> Restored | None:
        """Restores the newest complete step into the form, shardings and types of ``like``.

        Saves that are durable but not committed are committed first. This waits for a save that an earlier attempt is
        still writing, for half of the timeout at most. Damaged steps are skipped with a log line.

        Args:
            like: A state. Its arrays may be ``jax.ShapeDtypeStruct`` with a sharding. The number of processes and the
                shardings may differ from those of the save. None: the tree as it was saved, as dicts and lists.
            timeout_s: Seconds for the whole call.
            step: The only step that may be restored. None: the newest.
            restore_args: See ``read_tree``.
            options: See ``RestoreOptions``.
            reshard: See ``StateRequest``.
            required: See ``StateRequest``.
            items: The items to restore next to the state.
            tidy: Whether to delete old steps and unfinished saves afterwards, as retention says. False if another job
                may use the directory.
            base: Where the state comes from if there is no step; see ``restore_base``. None: from nowhere.
            same_devices: Whether a step that accelerators saved is refused where JAX has fallen back to the CPU.

        Returns:
            The restored state. None if nothing looks like a checkpoint; the log says what was found.

        Raises:
            CheckpointNotFound: There is no complete checkpoint of ``step``.
            CheckpointRefused: There is no step, and something else in the directory looks like a checkpoint. Or see
                ``same_devices``.
            CheckpointCorrupt: There are checkpoints, and none can be restored.
            CheckpointMismatch: The newest step does not fit ``like``, or its host state does not fit the number of
                processes.
            CheckpointError: The newest step cannot be read for another reason.
            BarrierError: Other processes did not take part in time.
            SaveFailed: The background save in progress did not end within ``timeout_s``.
        """
        check_not_forked(self._pid, "this checkpointer")  # it commits and deletes, too
        deadline = Deadline.after(timeout_s, self._clock)
        self._restores += 1
        self.executor.wait(deadline.remaining_s())
        self._committed.settle(deadline.remaining_s())  # so that no step is renamed while it is read below
        gang, key, restored = self._gang, f"{self._restore_key}/{self._restores}", None
        request = StateRequest(
            restore_args=restore_args,
            options=options.with_handlers(self._handlers),
            reshard=reshard or {},
            required=required,
            same_devices=same_devices,
        )
        in_memory = NONE_IN_MEMORY
        if self.memory is not None and step is None:
            in_memory = find_in_memory(
                self.memory.servers, steps_of(self._paths), gang=gang, key=f"{key}/memory", deadline=deadline
            )
        with transforms.noting_deletions(like):
            newest = in_memory.newer_than(None)
            if self.access.is_put_off and newest is not None:
                with contextlib.suppress(StorageAway):  # it may be there by now, and have a newer step
                    self.access.claim_later(answer_s=_ANSWERS_S)
                if self.access.is_put_off:
                    restored = restore_from_memory(newest, like, request, gang=gang, key=key, deadline=deadline)
                    in_memory = NONE_IN_MEMORY
            if restored is None and self.access.is_put_off:
                self.access.claim_later()
                deadline = Deadline.after(timeout_s, self._clock)  # the wait may have taken longer than the restore may
            if restored is None:
                restored = restore_newest(
                    self._paths,
                    like,
                    request,
                    gang=gang,
                    key=key,
                    attempt=self._attempt,
                    deadline=deadline,
                    sleep=time.sleep,
                    holds_lease=self.access.holds_lease,
                    only=step,
                    items=items,
                    base=None if base is None else storage_path(base),
                    in_memory=in_memory,
                )
        began_at = 0 if restored is None else restored.step
        # What is in memory alone is written at once: servers come and go, and training would hardly notice.
        self.save_interval.began_at(began_at, stored=restored is None or not restored.from_memory)
        if self.memory is not None:
            self.memory.interval.began_at(began_at)
        if restored is not None and not restored.by_orbax and not restored.from_memory:
            self._committed.newest = restored.step
        damaged: dict[int, DamagedStep] = {}
        if restored is not None:
            for passed_over, standing in restored.passed_over_standing.items():
                damaged[passed_over] = DamagedStep(restored.passed_over[passed_over], standing)
        if not self.access.is_put_off:
            self._committed.after_restore(damaged, self.executor.saves, tidies=tidy)
        return restored

    def restore_base(
        self, base: UserPath, like: Any, *, timeout_s: float, restore_args: Any = None, options: RestoreOptions
    ) -> Restored:
        """Restores the state of another run, of which nothing is changed. See ``restore_step``. Collective.

        The steps of this directory begin at 0.
        """
        self._restores += 1
        with transforms.noting_deletions(like):
            return restore_base(
                base,
                like,
                gang=self._gang,
                key=f"{self._restore_key}/{self._restores}",
                deadline=Deadline.after(timeout_s, self._clock),
                restore_args=restore_args,
                options=options.with_handlers(self._handlers),
            )

    def wait_until_finished(self) -> None:
        """Waits for the background save. After that, process 0 removes the steps that retention does not keep.

        The removed steps are no longer listed. Their files are deleted later. If another thread is removing steps,
        process 0 waits for it for at most a minute, and then logs a warning.

        Raises:
            SaveFailed: The save failed, or did not end within a few seconds after its timeout.
        """
        self.executor.wait_until_finished(None)
        self._committed.settle()

    def close(self, timeout_s: float) -> None:
        """Waits for the background save, and for trash to be deleted. This is the last call.

        Raises:
            SaveFailed: The save failed, or was not committed within ``timeout_s``.
        """
        if is_forked(self._pid):
            return  # a forked child: the save in progress, the lease and the trash are its parent's
        deadline = Deadline.after(timeout_s, self._clock)
        try:
            self.executor.wait_until_finished(timeout_s)
            self._committed.finish(deadline)
            self.throughput.finish(deadline.remaining_s())
        finally:
            self._end_memory("training has finished")
            self.executor.close()
            self.access.release()

    def abandon(self, reason: str, *, timeout_s: float) -> None:
        """Gives the background save ``timeout_s`` seconds to end.

        If training failed, this is the last call, in place of ``close``. Not collective. Never raises.
        """
        if is_forked(self._pid):
            return
        self._end_memory(reason)
        self.executor.abandon(reason, timeout_s=timeout_s)
        self.executor.close()
        self.access.release()

    def _end_memory(self, reason: str) -> None:
        if self.memory is not None:
            self.memory.end(reason, _SNAPSHOT_ENDS_S)
            self.memory.close()

    def _learn(self, way: Way) -> None:
        if (last_save := self.executor.last_save) is not None:
            self.throughput.learn(way, last_save.bytes, last_save.committed_s)

    def _retire(self, save: SaveOperation, number_asked: int) -> None:
        """Removes keys of earlier saves from the store, after all processes have committed this save."""
        try:
            self.due_saves.retire(number_asked)
            self._committed.retire(save.temporary.ordinal)
        except GracepointError as error:
            logger.warning("could not remove the keys of earlier saves from the coordination service: %s", error)
