"""The agreement's protocol under every interleaving: processes at their own pace, threads cut anywhere.

A model drives real ``Seat`` objects. Its processes have a training thread and a background thread, each a list
of atomic steps; which thread moves next is chosen freely. Small gangs are explored exhaustively (breadth first,
states seen before are not entered again), larger ones at random by hypothesis. The model must also find fault
with protocols that are wrong in one thing: else it proves nothing.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracepoint.multihost.protocol import Seat, Verdict


class Violation(AssertionError):
    """The protocol let something happen that must not."""


@dataclasses.dataclass(frozen=True)
class Process:
    """Everything of one process, so that states can be compared and branched."""

    ordinal: int = 0
    epoch: int | None = None
    agreed: int | None = None
    finished: bool = False
    training: str = "between"  # between, begun, held, ended
    background: str = "parked"  # parked, opened, read, waiting, idle
    frozen: int = 0  # what the background thread has read
    epochs_done: int = 0
    saved: tuple[tuple[int, int], ...] = ()  # (epoch, ordinal)
    word: int | None = None  # finished/<process> in the store


@dataclasses.dataclass(frozen=True)
class World:
    processes: tuple[Process, ...]
    published: tuple[tuple[int, int, int], ...] = ()  # (epoch, process, ordinal)


class Model:
    """The moves of ``count`` processes that train ``steps`` steps while ``epochs`` notices come."""

    def __init__(
        self,
        count: int,
        steps: int,
        epochs: int = 1,
        *,
        seat: type[Seat] = Seat,
        read_before_open: bool = False,
    ) -> None:
        self.count, self.steps, self.epochs, self.seat = count, steps, epochs, seat
        self.read_before_open = read_before_open

    def start(self) -> World:
        return World(tuple(Process() for _ in range(self.count)))

    def moves(self, world: World) -> list[tuple[int, str]]:
        found = []
        for index, process in enumerate(world.processes):
            if process.training in ("between", "begun"):
                found.append((index, "train"))
            if process.training == "held" and self._verdict(index, process) is not Verdict.WAIT:
                found.append((index, "train"))
            if self._background_can_move(world, index, process):
                found.append((index, "background"))
        return found

    def move(self, world: World, index: int, thread: str) -> World:
        process = world.processes[index]
        try:
            if thread == "train":
                process = self._train(process, index)
                published: tuple[tuple[int, int, int], ...] = ()
            else:
                process, published = self._background(world, process, index)
        except RuntimeError as error:
            raise Violation(f"process {index}: {error}") from error
        processes = (*world.processes[:index], process, *world.processes[index + 1 :])
        new = World(processes, tuple(sorted({*world.published, *published})))
        self._check(new)
        return new

    def check_end(self, world: World) -> None:
        """Nobody can move: then all must have come to an end, in one way."""
        if not all(p.training == "ended" for p in world.processes):
            raise Violation(f"deadlock: {world}")
        if len({p.saved for p in world.processes}) != 1:
            raise Violation(f"some saved and some did not: {world}")

    def _check(self, world: World) -> None:
        for epoch in range(self.epochs):
            points = {ordinal for p in world.processes for e, ordinal in p.saved if e == epoch}
            agreed = {p.agreed for p in world.processes if p.epoch == epoch and p.agreed is not None}
            if len(points | agreed) > 1:
                raise Violation(f"two agreed points in epoch {epoch}: {world}")

    def _verdict(self, index: int, process: Process) -> Verdict:
        try:
            return self._seat(process).verdict()
        except RuntimeError as error:
            raise Violation(f"process {index}: {error}") from error

    def _seat(self, process: Process) -> Seat:
        seat = self.seat()
        seat.ordinal, seat.epoch = process.ordinal, process.epoch
        seat.agreed, seat.finished = process.agreed, process.finished
        return seat

    @staticmethod
    def _with(process: Process, seat: Seat, **changes: object) -> Process:
        return dataclasses.replace(
            process,
            ordinal=seat.ordinal,
            epoch=seat.epoch,
            agreed=seat.agreed,
            finished=seat.finished,
            **changes,  # type: ignore[arg-type]
        )

    def _train(self, process: Process, index: int) -> Process:
        seat = self._seat(process)
        if process.training == "between":  # step 1: the ordinal is written
            if process.ordinal < self.steps:
                seat.begin()
            else:
                seat.finish()
            return self._with(process, seat, training="begun")
        if process.training == "begun" and process.epoch is not None:  # step 2: an epoch is seen
            return self._with(process, seat, training="held")
        if process.training == "begun":
            if process.finished:
                return self._with(process, seat, training="ended", word=seat.ordinal)
            return self._with(process, seat, training="between")
        verdict = seat.verdict()
        if verdict is Verdict.OVER:
            return self._with(process, seat, training="ended", word=seat.ordinal)
        if verdict is Verdict.SAVE:
            assert process.epoch is not None
            saved = (*process.saved, (process.epoch, seat.ordinal))
            seat.end_epoch()
            return self._with(process, seat, training="between", saved=saved)
        return self._with(process, seat, training="between")

    def _background_can_move(self, world: World, index: int, process: Process) -> bool:
        if process.background == "parked":  # a notice may come at any moment
            return process.epochs_done < self.epochs
        if process.background == "waiting":
            return self._complete(world, process) is not None
        if process.background == "idle":  # until the epoch is ended, or for good if training is
            return process.epoch is None and process.epochs_done + 1 < self.epochs
        return True

    def _background(
        self, world: World, process: Process, index: int
    ) -> tuple[Process, tuple[tuple[int, int, int], ...]]:
        seat = self._seat(process)
        if process.background == "idle":
            return self._with(process, seat, background="parked", epochs_done=process.epochs_done + 1), ()
        if process.background == "parked":
            if self.read_before_open:
                return self._with(process, seat, background="opened", frozen=seat.ordinal), ()
            seat.open_epoch(process.epochs_done)
            return self._with(process, seat, background="opened"), ()
        if process.background == "opened":
            if self.read_before_open:
                seat.open_epoch(process.epochs_done)
                return self._with(process, seat, background="read"), ()
            return self._with(process, seat, background="read", frozen=seat.ordinal), ()
        if process.background == "read":
            word = (process.epochs_done, index, process.frozen)
            return self._with(process, seat, background="waiting"), (word,)
        published = self._complete(world, process)
        assert published is not None
        seat.settle(published)
        return self._with(process, seat, background="idle"), ()

    def _complete(self, world: World, process: Process) -> dict[int, int] | None:
        found = {i: p.word for i, p in enumerate(world.processes) if p.word is not None}
        found |= {i: ordinal for epoch, i, ordinal in world.published if epoch == process.epochs_done}
        return found if len(found) == self.count else None


def explore(model: Model) -> int:
    """Visits every reachable state; returns how many there are."""
    seen = {model.start()}
    frontier = list(seen)
    while frontier:
        world = frontier.pop()
        moves = model.moves(world)
        if not moves:
            model.check_end(world)
        for index, thread in moves:
            new = model.move(world, index, thread)
            if new not in seen:
                seen.add(new)
                frontier.append(new)
    return len(seen)


@pytest.mark.parametrize(
    ("count", "steps", "epochs"),
    [
        pytest.param(1, 4, 2, id="one process, two epochs"),
        pytest.param(2, 2, 1, id="two processes"),
        pytest.param(2, 1, 2, id="two processes, two epochs"),
        pytest.param(3, 1, 1, id="three processes"),
    ],
)
def test_no_interleaving_breaks_the_agreement(count: int, steps: int, epochs: int) -> None:
    assert explore(Model(count, steps, epochs)) > 20


@given(data=st.data(), count=st.integers(2, 6), steps=st.integers(0, 12), epochs=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_larger_gangs_at_random_paces_agree(data: st.DataObject, count: int, steps: int, epochs: int) -> None:
    model = Model(count, steps, epochs)
    # Some threads are much slower than others: that is what host run-ahead is.
    weights = data.draw(st.lists(st.sampled_from([1, 10, 100]), min_size=2 * count, max_size=2 * count))
    random = data.draw(st.randoms(use_true_random=False))
    world = model.start()
    while moves := model.moves(world):
        chosen = random.choices(moves, [weights[2 * i + (t == "train")] for i, t in moves])[0]
        world = model.move(world, *chosen)
    model.check_end(world)


class WithoutFreeze(Seat):
    """Goes on while the agreed point is not known, as if nothing was wrong."""

    __slots__ = ()

    def verdict(self) -> Verdict:
        return Verdict.GO_ON if self.agreed is None and not self.finished else super().verdict()


class OwnPoint(Seat):
    """Looks only at its own process."""

    __slots__ = ()

    def settle(self, published: object) -> int:
        self.agreed = self.ordinal + 1
        return self.agreed


class WithoutPlusOne(Seat):
    """Saves at the point that the furthest process has passed."""

    __slots__ = ()

    def settle(self, published: dict[int, int]) -> int:  # type: ignore[override]
        self.agreed = max(published.values())
        return self.agreed


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(Model(2, 3, seat=WithoutFreeze), id="no freeze"),
        pytest.param(Model(2, 3, seat=OwnPoint), id="each for itself"),
        pytest.param(Model(2, 3, seat=WithoutPlusOne), id="max without plus one"),
        pytest.param(Model(2, 3, read_before_open=True), id="the ordinal is read before the epoch is opened"),
    ],
)
def test_the_model_finds_fault_with_a_protocol_that_is_wrong_in_one_thing(mutant: Model) -> None:
    with pytest.raises(Violation):
        explore(mutant)


def test_an_epoch_is_not_opened_in_another() -> None:
    seat = Seat()
    seat.open_epoch(0)
    with pytest.raises(RuntimeError, match="epoch 1 was opened while epoch 0 is open"):
        seat.open_epoch(1)
