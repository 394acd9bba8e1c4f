"""Saves that a worker process writes, and those that threads of this process write in its place."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gracepoint.async_calls import worker as trainer_death
from gracepoint.async_calls.worker import run_last
from gracepoint.async_calls.worker_process import CallFailed
from gracepoint.checkpoint import SaveFailed, WriteOptions, latest_step
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.options import Silent
from gracepoint.checkpoint.saving import save_worker
from gracepoint.checkpoint.saving.extras import SaveExtras
from gracepoint.checkpoint.saving.host_snapshot import Transfer
from gracepoint.checkpoint.saving.operation import SaveOperation
from gracepoint.checkpoint.saving.save_worker import SaveBoard
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.writing.pool import Starvation
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, CheckpointNotFound, SettingsError
from gracepoint.threads import Ending
from tests.leftovers import is_alive
from tests.object_stores.fixtures import STORES
from tests.object_stores.servers import Bucket
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, rich_state, save, small_state
from tests.unit.checkpoint.fakes.failures import DyingGang
from tests.unit.checkpoint.fakes.transfer_recorder import Recorder
from tests.waiting import until

WORKER = WriteOptions(writer="worker")


@pytest.fixture
def made() -> Iterator[Callable[..., StepCheckpointer]]:
    """Makes engines with a worker. At the end they are closed, and their workers have ended."""
    engines: list[StepCheckpointer] = []

    def make(root: Path | str, options: WriteOptions = WORKER, **arguments: Any) -> StepCheckpointer:
        engines.append(engine(root, options=options, **arguments))
        return engines[-1]

    yield make
    left = [pid for each in engines for pid in worker_of(each)]
    for each in engines:
        each.abandon("the test is over", timeout_s=30)
    until(lambda: not any(is_alive(pid) for pid in left), f"the workers {left} to end")


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[SaveOperation]:
    """The parts that are handed over to a worker from here on."""
    parts: list[Any] = []
    real = save_worker.SaveWorker.hand_over

    def hand_over(self: Any, part: Any, *arguments: Any, **keywords: Any) -> Any:
        parts.append(part)
        return real(self, part, *arguments, **keywords)

    monkeypatch.setattr(save_worker.SaveWorker, "hand_over", hand_over)
    return parts


def worker_of(checkpointer: StepCheckpointer) -> list[int]:
    return checkpointer.executor.worker_process_ids


@pytest.mark.integration
@pytest.mark.parametrize(
    "options", [{}, {"use_ocdbt": True}, {"compression": "zstd", "use_zarr3": True}], ids=["files", "ocdbt", "zstd"]
)
def test_a_worker_writes_periodic_and_emergency_saves(
    tmp_path: Path, made: Callable[..., StepCheckpointer], handed: list[SaveOperation], options: dict[str, Any]
) -> None:
    state, checkpointer = rich_state(), made(tmp_path, WriteOptions(writer="worker", **options))
    checkpointer.prepare(state, in_background=False)  # reserves memory all the same
    (worker,) = worker_of(checkpointer)
    checkpointer.save_in_background(1, state, {"data": 1})
    checkpointer.executor.wait_until_finished(60)
    stages: list[str] = []
    save(checkpointer, 2, state, {"data": 2}, on_stage=stages.append)
    assert stages == ["written", "durable", "committed"]
    assert len(handed) == 2
    assert worker_of(checkpointer) == [worker]
    restored = restore(tmp_path, state)
    assert restored is not None
    assert (restored.step, restored.host_state) == (2, {"data": 2})
    assert_same(restored.state, state)


def test_a_worker_writes_to_an_object_store(
    bucket: Bucket, made: Callable[..., StepCheckpointer], handed: list[SaveOperation]
) -> None:
    state, root = rich_state(), f"{bucket.uri}/run"
    checkpointer = made(root)
    checkpointer.prepare(state)
    checkpointer.save_in_background(1, state, {})
    checkpointer.executor.wait_until_finished(60)
    restored = restore(root, state)
    assert restored is not None
    assert_same(restored.state, state)
    assert len(handed) == 1


@pytest.mark.integration
def test_the_state_may_change_when_the_save_returns(tmp_path: Path, made: Callable[..., StepCheckpointer]) -> None:
    state = {"w": np.arange(1 << 18, dtype=np.float32)}
    checkpointer = made(tmp_path)
    checkpointer.save_in_background(1, state, {})
    state["w"][:] = 0
    checkpointer.executor.wait_until_finished(60)
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, {"w": np.arange(1 << 18, dtype=np.float32)})


@pytest.mark.integration
def test_a_worker_that_was_killed_is_replaced(
    tmp_path: Path, made: Callable[..., StepCheckpointer], handed: list[SaveOperation]
) -> None:
    checkpointer = made(tmp_path)
    checkpointer.prepare(small_state())
    (worker,) = worker_of(checkpointer)
    os.kill(worker, signal.SIGKILL)
    for step in (1, 2):
        checkpointer.save_in_background(step, small_state(step), {})
        checkpointer.executor.wait_until_finished(60)
    assert len(handed) == 2
    assert (tmp_path / "2").exists()
    assert worker not in worker_of(checkpointer)


@pytest.mark.integration
def test_a_save_is_written_by_threads_if_none_reads_a_workers_answers(
    tmp_path: Path,
    made: Callable[..., StepCheckpointer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "gracepoint-async-worker":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    checkpointer = made(tmp_path)
    checkpointer.prepare(small_state())
    save(checkpointer, 1, small_state(1))
    assert checkpointer.committed_step == 1
    assert "the worker process does not take the save of step 1, a thread writes it: no thread reads" in caplog.text


@pytest.mark.integration
@pytest.mark.parametrize("writer", ["thread", "worker"])
def test_the_bytes_of_an_emergency_save_show_while_it_runs(
    tmp_path: Path, made: Callable[..., StepCheckpointer], writer: str
) -> None:
    checkpointer = made(tmp_path, WriteOptions(writer=writer))
    checkpointer.prepare(small_state())
    seen: list[int] = []
    saved = save(
        checkpointer, 1, small_state(1), on_stage=lambda stage: seen.append(checkpointer.executor.written_bytes)
    )
    assert seen == [saved.bytes] * 3
    assert checkpointer.executor.written_bytes == 0


@pytest.mark.integration
def test_an_error_of_the_worker_fails_the_save(tmp_path: Path, made: Callable[..., StepCheckpointer]) -> None:
    checkpointer = made(tmp_path / "root")
    checkpointer.prepare(small_state())
    os.rmdir(tmp_path / "root")
    (tmp_path / "root").touch()
    checkpointer.save_in_background(1, small_state(), {})
    with pytest.raises(SaveFailed, match="step 1 was not written to .*Not a directory"):
        checkpointer.executor.wait_until_finished(60)


@pytest.mark.integration
def test_a_store_of_this_process_is_written_by_threads(
    made: Callable[..., StepCheckpointer], handed: list[SaveOperation]
) -> None:
    checkpointer = made("memory://of-a-worker/root")
    checkpointer.prepare(small_state())
    checkpointer.save_in_background(1, small_state(), {})
    checkpointer.executor.wait_until_finished(60)
    save(checkpointer, 2, small_state())
    assert checkpointer.committed_step == 2
    assert handed == []


def test_leaves_copied_in_the_background_are_written_by_threads(
    tmp_path: Path, made: Callable[..., StepCheckpointer]
) -> None:
    class Later(Silent):
        def key_priority(self, keypath: Any) -> Any:
            from gracepoint.checkpoint import TransferPriority

            return TransferPriority.ASYNCHRONOUS_PRIORITIZED

    options = WriteOptions(writer="worker", device_host_max_bytes=1 << 20, callback=Later())
    checkpointer = made(tmp_path, options)
    checkpointer.save_in_background(1, small_state(), {})
    checkpointer.executor.wait_until_finished(60)
    assert worker_of(checkpointer) == []
    assert (tmp_path / "1").exists()


@pytest.mark.integration
@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "in the background"])
def test_callbacks_hear_of_what_the_worker_wrote(
    tmp_path: Path, made: Callable[..., StepCheckpointer], waits: bool
) -> None:
    recorder = Recorder()
    checkpointer = made(tmp_path, WriteOptions(writer="worker", callback=recorder))
    checkpointer.prepare(small_state())
    if waits:
        save(checkpointer, 1, small_state())
    else:
        checkpointer.save_in_background(1, small_state(), {})
        checkpointer.executor.wait_until_finished(60)
        newest = checkpointer.newest_snapshot
        assert newest is not None
        assert newest.left_bytes == 0
    assert len(worker_of(checkpointer)) == 1
    assert sorted(recorder.names("transferred")) == sorted(recorder.names("written")) == ["b", "count", "w"]


@pytest.mark.integration
def test_the_worker_ends_with_its_engine(tmp_path: Path, made: Callable[..., StepCheckpointer]) -> None:
    checkpointer = made(tmp_path)
    checkpointer.prepare(small_state())
    (worker,) = worker_of(checkpointer)
    checkpointer.close(30)
    until(lambda: not is_alive(worker), "the worker to end")


def staged(root: Path | str, process: int = 0, count: int = 1) -> Callable[..., SaveBoard]:
    """Returns a function that writes step 1 of one process as its worker does, in this process."""
    checkpointer = engine(root, DyingGang(process, count), options=WORKER)
    executor = checkpointer.executor
    operation = executor.begin(Layout(storage_path(root)), 1, extras=SaveExtras(note="for gpt-1"))
    leaves, prepared = executor.planner.plan(small_state())
    operation.describe(leaves, prepared, {})
    snapshot = executor.planner.snapshot(leaves, prepared, operation.key)
    transfer = Transfer(leaves, prepared.specs, prepared.plan, WORKER, snapshot)
    arena, part = snapshot.arena, operation.part()
    assert transfer.copied is not None
    assert transfer.filled is not None
    assert arena is not None
    form = pickle.dumps(save_worker.staged_form(part, transfer.copied, snapshot))
    generation = transfer.filled.generation

    def write(*, cancelled: bool = False, urgent: bool = False) -> SaveBoard:
        board = SaveBoard()
        if cancelled:
            board.cancel()
        if urgent:
            board.hurry()
        save_worker.write_handed(part.without_specs(), form, arena.block, generation, board.block, WORKER, 30)
        return board

    return write


@pytest.mark.parametrize("urgent", [False, True], ids=["while training goes on", "while training waits"])
def test_the_worker_leaves_the_cpu_to_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urgent: bool) -> None:
    policies: set[int] = set()
    monkeypatch.setattr(SaveBoard, "add_done", lambda *_: policies.add(os.sched_getscheduler(0)))
    # Beside busy processes the writers may truly be starved, and then they stop giving way.
    monkeypatch.setattr(Starvation, "look", lambda *_, **__: False)
    board = staged(tmp_path)(urgent=urgent)
    assert board.reached == ("written", "durable")
    assert policies == {os.sched_getscheduler(0) if urgent else os.SCHED_IDLE}


def test_the_worker_does_not_leave_the_cpu_to_dead_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.close()
        monkeypatch.setattr(trainer_death, "_died", threading.Event())
        trainer_death.wait_until_orphan(ours, None)
        policies: set[int] = set()
        monkeypatch.setattr(SaveBoard, "add_done", lambda *_: policies.add(os.sched_getscheduler(0)))
        assert staged(tmp_path)().reached == ("written", "durable")
    assert policies == {os.sched_getscheduler(0)}


@pytest.mark.integration
def test_a_save_is_urgent_once_somebody_waits_for_it(tmp_path: Path, made: Callable[..., StepCheckpointer]) -> None:
    checkpointer = made(tmp_path)
    checkpointer.prepare(small_state())
    (worker,) = worker_of(checkpointer)
    os.kill(worker, signal.SIGSTOP)
    checkpointer.save_in_background(1, small_state(), {})
    newest = checkpointer.executor.newest
    assert newest is not None
    assert newest.handed is not None
    assert not newest.handed.urgent
    assert checkpointer.executor.is_busy(0.0)
    assert newest.handed.urgent
    os.kill(worker, signal.SIGCONT)
    checkpointer.executor.wait_until_finished(60)


@pytest.mark.integration
def test_an_emergency_save_is_urgent_at_once(
    tmp_path: Path, made: Callable[..., StepCheckpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    urgent: list[bool] = []
    real = save_worker.SaveWorker.hand_over

    def hand_over(*arguments: Any, **keywords: Any) -> Any:
        handed = real(*arguments, **keywords)
        assert handed is not None
        urgent.append(handed.urgent)
        return handed

    monkeypatch.setattr(save_worker.SaveWorker, "hand_over", hand_over)
    checkpointer = made(tmp_path)
    checkpointer.prepare(small_state(), in_background=False)  # reserves memory
    save(checkpointer, 1, small_state())
    assert urgent == [True]


def session_nice(pid: int, without_sessions: int) -> int:
    """The niceness of a process's session, where the kernel weighs sessions."""
    autogroup = Path(f"/proc/{pid}/autogroup")
    return int(autogroup.read_text().split()[-1]) if autogroup.exists() else without_sessions


