"""Commits a save with a barrier that the caller passed in.

Such a barrier neither knows which process comes last nor learns of failures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gracepoint.errors import BarrierError, SaveFailed
from gracepoint.multihost.utilities import BarrierSyncFn

logger = logging.getLogger(__name__)


class SyncFnBarrier:
    """A ``save_operation.Barrier`` that uses a ``BarrierSyncFn``.

    All processes meet when they have written. One process commits. All processes meet again after the commit.

    Args:
        sync_fn: The barrier. Called twice in each save, with different keys.
        commits_here: Whether this process commits. True in exactly one process.
    """

    def __init__(self, sync_fn: BarrierSyncFn, *, commits_here: bool) -> None:
        self._sync_fn = sync_fn
        self._commits_here = commits_here

    def __call__(self, key: str, *, timeout_s: float, on_last: Callable[[], None]) -> None:
        """See ``save_operation.Barrier``. Each of the two calls of the barrier has the whole timeout."""
        timeout_ms = max(1, int(timeout_s * 1000))
        try:
            self._wait(f"{key}/write_complete", timeout_ms)
            if self._commits_here:
                on_last()
            self._wait(f"{key}/commit_complete", timeout_ms)
        except SaveFailed:
            raise
        except Exception as error:
            raise BarrierError(f"barrier_sync_fn for {key!r}: {type(error).__name__}: {error}") from error

    def _wait(self, key: str, timeout_ms: int) -> None:
        logger.info("at barrier %r of barrier_sync_fn, for %g s at most", key, timeout_ms / 1000)
        self._sync_fn(key=key, timeout_ms=timeout_ms)
        logger.info("passed barrier %r of barrier_sync_fn", key)
