"""Saves to paths of their own: which processes take part, where they meet to commit, and what follows a commit.

One thread owns a ``PathSaves``. ``after_commit`` runs in the thread that runs the save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gracepoint.checkpoint.checkpointers.group_factory import GroupFactory, JoinedGroup
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.loading import restore_path
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.saving.background.save_executor import SaveExecutor
from gracepoint.checkpoint.saving.commit_callback import call_back
from gracepoint.checkpoint.saving.operation.save_extras import SaveExtras
from gracepoint.checkpoint.saving.operation.save_operation import SaveOperation
from gracepoint.checkpoint.saving.sync_fn_barrier import SyncFnBarrier
from gracepoint.checkpoint.steps import cleanup
from gracepoint.checkpoint.storage.storage_path import UserPath
from gracepoint.errors import BarrierError
from gracepoint.multihost.utilities import BarrierSyncFn

logger = logging.getLogger(__name__)


class PathSaves:
    """The saves of an ``AsyncCheckpointer``, whose constructor documents the arguments.

    Attributes:
        executor: Runs the saves. None before the processes have come together, and after the checkpointer was closed.
    """

    def __init__(
        self,
        joining: GroupFactory,
        *,
        timeout_s: float,
        primary_host: int | None,
        barrier_sync_fn: BarrierSyncFn | None,
        callback: Callable[[], None] | None,
        options: WriteOptions | None,
        host_memory_limit_bytes: int | None,
        handlers: HandlerRegistry | None,
        clock: Callable[[], float],
    ) -> None:
        self._joining = joining
        self._timeout_s = timeout_s
        self._primary_host = primary_host
        self._barrier_sync_fn = barrier_sync_fn
        self._callback = callback
        self._options = options
        self._host_memory_limit_bytes = host_memory_limit_bytes
        self._handlers = handlers
        self._clock = clock
        self._joined: JoinedGroup | None = None
        self._retired = 0  # keys are removed up to this save; used in the thread of the save that was committed last
        self.executor: SaveExecutor | None = None

    def join(self) -> tuple[JoinedGroup, SaveExecutor]:
        """Returns the processes and the executor of their saves. The first call brings the processes together.

        Raises:
            SettingsError: The primary process does not save.
            BarrierError: Other processes did not take part in time.
        """
        joined = self._joined = self._joining.join(timeout_s=self._timeout_s)
        if self.executor is None:
            if self._primary_host is not None:
                joined.rank(self._primary_host)  # raises if the primary process does not save
            self.executor = SaveExecutor(
                joined.gang,
                joined.attempt,
                clock=self._clock,
                processes=joined.processes,
                options=self._options,
                host_memory_limit_bytes=self._host_memory_limit_bytes,
                handlers=self._handlers,
            )
        return joined, self.executor

    def begin(self, path: UserPath, force: bool, extras: SaveExtras) -> tuple[SaveOperation, SaveExecutor, Layout]:
        """Begins a save to ``path``, once all processes know that nothing prevents it.

        Raises:
            SaveFailed: The save before this one failed, or hangs.
            CheckpointExists: Something exists at ``path``, and ``force`` is not set, or it is not a checkpoint.
            BarrierError: Other processes did not take part in time.
        """
        joined, executor = self.join()
        paths = restore_path.paths_of(path)
        save = executor.begin(paths, None, replace=force, barrier=self._barrier(joined), extras=extras)
        with save.failing_together():
            restore_path.check_target(
                save,
                joined.gang,
                make_way=lambda: executor.background.wait_until_finished(None),
                force=force,
                timeout_s=self._timeout_s,
            )
        return save, executor, paths

    def _barrier(self, joined: JoinedGroup) -> SyncFnBarrier | None:
        if self._barrier_sync_fn is None or joined.gang.process_count == 1:
            return None  # as in Orbax, one process meets nobody
        committer = 0 if self._primary_host is None else joined.rank(self._primary_host)
        return SyncFnBarrier(self._barrier_sync_fn, commits_here=committer == joined.gang.process_index)

    def after_commit(self, save: SaveOperation, paths: Layout) -> None:
        """Calls the callback, and deletes the replaced checkpoint. Runs in the thread that runs the save."""
        joined = self._joined  # that of ``begin``
        assert joined is not None
        if self._callback is not None:
            is_called = self._primary_host is None or joined.rank(self._primary_host) == joined.gang.process_index
            call_back(
                self._callback if is_called else None,
                gang=joined.gang,
                key=f"{save.key}/callback",
                timeout_s=self._timeout_s,
            )
        if joined.gang.process_index == 0:
            cleanup.tidy_beside(save.temporary, paths)
        self._retire(save, joined)

    def _retire(self, save: SaveOperation, joined: JoinedGroup) -> None:
        """Removes the keys of saves that all processes have left.

        Each process waits for its save before it begins the next. So when this save is committed, all have left the one
        before. The keys of that one stay, as its thread may still be ending if it was stopped.
        """
        try:
            while self._retired < save.temporary.ordinal - 2:
                self._retired += 1
                joined.gang.retire(f"checkpoint/{joined.attempt}/save/{self._retired}")
        except BarrierError as error:
            logger.warning("the keys of an earlier save are not removed: %s", error)
