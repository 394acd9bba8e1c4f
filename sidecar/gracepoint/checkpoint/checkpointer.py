"""The checkpoint engine as the session sees it.

One ``Checkpointer`` belongs to one thread, the training thread: it makes all calls, the same ones in the same
order in all processes. Three kinds of threads work for it:

* TensorStore's own, which write and read;
* one for the background save that is under way, which ends with it. It writes from the snapshot, which the training
  thread fills only while no save is under way;
* in process 0, one that deletes trash, which ends when there is none. No save waits for it; what a process leaves
  behind, the next start deletes.

Everything that a process waits for from its peers has a timeout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gracepoint.checkpoint import commit, layout, retention, tree
from gracepoint.checkpoint.background import Background
from gracepoint.checkpoint.deadline import Deadline
from gracepoint.checkpoint.files import appears, make_folders
from gracepoint.checkpoint.plan import Plan, make_plan
from gracepoint.checkpoint.restore import Restored, restore_newest
from gracepoint.checkpoint.save import Chunks, Save
from gracepoint.checkpoint.snapshot import Snapshot, device_chunks
from gracepoint.checkpoint.writer import Writer
from gracepoint.errors import CheckpointError, SaveFailed, SettingsError
from gracepoint.gang import Gang

logger = logging.getLogger(__name__)

#: How long a background save may take. Long, as nobody waits for it until the next one is due.
BACKGROUND_TIMEOUT_S = 900.0
#: How long a save that was never finished is left alone before a start deletes it.
UNFINISHED_KEPT_S = 3600.0
_WARM_UP_TIMEOUT_S = 60.0
#: How late a file of another machine may be seen on a network file system.
_APPEARS_S = 5.0
#: How long the thread of a save needs to notice that it is waited for no longer.
_ABANDONED_ENDS_S = 1.0


@dataclasses.dataclass(frozen=True)
class Saved:
    """A committed save: ``bytes`` of the state over all processes, each counted once."""

    step: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class SaveStats:
    """How long the last committed save took in this process, for forecasts.

    Attributes:
        step: That was saved.
        bytes: Of the state over all processes.
        snapshot_s: The copy to host memory; 0 for an emergency, which streams.
        durable_s: From the begin of writing to this process's done-record on disk.
        committed_s: From the begin of writing to the commit.
    """

    step: int
    bytes: int
    snapshot_s: float
    durable_s: float
    committed_s: float


@dataclasses.dataclass
class _Prepared:
    """What is worked out once for states of one form; an emergency without preparation needs no snapshot."""

    form: list[tuple[Any, Any]]
    plan: Plan
    snapshot: Snapshot | None = None


class Checkpointer:
    """Saves and restores the train state of a gang. Every call but ``prepare`` is collective."""

    def __init__(
        self,
        directory: str,
        *,
        gang: Gang,
        attempt: str,
        keep_last: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no file yet.

        Args:
            directory: Absolute path or ``file://`` URI on a file system that all processes share.
            gang: The processes that save together.
            attempt: Unique for each start of the gang, the same in all its processes; letters, digits, '-',
                '_'.
            keep_last: How many committed steps are kept.
            clock: Monotonic seconds.

        Raises:
            SettingsError: An argument is wrong.
        """
        if keep_last < 1:
            raise SettingsError(f"keep_last is {keep_last}; expected at least 1, as the newest is never deleted")
        self._paths = layout.Layout(layout.root_of(directory))
        self._gang = gang
        self._attempt = layout.checked_attempt(attempt)
        self._keep_last = keep_last
        self._clock = clock
        self._writer = Writer()
        self._background = Background()
        self._under_way: Save | None = None  # what the background was started with last
        self._sweeper = Background()
        self._prepared: _Prepared | None = None
        self._saves = 0  # begun so far; the same in all processes
        self._restores = 0
        self._committed_step: int | None = None  # which is on disk as this gang's state
        self.last_save: SaveStats | None = None

    def check_shared(self, *, timeout_s: float) -> None:
        """Makes sure that the directory is one storage for all processes, and not a disk of each.

        Nothing else would tell before the first save, which for a job without periodic saves is the emergency.

        Raises:
            CheckpointError: Process 0 cannot write there, or another process does not see what it wrote.
            BarrierError: Other processes did not take part in time.
        """
        if self._gang.process_count == 1:
            return
        deadline = Deadline.after(timeout_s, self._clock)
        probe, problem = self._paths.shared_probe(self._attempt), None
        if self._gang.process_index == 0:
            try:
                make_folders(self._paths.root)
                probe.write_bytes(b"")
                problem = ""
            except OSError as error:
                problem = str(error)
        problem = self._gang.broadcast("checkpoint/shared/written", problem, timeout_s=deadline.remaining_s())
        if problem:
            raise CheckpointError(f"process 0 cannot write to {self._paths.root}: {problem}")
        sees = "yes" if appears(probe, within_s=_APPEARS_S, sleep=time.sleep) else "no"
        answers = self._gang.gather("checkpoint/shared/seen", sees, timeout_s=deadline.remaining_s())
        if self._gang.process_index == 0:
            probe.unlink(missing_ok=True)
        blind = [str(process) for process, answer in enumerate(answers) if answer == "no"]
        if blind:
            raise CheckpointError(
                f"{self._paths.root} is not the same storage in all processes: process {', '.join(blind)} does not see "
                f"what process 0 wrote there. Mount one volume that all pods share at this path"
            )

    def prepare(self, state: Any, *, in_background: bool = True) -> int:
        """Does once what must not happen in an emergency: plans, reserves and touches memory, warms the
        writer.

        Args:
            state: Of the form that will be saved.
            in_background: Whether there will be background saves, which need memory for a snapshot.

        Returns:
            Bytes of the state over all processes.

        Raises:
            CheckpointError: The state cannot be saved; names the leaf.
            OSError: The directory cannot be written to.
        """
        leaves = tree.flatten(state)
        prepared = self._prepare(leaves)
        if in_background:
            self._snapshot(leaves, prepared)
        make_folders(self._paths.root)
        probe = self._paths.probe(self._attempt, self._gang.process_index)
        self._writer.warm(probe, Deadline.after(_WARM_UP_TIMEOUT_S, self._clock))
        return prepared.plan.total_bytes

    def save_in_background(self, step: int, state: Any, host_state: Mapping[str, Any]) -> None:
        """Copies the state to host memory and writes it while training goes on.

        Waits for the save before it. When this returns, the state may be donated and the host state changed.

        Raises:
            SaveFailed: The save before this one failed; this one was not begun.
            CheckpointError: The state or the host state cannot be saved; names the leaf.
        """
        self.wait_until_finished(BACKGROUND_TIMEOUT_S)
        if self._is_committed(step):
            return
        save = self._begin(step)
        with save.failing_together():
            leaves = tree.flatten(state)
            prepared = self._prepare(leaves)
            save.describe(leaves, prepared.plan, host_state)
            snapshot = self._snapshot(leaves, prepared)
            started_s = self._clock()
            chunks = snapshot.take(leaves, prepared.plan)
            snapshot_s = self._clock() - started_s

        def run() -> None:
            deadline = Deadline.after(BACKGROUND_TIMEOUT_S, self._clock)
            self._run(save, prepared.plan, chunks, deadline, snapshot_s, lambda stage: None)
            if self._gang.process_index == 0:
                self._tidy(step)

        self._under_way = save
        self._background.start(f"the save of step {step}", run)

    def save(
        self,
        step: int,
        state: Any,
        host_state: Mapping[str, Any],
        *,
        timeout_s: float,
        on_stage: Callable[[str], None],
    ) -> Saved:
        """Saves now, and returns when the step is committed.

        A background save that is under way is waited for first, within the timeout; if it was of the same
        step, that was it. If it failed, that is logged, and does not keep this one from being tried. A step
        that this gang has committed or restored is not saved again. Chunks go from the devices to the disk
        without a snapshot.

        Args:
            step: The step that ``state`` is at; the same in all processes.
            state: The train state. Must not be donated until this returns.
            host_state: This process's values by name.
            timeout_s: For all of it.
            on_stage: Called with "written" (this process's files are), "durable" (its done-record is) and
                "committed" (the step is, for all).

        Raises:
            SaveFailed: It is not committed in time, or a process failed.
            CheckpointError: The state or the host state cannot be saved; names the leaf.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        self._background.wait(deadline.remaining_s())
        if error := self._background.take_error():
            logger.error("the background save before the one of step %d failed: %s", step, error, exc_info=error)
        if self._is_committed(step):
            for stage in ("written", "durable", "committed"):
                on_stage(stage)
            return Saved(step, self._prepare(tree.flatten(state)).plan.total_bytes)
        save = self._begin(step)
        with save.failing_together():
            leaves = tree.flatten(state)
            prepared = self._prepare(leaves)
            save.describe(leaves, prepared.plan, host_state)
        self._run(save, prepared.plan, device_chunks(leaves, prepared.plan), deadline, 0.0, on_stage)
        return Saved(step, prepared.plan.total_bytes)

    def restore(self, like: Any, *, timeout_s: float) -> Restored | None:
        """Restores the newest complete step into the form, shardings and types of ``like``.

        Saves that a process finished and nobody committed are committed first. A save that an earlier attempt
        is still writing is waited for, half of the timeout at most. Damaged steps are passed over with a log
        line.

        Args:
            like: A state; its arrays may be ``jax.ShapeDtypeStruct`` with a sharding. Numbers of processes
                and shardings may differ from those of the save.
            timeout_s: For all of it.

        Returns:
            None if there is nothing that looks like a checkpoint (the log says what was looked at).

        Raises:
            CheckpointCorrupt: There are checkpoints, and none can be restored.
            CheckpointMismatch: The newest does not fit ``like``, or its host state the number of processes.
            CheckpointError: The newest cannot be read for another reason.
            BarrierError: Other processes did not take part in time.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        self._restores += 1
        self._background.wait(deadline.remaining_s())
        restored = restore_newest(
            self._paths,
            like,
            gang=self._gang,
            key=f"checkpoint/restore/{self._restores}",
            attempt=self._attempt,
            deadline=deadline,
            sleep=time.sleep,
        )
        if restored is not None and not restored.by_orbax:
            self._committed_step = restored.step
        if self._gang.process_index == 0:
            self._tidy(self._committed_step, give_up_old=True)
        return restored

    def check_for_errors(self) -> None:
        """Raises SaveFailed if a background save has failed; each failure once. Does not wait."""
        if error := self._background.take_error():
            raise SaveFailed(f"a background save failed: {error}") from error

    def wait_until_finished(self, timeout_s: float) -> None:
        """Waits for the background save under way.

        Raises:
            SaveFailed: It failed, or was not committed within ``timeout_s``.
        """
        self._background.wait(timeout_s)
        self.check_for_errors()

    def close(self, timeout_s: float) -> None:
        """Waits for the background save under way, and for trash to be deleted, as the last call.

        Raises:
            SaveFailed: The save failed, or was not committed within ``timeout_s``.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        self.wait_until_finished(timeout_s)
        with contextlib.suppress(SaveFailed):  # the next start deletes the rest
            self._sweeper.wait(deadline.remaining_s())
            if self._gang.process_index == 0:
                self._sweep()  # what was made trash while it was busy
                self._sweeper.wait(deadline.remaining_s())

    def abandon(self, reason: str, *, timeout_s: float) -> None:
        """The last call in place of ``close`` where training broke off: the save under way has ``timeout_s`` to end.

        A thread that is inside of TensorStore or the coordination service while the interpreter ends would abort the
        process, and its exit code would not be that of the error. Not collective; never raises.
        """
        with contextlib.suppress(SaveFailed):
            self._background.wait(timeout_s)
        if self._background.busy and self._under_way is not None:
            self._under_way.fail(SaveFailed(reason))
            with contextlib.suppress(SaveFailed):
                self._background.wait(_ABANDONED_ENDS_S)
        if error := self._background.take_error():
            logger.error("the background save failed: %s", error)

    def _is_committed(self, step: int) -> bool:
        if self._committed_step != step:
            return False
        logger.info("step %d is committed already", step)
        return True

    def _begin(self, step: int) -> Save:
        self._saves += 1  # before anything can fail, so that the processes' counts never part
        temporary = self._paths.temporary(step, self._attempt, self._saves)
        return Save(self._paths, temporary, self._gang, self._writer)

    def _prepare(self, leaves: Sequence[tree.Leaf]) -> _Prepared:
        form = [(leaf.spec, getattr(leaf.data, "sharding", None)) for leaf in leaves]
        if self._prepared is None or self._prepared.form != form:
            if self._prepared is not None:
                logger.warning("the state has another form than before: planning its saves anew")
            plan = make_plan(leaves, self._gang.process_index, self._gang.process_count)
            self._prepared = _Prepared(form, plan)
        return self._prepared

    def _snapshot(self, leaves: Sequence[tree.Leaf], prepared: _Prepared) -> Snapshot:
        if prepared.snapshot is None:
            prepared.snapshot = Snapshot(leaves, prepared.plan)
        return prepared.snapshot

    def _run(
        self,
        save: Save,
        plan: Plan,
        chunks: Chunks,
        deadline: Deadline,
        snapshot_s: float,
        on_stage: Callable[[str], None],
    ) -> None:
        stages = save.run(chunks, deadline, on_stage)
        self._committed_step = save.step
        self.last_save = SaveStats(save.step, plan.total_bytes, snapshot_s, stages.durable_s, stages.committed_s)

    def _tidy(self, newest_good: int | None, *, give_up_old: bool = False) -> None:
        """Makes trash of old steps, and of what was never finished, and has it deleted. Fails nothing."""
        try:
            if newest_good is not None:
                retention.apply(
                    self._paths,
                    newest_good=newest_good,
                    keep_last=self._keep_last,
                    attempt=self._attempt,
                    ordinal=self._saves,
                )
            if give_up_old:
                commit.give_up_old(self._paths, attempt=self._attempt, older_than_s=UNFINISHED_KEPT_S)
        except OSError as error:
            logger.warning("%s was not tidied up: %s", self._paths.root, error)
        self._sweep()

    def _sweep(self) -> None:
        if not self._sweeper.busy:  # else what is new is left to the next time
            self._sweeper.start("deletion of trash", lambda: commit.empty_trash(self._paths))
