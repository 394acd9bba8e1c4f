"""The agreed sync point: peers that do not come, what is chosen there, and with what the gang leaves."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from gracepoint.checkpoint import Saved
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings, SafeSnapshot
from gracepoint.checkpoint.saving.schedule import SaveSchedule, Throughput
from gracepoint.deadline import Deadline, Evacuation, NewestSnapshot, SnapshotState, must_choose
from gracepoint.errors import BarrierCancelled, Preempted, SaveFailed
from gracepoint.multihost import Agreement, InMemoryStore
from gracepoint.multihost.ledger import Broken, Epoch, Event, Settled
from gracepoint.preemption.emergency_save import EmergencySave
from gracepoint.preemption.exit import ProcessExit
from gracepoint.preemption.forecast import Forecaster, TimeBudget
from gracepoint.preemption.observer import NoticePublisher, PreemptionObserver
from gracepoint.preemption.outcome import Outcome, Shared
from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Disruption, Mailbox, Sender
from gracepoint.settings import Settings
from gracepoint.wire.messages import Phase, SavedFor
from tests.unit.checkpoint.fakes.engine import assert_same, engine, in_gang, small_state
from tests.unit.multihost.fakes.gangs import gangs
from tests.unit.preemption.fakes.reporters import Sent
from tests.unit.snapshots.fakes.servers import Served, placed, serving, shown, view
from tests.waiting import until


class Engine:
    """Notes what it is told to do."""

    commit_key = None
    memory: Memory | None = None

    def __init__(self) -> None:
        self.executor = self
        self.newest_snapshot: NewestSnapshot | None = None
        self.committed_step: int | None = None
        self.told: list[str] = []
        self.notes: list[SavedFor] = []

    def save(self, step: int, *arguments: Any, deadline: Deadline, note: str, **options: Any) -> Saved:
        self.told.append(f"save {step}")
        self.notes.append(SavedFor.from_json(note))
        assert deadline.remaining_s() > 0
        return Saved(step, 1)

    def promote(self, *, deadline: Deadline, on_stage: Callable[[str], None]) -> Saved:
        assert self.newest_snapshot is not None
        self.told.append(f"promote {self.newest_snapshot.step}")
        return Saved(self.newest_snapshot.step, 1)

    def stop(self, reason: str) -> None:
        self.told.append("stop")

    def refuse(self, step: int, error: Exception) -> None:
        self.told.append(f"refuse {step}: {error}")


class Memory:
    """Snapshot servers that take parts at once, or do not."""

    def __init__(self, copies: int = 2, error: str = "") -> None:
        self._copies = copies
        self._error = error
        self.left_s = math.nan  # for sending

    def evacuation(self, leaving: Collection[str]) -> Evacuation:
        return Evacuation(part_bytes=8, copies=2, bytes_per_s=None)

    def send_now(self, step: int, *arguments: Any, deadline: Deadline, leaving: Collection[str]) -> SafeSnapshot:
        self.left_s = deadline.remaining_s()
        if self._error:
            raise SaveFailed(self._error)
        return SafeSnapshot(step, self._copies, 0.0, 0.0, 8, ("node-a",))

    def make_room(self, *, is_safe: bool) -> None:
        pass


class Observer(PreemptionObserver):
    """Notes what it has dealt with."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[Event] = []

    def heard(self, event: Event) -> None:
        super().heard(event)
        self.events.append(event)


