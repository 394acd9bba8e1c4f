"""Committing a save with a barrier of the caller's own, which knows neither who comes last nor of failures."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gracepoint.errors import BarrierError, SaveFailed
from gracepoint.multihost.utilities import BarrierSyncFn

logger = logging.getLogger(__name__)


class SyncFnBarrier:
    """``saving.Barrier`` on a ``BarrierSyncFn``: all have written; one process commits; all know.

    Args:
        sync_fn: Called twice a save, with keys of their own.
        commits_here: True in the one process that commits.
    """

    def __init__(self, sync_fn: BarrierSyncFn, *, commits_here: bool) -> None:
        self._sync_fn = sync_fn
        self._commits_here = commits_here

    def __call__(self, key: str, *, timeout_s: float, on_last: Callable[[], None]) -> None:
        """As ``saving.Barrier``; the timeout is each call's."""
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
