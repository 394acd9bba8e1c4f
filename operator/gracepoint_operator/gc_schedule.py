"""When Python's garbage collector looks through everything: between notices, not in the middle of one.

A full collection of what a thousand subscriptions hold takes 0.2 s, during which every thread stands still; and Python
begins one after so many new objects, just as a notice to all of them makes. So the full ones are left to one task, on
the core's event loop: each minute, put off for a while where a gang has a preemption under way. It ends when it is
cancelled. Younger garbage, such as that of a receipt's connection, is collected by Python itself, in larger portions.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

EVERY_S = 60.0
#: So often it is put off at most: gangs may be under way for hours, one after another.
MOST_PUT_OFF = 10
#: New objects until the youngest are looked through; so many such collections until the middle-aged are, and so on.
_PORTIONS = (10_000, 10, 1_000_000)


def restrain() -> None:
    """Keeps Python from full collections of its own, in this process, from now on."""
    gc.set_threshold(*_PORTIONS)


async def collect_between_notices(
    is_quiet: Callable[[], bool],
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    collect: Callable[[], object] = gc.collect,
) -> None:
    """Collects until cancelled.

    Args:
        is_quiet: False while a preemption is under way.
        sleep: Waits so many seconds.
        collect: A full collection.
    """
    put_off = 0
    while True:
        await sleep(EVERY_S)
        if is_quiet() or put_off == MOST_PUT_OFF:
            collect()
            put_off = 0
        else:
            put_off += 1
