"""Snapshots beside the saves: which are taken, whose copy they send, and what they do to training if they fail.

A directory stands for the servers: for all that is tested here they are one more place of steps.
"""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving import memory_snapshots
from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings, MemorySnapshots
from gracepoint.checkpoint.saving.schedule import SaveSchedule
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.errors import CheckpointError
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    chunk_files,
    engine,
    in_gang,
    outcomes_in_gang,
    restore,
    small_state,
)
from tests.waiting import until

EVERY_STEP = SaveSchedule(every_steps=1)


def settings(root: Path, **changes: Any) -> MemorySettings:
    fields: dict[str, Any] = {"paths": Layout(storage_path(root / "memory")), "schedule": EVERY_STEP}
    return MemorySettings(**fields | changes)


def taken(checkpointer: StepCheckpointer) -> MemorySnapshots:
    assert checkpointer.memory is not None
    return checkpointer.memory


def pass_step(checkpointer: StepCheckpointer, step: int, state: Any) -> bool:
    """Passes a step as a session does. Returns whether a snapshot was begun."""
    memory = taken(checkpointer)
    if not memory.interval.is_due(step) or not memory.begins(step, sync_point=step):
        return False
    memory.begin(step, state, {"rng": step})
    return True


def wait(checkpointer: StepCheckpointer) -> int | None:
    """Waits for the snapshot in progress, and returns the newest step that is safe."""
    memory = taken(checkpointer)
    until(lambda: not memory.busy, "the end of the snapshot")
    return None if memory.newest is None else memory.newest.step


def test_snapshot_is_a_step_in_memory_and_touches_no_storage(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path / "storage", memory=settings(tmp_path))
    state = small_state(3)
    assert pass_step(checkpointer, 5, state)
    assert wait(checkpointer) == 5
    newest = taken(checkpointer).newest
    assert newest is not None
    assert (newest.copies, newest.part_bytes > 0) == (2, True)
    assert not (tmp_path / "storage").exists()
    found = restore(tmp_path / "memory", small_state())
    assert found is not None
    assert (found.step, found.host_state) == (5, {"rng": 5})
    assert_same(found.state, state)


def test_snapshots_come_by_their_own_interval(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path, memory=settings(tmp_path, schedule=SaveSchedule(every_steps=3)))
    begun = [step for step in range(1, 8) if pass_step(checkpointer, step, small_state(step)) and wait(checkpointer)]
    assert begun == [3, 6]


def test_what_is_older_than_the_newest_safe_step_is_dropped(tmp_path: Path) -> None:
    dropped: list[int] = []
    checkpointer = engine(tmp_path, memory=settings(tmp_path, drop_before=dropped.append))
    for step in (1, 2):
        assert pass_step(checkpointer, step, small_state(step))
        assert wait(checkpointer) == step
    assert dropped == [1, 2]


def test_servers_that_cannot_drop_cost_no_snapshot(tmp_path: Path) -> None:
    def away(step: int) -> None:
        raise OSError("no answer")

    checkpointer = engine(tmp_path, memory=settings(tmp_path, drop_before=away))
    assert pass_step(checkpointer, 1, small_state())
    assert wait(checkpointer) == 1
    assert taken(checkpointer).skips.count == 0


def test_copy_of_a_save_that_began_at_the_same_step_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_copy(*arguments: Any) -> None:
        raise AssertionError("the state was copied from the devices twice")

    monkeypatch.setattr(memory_snapshots, "Transfer", another_copy)
    checkpointer, state = engine(tmp_path / "storage", memory=settings(tmp_path)), small_state(4)
    checkpointer.save_in_background(5, state, {})
    assert pass_step(checkpointer, 5, state)
    checkpointer.wait_until_finished()
    assert wait(checkpointer) == 5
    for root in ("storage", "memory"):
        found = restore(tmp_path / root, small_state())
        assert found is not None
        assert_same(found.state, state)


