"""The write queue: one write at a time for each key, the newest state, retries."""

from __future__ import annotations

import asyncio

import pytest

from gracepoint_operator.kube import client
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.metrics import Metrics
from tests.unit.operator.fakes.replica import until, writes_under_way

KEY = ("team-a", "one")


async def test_many_touches_become_few_writes_and_the_last_is_never_lost() -> None:
    state, written = 0, []

    async def write(key: Key) -> None:
        await asyncio.sleep(0)
        written.append(state)

    queue = WriteQueue("test", write, Metrics(), interval_s=0.01)
    for state in range(100):
        queue.touch(KEY)
        if state % 40 == 0:
            await asyncio.sleep(0.02)
    await queue.close(5)
    assert written[-1] == 99
    assert len(written) < 10


async def test_busy_api_is_retried_and_a_refused_write_is_counted() -> None:
    errors: list[client.KubeError] = [
        client.Unavailable("busy"),
        client.Conflict("newer"),
        client.Refused("bad"),
    ]
    metrics = Metrics()

    async def write(key: Key) -> None:
        if errors:
            raise errors.pop(0)

    queue = WriteQueue("test", write, metrics, interval_s=0.01)
    queue.touch(KEY)
    await until(lambda: not errors, "three attempts")
    await queue.close(5)
    assert b"gracepoint_status_write_failures_total 1.0" in metrics.text()


async def test_refused_write_is_retried_until_accepted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    refusals: list[str | None] = []

    async def write(key: Key) -> None:
        if len(refusals) < 4:
            raise client.Refused("the quota is used up")

    queue = WriteQueue("test", write, Metrics(), 0.005, lambda key, why: refusals.append(why))
    queue.touch(KEY)
    await until(lambda: refusals[-1:] == [None], "the write to be taken")
    await queue.close(5)
    assert refusals == ["the quota is used up"] * 4 + [None]
    assert len([record for record in caplog.records if "refuses" in record.message]) == 1


async def test_a_refused_write_does_not_hold_up_the_end() -> None:
    async def write(key: Key) -> None:
        raise client.Refused("the quota is used up")

    queue = WriteQueue("test", write, Metrics(), interval_s=60)
    queue.touch(KEY)
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await queue.close(60)
    assert not writes_under_way("test")


async def test_a_key_that_cannot_be_written_does_not_hold_up_another() -> None:
    written: list[Key] = []

    async def write(key: Key) -> None:
        if key == KEY:
            raise client.Unavailable("busy")
        written.append(key)

    queue = WriteQueue("test", write, Metrics(), interval_s=0.01)
    queue.touch(KEY)
    queue.touch(("team-a", "two"))
    await until(lambda: written, "the other key")
    await queue.close(0.01)


async def test_an_api_that_cannot_be_asked_ends_no_refusal() -> None:
    refusals: list[str | None] = []
    calls = 0

    async def write(key: Key) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise client.Refused("the quota is used up")
        if calls < 8:
            raise client.Unavailable("down")

    queue = WriteQueue("test", write, Metrics(), 0.005, lambda key, why: refusals.append(why))
    queue.touch(KEY)
    await until(lambda: None in refusals, "the write")
    await queue.close(5)
    assert calls == 8
    assert refusals == ["the quota is used up", None]


@pytest.mark.parametrize("how", ["urgent", "closed"])
async def test_the_wait_before_a_first_write_ends_early(how: str) -> None:
    written: list[Key] = []

    async def write(key: Key) -> None:
        written.append(key)

    queue = WriteQueue("test", write, Metrics(), interval_s=0.01)
    queue.touch(KEY, urgent=True, after_s=600)
    for _ in range(10):
        await asyncio.sleep(0)
    queue.touch(KEY)
    await queue.settled(KEY, 0.01)
    assert written == []
    if how == "urgent":
        queue.touch(KEY, urgent=True)
        await queue.settled(KEY, 30)
        assert written == [KEY]
    await queue.close(30)
    assert written == [KEY]


async def test_what_waits_is_not_settled_before_it_is_written() -> None:
    written: list[Key] = []

    async def write(key: Key) -> None:
        written.append(key)

    queue = WriteQueue("test", write, Metrics(), interval_s=60)
    queue.touch(KEY, urgent=True, after_s=0.01)
    await queue.settled(KEY, 30)
    assert written == [KEY]
    await queue.close(30)


async def test_a_write_that_ends_with_an_unknown_error_leaves_nothing_that_counts_as_about_to_be_written() -> None:
    written: list[Key] = []

    async def write(key: Key) -> None:
        if not written:
            written.append(key)
            queue.touch(key)  # a report came meanwhile
            raise RuntimeError("a bug, once")
        written.append(key)

    queue = WriteQueue("test", write, Metrics(), interval_s=0.01)
    queue.touch(KEY)
    assert queue.is_marked(KEY)
    (task,) = (task for task in asyncio.all_tasks() if task.get_name().startswith("write test"))
    with pytest.raises(RuntimeError, match="a bug, once"):
        await task
    assert not queue.is_marked(KEY), "so that whoever looks for it marks it again"
    queue.touch(KEY)
    await until(lambda: len(written) == 2, "the write after it")
    await queue.close(5)
