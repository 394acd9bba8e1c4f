"""The account of a server's memory is exact after any operations, and what can be seen is what a model says."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gracepoint.snapshots.exchange import Refusal
from gracepoint.snapshots.held_values import VALUE_BYTES, HeldValues, NotServed
from gracepoint.wire.snapshot_requests import Right
from tests.hypothesis_profiles import examples
from tests.unit.snapshots.fakes.servers import capability

CAPACITY, OF_WORKLOAD = 80 * VALUE_BYTES, 50 * VALUE_BYTES
KEYS = st.sampled_from([f"{step}/{attempt}/0/{path}" for step in (5, 10) for attempt in (1, 2) for path in "ab"])
WORKLOADS = st.sampled_from(["u1", "u2", "u3"])


def cost(size_bytes: int) -> int:
    return size_bytes + VALUE_BYTES


class Account(RuleBasedStateMachine):
    """Two attempts of three workloads write, read, replace and drop; some are left in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.held = HeldValues(CAPACITY, OF_WORKLOAD, "s", lambda: self.now_s)
        self.seen: dict[tuple[str, str], bytes] = {}
        self.newest = {"u1": 0, "u2": 0, "u3": 0}
        self.writing: list[tuple[AbstractContextManager[Any], Any, Any, str, str, bytes]] = []
        self.reading: list[tuple[AbstractContextManager[Any], Any, str, bytes, int]] = []

    def used(self, workload: str | None = None) -> int:
        values = [(owner, len(data)) for (owner, _), data in self.seen.items()]
        values += [(owner, len(data)) for *_, owner, _, data in self.writing]
        readers = {number: (owner, len(data)) for _, _, owner, data, number in self.reading}
        alive = {id(data) for data in self.seen.values()}
        values += [pair for number, pair in readers.items() if number not in alive]
        return sum(cost(size) for owner, size in values if workload in (None, owner))

    @rule(
        workload=WORKLOADS,
        key=KEYS,
        size=st.sampled_from([0, 1, VALUE_BYTES, 16 * VALUE_BYTES, 16 * VALUE_BYTES + 1]),
        if_absent=st.booleans(),
    )
    def begin(self, workload: str, key: str, size: int, if_absent: bool) -> None:
        attempt = int(key.split("/")[1])
        data = bytes([len(self.writing) + 1]) * size
        expected = None
        if attempt < self.newest[workload]:
            expected = Refusal.SUPERSEDED
        elif if_absent and (workload, key) in self.seen:
            expected = Refusal.EXISTS
        elif self.used(workload) + cost(size) > OF_WORKLOAD or self.used() + cost(size) > CAPACITY:
            expected = Refusal.FULL
        self.newest[workload] = max(self.newest[workload], attempt)
        write = self.held.writing(capability(workload, attempt=attempt), key, size, if_absent=if_absent)
        if expected is not None:
            with pytest.raises(NotServed) as error, write:
                pass
            assert error.value.refusal is expected
            return
        value, complete = write.__enter__()
        value.memory[:] = data
        self.writing.append((write, complete, if_absent, workload, key, data))

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 99), completes=st.booleans())
    def end(self, which: int, completes: bool) -> None:
        write, complete, if_absent, workload, key, data = self.writing.pop(which % len(self.writing))
        if completes:
            is_allowed = int(key.split("/")[1]) >= self.newest[workload]
            is_allowed = is_allowed and not (if_absent and (workload, key) in self.seen)
            if is_allowed:
                assert complete(7).bytes == len(data)
                self.seen[workload, key] = bytes(bytearray(data))  # an object of its own
            else:
                with pytest.raises(NotServed):
                    complete(7)
        write.__exit__(None, None, None)

    @rule(workload=WORKLOADS, key=KEYS)
    def open(self, workload: str, key: str) -> None:
        read = self.held.reading(capability(workload, attempt=2), key, "")
        data = self.seen.get((workload, key))
        if data is None:
            with pytest.raises(NotServed), read:
                pass
            return
        value = read.__enter__()
        self.reading.append((read, value, workload, data, id(data)))

    @precondition(lambda self: self.reading)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        read, value, _, data, _ = self.reading.pop(which % len(self.reading))
        assert bytes(value.memory) == data  # also if it was dropped or replaced meanwhile
        read.__exit__(None, None, None)

    @rule(workload=WORKLOADS, under=st.sampled_from(["", "5", "5/1", "10/2/0", "5/1/0/a", "1"]))
    def drop(self, workload: str, under: str) -> None:
        doomed = [
            (owner, key)
            for owner, key in self.seen
            if owner == workload and (not under or key == under or key.startswith(f"{under}/"))
        ]
        assert self.held.drop(capability(workload, attempt=2), under=under).values == len(doomed)
        for each in doomed:
            del self.seen[each]

    @rule(workload=WORKLOADS)
    def drop_before(self, workload: str) -> None:
        doomed = [(owner, key) for owner, key in self.seen if owner == workload and int(key.split("/")[0]) < 10]
        assert self.held.drop(capability(workload, attempt=2), before_step=10).values == len(doomed)
        for each in doomed:
            del self.seen[each]

    @invariant()
    def the_account_is_exact(self) -> None:
        figures = self.held.figures()
        assert (figures["used_bytes"], figures["values"]) == (self.used(), len(self.seen))
        assert self.used() + int(str(figures["spare_bytes"])) <= CAPACITY

    @invariant()
    def each_workload_sees_its_own_values(self) -> None:
        for workload in self.newest:
            entries = self.held.entries(capability(workload, attempt=2), "", "")
            expected = sorted((key, len(data)) for (owner, key), data in self.seen.items() if owner == workload)
            assert [(entry.key, entry.bytes) for entry in entries] == expected

    def teardown(self) -> None:
        for write, *_ in self.writing:
            write.__exit__(None, None, None)
        for read, *_ in self.reading:
            read.__exit__(None, None, None)
        self.writing, self.reading = [], []
        self.the_account_is_exact()


