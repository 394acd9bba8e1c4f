"""Ends a save whose processes did not meet at the barrier: commits it if it is durable in all of them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.time_limit import ended_by
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierError, GracepointError, SaveFailed
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)

#: Seconds that the requests of a process have at least. The other processes wait for its result for so long.
SECONDS = 10.0
_DURABLE = "durable"
_COMMITTED = "committed"
# With more processes, the error does not say whether the save was durable too late: each would read all records.
_FEW = 16


def commit_apart(
    paths: Layout, temporary: Temporary, gang: ProcessGroup, key: str, error: Exception, deadline: Deadline
) -> None:
    """Ends a save whose processes did not meet at the barrier.

    A missing process may have died after its part was durable. A process that is only late could find the save durable
    after the others found that it is not. So the first process that checks decides for all. The check and the commit
    read the record of each process. So one process at a time does this, and the others wait for it.

    Args:
        paths: Where the checkpoint goes.
        temporary: The folder that was written to.
        gang: The processes that save together.
        key: Key of the barrier at which they did not meet.
        error: Why they did not meet.
        deadline: The deadline of the save. If it is near or over, requests to an object store have a few seconds.

    Raises:
        SaveFailed: The save is not committed. If it is durable nevertheless, the next start commits it.
    """
    limit = Deadline.after(max(deadline.remaining_s(), SECONDS), time.monotonic)
    with ended_by(limit.check):
        _Apart(paths, temporary, gang, f"{key}/apart", error).commit()


class _Apart:
    """Ends one save. The arguments are those of ``commit_apart``."""

    def __init__(self, paths: Layout, temporary: Temporary, gang: ProcessGroup, key: str, error: Exception) -> None:
        self._paths = paths
        self._temporary = temporary
        self._gang = gang
        self._key = key
        self._error = error

    def commit(self) -> None:
        what, error = self._temporary.what, self._error
        try:
            decided = self._in_turn(self._key, self._durable)
        except (GracepointError, OSError) as reason:
            raise SaveFailed(f"{what} is not committed: {reason} (after: {error})") from error
        if decided != _DURABLE:
            with contextlib.suppress(GracepointError, OSError):
                decided += self._late()
            raise SaveFailed(f"{what} is not committed: {decided}") from error
        try:
            # The others need not do what one has done. If it failed, each reports the outcome of a try of its own.
            if self._in_turn(f"{self._key}/commit", self._tried) != _COMMITTED:
                self._finalize()
        except (GracepointError, OSError) as reason:
            raise SaveFailed(f"{what} is durable and not committed: {reason} (after: {error})") from error
        logger.warning("%s is committed, though the processes did not meet: %s", what, error)

    def _in_turn(self, key: str, find: Callable[[], str]) -> str:
        try:
            return self._gang.decide_in_turn(key, find, timeout_s=SECONDS)
        except BarrierError as unreachable:
            # Process 0, which has the store, has died, and JAX ends the other processes now. Only the disk counts.
            logger.warning("the processes cannot agree on the end of a save: %s", unreachable)
            return find()

    def _durable(self) -> str:
        return _DURABLE if commit.is_durable(self._temporary) else str(self._error)

    def _late(self) -> str:
        """Returns the rest of a message: whether the save was durable too late."""
        if self._gang.process_count > _FEW or not commit.is_durable(self._temporary):
            return ""
        return f", and was durable too late: the next start commits {self._temporary.path}"

    def _tried(self) -> str:
        try:
            self._finalize()
        except (GracepointError, OSError) as reason:
            return str(reason)
        return _COMMITTED

    def _finalize(self) -> None:
        path, target = self._temporary.path, self._temporary.target
        # Other processes may commit at the same time, so nothing is replaced.
        if not commit.finalize(self._paths, self._temporary, replace=False):
            raise SaveFailed(f"{path} cannot be committed: {target} already exists (after: {self._error})")
