"""Saves checkpoints to separate paths, in the background. The interface is that of Orbax's ``AsyncCheckpointer``.

One thread owns an ``AsyncCheckpointer`` and makes all calls. They are collective: all processes that save make the same
calls in the same order. The thread that runs a save is one of ``saving.executor`` (for ``save_and_wait``, the
caller's). It also calls ``post_finalization_callback`` and deletes the replaced checkpoint.

When the interpreter ends, it waits for the save in progress.

``save``, ``restore``, ``all_steps`` and ``latest_step`` need no checkpointer of the caller's.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self

import jax

from gracepoint import machine
from gracepoint.arguments import check_kind
from gracepoint.checkpoint import orbax
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.groups import AtExit, GroupFactory, JoinedGroup, SyncFnBarrier, call_back
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.metadata import TreeMetadata, metadata_of
from gracepoint.checkpoint.metrics import SaveStats
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, DEFAULT_RESTORE_OPTIONS, RestoreOptions, WriteOptions
from gracepoint.checkpoint.restoring import restore_path
from gracepoint.checkpoint.saving.executor import SaveExecutor
from gracepoint.checkpoint.saving.extras import SaveExtras
from gracepoint.checkpoint.saving.operation import CommitOptions, SaveOperation
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.steps import listing, retention
from gracepoint.checkpoint.storage.locations import UserPath, storage_path
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierError, SettingsError
from gracepoint.multihost.utilities import BarrierSyncFn
from gracepoint.process_group import ProcessGroup
from gracepoint.threads import is_forked

logger = logging.getLogger(__name__)


#: Seconds for the part of a save that runs in the background, and for each of the other calls.
TIMEOUT_S = 900.0
#: Event of ``jax.monitoring``, with Orbax's name: a checkpointer was created.
INIT_EVENT = "/jax/orbax/async_checkpointer/init"

# Seconds for the background save to end after an error has left the ``with`` block.
_ABANDON_S = 10.0


class AsyncCheckpointer:
    """Saves to paths and restores from them. Every call except ``metadata`` is collective.

    Works in a single process, in any initialised JAX cluster, and next to an open session. Several checkpointers may be
    alive at the same time, if every process creates them in the same order.
    """

    def __init__(
        self,
        handler: None = None,
        timeout_secs: float | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        primary_host: int | None = 0,
        active_processes: Collection[int] | None = None,
        barrier_sync_fn: BarrierSyncFn | None = None,
        post_finalization_callback: Callable[[], None] | None = None,
        options: WriteOptions | None = None,
        host_memory_limit_bytes: int | None = None,
        handlers: HandlerRegistry | None = None,
        gang: ProcessGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches neither files nor JAX's backend.

        Args:
            handler: Must be None. Orbax's class has a handler in this place; trees are saved without one here.
            timeout_secs: Orbax's name for ``timeout_s``. None: ``timeout_s`` is used.
            timeout_s: Seconds for the part of a save that runs in the background, and for each of the other calls.
            primary_host: ``jax.process_index()`` of the process that calls ``post_finalization_callback``. None: every
                process calls it.
            active_processes: ``jax.process_index()`` of the processes that save. Only they make the calls, and they
                must hold all values that are saved. None: all processes.
            barrier_sync_fn: Barrier at which the processes meet in the background. The primary process then commits,
                between two calls of it. A process that fails cannot notify the others, which wait for the whole
                timeout.
                None: the built-in barrier, at which the last process to arrive commits. One process calls neither.
            post_finalization_callback: Called after each commit, before the save counts as finished in any process.
                ``timeout_s`` also applies to it. None: nothing is called.
            options: How arrays are written. None: the defaults.
            host_memory_limit_bytes: Most bytes of host memory in this process for the copy that ``save`` makes. None:
                the available memory of the host.
            handlers: Handlers of leaf types of your own. Equal in all processes. None: such leaves are an error.
            gang: An existing process group, in place of ``active_processes``. None: the checkpointer creates a group.
            clock: Returns monotonic seconds.

        Raises:
            SettingsError: An argument is wrong.
        """
        if handler is not None:
            raise SettingsError(
                f"handler: expected None, found a {type(handler).__qualname__}: trees are saved without one, as "
                "options= says. What is no tree of arrays, numbers and strings is saved by other means"
            )
        if timeout_secs is not None and timeout_s != TIMEOUT_S:
            raise SettingsError(f"timeout_secs is {timeout_secs} and timeout_s is {timeout_s}: give one of them")
        timeout_s = timeout_s if timeout_secs is None else timeout_secs
        if timeout_s <= 0:
            raise SettingsError(f"timeout_s: expected a number of seconds above 0, found {timeout_s}")
        check_kind("AsyncCheckpointer(options=...)", options, WriteOptions)
        check_kind("AsyncCheckpointer(handlers=...)", handlers, HandlerRegistry)
        if handlers is not None:
            handlers.check_for_trees()
        self._handlers = handlers
        jax.monitoring.record_event(INIT_EVENT)
        logger.info(
            "checkpointer made: timeout_s=%g primary_host=%s active_processes=%s, barrier %s",
            timeout_s,
            primary_host,
            "all" if active_processes is None else sorted(active_processes),
            "barrier_sync_fn" if barrier_sync_fn is not None else "built in",
        )
        self._timeout_s = timeout_s
        self._primary_host = primary_host
        self._barrier_sync_fn = barrier_sync_fn
        self._callback = post_finalization_callback
        self._options = options
        self._settings = SaveSettings(options or DEFAULT_OPTIONS, host_memory_limit_bytes, handlers)
        self._clock = clock
        self._joining = GroupFactory(active_processes, gang)
        # None before the processes have come together, and after the checkpointer was closed.
        self._executor: SaveExecutor | None = None
        self._retired = 0  # keys are removed up to this save; used in the thread of the save that was committed last
        self._last_save: SaveStats | None = None
        self._restores = 0
        self._closed = False
        self._pid = machine.process_id()
        self._at_exit = AtExit(self)

    @property
    def last_save(self) -> SaveStats | None:
        """Figures of the last committed save in this process. None before the first."""
        return self._last_save if self._executor is None else self._executor.last_save

    def prepare(self, tree: Any, *, save_args: Any = None) -> None:
        """Reserves and touches the memory that ``save`` copies to, so that the first save is no slower than the others.

        Args:
            tree: A tree of the form that will be saved.
            save_args: The argument that ``save`` will get. None: no arguments.

        Raises:
            SaveFailed: The save before this call failed, or hangs.
            CheckpointError: The tree cannot be saved; names the leaf. Or its copy does not fit into memory.
            BarrierError: Other processes did not take part in time.
        """
        self._check_open()
        self.wait_until_finished()  # the save in progress uses memory that a tree of another form may need
        _, executor = self._join()
        executor.planner.prepare(tree, in_background=True, save_args=save_args)

    def save(
        self,
        path: UserPath,
        tree: Any = None,
        *,
        force: bool = False,
        save_args: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
        args: Any = None,
    ) -> None:
        """Copies ``tree`` to host memory, and writes it while the caller continues.

        Waits for the previous save first. When this returns, the tree may be donated. The path does not exist before
        the save is committed. One rename makes the whole checkpoint visible.

        Args:
            path: Absolute path on a file system that all processes share, or a URI (``gs://bucket/name``, ...).
            tree: Arrays, numbers, strings, and leaves that ``handlers`` are for.
            force: Whether to replace a checkpoint that exists at ``path``. It stays until the new one is durable.
            save_args: ``SaveArgs`` for all leaves, or a tree of them. None: the defaults.
            custom_metadata: JSON values, by name, that ``metadata`` returns. None: there are none.
            args: The call in Orbax's form, in place of ``tree``: a ``StandardSave`` or ``PyTreeSave``.

        Raises:
            SaveFailed: The save before this one failed, or hangs; this one was not begun.
            CheckpointExists: Something exists at ``path``, and ``force`` is not set, or it is not a checkpoint.
            CheckpointError: The tree cannot be saved; names the leaf.
            BarrierError: Other processes did not take part in time.
        """
        began_s = self._clock()
        call = self._call(tree, args, save_args, custom_metadata)
        joined, executor = self._join()
        save = self._begin(path, joined, executor, force=force, extras=SaveExtras(call.custom_metadata))
        executor.in_background(
            save,
            call.tree,
            {},
            save_args=call.save_args,
            timeout_s=self._timeout_s,
            began_s=began_s,
            then=functools.partial(self._after_commit, save, joined),
        )

    def save_and_wait(
        self,
        path: UserPath,
        tree: Any = None,
        *,
        force: bool = False,
        save_args: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
        args: Any = None,
    ) -> None:
        """Saves as ``save`` does, without a copy in host memory, and returns when the checkpoint is committed.

        Raises:
            SaveFailed: The checkpoint is not committed in time, or a process failed.
            CheckpointExists: As in ``save``.
            CheckpointError: As in ``save``.
            BarrierError: As in ``save``.
        """
        call = self._call(tree, args, save_args, custom_metadata)
        joined, executor = self._join()
        save = self._begin(path, joined, executor, force=force, extras=SaveExtras(call.custom_metadata))
        deadline = Deadline.after(self._timeout_s, self._clock)
        executor.now(save, call.tree, {}, save_args=call.save_args, deadline=deadline, on_stage=lambda stage: None)
        self._after_commit(save, joined)

    def restore(
        self,
        path: UserPath,
        like: Any = None,
        *,
        restore_args: Any = None,
        options: RestoreOptions = DEFAULT_RESTORE_OPTIONS,
        args: Any = None,
    ) -> Any:
        """Restores the checkpoint at ``path``, written by Gracepoint or Orbax.

        If all processes finished a save to ``path``, and it was not committed, it is committed first. If there is no
        checkpoint, this waits for a save that another start of the job is still writing.

        Args:
            path: Path of the checkpoint, of a step's folder, or of one of the items in it.
            like: A tree with the shapes, dtypes and shardings to restore into. Its arrays may be
                ``jax.ShapeDtypeStruct``. None: the tree is restored as it was saved, as dicts and lists.
            restore_args: ``RestoreArgs`` for all leaves, or a tree of them. None: no arguments.
            options: What may be missing, and how much memory reading may take.
            args: The call in Orbax's form, in place of ``like``: a ``StandardRestore`` or ``PyTreeRestore``.

        Returns:
            The tree.

        Raises:
            SaveFailed: The save before this call failed, or hangs.
            CheckpointNotFound: There is no checkpoint.
            CheckpointCorrupt: The checkpoint is not finished, or damaged.
            CheckpointMismatch: The checkpoint does not fit ``like``.
            BarrierError: Other processes did not take part in time.
        """
        check_kind("restore(options=...)", options, RestoreOptions)
        call = orbax.restore_call(like, args, restore_args=restore_args, options=options)
        self._check_open()
        self.wait_until_finished()
        joined, _ = self._join()
        self._restores += 1
        paths = restore_path.paths_of(path)
        return restore_path.restore(
            paths,
            paths.step(None),
            call.like,
            call.restore_args,
            gang=joined.gang,
            key=f"checkpoint/{joined.attempt}/restore/{self._restores}",
            attempt=joined.attempt,
            deadline=Deadline.after(self._timeout_s, self._clock),
            sleep=time.sleep,
            options=call.options.with_handlers(self._handlers),
        )

    def metadata(self, path: UserPath) -> TreeMetadata:
        """Returns what is saved at ``path``, without reading any array. Not collective.

        Waits for the save in progress.

        Raises:
            SaveFailed: The save before this call failed, or hangs.
            CheckpointNotFound: There is no checkpoint.
            CheckpointCorrupt: The metadata is damaged.
        """
        self._check_open()
        self.wait_until_finished()
        folder = restore_path.folder_of(restore_path.paths_of(path).step(None))
        return metadata_of(folder, Deadline.after(self._timeout_s, self._clock), self._handlers)

    def check_for_errors(self) -> None:
        """Raises SaveFailed if a background save has failed. Raises each failure once. Does not wait.

        After ``close``, which has raised what there was to raise, it does nothing. In a forked child it raises
        ForkedChild, as the save is the parent's.
        """
        if self._executor is not None:
            self._executor.check_for_errors()

    def wait_until_finished(self) -> None:
        """Waits for the background save in progress. After ``close`` there is none.

        Raises:
            SaveFailed: The save failed, or did not end within a few seconds after its timeout.
            ForkedChild: The save is the parent's, and a forked child cannot know how it ends.
        """
        if self._executor is not None:
            self._executor.wait_until_finished(None)

    def close(self) -> None:
        """Waits for the background save, and frees its memory. May be called again. In a forked child it does nothing.

        Raises:
            SaveFailed: The save failed.
        """
        if self._closed or is_forked(self._pid):
            return
        try:
            self.wait_until_finished()
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            if self._executor is not None:
                self._executor.abandon(f"{type(error).__name__}: {error}", timeout_s=_ABANDON_S)
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._at_exit.forget()
        self._last_save, self._executor = self.last_save, None

    def _check_open(self) -> None:
        if self._closed:
            raise SettingsError("the checkpointer is closed")

    def _call(self, tree: Any, args: Any, save_args: Any, custom_metadata: Mapping[str, Any] | None) -> orbax.SaveCall:
        call = orbax.save_call(tree, args, save_args=save_args, custom_metadata=custom_metadata, options=self._options)
        self._check_open()
        return call

    def _join(self) -> tuple[JoinedGroup, SaveExecutor]:
        """Returns the processes and the executor of their saves. The first call brings the processes together.

        Raises:
            SettingsError: The primary process does not save.
            BarrierError: Other processes did not take part in time.
        """
        joined = self._joining.join(timeout_s=self._timeout_s)
        if self._executor is None:
            if self._primary_host is not None:
                joined.rank(self._primary_host)  # raises if the primary process does not save
            self._executor = SaveExecutor(
                joined.gang,
                joined.attempt,
                dataclasses.replace(self._settings, processes=joined.processes),
                clock=self._clock,
            )
        return joined, self._executor

    def _begin(
        self, path: UserPath, joined: JoinedGroup, executor: SaveExecutor, *, force: bool, extras: SaveExtras
    ) -> SaveOperation:
        """Begins a save to ``path``, once all processes know that nothing prevents it.

        Raises:
            SaveFailed: The save before this one failed, or hangs.
            CheckpointExists: Something exists at ``path``, and ``force`` is not set, or it is not a checkpoint.
            BarrierError: Other processes did not take part in time.
        """
        paths = restore_path.paths_of(path)
        save = executor.begin(paths, None, how=CommitOptions(force, self._barrier(joined)), extras=extras)
        with save.failing_together():
            restore_path.check_target(
                save,
                joined.gang,
                make_way=lambda: executor.wait_until_finished(None),
                force=force,
                timeout_s=self._timeout_s,
            )
        return save

    def _barrier(self, joined: JoinedGroup) -> SyncFnBarrier | None:
        if self._barrier_sync_fn is None or joined.gang.process_count == 1:
            return None  # as in Orbax, one process meets nobody
        committer = 0 if self._primary_host is None else joined.rank(self._primary_host)
        return SyncFnBarrier(self._barrier_sync_fn, commits_here=committer == joined.gang.process_index)

    def _after_commit(self, save: SaveOperation, joined: JoinedGroup) -> None:
        """Calls the callback, and deletes the replaced checkpoint. Runs in the thread that runs the save."""
        if self._callback is not None:
            is_called = self._primary_host is None or joined.rank(self._primary_host) == joined.gang.process_index
            call_back(
                self._callback if is_called else None,
                gang=joined.gang,
                key=f"{save.key}/callback",
                timeout_s=self._timeout_s,
            )
        if joined.gang.process_index == 0:
            retention.tidy_beside(save.temporary, save.paths)
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
            logger.warning("could not remove the keys of an earlier save: %s", error)