def test_the_account_of_the_memory_is_exact_after_any_operations() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Account, settings=settings(max_examples=examples(100), stateful_step_count=30))


def put(held: HeldValues, key: str, data: bytes = b"data", **changes: Any) -> None:
    with held.writing(capability(**changes), key, len(data), if_absent=False) as (value, complete):
        value.memory[:] = data
        complete(0)


def test_values_go_when_their_workload_has_written_nothing_for_long_enough() -> None:
    now_s = 0.0
    held = HeldValues(1 << 20, 1 << 20, "s", lambda: now_s)
    put(held, "1/1/0/a", workload="old")
    now_s = 50.0
    put(held, "1/1/0/a", workload="new")
    now_s = 100.0
    assert held.drop_aged(100.0).values == 1
    assert list(held.figures()["workloads"]) == ["new"]  # type: ignore[call-overload]
    assert held.figures()["used_bytes"] == cost(4)


def test_a_value_whose_workload_is_dropped_by_its_age_while_it_is_written_is_not_lost() -> None:
    now_s = 0.0
    held = HeldValues(1 << 20, 1 << 20, "s", lambda: now_s)
    with held.writing(capability(), "1/1/0/a", 4, if_absent=False) as (value, complete):
        now_s = 100.0
        held.drop_aged(100.0)
        value.memory[:] = b"data"
        complete(0)
    assert [entry.key for entry in held.entries(capability(), "", "")] == ["1/1/0/a"]


def test_a_long_list_comes_in_pages() -> None:
    held = HeldValues(1 << 30, 1 << 30, "s", lambda: 0.0)
    keys = sorted(f"7/1/0/{number}" for number in range(300))
    for key in keys:
        put(held, key, b"")
    first = held.entries(capability(), "7", "")
    rest = held.entries(capability(), "7", first[-1].key)
    assert [entry.key for entry in [*first, *rest]] == keys
    assert held.entries(capability(), "7", rest[-1].key) == []


@pytest.mark.parametrize("right", [Right.WRITE, Right.READ, Right.DROP])
def test_nothing_is_done_without_its_right(right: Right) -> None:
    held = HeldValues(1 << 20, 1 << 20, "s", lambda: 0.0)
    put(held, "1/1/0/a")
    without = capability(rights=frozenset(Right) - {right})

    def act() -> None:
        if right is Right.WRITE:
            with held.writing(without, "1/1/0/b", 1, if_absent=False):
                pass
        elif right is Right.READ:
            with held.reading(without, "1/1/0/a", ""):
                pass
        else:
            held.drop(without, under="")

    with pytest.raises(NotServed) as error:
        act()
    assert error.value.refusal is Refusal.NOT_ADMITTED
    assert held.figures()["values"] == 1
    if right is Right.READ:
        with pytest.raises(NotServed):
            held.entries(without, "", "")


def test_the_same_uid_in_another_namespace_is_another_workload_that_gets_nothing() -> None:
    held = HeldValues(1 << 20, 1 << 20, "s", lambda: 0.0)
    put(held, "1/1/0/a")
    other = capability(namespace="other")
    assert held.entries(other, "", "") == []
    for act in (
        lambda: put(held, "1/1/0/a", namespace="other"),
        lambda: held.drop(other, under=""),
        lambda: contextlib.ExitStack().enter_context(held.reading(other, "1/1/0/a", "")),
    ):
        with pytest.raises(NotServed):
            act()
    assert held.figures()["values"] == 1


def test_free_memory_is_used_again_for_values_of_its_size_and_given_back_after_a_minute() -> None:
    now_s = 0.0
    held = HeldValues(1 << 20, 1 << 20, "s", lambda: now_s)
    put(held, "1/1/0/a", b"a" * 300_000)
    held.drop(capability(), under="")
    assert held.figures()["spare_bytes"] == 303_104  # whole pages
    put(held, "2/1/0/a", b"b" * 300_000)
    assert held.figures()["spare_bytes"] == 0
    with held.reading(capability(), "2/1/0/a", "") as value:
        assert bytes(value.memory) == b"b" * 300_000
    held.drop(capability(), under="")
    put(held, "3/1/0/a", b"c" * 1_000_000)  # has no room beside it
    assert (held.figures()["spare_bytes"], held.figures()["used_bytes"]) == (0, cost(1_000_000))
    held.drop(capability(), under="")
    now_s = 59.0
    held.give_up_spare()
    assert held.figures()["spare_bytes"] != 0
    now_s = 60.0
    held.give_up_spare()
    assert (held.figures()["spare_bytes"], held.figures()["used_bytes"]) == (0, 0)
