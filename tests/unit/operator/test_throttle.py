"""Signals that are not sure do not make every gang leave at once."""

from __future__ import annotations

from gracepoint_operator.epochs import Epoch
from gracepoint_operator.resources import PreemptionSpec
from gracepoint_operator.throttle import WINDOW_S, holds_back
from tests.unit.operator import objects
from tests.unit.operator.objects import NOW


def told(confidence: str = "likely", *, ago_s: float = 0.0, mode: str = "Enforce") -> Epoch:
    body = objects.preemption(created_at=NOW - ago_s, mode=mode)
    body["spec"]["confidence"] = confidence
    return Epoch.of(body)


def held(epochs: list[Epoch], spec: PreemptionSpec | None = None) -> bool:
    return holds_back(spec or told().spec, epochs, NOW, 2)


def test_as_many_gangs_as_allowed_are_told_at_once() -> None:
    assert [held([told()] * count) for count in (0, 1, 2, 3)] == [False, False, True, True]


def test_a_minute_later_the_next_are_told() -> None:
    assert held([told(ago_s=WINDOW_S - 1)] * 2)
    assert not held([told(ago_s=WINDOW_S)] * 2)


def test_what_is_sure_neither_waits_nor_counts() -> None:
    assert not held([told()] * 5, told("sure").spec)
    assert not held([told("sure")] * 5)


def test_what_is_only_observed_neither_waits_nor_counts() -> None:
    assert not held([told()] * 5, told(mode="Observe").spec)
    assert not held([told(mode="Observe")] * 5)