class Process:
    """What a coordinator wires together, without receivers and without a watchdog. Training is at step 10."""

    def __init__(
        self,
        store: InMemoryStore,
        index: int,
        count: int,
        made: Callable[[ProcessGroup], StepCheckpointer] | None = None,
    ) -> None:
        group, settings, clock = gangs(count, store)[index], Settings(), time.monotonic
        self.engine = Engine()
        self.mailbox = Mailbox(clock)
        self.sent = Sent()
        sender = cast(Sender, self.sent)
        reporter = Reporter(sender, settings, "session", group, self.mailbox, TimeSpent(clock))
        budget = TimeBudget(self.mailbox, settings, lambda: None, clock)
        process_exit = ProcessExit(store, index, count, clock=clock)
        shared = Shared(group, settings, clock, self.mailbox, budget, reporter, process_exit)
        engine = cast(StepCheckpointer, self.engine) if made is None else made(group)
        self.checkpointer = engine
        self.outcome = Outcome(shared, committed_step=lambda: self.engine.committed_step, current_step=lambda: 10)
        self.observer = Observer(shared, self.outcome, lambda: None, self._position)
        self.agreement = Agreement(store, group, self.observer)
        publisher = NoticePublisher(self.mailbox, self.agreement, index, clock)
        self.mailbox.listen(publisher.posted, publisher.retracted)
        self.forecaster = Forecaster(count, Throughput(None, writes=False), settings.margin, clock)
        self.saving = EmergencySave(shared, engine, self.outcome, self.agreement, self.forecaster)

    def _position(self) -> tuple[int, bool]:
        return self.agreement.seat.ordinal, self.checkpointer.memory is not None or must_choose(
            self.engine.newest_snapshot
        )

    def train_to_the_agreed_point(self) -> None:
        while not self.agreement.arrive():
            time.sleep(0.001)


@pytest.fixture
def pair() -> Iterator[list[Process]]:
    store = InMemoryStore()
    processes = [Process(store, index, 2) for index in range(2)]
    yield processes
    for process in processes:
        process.agreement.close()


def notice(remaining_s: float) -> Disruption:
    return Disruption(preemption="gpt-1", cause="Spot", signal="taint", remaining_s=remaining_s)


def writing(step: int) -> NewestSnapshot:
    """Of which one of two bytes is written after an hour."""
    return NewestSnapshot(step=step, state=SnapshotState.WRITING, done_bytes=1, left_bytes=1, elapsed_s=3600.0)


def test_earlier_deadline_ends_a_running_wait(pair: list[Process]) -> None:
    here, peer = pair
    peer.engine.newest_snapshot = writing(7)
    open_epoch(pair)  # the peer is there, and says nothing
    timer = threading.Timer(0.1, here.mailbox.post, (notice(0.0),))
    timer.start()
    with pytest.raises(BarrierCancelled, match="the time was over"):
        here.saving.meet(1)
    timer.join()


def test_peer_failure_after_the_commit_is_ignored(pair: list[Process]) -> None:
    here, peer = pair
    here.mailbox.post(notice(3600))
    training = threading.Thread(target=peer.train_to_the_agreed_point)
    training.start()
    here.train_to_the_agreed_point()
    training.join()
    here.outcome.epoch.succeeded()
    peer.agreement.tell_gone("an error in its clean-up")
    until(lambda: any(isinstance(event, Broken) for event in here.observer.events), "the other's end")
    assert here.outcome.epoch.progress.message == ""


def open_epoch(
    pair: list[Process], remaining_s: float = 3600.0, *, drill: bool = False, nodes: tuple[str, ...] = ()
) -> None:
    """Brings both processes to the agreed point."""
    here, peer = pair
    here.mailbox.post(dataclasses.replace(notice(remaining_s), drill=drill, nodes=nodes))
    training = threading.Thread(target=peer.train_to_the_agreed_point)
    training.start()
    here.train_to_the_agreed_point()
    training.join()


def test_older_step_committed_since_the_freeze_is_used_by_all(pair: list[Process]) -> None:
    for process in pair:
        process.engine.committed_step = 3
    open_epoch(pair)
    pair[0].engine.committed_step = 7  # the other process does not know it yet
    for process in pair:
        preempted = process.outcome.failed(10, SaveFailed("the disk is full"), 3)
        assert preempted is not None
        assert (preempted.code, preempted.saved, preempted.step, preempted.steps_lost) == (77, True, 7, 3)
        assert str(preempted) == (
            "step 7 is committed, 3 steps before step 10, which was not saved at step 10: the disk is full"
        )
        assert process.outcome.epoch.progress.steps_lost == 3


@pytest.mark.parametrize("drill", [False, True], ids=["a disruption", "a drill"])
def test_a_saved_step_notes_for_which_preemption_it_is(pair: list[Process], drill: bool) -> None:
    open_epoch(pair, drill=drill)
    save_in_both(pair)
    (note,) = pair[0].engine.notes
    assert (note.preemption, note.session, note.restart_attempt) == ("gpt-1", "session", 0)
    assert (note.spent.left_s == note.spent.now_s) is not drill  # after a drill, training goes on


