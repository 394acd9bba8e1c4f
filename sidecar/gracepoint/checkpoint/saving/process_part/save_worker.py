"""Hands a process's part of a save to a worker process, which writes it even if this process dies.

The thread that owns the ``SaveExecutor`` hands saves over: when ``hand_over`` returns, the worker no longer needs this
process. The thread of the save waits for the worker (``HandedOver``). A ``PersistentAsyncCaller`` runs the worker: one
process that stays, started by this process or by a keeper. The worker ends after its last save when this object is
closed or deleted, or when this process dies.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
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
from gracepoint.checkpoint.options import Silent, WriteOptions
from gracepoint.checkpoint.planning.chunks import Chunk
from gracepoint.checkpoint.saving.process_part import worker_side
from gracepoint.checkpoint.saving.process_part.save_board import SaveBoard
from gracepoint.checkpoint.saving.process_part.save_part import PartStages, SavePart
from gracepoint.checkpoint.transfer.snapshot_memory import Filling, HostSnapshot
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
    """A part that a worker process writes from shared memory. A ``MemoryUser``.

    Args:
        board: What the worker reports.
        what: Names the save, for messages.
        kill: Ends the worker process at once.
        in_keeper: Whether the worker may be in a keeper's container, where nobody here sees its end.
    """

    def __init__(self, board: SaveBoard, what: str, kill: Callable[[], None], *, in_keeper: bool) -> None:
        self._board = board
        self._what = what
        self._kill = kill
        self._in_keeper = in_keeper
        self._ended: Future[None] = Future()  # the call, once it was sent
        self._refused = False

    def send(self, call: Callable[[], Future[None]]) -> None:
        """Sends the call to the worker.

        Raises:
            OSError, CallFailed: The worker does not have it.
        """
        try:
            self._ended = call()
        except (OSError, CallFailed):
            self._refused = True
            raise

    def end(self, timeout_s: float) -> bool:
        """As ``MemoryUser``: tells the worker to stop, and asks whether it has ended the call.

        Only the worker knows when it has, as what it reports on the board. An answer that did not come says nothing of
        a process in another container.
        """
        self._board.cancel()
        if not self._refused and self._board.outcome is None:
            concurrent.futures.wait([self._ended], timeout=timeout_s)
        if self._refused or self._board.outcome is not None:
            return True
        return self._ended.done() and (self._ended.exception() is None or not self._in_keeper)

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
        self._in_keeper = options.writer != "worker"
        self._caller = PersistentAsyncCaller(
            gang=SingleProcess(),
            orphan_limit_s=ORPHAN_LIMIT_S,
            timeout_s=_ENDS_S,
            keeper=options.writer if self._in_keeper else None,
        )
        self._numbers = itertools.count()
        self._forms: weakref.WeakKeyDictionary[HostSnapshot, bytes] = weakref.WeakKeyDictionary()  # pickled

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
        filled: Filling,
        *,
        deadline: Deadline,
        urgent: bool,
    ) -> HandedOver:
        """Hands a part over. When this returns, it is written even if this process dies.

        Args:
            part: The part.
            chunks: Its chunks, with arrays of the snapshot that hold their values.
            filled: The snapshot, which is in shared memory. It must not change before the part is written.
            deadline: When the save must have ended, if this process lives.
            urgent: Whether somebody waits for the save. Otherwise the worker leaves the CPU to the training.

        Raises:
            OSError: The system has no process or no memory for it.
            CallFailed: The worker does not take it.
        """
        board = SaveBoard()
        if urgent:
            board.hurry()
        form = self._form_of(part, chunks, filled.snapshot)
        timeout_s = deadline.remaining_s() + ORPHAN_LIMIT_S
        handed = HandedOver(board, part.temporary.what, self._kill, in_keeper=self._in_keeper)
        assert filled.snapshot.arena is not None
        filled.snapshot.lend(handed)
        call = functools.partial(
            self._call,
            worker_side.write_handed,
            part.without_specs(),
            form,
            filled.snapshot.arena.block,
            filled.generation,
            board.block,
            self._options,
            timeout_s,
        )
        handed.send(call)
        return handed

    def close(self) -> None:
        """Ends the worker process, after its saves. Does not wait for it."""
        self._caller.finish()

    def _call(self, function: Callable[..., object], *arguments: object) -> Future[None]:
        request = AsyncRequest(function, arguments, [], call_idx=next(self._numbers))
        return self._caller.run(request)

    def _kill(self) -> None:
        self._caller.kill()

    def _form_of(
        self, part: SavePart, chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]], snapshot: HostSnapshot
    ) -> bytes:
        # A snapshot is reserved for states of one form, so its entry never changes.
        if snapshot not in self._forms:
            form = worker_side.staged_form(part, chunks, snapshot)
            self._forms[snapshot] = pickle.dumps(form, protocol=5)
        return self._forms[snapshot]


__all__ = ["CallFailed", "HandedOver", "SaveWorker", "WriterDied"]
