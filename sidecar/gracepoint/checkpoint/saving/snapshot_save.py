"""A background save and the snapshot that it writes: its progress, whether it hangs, and how to stop it.

The training thread creates it when a background save begins. The save's thread sets ``committed``, and the writer's
threads count the written bytes. The training thread reads the progress, stops the save, or writes the snapshot again.
The snapshot's memory is not changed before the next background save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy.typing as npt

from gracepoint.checkpoint.format.array_spec import Chunk
from gracepoint.checkpoint.saving.host_snapshot import Transfer
from gracepoint.checkpoint.saving.operation import SaveOperation
from gracepoint.checkpoint.saving.save_worker import HandedOver
from gracepoint.checkpoint.writing.pool import SaveSource
from gracepoint.deadline import Deadline, NewestSnapshot, SnapshotState
from gracepoint.errors import BarrierCancelled, SaveFailed

#: Seconds after its deadline in which a save must end. It notifies the other processes, and checks whether all
#: finished.
_LATE_ENDS_S = 5.0

_Chunks = Sequence[tuple[Chunk, npt.NDArray[Any]]]


class CountedChunks:
    """The chunks of a source. The writer's threads count; any thread may read.

    Args:
        source: The source.

    Attributes:
        written_bytes: Bytes of this process's chunks that are written.
    """

    def __init__(self, source: SaveSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self.written_bytes = 0

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        return self._source.chunks(deadline)

    def written(self, chunk: Chunk) -> None:
        if chunk.mine:
            with self._lock:
                self.written_bytes += chunk.bytes
        self._source.written(chunk)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def written_elsewhere(self) -> None:
        self._source.written_elsewhere()


class SnapshotSave:
    """One background save, and its snapshot.

    Args:
        save: The save.
        transfer: The snapshot's chunks, none of which is written yet.
        deadline: When the save must have ended.
        handed: The save in the worker process that writes it. None: a thread of this process writes it.

    Attributes:
        filled: The snapshot, as this save has filled it.
        source: The chunks that the save must write from; it counts what is written.
        chunks: The chunks in the snapshot. None if they are not all of the state.
        committed: Whether the save is committed. Set by the save's thread.
        stage: The stage that this process's part has reached, as in ``SaveOperation.run``. Set by the save's thread.
    """

    def __init__(
        self,
        save: SaveOperation,
        transfer: Transfer,
        deadline: Deadline,
        handed: HandedOver | None,
    ) -> None:
        self.save = save
        self.deadline = deadline
        self.filled = transfer.filled
        self.handed = handed
        self.source = CountedChunks(transfer)
        self.committed = False
        self.stage = ""
        # What handlers write is not in the snapshot, so it cannot be written again.
        self.chunks = None if save.has_handled_parts else transfer.copied

    def seen(self, *, busy: bool) -> NewestSnapshot | None:
        """Returns the progress of the save. None if the checkpoint is not a step.

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
            state = SnapshotState.GONE if self.chunks is None else SnapshotState.HELD
        return NewestSnapshot(
            step=step,
            state=state,
            done_bytes=self.done_bytes,
            left_bytes=self.save.mine_bytes - self.done_bytes,
            elapsed_s=self.deadline.elapsed_s(),
        )

    @property
    def done_bytes(self) -> int:
        """Bytes that are written, by a thread or by the worker process."""
        return max(self.source.written_bytes, 0 if self.handed is None else self.handed.done_bytes)

    def reached(self, stage: str) -> None:
        """Notes that this process's part has reached a stage. The save's thread calls it."""
        self.stage = stage

    def hurry(self) -> None:
        """Says that somebody waits for the save. Any thread may call it."""
        if self.handed is not None:
            self.handed.hurry()

    def stop(self, reason: str) -> None:
        """Tells the save's thread to end, between two chunks or during a wait for other processes."""
        self.deadline.cancel(reason)
        self.save.cancel(reason)

    def was_stopped(self, error: Exception) -> bool:
        """Returns whether the save ended with ``error`` because it was stopped, here or in another process."""
        return self.deadline.cancelled or isinstance(error.__cause__, BarrierCancelled)

    def may_take_s(self) -> float:
        """Returns how many seconds the save may still take before it counts as hanging."""
        until_s = self.deadline.timeout_s + _LATE_ENDS_S
        if self.committed:
            until_s += self.deadline.timeout_s  # the function called after the commit waits for other processes
        return max(0.0, until_s - self.deadline.elapsed_s())

    def hanging(self) -> SaveFailed:
        """Returns the error that says where the save hangs."""
        temporary = self.save.temporary
        where = "after its commit" if self.committed else f"at work below {temporary.path}"
        return SaveFailed(
            f"the save of {temporary.what} hangs: it did not end within {self.deadline.timeout_s:.1f} s and "
            f"{_LATE_ENDS_S:.0f} s more, and its thread is still {where}. It reads the snapshot's memory, so nothing "
            "else is saved before it has ended: is the storage stuck?"
        )

    def once_more(self) -> InMemory | None:
        """Returns the snapshot's chunks, to write them again. None if they are not in memory any more."""
        return None if self.chunks is None else InMemory(self.chunks, self.source.check_unchanged)


class InMemory:
    """A source of chunks that are in memory."""

    def __init__(self, chunks: _Chunks, check_unchanged: Callable[[], None]) -> None:
        self._chunks = chunks
        self.check_unchanged = check_unchanged

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        yield from self._chunks

    def written(self, chunk: Chunk) -> None:
        pass

    def written_elsewhere(self) -> None:
        pass
