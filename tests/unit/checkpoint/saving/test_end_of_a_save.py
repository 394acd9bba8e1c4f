"""However a save ends, all processes that can say how say the same."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gracepoint.checkpoint import Saved
from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.operation import CommitOptions
from gracepoint.checkpoint.saving.part import PartStages
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.writing import chunk_writer
from gracepoint.checkpoint.writing.pool import WriteJob
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierFailed, BarrierTimeout, SaveFailed
from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.multihost.store import StoreUnavailable
from gracepoint.process_group import ProcessGroup, SingleProcess
from tests.unit.checkpoint.fakes.engine import assert_same, engine, outcomes_in_gang, restore, save, small_state
from tests.unit.checkpoint.fakes.moved_clock import MovedClock

#: A state that is the same in all processes.
NUMBERS = {"count": 7}


class Cut(SingleProcess):
    """One process of two, which cannot reach the coordination service any more."""

    process_count = 2

    def __init__(self, process_index: int) -> None:
        self.process_index = process_index

    def barrier(self, *arguments: Any, **options: Any) -> None:
        raise StoreUnavailable("UNAVAILABLE")

    def decide_in_turn(self, key: str, find: Callable[[], str], *, timeout_s: float) -> str:
        raise StoreUnavailable("UNAVAILABLE")


def messages(outcomes: list[Any]) -> list[str]:
    assert [type(outcome) for outcome in outcomes] == [SaveFailed] * len(outcomes), outcomes
    return [str(outcome) for outcome in outcomes]


def test_late_process_fails_like_the_waiting_one_and_the_step_stays(
    tmp_path: Path,
) -> None:
    gave_up = threading.Event()

    def run(gang: ProcessGroup) -> Any:
        clock = MovedClock()

        def on_stage(stage: str) -> None:
            if gang.process_index == 0 and stage == "durable":
                clock.ahead_s = 1000.0  # its time is over: it waits for nobody
            if gang.process_index == 1 and stage == "written":
                assert gave_up.wait(30)

        try:
            deadline = Deadline.after(30.0, clock)
            return save(engine(tmp_path, gang, clock=clock), 4, small_state(4), deadline=deadline, on_stage=on_stage)
        finally:
            if gang.process_index == 0:
                gave_up.set()

    early, late = messages(outcomes_in_gang(2, run))
    assert "process 1" in early
    assert early in late
    assert "was durable too late: the next start commits" in late
    assert not (tmp_path / "4").exists()
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert_same(restored.state, small_state(4))


def test_failed_commit_fails_all_and_the_next_start_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = PosixPath.put

    def full(path: PosixPath, data: bytes) -> None:
        if path.name == layout.MANIFEST:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(PosixPath, "put", full)
        outcomes = outcomes_in_gang(2, lambda gang: save(engine(tmp_path, gang), 4, small_state(4)))
    for message in messages(outcomes):
        assert "step 4 is durable and not committed" in message
        assert "No space left" in message
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert_same(restored.state, small_state(4))


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "not durable"])
def test_one_process_reads_the_records_of_all_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """The processes do not meet, for example as the last one to come has died."""
    calls: list[str] = []
    count_of_processes = 20  # in a small gang each reads all records
    met = threading.Barrier(count_of_processes)

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return real(*arguments, **options) and durable

        monkeypatch.setattr(owner, name, counted)

    class Apart(StoreProcessGroup):
        def barrier(self, key: str, **options: Any) -> None:
            if not key.endswith("/commit"):
                super().barrier(key, **options)
                return
            met.wait(60)
            raise BarrierTimeout("process 20 did not come", (20,))

    count(commit, "is_durable")
    count(RenameCommit, "finalize")
    store = InMemoryStore()

    def run(gang: ProcessGroup) -> Saved:
        apart = Apart(store, gang.process_index, gang.process_count)
        return save(engine(tmp_path, apart), 4, NUMBERS)

    outcomes = outcomes_in_gang(count_of_processes, run)
    if durable:
        assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
        assert sorted(calls) == ["finalize", "is_durable"]
    else:
        assert len(set(messages(outcomes))) == 1
        assert calls == ["is_durable"]


@pytest.mark.parametrize("finished", [True, False])
def test_a_process_that_reaches_nobody_goes_by_what_is_on_the_disk(tmp_path: Path, finished: bool) -> None:
    if finished:
        with pytest.raises(SaveFailed, match="UNAVAILABLE"):
            save(engine(tmp_path, Cut(1)), 4, small_state(4))
        assert save(engine(tmp_path, Cut(0)), 4, small_state(4)).step == 4
        assert restore(tmp_path, small_state()) is not None
    else:
        with pytest.raises(SaveFailed, match="UNAVAILABLE"):
            save(engine(tmp_path, Cut(0)), 4, small_state(4))
        assert not (tmp_path / "4").exists()


def test_save_whose_folder_was_removed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(engine(tmp_path), 1, small_state(1))
    real = chunk_writer.ChunkWriter.write

    def interrupted(self: chunk_writer.ChunkWriter, job: WriteJob, deadline: Deadline) -> Any:
        if job.folder.name.startswith("4."):
            # As for a process that was stopped for more than an hour: a later start has cleared its folder away.
            Path(job.folder).rename(tmp_path / "4.gracepoint-trash.job-0-a.1")
        return real(self, job, deadline)

    monkeypatch.setattr(chunk_writer.ChunkWriter, "write", interrupted)
    monkeypatch.setattr(RenameCommit, "quiet_s", 0.0)
    with pytest.raises(SaveFailed, match="was taken away while it was written"):
        save(engine(tmp_path), 4, small_state(4))
    assert not list(tmp_path.glob("4*/done.*"))
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert restored.step == 1


def test_any_number_of_writers_may_write_one_small_file_at_once(tmp_path: Path) -> None:
    """Also where host name and process id are the same, as for pods in the host's network: here they are."""
    path, errors = tmp_path / "file", []
    start = threading.Barrier(8)

    def run() -> None:
        start.wait(60)
        try:
            for _ in range(20):
                storage_path(path).put(b"contents")
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"contents"}


def test_a_small_file_goes_where_its_folder_is_renamed_to_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, renamed = tmp_path / "4.tmp", tmp_path / "4"
    folder.mkdir()
    real = os.replace

    def replaced(*arguments: Any, **options: Any) -> None:
        folder.rename(renamed)  # another process commits
        real(*arguments, **options)

    monkeypatch.setattr(os, "replace", replaced)
    storage_path(folder / "mark").put(b"contents")
    assert {file.name: file.read_bytes() for file in renamed.iterdir()} == {"mark": b"contents"}


def test_what_the_worker_of_a_process_that_failed_may_still_finish_stays(tmp_path: Path) -> None:
    class Worker:
        def wait(self, deadline: Deadline, on_stage: object) -> PartStages:
            return PartStages(written_s=0.0, durable_s=0.0, writing_s=0.0, chunk_bytes=0)

        def written_elsewhere(self) -> None:
            pass

    def failed(key: str, *, timeout_s: float, on_last: object) -> None:
        raise BarrierFailed("process 1 reported SaveFailed: it breaks off")

    executor, worker = engine(tmp_path).executor, Worker()
    save = executor.begin(Layout(storage_path(tmp_path)), 4, how=CommitOptions(barrier=failed))
    save.describe(*executor.planner.plan(small_state()), {})
    save.temporary.path.make_folder()
    with pytest.raises(SaveFailed, match="it breaks off"):
        save.run(cast(Any, worker), Deadline.after(30, time.monotonic), lambda stage: None, cast(Any, worker))
    assert save.temporary.path.exists()
