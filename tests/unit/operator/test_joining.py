"""What two replicas know of one epoch becomes the same in both, in whatever order they hear of one another."""

from __future__ import annotations

import dataclasses
import datetime
import itertools

import pytest

from gracepoint_operator.model.preemption import PreemptionRecord
from tests.unit.operator import objects
from tests.unit.operator.objects import NOW


def version(moves: int, deadline_at: float, *, attempted_at: float | None = None) -> PreemptionRecord:
    epoch = PreemptionRecord.of(objects.preemption(deadline_at=deadline_at))
    attempted = None if attempted_at is None else datetime.datetime.fromtimestamp(attempted_at, datetime.UTC)
    change = {"moves": moves, "signal": f"move {moves} to {deadline_at}", "eviction_attempted_at": attempted}
    return dataclasses.replace(epoch, spec=epoch.spec.model_copy(update=change))


def all_orders(*versions: PreemptionRecord) -> list[PreemptionRecord]:
    def joined(order: tuple[PreemptionRecord, ...]) -> PreemptionRecord:
        first, *others = order
        for other in others:
            first = first.joined(other)
        return first

    return [joined(order) for order in itertools.permutations(versions)]


@pytest.mark.parametrize(
    ("versions", "deadline_at"),
    [
        pytest.param((version(0, NOW + 15), version(1, NOW + 900)), NOW + 900, id="put off"),
        pytest.param((version(2, NOW + 900), version(1, NOW + 15)), NOW + 900, id="moved earlier, then put off"),
        pytest.param((version(1, NOW + 900), version(1, NOW + 15)), NOW + 15, id="moved by both at once"),
        pytest.param((version(0, NOW + 3), version(1, NOW + 9), version(2, NOW + 6)), NOW + 6, id="three versions"),
    ],
)
def test_the_version_that_was_moved_more_often_counts_then_the_earlier_deadline(
    versions: tuple[PreemptionRecord, ...], deadline_at: float
) -> None:
    for epoch in all_orders(*versions):
        assert epoch.spec.deadline.timestamp() == deadline_at
        assert epoch.spec.signal.endswith(str(deadline_at))


def test_the_first_attempt_to_evict_is_kept_whichever_version_counts() -> None:
    for epoch in all_orders(version(1, NOW + 60, attempted_at=NOW + 2), version(2, NOW + 50), version(0, NOW + 70)):
        assert epoch.spec.eviction_attempted_at is not None
        assert epoch.spec.eviction_attempted_at.timestamp() == NOW + 2
