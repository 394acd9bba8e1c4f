"""Schedules Python's full garbage collections between notices.

A full collection stops every thread. Python starts one after a number of
new objects, which is what a notice to all subscribers creates. So one task on the core's event loop runs the full
collections: once a minute, postponed for a while if a preemption is under way. The task ends when it is cancelled.
Python itself still collects young objects, such as those of a connection, in larger portions.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

EVERY_S = 60.0
#: How often a collection is postponed at most: preemptions may be under way for hours, one after another.
MOST_PUT_OFF = 10
#: Arguments of ``gc.set_threshold``: one for each generation.
_PORTIONS = (10_000, 10, 1_000_000)


def restrain() -> None:
    """Stops Python from starting full collections in this process. Call it when all modules are loaded."""
    gc.set_threshold(*_PORTIONS)
    gc.collect()
    gc.freeze()


def spare_what_is_known() -> None:
    """Leaves everything that exists now out of later collections. Call it once, when the cluster is known.

    A collection looks at every object, and most of them are of the known cluster. They have no cycles, so each is freed
    when it is replaced.
    """
    gc.freeze()


async def collect_between_notices(
    is_quiet: Callable[[], bool],
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    collect: Callable[[], object] = gc.collect,
) -> None:
    """Runs full collections until cancelled.

    Args:
        is_quiet: Returns False while a preemption is under way.
        sleep: Waits for a number of seconds.
        collect: Runs a full collection.
    """
    put_off = 0
    while True:
        await sleep(EVERY_S)
        if is_quiet() or put_off == MOST_PUT_OFF:
            collect()
            put_off = 0
        else:
            put_off += 1
