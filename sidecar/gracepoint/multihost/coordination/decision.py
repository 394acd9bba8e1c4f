"""A decision that one process makes for all, after a look at something that all of them share.

The processes take turns: the first to write a turn's key looks, and the others wait for what it decides. A turn whose
process has died, or hangs, ends by a timeout. This module has no threads and no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gracepoint.multihost.coordination.barrier_result import read_released
from gracepoint.multihost.coordination.store import KeyTimeout, KeyValueStore

#: After so many turns, all processes that still wait look: several have hung, so what they look at is slow, or gone.
_TURNS = 3


def may_decide(
    store: KeyValueStore,
    key: str,
    process_index: int,
    release: Callable[[str, dict[str, Any]], dict[str, Any]],
    timeout_s: float,
) -> dict[str, Any] | None:
    """Returns what another process has decided at ``key``. None if it is this process's turn to look.

    Args:
        store: The store of all processes.
        key: Key of the decision.
        process_index: This process.
        release: Writes what is decided at a key, or returns what was decided before.
        timeout_s: Seconds that another process's turn may take.
    """
    for turn in range(_TURNS):
        mine = {"by": process_index}
        if release(f"{key}/turn/{turn}", mine) is mine:
            return None
        try:
            return read_released(store.get(f"{key}/released", timeout_s=timeout_s))
        except KeyTimeout:
            continue
    return None
