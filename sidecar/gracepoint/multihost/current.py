"""Whom ``reached_preemption`` asks: the session that is open in this process, if there is one.

Set when a session is attached and cleared when it ends, in the training thread, which is also the one that asks.
"""

from __future__ import annotations

from collections.abc import Callable

_hook: Callable[[int], bool] | None = None


def set_reached_preemption_hook(hook: Callable[[int], bool] | None) -> None:
    """Says who answers ``reached_preemption(step)`` from now on; None: nobody."""
    global _hook
    _hook = hook


def reached_preemption_hook() -> Callable[[int], bool] | None:
    """Who answers ``reached_preemption(step)``; None where no session is open."""
    return _hook
