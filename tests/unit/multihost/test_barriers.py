"""Barriers, broadcast and gather: who passes, who is told what when somebody does not come."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable

import pytest

from gracepoint.errors import BarrierCancelled, BarrierFailed, BarrierReused, BarrierTimeout
from gracepoint.multihost import InMemoryStore, StoreProcessGroup, barriers
from gracepoint.multihost.store import StoreUnavailable
from gracepoint.process_group import SingleProcess
from tests.unit.multihost.fakes.gangs import gangs, together


def barrier(gang: StoreProcessGroup, key: str = "b", timeout_s: float = 20) -> functools.partial[None]:
    return functools.partial(gang.barrier, key, timeout_s=timeout_s)


def test_nobody_passes_before_all_have_arrived() -> None:
    passed: list[int] = []
    arrived_before_last: list[int] = []

    def on_last() -> None:
        arrived_before_last.extend(passed)

    def pass_barrier(gang: StoreProcessGroup) -> None:
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
    while store.try_get("b/.arrived/all/0/0") is None:
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


@pytest.mark.parametrize(
    ("wait", "awaited"),
    [
        pytest.param(lambda gang: gang.barrier("b", timeout_s=0), [0, 2], id="barrier"),
        pytest.param(lambda gang: gang.broadcast("b", None, timeout_s=0, source=2), [2], id="broadcast"),
    ],
)
def test_a_gang_says_for_whom_it_waits(wait: Callable[[StoreProcessGroup], object], awaited: list[int]) -> None:
    found = []

    class Asked(InMemoryStore):
        def get(self, key: str, *, timeout_s: float) -> str:
            found.append(gang.awaited())
            return super().get(key, timeout_s=timeout_s)

    gang = StoreProcessGroup(Asked(), 1, 3)
    with pytest.raises(BarrierTimeout):
        wait(gang)
    assert found[0] == awaited
    assert gang.awaited() == []


def test_late_process_learns_that_the_others_gave_up() -> None:
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


def test_on_last_error_reaches_all_and_is_raised_where_it_happened() -> None:
    def broken() -> None:
        raise OSError("no space")

    results = together(*(functools.partial(g.barrier, "b", timeout_s=20, on_last=broken) for g in gangs(3)))
    assert sorted(type(r).__name__ for r in results) == ["BarrierFailed", "BarrierFailed", "OSError"]


def test_a_key_is_good_for_one_barrier() -> None:
    (gang,) = gangs(1)
    gang.barrier("b", timeout_s=1)
    with pytest.raises(BarrierReused, match="'b' was used before"):
        gang.barrier("b", timeout_s=1)
    gang.broadcast("x", "word", timeout_s=1)
    with pytest.raises(BarrierReused, match="'x' was used before"):
        gang.broadcast("x", "word", timeout_s=1)


def test_barriers_of_different_keys_do_not_meet() -> None:
    first, second = gangs(2)
    results = together(barrier(first, "a"), barrier(second, "a"), barrier(first, "b"), barrier(second, "b"))
    assert results == [None] * 4


def test_arrivals_are_removed_when_the_barrier_is_complete() -> None:
    store = InMemoryStore()
    together(*(barrier(g) for g in gangs(3, store)))
    assert store.list("b/.arrived") == {}


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


def test_a_process_may_wait_again_for_a_broadcast_that_was_late() -> None:
    first, second = gangs(2)
    with pytest.raises(BarrierTimeout):
        second.broadcast("x", None, timeout_s=0.05)
    first.broadcast("x", "word", timeout_s=1)
    assert second.broadcast("x", None, timeout_s=1) == "word"
    with pytest.raises(BarrierReused, match="'x' was used before"):
        second.broadcast("x", None, timeout_s=1)


def test_a_process_may_wait_again_if_the_store_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryStore()
    first, second = gangs(2, store)
    first.broadcast("x", "word", timeout_s=1)

    def no_answer(key: str, *, timeout_s: float) -> str:
        raise StoreUnavailable("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(store, "get", no_answer)
        with pytest.raises(StoreUnavailable):
            second.broadcast("x", None, timeout_s=1)
    assert second.broadcast("x", None, timeout_s=1) == "word"


def test_process_0_must_give_the_value_of_a_broadcast() -> None:
    (gang,) = gangs(1)
    with pytest.raises(ValueError, match="process 0 must give the value"):
        gang.broadcast("x", None, timeout_s=1)


def test_a_broadcast_may_come_from_any_process() -> None:
    first, second = gangs(2)
    results = together(
        functools.partial(first.broadcast, "x", None, timeout_s=20, source=1),
        functools.partial(second.broadcast, "x", "from 1", timeout_s=20, source=1),
    )
    assert results == ["from 1", "from 1"]


def test_a_source_without_a_value_does_not_leave_the_others_waiting() -> None:
    first, second = gangs(2)
    with pytest.raises(ValueError, match="process 0 must give the value"):
        first.broadcast("x", None, timeout_s=20)
    with pytest.raises(BarrierFailed, match="process 0 reported ValueError"):
        second.broadcast("x", None, timeout_s=20)


def test_a_source_that_fails_releases_those_that_wait_for_its_broadcast() -> None:
    first, second = gangs(2)
    results = together(
        functools.partial(second.broadcast, "x", None, timeout_s=20),
        functools.partial(first.fail, "x", OSError("no listing")),
    )
    assert isinstance(results[0], BarrierFailed)
    assert "process 0 reported OSError: no listing" in str(results[0])


def test_some_processes_meet_without_the_others() -> None:
    _, one, _, three = gangs(4)
    some = {3, 1}
    assert together(
        functools.partial(one.barrier, "b", timeout_s=20, processes=some),
        functools.partial(three.barrier, "b", timeout_s=20, processes=some),
    ) == [None, None]
    assert (
        together(
            functools.partial(one.gather, "g", "v1", timeout_s=20, processes=some),
            functools.partial(three.gather, "g", "v3", timeout_s=20, processes=some),
        )
        == [["v1", "v3"]] * 2
    )
    assert (
        together(
            functools.partial(one.broadcast, "x", None, timeout_s=20, source=3, processes=some),
            functools.partial(three.broadcast, "x", "word", timeout_s=20, source=3, processes=some),
        )
        == ["word"] * 2
    )


def test_all_processes_by_name_are_all_processes() -> None:
    first, second = gangs(2)
    named_all = functools.partial(first.barrier, "b", timeout_s=20, processes=[0, 1])
    assert together(named_all, barrier(second)) == [None, None]


def test_a_timeout_of_some_names_who_of_them_is_missing() -> None:
    _, one, _, _ = gangs(4)
    with pytest.raises(BarrierTimeout, match="without process 3 of 2") as caught:
        one.barrier("b", timeout_s=0.05, processes={1, 3})
    assert caught.value.missing == (3,)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        pytest.param({0, 2}, "this process, 1, to be among", id="without itself"),
        pytest.param({1, 3}, "indices 0 to 2, found", id="beyond the gang"),
        pytest.param({-1, 1}, "indices 0 to 2, found", id="negative"),
        pytest.param([], "at least one", id="nobody"),
    ],
)
def test_processes_that_cannot_meet_are_refused(processes: list[int], words: str) -> None:
    _, one, _ = gangs(3)
    with pytest.raises(ValueError, match=words):
        one.barrier("b", timeout_s=20, processes=processes)
    with pytest.raises(ValueError, match=words):
        one.check_participants(processes)


def test_a_broadcast_needs_a_source_that_takes_part() -> None:
    _, one, _ = gangs(3)
    with pytest.raises(ValueError, match="expected a source among the processes taking part, found 0"):
        one.broadcast("x", None, timeout_s=20, source=0, processes={1, 2})


def test_processes_that_name_different_sets_do_not_pass_each_others_barrier() -> None:
    zero, one, two = gangs(3)
    some = functools.partial(zero.barrier, "b", timeout_s=20, processes={0, 1})
    others = functools.partial(one.barrier, "b", timeout_s=20, processes={0, 1})
    assert together(some, others) == [None, None]
    with pytest.raises(BarrierFailed, match="with other processes than those that this one names"):
        two.barrier("b", timeout_s=20)


def test_a_timeout_says_so_where_processes_name_different_sets() -> None:
    zero, one, two = gangs(3)
    results = together(
        functools.partial(zero.barrier, "b", timeout_s=0.3, processes={0, 1}),
        functools.partial(one.barrier, "b", timeout_s=20, processes={0, 1, 2}),
        functools.partial(two.barrier, "b", timeout_s=20, processes={1, 2}),
    )
    assert all(isinstance(r, BarrierTimeout) and "do not all name the same processes=" in str(r) for r in results)


def test_cancelling_ends_all_waits_and_names_the_missing() -> None:
    store = InMemoryStore()
    first, second, third = gangs(3, store)
    waiting = threading.Thread(target=together, args=(barrier(second),))
    waiting.start()
    while store.try_get("b/.arrived/all/0/0") is None:
        pass
    assert second.cancel("b", "an emergency supersedes it")
    waiting.join(20)
    assert not waiting.is_alive()
    for gang in (first, third):  # those that come later
        with pytest.raises(BarrierCancelled, match="process 1 gave it up: .* it, without processes 0, 2 of 3"):
            gang.barrier("b", timeout_s=20)


def test_what_is_decided_cannot_be_cancelled() -> None:
    first, second = gangs(2)
    assert together(barrier(first), barrier(second)) == [None, None]
    assert not first.cancel("b", "too late")
    assert second.cancel("c", "in time")
    assert not first.cancel("c", "second to do so")
    assert not SingleProcess().cancel("b", "nobody waits")


def test_messages_name_the_pods_where_they_are_known() -> None:
    gang = StoreProcessGroup(InMemoryStore(), 0, 3, names=["gpt-w-0-0", "gpt-w-0-1", None])
    with pytest.raises(
        BarrierTimeout, match=r"process 0 \(gpt-w-0-0\) gave up after 0.05 s, without processes 1 \(gpt-w-0-1\), 2 of 3"
    ):
        gang.barrier("b", timeout_s=0.05)


def test_every_barrier_leaves_its_key_in_a_log_line_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gracepoint")
    together(*(barrier(gang, "save/3/commit", timeout_s=20) for gang in gangs(2)))
    for process in (0, 1):
        assert f"process {process} is at barrier 'save/3/commit', of 2 processes, for 20 s at most" in caplog.text
        assert f"process {process} passed barrier 'save/3/commit' after" in caplog.text


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_a_process_that_is_not_one_of_the_gang_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"process_index: expected 0 to 2, found {index}"):
        StoreProcessGroup(InMemoryStore(), index, 3)


class _Counting:
    """Counts the requests of one process to a store that several share."""

    def __init__(self, shared: InMemoryStore) -> None:
        self._shared = shared
        self.requests: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.requests.append("set")
        self._shared.set(key, value)

    def get(self, key: str, *, timeout_s: float) -> str:
        self.requests.append("get")
        return self._shared.get(key, timeout_s=timeout_s)

    def try_get(self, key: str) -> str | None:
        return self._shared.try_get(key)

    def increment(self, key: str, by: int = 1) -> int:
        self.requests.append("increment")
        return self._shared.increment(key, by)

    def list(self, folder: str) -> dict[str, str]:
        self.requests.append("list")
        return self._shared.list(folder)

    def delete_folder(self, folder: str) -> None:
        self._shared.delete_folder(folder)


def test_reduce_is_computed_once_and_sent_to_all() -> None:
    computed: list[list[str]] = []

    def merge(values: list[str]) -> str:
        computed.append(values)
        return "+".join(values)

    members = gangs(3)
    results = together(*(functools.partial(g.reduce, "r", f"v{g.process_index}", merge, timeout_s=20) for g in members))
    assert results == ["v0+v1+v2"] * 3
    assert computed == [["v0", "v1", "v2"]]


def test_error_in_a_reduction_reaches_all_and_is_raised_where_it_happened() -> None:
    def broken(values: list[str]) -> str:
        raise OSError("no space")

    results = together(*(functools.partial(g.reduce, "r", "v", broken, timeout_s=20) for g in gangs(3)))
    assert sorted(type(r).__name__ for r in results) == ["BarrierFailed", "BarrierFailed", "OSError"]


@pytest.mark.parametrize("count", [511, 512, 513, 1100])
def test_values_of_many_processes_come_in_order(count: int) -> None:
    store, told = InMemoryStore(), [str(index % 7) for index in range(count)]
    for index in range(count - 1):
        with pytest.raises(BarrierTimeout):  # it cannot wait, as all take turns in one thread
            _Impatient(store, index, count).gather("g", told[index], timeout_s=20)
    assert StoreProcessGroup(store, count - 1, count).gather("g", told[-1], timeout_s=20) == told


class _Impatient(StoreProcessGroup):
    """Arrives, and does not wait."""

    def _wait(self, *arguments: object) -> dict[str, object]:
        return {"by": 0, "timeout_s": 0.0, "missing": [], "why": "told so"}


def test_equal_values_are_sent_once() -> None:
    store = InMemoryStore()
    members = gangs(4, store)
    values = ["same", "same", "same", "other"]
    results = together(
        *(functools.partial(g.gather, "g", v, timeout_s=20) for g, v in zip(members, values, strict=True))
    )
    assert results == [values] * 4
    assert json.loads(json.loads(store.try_get("g/released") or "")["result"]) == [["same", 3], ["other", 1]]


def test_a_process_that_waits_makes_two_requests_and_three_with_a_value() -> None:
    shared = InMemoryStore()
    stores = [_Counting(shared) for _ in range(3)]
    members = [StoreProcessGroup(store, index, 3) for index, store in enumerate(stores)]
    waiting = [threading.Thread(target=g.barrier, args=("b",), kwargs={"timeout_s": 20}) for g in members[:2]]
    for index, thread in enumerate(waiting):
        thread.start()
        while shared.try_get("b/.arrived/all/0/0") not in [str((1 << index + 1) - 1)]:
            pass
    members[2].barrier("b", timeout_s=20)
    for thread in waiting:
        thread.join(20)
    assert [store.requests for store in stores[:2]] == [["increment", "get"]] * 2
    assert stores[2].requests == ["increment", "set"]
    for store in stores:
        store.requests.clear()
    waiting = [threading.Thread(target=g.gather, args=("g", "v"), kwargs={"timeout_s": 20}) for g in members[:2]]
    for index, thread in enumerate(waiting):
        thread.start()
        while shared.try_get("g/.arrived/all/0/0") not in [str((1 << index + 1) - 1)]:
            pass
    members[2].gather("g", "v", timeout_s=20)
    for thread in waiting:
        thread.join(20)
    assert [store.requests for store in stores[:2]] == [["set", "increment", "get"]] * 2
    assert shared.list("g/.words") == {}


def test_one_process_says_for_all_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barriers, "after_s", lambda rank: 20.0 if rank else 0.0)  # however busy the machine is
    shared = InMemoryStore()
    stores = [_Counting(shared) for _ in range(3)]
    members = [StoreProcessGroup(store, index, 4) for index, store in enumerate(stores)]
    results = together(*(barrier(gang, timeout_s=0.05) for gang in members))
    assert all(isinstance(r, BarrierTimeout) and r.missing == (3,) for r in results)
    assert all("process 0 gave up" in str(r) for r in results)
    assert [store.requests.count("list") for store in stores[1:]] == [0, 0]


def test_others_say_who_is_missing_if_the_first_process_does_not() -> None:
    _, one, _ = gangs(3)
    with pytest.raises(BarrierTimeout, match="process 1 gave up after 0.05 s, without processes 0, 2 of 3"):
        one.barrier("b", timeout_s=0.05)


def test_retired_keys_are_removed_by_process_0_and_may_be_used_again() -> None:
    store = InMemoryStore()
    members = gangs(3, store)
    together(*(barrier(g, "save/1") for g in members))
    for gang in members[1:]:
        gang.retire("save/1")
    assert store.try_get("save/1/released") is not None
    members[0].retire("save/1")
    assert store.list("save") == {}
    assert together(*(barrier(g, "save/1") for g in members)) == [None] * 3


def test_the_last_process_to_leave_removes_the_keys() -> None:
    store = InMemoryStore()
    members = gangs(3, store)
    together(*(barrier(g, "plan/1") for g in members))
    for gang in members[:2]:
        gang.leave("plan")
    assert store.try_get("plan/1/released") is not None
    members[2].leave("plan")
    assert store.list("plan") == {}
    assert together(*(barrier(g, "plan/1") for g in members)) == [None] * 3


def test_a_wrong_call_to_leave_is_not_counted() -> None:
    store = InMemoryStore()
    first, second = gangs(2, store)
    with pytest.raises(ValueError, match="to be among those taking part"):
        first.leave("plan", processes={1})
    store.set("plan/1", "word")
    second.leave("plan")
    assert store.try_get("plan/1") == "word"
    first.leave("plan")
    assert store.list("plan") == {}


def test_keys_next_to_a_retired_folder_stay_used() -> None:
    (gang,) = gangs(1)
    for key in ("save/1", "save/10"):
        gang.barrier(key, timeout_s=1)
    gang.retire("save/1")
    with pytest.raises(BarrierReused):
        gang.barrier("save/10", timeout_s=1)


def test_what_the_first_process_decides_counts_for_all() -> None:
    first, second = gangs(2)
    assert [second.decide("d", "from 1"), first.decide("d", "from 0"), second.decide("d", "again")] == ["from 1"] * 3


def test_a_timeout_says_that_two_processes_name_different_sets() -> None:
    zero, one, _ = gangs(3)
    results = together(
        functools.partial(zero.barrier, "b", timeout_s=0.3, processes={0, 1}),
        functools.partial(one.barrier, "b", timeout_s=20),
    )
    assert all(isinstance(r, BarrierTimeout) and "do not all name the same processes=" in str(r) for r in results)


@pytest.mark.parametrize("below", ["word", "arrived", "words"])
def test_a_key_below_another_barriers_key_is_not_removed_with_it(below: str) -> None:
    one, other = gangs(2)
    other.broadcast(f"g/{below}", "stays", timeout_s=20, source=1)
    together(
        functools.partial(one.gather, "g", "a", timeout_s=20), functools.partial(other.gather, "g", "b", timeout_s=20)
    )
    assert one.broadcast(f"g/{below}", None, timeout_s=1, source=1) == "stays"


def test_one_process_looks_and_decides_for_all() -> None:
    store, looks, waits = InMemoryStore(), list[int](), threading.Event()
    found: dict[int, str] = {}

    def run(index: int) -> None:
        def find() -> str:
            looks.append(index)
            assert waits.wait(60)
            return f"found by {index}"

        found[index] = StoreProcessGroup(store, index, 4).decide_in_turn("d", find, timeout_s=60)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    waits.set()
    for thread in threads:
        thread.join(60)
    assert len(looks) == 1
    assert found == dict.fromkeys(range(4), f"found by {looks[0]}")


def test_the_next_process_looks_if_the_first_has_died() -> None:
    first, second, third = (StoreProcessGroup(store, index, 3) for store in [InMemoryStore()] for index in range(3))

    def dies() -> str:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        first.decide_in_turn("d", dies, timeout_s=60)
    assert second.decide_in_turn("d", lambda: "from 1", timeout_s=0.01) == "from 1"
    assert third.decide_in_turn("d", dies, timeout_s=60) == "from 1"


def test_all_processes_look_if_several_hang() -> None:
    store = InMemoryStore()
    for index in range(3):
        with pytest.raises(OSError, match="hangs"):
            StoreProcessGroup(store, index, 5).decide_in_turn(
                "d", lambda: (_ for _ in ()).throw(OSError("hangs")), timeout_s=0
            )
    assert StoreProcessGroup(store, 3, 5).decide_in_turn("d", lambda: "from 3", timeout_s=0.01) == "from 3"
