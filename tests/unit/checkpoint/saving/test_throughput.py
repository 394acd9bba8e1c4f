"""How fast saves have been is known again after a restart."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.schedule import Throughput, Way
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from tests.unit.checkpoint.fakes.engine import engine, save, small_state
from tests.unit.checkpoint.fakes.thread_limit import refuse_threads

NAME = ".gracepoint-throughput"
WRITTEN_S = 30.0


def known(root: Path, process_count: int = 1) -> Throughput:
    throughput = Throughput(storage_path(root / NAME), writes=False, process_count=process_count)
    throughput.read()
    return throughput


def test_the_median_of_the_latest_saves_of_each_way_counts(tmp_path: Path) -> None:
    throughput = Throughput(storage_path(tmp_path / NAME), writes=True)
    for duration_s in (1.0, 1.0, 1.0, 2.0, 4.0, 5.0, 4.0):
        throughput.learn(Way.SNAPSHOT, 100, duration_s)
    throughput.learn(Way.STREAMED, 100, 0.5)
    throughput.finish(WRITTEN_S)
    assert (throughput.snapshot_bytes_per_s, throughput.streamed_bytes_per_s) == (25.0, 200.0)
    again = known(tmp_path)
    assert (again.snapshot_bytes_per_s, again.streamed_bytes_per_s) == (25.0, 200.0)


def test_fewer_processes_are_expected_slower_and_more_no_faster(tmp_path: Path) -> None:
    Throughput(storage_path(tmp_path / NAME), writes=True, process_count=4).learn(Way.SNAPSHOT, 100, 1.0)
    assert [known(tmp_path, count).snapshot_bytes_per_s for count in (2, 4, 8)] == [50.0, 100.0, 100.0]


def test_throughput_is_learnt_from_saves_and_kept_for_the_next_start(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path, remember_throughput=True)
    checkpointer.prepare(small_state())
    checkpointer.save_in_background(1, small_state(1), {})
    checkpointer.executor.wait_until_finished(30)
    assert known(tmp_path).snapshot_bytes_per_s
    assert known(tmp_path).streamed_bytes_per_s is None
    save(checkpointer, 2, small_state(2))
    checkpointer.close(30)
    assert known(tmp_path).streamed_bytes_per_s
    again = engine(tmp_path, attempt="job-1-b", remember_throughput=True)
    again.prepare(small_state())
    assert again.throughput.streamed_bytes_per_s == known(tmp_path).streamed_bytes_per_s


def test_an_engine_that_was_not_asked_to_remember_leaves_no_file(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path)
    save(checkpointer, 1, small_state(1))
    checkpointer.close(30)
    assert not (tmp_path / NAME).exists()
    assert checkpointer.throughput.streamed_bytes_per_s


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff{", id="no text"),
        pytest.param(b"[1]", id="no object"),
        pytest.param(b'{"version": 2, "bytes_per_s": {}}', id="another version"),
        pytest.param(b'{"version": 1, "bytes_per_s": {"streamed": [1]}}', id="a way is missing"),
        pytest.param(b'{"version": 1, "bytes_per_s": {"streamed": [0], "snapshot": []}}', id="no rate"),
        pytest.param(b'{"version": 1, "bytes_per_s": {"streamed": ["fast"], "snapshot": []}}', id="no number"),
        pytest.param(b'{"version": 1, "bytes_per_s": {"streamed": {}, "snapshot": []}}', id="no list"),
        pytest.param(
            b'{"version": 1, "processes": 0, "bytes_per_s": {"streamed": [1], "snapshot": []}}', id="no processes"
        ),
    ],
)
def test_a_damaged_file_is_reported_and_written_again(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_bytes(data)
    throughput = Throughput(storage_path(tmp_path / NAME), writes=True)
    throughput.read()
    assert f"{tmp_path / NAME} cannot be read" in caplog.text
    assert throughput.streamed_bytes_per_s is None
    throughput.learn(Way.SNAPSHOT, 100, 2.0)
    assert known(tmp_path).snapshot_bytes_per_s == 50.0


def test_after_an_emergency_nobody_waits_for_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()

    put = PosixPath.put

    def slow(path: PosixPath, data: bytes) -> None:
        hangs.wait(WRITTEN_S)
        put(path, data)

    monkeypatch.setattr(PosixPath, "put", slow)
    throughput = Throughput(storage_path(tmp_path / NAME), writes=True)
    throughput.learn(Way.STREAMED, 100, 2.0)
    assert throughput.streamed_bytes_per_s == 50.0
    assert not (tmp_path / NAME).exists()
    hangs.set()
    throughput.finish(WRITTEN_S)
    assert known(tmp_path).streamed_bytes_per_s == 50.0


def test_a_file_that_cannot_be_written_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    throughput = Throughput(storage_path(tmp_path / "no folder" / NAME), writes=True)
    throughput.learn(Way.STREAMED, 100, 2.0)
    throughput.finish(WRITTEN_S)
    assert throughput.streamed_bytes_per_s == 50.0
    assert "what a save took is not remembered" in caplog.text


def test_a_save_needs_no_thread_to_write_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = engine(tmp_path, remember_throughput=True)
    checkpointer.prepare(small_state())
    with monkeypatch.context() as patched:
        refuse_threads(patched)
        save(checkpointer, 1, small_state(1))
    assert checkpointer.committed_step == 1
    assert checkpointer.throughput.streamed_bytes_per_s
    assert f"what a save took is not remembered: no thread writes {tmp_path / NAME}" in caplog.text
    save(checkpointer, 2, small_state(2))
    checkpointer.close(WRITTEN_S)
    assert len(json.loads((tmp_path / NAME).read_text())["bytes_per_s"]["streamed"]) == 2


def test_only_the_process_that_is_to_writes_the_file(tmp_path: Path) -> None:
    Throughput(storage_path(tmp_path / NAME), writes=False).learn(Way.STREAMED, 100, 2.0)
    assert not (tmp_path / NAME).exists()


def test_nothing_is_learnt_from_a_state_without_bytes(tmp_path: Path) -> None:
    throughput = Throughput(storage_path(tmp_path / NAME), writes=True)
    throughput.learn(Way.STREAMED, 0, 1.0)
    assert throughput.streamed_bytes_per_s is None


def test_the_file_is_left_alone_where_old_probes_are_cleared_away(tmp_path: Path) -> None:
    throughput = Throughput(storage_path(tmp_path / NAME), writes=True)
    throughput.learn(Way.SNAPSHOT, 100, 2.0)
    (tmp_path / ".gracepoint-probe.job-0-a.0").write_bytes(b"")
    (tmp_path / f".{NAME}.partial-0123456789abcdef").write_bytes(b"{")  # its process ended meanwhile
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    commit.give_up_old(Layout(storage_path(tmp_path)), attempt="job-1-b", older_than_s=1.0)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert json.loads((tmp_path / NAME).read_text())["version"] == 1
