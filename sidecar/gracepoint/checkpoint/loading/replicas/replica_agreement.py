"""How the processes agree, in a restore in which one replica reads for all, that reading succeeded everywhere.

If a process failed before a collective operation, the others would wait in that operation forever. So each process
first reports, with a timeout, whether it has read its part. A process that fails earlier reports that at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from gracepoint.checkpoint.options import SingleReplicaArrayRestoreArgs
from gracepoint.checkpoint.orbax_objects import is_orbax
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierError, from_word, to_word
from gracepoint.process_group import ProcessGroup


@dataclasses.dataclass(frozen=True)
class ReplicaAnswer:
    """The report of one process.

    Attributes:
        limit_bytes: Most bytes of each device's part that the process can receive at once.
        word: Kind of the error with which reading failed (``errors.to_word``). None if the process has read its part.
        failure: Message of that error. Empty if there is none.
    """

    limit_bytes: int
    word: str | None
    failure: str


class ReplicaAgreement:
    """The reports that the processes exchange in one restore. At each meeting, each process reports once.

    Args:
        gang: The processes that restore together.
        key: Prefix of the keys of the exchanges. Unique to this restore.
        meets_first: Whether the processes also meet before they read (``ready``). The same in all processes.

    Attributes:
        agreed_bytes: Most bytes of each device's part that every process can receive at once. None before ``ready``.
    """

    def __init__(self, gang: ProcessGroup, key: str, *, meets_first: bool = False) -> None:
        self.gang = gang
        self.meets_first = meets_first
        self.agreed_bytes: int | None = None
        self._key = key
        self._meeting: str | None = f"{key}/ready" if meets_first else key  # the next one. None: there is none

    def ready(self, limit_bytes: int, deadline: Deadline) -> int:
        """Meets before reading. Returns ``agreed_bytes``. No other meeting follows, unless ``expects_tell`` is called.

        Raises:
            CheckpointError: Another process has failed.
            BarrierTimeout: A process did not report in time.
        """
        told = self.tell(None, limit_bytes, deadline)
        raise_failure_in(told)
        self.agreed_bytes = min(said.limit_bytes for said in told)
        return self.agreed_bytes

    def expects_tell(self) -> None:
        """Notes after ``ready`` that all processes report once more."""
        self._meeting = self._key

    def tell(self, failure: Exception | None, limit_bytes: int, deadline: Deadline) -> list[ReplicaAnswer]:
        """Reports for this process at the next meeting. Returns the reports of all processes, by index.

        Raises:
            BarrierTimeout: A process did not report in time.
        """
        key, self._meeting = self._meeting, None
        assert key is not None
        word, text = (None, "") if failure is None else (to_word(failure), str(failure) or repr(failure))
        mine = json.dumps([limit_bytes, word, text])
        answers = self.gang.gather(key, mine, timeout_s=deadline.remaining_s())
        return [ReplicaAnswer(*json.loads(answer)) for answer in answers]

    @contextlib.contextmanager
    def telling_failure(self, deadline: Deadline) -> Iterator[None]:
        """Reports an error that leaves the block, if the others wait for this process at a meeting."""
        try:
            yield
        except Exception as error:
            if self._meeting is not None:
                with contextlib.suppress(BarrierError):
                    self.tell(error, 0, deadline)
            raise


def raise_failure_in(told: Sequence[ReplicaAnswer]) -> None:
    """Raises an error if a process reported one. If all reported the same kind of error, this one is of that kind."""
    failed = [(process, said) for process, said in enumerate(told) if said.word is not None]
    if failed:
        text = "; ".join(f"process {process} could not read its part: {said.failure}" for process, said in failed)
        words = {said.word for _, said in failed}
        raise from_word(str(words.pop()) if len(words) == 1 else "error")(text)


def asks_one_replica(restore_args: Any) -> bool:
    """Returns whether some of ``restore_args`` ask one replica to read for all."""
    kind = SingleReplicaArrayRestoreArgs
    return any(isinstance(arg, kind) or is_orbax(arg, kind.__name__) for arg in jax.tree.leaves(restore_args))
