"""The worker process that writes a process's part of a save, and so ends it even if the training process dies.

The thread that owns the ``SaveExecutor`` hands a part over: when ``hand_over`` returns, the worker no longer needs this
process. The thread of the save waits for the worker (``HandedOver``). A ``PersistentAsyncCaller`` runs the worker: one
process that stays, started by this process or by a keeper. It ends after its last save when ``SaveWorker`` is closed or
deleted, or when this process dies. If the training process has died, the worker also commits the save once the parts of
all processes are durable: the last worker to finish does so.

In the worker, the main thread runs ``write_handed``, and the threads of the writer end with the save. The worker loads
this module, and no JAX.

Both write to a ``SaveBoard`` in shared memory while the save runs. The trainer's thread of the save sets ``cancelled``,
its training thread sets ``urgent``, and both read the rest. The worker's main thread and the threads of its writer set
the rest. Each number has one writer, or a lock in the one process that writes it. The outcome is written before
``ended`` is set.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import itertools
import json
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gracepoint.async_calls import worker
from gracepoint.async_calls.caller import AsyncRequest
from gracepoint.async_calls.handover import Block
from gracepoint.async_calls.queue import PersistentAsyncCaller
from gracepoint.async_calls.worker import trainer_has_died, when_orphaned
from gracepoint.async_calls.worker_process import CallFailed
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.memory import GENERATION, array_at, check_generation
from gracepoint.checkpoint.options import Silent, WriteOptions
from gracepoint.checkpoint.saving.part import PartStages, SavePart, begun
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, GracepointError, SaveFailed, from_word, to_word
from gracepoint.process_group import SingleProcess
from gracepoint.threads import Ending

if TYPE_CHECKING:
    from gracepoint.checkpoint.saving.host_snapshot import Filling, HostSnapshot

_CANCELLED, _DONE_BYTES, _STAGE, _ENDED, _URGENT = range(5)
_TEXT_AT = 64
_BYTES = 64 << 10
# Characters of an error's text. JSON needs at most 12 bytes for each.
_MOST_TEXT = 5000
_STAGES = ("", "written", "durable")


class SaveBoard:
    """The board of one save. ``block`` is its memory; None makes a new one."""

    def __init__(self, block: Block | None = None) -> None:
        self.block = Block(_BYTES) if block is None else block
        self._words = np.frombuffer(self.block.memory, np.int64, 5)
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Has the worker stop before its next block of bytes. Then it writes no done-record."""
        self._words[_CANCELLED] = 1

    @property
    def cancelled(self) -> bool:
        return bool(self._words[_CANCELLED])

    def hurry(self) -> None:
        """Says that somebody waits for the save, so that the worker does not leave the CPU to the training."""
        self._words[_URGENT] = 1

    @property
    def urgent(self) -> bool:
        return bool(self._words[_URGENT])

    def add_done(self, size_bytes: int) -> None:
        """Counts bytes that are written. Any thread of the worker may call it."""
        with self._lock:
            self._words[_DONE_BYTES] += size_bytes

    @property
    def done_bytes(self) -> int:
        """Bytes that are written."""
        return int(self._words[_DONE_BYTES])

    def reach(self, stage: str) -> None:
        """Says that the save has reached a stage: "written" or "durable"."""
        self._words[_STAGE] = _STAGES.index(stage)

    @property
    def reached(self) -> tuple[str, ...]:
        """The stages that the save has reached, in order."""
        return _STAGES[1 : int(self._words[_STAGE]) + 1]

    def end(self, stages: dict[str, Any]) -> None:
        """Says that the part is durable, and when it reached its stages."""
        self._put(stages)

    def fail(self, error: Exception) -> None:
        """Says with which error the save ended. A very long text is cut."""
        report: dict[str, Any] = {"error": to_word(error), "text": str(error) or repr(error)}
        if not isinstance(error, CheckpointError):
            name = type(error).__name__
            if not isinstance(error, OSError):
                report["text"] = f"{name}: {error}"
            elif getattr(builtins, name, None) is type(error):
                report["text"] = report["text"].removeprefix(f"[Errno {error.errno}] ")
                report |= {"class": name, "errno": error.errno}
            else:  # its number may not be one of the system's, as in ``ssl.SSLError``
                report |= {"class": "OSError", "errno": None}
        report["text"] = report["text"][:_MOST_TEXT]
        self._put(report)

    def _put(self, outcome: dict[str, Any]) -> None:
        data = json.dumps(outcome).encode()
        self.block.memory[_TEXT_AT : _TEXT_AT + len(data)] = data
        self._words[_ENDED] = len(data)  # last: the trainer reads the text as soon as this is not 0

    @property
    def outcome(self) -> dict[str, Any] | Exception | None:
        """How the save ended: what ``end`` was given, or the error. None: the worker has not said it.

        A ``CheckpointError`` keeps its class, and so does an ``OSError`` of Python's own classes, which also keeps its
        number. Any other ``OSError`` becomes a plain one with its text, and any other error a ``CheckpointError``.
        """
        size = int(self._words[_ENDED])
        if not size:
            return None
        report: dict[str, Any] = json.loads(self.block.memory[_TEXT_AT : _TEXT_AT + size])
        if "error" not in report:
            return report
        if "class" not in report:
            return from_word(report["error"])(report["text"])
        kind: type[OSError] = getattr(builtins, report["class"])
        return kind(report["text"]) if report["errno"] is None else kind(report["errno"], report["text"])