def save(
    path: UserPath,
    tree: Any,
    *,
    force: bool = False,
    save_args: Any = None,
    custom_metadata: Mapping[str, Any] | None = None,
    options: WriteOptions | None = None,
    handlers: HandlerRegistry | None = None,
) -> None:
    """Saves ``tree`` at ``path``, and returns when it is committed. Collective.

    Args:
        path: Absolute path on a file system that all processes share, or a URI (``gs://bucket/name``, ...).
        tree: Arrays, numbers, strings, and leaves that ``handlers`` are for. Functions among its leaves are not saved:
            a restore takes them from ``like``.
        force: Whether to replace a checkpoint that exists at ``path``. It stays until the new one is durable.
        save_args: ``SaveArgs`` for all leaves, or a tree of them. None: the defaults.
        custom_metadata: JSON values, by name, that ``AsyncCheckpointer.metadata`` returns. None: there are none.
        options: How arrays are written. None: the defaults.
        handlers: Handlers of leaf types of your own. Equal in all processes. None: such leaves are an error.

    Raises:
        CheckpointExists: Something exists at ``path``, and ``force`` is not set, or it is not a checkpoint.
        SaveFailed: The checkpoint is not committed in time, or a process failed.
        CheckpointError: The tree cannot be saved; names the leaf.
        BarrierError: Other processes did not take part in time.
    """
    with AsyncCheckpointer(options=options, handlers=handlers) as checkpointer:
        checkpointer.save_and_wait(path, tree, force=force, save_args=save_args, custom_metadata=custom_metadata)


