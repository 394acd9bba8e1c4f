"""The hook through which ``reached_preemption`` asks the session that is open in this process.

The training thread sets the hook when a session is attached, clears it when the session ends, and reads it.
"""

from __future__ import annotations

from collections.abc import Callable

_hook: Callable[[int], bool] | None = None


def set_reached_preemption_hook(hook: Callable[[int], bool] | None) -> None:
    """Sets the function that answers ``reached_preemption(step)``. None if no session is open."""
    global _hook
    _hook = hook


def reached_preemption_hook() -> Callable[[int], bool] | None:
    """Returns the function that answers ``reached_preemption(step)``. None if no session is open."""
    return _hook
