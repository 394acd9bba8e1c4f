"""How the processes agree, in a restore in which one replica reads for all, that reading succeeded everywhere.

If a process failed before a collective operation, the others would wait in that operation forever. So each process
first reports, with a timeout, whether it has read its part. A process that fails earlier reports that at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax

from gracepoint.checkpoint.options import SingleReplicaArrayRestoreArgs
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierError, to_word
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
    """The reports that the processes exchange in one restore. Each process reports once.

    Args:
        gang: The processes that restore together.
        key: Key of the exchange. Unique to this restore.
    """

    def __init__(self, gang: ProcessGroup, key: str) -> None:
        self.gang = gang
        self._key = key
        self._told = False

    def tell(self, failure: Exception | None, limit_bytes: int, deadline: Deadline) -> list[ReplicaAnswer]:
        """Reports for this process, and returns the reports of all processes, by index.

        Raises:
            BarrierTimeout: A process did not report in time.
        """
        self._told = True
        word, text = (None, "") if failure is None else (to_word(failure), str(failure) or repr(failure))
        mine = json.dumps([limit_bytes, word, text])
        answers = self.gang.gather(self._key, mine, timeout_s=deadline.remaining_s())
        return [ReplicaAnswer(*json.loads(answer)) for answer in answers]

    @contextlib.contextmanager
    def telling_failure(self, deadline: Deadline) -> Iterator[None]:
        """Reports an error that leaves the block, if this process has not reported yet. The others wait for it."""
        try:
            yield
        except Exception as error:
            if not self._told:
                with contextlib.suppress(BarrierError):
                    self.tell(error, 0, deadline)
            raise


def asks_one_replica(restore_args: Any) -> bool:
    """Returns whether some of ``restore_args`` ask one replica to read for all."""
    args = jax.tree.leaves(restore_args, is_leaf=lambda node: isinstance(node, SingleReplicaArrayRestoreArgs))
    return any(isinstance(arg, SingleReplicaArrayRestoreArgs) for arg in args)
