"""Keeps Python's garbage collections short.

A full collection stops every thread and looks at every object: 0.4 s with 20,000 pods and 4,500 connected ones. Nearly
nothing of that is garbage: objects are freed when nobody refers to them any more, and a stream that has ended leaves
about 1 kB in cycles. So what survived a collection is left out of the next ones (``gc.freeze``).

One task on the controller's event loop looks several times a second, and collects as soon as there is a portion of new
objects, so that each collection is short: thousands of connections bring 100,000 objects a second. Once a day
everything is looked at, when no preemption is under way. Python itself still collects the youngest objects, in smaller
portions. The task ends when it is cancelled.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

LOOK_S = 0.125
#: A full collection of what is new runs after this number of collections of young objects: about 25,000 new objects.
PORTION = 1
#: Everything is looked at after this time.
WHOLE_S = 86_400.0
#: That waits at most this long for a moment without a preemption: they may be under way one after another.
PUT_OFF_S = 3_600.0
#: Arguments of ``gc.set_threshold``: one for each generation.
_THRESHOLDS = (5_000, 4, 1_000_000)


def spare_what_is_known() -> None:
    """Leaves everything that exists now out of the next collections. Call it once, when the cluster is known."""
    gc.freeze()


def restrain() -> None:
    """Stops Python from starting full collections in this process. Call it when all modules are loaded."""
    gc.set_threshold(*_THRESHOLDS)
    gc.collect()
    gc.freeze()


def _new() -> int:
    """How many collections of young objects there were since the last full one."""
    return gc.get_count()[2]


def _collect(whole: bool) -> None:
    """Runs a full collection of what is new, or of everything."""
    if whole:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


async def collect_in_portions(
    is_quiet: Callable[[], bool],
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    new: Callable[[], int] = _new,
    collect: Callable[[bool], object] = _collect,
) -> None:
    """Runs full collections until cancelled.

    Args:
        is_quiet: Returns False while a preemption is under way.
        sleep: Waits for a number of seconds.
        new: Returns how many collections of young objects there were since the last full one.
        collect: Runs a collection, of everything if its argument is true.
    """
    waited_s = 0.0
    while True:
        await sleep(LOOK_S)
        waited_s += LOOK_S
        if waited_s >= WHOLE_S and (is_quiet() or waited_s >= WHOLE_S + PUT_OFF_S):
            collect(True)
            waited_s = 0.0
        elif new() >= PORTION:
            collect(False)