def restore(
    path: UserPath,
    like: Any = None,
    *,
    restore_args: Any = None,
    options: RestoreOptions = DEFAULT_RESTORE_OPTIONS,
    handlers: HandlerRegistry | None = None,
) -> Any:
    """Restores the checkpoint at ``path``, written by Gracepoint or Orbax. Collective.

    ``handlers`` are the handlers of leaf types of your own. The other arguments, the result and the errors are those of
    ``AsyncCheckpointer.restore``.
    """
    with AsyncCheckpointer(handlers=handlers) as checkpointer:
        return checkpointer.restore(path, like, restore_args=restore_args, options=options)


def all_steps(directory: UserPath) -> list[int]:
    """Returns the steps below ``directory`` that have a complete checkpoint, Gracepoint's or Orbax's, oldest first.

    Changes nothing: a save that is durable but not committed is listed only after the next ``restore`` commits it. If
    there are no steps, and something else looks like a checkpoint, a line in the log names it.

    Raises:
        SettingsError: ``directory`` is neither an absolute path nor a known kind of URI.
    """
    return listing.steps_for_users(Layout(storage_path(directory)))


def latest_step(directory: UserPath) -> int | None:
    """Returns the newest of ``all_steps``. None if there is none."""
    return max(all_steps(directory), default=None)
