"""Steps in a directory for loops that have no session: when to save, what to keep, which is the newest.

It is ``Checkpointer``, which the session uses too, with processes that it brings together itself. One thread owns it
and makes all calls, the same ones in the same order in all processes (``all_steps``, ``latest_step`` and ``metadata``
are anybody's). Its threads are ``Checkpointer``'s. At the interpreter's end a save under way is waited for.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.loading import restore_path
from gracepoint.checkpoint.loading.restore_step import Restored
from gracepoint.checkpoint.loading.restore_tree import DEFAULTS, RestoreOptions
from gracepoint.checkpoint.metadata import TreeMetadata, metadata_of
from gracepoint.checkpoint.metrics import SaveStats
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.process_groups import GroupFactory
from gracepoint.checkpoint.saving.at_exit import AtExit
from gracepoint.checkpoint.step_checkpointer import StepCheckpointer
from gracepoint.checkpoint.steps import directory_checks, listing
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointNotFound, SettingsError
from gracepoint.process_group import ProcessGroup

_ABANDON_S = 10.0


class CheckpointManager:
    """Saves and restores the steps of one directory."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
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
        gang: ProcessGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches neither files nor JAX's backend.

        Args:
            directory: Absolute path or ``file://`` URI on a file system that all processes share.
            save_every_steps: Multiples of it are due; 0: none for that reason. None: 1 without ``save_every_s``, with
                it 0.
            save_every_s: A step is due when so many seconds have passed since the last save; 0: not for that reason.
            keep_last: The newest so many steps are kept.
            keep_every_steps: Also multiples of it; 0: none for that reason.
            keep_for_s: Also steps that were committed less than so many seconds ago; 0: none for that reason.
            timeout_s: For what a save does in the background, and for each of the other calls.
            active_processes: As in ``AsyncCheckpointer``.
            options: How arrays are written.
            host_memory_limit_bytes: As in ``AsyncCheckpointer``.
            gang: As in ``AsyncCheckpointer``.
            clock: Monotonic seconds; of the first process, that by which steps are due.

        Raises:
            SettingsError: An argument is wrong.
        """
        if save_every_steps is None:
            save_every_steps = 0 if save_every_s else 1
        self._directory = os.fspath(directory)
        self._paths = Layout(layout.root_of(self._directory))
        self._timeout_s = timeout_s
        self._joining = GroupFactory(active_processes, gang)
        # All but the processes, which are brought together when they are needed first.
        self._make = functools.partial(
            StepCheckpointer,
            self._directory,
            save_every_steps=save_every_steps,
            save_every_s=save_every_s,
            keep_last=keep_last,
            keep_every_steps=keep_every_steps,
            keep_for_s=keep_for_s,
            options=options,
            host_memory_limit_bytes=host_memory_limit_bytes,
            clock=clock,
        )
        self._checkpointer: StepCheckpointer | None = None
        self._claimed = False
        self._has_restored = False
        self._looks = 0  # for what is newer
        self._closed = False
        self._at_exit = AtExit(self)

    @property
    def last_save(self) -> SaveStats | None:
        """What the last committed save took in this process; None before the first."""
        return None if self._checkpointer is None else self._checkpointer.executor.last_save

    def all_steps(self) -> list[int]:
        """Returns the steps that have a complete checkpoint, oldest first."""
        return listing.complete_steps(self._paths)

    def latest_step(self) -> int | None:
        """Returns the newest step that has a complete checkpoint; None if there is none."""
        return max(self.all_steps(), default=None)

    def prepare(self, tree: Any, *, save_args: Any = None) -> None:
        """Reserves and touches the memory that ``save`` copies to, so that the first is no slower than the others.

        Args:
            tree: Of the form that will be saved.
            save_args: That ``save`` will be given.

        Raises:
            CheckpointError: The tree cannot be saved, naming the leaf; or its copy does not fit into memory.
            OSError: The directory cannot be written to.
        """
        self._open().prepare(tree, save_args=save_args)

    def should_save(self, step: int) -> bool:
        """True if it is time to save this step, alike in all processes.

        Where steps are due by seconds, ask at every step (``save`` does).
        """
        return self._open().save_interval.is_due(step)

    def save(self, step: int, tree: Any, *, force: bool = False, save_args: Any = None) -> bool:
        """Saves if ``should_save``: copies to host memory, and writes while the caller goes on.

        Waits for the save before it. On return the tree may be donated.

        Args:
            step: Of the tree.
            tree: Of arrays, numbers and strings.
            force: Whether to save a step that is not due, too, or replace one that is on disk as this manager's state.
            save_args: ``SaveArgs`` for all leaves, or a tree of them.

        Returns:
            True if a save was begun, or the step is on disk as this manager's state already.

        Raises:
            SaveFailed: The save before this one failed, or hangs; this one was not begun.
            CheckpointExists: There is a step as new or newer, nothing was restored, and this would be the first save.
            CheckpointError: The tree cannot be saved, naming the leaf; or another job uses the directory.
            BarrierError: Other processes did not take part in time.
        """
        checkpointer = self._open()
        if not (checkpointer.save_interval.is_due(step) or force):
            return False
        if not self._claimed:
            if not (force or self._has_restored):
                self._check_nothing_newer(step)
            checkpointer.check_shared(timeout_s=self._timeout_s)
            checkpointer.claim(self._joined.job, timeout_s=self._timeout_s)
            self._claimed = True
        checkpointer.save_in_background(step, tree, {}, save_args=save_args, timeout_s=self._timeout_s, anew=force)
        return True

    def restore(
        self,
        step: int | None = None,
        *,
        like: Any = None,
        restore_args: Any = None,
        options: RestoreOptions = DEFAULTS,
    ) -> Restored:
        """Restores a step, or the newest one that all processes can read.

        Before the first save it deletes nothing: an evaluation may look at what another job keeps.

        Args:
            step: That is wanted; None for the newest, past damaged ones.
            like: As in ``AsyncCheckpointer.restore``.
            restore_args: As in ``AsyncCheckpointer.restore``.
            options: As in ``AsyncCheckpointer.restore``.

        Returns:
            The tree (``state``) and its ``step``.

        Raises:
            CheckpointNotFound: There is no such step, or none at all.
            CheckpointCorrupt: It is damaged; or all are.
            CheckpointMismatch: It does not fit ``like``.
            BarrierError: Other processes did not take part in time.
        """
        restored = self._open().restore(
            like,
            step=step,
            restore_args=restore_args,
            options=options,
            timeout_s=self._timeout_s,
            tidy=self._claimed,  # another job may be training here, whose steps it keeps as it likes
        )
        if restored is None:
            raise CheckpointNotFound(f"{self._paths.root} has no checkpoint")
        self._has_restored = True
        return restored

    def metadata(self, step: int) -> TreeMetadata:
        """Returns what a step holds, without reading any array.

        Raises:
            CheckpointNotFound: There is no such step.
            CheckpointCorrupt: Its metadata are damaged.
        """
        folder = restore_path.folder_of(self._paths.step(step))
        return metadata_of(folder, Deadline.after(self._timeout_s, time.monotonic))

    def check_for_errors(self) -> None:
        """Raises SaveFailed if a background save has failed; each failure once. Does not wait."""
        self._open().executor.check_for_errors()

    def wait_until_finished(self) -> None:
        """Waits for the background save under way.

        Raises:
            SaveFailed: It failed, or hangs, a few seconds after its timeout.
        """
        self._open().executor.wait_until_finished(None)

    def close(self) -> None:
        """Waits for the background save under way, and for old steps to be deleted. Safe to repeat.

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
        directory_checks.check_nothing_newer(
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
            self._checkpointer = self._make(gang=joined.gang, processes=joined.processes, attempt=joined.attempt)
        return self._checkpointer