@pytest.mark.integration
def test_the_workers_session_counts_as_others_while_training_waits(
    tmp_path: Path, made: Callable[..., StepCheckpointer]
) -> None:
    checkpointer = made(tmp_path)
    checkpointer.prepare(small_state(), in_background=False)
    (worker,) = worker_of(checkpointer)
    for step in (1, 2):
        checkpointer.save_in_background(step, small_state(), {})
        # Nobody waits for this save. The kernel may refuse the change for a while.
        until(lambda: not checkpointer.executor.busy and session_nice(worker, 10) == 10, "niceness 10")
        save(checkpointer, step + 10, small_state())
        until(lambda: session_nice(worker, 0) == 0, "niceness 0")


def test_a_cancelled_save_leaves_no_record(tmp_path: Path) -> None:
    board = staged(tmp_path)(cancelled=True)
    assert isinstance(board.outcome, SaveFailed)
    assert board.reached == ()
    assert list(tmp_path.rglob("done.process_*")) == []


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        pytest.param(OSError(errno.ENOSPC, "is full", "/a"), OSError, "[Errno 28] is full: '/a'", id="full"),
        pytest.param(PermissionError(errno.EACCES, "no"), PermissionError, "[Errno 13] no", id="forbidden"),
        pytest.param(OSError("no reply"), OSError, "no reply", id="without a number"),
        pytest.param(TimeoutError("leaf w"), TimeoutError, "leaf w", id="late"),
        pytest.param(ssl.SSLError(1, "bad record"), OSError, "bad record", id="another library's number"),
        pytest.param(SaveFailed("taken away"), SaveFailed, "taken away", id="failed"),
        pytest.param(SaveFailed("long" * 50_000), SaveFailed, "long" * 1250, id="very long"),
        pytest.param(SaveFailed("\N{TURTLE}" * 50_000), SaveFailed, "\N{TURTLE}" * 5000, id="very long in JSON"),
        pytest.param(CheckpointNotFound("no step"), CheckpointNotFound, "no step", id="both of ours and the system's"),
        pytest.param(ValueError("of TensorStore"), CheckpointError, "ValueError: of TensorStore", id="any other"),
    ],
)
def test_the_trainer_gets_the_error_that_its_worker_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], text: str
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(save_worker, "begun", fails)
    ended = Ending()
    ended.end()
    handed = save_worker.HandedOver(staged(tmp_path)(), "step 1", lambda: None, in_keeper=False)
    handed.send(lambda: ended)
    with pytest.raises(kind) as found:
        handed.wait(Deadline.after(30, time.monotonic), lambda stage: None)
    assert type(found.value) is kind
    assert str(found.value) == text
    number = None if isinstance(error, ssl.SSLError) else getattr(error, "errno", None)
    assert getattr(found.value, "errno", None) == number


