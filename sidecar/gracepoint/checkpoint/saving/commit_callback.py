"""Calls the user's callback after the commit, before the save counts as finished in any process."""

from __future__ import annotations

from collections.abc import Callable

from gracepoint.errors import SaveFailed
from gracepoint.process_group import ProcessGroup


def call_back(callback: Callable[[], None] | None, *, gang: ProcessGroup, key: str, timeout_s: float) -> None:
    """Calls ``callback``, and returns when it has returned in all processes that have one. Collective.

    Args:
        callback: The function to call. None if only other processes call it.
        gang: The processes that save together.
        key: Key of the barrier at which they meet.
        timeout_s: Seconds to wait at the barrier.

    Raises:
        SaveFailed: The callback failed in this process.
        BarrierError: The callback failed in another process, or did not return in time.
    """
    if callback is not None:
        try:
            callback()
        except BaseException as error:  # also SystemExit: the other processes wait
            gang.fail(key, error)
            raise SaveFailed(f"the checkpoint is committed, but post_finalization_callback failed: {error}") from error
    gang.barrier(key, timeout_s=timeout_s)