def test_snapshots_go_on_while_a_save_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, goes_on = hanging(monkeypatch, "storage", "done.process_0.json")
    checkpointer = engine(tmp_path / "storage", memory=settings(tmp_path))
    checkpointer.save_in_background(5, small_state(5), {})
    assert slow.wait(30)
    assert pass_step(checkpointer, 5, small_state(5))
    assert wait(checkpointer) == 5
    assert pass_step(checkpointer, 6, small_state(6))
    assert wait(checkpointer) == 6
    goes_on.set()
    checkpointer.wait_until_finished()
    for root, step in (("storage", 5), ("memory", 6)):
        found = restore(tmp_path / root, small_state())
        assert found is not None
        assert found.step == step
        assert_same(found.state, small_state(step))


def hanging(monkeypatch: pytest.MonkeyPatch, root: str, name: str) -> tuple[threading.Event, threading.Event]:
    """Has the first write of a file hang. Returns what says that it does, and what ends it."""
    hangs, goes_on = threading.Event(), threading.Event()
    put = PosixPath.put

    def hang(path: PosixPath, data: bytes) -> None:
        if path.name == name and f"/{root}/" in str(path) and not hangs.is_set():
            hangs.set()
            assert goes_on.wait(60)
        put(path, data)

    monkeypatch.setattr(PosixPath, "put", hang)
    return hangs, goes_on


def test_snapshot_in_progress_anywhere_is_skipped_by_all_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = hanging(monkeypatch, "memory", "done.process_1.json")
    turn = threading.Barrier(3, timeout=60)

    def run(gang: ProcessGroup) -> tuple[Any, ...]:
        checkpointer = engine(tmp_path / "storage", gang, memory=settings(tmp_path))
        begun = [pass_step(checkpointer, 1, small_state(1))]
        assert hangs.wait(30)
        begun += [pass_step(checkpointer, 2, small_state(2)), pass_step(checkpointer, 3, small_state(3))]
        turn.wait()
        goes_on.set()
        assert wait(checkpointer) == 1
        begun.append(pass_step(checkpointer, 4, small_state(4)))
        skips = taken(checkpointer).skips
        return begun, wait(checkpointer), skips.count, "the snapshot of step 1 is still sent" in skips.reason

    assert in_gang(3, run) == [([True, False, False, True], 4, 2, True)] * 3


def test_part_that_cannot_be_sent_leaves_all_without_this_snapshot_and_the_next_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, failed = PosixPath.put, threading.Event()

    def fail(path: PosixPath, data: bytes) -> None:
        if path.name == "done.process_1.json" and not failed.is_set():
            failed.set()
            raise OSError("the server is gone")
        put(path, data)

    monkeypatch.setattr(PosixPath, "put", fail)

    def run(gang: ProcessGroup) -> tuple[Any, ...]:
        checkpointer = engine(tmp_path / "storage", gang, memory=settings(tmp_path))
        assert pass_step(checkpointer, 1, small_state(1))
        first = wait(checkpointer)
        assert pass_step(checkpointer, 2, small_state(2))
        skips = taken(checkpointer).skips
        return first, wait(checkpointer), skips.count, "the server is gone" in skips.reason

    assert in_gang(2, run) == [(None, 2, 1, True)] * 2


def test_state_that_cannot_be_saved_costs_the_snapshot_and_not_the_training(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path, memory=settings(tmp_path))
    assert pass_step(checkpointer, 1, {"w": object()})
    assert taken(checkpointer).skips.count == 1
    assert "object" in taken(checkpointer).skips.reason
    assert pass_step(checkpointer, 2, small_state())
    assert wait(checkpointer) == 2


def test_no_snapshot_is_begun_without_servers(tmp_path: Path) -> None:
    words = ["no snapshot server has room", ""]
    checkpointer = engine(tmp_path, memory=settings(tmp_path, why_not=lambda: words.pop(0)))
    assert not pass_step(checkpointer, 1, small_state())
    assert taken(checkpointer).skips == memory_snapshots.Skips(1, "no snapshot server has room")
    assert pass_step(checkpointer, 2, small_state())
    assert wait(checkpointer) == 2


def test_save_that_needs_the_memory_ends_the_snapshot_that_is_sent_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = hanging(monkeypatch, "memory", "done.process_0.json")
    checkpointer = engine(tmp_path / "storage", memory=settings(tmp_path))
    checkpointer.save_in_background(1, small_state(1), {})
    assert pass_step(checkpointer, 1, small_state(1))
    assert hangs.wait(30)
    ends = threading.Timer(0.2, goes_on.set)
    ends.start()
    checkpointer.save_in_background(2, small_state(2), {})
    checkpointer.wait_until_finished()
    found = restore(tmp_path / "storage", small_state())
    assert found is not None
    assert_same(found.state, small_state(2))
    wait(checkpointer)
    assert pass_step(checkpointer, 3, small_state(3))
    assert wait(checkpointer) == 3
    found = restore(tmp_path / "memory", small_state())
    assert found is not None
    assert_same(found.state, small_state(3))


