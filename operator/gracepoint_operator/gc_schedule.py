"""Schedules Python's full garbage collections between notices, and keeps them short.

A full collection stops every thread, and looks at every object: 0.3 s with 20,000 pods and 2,000 subscriptions. Python
starts one after a number of new objects, which is what a notice to all subscribers creates. So one task on the
controller's event loop runs the full collections: once a minute, postponed for a while if a preemption is under way.
What survives is left out of the next ones (``gc.freeze``), so each looks only at what is new. Once an hour everything
is looked at, since a stream that has ended may be part of a cycle. The task ends when it is cancelled. Python itself
still collects young objects, such as those of a connection, in larger portions.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

EVERY_S = 60.0
#: How often a collection is postponed at most: preemptions may be under way for hours, one after another.
MOST_PUT_OFF = 10
#: Each collection of this number looks at everything.
WHOLE_EVERY = 60
#: Arguments of ``gc.set_threshold``: one for each generation.
_PORTIONS = (10_000, 10, 1_000_000)


def spare_what_is_known() -> None:
    """Leaves everything that exists now out of the next collections. Call it once, when the cluster is known."""
    gc.freeze()


def restrain() -> None:
    """Stops Python from starting full collections in this process. Call it when all modules are loaded."""
    gc.set_threshold(*_PORTIONS)
    gc.collect()
    gc.freeze()


def _collect(whole: bool) -> None:
    """Runs a full collection of what is new, or of everything."""
    if whole:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


async def collect_between_notices(
    is_quiet: Callable[[], bool],
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    collect: Callable[[bool], object] = _collect,
) -> None:
    """Runs full collections until cancelled.

    Args:
        is_quiet: Returns False while a preemption is under way.
        sleep: Waits for a number of seconds.
        collect: Runs a collection, of everything if its argument is true.
    """
    put_off = number = 0
    while True:
        await sleep(EVERY_S)
        if is_quiet() or put_off == MOST_PUT_OFF:
            number += 1
            collect(number % WHOLE_EVERY == 0)
            put_off = 0
        else:
            put_off += 1
