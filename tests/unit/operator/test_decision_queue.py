"""When workloads are decided about: after events, in rounds, at their times, and not too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from gracepoint_operator import controller
from gracepoint_operator.controller import DecisionQueue, Steps
from tests.unit.operator.fakes.objects import NOW, Clock

_WAIT_S = 10.0


class Decisions:
    """What was decided, in order, and what each decision returns or raises."""

    def __init__(self, clock: Clock) -> None:
        self.made: list[str] = []
        self.due_at: dict[str, float | None] = {}
        self.work_s = 0.0
        self.steps = 1
        self.error: Exception | None = None
        self.queue = DecisionQueue(self.decide, clock)

    def decide(self, uid: str) -> Steps:
        for number in range(1, self.steps):
            self.made.append(f"{uid} {number}")
            yield
        self.made.append(uid)
        until_s = time.thread_time() + self.work_s
        while time.thread_time() < until_s:
            pass
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.due_at.get(uid)

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(_WAIT_S):
            while not holds():  # noqa: ASYNC110  the queue is asked, not one event
                await asyncio.sleep(0)


async def test_events_that_wait_bring_one_decision_for_each_workload() -> None:
    decisions = Decisions(Clock())
    for uid in ("a", "b", "a"):
        decisions.queue.add([uid])
    await decisions.until(lambda: len(decisions.made) == 2)
    await asyncio.sleep(0)
    assert decisions.made == ["a", "b"]


async def test_event_is_decided_before_the_rest_of_a_round() -> None:
    decisions = Decisions(Clock())
    decisions.work_s = 2 * controller.SLICE_S  # a slice each
    decisions.queue.add_round(["a", "b", "c"])
    await decisions.until(lambda: decisions.made)
    decisions.queue.add(["z"])
    await decisions.until(lambda: len(decisions.made) == 4)
    assert decisions.made == ["a", "z", "b", "c"]


async def test_other_work_of_the_loop_comes_between_slices() -> None:
    decisions = Decisions(Clock())
    decisions.work_s = 0.011
    decisions.queue.add_round(["a", "b"])
    asyncio.get_running_loop().call_soon(decisions.made.append, "other")
    await decisions.until(lambda: len(decisions.made) == 3)
    assert decisions.made == ["a", "other", "b"]


async def test_a_long_decision_is_followed_by_a_rest_of_its_workload() -> None:
    decisions = Decisions(Clock())
    decisions.work_s = 0.05
    decisions.queue.add(["big"])
    await decisions.until(lambda: decisions.made)
    decisions.work_s = 0.0
    rests_s = time.monotonic()
    decisions.queue.add(["big", "small"])
    await decisions.until(lambda: len(decisions.made) == 3)
    assert decisions.made == ["big", "small", "big"]
    assert time.monotonic() - rests_s > 0.1


async def test_a_workload_is_decided_about_when_it_is_due() -> None:
    clock = Clock()
    decisions = Decisions(clock)
    decisions.due_at["a"] = NOW + 30
    decisions.queue.decide_now("a")
    clock.move(29)
    decisions.queue.add_due()
    await asyncio.sleep(0)
    assert decisions.made == ["a"]
    clock.move(2)
    decisions.due_at["a"] = None
    decisions.queue.add_due()
    await decisions.until(lambda: len(decisions.made) == 2)
    clock.move(1000)
    decisions.queue.add_due()
    await asyncio.sleep(0)
    assert decisions.made == ["a", "a"]


async def test_only_the_time_of_the_last_decision_counts() -> None:
    clock = Clock()
    decisions = Decisions(clock)
    for after_s in (10, 100):
        decisions.due_at["a"] = NOW + after_s
        decisions.queue.decide_now("a")
    clock.move(50)
    decisions.queue.add_due()
    await asyncio.sleep(0)
    assert decisions.made == ["a", "a"]


async def test_an_error_is_followed_by_another_decision_soon() -> None:
    clock = Clock()
    decisions = Decisions(clock)
    decisions.error = ValueError("cannot")
    decisions.queue.decide_now("a")
    clock.move(1)
    decisions.queue.add_due()
    await decisions.until(lambda: decisions.made == ["a", "a"])


async def test_other_work_of_the_loop_comes_between_the_steps_of_a_long_decision() -> None:
    decisions = Decisions(Clock())
    decisions.steps = 3
    decisions.queue.decide_now("a")
    assert decisions.made == ["a 1"], "what was decided is carried out at once"
    asyncio.get_running_loop().call_soon(decisions.made.append, "other")
    await decisions.until(lambda: "a" in decisions.made)
    assert decisions.made == ["a 1", "a 2", "other", "a"]


async def test_a_decision_that_was_begun_ends_before_the_next_one_about_the_same_workload() -> None:
    decisions = Decisions(Clock())
    decisions.steps = 3
    decisions.queue.decide_now("a")
    decisions.queue.decide_now("a")
    assert decisions.made == ["a 1", "a 2", "a", "a 1"]
    decisions.queue.add(["b"])
    await decisions.until(lambda: "b" in decisions.made)
    assert decisions.made[4:] == ["a 2", "a", "b 1", "b 2", "b"]


async def test_an_event_between_the_steps_of_a_long_decision_is_decided_about_after_the_rest() -> None:
    decisions = Decisions(Clock())
    decisions.steps, decisions.work_s = 2, 0.05
    decisions.queue.decide_now("big")
    decisions.queue.add(["big"])
    await decisions.until(lambda: decisions.made == ["big 1", "big"])
    decisions.steps, decisions.work_s = 1, 0.0
    decisions.queue.add(["small"])
    await decisions.until(lambda: len(decisions.made) == 4)
    assert decisions.made[2:] == ["small", "big"]


async def test_an_error_in_a_later_step_is_followed_by_another_decision_soon() -> None:
    clock = Clock()
    decisions = Decisions(clock)
    decisions.steps, decisions.error = 2, ValueError("cannot")
    decisions.queue.add(["a"])
    await decisions.until(lambda: decisions.made == ["a 1", "a"])
    clock.move(1)
    decisions.queue.add_due()
    await decisions.until(lambda: decisions.made == ["a 1", "a", "a 1", "a"])


@pytest.mark.parametrize("decide", [DecisionQueue.decide_now, lambda queue, uid: queue.add_round([uid])])
async def test_an_event_between_the_steps_of_a_decision_in_the_rest_of_another_one_is_decided_about(
    monkeypatch: pytest.MonkeyPatch, decide: Callable[[DecisionQueue, str], None]
) -> None:
    decisions = Decisions(Clock())
    monkeypatch.setattr(controller, "SLICE_S", 0.0)  # a step each
    decisions.work_s = 0.05
    decisions.queue.add(["big"])
    await decisions.until(lambda: decisions.made == ["big"])
    decisions.steps = 2
    decide(decisions.queue, "big")
    await decisions.until(lambda: decisions.made == ["big", "big 1"])
    decisions.queue.add(["big"])
    await decisions.until(lambda: decisions.made == ["big", "big 1", "big", "big 1", "big"])
