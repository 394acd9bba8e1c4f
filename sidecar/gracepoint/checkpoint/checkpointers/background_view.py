"""The part of a step checkpointer's saves that ``preemption`` uses, as one object."""

from __future__ import annotations

from collections.abc import Callable

from gracepoint.checkpoint.saving.background.save_executor import SaveExecutor
from gracepoint.deadline_plan import NewestSnapshot
from gracepoint.save_progress import SaveProgress


class BackgroundView:
    """Forwards to the executor of the saves.

    Attributes:
        executor: Runs the saves. The subclass sets it.
    """

    executor: SaveExecutor

    @property
    def newest_snapshot(self) -> NewestSnapshot | None:
        """The snapshot of the last background save. None before the first, and once its memory is filled again."""
        return self.executor.background.newest_snapshot

    @property
    def save_progress(self) -> SaveProgress | None:
        """How far the background save is. None if no background save of a step is under way. Any thread may ask."""
        return self.executor.background.progress

    @property
    def written_bytes(self) -> int:
        """Bytes of the save in ``save`` or ``promote`` that this process has written. 0: not saving.

        Any thread may ask.
        """
        return self.executor.written_bytes

    @property
    def commit_key(self) -> str | None:
        """Key of the barrier at which ``save`` or ``promote`` commits; cancel it to end the wait. None: not saving."""
        return self.executor.commit_key

    def in_every_worker(self, function: Callable[..., object], *arguments: object) -> None:
        """Has each worker process that writes saves call a function once. Does nothing if threads write the saves."""
        self.executor.handing.in_every_worker(function, *arguments)

    def stop(self, reason: str) -> None:
        """Stops the background save under way, so that ``save`` need not wait for it. Collective."""
        self.executor.background.stop(reason)
