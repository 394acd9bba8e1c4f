"""Writes one process's part of a save in a worker process. Loads no JAX.

The worker's main thread runs ``write_handed``. The threads of the writer end with the save. If the training process has
died, the worker also commits the save once the parts of all processes are durable: the last worker to finish does so.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.async_calls.processes import priority
from gracepoint.async_calls.processes.shared_memory import Block
from gracepoint.async_calls.processes.trainer_death import trainer_has_died, when_orphaned
from gracepoint.checkpoint.format.array_spec import ArraySpec
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.memory.shared_arena import array_at
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning.chunks import Chunk
from gracepoint.checkpoint.saving.process_part.save_board import SaveBoard
from gracepoint.checkpoint.saving.process_part.save_part import SavePart, begun
from gracepoint.checkpoint.steps import commit, recovery
from gracepoint.checkpoint.transfer.snapshot_memory import GENERATION, HostSnapshot, check_generation
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.deadline import Deadline

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
    told = SaveBoard(board)
    what = part.temporary.what
    if not _is_urgent(told):
        priority.relax()
    try:
        staged: StagedForm = pickle.loads(form)
        chunks = [chunk for chunk, _ in staged.chunks]
        part = dataclasses.replace(part, specs=staged.specs, arrays=staged.arrays, chunks=chunks, copied=staged.copied)
        deadline = Deadline(timeout_s, time.monotonic, lambda: 0.0 if told.cancelled else timeout_s)
        with begun(part, _Staged(staged, memory, generation, told), deadline, told.reach) as writing:
            job = dataclasses.replace(writing.job(), is_urgent=lambda: _is_urgent(told))
            written = _writer(options).write(job, deadline)
            stages = writing.make_durable(written)
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        logger.warning("%s was not written by the worker: %s", what, error)
        told.fail(error)
        return
    when_orphaned("commit", functools.partial(_commit, part.paths, part.temporary))
    told.end(dataclasses.asdict(stages))


def _is_urgent(told: SaveBoard) -> bool:
    """Returns whether the save is urgent. If it is, this process stops leaving the CPU to the training."""
    # Once the trainer has died, no training is left, and the pod may have little time.
    if not told.urgent and not trainer_has_died():
        return False
    priority.hurry()
    return True


def _commit(paths: Layout, temporary: Temporary) -> None:
    if commit.is_committed(temporary):
        return
    if recovery.finish(paths, temporary):
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
