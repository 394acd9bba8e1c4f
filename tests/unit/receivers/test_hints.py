"""A hint is acted upon once, and not too often."""

from __future__ import annotations

import pytest

from gracepoint.receivers import Hints
from gracepoint.receivers.mailbox import LEAST_PAUSE_S, SAME_S
from gracepoint.wire.frames import Hint


class Clock:
    now_s = 1e6

    def __call__(self) -> float:
        return self.now_s


def hint(*names: str) -> Hint:
    return Hint(
        hints=list(names),
        pod_uid="pod-uid-0",
        session="session-0",
        workload_uid="jobset-uid",
        cause="Drain",
        signal="Node spec.unschedulable=true",
        nodes=["node-1"],
    )


def test_nothing_is_due_without_a_hint() -> None:
    assert not Hints(Clock()).due()


def test_a_hint_is_acted_upon_once_however_often_it_comes() -> None:
    clock = Clock()
    hints = Hints(clock)
    hints.take(hint("a"))
    assert [hints.due(), hints.due()] == [True, False]
    clock.now_s += 10 * LEAST_PAUSE_S
    hints.take(hint("a"))
    assert not hints.due()
    hints.take(hint("a", "b"))
    assert hints.due()


def test_sign_repeated_after_a_long_pause_is_acted_upon_again() -> None:
    clock = Clock()
    hints = Hints(clock)
    hints.take(hint("a"))
    assert hints.due()
    for _ in range(3):  # it stands all the time, and streams are lost
        clock.now_s += SAME_S - 1
        hints.take(hint("a"))
        assert not hints.due()
    clock.now_s += SAME_S
    hints.take(hint("a"))
    assert hints.due()


def test_consecutive_hints_are_one_and_a_pause_starts_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    hints = Hints(clock)
    hints.take(hint("a"))
    assert hints.due()
    clock.now_s += LEAST_PAUSE_S - 1
    hints.take(hint("b"))
    assert not hints.due()
    assert "prepares=False" in caplog.text
    clock.now_s += 1
    hints.take(hint("c"))
    assert hints.due()
