"""What processes tell each other in a restore in which one replica reads for all: how reading went.

A process that waits in a collective operation for one that gave up would wait forever. So each says first, with a
timeout, whether it has what it should have read; one that fails before that says so at once.
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
    """What one process says.

    Attributes:
        limit_bytes: How many bytes of each device's part it can take at once.
        word: Kind of the error with which reading failed (``errors.to_word``). None if it has read its part.
        failure: That error's message; empty if there is none.
    """

    limit_bytes: int
    word: str | None
    failure: str


class ReplicaAgreement:
    """Processes that restore together, and what they tell each other in one restore: once, how reading went.

    Args:
        gang: The processes.
        key: Of this restore.
    """

    def __init__(self, gang: ProcessGroup, key: str) -> None:
        self.gang = gang
        self._key = key
        self._told = False

    def tell(self, failure: Exception | None, limit_bytes: int, deadline: Deadline) -> list[ReplicaAnswer]:
        """Returns what each process says, by index.

        Raises:
            BarrierTimeout: One did not in time.
        """
        self._told = True
        word, text = (None, "") if failure is None else (to_word(failure), str(failure) or repr(failure))
        mine = json.dumps([limit_bytes, word, text])
        answers = self.gang.gather(self._key, mine, timeout_s=deadline.remaining_s())
        return [ReplicaAnswer(*json.loads(answer)) for answer in answers]

    @contextlib.contextmanager
    def telling_failure(self, deadline: Deadline) -> Iterator[None]:
        """Tells the others of an error that leaves the block, if they were told nothing else; they wait for that."""
        try:
            yield
        except Exception as error:
            if not self._told:
                with contextlib.suppress(BarrierError):
                    self.tell(error, 0, deadline)
            raise


def asks_one_replica(restore_args: Any) -> bool:
    """True if some of ``restore_args`` ask one replica to read for all."""
    args = jax.tree.leaves(restore_args, is_leaf=lambda node: isinstance(node, SingleReplicaArrayRestoreArgs))
    return any(isinstance(arg, SingleReplicaArrayRestoreArgs) for arg in args)