def test_step_committed_before_the_freeze_does_not_end_a_preemption(pair: list[Process]) -> None:
    for process in pair:
        process.engine.committed_step = 7
    open_epoch(pair)
    for process in pair:
        preempted = process.outcome.failed(10, SaveFailed("the disk is full"), 3)
        assert preempted is not None
        assert (preempted.code, preempted.saved, preempted.step, preempted.steps_lost) == (78, False, 10, None)


@pytest.mark.parametrize("end", ["it fails", "it is stuck", "a peer breaks off"])
def test_steps_since_the_last_checkpoint_are_reported_lost_without_a_save(pair: list[Process], end: str) -> None:
    for process in pair:
        process.engine.committed_step = 7
    open_epoch(pair)
    here = pair[0].outcome
    if end == "it fails":
        here.failed(10, SaveFailed("the disk is full"))
    elif end == "it is stuck":
        here.overdue()
    else:
        pair[0].observer.heard(Broken(Epoch(0, False, frozenset(), 0, 0), "its disk is full"))
    assert here.epoch.progress.steps_lost == 3


def test_process_stuck_until_the_deadline_leaves_with_what_was_committed(
    pair: list[Process],
) -> None:
    here = pair[0]
    open_epoch(pair)
    here.engine.committed_step = 7
    here.outcome.overdue()
    assert here.outcome.epoch.ended
    progress = here.outcome.epoch.progress
    assert (progress.step, progress.steps_lost) == (7, 3)
    assert "step 7 is committed, 3 steps before step 10" in progress.message


def save_in_both(pair: list[Process], state: Any = None) -> list[Preempted | None]:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda process: process.saving.save(10, state or {}, dict), pair))


@pytest.mark.parametrize("drill", [False, True], ids=["a disruption", "a drill"])
def test_each_phase_up_to_the_commit_is_reported_with_its_figures(pair: list[Process], drill: bool) -> None:
    open_epoch(pair, drill=drill)
    save_in_both(pair)
    reports = pair[0].sent.messages
    assert [report.phase for report in reports] == [
        Phase.FROZEN, Phase.AGREED, Phase.DRAINED, Phase.WRITTEN, Phase.DURABLE, Phase.COMMITTED,
    ]  # fmt: skip
    for report in reports[3:]:
        assert (report.step, report.bytes) == (10, 1)
    assert reports[-1].seconds_to_spare > 0


def test_an_older_step_that_is_promoted_is_reported_with_its_number_and_size(pair: list[Process]) -> None:
    for process in pair:
        process.forecaster.prepare(10**11)
        process.engine.newest_snapshot = dataclasses.replace(writing(7), done_bytes=10**6, elapsed_s=1.0)
    open_epoch(pair, remaining_s=30.0)
    save_in_both(pair)
    assert pair[0].engine.told == ["promote 7"]
    *_, written, durable, promoted = pair[0].sent.messages
    assert (written.phase, durable.phase, promoted.phase) == (Phase.WRITTEN, Phase.DURABLE, Phase.PROMOTED)
    assert (promoted.step, promoted.steps_lost, promoted.bytes) == (7, 3, 1)


def evacuating(pair: list[Process], *memories: Memory, drill: bool = False) -> list[Preempted | None]:
    """Comes to the agreed point with too little time for storage, and saves."""
    for process, memory in zip(pair, memories, strict=True):
        process.forecaster.prepare(10**12)
        process.engine.memory = memory
    open_epoch(pair, drill=drill)
    return save_in_both(pair)


