"""What is done with the newest snapshot in host memory while, or after, its save is under way."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint import AsyncCheckpointer, WriteOptions
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.options import Silent
from gracepoint.checkpoint.saving.executor import SaveExecutor
from gracepoint.checkpoint.saving.operation import SaveOperation
from gracepoint.checkpoint.storage import storage_path as time_limit
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.deadline import Deadline, NewestSnapshot, Situation, SnapshotState, must_choose, plan
from gracepoint.errors import GracepointError, SaveFailed
from gracepoint.process_group import ProcessGroup
from gracepoint.threads import BackgroundThread
from tests.slow_storage import SlowStorage
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    engine,
    in_gang,
    outcomes_in_gang,
    restore,
    save,
    small_state,
)
from tests.unit.checkpoint.fakes.moved_clock import MovedClock
from tests.waiting import until_no_thread

_PATIENCE_S = 30.0


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStorage]:
    slow = SlowStorage(monkeypatch.setattr)
    yield slow
    slow.bytes_per_s = math.inf


def begun(root: Path, storage: SlowStorage, gang: ProcessGroup | None = None) -> StepCheckpointer:
    """An engine whose save of step 1 in the background is stuck in the storage."""
    checkpointer = engine(root, gang)
    checkpointer.prepare(small_state())
    storage.bytes_per_s = 0.0
    storage.asked.clear()
    state = small_state(1)
    checkpointer.save_in_background(1, state, {})
    assert storage.asked.wait(_PATIENCE_S)
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array):
            leaf.delete()  # as a step does that it was donated to
    return checkpointer


def following(left_s: list[float]) -> Deadline:
    """A deadline that moves with the only item of the list."""
    return Deadline.following(lambda: left_s[0], time.monotonic)


def promote(checkpointer: StepCheckpointer, timeout_s: float = _PATIENCE_S) -> tuple[int, list[str]]:
    stages: list[str] = []
    return checkpointer.promote(deadline=Deadline.after(timeout_s, time.monotonic), on_stage=stages.append).step, stages


def seen(checkpointer: StepCheckpointer) -> NewestSnapshot:
    newest = checkpointer.executor.newest_snapshot
    assert newest is not None
    return newest


def restored_step(root: Path) -> int:
    restored = restore(root, small_state())
    assert restored is not None
    assert_same(restored.state, small_state(restored.step))
    return restored.step


def test_before_the_first_background_save_there_is_no_snapshot(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path)
    save(checkpointer, 1, small_state(1))
    assert checkpointer.executor.newest_snapshot is None
    with pytest.raises(SaveFailed, match="there is no snapshot in host memory"):
        promote(checkpointer)


def test_a_save_in_progress_reports_how_far_it_is(tmp_path: Path, storage: SlowStorage) -> None:
    checkpointer = begun(tmp_path, storage)
    under_way = seen(checkpointer)
    assert (under_way.step, under_way.state, under_way.done_bytes) == (1, SnapshotState.WRITING, 0)
    assert under_way.left_bytes > 0
    progress = checkpointer.executor.progress
    assert progress is not None
    assert (progress.step, progress.stage, progress.total_bytes) == (1, "", under_way.left_bytes)
    assert progress.thread_id in {thread.ident for thread in threading.enumerate()}
    storage.bytes_per_s = math.inf
    checkpointer.executor.wait_until_finished(_PATIENCE_S)
    assert checkpointer.executor.progress is None
    done = seen(checkpointer)
    assert (done.state, done.done_bytes, done.left_bytes) == (SnapshotState.COMMITTED, under_way.left_bytes, 0)
    checkpointer.close(_PATIENCE_S)


def test_stopped_save_frees_the_way_and_never_becomes_a_checkpoint(
    tmp_path: Path, storage: SlowStorage, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = begun(tmp_path, storage)
    checkpointer.executor.stop("the deadline is near")
    assert seen(checkpointer).state is SnapshotState.HELD  # its thread has ended
    assert "before it was stopped: the deadline is near" in caplog.text
    storage.bytes_per_s = math.inf
    assert save(checkpointer, 2, small_state(2)).step == 2
    checkpointer.close(_PATIENCE_S)
    assert not list(tmp_path.glob("1*")), "it does not take the room of others"
    assert not list(tmp_path.glob("1*/done.*"))
    assert restored_step(tmp_path) == 2


def test_stopped_save_that_ends_late_fails_no_later_one(
    tmp_path: Path, storage: SlowStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait = BackgroundThread.wait
    storage.look_every_s = 0.3  # as an operation of the disk that cannot be broken off
    checkpointer = begun(tmp_path, storage)
    with monkeypatch.context() as impatient:
        impatient.setattr(BackgroundThread, "wait", lambda thread, timeout_s: wait(thread, 0.0))
        checkpointer.executor.stop("a drill")
    assert "and is left behind" in caplog.text
    storage.bytes_per_s = math.inf
    checkpointer.save_in_background(2, small_state(2), {})  # training goes on
    checkpointer.close(_PATIENCE_S)
    assert "before it was stopped: a drill" in caplog.text
    assert restored_step(tmp_path) == 2


def hang_first_save(
    monkeypatch: pytest.MonkeyPatch, clock: MovedClock, hangs: Callable[[], bool] = lambda: True
) -> threading.Event:
    """Has the thread of the first save stuck, long past its deadline, until the event is set.

    Args:
        monkeypatch: The test's.
        clock: Of the process that hangs.
        hangs: Asked in the thread that saves whether its process is to hang.
    """
    released, run, in_background = threading.Event(), SaveOperation.run, SaveExecutor.in_background
    hanging: list[SaveOperation] = []

    def stuck(save: SaveOperation, *rest: Any) -> Any:
        if save in hanging:
            assert released.wait(_PATIENCE_S)
        return run(save, *rest)

    def begin(saver: SaveExecutor, save: SaveOperation, *rest: Any, timeout_s: float, **named: Any) -> None:
        is_first = save.temporary.ordinal == 1
        if is_first and hangs():
            hanging.append(save)
        in_background(saver, save, *rest, timeout_s=0.05 if is_first else timeout_s, **named)
        if save in hanging:
            clock.ahead_s = 60.0

    monkeypatch.setattr(SaveOperation, "run", stuck)
    monkeypatch.setattr(SaveExecutor, "in_background", begin)
    return released


def test_hanging_save_blocks_training_only_to_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovedClock()
    goes_on = hang_first_save(monkeypatch, clock)
    checkpointer = engine(tmp_path, clock=clock)
    checkpointer.save_in_background(1, small_state(1), {})
    message = rf"the save of step 1 hangs: .* still at work below {tmp_path}/1\.gracepoint-tmp\..*storage stuck"
    with pytest.raises(SaveFailed, match=message):
        checkpointer.executor.wait_until_finished(None)
    for _ in range(2):  # its memory is read from as long as it takes
        with pytest.raises(SaveFailed, match=message):
            checkpointer.save_in_background(2, small_state(2), {})
    goes_on.set()
    checkpointer.executor.wait_until_finished(_PATIENCE_S)  # that it failed was told
    assert "a background save that hung has ended" in caplog.text
    checkpointer.save_in_background(2, small_state(2), {})
    checkpointer.close(_PATIENCE_S)
    assert restored_step(tmp_path) == 2


@pytest.mark.parametrize("hanging", [0, 1])
def test_all_refuse_the_same_saves_while_one_process_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: int
) -> None:
    here, clocks, meeting = threading.local(), [MovedClock(), MovedClock()], threading.Barrier(2)
    goes_on = hang_first_save(monkeypatch, clocks[hanging], lambda: bool(here.process_index == hanging))

    def run(gang: ProcessGroup) -> list[str]:
        said = []
        here.process_index = gang.process_index
        clock = clocks[gang.process_index]
        with AsyncCheckpointer(gang=gang, timeout_s=_PATIENCE_S, clock=clock) as checkpointer:
            for path in ("0", "1", "2"):
                try:
                    checkpointer.save(tmp_path / path, small_state())
                except GracepointError as error:
                    said.append(str(error))
            meeting.wait(_PATIENCE_S)
            goes_on.set()
            until_no_thread(f"the save of {tmp_path / '0'}")
            checkpointer.save(tmp_path / "3", small_state(3))
        return said

    said = in_gang(2, run)
    assert [len(errors) for errors in said] == [2, 2]
    for error in itertools.chain(*said):
        assert f"the save of {tmp_path / '0'} hangs" in error or "a background save failed: " in error
    assert "hangs" in said[1 - hanging][1]
    assert [path.name for path in tmp_path.iterdir() if "tmp" not in path.name] == ["3"]
    assert_same(checkpoint.restore(tmp_path / "3", small_state()), small_state(3))


def test_a_hint_does_not_keep_training_waiting_for_a_save_in_progress(tmp_path: Path, storage: SlowStorage) -> None:
    checkpointer = begun(tmp_path, storage)
    hastening = threading.Thread(target=checkpointer.hasten)
    hastening.start()
    hastening.join(_PATIENCE_S / 3)
    assert not hastening.is_alive()
    assert seen(checkpointer).state is SnapshotState.WRITING
    storage.bytes_per_s = math.inf
    checkpointer.close(_PATIENCE_S)


def test_a_hint_does_not_keep_training_waiting_for_storage_that_is_stuck(
    tmp_path: Path, storage: SlowStorage, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovedClock()
    checkpointer = engine(tmp_path, clock=clock)
    checkpointer.prepare(small_state())
    storage.bytes_per_s = 0.0
    storage.asked.clear()
    hastening = threading.Thread(target=checkpointer.hasten)
    hastening.start()
    assert storage.asked.wait(_PATIENCE_S)
    clock.ahead_s = 3.0
    hastening.join(_PATIENCE_S / 3)
    assert not hastening.is_alive()
    assert "the directory cannot be written to, and a disruption may be near" in caplog.text


def test_a_hint_does_not_keep_training_waiting_for_a_store_without_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, asked, answers = MovedClock(), threading.Event(), threading.Event()

    def repeated(path: PosixPath) -> None:  # as requests to a store that cannot be reached
        asked.set()
        while not answers.wait(0.01):
            if go_on := time_limit.current_limit():
                go_on()

    monkeypatch.setattr(PosixPath, "check_usable", repeated)
    hastening = threading.Thread(target=engine(tmp_path, clock=clock).hasten)
    hastening.start()
    assert asked.wait(_PATIENCE_S)
    clock.ahead_s = 3.0
    hastening.join(_PATIENCE_S / 3)
    has_ended = not hastening.is_alive()
    answers.set()
    hastening.join(_PATIENCE_S)
    assert has_ended
    assert "a disruption may be near: not done within 3.0 s" in caplog.text


def test_stopped_save_stops_in_all_processes_and_the_next_includes_all(tmp_path: Path, storage: SlowStorage) -> None:
    meeting = threading.Barrier(2)

    def run(gang: ProcessGroup) -> int:
        checkpointer = engine(tmp_path, gang)
        checkpointer.prepare(small_state())
        meeting.wait(_PATIENCE_S)
        storage.bytes_per_s = 0.0
        checkpointer.save_in_background(1, small_state(1), {})
        meeting.wait(_PATIENCE_S)
        checkpointer.executor.stop("there is no time")
        assert seen(checkpointer).state is SnapshotState.HELD
        meeting.wait(_PATIENCE_S)
        storage.bytes_per_s = math.inf
        saved = save(checkpointer, 2, small_state(2)).step
        checkpointer.close(_PATIENCE_S)
        return saved

    assert in_gang(2, run) == [2, 2]
    assert restored_step(tmp_path) == 2


def test_save_stopped_by_a_peer_fails_nothing_here(
    tmp_path: Path, storage: SlowStorage, caplog: pytest.LogCaptureFixture
) -> None:
    begun_by_both, stopped = threading.Barrier(2), threading.Event()

    def run(gang: ProcessGroup) -> None:
        checkpointer = engine(tmp_path, gang)
        checkpointer.prepare(small_state())
        begun_by_both.wait(_PATIENCE_S)
        storage.bytes_per_s = 0.0
        checkpointer.save_in_background(1, small_state(1), {})
        begun_by_both.wait(_PATIENCE_S)
        if gang.process_index == 0:
            checkpointer.executor.stop("a preemption, of which process 1 has not heard")
            storage.bytes_per_s = math.inf
            stopped.set()
        assert stopped.wait(_PATIENCE_S)
        checkpointer.save_in_background(2, small_state(2), {})
        checkpointer.close(_PATIENCE_S)

    in_gang(2, run)
    assert "a background save was stopped: step 1 is not committed" in caplog.text
    assert restored_step(tmp_path) == 2


def test_a_snapshot_whose_save_is_in_progress_is_promoted_by_finishing_it(tmp_path: Path, storage: SlowStorage) -> None:
    checkpointer = begun(tmp_path, storage)
    timer = threading.Timer(0.05, setattr, (storage, "bytes_per_s", math.inf))
    timer.start()
    assert promote(checkpointer) == (1, ["written", "durable", "committed"])
    timer.join()
    checkpointer.close(_PATIENCE_S)
    assert checkpointer.committed_step == restored_step(tmp_path) == 1


def test_a_snapshot_whose_save_failed_is_promoted_by_writing_it_once_more(
    tmp_path: Path, storage: SlowStorage, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = begun(tmp_path, storage)
    storage.errno = errno.ENOSPC
    with pytest.raises(SaveFailed, match="No space left on device"):
        checkpointer.executor.wait_until_finished(_PATIENCE_S)
    assert seen(checkpointer).state is SnapshotState.HELD
    storage.errno, storage.bytes_per_s = None, math.inf
    assert promote(checkpointer) == (1, ["written", "durable", "committed"])
    assert "the snapshot of step 1 is written once more" in caplog.text
    assert save(checkpointer, 2, small_state(2)).step == 2
    checkpointer.close(_PATIENCE_S)
    assert restored_step(tmp_path) == 2


def test_a_snapshot_older_than_a_committed_step_is_not_chosen(tmp_path: Path, storage: SlowStorage) -> None:
    checkpointer = begun(tmp_path, storage)
    checkpointer.executor.stop("a drill")
    storage.bytes_per_s = math.inf
    assert seen(checkpointer).state is SnapshotState.HELD
    assert save(checkpointer, 5, small_state(5)).step == 5
    now = Situation(
        step=25,
        left_s=13.0,
        state_bytes=6_000_000_000,
        process_count=1,
        drain_s=6.0,
        streamed_bytes_per_s=1e9,
        snapshot_bytes_per_s=1e9,
        snapshot=checkpointer.newest_snapshot,
        margin=1.25,
    )
    assert plan(now).step == 25  # which fits without the margin; the snapshot fits with it
    assert not must_choose(checkpointer.newest_snapshot)
    assert promote(checkpointer)[0] == 1  # as if it were told to
    assert checkpointer.committed_step == 5
    checkpointer.close(_PATIENCE_S)


def test_late_promotion_fails_and_processes_can_save_again(tmp_path: Path, storage: SlowStorage) -> None:
    def run(gang: ProcessGroup) -> str:
        checkpointer = begun(tmp_path, storage, gang)
        with pytest.raises(SaveFailed, match="the save of step 1 did not end within"):
            promote(checkpointer, timeout_s=0.0)
        checkpointer.executor.stop("the test goes on")
        storage.bytes_per_s = math.inf
        assert save(checkpointer, 2, small_state(2)).step == 2
        checkpointer.close(_PATIENCE_S)
        return "saved"

    assert outcomes_in_gang(1, run) == ["saved"]
    assert restored_step(tmp_path) == 2


def test_earlier_deadline_ends_a_running_save(tmp_path: Path, storage: SlowStorage) -> None:
    left_s = [3600.0]
    storage.bytes_per_s = 0.0

    def come_nearer() -> None:
        assert storage.asked.wait(_PATIENCE_S)
        left_s[0] = 0.0

    mover = threading.Thread(target=come_nearer)
    mover.start()
    with pytest.raises(SaveFailed, match=r"only 0 of \d+ files were written to .*/1\.gracepoint-tmp"):
        save(engine(tmp_path), 1, small_state(1), deadline=following(left_s))
    mover.join()


def test_a_deadline_never_moves_to_a_later_time() -> None:
    now_s, left_s = [100.0], [60.0]
    deadline = Deadline.following(lambda: left_s[0], lambda: now_s[0])
    left_s[0] = 10.0
    assert deadline.remaining_s() == 10.0
    left_s[0] = math.inf  # as where the epoch that it is of has ended
    now_s[0] += 4.0
    assert deadline.remaining_s() == 6.0
    deadline.cancel("there is no time")
    assert deadline.passed()
    assert deadline.ended == "before it was stopped: there is no time"


@dataclasses.dataclass(frozen=True)
class StopsAtTheFirstArray(Silent):
    """Has the deadline pass when the first array is in host memory."""

    left_s: list[float]

    def on_transfer_end(self, keypath: tuple[Any, ...]) -> None:
        self.left_s[0] = 0.0


def test_tensorstores_writes_end_with_the_deadline_too(tmp_path: Path) -> None:
    left_s = [3600.0]
    options = WriteOptions(express=False, callback=StopsAtTheFirstArray(left_s))
    with pytest.raises(SaveFailed, match=r"files were written to .*/1\.gracepoint-tmp.* within \d"):
        save(engine(tmp_path, options=options), 1, small_state(1), deadline=following(left_s))
    assert not list(tmp_path.glob("1*/done.*"))
