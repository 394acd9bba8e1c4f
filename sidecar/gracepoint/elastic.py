"""Data and host states of a job that starts again with another number of processes.

    loader = gracepoint.elastic.ElasticData(
        open_at, process=jax.process_index(), processes=jax.process_count(), global_batch=256
    )
    state, step = session.restore(init=init_state, data=loader)

``ElasticData`` counts its place in records of the whole job, so that it fits any number of processes.
``same_in_all`` and ``dealt_out`` are functions for ``session.host_state(..., reshard=...)``.

Needs the standard library alone. An object belongs to the training thread.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

from gracepoint.arguments import shown
from gracepoint.errors import CheckpointMismatch, SettingsError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of every global batch that one process takes.

    The records of the job have one order, whatever the number of processes. A global batch is the next ``global_batch``
    records of it. This process takes every ``processes``-th of them, beginning with the one at ``process``. So slices
    give its part: ``records[first + process :: processes]``, in batches of ``batch``.

    Attributes:
        first: Index of the first record of the next global batch, counted from the beginning of the run.
        process: This process's index.
        processes: Number of processes.
        batch: Number of records of a global batch that this process takes.
    """

    first: int
    process: int
    processes: int
    batch: int

    @property
    def begins(self) -> int:
        """Index of the first record that this process takes."""
        return self.first + self.process

    @property
    def global_batch(self) -> int:
        """Number of records of a global batch."""
        return self.batch * self.processes


