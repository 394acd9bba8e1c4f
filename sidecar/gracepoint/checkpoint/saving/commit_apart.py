"""Ends a save whose processes did not meet at the barrier: commits it if it is durable in all of them."""

from __future__ import annotations

import logging

from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.steps import commit
from gracepoint.errors import BarrierError, GracepointError, SaveFailed
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)

_DURABLE = "durable"


def commit_apart(paths: Layout, temporary: Temporary, gang: ProcessGroup, key: str, error: Exception) -> None:
    """Ends a save whose processes did not meet at the barrier.

    A missing process may have died after its part was durable. If a process is only late, it could find the save
    durable after the others found that it is not. So the first process that checks decides for all.

    Args:
        paths: Where the checkpoint goes.
        temporary: The folder that was written to.
        gang: The processes that save together.
        key: Key of the barrier at which they did not meet.
        error: Why they did not meet.

    Raises:
        SaveFailed: The save is not committed. If it is durable nevertheless, the next start commits it.
    """
    what = temporary.what
    try:
        durable = commit.is_durable(paths, temporary)
    except (GracepointError, OSError) as reason:
        raise SaveFailed(f"{what} is not committed: {reason} (after: {error})") from error
    decided = found = _DURABLE if durable else str(error)
    try:
        decided = gang.decide(f"{key}/apart", found)
    except BarrierError as unreachable:
        # Process 0, which has the store, has died, and JAX ends the other processes now. Only the disk counts.
        logger.warning("the processes cannot agree on the end of a save: %s", unreachable)
    if decided != _DURABLE:
        late = f", and was durable too late: the next start commits {temporary.path}" if durable else ""
        raise SaveFailed(f"{what} is not committed: {decided}{late}") from error
    try:
        # Other processes may commit at the same time, so nothing is replaced.
        if not commit.finalize(paths, temporary, replace=False):
            path, target = temporary.path, temporary.target
            raise SaveFailed(f"{path} cannot be committed: {target} already exists (after: {error})")
    except (GracepointError, OSError) as reason:
        raise SaveFailed(f"{what} is durable and not committed: {reason} (after: {error})") from error
    logger.warning("%s is committed, though the processes did not meet: %s", what, error)
