"""The pauses between two runs of kopf, and between two logins."""

from __future__ import annotations

import pytest

from gracepoint_operator.kube.client import RetryPauses
from gracepoint_operator.watches.event_handlers import Pauses
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
    pauses = Pauses(RetryPauses(1.0, 4.0), clock)
    for run_s, expected_s in zip(runs_s, most_s, strict=True):
        clock.move(run_s)
        pause_s = pauses.next_s()
        assert expected_s / 2 <= pause_s <= expected_s
        clock.move(pause_s)


def test_a_given_first_pause_comes_again_after_a_run() -> None:
    clock = Clock()
    pauses = Pauses(RetryPauses(1.0, 4.0), clock)
    assert pauses.next_s(first_s=0.0) == 0.0
    assert 0.5 <= pauses.next_s(first_s=0.0) <= 1.0
    clock.move(120)
    assert pauses.next_s(first_s=0.0) == 0.0
