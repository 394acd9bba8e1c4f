"""The freeze in every order: two threads a process, cut anywhere, in gangs that are small enough to try all of it.

A model drives real ``Seat`` objects through one epoch. States are plain tuples, so that they can be branched and
compared; those seen before are not entered again. It must also find fault with a freeze that is wrong in one thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from gracepoint.multihost.protocol import Member, Seat, Verdict
from tests.unit.multihost.fakes.model import Violation


class Process(NamedTuple):
    ordinal: int = 0
    open: bool = False
    agreed: int | None = None
    training: str = "between"  # between, begun, held, saved
    reading: str = "parked"  # parked, opened, read, published, settled
    frozen: int = 0  # what the reading thread has read


World = tuple[Process, ...]


class Freeze:
    """The moves of ``count`` processes that may run ``steps`` sync points ahead before they see the epoch."""

    seat = Seat
    reads_before_it_opens = False

    def __init__(self, count: int, steps: int) -> None:
        self.count, self.steps = count, steps

    def explore(self) -> int:
        """Visits every reachable state; returns how many there are."""
        start = (Process(),) * self.count
        seen, frontier = {start}, [start]
        while frontier:
            world = frontier.pop()
            moved = list(self.moves(world))
            if not moved and not all(p.training == "saved" for p in world):
                raise Violation(f"deadlock: {world}")
            if len({p.agreed for p in world if p.agreed is not None}) > 1:
                raise Violation(f"two agreed points: {world}")
            frontier += {*moved} - seen
            seen.update(moved)
        return len(seen)

    def moves(self, world: World) -> Iterator[World]:
        published = [p.frozen for p in world if p.reading in ("published", "settled")]
        agreed = self.point(published) if len(published) == self.count else None
        for index, process in enumerate(world):
            for moved in (self.train(process), self.read(process, agreed)):
                if moved is not None:
                    yield (*world[:index], moved, *world[index + 1 :])

    def train(self, process: Process) -> Process | None:
        seat = self.seated(process)
        if process.training == "between":
            if process.ordinal >= self.steps and not process.open:
                return None
            return process._replace(ordinal=seat.begin(), training="begun")
        if process.training == "begun":
            return process._replace(training="held" if process.open else "between")
        if process.training == "saved":
            return None
        try:
            verdict = seat.verdict()
        except RuntimeError as error:
            raise Violation(str(error)) from error
        after = {Verdict.WAIT: None, Verdict.GO_ON: "between", Verdict.SAVE: "saved"}[verdict]
        return None if after is None else process._replace(training=after)

    def read(self, process: Process, agreed: int | None) -> Process | None:
        first, second = process._replace(open=True), process._replace(frozen=process.ordinal)
        if self.reads_before_it_opens:
            first, second = second, first
        match process.reading:
            case "parked":
                return first._replace(reading="opened")
            case "opened":
                return second._replace(reading="read")
            case "read":
                return process._replace(reading="published")
            case "published" if agreed is not None:
                return process._replace(reading="settled", agreed=agreed)
        return None

    def point(self, published: list[int]) -> int:
        return max(published) + 1

    def seated(self, process: Process) -> Seat:
        seat = self.seat()
        seat.ordinal, seat.agreed = process.ordinal, process.agreed
        seat.epoch = 0 if process.open else None
        return seat


@pytest.mark.parametrize(("count", "steps"), [(1, 5), (2, 3), (3, 1)])
def test_no_order_of_the_threads_lets_a_process_pass_the_agreed_point(count: int, steps: int) -> None:
    assert Freeze(count, steps).explore() > 20


class _SeatWithoutFreeze(Seat):
    __slots__ = ()

    def verdict(self) -> Verdict:
        return Verdict.GO_ON if self.agreed is None else super().verdict()


class WithoutFreeze(Freeze):
    """Goes on while the agreed point is not known."""

    seat = _SeatWithoutFreeze


class WithoutPlusOne(Freeze):
    """Saves at the point that the furthest process has passed."""

    def point(self, published: list[int]) -> int:
        return max(published)


class ReadsBeforeItOpens(Freeze):
    """Reads the ordinal before the training thread is held."""

    reads_before_it_opens = True


@pytest.mark.parametrize("wrong", [WithoutFreeze, WithoutPlusOne, ReadsBeforeItOpens])
def test_model_finds_a_freeze_with_one_fault(wrong: type[Freeze]) -> None:
    with pytest.raises(Violation):
        wrong(2, 3).explore()


def test_an_epoch_is_not_opened_in_another() -> None:
    seat = Seat()
    seat.open_epoch(0)
    with pytest.raises(RuntimeError, match="epoch 1 was opened while epoch 0 is open"):
        seat.open_epoch(1)


def test_a_new_seat_has_passed_nothing_and_meets_by_default() -> None:
    seat = Seat()
    assert (seat.ordinal, seat.epoch, seat.agreed, seat.meets, seat.finished) == (0, None, None, True, False)


@pytest.mark.parametrize("agreed", [3, 4], ids=["there", "after it"])
def test_no_state_is_saved_at_the_last_sync_point(agreed: int) -> None:
    seat = Seat()
    seat.begin()
    seat.begin()
    seat.open_epoch(0)
    seat.settle(agreed, meets=False)
    assert seat.verdict() is Verdict.GO_ON
    assert seat.finish() == 3
    assert seat.verdict() is Verdict.OVER


def test_ordinals_are_published_with_counters_that_every_store_has() -> None:
    assert Member.frozen.bits * Member.frozen.fan_out <= 31
