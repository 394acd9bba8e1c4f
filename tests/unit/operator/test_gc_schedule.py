"""Full garbage collections come between notices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from gracepoint_operator import gc_schedule


def _collected(quiet: list[bool]) -> list[int]:
    """The minutes in which it was collected, of minutes that were quiet or not. Negative: of everything."""
    minutes: Iterator[int] = iter(range(len(quiet)))
    now = -1
    collected: list[int] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds == gc_schedule.EVERY_S
        try:
            now = next(minutes)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await gc_schedule.collect_between_notices(
                lambda: quiet[now], sleep=sleep, collect=lambda whole: collected.append(-now if whole else now)
            )

    asyncio.run(run())
    return collected


def test_garbage_is_collected_each_minute_while_nothing_is_under_way() -> None:
    assert _collected([True] * 3) == [0, 1, 2]


def test_a_preemption_under_way_puts_it_off_to_the_first_quiet_minute() -> None:
    assert _collected([True, False, False, True, True]) == [0, 3, 4]


def test_consecutive_preemptions_postpone_it_for_a_bounded_time() -> None:
    most = gc_schedule.MOST_PUT_OFF
    assert _collected([False] * (2 * most + 2)) == [most, 2 * most + 1]


def test_everything_is_looked_at_once_an_hour() -> None:
    collected = _collected([True] * 2 * gc_schedule.WHOLE_EVERY)
    assert [minute for minute in collected if minute < 0] == [
        1 - gc_schedule.WHOLE_EVERY,
        1 - 2 * gc_schedule.WHOLE_EVERY,
    ]
