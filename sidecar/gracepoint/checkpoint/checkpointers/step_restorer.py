"""Restores the steps of the directory in which a ``StepCheckpointer`` saves.

The thread that owns the checkpointer makes all calls. All processes make the same calls in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gracepoint import machine
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.loading.leaves import donation
from gracepoint.checkpoint.loading.own_host_state import Reshard
from gracepoint.checkpoint.loading.restore_step import Restored, restore_newest
from gracepoint.checkpoint.loading.stored_items import NO_ITEMS, ItemsRequest
from gracepoint.checkpoint.loading.warm_start import restore_base
from gracepoint.checkpoint.options import DEFAULT_RESTORE_OPTIONS, RestoreOptions
from gracepoint.checkpoint.saving.background.save_executor import SaveExecutor
from gracepoint.checkpoint.saving.committed_steps import CommittedSteps
from gracepoint.checkpoint.saving.save_interval import SaveInterval
from gracepoint.checkpoint.steps.directory_access import DirectoryAccess
from gracepoint.checkpoint.steps.retention import DamagedStep
from gracepoint.checkpoint.storage.storage_path import UserPath, storage_path
from gracepoint.deadline import Deadline
from gracepoint.forks import check_not_forked
from gracepoint.process_group import ProcessGroup


class StepRestorer:
    """Restores the train state of a gang. All calls are collective.

    Args:
        paths: The directory.
        gang: The processes that restore together.
        key: Prefix of the keys of these calls. Nothing else uses it.
        attempt: Unique for each start of the gang; the same in all its processes.
        access: Knows whether this process holds the directory's lease.
        executor: Runs the saves. A restore waits for the one under way.
        committed: The steps that this gang knows to be committed. A restored step is one of them.
        save_interval: Says when a save is due. A restore says at which step training goes on.
        handlers: Handlers of leaf types of the user's own. None: there are none.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        paths: Layout,
        gang: ProcessGroup,
        *,
        key: str,
        attempt: str,
        access: DirectoryAccess,
        executor: SaveExecutor,
        committed: CommittedSteps,
        save_interval: SaveInterval,
        handlers: HandlerRegistry | None,
        clock: Callable[[], float],
    ) -> None:
        self._paths = paths
        self._gang = gang
        self._key = key
        self._attempt = attempt
        self._access = access
        self._executor = executor
        self._committed = committed
        self._save_interval = save_interval
        self._handlers = handlers
        self._clock = clock
        self._restores = 0
        self._pid = machine.process_id()

    @property
    def is_primary(self) -> bool:
        """True in process 0, which logs what concerns all processes."""
        return self._gang.process_index == 0

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
            reshard: See ``restore_newest``.
            required: See ``restore_newest``.
            items: The items to restore beside the state.
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
            SaveFailed: The background save under way did not end within ``timeout_s``.
        """
        check_not_forked(self._pid, "this checkpointer")  # it commits and deletes, too
        deadline = Deadline.after(timeout_s, self._clock)
        self._restores += 1
        self._executor.background.wait(deadline.remaining_s())
        self._committed.settle(deadline.remaining_s())  # so that no step is renamed while it is read below
        with donation.telling(like):
            restored = restore_newest(
                self._paths,
                like,
                gang=self._gang,
                key=f"{self._key}/{self._restores}",
                attempt=self._attempt,
                deadline=deadline,
                sleep=time.sleep,
                holds_lease=self._access.holds_lease,
                restore_args=restore_args,
                options=options.with_handlers(self._handlers),
                reshard=reshard,
                required=required,
                only=step,
                items=items,
                base=None if base is None else storage_path(base),
                same_devices=same_devices,
            )
        self._save_interval.began_at(0 if restored is None else restored.step)
        if restored is not None and not restored.by_orbax:
            self._committed.newest = restored.step
        damaged: dict[int, DamagedStep] = {}
        if restored is not None:
            for passed_over, standing in restored.passed_over_standing.items():
                damaged[passed_over] = DamagedStep(restored.passed_over[passed_over], standing)
        self._committed.after_restore(damaged, self._executor.saves, tidies=tidy)
        return restored

    def restore_base(
        self, base: UserPath, like: Any, *, timeout_s: float, restore_args: Any = None, options: RestoreOptions
    ) -> Restored:
        """Restores the state of another run, of which nothing is changed. See ``warm_start.restore_base``. Collective.

        The steps of this directory begin at 0.
        """
        self._restores += 1
        with donation.telling(like):
            return restore_base(
                base,
                like,
                gang=self._gang,
                key=f"{self._key}/{self._restores}",
                deadline=Deadline.after(timeout_s, self._clock),
                restore_args=restore_args,
                options=options.with_handlers(self._handlers),
            )