class ElasticData(Generic[T]):
    """A data iterator that continues at the next record, whatever the number of processes was and is.

    Its state is the same in all processes: the number of records that the job has used. Give it to
    ``session.restore(data=...)``, or register it by ``session.host_state``.

    Args:
        open_at: Returns an iterator over this process's batches, from ``share.first`` on. Called before the first
            batch, and after each ``set_state``.
        process: This process's index, as ``jax.process_index()``.
        processes: Number of processes, as ``jax.process_count()``.
        global_batch: Records of a step over all processes. The number is kept if the number of processes changes.
        batch_per_process: Records of a step in each process. The global batch then follows the number of processes.
            Either this or ``global_batch`` is given.

    Attributes:
        share: This process's part of the next batch.

    Raises:
        SettingsError: The numbers do not fit each other.
    """

    def __init__(
        self,
        open_at: Callable[[Share], Iterator[T]],
        *,
        process: int,
        processes: int,
        global_batch: int | None = None,
        batch_per_process: int | None = None,
    ) -> None:
        if not 0 <= process < processes:
            raise SettingsError(f"process: expected 0 to processes - 1, found {process} of {processes}")
        self.share = Share(0, process, processes, _batch(processes, global_batch, batch_per_process))
        self._open_at = open_at
        self._iterator: Iterator[T] | None = None
        self._began_with = self.share.global_batch
        self._before: Share | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._iterator is None:
            self._iterator = self._open_at(self.share)
        value = next(self._iterator)
        self.share = dataclasses.replace(self.share, first=self.share.first + self.share.global_batch)
        return value

    @property
    def scale(self) -> float:
        """The global batch, divided by the one with which the run began: a factor for the learning rate."""
        return self.share.global_batch / self._began_with

    def get_state(self) -> dict[str, int]:
        """Returns the place; the same in all processes."""
        return {
            "records": self.share.first,
            "processes": self.share.processes,
            "global_batch": self.share.global_batch,
            "began_with": self._began_with,
        }

    def set_state(self, state: dict[str, int]) -> None:
        """Goes on after the records that were used when ``get_state`` returned this.

        Raises:
            CheckpointMismatch: The state is not one of ``ElasticData``.
        """
        try:
            records, processes = int(state["records"]), int(state["processes"])
            global_batch, began_with = int(state["global_batch"]), int(state["began_with"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointMismatch(
                f"the data: expected a state of ElasticData (records, processes, global_batch, began_with), found "
                f"{shown(state)}: restore it with the iterator that it was saved with"
            ) from error
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()
        self._iterator = None
        self._began_with = began_with
        self._before = Share(0, 0, processes, global_batch // processes)
        self.share = dataclasses.replace(self.share, first=records)

    @property
    def changed(self) -> str:
        """What is different from the run that saved the restored state, as text. Empty if nothing is."""
        before, now = self._before, self.share
        if before is None or (before.processes, before.batch) == (now.processes, now.batch):
            return ""
        if before.global_batch == now.global_batch:
            whole = f"{now.global_batch} (kept)"
        else:
            whole = f"{before.global_batch} -> {now.global_batch}"
        own = f"{before.batch} -> {now.batch}" if before.batch != now.batch else f"{now.batch} (kept)"
        return f"global batch: {whole}, batch of a process: {own}"


def same_in_all(values: Sequence[Any], process_index: int, process_count: int) -> Any:
    """Returns the value that all processes had. A ``reshard`` function for ``session.host_state``.

    Raises:
        CheckpointMismatch: The processes that saved did not all have the same value.
    """
    for index, value in enumerate(values[1:], start=1):
        if not _equal(value, values[0]):
            raise CheckpointMismatch(
                f"found a checkpoint of {len(values)} processes, of which process {index} was not at the state of "
                f"process 0, expected one state for all, as there are {process_count} processes now"
            )
    return values[0]


def dealt_out(values: Sequence[dict[str, Any]], process_index: int, process_count: int) -> dict[str, Any]:
    """Returns this process's part of what all processes had. A ``reshard`` function for ``session.host_state``.

    Each value is a dict with an entry for each part of the data that the process reads, such as
    ``{"shard-00017": {"offset": 4096}}``. The entries of all processes are sorted by their names and dealt out in turn.

    Raises:
        CheckpointMismatch: Two processes had the same part, or there are fewer parts than processes.
    """
    owner: dict[str, int] = {}
    parts: dict[str, Any] = {}
    for index, value in enumerate(values):
        for name, part in value.items():
            if name in owner:
                raise CheckpointMismatch(
                    f"found the part {name!r} in processes {owner[name]} and {index}, expected each part in one "
                    f"process: its records would be used twice"
                )
            owner[name], parts[name] = index, part
    if len(parts) < process_count:
        raise CheckpointMismatch(
            f"found {len(parts)} parts for {process_count} processes, expected at least one for each: split the data "
            f"into more parts, or start with at most {len(parts)} processes"
        )
    return {name: parts[name] for name in sorted(parts)[process_index::process_count]}


def _batch(processes: int, global_batch: int | None, batch_per_process: int | None) -> int:
    if (global_batch is None) == (batch_per_process is None):
        raise SettingsError(
            "expected global_batch (kept if the number of processes changes) or batch_per_process (the global batch "
            f"follows that number), found {'neither' if global_batch is None else 'both'}"
        )
    if global_batch is None:
        assert batch_per_process is not None
        if batch_per_process < 1:
            raise SettingsError(f"batch_per_process: expected at least 1, found {batch_per_process}")
        return batch_per_process
    if global_batch < 1 or global_batch % processes:
        lower = max(processes, global_batch // processes * processes)
        raise SettingsError(
            f"global_batch: expected a multiple of the {processes} processes, found {global_batch}. Take {lower} or "
            f"{lower + processes}, start with another number of processes, or give batch_per_process"
        )
    return global_batch // processes


def _equal(one: Any, other: Any) -> bool:
    """True if two values of a host state are equal, arrays included. NaN is equal to NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque) and isinstance(other, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(_equal, one, other))
    if getattr(one, "shape", ()) != getattr(other, "shape", ()):
        return False
    same = (one == other) | ((one != one) & (other != other))  # only NaN differs from itself
    return bool(same.all() if hasattr(same, "all") else same)
