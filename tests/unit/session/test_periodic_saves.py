"""Periodic saves of several processes in a preemption: a save is begun by all of them, or left out by all."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.saving import executor
from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings, Skips
from gracepoint.checkpoint.saving.schedule import DueSave, SaveSchedule
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.errors import AgreementError, CheckpointError, SaveFailed
from gracepoint.preemption.coordinator import Coordinator
from gracepoint.preemption.reporter import Reporter
from gracepoint.process_group import ProcessGroup, SingleProcess
from gracepoint.session.periodic_saves import PeriodicSaves, PeriodicSnapshots
from gracepoint.wire.messages import TroubleKind
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    engine,
    in_gang,
    not_computed,
    outcomes_in_gang,
    restore,
    save,
    small_state,
)
from tests.unit.checkpoint.fakes.thread_limit import refuse_threads
from tests.unit.checkpoint.fakes.transfer_recorder import AtWrites
from tests.unit.preemption.fakes import reporters
from tests.unit.preemption.fakes.reporters import Sent, without_operator
from tests.unit.snapshots.fakes.servers import Served, placed, serving, view
from tests.waiting import until


class Preempted:
    """A coordinator whose freeze has begun, which this process may not have heard yet, with time left."""

    noticed = True
    sync_point = 1

    def __init__(self, *, in_epoch: bool) -> None:
        self.in_epoch = in_epoch
        self.reporter = without_operator()

    def time_left_s(self) -> float:
        return 10.0

    def doubt(self) -> str:
        return ""


@pytest.mark.parametrize("stuck_asks_first", [False, True])
def test_stuck_storage_of_one_process_keeps_saves_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck_asks_first: bool
) -> None:
    stuck, goes_on, first = threading.Event(), threading.Event(), threading.Event()

    put = PosixPath.put

    def hang(path: PosixPath, data: bytes) -> None:
        if path.name == "done.process_0.json" and path.parent.name.startswith("1."):
            stuck.set()
            assert goes_on.wait(30)
        put(path, data)

    monkeypatch.setattr(PosixPath, "put", hang)

    def run(gang: ProcessGroup) -> tuple[Any, ...]:
        is_stuck = gang.process_index == 0
        checkpointer = engine(tmp_path, gang, save_every_steps=1)
        begun_by_all, asked = checkpointer.due_saves.decide, []

        def ask(step: int, *, ready: bool, **words: Any) -> DueSave:
            if is_stuck is not stuck_asks_first:
                assert first.wait(30)
            answer = begun_by_all(step, ready=ready, **words)
            first.set()
            if is_stuck:
                goes_on.set()
            asked.append((ready, answer.begins))
            return answer

        preempted = Preempted(in_epoch=is_stuck)  # who is stuck stops the save for all
        saves = PeriodicSaves(checkpointer, cast(Coordinator, preempted))
        assert saves.begins(1)
        checkpointer.save_in_background(1, small_state(1), {})
        assert stuck.wait(30)
        monkeypatch.setattr(checkpointer.due_saves, "decide", ask)
        if saves.begins(2):
            checkpointer.save_in_background(2, small_state(2), {})
        newest = checkpointer.executor.newest_snapshot
        assert asked == [(not is_stuck, not stuck_asks_first)]
        return None if newest is None else newest.step, save(checkpointer, 3, small_state(3)).step

    assert in_gang(2, run) == [(1 if stuck_asks_first else 2, 3)] * 2
    found = restore(tmp_path, small_state())
    assert found is not None
    assert found.step == 3
    assert_same(found.state, small_state(3))


class AtSyncPoint:
    """A coordinator without a preemption."""

    noticed = in_epoch = False
    step = 0

    def __init__(self, sync_point: int, sent: Sent | None = None) -> None:
        self.sync_point = sync_point
        self.reporter = reporters.to(sent)
        self.activities = self

    def at(self, stage: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("steps", "sync_points"),
    [
        pytest.param((10, 20), (10, 10), id="other steps at the same sync point"),
        pytest.param((10, 10), (10, 9), id="the same step at other sync points"),
    ],
)
def test_process_at_another_step_is_found_at_the_periodic_save(
    tmp_path: Path, steps: tuple[int, int], sync_points: tuple[int, int]
) -> None:
    begun = threading.Event()

    def run(gang: ProcessGroup) -> None:
        me = gang.process_index
        checkpointer = engine(tmp_path, gang, save_every_steps=10)
        saves = PeriodicSaves(checkpointer, cast(Coordinator, AtSyncPoint(sync_points[me])))
        if me == 1:
            assert begun.wait(30)
        try:
            if saves.begins(steps[me]):
                checkpointer.save_in_background(steps[me], small_state(), {})
        finally:
            begun.set()
        checkpointer.executor.wait_until_finished(30)

    first, second = outcomes_in_gang(2, run)
    both = (
        f"process 0 with step {steps[0]} at sync point {sync_points[0]}, "
        f"and in process 1 with step {steps[1]} at sync point {sync_points[1]}"
    )
    assert isinstance(second, AgreementError)
    assert both in str(second)
    assert isinstance(first, SaveFailed)
    assert both in str(first)


class Training:
    """One process that trains: it passes steps, and saves at each. Its clock is its own.

    Args:
        root: The directory of steps.
        gang: The processes.
        tolerate_s: For how long saves may fail.
        sent: Gets the messages to the operator, as from process 0.

    Attributes:
        writes: Called at each write of this process.
    """

    def __init__(
        self,
        root: Path,
        gang: ProcessGroup,
        *,
        tolerate_s: float = 100.0,
        sent: Sent | None = None,
        **options: Any,
    ) -> None:
        self.now_s = 1000.0 * gang.process_index
        self.writes = AtWrites()
        self.engine = engine(
            root,
            gang,
            save_every_steps=1,
            options=WriteOptions(callback=self.writes),
            clock=lambda: self.now_s,
            **options,
        )
        self._at = AtSyncPoint(0, sent)
        self._saves = PeriodicSaves(
            self.engine, cast(Coordinator, self._at), tolerate_s=tolerate_s, clock=lambda: self.now_s
        )
        self.check_newest = self._saves.check_newest

    def step(
        self, step: int, state: Any = None, host_state: Callable[[], Mapping[str, Any]] = dict, *, takes_s: float = 1.0
    ) -> None:
        """Passes a step, which took so many seconds, and waits until its save has ended."""
        self.now_s += takes_s
        self._at.sync_point = step
        if self._saves.begins(step):
            self._saves.save(step, small_state(step) if state is None else state, host_state)
            assert not self.engine.executor.is_busy(60)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


def host_state_that_raises(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.step(2, host_state=raising(OSError("the data loader could not be asked, this once")))


def host_state_that_cannot_be_encoded(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.step(2, host_state=lambda: {"data": object()})


def state_that_cannot_be_saved(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.step(2, state=small_state(2) | {"more": object()})


def without_a_thread(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patched:
        refuse_threads(patched)
        training.step(2)


def write_that_fails(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.writes.act = raising(MemoryError("there is no memory, this once"))
    training.step(2)
    training.writes.act = None


def in_engine(owner: Callable[[Training], Any], name: str) -> Callable[[Training, pytest.MonkeyPatch], None]:
    def step(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner(training), name, raising(MemoryError("there is no memory, this once")))
            training.step(2)

    return step


def in_module(module: ModuleType, name: str) -> Callable[[Training, pytest.MonkeyPatch], None]:
    """In this process alone: the other one is another thread, and may be at its next step meanwhile."""
    real = getattr(module, name)

    def step(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
        process = threading.get_ident()

        def here(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == process:
                raise MemoryError("there is no memory, this once")
            return real(*arguments, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, name, here)
            training.step(2)

    return step


ONCE: Mapping[str, Callable[[Training, pytest.MonkeyPatch], None]] = {
    "host state raises": host_state_that_raises,
    "host state cannot be encoded": host_state_that_cannot_be_encoded,
    "state cannot be saved": state_that_cannot_be_saved,
    "the transfer from the devices fails": in_module(executor, "Transfer"),
    "no memory for the snapshot": in_engine(lambda training: training.engine.executor.planner, "snapshot"),
    "the plan fails": in_engine(lambda training: training.engine.executor.planner, "plan"),
    "the worker refuses": in_engine(lambda training: training.engine.executor, "_hand_over"),
    "no thread": without_a_thread,
    "the write fails": write_that_fails,
}


@pytest.mark.parametrize("fails_in", [0, 1])
@pytest.mark.parametrize("once", ONCE)
def test_a_save_that_fails_once_in_one_process_leaves_all_later_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, once: str, fails_in: int
) -> None:
    def run(gang: ProcessGroup) -> int:
        training = Training(tmp_path, gang, keep_last=100)
        training.step(1)
        if gang.process_index == fails_in:
            ONCE[once](training, monkeypatch)
        else:
            training.step(2)
        training.step(3)
        training.step(4)
        training.check_newest()
        training.now_s = 0.0
        return save(training.engine, 5, small_state(5)).step

    assert in_gang(2, run) == [5, 5]
    assert sorted(int(path.name) for path in tmp_path.glob("[0-9]")) == [1, 3, 4, 5]
    assert caplog.text.count("a periodic save failed; the first was that of step 2") == 2
    assert caplog.text.count("a periodic save is committed again, after 1 that failed") == 2


@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_state_that_the_devices_cannot_compute_is_no_trouble_with_saves(tmp_path: Path, fails_in: int) -> None:
    sent = [Sent(), Sent()]

    def run(gang: ProcessGroup) -> None:
        training = Training(tmp_path, gang, sent=sent[gang.process_index])
        training.step(1)
        if gang.process_index != fails_in:
            training.step(2)
            with pytest.raises(SaveFailed, match="the devices have failed to compute the state"):
                training.check_newest()
        else:
            with pytest.raises(jax.errors.JaxRuntimeError, match="connection reset by peer"):
                training.step(2, state=not_computed())

    in_gang(2, run)
    assert [path.name for path in tmp_path.glob("[0-9]")] == ["1"]
    assert [each.messages for each in sent] == [[], []]


def test_operator_is_told_of_a_failed_save_and_of_the_one_that_makes_up_for_it(tmp_path: Path) -> None:
    sent = Sent()
    training = Training(tmp_path, SingleProcess(), sent=sent)
    training.step(1, host_state=raising(OSError("there is no room")))
    training.step(2)
    training.step(3)
    assert [(trouble.kind, trouble.over) for trouble in sent.messages] == [
        (TroubleKind.SAVES, False),
        (TroubleKind.SAVES, True),
    ]


def test_a_state_that_was_donated_before_its_save_is_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training, donated = Training(tmp_path, SingleProcess()), {"w": jnp.ones(4)}
    donated["w"].delete()
    training.step(1, state=donated)
    assert "a periodic save failed; the first was that of step 1" in caplog.text


def test_what_fails_after_the_commit_in_one_process_is_no_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(gang: ProcessGroup) -> None:
        training = Training(tmp_path, gang, tolerate_s=0.0)
        with pytest.MonkeyPatch.context() as patched:
            if gang.process_index == 1:
                patched.setattr(training.engine.throughput, "learn", raising(OSError("cannot be noted")))
            training.step(1)
        training.step(2)
        training.check_newest()

    in_gang(2, run)
    assert sorted(path.name for path in tmp_path.glob("[0-9]")) == ["1", "2"]
    assert "what follows a save has failed, the save itself is committed error=a background save failed" in caplog.text


@pytest.mark.parametrize(
    ("tolerate_s", "ends_at"),
    [
        pytest.param(0.0, 3, id="strict: at the next save that is due"),
        pytest.param(110.0, 8, id="after 110 s"),
        pytest.param(1.0, 4, id="a save is tried twice, however long the interval is"),
    ],
)
def test_saves_that_fail_for_too_long_end_training_in_all_processes_at_the_same_step(
    tmp_path: Path, tolerate_s: float, ends_at: int
) -> None:
    storage = tmp_path / "steps"

    def run(gang: ProcessGroup) -> list[tuple[int, str]]:
        training, ended = Training(storage, gang, tolerate_s=tolerate_s), []
        training.step(1)
        for step in range(2, ends_at + 3):
            if gang.process_index == 1:
                training.writes.act = raising(OSError("the storage is away")) if step <= ends_at else None
            try:
                training.step(step, takes_s=20.0 + gang.process_index / 10)  # clocks differ
            except SaveFailed as error:
                ended.append((step, str(error)))
        return ended

    for ended in in_gang(2, run):
        ((step, why),) = ended
        assert step == ends_at
        assert "the first was that of step 2" in why
        assert "the storage is away" in why
    assert (storage / str(ends_at + 1)).is_dir(), "who goes on nevertheless saves again"


def test_training_that_finishes_after_a_failed_save_gets_an_error(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        training = Training(tmp_path, gang)
        training.step(1, host_state=raising(OSError("away")) if gang.process_index == 1 else dict)
        training.check_newest()

    for outcome in outcomes_in_gang(2, run):
        assert isinstance(outcome, SaveFailed)
        assert "that of step 1" in str(outcome)
        assert "is not saved" in str(outcome)


def test_a_failed_save_is_tried_again_before_the_interval_is_over(tmp_path: Path) -> None:
    now_s = [0.0]
    checkpointer = engine(tmp_path, save_every_s=3600, clock=lambda: now_s[0])
    saves = PeriodicSaves(checkpointer, cast(Coordinator, AtSyncPoint(1)), clock=lambda: now_s[0])
    tried: list[float] = []
    for step in range(1, 700):
        now_s[0] += 10.0
        if saves.begins(step):
            tried.append(now_s[0])
            saves.save(step, small_state(), raising(OSError("away")) if len(tried) == 1 else dict)
            assert not checkpointer.executor.is_busy(60)
    first, second, *_ = tried
    assert 3600 <= first <= 4200
    assert 60 <= second - first <= 600


def test_another_job_in_the_directory_ends_training_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(gang: ProcessGroup) -> None:
        training = Training(tmp_path, gang)
        if gang.process_index == 0:
            monkeypatch.setattr(training.engine.access, "check_lease", raising(CheckpointError("another job has it")))
        training.step(1)

    first, _ = outcomes_in_gang(2, run)
    assert isinstance(first, CheckpointError)


def test_each_failure_is_logged_with_since_when_and_how_long_it_may_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    training = Training(tmp_path, SingleProcess(), tolerate_s=100.0)
    for step in (1, 2):
        training.step(step, host_state=raising(OSError("the mount is gone")), takes_s=30.0)
    assert "2 periodic saves in a row failed; the first was that of step 1, 30 s ago: the mount is gone" in caplog.text
    assert "training continues, and ends if none succeeds within 70 s" in caplog.text


class TrainingWithMemory:
    """One process that trains, saves at each fourth step, and has a snapshot in memory at each second one."""

    def __init__(self, root: Path, servers: Sequence[Served]) -> None:
        memory = MemorySettings(view(placed(servers)), SaveSchedule(every_steps=2))
        self.engine = engine(root / "storage", save_every_steps=4, memory=memory)
        assert self.engine.memory is not None
        self.memory = self.engine.memory
        self.at = AtSyncPoint(0)
        coordinator = cast(Coordinator, self.at)
        self.saves = PeriodicSaves(self.engine, coordinator)
        self._snapshots = PeriodicSnapshots(self.memory, coordinator)

    def step(self, step: int, host_state: Callable[[], Mapping[str, Any]] = dict, *, state: Any = None) -> None:
        state = small_state(step) if state is None else state
        self.at.sync_point = self.at.step = step
        if self.saves.begins(step):
            self.saves.save(step, state, host_state)
        self._snapshots.pass_step(step, state, host_state)
        self.engine.wait_until_finished()
        until(lambda: not self.memory.busy, "the end of the snapshot")


@pytest.fixture
def training_with_memory(tmp_path: Path) -> Iterator[TrainingWithMemory]:
    with serving(tmp_path) as serve:
        yield TrainingWithMemory(tmp_path, [serve(), serve()])


@pytest.mark.integration
def test_snapshots_lie_between_the_saves_and_lessen_what_is_at_risk(training_with_memory: TrainingWithMemory) -> None:
    training, safe, at_risk = training_with_memory, [], []
    for step in range(1, 8):
        training.step(step)
        newest = training.memory.newest
        safe.append(None if newest is None else newest.step)
        at_risk.append(training.saves.steps_at_risk())
    assert safe == [None, 2, 2, 4, 4, 6, 6]
    assert at_risk == [None, 0, 1, 0, 1, 0, 1]
    assert training.engine.committed_step == 4
    assert training.memory.skips.count == 0


@pytest.mark.integration
def test_operator_is_told_what_is_safe_and_what_was_skipped(
    training_with_memory: TrainingWithMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(Reporter, "snapshots", lambda reporter, **said: told.append(said))
    training = training_with_memory
    for step in (1, 2, 3):
        training.step(step)
    training.memory.servers.place(placed([]))
    training.step(4)
    (safe, skipped) = told
    assert (safe["safe_step"], safe["copies"], safe["skipped"], safe["interval_s"]) == (2, 2, 0, None)
    assert len(safe["servers"]) == 2
    assert safe["size_bytes"] > 0
    assert (skipped["safe_step"], skipped["skipped"]) == (2, 1)
    assert "no snapshot server" in skipped["skipped_reason"]
    assert skipped["age_s"] > 0
    assert skipped["interval_s"] > 0


@pytest.mark.integration
def test_snapshot_that_fails_ends_no_training_and_counts_as_no_failed_save(
    training_with_memory: TrainingWithMemory,
) -> None:
    training = training_with_memory
    training.step(1)
    training.step(2, host_state=raising(OSError("the data loader could not be asked, this once")))
    assert training.memory.newest is None
    assert "could not be asked, this once" in training.memory.skips.reason
    training.step(3)
    training.step(4)
    training.saves.check_newest()
    assert training.memory.newest is not None
    assert training.memory.newest.step == 4


@pytest.mark.integration
def test_state_that_the_devices_cannot_compute_is_found_at_a_snapshot_that_is_due(
    training_with_memory: TrainingWithMemory,
) -> None:
    training_with_memory.step(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="connection reset by peer"):
        training_with_memory.step(2, state=not_computed())
    assert training_with_memory.memory.newest is None


@pytest.mark.integration
def test_no_snapshot_is_begun_once_a_preemption_stops_the_training(training_with_memory: TrainingWithMemory) -> None:
    training = training_with_memory
    training.at.in_epoch = True
    training.step(2)
    assert training.memory.newest is None
    assert training.memory.skips == Skips(1, "a preemption is about to save")
