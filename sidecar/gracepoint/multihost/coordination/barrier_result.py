"""What the key ``released`` of a barrier says: the result, or why nobody passes."""

from __future__ import annotations

import json
from typing import Any

from gracepoint.errors import BarrierCancelled, BarrierFailed, BarrierTimeout


def read_released(text: str) -> dict[str, Any]:
    """Reads the value of the key."""
    found: dict[str, Any] = json.loads(text)
    return found


def released_value(key: str, released: dict[str, Any], who: str, by: str) -> str:
    """Returns the result of a barrier.

    Args:
        key: The barrier's key.
        released: What was decided.
        who: The name of the set of processes that this process names.
        by: The process that decided, in words.

    Raises:
        BarrierFailed: A process failed, or the processes name different sets.
        BarrierCancelled: A process gave the barrier up.
        BarrierTimeout: Not all processes came in time. Names the missing ones.
    """
    if "error" in released:
        raise BarrierFailed(f"barrier {key!r}: {by} reported {released['error']}")
    if "cancelled" in released:
        raise BarrierCancelled(f"barrier {key!r}: {by} gave it up: {released['cancelled']}")
    if "missing" in released:
        raise BarrierTimeout(
            f"barrier {key!r}: {by} gave up after {released['timeout_s']:g} s, {released['why']}",
            tuple(released["missing"]),
        )
    if released["who"] != who:
        raise BarrierFailed(
            f"barrier {key!r}: {by} completed it with other processes than those that this one names: give "
            f"every process the same processes=, or each group a key of its own"
        )
    result: str = released["result"]
    return result
