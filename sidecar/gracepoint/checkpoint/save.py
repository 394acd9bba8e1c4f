"""One save in one process: files written, done-record durable, committed together.

The same for a background save and an emergency; they differ in where the chunks come from and in who waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from gracepoint.checkpoint import commit, host_state, layout, orbax_metadata, tree
from gracepoint.checkpoint.deadline import Deadline
from gracepoint.checkpoint.files import make_folders, write_durably
from gracepoint.checkpoint.layout import Layout, Temporary
from gracepoint.checkpoint.plan import Chunk, Plan
from gracepoint.checkpoint.records import DoneRecord
from gracepoint.checkpoint.spec import tree_digest
from gracepoint.checkpoint.writer import Writer
from gracepoint.errors import GracepointError, SaveFailed
from gracepoint.gang import Gang

logger = logging.getLogger(__name__)

Chunks = Iterable[tuple[Chunk, npt.NDArray[Any]]]


@dataclasses.dataclass(frozen=True)
class Stages:
    """When a save reached each stage in this process, seconds after it began."""

    written_s: float
    durable_s: float
    committed_s: float


class Save:
    """A save of one step by this process: ``describe``, then ``run``, each once.

    Whatever fails in this process fails the save in all: the others, who wait at the barrier or will, are
    told.
    """

    def __init__(self, paths: Layout, temporary: Temporary, gang: Gang, writer: Writer) -> None:
        self.step = temporary.step
        self._paths = paths
        self._temporary = temporary
        self._gang = gang
        self._writer = writer
        self._begun_ns = time.time_ns()

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tells the other processes of any error that leaves the block."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Ends the wait of all processes, this one too, for the others' part. From any thread; never raises."""
        try:
            self._gang.fail(self.key, error)
        except GracepointError as unreachable:
            logger.warning("the other processes could not be told that a save failed: %s", unreachable)

    def describe(self, leaves: Sequence[tree.Leaf], plan: Plan, host_state: Mapping[str, Any]) -> None:
        """Takes what is to be saved; encodes the host state at once, as its owner goes on to change it.

        Raises:
            CheckpointError: A value of the host state cannot be saved.
        """
        specs = tuple(tree.specs_of(leaves))
        # Arrays are let go: only their types are needed to write chunks that come from elsewhere.
        self._specs = {leaf: spec.spec for leaf, spec in enumerate(leaves) if spec.spec is not None}
        self._digest = tree_digest(specs)
        self._arrays = specs if self._gang.process_index == 0 else None
        self._host_state_names = tuple(host_state)
        self._small_files = self._small_files_of(leaves, plan, host_state)

    @property
    def key(self) -> str:
        """Of the barrier that the processes meet at to commit."""
        return f"checkpoint/save/{self._temporary.ordinal}/commit"

    def run(self, chunks: Chunks, deadline: Deadline, on_stage: Callable[[str], None]) -> Stages:
        """Writes ``chunks``, and returns when all processes' are committed.

        Raises:
            SaveFailed: Not committed in time, or a process failed. If it is durable all the same, the next
                start commits it.
        """
        clock = deadline.clock
        started_s = clock()
        folder = self._temporary.path
        try:
            with self.failing_together():
                make_folders(folder)
                files, copies = self._writer.write(folder, self._specs, chunks, self._small_files, deadline)
                on_stage("written")
                written_s = clock() - started_s
                record = DoneRecord(
                    step=self.step,
                    attempt=self._temporary.attempt,
                    ordinal=self._temporary.ordinal,
                    process_index=self._gang.process_index,
                    process_count=self._gang.process_count,
                    digest=self._digest,
                    arrays=self._arrays,
                    files=files,
                    copies=copies,
                    host_state=self._host_state_names,
                    begun_ns=self._begun_ns,
                )
                write_durably(folder / layout.done_record(self._gang.process_index), record.to_bytes())
                on_stage("durable")
                durable_s = clock() - started_s
        except SaveFailed:
            raise
        except Exception as error:
            raise SaveFailed(f"step {self.step} was not written to {folder}: {error}") from error
        self._commit(deadline)
        on_stage("committed")
        return Stages(written_s, durable_s, clock() - started_s)

    def _commit(self, deadline: Deadline) -> None:
        try:
            self._gang.barrier(self.key, timeout_s=deadline.remaining_s(), on_last=self._finalize)
        except (GracepointError, OSError) as error:
            # Whoever is missing may have died after its done-record: then nothing is missing to commit. Others may
            # be trying the same just now, so nothing is replaced.
            try:
                committed = commit.finalize(self._paths, self._temporary, replace=False)
            except (GracepointError, OSError) as reason:
                raise SaveFailed(f"step {self.step} is not committed: {reason} (after: {error})") from error
            if not committed:
                raise SaveFailed(f"step {self.step} is not committed: {error}") from error
            logger.warning("step %d is committed, though the processes did not meet: %s", self.step, error)

    def _finalize(self) -> None:
        if not commit.finalize(self._paths, self._temporary, replace=True):
            raise SaveFailed(f"{self._temporary.path} is not durable, though all processes say so")

    def _small_files_of(self, leaves: Sequence[tree.Leaf], plan: Plan, values: Mapping[str, Any]) -> dict[str, bytes]:
        """Returns contents by path below the step's folder."""
        item = layout.STATE_ITEM
        files = {layout.host_state_file(self._gang.process_index): host_state.encode(values)}
        for index in plan.arrays:
            spec = leaves[index].spec
            assert spec is not None
            files[f"{item}/{spec.name}/{layout.ARRAY_SPEC}"] = json.dumps(spec.zarray).encode()
        if self._gang.process_index == 0:
            for name, data in orbax_metadata.metadata_files(leaves).items():
                files[f"{item}/{name}"] = data
            target = self._paths.step(self.step) / item
            files[f"{item}/{layout.COMMIT_SUCCESS}"] = f"Checkpoint commit was successful to {target}".encode()
            summary = {"processes": self._gang.process_count, "names": list(self._host_state_names)}
            files[f"{layout.HOST_STATE_ITEM}/metadata"] = json.dumps(summary).encode()
        return files