@pytest.fixture(params=["files", *STORES])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory, and a prefix in each kind of object store."""
    return (
        str(tmp_path) if request.param == "files" else f"{request.getfixturevalue(f'{request.param}_bucket').uri}/run"
    )


def test_the_last_worker_of_dead_trainers_commits(root: str) -> None:
    writes = [staged(root, process, 2) for process in range(2)]
    for number, write in enumerate(writes):
        assert write().reached == ("written", "durable")
        run_last()  # as the worker does if its trainer has died
        assert latest_step(root) == (1 if number == 1 else None)
    restored = restore(root, small_state())
    assert restored is not None
    assert_same(restored.state, small_state())
    assert restored.note == "for gpt-1"


@pytest.mark.integration
def test_the_worker_loads_neither_jax_nor_tensorstore() -> None:
    code = (
        "import sys, gracepoint.checkpoint.saving.save_worker as w; w.warm(); "
        "found = {'jax', 'jaxlib', 'tensorstore'} & set(sys.modules); sys.exit(repr(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("module", "limit"), [("gracepoint.async_calls.worker", 3), ("gracepoint.checkpoint.saving.save_worker", 8)]
)
def test_the_worker_takes_a_few_times_as_long_to_import_as_numpy_does(module: str, limit: int) -> None:
    """Counts the time of the thread that imports, as other processes of this machine must not count."""

    def import_s(name: str) -> float:
        code = f"import time; began_s = time.thread_time(); import {name}; print(time.thread_time() - began_s)"
        return float(subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True).stdout)

    took = [(import_s("numpy"), import_s(module)) for _ in range(3)]
    assert min(of_module for _, of_module in took) < limit * min(of_numpy for of_numpy, _ in took)


@pytest.mark.parametrize("writer", ["", "process", "./socket"])
def test_a_writer_that_is_not_known_is_refused(writer: str) -> None:
    with pytest.raises(SettingsError, match="writer"):
        WriteOptions(writer=writer)


@pytest.mark.parametrize("in_keeper", [True, False])
def test_memory_is_free_once_its_worker_has_ended_the_call_or_is_seen_to_be_dead(in_keeper: bool) -> None:
    def handed(call: Ending, board: SaveBoard) -> save_worker.HandedOver:
        found = save_worker.HandedOver(board, "step 1", lambda: None, in_keeper=in_keeper)
        found.send(lambda: call)
        return found

    call, board = Ending(), SaveBoard()
    user = handed(call, board)
    assert not user.end(0.0)
    assert board.cancelled
    call.end(CallFailed("the worker gave no answer"))
    assert user.end(0.0) is not in_keeper, "nobody sees whether a process of another container lives"
    board.end({})
    assert user.end(0.0)
    assert handed(Ending(), board).end(0.0), "what the worker says counts at once"