logger = logging.getLogger(__name__)

_writers: dict[str, ChunkWriter] = {}  # at most one; it keeps buffers between saves


@dataclasses.dataclass(frozen=True)
class StagedForm:
    """What is the same in all saves of one form of state.

    Attributes:
        chunks: The chunks in shared memory, each with the offset of its values.
        generation_at: The offset of the snapshot's generation in shared memory.
        specs: See ``SavePart``.
        arrays: See ``SavePart``.
        copied: See ``SavePart``.
    """

    chunks: Sequence[tuple[Chunk, int]]
    generation_at: int
    specs: Mapping[int, ArraySpec]
    arrays: Sequence[int]
    copied: frozenset[int]


def staged_form(part: SavePart, chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]], snapshot: HostSnapshot) -> StagedForm:
    """Returns the form of a part whose chunks are in the shared memory of ``snapshot``. Runs in the trainer."""
    assert snapshot.arena is not None
    places = [(chunk, snapshot.arena.offset_of(array)) for chunk, array in chunks]
    return StagedForm(places, snapshot.generation_at, part.specs, part.arrays, part.copied)


def warm() -> None:
    """Does nothing: importing this module is what the first save would otherwise wait for."""


def write_handed(
    part: SavePart, form: bytes, memory: Block, generation: int, board: Block, options: WriteOptions, timeout_s: float
) -> None:
    """Writes a part, and makes it durable. Says on the board how it ended, and raises no error of the save.

    Args:
        part: The part, ``without_specs``.
        form: A pickled ``StagedForm``.
        memory: The values of the chunks.
        generation: The generation of the values.
        board: The memory of a ``SaveBoard``.
        options: How chunks are written.
        timeout_s: Seconds after which the worker gives up. The trainer cancels the save earlier.
    """
    progress = SaveBoard(board)
    subject = part.temporary.what
    if not _is_urgent(progress):
        worker.relax()
    try:
        staged: StagedForm = pickle.loads(form)
        chunks = [chunk for chunk, _ in staged.chunks]
        part = dataclasses.replace(part, specs=staged.specs, arrays=staged.arrays, chunks=chunks, copied=staged.copied)
        deadline = Deadline(timeout_s, time.monotonic, lambda: 0.0 if progress.cancelled else timeout_s)
        with begun(part, _Staged(staged, memory, generation, progress), deadline, progress.reach) as writing:
            job = dataclasses.replace(writing.job(), is_urgent=lambda: _is_urgent(progress))
            written = _writer(options).write(job, deadline)
            stages = writing.make_durable(written)
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        logger.warning("%s was not written by the worker: %s", subject, error)
        progress.fail(error)
        return
    when_orphaned("commit", functools.partial(_commit, part.paths, part.temporary))
    progress.end(dataclasses.asdict(stages))


def _is_urgent(progress: SaveBoard) -> bool:
    """Returns whether the save is urgent. If it is, this process stops leaving the CPU to the training."""
    # Once the trainer has died, no training is left, and the pod may have little time.
    if not progress.urgent and not trainer_has_died():
        return False
    worker.hurry()
    return True


def _commit(paths: Layout, temporary: Temporary) -> None:
    if commit.of(paths).is_committed(temporary):
        return
    if commit.finish(paths, temporary):
        logger.warning("the trainer has died, and its worker has committed %s", temporary.what)
    else:
        logger.warning("the trainer has died, and %s is not durable in all processes yet", temporary.what)


def _writer(options: WriteOptions) -> ChunkWriter:
    key = repr(options)
    if key not in _writers:
        _writers.clear()
        _writers[key] = ChunkWriter(options)
    return _writers[key]


class _Staged:
    """The chunks in shared memory, as a source for writers. Counts the bytes that are written."""

    def __init__(self, form: StagedForm, memory: Block, generation: int, board: SaveBoard) -> None:
        self._form = form
        self._generation = generation
        self._memory = np.frombuffer(memory.memory, np.uint8)
        self._board = board

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        for chunk, offset in self._form.chunks:
            spec = self._form.specs[chunk.leaf]
            yield chunk, array_at(self._memory, offset, spec.chunk, spec.numpy_dtype)

    def check_unchanged(self) -> None:
        check_generation(self._generation, int(array_at(self._memory, self._form.generation_at, (1,), GENERATION)[0]))

    def written(self, chunk: Chunk) -> None:
        if chunk.mine:
            self._board.add_done(chunk.bytes)


