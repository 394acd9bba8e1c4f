"""The keeper: its workers finish what a trainer handed over, also if the trainer dies, and nothing is left."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.async_calls import AsyncCallFailed, AsyncRequest, PersistentAsyncCaller, worker_process
from tests.leftovers import is_alive
from tests.unit.async_calls.fakes import functions
from tests.waiting import PassingTime, until

pytestmark = pytest.mark.integration

# Schedules a call that waits for a file, says so, and waits to be killed.
TRAINER = """
import sys, time
from gracepoint.async_calls import AsyncRequest, PersistentAsyncCaller
from tests.unit.async_calls.fakes import functions
caller = PersistentAsyncCaller(keeper=sys.argv[1])
caller.schedule_async_call(AsyncRequest(functions.wait_for, (sys.argv[2],), []))
caller.schedule_async_call(AsyncRequest(functions.write, (sys.argv[3],), [], {"text": "kept"}))
print("handed over", flush=True)
time.sleep(600)
"""


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "keeper.sock"


@pytest.fixture
def keeper(socket_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A keeper. At the end of the test it is told to end, and does."""
    process = subprocess.Popen([sys.executable, "-m", "gracepoint.async_calls.keeper", str(socket_path)])
    yield process
    process.terminate()
    try:
        assert process.wait(60) == 0
        assert not socket_path.exists()
    finally:
        process.kill()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_keeper_runs_calls_and_errors_come_back(
    keeper: subprocess.Popen[bytes], socket_path: Path, tmp_path: Path
) -> None:
    caller = PersistentAsyncCaller(keeper=str(socket_path), timeout_s=60)
    caller.schedule_async_call(AsyncRequest(functions.write, (str(tmp_path / "a"),), [], {"text": "hello"}))
    assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "a").read_text() == "hello"
    assert len(children(keeper.pid)) == 1
    caller.schedule_async_call(AsyncRequest(functions.fail, ("full disk",), []))
    with pytest.raises(AsyncCallFailed, match="ValueError: full disk"):
        caller.is_current_async_call_done(blocking=True)
    caller.close()
    until(lambda: not children(keeper.pid), "the worker to end")


def test_calls_of_a_killed_trainer_are_finished(
    keeper: subprocess.Popen[bytes], socket_path: Path, tmp_path: Path
) -> None:
    go_on, written = tmp_path / "go on", tmp_path / "written"
    command = [sys.executable, "-c", TRAINER, str(socket_path), str(go_on), str(written)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "handed over\n"
        trainer.kill()
    keeper.terminate()  # as the kubelet does when the training container has ended
    time.sleep(0.1)
    assert keeper.poll() is None
    go_on.touch()
    assert keeper.wait(60) == 0
    assert written.read_text() == "kept"


def test_a_worker_of_a_keeper_that_is_killed_fails_its_calls(
    keeper: subprocess.Popen[bytes], socket_path: Path, tmp_path: Path
) -> None:
    caller = PersistentAsyncCaller(keeper=str(socket_path), timeout_s=60)
    caller.schedule_async_call(AsyncRequest(functions.wait_for, (str(tmp_path / "never"),), []))
    until(lambda: children(keeper.pid), "the worker")
    for pid in children(keeper.pid):
        os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(AsyncCallFailed, match="the keeper's worker process ended"):
        caller.is_current_async_call_done(blocking=True)
    caller.schedule_async_call(AsyncRequest(functions.write, (os.devnull, "goes on"), []))
    assert caller.is_current_async_call_done(blocking=True)
    caller.close()


def test_a_worker_of_a_keeper_that_does_not_end_is_disconnected(
    keeper: subprocess.Popen[bytes], socket_path: Path, tmp_path: Path
) -> None:
    caller = PersistentAsyncCaller(keeper=str(socket_path), timeout_s=0.1)
    caller.schedule_async_call(AsyncRequest(functions.wait_for, (str(tmp_path / "go on"),), []))
    with pytest.raises(AsyncCallFailed, match=r"^the keeper's worker process did not end within 0.1 s, and was discon"):
        caller.close()
    assert children(keeper.pid), "it goes on with its call"
    (tmp_path / "go on").touch()
    until(lambda: not children(keeper.pid), "the worker to end")


def test_a_keeper_that_has_no_room_for_a_worker_continues(socket_path: Path, tmp_path: Path) -> None:
    """Its end would be the end of the workers that it has: it is the first process of its container."""
    command = [sys.executable, "-m", "gracepoint.async_calls.keeper", str(socket_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as keeper:
        try:
            until(socket_path.exists, "the keeper to listen")
            before = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (3, before[1]))
            caller = PersistentAsyncCaller(keeper=str(socket_path), timeout_s=60)
            caller.schedule_async_call(AsyncRequest(functions.write, (str(tmp_path / "a"),), [], {"text": "late"}))
            assert keeper.stderr is not None
            said = next(line for line in keeper.stderr if "keeper listens" not in line)
            assert "could not start a worker process for a trainer" in said, said
            resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, before)
            assert caller.is_current_async_call_done(blocking=True)
            caller.close()
            keeper.terminate()
            keeper.communicate(timeout=60)
            assert keeper.returncode == 0
        finally:
            keeper.kill()
    assert (tmp_path / "a").read_text() == "late"


@pytest.mark.parametrize("lasts_s", [0, 600], ids=["one that ends", "one that hangs"])
def test_a_keeper_runs_modules_next_to_its_workers(lasts_s: int, socket_path: Path, tmp_path: Path) -> None:
    began = tmp_path / "began"
    code = (
        f"import os, pathlib, time\npathlib.Path({str(began)!r}).write_text(str(os.getpid()))\ntime.sleep({lasts_s})\n"
    )
    (tmp_path / "beside.py").write_text(code)
    command = [sys.executable, "-m", "gracepoint.async_calls.keeper", str(socket_path), "no_such_module", "beside"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as keeper:
        try:
            until(lambda: began.exists() and began.read_text(), "the module to run")
            pid = began.read_text()
            left = [pid] if lasts_s else []
            until(lambda: children(keeper.pid) == left, "what has ended to be reaped")
            caller = PersistentAsyncCaller(keeper=str(socket_path), timeout_s=60)
            caller.schedule_async_call(AsyncRequest(functions.write, (os.devnull, "served"), []))
            assert caller.is_current_async_call_done(blocking=True)
            caller.close()
            keeper.terminate()
            assert keeper.wait(60) == 0
        finally:
            keeper.kill()
    until(lambda: not is_alive(int(pid)), "the module to end")


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> PassingTime:
    """The time of those who wait for a keeper."""
    passing = PassingTime()
    monkeypatch.setattr(worker_process, "time", passing)
    return passing


@pytest.mark.usefixtures("passing")
def test_without_a_keeper_a_worker_of_this_process_is_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caller = PersistentAsyncCaller(keeper=str(tmp_path / "nobody.sock"), timeout_s=60)
    caller.schedule_async_call(AsyncRequest(functions.write, (os.devnull, "goes on"), []))
    assert caller.is_current_async_call_done(blocking=True)
    assert "no keeper answers at" in caplog.text
    caller.close()


def test_only_the_first_worker_waits_for_its_keeper(
    socket_path: Path, passing: PassingTime, caplog: pytest.LogCaptureFixture
) -> None:
    """For a later one, training waits, or a save in an emergency."""
    caller = PersistentAsyncCaller(keeper=str(socket_path), timeout_s=60)
    for _ in range(2):
        caller.start_worker()
        assert passing.now_s == pytest.approx(10.0, abs=0.2)
        caller.kill()
    assert caplog.text.count("no keeper answers at") == 2
    caller.close()