def test_a_step_that_is_sent_to_memory_is_reported_as_such_with_the_fewest_copies(pair: list[Process]) -> None:
    ends = evacuating(pair, Memory(), Memory(copies=1))
    assert [process.engine.told for process in pair] == [[], []]
    for end in ends:
        assert end is not None
        assert (end.code, end.saved, end.step, end.steps_lost) == (77, True, 10, 0)
    reports = pair[0].sent.messages
    assert [report.phase for report in reports] == [
        Phase.FROZEN, Phase.AGREED, Phase.AGREED, Phase.DRAINED, Phase.EVACUATED,
    ]  # fmt: skip
    assert (reports[-1].choice, reports[-1].step, reports[-1].bytes) == ("Evacuate", 10, 16)
    assert list(reports[-1].stages) == ["frozen", "agreed", "drained", "evacuated"]
    assert reports[-1].message.startswith("step 10 is safe in snapshot servers (1 copies), ")
    assert reports[-1].message.endswith(
        "s before the deadline: the next start restores it from there, and saves it to storage"
    )


def test_save_that_failed_in_one_process_keeps_none_from_sending_to_memory(pair: list[Process]) -> None:
    here, peer = pair
    here.engine.newest_snapshot = writing(7)
    peer.engine.newest_snapshot = dataclasses.replace(writing(7), state=SnapshotState.GONE)
    ends = evacuating(pair, Memory(), Memory())
    assert [end is not None and (end.saved, end.step) for end in ends] == [(True, 10)] * 2
    assert {process.outcome.epoch.progress.choice for process in pair} == {"Evacuate"}


def test_after_a_drill_that_sends_to_memory_training_goes_on(pair: list[Process]) -> None:
    assert evacuating(pair, Memory(), Memory(), drill=True) == [None, None]
    message = pair[0].sent.messages[-1].message
    assert message.startswith("drill: step 10 is safe in snapshot servers")
    assert message.endswith("s before the deadline")


@pytest.mark.parametrize(
    ("newest", "told", "step"),
    [
        pytest.param(None, ["save 10"], 10, id="to storage, which is tried at least"),
        pytest.param(dataclasses.replace(writing(7), elapsed_s=1.0), ["promote 7"], 7, id="an older step"),
    ],
)
def test_part_that_no_server_takes_has_all_processes_do_what_is_next_best(
    pair: list[Process], newest: NewestSnapshot | None, told: list[str], step: int
) -> None:
    for process in pair:
        process.engine.newest_snapshot = newest
    ends = evacuating(pair, Memory(), Memory(error="it is full"))
    assert [process.engine.told for process in pair] == [told] * 2
    for process, end in zip(pair, ends, strict=True):
        assert end is not None
        assert (end.code, end.saved, end.step, end.steps_lost) == (77, True, step, 10 - step)
        reason = process.outcome.epoch.progress.choice_reason
        assert reason is not None
        assert reason.startswith("process 1: it is full; step 10 needs ")
    phases = [report.phase for report in pair[0].sent.messages]
    assert phases[3:] == [
        Phase.DRAINED, Phase.WRITTEN, Phase.DURABLE, Phase.COMMITTED if step == 10 else Phase.PROMOTED
    ]  # fmt: skip


def test_time_for_an_older_step_is_kept_back_if_a_server_hangs(pair: list[Process]) -> None:
    for process in pair:
        process.engine.newest_snapshot = dataclasses.replace(writing(7), done_bytes=9, elapsed_s=1.0)
    memories = Memory(), Memory(error="it hangs")
    evacuating(pair, *memories)
    needed_s = Settings().margin * 500  # a tenth of what is predicted for all
    for process, memory in zip(pair, memories, strict=True):
        assert process.engine.told == ["promote 7"]
        assert 1000.0 < memory.left_s < 3600.0 - needed_s


