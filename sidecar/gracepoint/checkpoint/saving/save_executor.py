"""Saves of one gang, one at a time, wherever they go.

One thread owns a ``Saver``, the training thread. For it work the writer's threads, and one for the
background save that is under way, which ends with it. That one writes from the snapshot, which the owner fills only
while no save is under way.

Everything that a process waits for from its peers has a timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gracepoint import machine
from gracepoint.checkpoint import alike
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.memory import host_memory
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, WriteOptions
from gracepoint.checkpoint.saving import save_metrics
from gracepoint.checkpoint.saving.save_in_flight import SaveInFlight
from gracepoint.checkpoint.saving.save_metrics import SaveStats
from gracepoint.checkpoint.saving.save_operation import Barrier, SaveOperation
from gracepoint.checkpoint.saving.save_planner import SavePlanner
from gracepoint.checkpoint.saving.snapshot_status import SnapshotSave
from gracepoint.checkpoint.transfer.device_to_host import compile_slices
from gracepoint.checkpoint.transfer.host_snapshot import Transfer
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.checkpoint.writing.write_job import ChunkSource
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from gracepoint.process_group import ProcessGroup, SingleProcess

logger = logging.getLogger(__name__)

#: What writing a probe may take before training begins.
WARM_UP_TIMEOUT_S = 60.0


class SaveExecutor(SaveInFlight):
    """Plans once for states of one form, and saves them. Every call is collective.

    Args:
        gang: The processes that save together.
        attempt: Unique for each start of the gang, the same in all its processes.
        clock: Monotonic seconds.
        processes: ``jax.process_index()`` of each of the gang's processes; None where the two are the same.
        options: How arrays are written; None: the defaults.
        host_memory_limit_bytes: A snapshot may have so many bytes; None: as many as the host has.
    """

    def __init__(
        self,
        gang: ProcessGroup,
        attempt: str,
        *,
        clock: Callable[[], float],
        processes: Sequence[int] | None = None,
        options: WriteOptions | None = None,
        host_memory_limit_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self._gang = gang
        self._attempt = attempt
        self._clock = clock
        options = options or DEFAULT_OPTIONS
        self._writer = ChunkWriter(options)
        self._planner = SavePlanner(
            gang.process_index,
            gang.process_count,
            options,
            processes=processes,
        )
        self._memory_limit_bytes = host_memory_limit_bytes
        self._left = machine.left_by_pool
        self._prepares = 0
        self._now: SaveOperation | None = None
        self.saves = 0  # begun so far; the same in all processes
        self.last_save: SaveStats | None = None

    def prepare(self, state: Any, *, in_background: bool, save_args: Any = None) -> int:
        """Plans, compares that with the other processes, compiles, and reserves and touches memory for a snapshot if
        there will be background saves.

        Returns:
            Bytes of the state over all processes.

        Raises:
            CheckpointError: The state cannot be saved, or is not the same in all processes; names the leaf. Or there
                is no memory for snapshots.
            BarrierError: Another process did not come in time, or has failed.
        """
        self._prepares += 1
        key = f"checkpoint/{self._attempt}/prepare/{self._prepares}"
        with host_memory.telling(self._gang, alike.meeting_of(key)):
            leaves, prepared = self._planner.plan(state, save_args)
            compile_slices(leaves, prepared.plan, self._writer.options)
            several = self._gang.process_count > 1
            mine = alike.describe(leaves, prepared.specs, prepared.plan) if several else {}
        alike.check(mine, gang=self._gang, key=key)
        if in_background:
            self._check_fits(self._planner.needed_bytes(leaves, prepared), self._gang, key)
            self._planner.snapshot(leaves, prepared)
        return prepared.plan.total_bytes

    def warm(self, paths: Layout, *, timeout_s: float = WARM_UP_TIMEOUT_S) -> None:
        """Writes and removes a file as a save does.

        Raises:
            OSError: The directory cannot be written to.
            SaveFailed: It was not done in time.
        """
        paths.root.make_folder_durably()
        probe = paths.probe(self._attempt, self._gang.process_index)
        self._writer.warm(probe, Deadline.after(timeout_s, self._clock))

    def total_bytes(self, state: Any) -> int:
        """Returns the bytes of ``state`` over all processes."""
        return self._planner.plan(state)[1].plan.total_bytes

    def begin(
        self, paths: Layout, step: int | None, *, replace: bool = True, barrier: Barrier | None = None
    ) -> SaveOperation:
        """Returns the next save, to be given to ``in_background`` or ``now``.

        Args:
            paths: Where it goes.
            step: That is saved; None where the checkpoint has a path to itself.
            replace: As in ``Save``.
            barrier: As in ``Save``.
        """
        self.saves += 1  # before anything can fail, so that the processes' counts never part
        temporary = paths.temporary(step, self._attempt, self.saves)
        return SaveOperation(paths, temporary, self._gang, self._writer, replace=replace, barrier=barrier)

    def in_background(
        self,
        save: SaveOperation,
        state: Any,
        host_state: Mapping[str, Any],
        *,
        timeout_s: float,
        began_s: float,
        then: Callable[[], None],
        save_args: Any = None,
    ) -> None:
        """Copies the state to host memory and writes it while the caller goes on.

        Args:
            save: What ``begin`` gave; no other is under way.
            state: May be donated when this returns.
            host_state: May be changed when this returns.
            timeout_s: For the part in the background.
            began_s: When the caller began to be blocked, on the clock.
            then: Called in the save's thread once it is committed; its error is the save's.
            save_args: As in ``stored_specs``.

        Raises:
            CheckpointError: The state or the host state cannot be saved; names the leaf. Or there is no memory for
                snapshots.
        """
        self._tell_started(save, in_background=True)
        self._forget()  # its memory is needed
        with save.failing_together():
            leaves, prepared = self._planner.plan(state, save_args)
            save.describe(leaves, prepared, host_state)
            needed_bytes = self._planner.needed_bytes(leaves, prepared)
            if needed_bytes > 0:  # was not prepared; the other processes, which may have, are not waited for
                self._check_fits(needed_bytes, SingleProcess(), save.key)
            snapshot = self._planner.snapshot(leaves, prepared)
            started_s = self._clock()
            transfer = Transfer(leaves, prepared.specs, prepared.plan, self._writer.options, snapshot)
            snapshot_s = self._clock() - started_s
        plan, blocked_s = prepared.plan, self._clock() - began_s
        newest = SnapshotSave(save, transfer, Deadline.after(timeout_s, self._clock))

        def run() -> None:
            stages = save.run(newest.source, newest.deadline, lambda stage: None)
            newest.committed = True
            step = save.temporary.step
            stats = SaveStats(step, plan.total_bytes, blocked_s, snapshot_s, stages.durable_s, stages.committed_s)
            self.last_save = stats
            then()
            primary = self._gang.process_index == 0
            total_s = self._clock() - began_s if primary else None
            save_metrics.tell_background(
                stats, save.temporary.target, chunks=sum(chunk.mine for chunk in plan.chunks), total_s=total_s
            )

        self._start(newest, run)
        save_metrics.tell_blocked(blocked_s)

    def now(
        self,
        save: SaveOperation,
        state: Any,
        host_state: Mapping[str, Any],
        *,
        deadline: Deadline,
        on_stage: Callable[[str], None],
        save_args: Any = None,
    ) -> int:
        """Saves and returns when it is committed. Chunks go from the devices to the disk without a snapshot.

        Args:
            save: What ``begin`` gave; no other is under way.
            state: Must not be donated until this returns.
            host_state: This process's values by name.
            deadline: For all of it.
            on_stage: As in ``Save.run``.
            save_args: As in ``stored_specs``.

        Returns:
            Bytes of the state over all processes.

        Raises:
            SaveFailed: It is not committed in time, or a process failed.
            CheckpointError: The state or the host state cannot be saved; names the leaf.
        """
        began_s = self._clock()
        self._tell_started(save, in_background=False)
        with save.failing_together():
            leaves, prepared = self._planner.plan(state, save_args)
            save.describe(leaves, prepared, host_state)
        transfer = Transfer(leaves, prepared.specs, prepared.plan, self._writer.options, None)
        return self._run_now(save, transfer, deadline, on_stage, began_s)

    def _tell_started(self, save: SaveOperation, *, in_background: bool) -> None:
        logger.info(
            "process %d of %d saves %s %s, through %s; the processes meet at %r",
            self._gang.process_index,
            self._gang.process_count,
            save.temporary.target,
            "in the background" if in_background else "and waits for it",
            save.temporary.path,
            save.key,
        )
        save_metrics.tell_started(in_background=in_background)

    def _check_fits(self, needed_bytes: int, gang: ProcessGroup, key: str) -> None:
        host_memory.check_fits(needed_bytes, self._memory_limit_bytes, gang=gang, key=key, left=self._left)

    def _run_now(
        self,
        save: SaveOperation,
        source: ChunkSource,
        deadline: Deadline,
        on_stage: Callable[[str], None],
        began_s: float,
    ) -> int:
        self._now = save
        try:
            stages = save.run(source, deadline, on_stage)
        finally:
            self._now = None
        size_bytes, blocked_s = save.total_bytes, self._clock() - began_s
        step = save.temporary.step
        self.last_save = SaveStats(step, size_bytes, blocked_s, 0.0, stages.durable_s, stages.committed_s)
        save_metrics.tell_now(self.last_save, save.temporary.target)
        return size_bytes

    @property
    def commit_key(self) -> str | None:
        """Of the barrier at which the save under way that is waited for is committed; None if there is none."""
        return None if self._now is None else self._now.key

    def promote(self, paths: Layout, deadline: Deadline, on_stage: Callable[[str], None]) -> tuple[int, int]:
        """Commits the newest snapshot: waits for its save, or writes it once more where that failed. Collective.

        Args:
            paths: Where it goes.
            deadline: For all of it.
            on_stage: As in ``Save.run``.

        Returns:
            The step, and the bytes of the state over all processes.

        Raises:
            SaveFailed: There is none, or it is not committed in time.
        """
        began_s, newest = self._clock(), self._newest
        self.saves += 1  # whether it is needed or not, so that the processes' counts never part
        if newest is None or newest.save.temporary.step is None:
            raise SaveFailed("there is no snapshot in host memory that could be saved in place of the state")
        self.wait_until(deadline)
        step = newest.save.temporary.step
        error = self.take_error()
        if newest.committed:
            for stage in ("written", "durable", "committed"):
                on_stage(stage)
            return step, newest.save.total_bytes
        source = newest.once_more()
        if source is None:
            raise SaveFailed(f"the snapshot of step {step} was not saved, and is not in memory any more: {error}")
        logger.warning("the snapshot of step %d is written once more, as its save failed: %s", step, error)
        save = newest.save.again(paths.temporary(step, self._attempt, self.saves))
        return step, self._run_now(save, source, deadline, on_stage, began_s)
