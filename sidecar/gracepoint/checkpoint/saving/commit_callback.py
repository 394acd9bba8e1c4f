"""What a user wants to be called with once a checkpoint is committed, before its end is known in any process."""

from __future__ import annotations

from collections.abc import Callable

from gracepoint.errors import SaveFailed
from gracepoint.process_group import ProcessGroup


def call_back(callback: Callable[[], None] | None, *, gang: ProcessGroup, key: str, timeout_s: float) -> None:
    """Calls ``callback``, and returns when it has been called wherever there is one. Collective.

    Args:
        callback: None where another process calls it.
        gang: The processes.
        key: Where they meet.
        timeout_s: For those that wait.

    Raises:
        SaveFailed: It failed here.
        BarrierError: It failed in another process, or did not return in time.
    """
    if callback is not None:
        try:
            callback()
        except BaseException as error:  # also SystemExit: the other processes wait
            gang.fail(key, error)
            raise SaveFailed(f"the checkpoint is committed, but post_finalization_callback failed: {error}") from error
    gang.barrier(key, timeout_s=timeout_s)
