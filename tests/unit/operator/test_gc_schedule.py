"""Garbage collections are short, and come often enough."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from gracepoint_operator import event_loop
from gracepoint_operator.event_loop import LOOK_S, PORTION, PUT_OFF_S, WHOLE_S


def _collected(
    looks: int, *, quiet: Callable[[float], bool] = lambda at: True, new_a_second: float = 0.0
) -> list[tuple[float, bool]]:
    """When it was collected, in seconds from the start, and whether everything was looked at."""
    now, since_s = 0.0, 0.0
    collected: list[tuple[float, bool]] = []

    async def sleep(seconds: float) -> None:
        nonlocal now, looks
        if looks == 0:
            raise asyncio.CancelledError
        now, looks = now + seconds, looks - 1

    def collect(whole: bool) -> None:
        nonlocal since_s
        collected.append((now, whole))
        since_s = now

    async def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await event_loop.collect_in_portions(
                lambda: quiet(now), sleep=sleep, new=lambda: int((now - since_s) * new_a_second), collect=collect
            )

    asyncio.run(run())
    return collected


def test_it_collects_as_soon_as_there_is_a_portion_of_new_objects() -> None:
    assert _collected(round(3 * PORTION / LOOK_S), new_a_second=1.0) == [
        (PORTION, False),
        (2 * PORTION, False),
        (3 * PORTION, False),
    ]


@pytest.fixture
def looks_a_day(monkeypatch: pytest.MonkeyPatch) -> int:
    """It looks only once a minute. Returns how many looks a day has."""
    monkeypatch.setattr(event_loop, "LOOK_S", 60.0)
    return round(WHOLE_S / 60.0)


def test_it_looks_at_everything_once_a_day(looks_a_day: int) -> None:
    assert _collected(2 * looks_a_day + 100) == [(WHOLE_S, True), (2 * WHOLE_S, True)]


def test_preemptions_in_progress_put_that_off_for_a_bounded_time(looks_a_day: int) -> None:
    looks = looks_a_day + 100
    assert _collected(looks, quiet=lambda at: at > WHOLE_S + 60) == [(WHOLE_S + 120, True)]
    assert _collected(looks, quiet=lambda at: False) == [(WHOLE_S + PUT_OFF_S, True)]


@pytest.mark.integration
def test_a_collection_does_not_look_at_what_was_known_before() -> None:
    """In a process of its own: the settings are those of the process."""
    program = """
        import gc, time
        from gracepoint_operator import event_loop
        event_loop.restrain()
        known = [[index] for index in range(2_000_000)]
        began_s = time.thread_time()
        event_loop._collect(True)
        whole_s = time.thread_time() - began_s
        new = [[index] for index in range(1_000)]
        began_s = time.thread_time()
        event_loop._collect(False)
        assert time.thread_time() - began_s < whole_s / 20, (time.thread_time() - began_s, whole_s)
        assert gc.get_freeze_count() > 2_000_000
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


@pytest.mark.integration
def test_pythons_own_collections_look_at_few_objects_once_the_cluster_is_known() -> None:
    program = """
        import gc
        from gracepoint_operator import event_loop
        event_loop.restrain()
        event_loop.spare_what_is_known()
        looked_at = []
        def see(phase, about):
            if phase == "start":
                looked_at.append(sum(len(gc.get_objects(each)) for each in range(about["generation"] + 1)))
        gc.callbacks.append(see)
        kept = []
        for index in range(30_000):
            kept.append([index])
        gc.callbacks.remove(see)
        assert 5_000 < max(looked_at) < 15_000, looked_at
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


@pytest.mark.integration
def test_garbage_in_cycles_is_found_though_it_was_spared_once() -> None:
    program = """
        import gc, weakref
        from gracepoint_operator import event_loop
        class Cycle: pass
        event_loop.restrain()
        one = Cycle(); one.itself = one; gone = weakref.ref(one)
        event_loop._collect(False)
        del one
        event_loop._collect(False)
        assert gone() is not None
        event_loop._collect(True)
        assert gone() is None
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


@pytest.mark.integration
def test_the_portion_is_counted_by_pythons_own_collections() -> None:
    looks, collected = 0, list[int]()

    async def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks in (2, 4):
            gc.collect(1)  # as Python does now and then
        if looks == 5:
            raise asyncio.CancelledError

    def collect(whole: bool) -> None:
        collected.append(looks)
        gc.collect()

    async def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await event_loop.collect_in_portions(lambda: True, sleep=sleep, collect=collect)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()
    assert collected == [2, 4]
