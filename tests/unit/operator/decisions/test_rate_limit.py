"""Signals that are not sure do not make every gang leave at once."""

from __future__ import annotations

import dataclasses
import functools

from hypothesis import given
from hypothesis import strategies as st

from gracepoint_operator.decisions.decide import holds_back
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.resources import PreemptionSpec
from tests.unit.operator.fakes import objects


@functools.cache
def told(gang: int = 0, confidence: str = "likely", *, mode: str = "Enforce", made: bool = True) -> PreemptionRecord:
    body = objects.preemption(mode=mode)
    body["metadata"]["name"] += f"-of-{gang}"
    body["spec"] |= {"confidence": confidence, "jobSet": {"name": "train", "uid": f"uid-{gang}"}}
    preemption = PreemptionRecord.of(body)
    return preemption if made else dataclasses.replace(preemption, created_at=None)


def held(preemptions: list[PreemptionRecord], spec: PreemptionSpec | None = None) -> bool:
    return holds_back(spec or told(99).spec, preemptions, created_here=(), limit=2, replicas=1)


def test_as_many_gangs_as_allowed_are_notified_at_once() -> None:
    assert [held([told(gang) for gang in range(count)]) for count in (0, 1, 2, 3)] == [False, False, True, True]


def test_a_gang_that_was_notified_twice_counts_once() -> None:
    assert not held([told(0), told(0)])


def test_what_is_sure_neither_waits_nor_counts() -> None:
    assert not held([told(gang) for gang in range(5)], told(99, "sure").spec)
    assert not held([told(gang, "sure") for gang in range(5)])


def test_what_is_only_observed_neither_waits_nor_counts() -> None:
    assert not held([told(gang) for gang in range(5)], told(99, mode="Observe").spec)
    assert not held([told(gang, mode="Observe") for gang in range(5)])


def test_replica_keeps_to_its_share_and_counts_that_of_others() -> None:
    began = [told(gang, made=False) for gang in range(2)]
    assert holds_back(told(99).spec, began, created_here=(), limit=4, replicas=2), (
        "two are on their way, a half of the limit"
    )
    made = [told(gang) for gang in range(2)]
    assert holds_back(told(99).spec, made, created_here={preemption.key for preemption in made}, limit=4, replicas=2)
    assert not holds_back(told(99).spec, made, created_here=(), limit=4, replicas=2), "the twin was first with both"


@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.booleans()), max_size=120),
)
def test_replicas_share_the_limit_of_gangs_notified(
    limit: int, replicas: int, turns: list[tuple[int, int, bool]]
) -> None:
    """Each in any order, each seeing the others' records any time late; in the end, all see everything."""
    makers: dict[int, int] = {}  # which replica made the record about a gang
    begun: list[set[int]] = [set() for _ in range(replicas)]
    seen: list[set[int]] = [set() for _ in range(replicas)]
    share = max(1, limit // replicas)
    at_last = [(me, 31 + me * share + number, True) for me in range(replicas) for number in range(share)]
    for replica, gang, looks in turns + [(me, 0, True) for me in range(replicas)] + at_last:
        me = replica % replicas
        if looks:  # what it began is written, and its watch brings everything that there is
            for mine in begun[me]:
                makers.setdefault(mine, me)
            begun[me], seen[me] = set(), set(makers)
        known = [told(other) for other in seen[me]] + [told(other, made=False) for other in begun[me]]
        own = {told(other).key for other, maker in makers.items() if maker == me}
        if gang not in seen[me] | begun[me] and not holds_back(told(gang).spec, known, own, limit, replicas):
            begun[me].add(gang)
    gangs = set(makers).union(*begun)
    assert min(limit, replicas * share) <= len(gangs) <= max(limit, replicas)
