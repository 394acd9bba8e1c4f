"""The newest snapshot in host memory: how far it is on its way to the disk, and what else can be done with it.

Made by the training thread when a background save begins, and told by the save's thread how that ended; the writer's
threads count what is written. The training thread asks, stops the save, or writes the snapshot once more: its memory
is filled anew only by the next background save.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

from gracepoint.checkpoint.planning.write_plan import Chunk
from gracepoint.checkpoint.saving.save_operation import SaveOperation
from gracepoint.checkpoint.transfer.host_snapshot import Transfer
from gracepoint.deadline import Deadline
from gracepoint.deadline_plan import NewestSnapshot, SnapshotState

_Chunks = Sequence[tuple[Chunk, npt.NDArray[Any]]]


class SnapshotSave:
    """The snapshot of one background save.

    Args:
        save: That writes it.
        transfer: Of the save, not begun to be written.
        deadline: Of the save.

    Attributes:
        source: The transfer, counted: what the save is to write from.
        committed: Set by the save's thread.
    """

    def __init__(self, save: SaveOperation, transfer: Transfer, deadline: Deadline) -> None:
        self.save = save
        self.deadline = deadline
        self.source = _Counted(transfer)
        self.committed = False
        self._chunks = transfer.copied

    def seen(self, *, busy: bool) -> NewestSnapshot | None:
        """How far it is; None for a checkpoint that is no step.

        Args:
            busy: Whether the save's thread runs.
        """
        step = self.save.temporary.step
        if step is None:
            return None
        if self.committed:
            state = SnapshotState.COMMITTED
        elif busy:
            state = SnapshotState.WRITING
        else:
            state = SnapshotState.GONE if self._chunks is None else SnapshotState.HELD
        done_bytes = self.source.done_bytes
        return NewestSnapshot(
            step=step,
            state=state,
            done_bytes=done_bytes,
            left_bytes=self.save.mine_bytes - done_bytes,
            elapsed_s=self.deadline.elapsed_s(),
        )

    def stop(self, reason: str) -> None:
        """Has the save's thread end: at the border of two chunks, or where it waits for the others."""
        self.deadline.cancel(reason)
        self.save.cancel(reason)

    def once_more(self) -> InMemory | None:
        """What is in memory, to be written again; None if it is not there any more."""
        return None if self._chunks is None else InMemory(self._chunks)


class InMemory:
    """A source of chunks that lie in memory."""

    def __init__(self, chunks: _Chunks) -> None:
        self._chunks = chunks

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        yield from self._chunks

    def written(self, chunk: Chunk) -> None:
        pass


class _Counted:
    """A transfer that counts this process's bytes that are written."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._lock = threading.Lock()
        self.done_bytes = 0

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        return self._transfer.chunks(deadline)

    def written(self, chunk: Chunk) -> None:
        if chunk.mine:
            with self._lock:
                self.done_bytes += chunk.bytes
        self._transfer.written(chunk)