@pytest.mark.integration
def test_step_for_which_storage_is_too_slow_is_restored_from_servers_of_nodes_that_stay(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        doomed, *stay = servers = [serve() for _ in range(3)]

        def made(attempt: int, write: Sequence[Served]) -> Callable[[ProcessGroup], StepCheckpointer]:
            placement = placed(write, servers, text=shown(attempt=attempt))
            return lambda gang: engine(
                tmp_path / "storage",
                gang,
                attempt=f"job-{attempt}-a",
                memory=MemorySettings(view(placement), SaveSchedule(every_steps=1000)),
            )

        store, state = InMemoryStore(), small_state(10)
        # Of before the signal: the operator has not named other servers yet.
        pair = [Process(store, index, 2, made(1, [doomed, stay[0]])) for index in range(2)]
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda process: process.checkpointer.prepare(state, in_background=False), pair))
        for process in pair:
            process.forecaster.prepare(10**12)
        open_epoch(pair, 30.0, nodes=(doomed.at.node,))
        ends = save_in_both(pair, state)
        for process, end in zip(pair, ends, strict=True):
            assert end is not None
            assert (end.code, end.saved, end.step, end.steps_lost) == (77, True, 10, 0), str(end)
            assert "(2 copies)" in str(end)
            process.agreement.close()
        assert doomed.used_bytes() == 0
        doomed.server.close()

        def again(gang: ProcessGroup) -> tuple[Any, ...]:
            then = made(2, stay)(gang)
            found = then.restore(small_state(), timeout_s=60)
            assert found is not None
            assert_same(found.state, state)
            return found.step, found.from_memory

        assert in_gang(2, again) == [(10, True)] * 2


def test_nothing_is_reported_after_training_has_finished(pair: list[Process]) -> None:
    open_epoch(pair)
    here = pair[0]
    here.outcome.finished()
    here.observer.heard(Settled(Epoch(0, False, frozenset(), 0, 0)))
    here.observer.heard(Broken(Epoch(0, False, frozenset(), 0, 0), "its disk is full"))
    assert [report.phase for report in here.sent.messages] == [Phase.FROZEN, Phase.AGREED, Phase.RETRACTED]


def test_processes_that_have_nothing_to_choose_do_not_wait_for_each_other(pair: list[Process]) -> None:
    open_epoch(pair)
    here, peer = pair
    saved = threading.Event()
    here.engine.save = lambda *_, **__: saved.set() or Saved(10, 1)  # type: ignore[method-assign,func-returns-value]
    alone = threading.Thread(target=here.saving.save, args=(10, {}, dict))
    alone.start()
    assert saved.wait(20)
    assert peer.engine.told == []
    peer.saving.save(10, {}, dict)
    alone.join(20)
    for process in pair:
        assert process.outcome.epoch.progress.choice == "SaveNow"


def test_snapshot_that_was_begun_after_the_freeze_makes_way_in_all_processes(pair: list[Process]) -> None:
    open_epoch(pair)
    for process in pair:
        process.engine.newest_snapshot = writing(9)
    ends = save_in_both(pair)
    assert [process.engine.told for process in pair] == [["stop", "save 10"]] * 2
    assert [end is not None and end.saved for end in ends] == [True, True]


def test_process_whose_state_cannot_be_had_refuses_the_save_of_the_others(pair: list[Process]) -> None:
    open_epoch(pair)

    def broken() -> dict[str, Any]:
        raise ValueError("no data position")

    end = pair[0].saving.save(10, {}, broken)
    assert end is not None
    assert not end.saved
    assert pair[0].engine.told == ["refuse 10: no data position"]


def test_both_processes_follow_what_they_chose_from_what_the_slower_one_knows(pair: list[Process]) -> None:
    for process in pair:
        process.forecaster.prepare(100)
    quick = dataclasses.replace(writing(7), elapsed_s=0.1)
    for process, newest in zip(pair, (quick, writing(7)), strict=True):
        process.engine.newest_snapshot = newest
    open_epoch(pair, remaining_s=3000.0)
    ends = save_in_both(pair)
    assert [process.engine.told for process in pair] == [["stop", "save 10"]] * 2
    for process, end in zip(pair, ends, strict=True):
        assert end is not None
        assert (end.saved, end.step, end.steps_lost) == (True, 10, 0)
        assert process.outcome.epoch.progress.choice == "CancelAndSave"
        assert "there is no time for both" in process.outcome.epoch.progress.choice_reason


def test_snapshots_of_different_steps_are_left_and_the_current_step_is_saved(pair: list[Process]) -> None:
    for process, step in zip(pair, (7, 6), strict=True):
        process.engine.newest_snapshot = writing(step)
    open_epoch(pair)
    ends = save_in_both(pair)
    assert [process.engine.told for process in pair] == [["stop", "save 10"]] * 2
    for end in ends:
        assert end is not None
        assert (end.saved, end.step, end.steps_lost) == (True, 10, 0)
