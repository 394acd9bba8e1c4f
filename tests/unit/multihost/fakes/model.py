"""A gang in one thread: real ``Member`` objects on one store, whose every step is a move that a test may choose.

Each process has a training thread, a reading thread and a timing thread. A move is as much as one of them does
between two places where another thread may come in: the code's own ``yield`` marks them, and where it has none the
model has a phase for each. Time is a number that moves by a move, too. What must never happen raises ``Violation``,
in whatever move it shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from gracepoint.multihost.barriers import Arrivals
from gracepoint.multihost.bell import Bell
from gracepoint.multihost.ledger import Epoch, Event, Gone, Noticed, NoticeEntry, Opened, Retract
from gracepoint.multihost.protocol import Member, Verdict, join_marks
from gracepoint.multihost.store import InMemoryStore


class SmallMember(Member):
    """A member whose marks and groups are so small that few processes need a tree and few steps the keys."""

    frozen = Arrivals(3, 2, join_marks)


Thread = Literal["train", "read", "time"]
THREADS: tuple[Thread, ...] = ("train", "read", "time")
#: What the save is predicted to take, differently in each process.
NEEDED_S = (1.0, 2.0, 0.5, 4.0)


class Violation(AssertionError):
    """The protocol let something happen that must not."""


@dataclasses.dataclass
class Point:
    """The agreed point of an epoch: who is there, and how it was decided for all."""

    saved: dict[int, int] = dataclasses.field(default_factory=dict)  # process: ordinal
    decided: bool | None = None


class Process:
    """One process and where its threads are.

    Phases of training: "between" two sync points, "begun" one, "held" there, "saving" at the agreed one, "leaving" a
    drill, "finishing" with the last one, "ending" there, "stopping" and "stopped" after it broke off; or how it ended:
    "saved", "unsaved", "finished", "gone", "dead".
    """

    def __init__(self, world: World, index: int, member: type[Member]) -> None:
        self.index = index
        self.phase = "between"
        self.events: list[Event] = []
        self.bell = Bell(world.store)
        self.member = member(world.store, self.bell, index, world.count, self._told, self.position)
        self._world = world
        self._reading: Iterator[None] | None = None
        self._steps: Iterator[None] | None = None  # of training, where it is in the middle of some
        self._deadlines_s: dict[str, float] = {}

    def position(self) -> tuple[int, bool]:
        """Its step, and whether it has a snapshot that could be saved instead."""
        return self.member.seat.ordinal + self._world.ahead_by[self.index], self.index in self._world.asking

    @property
    def needed_s(self) -> float:
        return NEEDED_S[self.index % len(NEEDED_S)]

    def stop(self, reason: str) -> None:
        """User code raises between two sync points."""
        self._steps = self.member.stop(reason)
        self.phase = "stopping"

    @property
    def alive(self) -> bool:
        return self.phase not in ("finished", "dead")

    @property
    def training(self) -> bool:
        return self.phase not in ("saved", "unsaved", "finished", "gone", "dead")

    def _told(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Noticed):
            self._deadlines_s[event.notice.origin] = self._world.now_s + event.notice.remaining_s

    def time_left_s(self) -> float:
        standing = self.member.ledger.standing
        return min((self._deadlines_s.get(o, math.inf) for o in standing), default=math.inf) - self._world.now_s

    def move(self, thread: Thread) -> bool:
        """Lets a thread do its next step; False if it waits for something."""
        if not self.alive:
            return False
        try:
            return {"train": self._train, "read": self._read, "time": self._time}[thread]()
        except RuntimeError as error:
            raise Violation(f"process {self.index}: {error}") from error

    def _read(self) -> bool:
        if self._reading is None:
            found = self.bell.try_next()
            if found is None:
                return False
            self._reading = self.member.hear(*found)
        if next(self._reading, self) is self:
            self._reading = None
        return True

    def _time(self) -> bool:
        before = self._world.writes()
        left_s = self.time_left_s()
        epoch = self.member.ledger.epoch
        if epoch is not None and epoch.stop is not None and self.member.ledger.failed is None and not self._has(epoch):
            self.member.give_up(epoch, "the state is gone")
        self.member.look(left_s - self.needed_s, left_s)
        return self._world.writes() > before

    def _has(self, epoch: Epoch) -> bool:
        """Whether it has, or may come to, the state of the sync point after which another process broke off."""
        assert epoch.agreed is not None
        saves_at = self._world.points.get(epoch.number, Point()).saved.get(self.index)
        return saves_at == epoch.agreed if saves_at is not None else self.member.seat.ordinal <= epoch.agreed + 1

    def _train(self) -> bool:
        if not self.training:
            return False
        if self._steps is not None:
            if next(self._steps, self) is self:
                self._steps = None
                self.phase = {"leaving": "between", "stopping": "stopped"}.get(self.phase, "ending")
            return True
        seat = self.member.seat
        match self.phase:
            case "between" if seat.ordinal < self._world.steps:
                seat.begin()
                self.phase = "begun"
            case "between":
                self._steps = self.member.finish()
                self.phase = "finishing"
            case "begun":
                self.phase = "between" if seat.epoch is None else "held"
            case "ending" if not self.member.ledger.finished:
                return False
            case "ending" if seat.epoch is None:
                self.phase = "finished"
            case "held" | "ending":
                return self._held()
            case "saving":
                return self._save()
            case "stopped":
                return self._stopped()
        return True

    def _held(self) -> bool:
        if self.member.ledger.failed is not None:
            self._leave_unsaved()
            return True
        match self.member.seat.verdict():
            case Verdict.WAIT:
                return False
            case Verdict.GO_ON:
                self.phase = "between" if self.phase == "held" else "finished"
            case Verdict.OVER:
                self.phase = "finished"
            case Verdict.SAVE | Verdict.BEFORE:
                self._begin_save()
        return True

    def _begin_save(self) -> None:
        epoch, seat = self.member.ledger.epoch, self.member.seat
        assert epoch is not None
        assert seat.agreed is not None
        if seat.ordinal > seat.agreed + 1:
            return self._leave_unsaved()
        self._world.points.setdefault(epoch.number, Point()).saved[self.index] = seat.agreed
        self.phase = "saving"

    def _stopped(self) -> bool:
        ledger, seat = self.member.ledger, self.member.seat
        if ledger.failed is not None or (seat.stopped and seat.agreed != seat.ordinal):
            self._leave_unsaved()
        elif seat.stopped:
            self._begin_save()
        elif ledger.finished or ledger.epoch is None or ledger.epoch.drill:
            self.bell.ring(Gone(self.index, "an error of its own"), unless=lambda there: isinstance(there, Gone))
            self.phase = "gone"
        else:
            return False
        return True

    def _save(self) -> bool:
        """The barriers of the save: all pass or none, and nobody waits beyond the time."""
        epoch = self.member.ledger.epoch
        assert epoch is not None
        point = self._world.points[epoch.number]
        if point.decided is None:
            if len(point.saved) == self._world.count:
                point.decided = len(set(point.saved.values())) == 1
            elif (
                self.time_left_s() <= 0 or self.member.ledger.gone is not None or self.member.ledger.failed is not None
            ):
                point.decided = False
            else:
                return False
        if epoch.drill:
            self.phase = "leaving"
            self._steps = self.member.leave()
        elif point.decided:
            self.phase = "saved"
        else:
            self._leave_unsaved()
        return True

    def _leave_unsaved(self) -> None:
        self.bell.ring(Gone(self.index, "not saved"), unless=lambda there: isinstance(there, Gone))
        self.phase = "unsaved"


class World:
    """All of them.

    Args:
        count: Processes.
        member: The protocol; a test may give one that is wrong in one thing.
    """

    def __init__(self, count: int, member: type[Member] = SmallMember) -> None:
        self.store = InMemoryStore()
        self.count = count
        self.steps: float = math.inf  # sync points of the training, the last one not counted
        self.now_s = 0.0
        self.points: dict[int, Point] = {}
        self.ahead_by = [0] * count  # by how much the steps of each process are ahead of its sync points
        self.asking: set[int] = set()  # processes with a snapshot
        self._writes = 0
        self.processes = [Process(self, index, member) for index in range(count)]

    def writes(self) -> int:
        """How many entries the bell has."""
        while self.store.try_get(f"bell/{self._writes}") is not None:
            self._writes += 1
        return self._writes

    def tell(self, by: int, origin: str, remaining_s: float, *, drill: bool = False) -> None:
        """A notice; where the process finds that the freeze must begin at once, both in one entry."""
        teller = self.processes[by]
        starts_at = teller.member.seat.ordinal if remaining_s <= teller.needed_s else None
        teller.bell.ring(NoticeEntry(by, origin, remaining_s, "", drill, True, None, starts_at, teller.position()[0]))

    def take_back(self, by: int, origin: str) -> None:
        self.processes[by].bell.ring(Retract(by, origin, "taken back"))

    def break_off(self, index: int) -> None:
        process = self.processes[index]
        if process.training:
            process.bell.ring(Gone(index, "an error of its own"), unless=lambda there: isinstance(there, Gone))
            process.phase = "gone"

    def stop(self, index: int) -> None:
        """User code of a process raises between two sync points, while a notice stands that is no drill."""
        process = self.processes[index]
        ledger = process.member.ledger
        in_earnest = any(not notice.drill for notice in ledger.standing.values())
        if process.phase == "between" and in_earnest and not (ledger.epoch is not None and ledger.epoch.drill):
            process.stop("the loader's workers are gone")

    def end_training(self) -> None:
        """There are a few more sync points, beyond where any process is."""
        if self.steps == math.inf:
            self.steps = max(p.member.seat.ordinal for p in self.processes) + 3

    def die(self, index: int) -> None:
        self.processes[index].phase = "dead"

    def move(self, index: int, thread: Thread) -> bool:
        moved = self.processes[index].move(thread)
        self.check()
        return moved

    def check(self) -> None:
        """What must hold at every moment."""
        stopped = {p.member.seat.epoch for p in self.processes if p.member.seat.stopped}
        agreed: dict[tuple[int, bool], set[int]] = {
            (epoch, False): set(point.saved.values()) for epoch, point in self.points.items() if epoch not in stopped
        }
        for process in self.processes:
            seat = process.member.seat
            if seat.epoch is not None and seat.agreed is not None:
                agreed.setdefault((seat.epoch, seat.stopped), set()).add(seat.agreed)
                if seat.stopped:
                    continue
                if not seat.meets and (self.asking or len(set(self.ahead_by)) > 1):
                    raise Violation(f"they do not meet, though {self.asking} ask for it, steps: {self.ahead_by}")
                if seat.meets and not self.asking and len(set(self.ahead_by)) == 1:
                    raise Violation("they meet, though nobody asked for it")
            if process.phase == "saving" and seat.agreed is not None and seat.ordinal != seat.agreed and not stopped:
                raise Violation(f"process {process.index} saves at {seat.ordinal}, agreed was {seat.agreed}")
        for (epoch, _), ordinals in agreed.items():
            if len(ordinals) > 1:
                raise Violation(f"epoch {epoch} has the agreed points {sorted(ordinals)}")
        longest = max((p.events for p in self.processes), key=len)
        for process in self.processes:
            if process.events != longest[: len(process.events)]:
                raise Violation(f"processes were told differently: {process.events} and {longest}")
        for event in longest:
            if isinstance(event, Opened) and not event.epoch.origins:
                raise Violation("an epoch was opened though no notice stood")

    def run_to_the_end(self) -> None:
        """Lets everybody move in turn until all have ended; time passes when nobody can."""
        for _ in range(10_000):
            if not any(p.training for p in self.processes):
                return self.check_end()
            moved = [self.move(p.index, thread) for p in self.processes for thread in THREADS]
            for process in self.processes:
                while self.move(process.index, "read"):
                    pass
            if not any(moved):
                self.now_s += 1.0
        raise Violation(f"not all came to an end: {[(p.phase, p.member.seat.ordinal) for p in self.processes]}")

    def check_end(self) -> None:
        """What must hold when all have ended."""
        phases = {p.phase for p in self.processes} - {"dead", "gone"}
        if "saved" in phases and phases != {"saved"}:
            raise Violation(f"some saved and some did not: {[p.phase for p in self.processes]}")
        for epoch, point in self.points.items():
            if point.decided and (len(point.saved) != self.count or len(set(point.saved.values())) > 1):
                raise Violation(f"epoch {epoch} was saved by {sorted(point.saved)} of {self.count} alone")
