"""The agreement's protocol under whatever can happen to a gang, in any order that hypothesis thinks of.

A state machine drives the real protocol code (``model``): threads are cut at every place that matters, hosts run
ahead of each other, notices come to several processes at once, move and are taken back, drills are rehearsed,
processes finish, break off and die. It must also find fault with protocols that are wrong in one thing: else it proves
nothing.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from gracepoint.multihost import InMemoryStore
from gracepoint.multihost.barriers import Arrivals
from gracepoint.multihost.bell import Bell
from gracepoint.multihost.ledger import Agreed, Ended, Entry, Epoch, Failed, Finished, NoticeEntry, StartEntry
from gracepoint.multihost.protocol import Member, Seat, Verdict, join_marks
from gracepoint.multihost.store import KeyExists
from tests.unit.multihost.fakes.model import THREADS, SmallMember, Violation, World

MOST = 4
processes = st.integers(0, MOST - 1)
#: Most notices are drills: a gang that was preempted in earnest sees no second epoch.
drills = st.sampled_from([True] * 5 + [False])
remaining = st.sampled_from([0.5, 3.0, 10.0, 30.0])


class Gang(RuleBasedStateMachine):
    """Events come in between runs of random moves, in which some threads are much slower than others."""

    member: type[Member] = SmallMember

    def __init__(self) -> None:
        super().__init__()
        self.world = World(1)
        self.told: list[str] = []

    @initialize(count=st.integers(1, MOST), odd=st.sampled_from([None, None, 0, 1]), asking=st.sets(processes))
    def begin(self, count: int, odd: int | None, asking: set[int]) -> None:
        self.world = World(count, self.member)
        if odd is not None:  # this process counts its steps differently
            self.world.ahead_by[odd % count] += 1
        self.world.asking = {index for index in asking if index < count} if len(asking) < 2 else set()

    @rule(
        random=st.randoms(use_true_random=False),
        speeds=st.lists(st.sampled_from([1, 10, 100]), min_size=3 * MOST, max_size=3 * MOST),
        moves=st.integers(1, 80),
    )
    def run(self, random: Random, speeds: list[int], moves: int) -> None:
        threads = list(itertools.product(range(self.world.count), THREADS))
        for index, thread in random.choices(threads, speeds[: len(threads)], k=moves):
            self.world.move(index, thread)

    @rule(told=st.lists(processes, min_size=1, max_size=3), remaining_s=remaining, drill=drills)
    def tell(self, told: list[int], remaining_s: float, drill: bool) -> None:
        origin = f"notice {len(self.told)}"
        self.told.append(origin)
        for index in told:  # several are told of the same at once
            self.world.tell(index % self.world.count, origin, remaining_s, drill=drill)

    @precondition(lambda self: self.told)
    @rule(index=processes, which=st.integers(0, 1), remaining_s=remaining)
    def move_the_deadline(self, index: int, which: int, remaining_s: float) -> None:
        self.world.tell(index % self.world.count, self.told[-1 - which % len(self.told)], remaining_s, drill=True)

    @precondition(lambda self: self.told)
    @rule(index=processes, which=st.integers(0, 1))
    def take_back(self, index: int, which: int) -> None:
        self.world.take_back(index % self.world.count, self.told[-1 - which % len(self.told)])

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.0, 40.0]))  # the last is beyond every deadline
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(
        index=processes,
        how=st.sampled_from(["breaks off", "stops", "stops", "dies", "training ends"] + ["nothing"] * 12),
    )
    def end(self, index: int, how: str) -> None:
        match how:
            case "breaks off":
                self.world.break_off(index % self.world.count)
            case "stops":
                self.world.stop(index % self.world.count)
            case "dies":
                self.world.die(index % self.world.count)
            case "training ends":
                self.world.end_training()

    def teardown(self) -> None:
        self.world.end_training()
        self.world.run_to_the_end()


_COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "stateful_step_count": 50,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.long
def test_no_schedule_breaks_the_agreement() -> None:
    ends: collections.Counter[str] = collections.Counter()

    class Counted(Gang):
        def teardown(self) -> None:
            super().teardown()
            ends.update({p.phase for p in self.world.processes})
            ends.update(type(event).__name__ for p in self.world.processes[:1] for event in p.events)

    run_state_machine_as_test(Counted, settings=settings(max_examples=60, **_COMMON))
    # What the search came across; where one is missing it searches the wrong places.
    outcomes = {"saved", "unsaved", "finished", "gone", "dead"}
    assert outcomes | {"Noticed", "Retracted", "Opened", "Settled", "Closed", "Broken", "Moot"} <= ends.keys(), ends


def test_processes_save_together_or_not_at_all_where_some_broke_off() -> None:
    ends: collections.Counter[str] = collections.Counter()
    for seed in range(400):
        random = Random(seed)
        world = World(random.randint(1, 3))
        threads = list(itertools.product(range(world.count), THREADS))

        def run(most: int, world: World = world, random: Random = random, threads: list[Any] = threads) -> None:
            for index, thread in random.choices(threads, k=random.randint(0, most)):
                world.move(index, thread)

        run(30)
        world.tell(0, "in earnest", random.choice([0.5, 5.0]), drill=False)
        for index in random.sample(range(world.count), random.randint(1, world.count)):
            run(20)
            world.stop(index)
        run(10)
        world.end_training()
        world.run_to_the_end()
        ends["+".join(sorted({p.phase for p in world.processes}))] += 1
        ends["where one broke off"] += any(p.phase == "saved" and p.member.seat.stopped for p in world.processes)
    assert ends["saved"] > 100, ends
    assert ends["where one broke off"] > 50, ends
    assert ends["unsaved"] > 10, ends


# Protocols that are wrong in one thing.


class SeatWithoutFreeze(Seat):
    __slots__ = ()

    def verdict(self) -> Verdict:
        return Verdict.GO_ON if self.agreed is None and not self.finished else super().verdict()


class WithoutFreeze(SmallMember):
    """Goes on while the agreed point is not known, as if nothing was wrong."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seat = SeatWithoutFreeze()


