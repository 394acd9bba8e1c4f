"""When the agreement acts by itself: no threads, and a clock that the test sets."""

from __future__ import annotations

import dataclasses
import math

import pytest

from gracepoint.multihost import InMemoryStore
from gracepoint.multihost.agreement import Timekeeper
from gracepoint.multihost.bell import Bell
from gracepoint.multihost.ledger import Epoch, Event, Ledger, NoticeEntry
from gracepoint.multihost.protocol import Member

OPEN = Epoch(0, False, frozenset({"spot"}), 0, 0)
STANDING = {"spot": NoticeEntry(0, "spot", 30.0, "about spot", drill=False, once=True)}


class Times:
    """An observer whose times the test sets."""

    def __init__(self, start_in_s: float = 1e6, left_s: float = 30.0) -> None:
        self.starts_s = start_in_s
        self.left_s = left_s
        self.looks = 0

    def heard(self, event: Event) -> None:
        pass

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        return self.starts_s

    def time_left_s(self) -> float:
        return self.left_s

    def position(self) -> tuple[int, bool]:
        return 0, False

    def looked(self) -> None:
        self.looks += 1


class LookingMember(Member):
    """Notes how it is asked to look."""

    def __init__(self, times: Times, index: int, ledger: Ledger) -> None:
        store = InMemoryStore()
        super().__init__(store, Bell(store, 16), index, 16, times.heard, times.position)
        self.ledger = ledger
        self.looks: list[tuple[float, float]] = []

    def look(self, start_in_s: float, time_left_s: float) -> None:
        self.looks.append((start_in_s, time_left_s))


@dataclasses.dataclass
class Keeper:
    times: Times
    member: LookingMember
    timekeeper: Timekeeper


def keeper(ledger: Ledger, *, index: int = 0, start_in_s: float = 1e6, left_s: float = 30.0) -> Keeper:
    times = Times(start_in_s, left_s)
    member = LookingMember(times, index, ledger)
    return Keeper(times, member, Timekeeper(member, times, index))


@pytest.mark.parametrize(
    ("ledger", "left_s", "expected"),
    [
        pytest.param(Ledger(), 30.0, None, id="nothing stands"),
        pytest.param(Ledger(standing=STANDING), 30.0, 0.5, id="a notice stands"),
        pytest.param(Ledger(standing=STANDING, epoch=OPEN), 30.0, 0.5, id="an epoch is open"),
        pytest.param(Ledger(standing=STANDING, epoch=OPEN), 0.2, 0.2, id="its time is over soon"),
        pytest.param(Ledger(standing=STANDING, epoch=OPEN), -5.0, 0.05, id="its time is over"),
        pytest.param(Ledger(epoch=dataclasses.replace(OPEN, agreed=4)), -5.0, 0.5, id="it is agreed"),
        pytest.param(Ledger(standing=STANDING, epoch=OPEN, failed="why"), 30.0, None, id="it has failed"),
        pytest.param(Ledger(standing=STANDING, finished=True), 30.0, None, id="training has finished"),
    ],
)
def test_it_sleeps_until_there_is_something_to_do(ledger: Ledger, left_s: float, expected: float | None) -> None:
    found = keeper(ledger, left_s=left_s).timekeeper.sleep_s()
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("index", "sleep_s"), [(0, 0.2), (1, 0.3), (15, 0.4)])
def test_it_sleeps_until_the_start_and_later_processes_longer(index: int, sleep_s: float) -> None:
    kept = keeper(Ledger(standing=STANDING), index=index, start_in_s=0.2)
    assert kept.timekeeper.sleep_s() == pytest.approx(sleep_s)


@pytest.mark.parametrize(("index", "told"), [(0, -0.05), (1, 0.05), (15, 0.15)])
def test_later_processes_start_later(index: int, told: float) -> None:
    kept = keeper(Ledger(standing=STANDING, changed=3), index=index, start_in_s=-0.05, left_s=7.0)
    kept.timekeeper.look()
    ((start_in_s, left_s),) = kept.member.looks
    assert start_in_s == pytest.approx(told)
    assert left_s == 7.0
    assert kept.times.looks == 0


@pytest.mark.parametrize(("start_in_s", "sleep_s"), [(-0.05, 0.5), (0.0, 0.5), (0.05, 0.05)])
def test_after_it_wrote_the_start_it_waits_until_that_is_read(start_in_s: float, sleep_s: float) -> None:
    kept = keeper(Ledger(standing=STANDING, changed=3), start_in_s=start_in_s)
    kept.timekeeper.look()
    assert kept.timekeeper.sleep_s() == pytest.approx(sleep_s)
    kept.member.ledger = Ledger(standing=STANDING, changed=4)
    assert kept.timekeeper.sleep_s() == pytest.approx(start_in_s)


@pytest.mark.parametrize(
    ("index", "left_s", "looks"),
    [
        pytest.param(0, 30.0, 9, id="process 0 reads the store at each look"),
        pytest.param(1, 30.0, 2, id="process 1 at every fourth"),
        pytest.param(3, 30.0, 0, id="process 3 at every sixteenth"),
        pytest.param(3, -0.05, 0, id="the time is over, but another process comes first"),
        pytest.param(3, -0.1, 9, id="the time is over, and it is its turn"),
        pytest.param(3, -0.15, 9, id="no other process has given it up"),
    ],
)
def test_processes_take_turns_to_look_after_an_open_epoch(index: int, left_s: float, looks: int) -> None:
    kept = keeper(Ledger(standing=STANDING, epoch=OPEN), index=index, left_s=left_s)
    for _ in range(9):
        kept.timekeeper.look()
    assert len(kept.member.looks) == looks
    assert kept.times.looks == 9
    turn_s = 0.0 if index == 0 else 0.1
    for start_in_s, found_s in kept.member.looks:
        assert start_in_s == 0.0
        assert found_s == pytest.approx(left_s + turn_s)
