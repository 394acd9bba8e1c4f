"""The pauses between tries that fail, of everything in the operator."""

from __future__ import annotations

import itertools

import pytest

from gracepoint_operator.kube.client import NotFound, Refused, RetryPauses
from tests.unit.operator.fakes.objects import Clock


@pytest.mark.parametrize(
    ("runs_s", "most_s"),
    [
        pytest.param([0, 0, 0, 0], [1, 2, 4, 4], id="each run fails at once"),
        pytest.param([0, 0, 59, 0], [1, 2, 4, 4], id="a run of less than a minute"),
        pytest.param([0, 0, 61, 0], [1, 2, 1, 2], id="a run of more than a minute"),
    ],
)
def test_pauses_grow_until_a_run_lasts(runs_s: list[float], most_s: list[float]) -> None:
    clock = Clock()
    backoff = RetryPauses(1.0, 4.0, forgets_after_s=60.0, clock=clock)
    for run_s, expected_s in zip(runs_s, most_s, strict=True):
        clock.move(run_s)
        pause_s = backoff.next_s()
        assert expected_s / 2 <= pause_s <= expected_s
        clock.move(pause_s)


def test_a_given_first_pause_comes_again_after_a_run() -> None:
    clock = Clock()
    backoff = RetryPauses(1.0, 4.0, forgets_after_s=60.0, clock=clock)
    assert backoff.next_s(first_s=0.0) == 0.0
    assert 0.5 <= backoff.next_s(first_s=0.0) <= 1.0
    clock.move(120)
    assert backoff.next_s(first_s=0.0) == 0.0


def test_each_iteration_begins_with_the_shortest_pause() -> None:
    backoff = RetryPauses(1.0, 4.0)
    for _ in range(2):
        for pause_s, expected_s in zip(itertools.islice(backoff, 4), [1, 2, 4, 4], strict=True):
            assert expected_s / 2 <= pause_s <= expected_s


async def test_a_call_is_tried_again_after_the_given_errors_alone() -> None:
    backoff, left = RetryPauses(0.001, 0.001), [NotFound("1"), NotFound("2"), Refused("3")]

    async def call(name: str) -> str:
        if left:
            raise left.pop(0)
        return name

    with pytest.raises(Refused, match="3"):
        await backoff.retried(call, "made", on=NotFound)
    assert await backoff.retried(call, "made", on=NotFound) == "made"


async def test_the_last_error_is_raised_when_the_time_for_tries_is_over() -> None:
    async def call() -> None:
        raise NotFound("still not there")

    with pytest.raises(NotFound, match="still"):
        await RetryPauses(0.001, 0.001).retried(call, on=NotFound, within_s=0.01)
