"""Waiting for what other threads or processes bring about, where nothing tells of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LOOK_EVERY_S = 0.005


def until_no_thread(part_of_name: str) -> None:
    """Returns once no thread runs that has this in its name."""
    until(lambda: not any(part_of_name in thread.name for thread in threading.enumerate()), f"{part_of_name} to end")


def until(holds: Callable[[], object], what: str | Callable[[], str], *, timeout_s: float = 60.0) -> None:
    """Returns once ``holds()`` is true.

    Args:
        holds: Asked again and again.
        what: What is waited for, for the message; or makes the message, where it says what was found instead.
        timeout_s: How long, in seconds.

    Raises:
        AssertionError: It did not become true in time.
    """
    give_up_at_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > give_up_at_s:
            raise AssertionError(f"waited {timeout_s:g} s for: {what if isinstance(what, str) else what()}")
        time.sleep(_LOOK_EVERY_S)


class PassingTime:
    """In place of a module's ``time``: it passes when somebody sleeps, and at no other moment."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FastTime:
    """In place of a module's ``time``: a clock that runs ``factor`` times as fast."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def monotonic(self) -> float:
        return time.monotonic() * self._factor
