"""The clock of an object store, as its replies tell it."""

from __future__ import annotations

import email.utils
import time

import pytest

from gracepoint.checkpoint.storage.objects.provider import StoreClock


def date(ahead_s: float) -> str:
    """Returns the header of a store whose clock is so far ahead of this machine's."""
    return email.utils.formatdate(time.time() + ahead_s, usegmt=True)


def test_a_clock_that_is_ahead_is_known_to_a_second() -> None:
    clock = StoreClock()
    assert not clock.is_known
    clock.observe(date(100), time.monotonic())
    assert clock.is_known
    assert 98 < clock.now_s() - time.time() < 102


def test_a_machine_that_agrees_with_the_store_uses_its_own_clock() -> None:
    clock = StoreClock()
    clock.observe(date(0), time.monotonic())
    assert abs(clock.now_s() - time.time()) < 1e-2


def test_the_clock_does_not_go_back_when_a_reply_corrects_it() -> None:
    """Else a save would count as older than the one before it, and give way to it. Some servers tell an old time."""
    clock = StoreClock()
    clock.observe(date(0), time.monotonic())
    first_s = clock.now_s()
    clock.observe(date(-3), time.monotonic())
    assert clock.now_s() > first_s


def test_no_two_answers_are_equal() -> None:
    clock = StoreClock()
    clock.observe(date(0), time.monotonic())
    answers = [clock.now_s() for _ in range(1000)]
    clock.observe(date(-3), time.monotonic())
    answers += [clock.now_s() for _ in range(1000)]
    assert sorted({int(each * 1e9) for each in answers}) == [int(each * 1e9) for each in answers]


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_the_clock_stays_right_while_that_of_the_machine_is_set_wrong(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    clock, right_s = StoreClock(), time.time
    clock.observe(date(0), time.monotonic())
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time", lambda: right_s() + ahead_s)
        assert abs(clock.now_s() - right_s()) < 2
    assert abs(clock.now_s() - right_s()) < 2