@pytest.mark.parametrize(
    ("in_background", "copies", "words"),
    [
        pytest.param(True, 2, "saves in the background and snapshots in the memory of nodes need", id="both"),
        pytest.param(False, 1, "snapshots in the memory of nodes need", id="snapshots alone"),
    ],
)
def test_memory_for_snapshots_is_checked_at_the_start_and_refused_with_numbers(
    tmp_path: Path, in_background: bool, copies: int, words: str
) -> None:
    state = small_state()
    part_bytes = state["w"].nbytes + state["b"].nbytes + 8
    limit = copies * part_bytes - 1
    checkpointer = engine(tmp_path, memory=settings(tmp_path), host_memory_limit_bytes=limit)
    with pytest.raises(
        CheckpointError, match=f"{words} {copies * part_bytes} bytes .* allows {limit}: .* left out|out"
    ):
        checkpointer.prepare(state, in_background=in_background)
    enough = engine(tmp_path, memory=settings(tmp_path), host_memory_limit_bytes=limit + 1)
    assert enough.prepare(state, in_background=in_background) == part_bytes


def test_end_of_training_ends_the_snapshot_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, goes_on = hanging(monkeypatch, "memory", "done.process_0.json")
    checkpointer = engine(tmp_path / "storage", memory=settings(tmp_path))
    assert pass_step(checkpointer, 1, small_state(1))
    assert hangs.wait(30)
    ends = threading.Timer(0.2, goes_on.set)
    ends.start()
    checkpointer.close(30)
    assert not taken(checkpointer).busy


def test_step_in_memory_that_is_newer_than_all_stored_ones_is_restored_and_then_stored(tmp_path: Path) -> None:
    first = engine(tmp_path / "storage", memory=settings(tmp_path))
    first.save_in_background(4, small_state(4), {"rng": 4})
    first.wait_until_finished()
    assert pass_step(first, 5, small_state(5))
    assert wait(first) == 5
    then = engine(tmp_path / "storage", attempt="job-1-b", memory=settings(tmp_path))
    found = then.restore(small_state(), timeout_s=60)
    assert found is not None
    assert (found.step, found.from_memory, found.host_state) == (5, True, {"rng": 5})
    assert_same(found.state, small_state(5))
    assert then.committed_step is None
    then.save_in_background(5, found.state, {})
    then.wait_until_finished()
    stored = restore(tmp_path / "storage", small_state())
    assert stored is not None
    assert stored.step == 5


def test_stored_step_is_restored_if_it_is_as_new(tmp_path: Path) -> None:
    first = engine(tmp_path / "storage", memory=settings(tmp_path))
    assert pass_step(first, 5, small_state(5))
    assert wait(first) == 5
    first.save_in_background(5, small_state(5), {})
    first.wait_until_finished()
    then = engine(tmp_path / "storage", attempt="job-1-b", memory=settings(tmp_path))
    found = then.restore(small_state(), timeout_s=60)
    assert found is not None
    assert (found.step, found.from_memory, then.committed_step) == (5, False, 5)


