"""Decides whether a worker process writes a save, and hands the save over to it.

The thread that owns the ``SaveExecutor`` makes all calls. The worker writes a save if the options ask for it and if all
that the save needs is in shared memory. Otherwise threads of this process write it:

* if handlers of the user's write a part of it, or leaves are copied from their devices in the background;
* if the checkpoint goes to ``memory://``, which belongs to one process;
* if the worker cannot be started or does not take the save. This is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from gracepoint.checkpoint.options import IN_THREADS, WriteOptions
from gracepoint.checkpoint.planning.chunks import Chunk
from gracepoint.checkpoint.saving.operation.save_operation import SaveOperation
from gracepoint.checkpoint.saving.process_part.save_worker import CallFailed, HandedOver, SaveWorker
from gracepoint.checkpoint.transfer.snapshot_memory import Filling
from gracepoint.deadline import Deadline

logger = logging.getLogger(__name__)


class WorkerHandoff:
    """Hands saves to the worker process of one ``SaveExecutor``. There is no process before ``start``.

    Args:
        options: How arrays are written.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._worker = SaveWorker(options) if options.writer not in IN_THREADS else None

    @property
    def worker_process_ids(self) -> list[int]:
        """The worker process, while there is one."""
        return [] if self._worker is None else self._worker.process_ids

    def in_every_worker(self, function: Callable[..., object], *arguments: object) -> None:
        """Has each worker process call a function once, also those that are started later. An error is logged."""
        if self._worker is not None:
            try:
                self._worker.in_every_worker(function, *arguments)
            except (OSError, CallFailed) as error:
                logger.warning("the worker process does not take a call: %s", error)

    def start(self) -> None:
        """Starts the worker process, if the options ask for one. An error is logged: the next save tries again."""
        if self._worker is None:
            return
        try:
            self._worker.start()
        except (OSError, CallFailed) as error:
            logger.warning("no worker process was started: %s", error)

    def is_for(self, save: SaveOperation) -> bool:
        """Returns whether a worker may write this save."""
        within_this_process = str(save.temporary.path).startswith("memory://")
        return self._worker is not None and not save.has_handled_parts and not within_this_process

    def hand_over(
        self,
        save: SaveOperation,
        chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]] | None,
        filled: Filling | None,
        deadline: Deadline,
        *,
        urgent: bool,
    ) -> HandedOver | None:
        """Hands a save to the worker. When this returns a ``HandedOver``, it is written even if this process dies.

        Args:
            save: The save, described.
            chunks: All chunks of this process, in the snapshot. None: some are not in memory.
            filled: The snapshot. None: the chunks are in other memory.
            deadline: When the save must have ended.
            urgent: Whether somebody waits for the save.

        Returns:
            The save in the worker. None: threads of this process must write it.
        """
        if self._worker is None or filled is None or filled.snapshot.arena is None:
            return None
        if chunks is None or not self.is_for(save):
            return None
        try:
            handed = self._worker.hand_over(save.part(), chunks, filled, deadline=deadline, urgent=urgent)
        except (OSError, CallFailed) as error:
            what = save.temporary.what
            logger.warning("the worker process does not take the save of %s, a thread writes it: %s", what, error)
            return None
        logger.info("%s is handed over to the worker process", save.temporary.what)
        return handed

    def close(self) -> None:
        """Ends the worker process after its last save. Does not wait for it."""
        if self._worker is not None:
            self._worker.close()
