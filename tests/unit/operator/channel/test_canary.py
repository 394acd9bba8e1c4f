"""What a replica's own subscriber says before any notice, and to callers that are not it."""

from __future__ import annotations

import math

import pytest

from gracepoint_operator.channel.notifier import Subscribers
from gracepoint_operator.health import Canary
from gracepoint_operator.metrics import Metrics
from tests.unit.operator.fakes.replica import subscription


def test_it_was_silent_for_ever_before_its_first_notice() -> None:
    """A new replica whose certificate nobody trusts must not become ready, or a rollout would go on."""
    assert Canary(Metrics(), lambda: "").silent_s == math.inf


@pytest.mark.parametrize("authorization", ["", "Bearer x", "Bearer \udcff"], ids=["none", "another", "no UTF-8"])
def test_another_caller_is_not_admitted(authorization: str) -> None:
    assert not Canary(Metrics(), lambda: "").admits(authorization, Subscribers().add(subscription()))