class WithoutPlusOne(SmallMember):
    """Saves at the point that the furthest process has passed."""

    @staticmethod
    def point(latest: int) -> int:
        return latest


class KeyReused(SmallMember):
    """Publishes in every epoch where it did in the one before."""

    def folder(self, epoch: int) -> str:
        return "epoch"


class WithoutMarks(SmallMember):
    """Does not say how far it is ahead."""

    frozen = Arrivals(3, 2, lambda marks: join_marks(mark & 1 | 0b010 for mark in marks))


class WithoutAsking(SmallMember):
    """Does not tell the others who asks for a meeting."""

    frozen = Arrivals(3, 2, lambda marks: join_marks(mark & ~1 for mark in marks))


class WithoutSteps(SmallMember):
    """Does not compare how steps are counted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        position = self._position
        self._position = lambda: (self.seat.ordinal, position()[1])


class WithoutTheFurthest(SmallMember):
    """Reads only what the marks say, though a process is further ahead than a mark can say."""

    def _agree(self, epoch: Epoch, mark: int) -> None:
        super()._agree(epoch, min(mark, self.frozen.most - 2))


class DecidesBeforeAll(SmallMember):
    """Takes its own group of processes for all of them."""

    def _publish(self, epoch: Epoch, *where: Any) -> Iterator[None]:
        yield from super()._publish(epoch, *where)
        marks = self.frozen.marks(self._store.list(f"{self.folder(epoch.number)}/frozen"), self._process_count)
        self._agree(epoch, self.frozen.join(marks))


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong",
    [
        WithoutFreeze,
        WithoutPlusOne,
        KeyReused,
        WithoutMarks,
        WithoutAsking,
        WithoutSteps,
        WithoutTheFurthest,
        DecidesBeforeAll,
    ],
)
def test_machine_finds_a_protocol_with_one_fault(wrong: type[Member]) -> None:
    machine = type("WrongGang", (Gang,), {"member": wrong})
    found = settings(max_examples=400, phases=[Phase.generate], report_multiple_bugs=False, **_COMMON)
    with pytest.raises((Violation, RuntimeError, ValueError, KeyExists)):
        run_state_machine_as_test(machine, settings=found)


# When an epoch is started.


def heard(*entries: Entry, count: int = 1) -> tuple[Member, Bell]:
    """Process 0 of a gang that has heard these, and its bell, of which it has read everything."""
    (member, bell), *_ = gang(count)
    hear_all(member, bell, *entries)
    return member, bell


def gang(count: int) -> list[tuple[Member, Bell]]:
    """The members of a gang, each with its bell. Their steps are their ordinals."""
    store = InMemoryStore()
    members: list[Member] = []
    bells = [Bell(store) for _ in range(count)]
    for index, bell in enumerate(bells):

        def position(index: int = index) -> tuple[int, bool]:
            return members[index].seat.ordinal, False

        members.append(Member(store, bell, index, count, lambda event: None, position))
    return list(zip(members, bells, strict=True))


def unread(bell: Bell) -> list[Entry]:
    """Reads the rest of the bell."""
    return [entry for _, entry in iter(bell.try_next, None)]


def hear_all(member: Member, bell: Bell, *entries: Entry, steps: int | None = None) -> None:
    """Writes entries, and has the member hear each with what follows from it: so many steps of it, or all."""
    for entry in entries:
        bell.ring(entry)
        _hear(member, bell, steps)
    _hear(member, bell, steps)


def _hear(member: Member, bell: Bell, steps: int | None) -> None:
    while (found := bell.try_next()) is not None:
        for _ in itertools.islice(member.hear(*found), steps):
            pass


NOTICE = NoticeEntry(0, "spot", 30.0, "about spot", drill=False, once=True)
DRILL = NoticeEntry(0, "rehearsal", 30.0, "about a rehearsal", drill=True, once=True)
START = StartEntry(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("entries", "start_in_s", "starts"),
    [
        pytest.param((NOTICE,), 0.0, True, id="it is time"),
        pytest.param((NOTICE,), -5.0, True, id="it is past the time"),
        pytest.param((NOTICE,), 0.1, False, id="not yet"),
        pytest.param((), -5.0, False, id="no notice"),
        pytest.param((NOTICE, Finished(0)), -5.0, False, id="training has finished"),
        pytest.param((DRILL, START, NOTICE, Ended(1)), -5.0, True, id="a notice that came in a drill"),
        pytest.param(
            (DRILL, START, NOTICE, Finished(0), Ended(1)),
            -5.0,
            False,
            id="a drill in which training finished",
        ),
    ],
)
def test_epoch_starts_when_a_standing_notice_is_due(
    entries: tuple[Entry, ...], start_in_s: float, starts: bool
) -> None:
    member, bell = heard(*entries)
    member.look(start_in_s, time_left_s=30.0)
    assert [type(entry) for entry in unread(bell)] == ([StartEntry] if starts else [])


@pytest.mark.parametrize(
    ("ordinal", "started_at", "written"),
    [
        pytest.param(4, 4, [], id="where the epoch was started"),
        pytest.param(9, 4, [], id="as far ahead as a mark can say"),
        pytest.param(10, 4, ["10"], id="further"),
        pytest.param(3, 4, [], id="behind, as its own start was late"),
    ],
)
def test_agreed_point_is_the_first_that_no_process_has_begun(ordinal: int, started_at: int, written: list[str]) -> None:
    store = InMemoryStore()
    bell = Bell(store)
    member = Member(store, bell, 0, 1, lambda event: None, lambda: (ordinal, False))
    member.seat.ordinal = ordinal
    hear_all(member, bell, NOTICE, StartEntry(0, 0, started_at, started_at))
    assert member.seat.agreed == max(ordinal, started_at) + 1
    assert not member.seat.meets
    assert list(store.list("epoch/1/ahead")) == written


def test_two_processes_that_start_at_once_write_one_start() -> None:
    store = InMemoryStore()
    bells = [Bell(store), Bell(store)]
    members = [
        Member(store, bell, index, 2, lambda event: None, lambda: (7, False)) for index, bell in enumerate(bells)
    ]
    members[0].seat.ordinal = 3
    bells[0].ring(NOTICE)
    for member, bell in zip(members, bells, strict=True):
        hear_all(member, bell)
    for member in members:
        member.look(0.0, time_left_s=30.0)
    assert unread(bells[0]) == [StartEntry(0, 0, 3, 7)]


def test_a_start_without_effect_keeps_no_other_back() -> None:
    store = InMemoryStore()
    bells = [Bell(store), Bell(store)]
    members = [
        Member(store, bell, index, 2, lambda event: None, lambda: (0, False)) for index, bell in enumerate(bells)
    ]
    bells[0].ring(NOTICE)
    for member, bell in zip(members, bells, strict=True):
        hear_all(member, bell)
    hear_all(members[0], bells[0], DRILL)  # of which the other does not know when it starts
    for member in reversed(members):
        member.look(0.0, time_left_s=30.0)
    assert [(type(entry), getattr(entry, "heard", None)) for entry in unread(bells[0])] == [
        (StartEntry, 0),
        (StartEntry, 1),
    ]


def test_leaving_outside_of_an_epoch_notifies_nobody() -> None:
    member, bell = heard(NOTICE)
    assert list(member.leave()) == []
    assert bell.try_next() is None


LATE = Failed(1, 0, "waited until the time was over for process 1 of 2 to say at which sync point they are")


@pytest.mark.parametrize(
    ("left_s", "rung"),
    [
        pytest.param(0.1, [], id="there is time left"),
        pytest.param(0.0, [LATE], id="the time is just over"),
        pytest.param(-0.1, [LATE], id="the time is over"),
    ],
)
def test_an_epoch_is_given_up_when_its_time_is_over(left_s: float, rung: list[Entry]) -> None:
    member, bell = heard(NOTICE, START, count=2)  # process 1 says nothing
    member.look(0.0, time_left_s=left_s)
    assert unread(bell) == rung


@pytest.mark.parametrize("left_s", [0.1, -0.1], ids=["in time", "late"])
def test_agreed_point_is_written_where_the_last_to_publish_died(left_s: float) -> None:
    (member, bell), (dying, its_bell) = gang(2)
    dying.seat.ordinal = 2
    hear_all(member, bell, NOTICE, START)
    hear_all(dying, its_bell, steps=2)  # it has published, and has not written what follows
    assert unread(bell) == []
    member.look(0.0, time_left_s=left_s)
    assert unread(bell) == [Agreed(1, 3, meets=False)]


@pytest.mark.parametrize("decision", [Agreed(1, 5, meets=False), Failed(1, 1, "")], ids=["agreed", "failed"])
def test_nothing_is_written_in_an_epoch_that_was_decided(decision: Entry) -> None:
    member, bell = heard(NOTICE, START, decision, count=2)
    member.look(0.0, time_left_s=-1.0)
    assert unread(bell) == []


def test_two_processes_that_give_up_at_once_write_one_entry() -> None:
    (first, bell), (second, its_bell), _ = gang(3)
    hear_all(first, bell, NOTICE, START)
    hear_all(second, its_bell)
    for member in (first, second):
        member.look(0.0, time_left_s=-1.0)
    assert [(type(entry), getattr(entry, "by", None)) for entry in unread(bell)] == [(Failed, 0)]


def test_a_late_entry_on_an_earlier_drill_keeps_no_decision_back() -> None:
    member, bell = heard(DRILL, START, Failed(1, 1, ""), NOTICE, StartEntry(0, 3, 0, 0), count=2)
    late = Failed(1, 1, "a slow process")
    bell.ring(late)
    member.look(0.0, time_left_s=-1.0)
    assert [getattr(entry, "epoch", None) for entry in unread(bell)] == [1, 4]


# What follows from a decision in the seat, and how a drill and training end.


@pytest.mark.parametrize(("notice", "open_epoch"), [(DRILL, None), (NOTICE, 1)], ids=["drill", "preemption"])
def test_training_continues_after_a_failed_drill_alone(notice: Entry, open_epoch: int | None) -> None:
    member, _ = heard(notice, START, Failed(1, 1, ""), count=2)
    assert member.seat.epoch == open_epoch


def test_a_point_agreed_after_a_process_left_the_drill_is_ignored() -> None:
    member, bell = heard(DRILL, START, count=2)
    assert list(member.leave()) == [None]
    hear_all(member, bell, Agreed(1, 5, meets=False))
    assert (member.seat.epoch, member.seat.agreed) == (None, None)


def test_the_last_process_to_leave_a_drill_ends_it_for_all() -> None:
    (first, bell), (last, its_bell) = gang(2)
    hear_all(first, bell, DRILL, START)
    hear_all(last, its_bell)
    hear_all(first, bell)
    assert first.seat.agreed == 1
    assert list(first.leave()) == [None]
    assert unread(bell) == []
    assert list(last.leave()) == [None]
    assert unread(bell) == [Ended(1)]


@pytest.mark.parametrize(("before", "written"), [((), [Finished(0)]), ((Finished(1),), [])], ids=["first", "second"])
def test_the_first_process_to_finish_writes_it(before: tuple[Entry, ...], written: list[Entry]) -> None:
    member, bell = heard(*before, count=2)
    assert list(member.finish()) == [None]
    assert (member.seat.ordinal, member.seat.finished) == (1, True)
    assert unread(bell) == written
