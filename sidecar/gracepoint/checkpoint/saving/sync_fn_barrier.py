"""Committing a save with a barrier of the caller's own, which knows neither who comes last nor of failures."""

from __future__ import annotations

from collections.abc import Callable

from gracepoint.errors import BarrierError, SaveFailed
from gracepoint.multihost.utilities import BarrierSyncFn


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
            self._sync_fn(key=f"{key}/write_complete", timeout_ms=timeout_ms)
            if self._commits_here:
                on_last()
            self._sync_fn(key=f"{key}/commit_complete", timeout_ms=timeout_ms)
        except SaveFailed:
            raise
        except Exception as error:
            raise BarrierError(f"barrier_sync_fn for {key!r}: {type(error).__name__}: {error}") from error