@pytest.mark.parametrize("harm", ["damaged", "a part is missing", "no server answers"])
def test_snapshot_that_cannot_be_restored_leaves_the_stored_step(
    tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(gang: ProcessGroup) -> None:
        first = engine(tmp_path / "storage", gang, memory=settings(tmp_path))
        first.save_in_background(4, small_state(4), {})
        first.wait_until_finished()
        assert pass_step(first, 5, small_state(5))
        assert wait(first) == 5

    in_gang(2, run)
    step = tmp_path / "memory" / "5"
    if harm == "damaged":
        chunk = chunk_files(tmp_path / "memory", 5, "w")[0]
        data = bytearray(chunk.read_bytes())
        data[-1] ^= 1
        chunk.write_bytes(data)
    elif harm == "a part is missing":  # it was still sent when the processes died
        step.rename(tmp_path / "memory" / "5.gracepoint-tmp.job-0-a.1")
        (tmp_path / "memory" / "5.gracepoint-tmp.job-0-a.1" / "done.process_1.json").unlink()
    else:
        children = PosixPath.children

        def away(path: PosixPath) -> Any:
            if str(path).endswith("/memory"):
                raise ConnectionRefusedError("no server answers")
            return children(path)

        monkeypatch.setattr(PosixPath, "children", away)

    def again(gang: ProcessGroup) -> tuple[Any, ...]:
        then = engine(tmp_path / "storage", gang, attempt="job-1-b", memory=settings(tmp_path))
        found = then.restore(small_state(), timeout_s=60)
        assert found is not None
        assert_same(found.state, small_state(4))
        return found.step, found.from_memory, then.committed_step

    assert in_gang(2, again) == [(4, False, 4)] * 2


def test_snapshot_that_was_complete_when_all_processes_died_is_restored(tmp_path: Path) -> None:
    first = engine(tmp_path / "storage", memory=settings(tmp_path))
    assert pass_step(first, 5, small_state(5))
    assert wait(first) == 5
    (tmp_path / "memory" / "5").rename(tmp_path / "memory" / "5.gracepoint-tmp.job-0-a.1")
    then = engine(tmp_path / "storage", attempt="job-1-b", memory=settings(tmp_path))
    found = then.restore(small_state(), timeout_s=60)
    assert found is not None
    assert (found.step, found.from_memory) == (5, True)


def storage_is_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Has the storage away until the event is set."""
    back, make = threading.Event(), PosixPath.make_folder_durably

    def away(path: PosixPath) -> None:
        if str(path).startswith(str(root)) and not back.is_set():
            raise TimeoutError(errno.ETIMEDOUT, "as the storage says")
        make(path)

    monkeypatch.setattr(PosixPath, "make_folder_durably", away)
    return back


def test_start_without_storage_trains_from_memory_and_stores_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = tmp_path / "storage"

    def run(gang: ProcessGroup) -> None:
        first = engine(storage, gang, memory=settings(tmp_path))
        assert pass_step(first, 5, small_state(5))
        assert wait(first) == 5

    in_gang(2, run)
    back = storage_is_away(storage, monkeypatch)

    def again(gang: ProcessGroup) -> tuple[Any, ...]:
        then = engine(storage, gang, attempt="job-1-b", memory=settings(tmp_path))
        claimed = then.access.claim_if_there("job-a", timeout_s=60, away_s=60, answer_s=5)
        found = then.restore(small_state(), timeout_s=60)
        assert found is not None
        assert_same(found.state, small_state(5))
        then.prepare(found.state)
        touched = storage.exists()
        with pytest.raises(CheckpointError, match="as the storage says"):
            then.save_in_background(6, small_state(6), {})
        gang.barrier("tried", timeout_s=60)
        back.set()
        then.save_in_background(7, small_state(7), {})
        then.wait_until_finished()
        holds = then.access.holds_lease
        then.close(60)
        return claimed, found.step, found.from_memory, touched, holds

    assert in_gang(2, again) == [(False, 5, True, False, True), (False, 5, True, False, False)]
    found = restore(storage, small_state())
    assert found is not None
    assert found.step == 7


def test_start_without_storage_and_without_a_snapshot_waits_for_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = storage_is_away(tmp_path / "storage", monkeypatch)
    then = engine(tmp_path / "storage", memory=settings(tmp_path))
    assert not then.access.claim_if_there("job-a", timeout_s=60, away_s=60, answer_s=5)
    comes = threading.Timer(0.2, back.set)
    comes.start()
    assert then.restore(small_state(), timeout_s=60) is None
    assert then.access.holds_lease
    then.close(60)


def test_process_at_another_step_is_found_at_the_snapshot(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> bool:
        checkpointer = engine(tmp_path / "storage", gang, memory=settings(tmp_path))
        return taken(checkpointer).begins(1 + gang.process_index, sync_point=1)

    outcomes = outcomes_in_gang(2, run)
    assert sum("step 1 at sync point 1" in str(outcome) and "step 2" in str(outcome) for outcome in outcomes) == 1
