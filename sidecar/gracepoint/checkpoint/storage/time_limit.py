"""Ends the requests of a block of code when its time is over, without each function passing a deadline on.

The limit belongs to the thread that sets it. Stores that make requests ask for it in the thread that calls them, and
pass it on to the threads that they start.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_limits = threading.local()


@contextlib.contextmanager
def ended_by(go_on: Callable[[], None] | None) -> Iterator[None]:
    """Within the block, requests of this thread call ``go_on`` again and again. An error that it raises ends them.

    Until then, requests that fail are repeated. The limit of an outer block holds, too. None sets no further limit.
    """
    outer = current()
    if go_on is None or outer is None:
        _limits.go_on = go_on or outer
    else:
        inner = go_on

        def both() -> None:
            outer()
            inner()

        _limits.go_on = both
    try:
        yield
    finally:
        _limits.go_on = outer


def current() -> Callable[[], None] | None:
    """Returns what ends the requests of this thread. None if nothing does."""
    return getattr(_limits, "go_on", None)
