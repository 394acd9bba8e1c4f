"""Barriers, broadcast and gather: who passes, who is told what when somebody does not come."""

from __future__ import annotations

import functools
import json
import threading

import pytest

from gracepoint.errors import BarrierFailed, BarrierReused, BarrierTimeout
from gracepoint.multihost import InMemoryStore, StoreGang
from tests.unit.multihost.gangs import gangs, together


def barrier(gang: StoreGang, key: str = "b", timeout_s: float = 20) -> functools.partial[None]:
    return functools.partial(gang.barrier, key, timeout_s=timeout_s)


def test_nobody_passes_before_all_have_arrived() -> None:
    passed: list[int] = []
    arrived_before_last: list[int] = []

    def on_last() -> None:
        arrived_before_last.extend(passed)

    def pass_barrier(gang: StoreGang) -> None:
        gang.barrier("b", timeout_s=20, on_last=on_last)
        passed.append(gang.process_index)

    together(*(functools.partial(pass_barrier, g) for g in gangs(4)))
    assert sorted(passed) == [0, 1, 2, 3]
    assert arrived_before_last == []


def test_on_last_runs_once_in_the_process_that_arrives_last() -> None:
    store = InMemoryStore()
    first, last = gangs(2, store)
    ran: list[str] = []
    waiting = threading.Thread(target=lambda: first.barrier("b", timeout_s=20, on_last=lambda: ran.append("first")))
    waiting.start()
    while store.try_get("b/count") != "1":
        pass
    last.barrier("b", timeout_s=20, on_last=lambda: ran.append("last"))
    waiting.join(20)
    assert ran == ["last"]


def test_a_timeout_names_who_is_missing_for_everybody() -> None:
    first, second, _, _ = gangs(4)
    results = together(barrier(first, timeout_s=0.2), barrier(second, timeout_s=20))
    for result in results:  # also the patient one: who gave up will not be there any more
        assert isinstance(result, BarrierTimeout)
        assert result.missing == (2, 3)
        assert "process 0 gave up after 0.2 s, without processes 2, 3 of 4" in str(result)


def test_who_comes_too_late_learns_that_the_others_gave_up_and_completes_nothing() -> None:
    early, late = gangs(2)
    ran: list[str] = []
    assert isinstance(together(barrier(early, timeout_s=0.05))[0], BarrierTimeout)
    with pytest.raises(BarrierTimeout, match="process 0 gave up"):
        late.barrier("b", timeout_s=20, on_last=lambda: ran.append("late"))
    assert ran == []


def test_a_process_that_fails_releases_those_that_wait_with_its_error() -> None:
    first, second, third = gangs(3)
    fail = functools.partial(third.fail, "b", ValueError("disk full"))
    results = together(barrier(first), barrier(second), fail)
    for result in results[:2]:
        assert isinstance(result, BarrierFailed)
        assert "process 2 reported ValueError: disk full" in str(result)


def test_an_error_of_on_last_reaches_all_and_is_raised_where_it_happened() -> None:
    def broken() -> None:
        raise OSError("no space")

    results = together(*(functools.partial(g.barrier, "b", timeout_s=20, on_last=broken) for g in gangs(3)))
    assert sorted(type(r).__name__ for r in results) == ["BarrierFailed", "BarrierFailed", "OSError"]


def test_a_key_is_good_for_one_barrier() -> None:
    (gang,) = gangs(1)
    gang.barrier("b", timeout_s=1)
    with pytest.raises(BarrierReused, match="'b' was used before"):
        gang.barrier("b", timeout_s=1)


def test_barriers_of_different_keys_do_not_meet() -> None:
    first, second = gangs(2)
    results = together(barrier(first, "a"), barrier(second, "a"), barrier(first, "b"), barrier(second, "b"))
    assert results == [None] * 4


def test_arrivals_are_removed_when_the_barrier_is_complete() -> None:
    store = InMemoryStore()
    together(*(barrier(g) for g in gangs(3, store)))
    assert store.list("b/arrived") == {}


def test_gather_returns_the_values_by_process_index() -> None:
    results = together(*(functools.partial(g.gather, "g", f"v{g.process_index}", timeout_s=20) for g in gangs(3)))
    assert results == [["v0", "v1", "v2"]] * 3


def test_a_gather_that_lacks_one_names_it() -> None:
    first, _ = gangs(2)
    with pytest.raises(BarrierTimeout, match="without process 1 of 2"):
        first.gather("g", "x", timeout_s=0.05)


def test_broadcast_hands_process_0s_value_to_all() -> None:
    first, second = gangs(2)
    value = json.dumps({"a": 1})
    results = together(
        functools.partial(second.broadcast, "x", None, timeout_s=20),
        functools.partial(first.broadcast, "x", value, timeout_s=20),
    )
    assert results == [value, value]


def test_a_broadcast_that_nobody_makes_times_out_naming_process_0() -> None:
    _, second = gangs(2)
    with pytest.raises(BarrierTimeout, match="process 0 published nothing within 0.05 s"):
        second.broadcast("x", None, timeout_s=0.05)


def test_process_0_must_give_the_value_of_a_broadcast() -> None:
    (gang,) = gangs(1)
    with pytest.raises(ValueError, match="process 0 must give the value"):
        gang.broadcast("x", None, timeout_s=1)
