"""Hands a process's part of a save to a worker process, which writes it even if this process dies.

The thread that owns the ``SaveExecutor`` hands saves over: when ``hand_over`` returns, the worker no longer needs this
process. The thread of the save waits for the worker (``HandedOver``). A ``PersistentAsyncCaller`` runs the worker: one
process that stays, started by this process or by a keeper. The worker ends after its last save when this object is
closed or deleted, or when this process dies.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import pickle
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy.typing as npt

from gracepoint.async_calls.process_callers import PersistentAsyncCaller
from gracepoint.async_calls.processes.worker_process import CallFailed
from gracepoint.async_calls.request import AsyncRequest
from gracepoint.checkpoint.memory.shared_arena import SharedArena
from gracepoint.checkpoint.options import Silent, WriteOptions
from gracepoint.checkpoint.planning.chunks import Chunk
from gracepoint.checkpoint.saving.process_part import worker_side
from gracepoint.checkpoint.saving.process_part.save_board import SaveBoard
from gracepoint.checkpoint.saving.process_part.save_part import PartStages, SavePart
from gracepoint.deadline import Deadline
from gracepoint.errors import GracepointError, SaveFailed
from gracepoint.process_group import SingleProcess

#: Seconds that a worker still has for its saves after its trainer has died.
ORPHAN_LIMIT_S = 600.0
# The wait for the worker looks at its progress and at the deadline this often.
_LOOK_EVERY_S = 0.02
# Seconds for the worker to stop once it is told to. It looks before each block of bytes.
_STOPS_S = 1.0
# Seconds for the worker process to end when it is closed without a save.
_ENDS_S = 30.0


class WriterDied(GracepointError):
    """The worker process died before its save was durable. It writes nothing any more."""


class HandedOver:
    """A part that a worker process writes.

    Args:
        board: What the worker reports.
        ended: Done when the worker has ended the call.
        what: Names the save, for messages.
        kill: Ends the worker process at once.
    """

    def __init__(self, board: SaveBoard, ended: Future[None], what: str, kill: Callable[[], None]) -> None:
        self._board = board
        self._ended = ended
        self._what = what
        self._kill = kill

    @property
    def done_bytes(self) -> int:
        """Bytes that the worker has written."""
        return self._board.done_bytes

    @property
    def urgent(self) -> bool:
        """Whether the worker knows that somebody waits for the save."""
        return self._board.urgent

    def hurry(self) -> None:
        """Says that somebody waits for the save, so that the worker does not leave the CPU to the training."""
        self._board.hurry()

    def wait(self, deadline: Deadline, on_stage: Callable[[str], None]) -> PartStages:
        """Waits until the part is durable.

        Args:
            deadline: When the wait ends. Then the worker is told to stop, and killed if it does not.
            on_stage: Called with "written" and "durable".

        Raises:
            SaveFailed: The deadline passed or was cancelled, or the folder was taken away.
            OSError, CheckpointError: The worker could not write.
            WriterDied: The worker process died.
        """
        told = 0
        while True:
            ended = self._ended.done()  # before the stages are read, so that none is missed once the call has ended
            for stage in self._board.reached[told:]:
                on_stage(stage)
                told += 1
            if ended:
                return self._outcome()
            if deadline.passed():
                self._stop()
                if not isinstance(self._board.outcome, dict):
                    raise SaveFailed(f"{self._what} was not written by the worker process {deadline.ended}")
                continue
            concurrent.futures.wait([self._ended], timeout=min(_LOOK_EVERY_S, deadline.remaining_s()))

    def _stop(self) -> None:
        """Ends the call: nobody reads the snapshot afterwards."""
        self._board.cancel()
        if not concurrent.futures.wait([self._ended], timeout=_STOPS_S).done:
            self._kill()
            concurrent.futures.wait([self._ended], timeout=_STOPS_S)

    def _outcome(self) -> PartStages:
        outcome = self._board.outcome
        if outcome is None:
            raise WriterDied(str(self._ended.exception()))
        if isinstance(outcome, Exception):
            raise outcome
        return PartStages(**outcome)


class SaveWorker:
    """The worker process that writes the saves of one ``SaveExecutor``, one at a time.

    Args:
        options: How arrays are written.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = dataclasses.replace(options, callback=Silent())
        self._caller = PersistentAsyncCaller(
            gang=SingleProcess(),
            orphan_limit_s=ORPHAN_LIMIT_S,
            timeout_s=_ENDS_S,
            keeper=None if options.writer == "worker" else options.writer,
        )
        self._numbers = itertools.count()
        self._forms: weakref.WeakKeyDictionary[SharedArena, bytes] = weakref.WeakKeyDictionary()  # pickled

    @property
    def process_ids(self) -> list[int]:
        """The worker process, while there is one."""
        return self._caller.worker_process_ids

    def in_every_worker(self, function: Callable[..., object], *arguments: object) -> None:
        """As ``PersistentAsyncCaller.in_every_worker``."""
        self._caller.in_every_worker(function, *arguments)

    def start(self) -> None:
        """Starts the worker process, so that the first save need not wait for it.

        Raises:
            OSError: The system has no process for it.
        """
        if not self._caller.worker_process_ids:
            self._call(worker_side.warm)

    def hand_over(
        self,
        part: SavePart,
        chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]],
        arena: SharedArena,
        *,
        deadline: Deadline,
        urgent: bool,
    ) -> HandedOver:
        """Hands a part over. When this returns, it is written even if this process dies.

        Args:
            part: The part.
            chunks: Its chunks, with arrays of ``arena`` that hold their values.
            arena: The memory of the arrays. It must not change before the part is written.
            deadline: When the save must have ended, if this process lives.
            urgent: Whether somebody waits for the save. Otherwise the worker leaves the CPU to the training.

        Raises:
            OSError: The system has no process or no memory for it.
            CallFailed: The worker does not take it.
        """
        board = SaveBoard()
        if urgent:
            board.hurry()
        form = self._form_of(part, chunks, arena)
        timeout_s = deadline.remaining_s() + ORPHAN_LIMIT_S
        ended = self._call(
            worker_side.write_handed,
            part.without_specs(),
            form,
            arena.block,
            board.block,
            self._options,
            timeout_s,
        )
        return HandedOver(board, ended, part.temporary.what, self._kill)

    def close(self) -> None:
        """Ends the worker process, after its saves. Does not wait for it."""
        self._caller.finish()

    def _call(self, function: Callable[..., object], *arguments: object) -> Future[None]:
        request = AsyncRequest(function, arguments, [], call_idx=next(self._numbers))
        return self._caller.run(request)

    def _kill(self) -> None:
        self._caller.kill()

    def _form_of(self, part: SavePart, chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]], arena: SharedArena) -> bytes:
        # An arena is reserved for states of one form, so its entry never changes.
        if arena not in self._forms:
            places = [(chunk, arena.offset_of(array)) for chunk, array in chunks]
            form = worker_side.StagedForm(places, part.specs, part.arrays, part.copied)
            self._forms[arena] = pickle.dumps(form, protocol=5)
        return self._forms[arena]


__all__ = ["CallFailed", "HandedOver", "SaveWorker", "WriterDied"]