#: Seconds that a worker still has for its saves after its trainer has died.
ORPHAN_LIMIT_S = 600.0
# The wait for the worker looks at its progress and at the deadline this often.
_LOOK_EVERY_S = 0.02
# Seconds for the worker to stop once it is asked to. It looks before each block of bytes.
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

    def __init__(self, board: SaveBoard, subject: str, kill: Callable[[], None], *, in_keeper: bool) -> None:
        self._board = board
        self._what = subject
        self._kill = kill
        self._in_keeper = in_keeper
        self._call = Ending()  # of the call, once it was sent
        self._refused = False

    def send(self, call: Callable[[], Ending]) -> None:
        """Sends the call to the worker.

        Raises:
            OSError, CallFailed: The worker does not have it.
        """
        try:
            self._call = call()
        except (OSError, CallFailed):
            self._refused = True
            raise

    def end(self, timeout_s: float) -> bool:
        """As ``MemoryUser``: asks the worker to stop, and asks whether it has ended the call.

        Only the worker knows when it has, as what it reports on the board. An answer that did not come says nothing of
        a process in another container.
        """
        self._board.cancel()
        if not self._refused and self._board.outcome is None:
            self._call.wait(timeout_s)
        if self._refused or self._board.outcome is not None:
            return True
        return self._call.ended and (self._call.error is None or not self._in_keeper)

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
            deadline: When the wait ends. Then the worker is asked to stop, and killed if it does not.
            on_stage: Called with "written" and "durable".

        Raises:
            SaveFailed: The deadline passed or was cancelled, or the folder was taken away.
            OSError, CheckpointError: The worker could not write.
            WriterDied: The worker process died.
        """
        passed = 0
        while True:
            has_ended = self._call.ended  # before the stages are read, so that none is missed once the call has ended
            for stage in self._board.reached[passed:]:
                on_stage(stage)
                passed += 1
            if has_ended:
                return self._outcome()
            if deadline.passed():
                self._stop()
                if not isinstance(self._board.outcome, dict):
                    raise SaveFailed(f"{self._what} was not written by the worker process {deadline.ended}")
                continue
            self._call.wait(min(_LOOK_EVERY_S, deadline.remaining_s()))

    def _stop(self) -> None:
        """Ends the call: nobody reads the snapshot afterwards."""
        self._board.cancel()
        if not self._call.wait(_STOPS_S):
            self._kill()
            self._call.wait(_STOPS_S)

    def _outcome(self) -> PartStages:
        outcome = self._board.outcome
        if outcome is None:
            raise WriterDied(str(self._call.error))
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
        """As ``PersistentAsyncCaller.in_every_worker``. An error is logged."""
        try:
            self._caller.in_every_worker(function, *arguments)
        except (OSError, CallFailed) as error:
            logger.warning("the worker process does not take a call: %s", error)

    def start(self) -> None:
        """Starts the worker process, so that the first save need not wait for it.

        An error is logged: the next save tries again.
        """
        try:
            if not self._caller.worker_process_ids:
                self._call(warm)
        except (OSError, CallFailed) as error:
            logger.warning("no worker process was started: %s", error)

    def hand_over(
        self,
        part: SavePart,
        chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]],
        filled: Filling,
        *,
        deadline: Deadline,
        urgent: bool,
    ) -> HandedOver | None:
        """Hands a part over. When this returns a ``HandedOver``, it is written even if this process dies.

        Args:
            part: The part.
            chunks: Its chunks, with arrays of the snapshot that hold their values.
            filled: The snapshot, which is in shared memory. It must not change before the part is written.
            deadline: When the save must have ended, if this process lives.
            urgent: Whether somebody waits for the save. Otherwise the worker leaves the CPU to the training.

        Returns:
            The part in the worker. None: the system has no process or no memory for it, or the worker does not take
            it. This is logged.
        """
        subject = part.temporary.what
        try:
            handed = self._handed_over(part, chunks, filled, deadline, urgent=urgent)
        except (OSError, CallFailed) as error:
            logger.warning("the worker process does not take the save of %s, a thread writes it: %s", subject, error)
            return None
        logger.info("%s is handed over to the worker process", subject)
        return handed

    def close(self) -> None:
        """Ends the worker process, after its saves. Does not wait for it."""
        self._caller.finish()

    def _handed_over(
        self,
        part: SavePart,
        chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]],
        filled: Filling,
        deadline: Deadline,
        *,
        urgent: bool,
    ) -> HandedOver:
        """As ``hand_over``.

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
            write_handed,
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

    def _call(self, function: Callable[..., object], *arguments: object) -> Ending:
        request = AsyncRequest(function, arguments, [], call_idx=next(self._numbers))
        return self._caller.run(request)

    def _kill(self) -> None:
        self._caller.kill()

    def _form_of(
        self, part: SavePart, chunks: Sequence[tuple[Chunk, npt.NDArray[Any]]], snapshot: HostSnapshot
    ) -> bytes:
        # A snapshot is reserved for states of one form, so its entry never changes.
        if snapshot not in self._forms:
            form = staged_form(part, chunks, snapshot)
            self._forms[snapshot] = pickle.dumps(form, protocol=5)
        return self._forms[snapshot]
