"""Manages the steps of a directory for training loops that have no session: when to save, and which steps to keep.

A ``CheckpointManager`` uses a ``StepCheckpointer``, as sessions do, and brings the processes together itself. One
thread owns a manager and makes all calls. All processes make the same calls in the same order. Any thread may call
``all_steps``, ``latest_step`` and ``metadata``. The manager's threads are those of ``StepCheckpointer``. When the
interpreter ends, it waits for the save in progress.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self, overload

import jax

from gracepoint.arguments import check_kind, step_number
from gracepoint.checkpoint import orbax
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.groups import AtExit, GroupFactory
from gracepoint.checkpoint.handler_registry import HandlerRegistry, ItemHandler
from gracepoint.checkpoint.metadata import TreeMetadata, metadata_of
from gracepoint.checkpoint.metrics import SaveStats
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, DEFAULT_RESTORE_OPTIONS, RestoreOptions, WriteOptions
from gracepoint.checkpoint.restoring import restore_path
from gracepoint.checkpoint.restoring.restore_step import ItemsRequest, Restored
from gracepoint.checkpoint.saving.extras import SaveExtras, check_items
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.saving.schedule import SaveSchedule
from gracepoint.checkpoint.steps import lease, listing
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.locations import UserPath, storage_path
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointNotFound, SettingsError
from gracepoint.process_group import ProcessGroup

#: Event of ``jax.monitoring``, with Orbax's name: a manager was created.
INIT_EVENT = "/jax/orbax/checkpoint_manager/init"

# Seconds for the background save to end after an error has left the ``with`` block.
_ABANDON_S = 10.0


class CheckpointManager:
    """Saves and restores the steps of one directory."""

    def __init__(
        self,
        directory: UserPath,
        *,
        save_every_steps: int | None = None,
        save_every_s: float = 0.0,
        keep_last: int = 3,
        keep_every_steps: int = 0,
        keep_for_s: float = 0.0,
        timeout_s: float = 900.0,
        active_processes: Collection[int] | None = None,
        options: WriteOptions | None = None,
        host_memory_limit_bytes: int | None = None,
        handlers: HandlerRegistry | None = None,
        item_name: str = layout.STATE_ITEM,
        item_handlers: Mapping[str, ItemHandler] | None = None,
        gang: ProcessGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches neither files nor JAX's backend.

        Args:
            directory: Absolute path on a file system that all processes share, or a URI (``gs://bucket/name``, ...).
            save_every_steps: A step is due if it is a multiple of this number, or the first step asked about after a
                multiple that was skipped. 0: no step is due for that reason. None: 1, or 0 if ``save_every_s`` is set.
            save_every_s: Seconds after the last save at which a step is due. 0: no step is due for that reason.
            keep_last: How many of the newest steps are kept.
            keep_every_steps: Steps that are multiples of it are kept, too. 0: no step is kept for that reason.
            keep_for_s: Seconds for which every step is kept after its commit. 0: no step is kept for that reason.
            timeout_s: Seconds for the part of a save that runs in the background, and for each of the other calls.
            active_processes: ``jax.process_index()`` of the processes that save. Only they make the calls, and they
                must hold all values that are saved. None: all processes.
            options: How arrays are written. None: the defaults.
            host_memory_limit_bytes: Most bytes of host memory in this process for the copy that ``save`` makes. None:
                the available memory of the host.
            handlers: Handlers of leaf types of your own. Equal in all processes. None: such leaves are an error.
            item_name: Name of the item that holds the state in each step. If Orbax wrote a step without an item of this
                name, the only item with a tree of arrays is used in its place.
            item_handlers: Handlers of further items of a step, by the item's name. None: there are none.
            gang: An existing process group, in place of ``active_processes``. None: the manager creates a group.
            clock: Returns monotonic seconds. The clock of process 0 decides when a step is due.

        Raises:
            SettingsError: An argument is wrong.
        """
        jax.monitoring.record_event(INIT_EVENT)
        if options is not None and not isinstance(options, WriteOptions):
            raise SettingsError(
                f"options: expected WriteOptions, found a {type(options).__qualname__}: when to save and what to keep "
                "are arguments of the manager (save_every_steps, save_every_s, keep_last, keep_every_steps, keep_for_s)"
            )
        check_kind("CheckpointManager(handlers=...)", handlers, HandlerRegistry)
        if handlers is not None:
            handlers.check_for_trees()
        self._item_name = layout.checked_item(item_name)
        self._item_handlers = {layout.checked_item(name): one for name, one in (item_handlers or {}).items()}
        if item_name in self._item_handlers:
            raise SettingsError(f"item_handlers has {item_name!r}, which holds the state: expected other items")
        self._options = options
        self._handlers = handlers
        if save_every_steps is None:
            save_every_steps = 0 if save_every_s else 1
        self._directory = directory
        self._paths = Layout(storage_path(directory), item=item_name)
        self._timeout_s = timeout_s
        self._joining = GroupFactory(active_processes, gang)
        self._schedule = SaveSchedule(save_every_steps, save_every_s)
        self._retention = Retention(keep_last, keep_every_steps, keep_for_s)
        self._settings = SaveSettings(options or DEFAULT_OPTIONS, host_memory_limit_bytes, handlers)
        self._clock = clock
        self._checkpointer: StepCheckpointer | None = None
        self._claimed = False
        self._has_restored = False
        self._looks = 0  # number of checks for newer steps
        self._closed = False
        self._at_exit = AtExit(self)

    @property
    def directory(self) -> UserPath:
        """The directory of the steps, as it was given."""
        return self._directory

    @property
    def last_save(self) -> SaveStats | None:
        """Figures of the last committed save in this process. None before the first."""
        return None if self._checkpointer is None else self._checkpointer.executor.last_save

    def all_steps(self) -> list[int]:
        """Returns the steps that have a complete checkpoint, oldest first."""
        return listing.steps_for_users(self._paths)

    def latest_step(self) -> int | None:
        """Returns the newest step that has a complete checkpoint. None if there is none."""
        return max(self.all_steps(), default=None)

    def prepare(self, tree: Any, *, save_args: Any = None) -> None:
        """Reserves and touches the memory that ``save`` copies to, so that the first save is no slower than the others.

        Args:
            tree: A tree of the form that will be saved.
            save_args: The argument that ``save`` will get. None: no arguments.

        Raises:
            CheckpointError: The tree cannot be saved; names the leaf. Or its copy does not fit into memory.
            OSError: The directory cannot be written to.
        """
        self._open().prepare(tree, save_args=save_args)

    def should_save(self, step: int) -> bool:
        """Returns whether this step is due, the same in all processes.

        If ``save_every_s`` is set, every process must call this or ``save`` at every step. ``save`` also asks whether
        the step is due.
        """
        return self._open().save_interval.is_due(step_number("should_save(step)", step))

    def save(
        self,
        step: int,
        tree: Any = None,
        *,
        force: bool = False,
        save_args: Any = None,
        items: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
        args: Any = None,
    ) -> bool:
        """Saves the tree if the step is due (``should_save``) or ``force`` is set.

        Copies the tree to host memory, and writes it while the caller continues. Waits for the previous save first.
        When this returns, the tree may be donated.

        Args:
            step: The step that the tree is at.
            tree: Arrays, numbers, strings, and leaves that ``handlers`` are for.
            force: Whether to save a step that is not due, and to replace one that this manager has already saved.
            save_args: ``SaveArgs`` for all leaves, or a tree of them. None: the defaults.
            items: The arguments for the handler of each further item, by the item's name. The handlers write before
                this returns.
            custom_metadata: JSON values, by name, that ``metadata`` returns. None: there are none.
            args: The call in Orbax's form, in place of ``tree``: a ``StandardSave`` or ``PyTreeSave``, or a
                ``Composite`` with one of them as the item ``item_name``, and others for the handlers.

        Returns:
            True if a save was begun, or if this manager has already saved or restored the step.

        Raises:
            SaveFailed: The save before this one failed, or hangs; this one was not begun.
            CheckpointExists: This would be the first save, nothing was restored, and the directory has a step that is
                ``step`` or newer.
            CheckpointError: The tree cannot be saved; names the leaf. Or another job uses the directory.
            BarrierError: Other processes did not take part in time.
        """
        step = step_number("save(step, tree)", step)
        call = orbax.save_call(
            tree,
            args,
            save_args=save_args,
            custom_metadata=custom_metadata,
            items=items,
            item_name=self._item_name,
            options=self._options,
        )
        extras = SaveExtras(call.custom_metadata, call.items, self._item_handlers)
        checkpointer = self._open()
        if not (checkpointer.save_interval.is_due(step) or force):
            return False
        if not self._claimed:
            if not (force or self._has_restored):
                self._check_nothing_newer(step)
            checkpointer.access.claim(self._joined.job, timeout_s=self._timeout_s)
            checkpointer.access.check_shared(timeout_s=self._timeout_s)
            self._claimed = True
        checkpointer.save_in_background(
            step,
            call.tree,
            {},
            save_args=call.save_args,
            extras=extras,
            timeout_s=self._timeout_s,
            anew=force,
        )
        return True

    @overload
    def restore(
        self,
        step: int | None = None,
        *,
        like: Any = None,
        restore_args: Any = None,
        items: Mapping[str, Any] | None = None,
        options: RestoreOptions = DEFAULT_RESTORE_OPTIONS,
    ) -> Restored: ...

    @overload
    def restore(
        self, step: int | None = None, *, options: RestoreOptions = DEFAULT_RESTORE_OPTIONS, args: Any
    ) -> Any: ...

    def restore(
        self,
        step: int | None = None,
        *,
        like: Any = None,
        restore_args: Any = None,
        items: Mapping[str, Any] | None = None,
        options: RestoreOptions = DEFAULT_RESTORE_OPTIONS,
        args: Any = None,
    ) -> Any:
        """Restores a step, or the newest one that all processes can read.

        Nothing is deleted before the first save, as an evaluation may read the directory of another job.

        Args:
            step: The step to restore. None: the newest one that is not damaged.
            like: A tree with the shapes, dtypes and shardings to restore into. Its arrays may be
                ``jax.ShapeDtypeStruct``. None: the tree is restored as it was saved, as dicts and lists.
            restore_args: ``RestoreArgs`` for all leaves, or a tree of them. None: no arguments.
            items: The arguments for the handler of each further item that is restored, by the item's name. None: no
                item is restored.
            options: What may be missing, and how much memory reading may take.
            args: The call in Orbax's form, in place of ``like``: a ``StandardRestore`` or ``PyTreeRestore``, or a
                ``Composite`` with one of them as the item ``item_name``, and others for the handlers.

        Returns:
            The tree (``state``), its ``step``, and the ``items``. With ``args``: as Orbax, the tree alone, or a
            ``Composite`` of it and the items.

        Raises:
            CheckpointNotFound: There is no such step, or no step at all.
            CheckpointCorrupt: The step is damaged. Without ``step``: all steps are.
            CheckpointMismatch: The step does not fit ``like``.
            BarrierError: Other processes did not take part in time.
            SaveFailed: The background save in progress did not end in time.
        """
        step = None if step is None else step_number("restore(step)", step)
        check_kind("restore(options=...)", options, RestoreOptions)
        call = orbax.restore_call(
            like, args, restore_args=restore_args, options=options, items=items, item_name=self._item_name
        )
        request = ItemsRequest(call.items, self._item_handlers)
        check_items(request.args, request.handlers)
        restored = self._open().restore(
            call.like,
            step=step,
            restore_args=call.restore_args,
            options=call.options,
            items=request,
            timeout_s=self._timeout_s,
            tidy=self._claimed,  # another job may train here, and its own retention applies to its steps
        )
        if restored is None:
            raise CheckpointNotFound(f"{self._paths.root} has no checkpoint")
        self._has_restored = True
        if args is None:
            return restored
        return orbax.result_of(args, self._item_name, restored.state, restored.items)

    def metadata(self, step: int) -> TreeMetadata:
        """Returns what a step holds, without reading any array.

        Raises:
            CheckpointNotFound: There is no such step.
            CheckpointCorrupt: The metadata of the step is damaged.
        """
        step = step_number("metadata(step)", step)
        folder = restore_path.folder_of(self._paths.step(step), self._item_name)
        return metadata_of(
            folder, Deadline.after(self._timeout_s, time.monotonic), self._handlers, item=self._item_name
        )

    def is_saving_in_progress(self) -> bool:
        """Returns whether a background save runs in this process. Does not wait, and is not collective."""
        return self._checkpointer is not None and self._checkpointer.executor.busy

    def check_for_errors(self) -> None:
        """Raises SaveFailed if a background save has failed. Raises each failure once. Does not wait.

        After ``close``, which has raised what there was to raise, it does nothing. In a forked child it raises
        ForkedChild, as the save is the parent's.
        """
        if self._checkpointer is not None and not self._closed:
            self._checkpointer.executor.check_for_errors()

    def wait_until_finished(self) -> None:
        """Waits for the background save. After that, process 0 removes the steps that retention does not keep.

        The removed steps are no longer listed. Their files are deleted later. If another thread is removing steps,
        process 0 waits for it for at most a minute, and then logs a warning. After ``close`` it does nothing.

        Raises:
            SaveFailed: The save failed, or did not end within a few seconds after its timeout.
            ForkedChild: The save is the parent's, and a forked child cannot know how it ends.
        """
        if not self._closed:
            self._open().wait_until_finished()

    def close(self) -> None:
        """Waits for the background save, and for old steps to be deleted. May be called again.

        Raises:
            SaveFailed: The save failed.
        """
        if self._closed:
            return
        self._closed = True
        self._at_exit.forget()
        if self._checkpointer is not None:
            self._checkpointer.close(self._timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._at_exit.forget()
            if self._checkpointer is not None:
                self._checkpointer.abandon(f"{type(error).__name__}: {error}", timeout_s=_ABANDON_S)

    def _check_nothing_newer(self, step: int) -> None:
        self._looks += 1
        lease.check_nothing_newer(
            self._paths,
            self._joined.gang,
            key=f"checkpoint/{self._joined.attempt}/newer/{self._looks}",
            step=step,
            deadline=Deadline.after(self._timeout_s, time.monotonic),
        )

    def _open(self) -> StepCheckpointer:
        if self._closed:
            raise SettingsError("the checkpoint manager is closed")
        if self._checkpointer is None:
            joined = self._joined = self._joining.join(timeout_s=self._timeout_s)
            self._checkpointer = StepCheckpointer(
                self._paths,
                gang=joined.gang,
                attempt=joined.attempt,
                schedule=self._schedule,
                retention=self._retention,
                settings=dataclasses.replace(self._settings, processes=joined.processes),
                clock=self._clock,
            )
        return self._checkpointer
