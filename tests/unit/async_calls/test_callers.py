"""Calls run in the background, in a thread or in worker processes, and report how they ended."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gracepoint.async_calls import (
    AsyncCaller,
    AsyncCallFailed,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    ThreadAsyncCaller,
    worker_process,
)
from gracepoint.async_calls.handover import Block, BlockPool, pack
from gracepoint.async_calls.worker import CALL
from gracepoint.async_calls.worker_process import CallFailed, WorkerProcess
from gracepoint.threads import Ending
from tests.leftovers import is_alive
from tests.unit.async_calls.fakes import functions
from tests.unit.checkpoint.fakes.thread_limit import refuse_threads
from tests.unit.multihost.fakes.gangs import gangs
from tests.waiting import until

pytestmark = pytest.mark.integration

ALL = pytest.mark.parametrize("kind", [ThreadAsyncCaller, TemporalAsyncCaller, PersistentAsyncCaller])
PROCESSES = pytest.mark.parametrize("kind", [TemporalAsyncCaller, PersistentAsyncCaller])


@pytest.fixture
def made() -> Iterator[Callable[[type[AsyncCaller]], AsyncCaller]]:
    """Makes callers that are aborted at the end of the test."""
    callers: list[AsyncCaller] = []

    def make(kind: type[AsyncCaller], **options: Any) -> AsyncCaller:
        callers.append(kind(timeout_s=60, **options))
        return callers[-1]

    yield make
    for caller in callers:
        caller.close(abort=True)


def request(function: Callable[..., object] | None, *arguments: object, **fields: object) -> AsyncRequest:
    return AsyncRequest(function, arguments, [], **fields)  # type: ignore[arg-type]


@ALL
def test_a_call_runs_and_its_end_is_seen(
    kind: type[AsyncCaller], made: Callable[..., AsyncCaller], tmp_path: Path
) -> None:
    caller = made(kind)
    caller.schedule_async_call(request(functions.write, str(tmp_path / "a"), async_fn_kwargs={"text": "hello"}))
    assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "a").read_text() == "hello"


@ALL
def test_the_answer_is_no_while_the_call_runs(
    kind: type[AsyncCaller], made: Callable[..., AsyncCaller], tmp_path: Path
) -> None:
    caller = made(kind)
    caller.schedule_async_call(request(functions.wait_for, str(tmp_path / "go on")))
    assert not caller.is_current_async_call_done()
    assert not caller.is_current_async_call_done(no_dist=True)
    (tmp_path / "go on").touch()
    assert caller.is_current_async_call_done(blocking=True)
    assert caller.is_current_async_call_done()  # no call is left


@ALL
def test_a_request_without_a_function_ends_at_once(kind: type[AsyncCaller], made: Callable[..., AsyncCaller]) -> None:
    caller = made(kind)
    caller.schedule_async_call(request(None))
    assert caller.is_current_async_call_done()
    assert not getattr(caller, "worker_process_ids", [])


@ALL
@pytest.mark.parametrize(
    ("function", "expected"), [(functions.fail, "ValueError: full disk"), (functions.leave, "SystemExit: 3")]
)
def test_an_error_has_the_traceback_of_where_it_was_raised(
    kind: type[AsyncCaller], made: Callable[..., AsyncCaller], function: Callable[..., object], expected: str
) -> None:
    caller = made(kind)
    arguments = ("full disk",) if function is functions.fail else ()
    caller.schedule_async_call(request(function, *arguments))
    with pytest.raises(AsyncCallFailed, match=expected) as failed:
        caller.is_current_async_call_done(blocking=True)
    assert f"in {function.__name__}" in failed.value.failures[0]
    caller.schedule_async_call(request(functions.write, os.devnull, "goes on"))
    assert caller.is_current_async_call_done(blocking=True)


@PROCESSES
def test_a_worker_that_dies_fails_its_call_and_is_replaced(
    kind: type[AsyncCaller], made: Callable[..., AsyncCaller]
) -> None:
    caller = made(kind)
    caller.schedule_async_call(request(functions.die))
    with pytest.raises(AsyncCallFailed, match="killed by SIGKILL"):
        caller.is_current_async_call_done(blocking=True)
    caller.schedule_async_call(request(functions.write, os.devnull, "goes on"))
    assert caller.is_current_async_call_done(blocking=True)


def test_the_memory_of_a_call_is_mapped_before_its_function_runs(
    made: Callable[..., AsyncCaller], tmp_path: Path
) -> None:
    caller = made(PersistentAsyncCaller)
    caller.schedule_async_call(request(functions.write_mapped_bytes, np.ones(8 << 20, np.uint8), str(tmp_path / "it")))
    caller.is_current_async_call_done(blocking=True)
    assert int((tmp_path / "it").read_text()) >= 8 << 20


@PROCESSES
def test_arrays_arrive_through_shared_memory_bit_for_bit(
    kind: type[AsyncCaller], made: Callable[..., AsyncCaller], tmp_path: Path
) -> None:
    import jax.numpy as jnp

    state: dict[str, Any] = {
        "f32": np.arange(1000, dtype=np.float32),
        "bf16": jnp.ones(8, jnp.bfloat16),
        "big": np.ones((3 << 20,), np.int8),
    }
    caller = made(kind)
    caller.schedule_async_call(request(functions.write_sum, str(tmp_path / "a"), preload_fn=lambda: dict(state)))
    state["f32"][:] = 0  # the training goes on
    assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "a").read_text() == "f32 float32 499500.0 True bf16 bfloat16 8.0 True big int8 3145728 True"


def test_a_thread_gets_what_was_preloaded_before_the_training_continues(
    tmp_path: Path, made: Callable[..., AsyncCaller]
) -> None:
    state = np.arange(4)
    caller = made(ThreadAsyncCaller)
    caller.schedule_async_call(
        request(functions.write_sum, str(tmp_path / "a"), preload_fn=lambda: {"x": state.copy()})
    )
    state[:] = 0
    assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "a").read_text() == "x int64 6 False"


def test_one_worker_runs_all_calls_in_order(made: Callable[..., AsyncCaller], tmp_path: Path) -> None:
    caller = made(PersistentAsyncCaller)
    assert isinstance(caller, PersistentAsyncCaller)
    workers = set()
    for n in range(5):
        caller.schedule_async_call(request(functions.append, str(tmp_path / "a"), f"{n} "))
        workers |= set(caller.worker_process_ids)
    for _ in range(5):
        assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "a").read_text() == "0 1 2 3 4 "
    assert len(workers) == 1


def test_each_temporary_call_has_a_process_that_ends_with_it(made: Callable[..., AsyncCaller], tmp_path: Path) -> None:
    caller = made(TemporalAsyncCaller)
    assert isinstance(caller, TemporalAsyncCaller)
    for n in range(2):
        caller.schedule_async_call(request(functions.wait_for, str(tmp_path / f"go on {n}")))
    first, second = caller.worker_process_ids
    (tmp_path / "go on 0").touch()
    assert caller.is_current_async_call_done(blocking=True)
    until(lambda: not is_alive(first), "the first worker to end")
    assert is_alive(second)
    (tmp_path / "go on 1").touch()
    assert caller.is_current_async_call_done(blocking=True)


def test_an_array_that_a_function_keeps_is_not_overwritten(made: Callable[..., AsyncCaller], tmp_path: Path) -> None:
    caller = made(PersistentAsyncCaller)
    for _ in range(3):
        caller.schedule_async_call(request(functions.keep, np.ones(1000)))
        assert caller.is_current_async_call_done(blocking=True)
    caller.schedule_async_call(
        request(functions.write_sum, str(tmp_path / "b"), preload_fn=lambda: {"x": np.zeros(1000)})
    )
    caller.schedule_async_call(request(functions.write_kept_sum, str(tmp_path / "a")))
    for _ in range(2):
        assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "a").read_text() == "3000.0"


@PROCESSES
@pytest.mark.parametrize(
    ("function", "why"),
    [(lambda: None, "it is a lambda"), (None, "it is a lambda, or it is defined inside another function")],
    ids=["lambda", "local function"],
)
def test_what_cannot_be_sent_is_refused_when_it_is_scheduled(
    kind: type[AsyncCaller], made: Callable[..., AsyncCaller], function: Callable[..., object] | None, why: str
) -> None:
    def local() -> None: ...

    caller = made(kind)
    with pytest.raises(TypeError, match=why):
        caller.schedule_async_call(request(function or local))
    with pytest.raises(TypeError, match="cannot be sent to a worker process: cannot pickle"):
        caller.schedule_async_call(request(functions.write, sys.stdout, "x"))
    assert not caller.worker_process_ids  # type: ignore[attr-defined]


@pytest.mark.parametrize(("idle", "policy"), [(False, os.SCHED_BATCH), (True, os.SCHED_IDLE)], ids=["nice", "idle"])
def test_a_worker_inherits_neither_jax_accelerators_signals_nor_session(
    made: Callable[..., AsyncCaller], tmp_path: Path, idle: bool, policy: int
) -> None:
    caller = made(PersistentAsyncCaller, idle=idle)
    caller.schedule_async_call(request(functions.write_facts, str(tmp_path / "facts")))
    assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "facts").read_text() == repr(
        {
            "jax": False,
            "numpy": False,
            "platforms": "cpu",
            "cuda": "",
            "sigterm ignored": True,
            "own session": True,
            "nice": min(19, os.nice(0) + 10),
            "policy": policy,
            "session's nice": 10,
        }
    )


@PROCESSES
def test_an_aborted_call_ends_at_once_and_fails(
    kind: type[AsyncCaller], made: Callable[..., AsyncCaller], tmp_path: Path
) -> None:
    caller = made(kind)
    caller.schedule_async_call(request(functions.wait_for, str(tmp_path / "never")))
    (worker,) = caller.worker_process_ids  # type: ignore[attr-defined]
    caller.close(abort=True)
    with pytest.raises(AsyncCallFailed, match="killed by SIGKILL"):
        caller.is_current_async_call_done(blocking=True)
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize(
    ("abort", "waited"), [pytest.param(False, "0.1 s", id="close"), pytest.param(True, "30 s", id="abort")]
)
def test_a_worker_that_does_not_end_is_named_with_the_seconds_waited(
    abort: bool, waited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = PersistentAsyncCaller(timeout_s=0.1)
    caller.schedule_async_call(request(functions.wait_for, str(tmp_path / "never")))
    (worker,) = caller.worker_process_ids
    real = WorkerProcess.wait

    def too_early(process: WorkerProcess, timeout_s: float) -> bool:
        return real(process, timeout_s) and not abort  # a killed process always ends in time

    monkeypatch.setattr(WorkerProcess, "wait", too_early)
    with pytest.raises(
        AsyncCallFailed, match=f"^the worker process {worker} did not end within {waited}, and was killed$"
    ):
        caller.close(abort=abort)
    until(lambda: not Path(f"/proc/{worker}").exists(), "the worker to end")


@PROCESSES
def test_a_caller_that_is_dropped_finishes_its_calls_and_leaves_nothing_behind(
    kind: type[AsyncCaller], tmp_path: Path
) -> None:
    caller = kind(timeout_s=60)
    caller.schedule_async_call(request(functions.wait_and_append, str(tmp_path / "go on"), str(tmp_path / "a"), "done"))
    (worker,) = caller.worker_process_ids  # type: ignore[attr-defined]
    del caller
    gc.collect()
    (tmp_path / "go on").touch()
    until(lambda: not Path(f"/proc/{worker}").exists(), "the worker to end")
    assert (tmp_path / "a").read_text() == "done"


@ALL
def test_del_may_be_called_finishes_the_calls_and_hinders_no_later_one(
    kind: type[AsyncCaller], made: Callable[..., AsyncCaller], tmp_path: Path
) -> None:
    caller = made(kind)
    caller.__del__()  # before there is a worker
    caller.schedule_async_call(request(functions.wait_and_append, str(tmp_path / "go on"), str(tmp_path / "a"), "done"))
    for _ in range(2):
        caller.__del__()
    (tmp_path / "go on").touch()
    assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "a").read_text() == "done"
    caller.schedule_async_call(request(functions.write, str(tmp_path / "b"), "later"))
    assert caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "b").read_text() == "later"


@ALL
def test_a_caller_that_is_closed_finishes_its_calls_first(
    kind: type[AsyncCaller], made: Callable[..., AsyncCaller], tmp_path: Path
) -> None:
    caller = made(kind)
    caller.schedule_async_call(request(functions.wait_and_append, str(tmp_path / "go on"), str(tmp_path / "a"), "done"))
    threading.Timer(0.1, (tmp_path / "go on").touch).start()
    caller.close()
    assert (tmp_path / "a").read_text() == "done"
    assert caller.is_current_async_call_done()
    assert not getattr(caller, "worker_process_ids", [])


def test_a_thread_that_is_aborted_runs_no_further_calls(made: Callable[..., AsyncCaller], tmp_path: Path) -> None:
    caller = made(ThreadAsyncCaller)
    caller.schedule_async_call(request(functions.write, str(tmp_path / "begun"), "x"))
    caller.is_current_async_call_done(blocking=True)
    caller.schedule_async_call(request(functions.wait_for, str(tmp_path / "go on")))
    for _ in range(2):
        caller.schedule_async_call(request(functions.write, str(tmp_path / "never"), "x"))
    caller.close(abort=True)
    (tmp_path / "go on").touch()
    with contextlib.suppress(AsyncCallFailed):  # the thread may not have taken it yet
        caller.is_current_async_call_done(blocking=True)
    for _ in range(2):
        with pytest.raises(AsyncCallFailed, match="the call was aborted"):
            caller.is_current_async_call_done(blocking=True)
    assert not (tmp_path / "never").exists()


def test_the_thread_of_a_dropped_caller_ends_after_its_calls(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    caller = ThreadAsyncCaller(timeout_s=60)
    caller.schedule_async_call(request(functions.wait_and_append, str(tmp_path / "go on"), str(tmp_path / "a"), "done"))
    (thread,) = set(threading.enumerate()) - before
    del caller
    gc.collect()
    (tmp_path / "go on").touch()
    thread.join(60)
    assert not thread.is_alive()
    assert (tmp_path / "a").read_text() == "done"


@pytest.mark.parametrize(("level", "said"), [(logging.INFO, True), (logging.WARNING, False)])
def test_a_worker_logs_from_the_level_of_its_trainer_on(
    level: int, said: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", level)
    caller = PersistentAsyncCaller(timeout_s=60)
    caller.schedule_async_call(request(functions.log, "from the worker"))
    assert caller.is_current_async_call_done(blocking=True)
    caller.close()
    assert ("INFO tests.unit.async_calls.fakes.functions from the worker" in capfd.readouterr().err) is said


_TRAINER = """
import sys, time
from gracepoint.async_calls import AsyncRequest, PersistentAsyncCaller, TemporalAsyncCaller
from tests.unit.async_calls.fakes import functions
kind = {"persistent": PersistentAsyncCaller, "temporal": TemporalAsyncCaller}[sys.argv[1]]
caller = kind(orphan_limit_s=float(sys.argv[4]))
for text in "abc":
    caller.schedule_async_call(AsyncRequest(functions.wait_and_append, (sys.argv[2], sys.argv[3], text), []))
print(*caller.worker_process_ids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["persistent", "temporal"])
@pytest.mark.parametrize(("limit_s", "finished"), [(60.0, True), (0.1, False)], ids=["in time", "too late"])
def test_calls_that_were_handed_over_outlive_a_trainer_that_is_killed(
    kind: str, limit_s: float, finished: bool, tmp_path: Path
) -> None:
    go_on, out = tmp_path / "go on", tmp_path / "out"
    trainer = subprocess.Popen(
        [sys.executable, "-c", _TRAINER, kind, str(go_on), str(out), str(limit_s)], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    workers = [int(each) for each in trainer.stdout.readline().split()]
    trainer.kill()
    trainer.wait(60)
    trainer.stdout.close()
    if finished:
        go_on.touch()
    until(lambda: not any(is_alive(worker) for worker in workers), "the workers to end")
    assert (sorted(out.read_text()) if out.exists() else []) == (list("abc") if finished else [])


@PROCESSES
def test_a_trainer_may_have_more_than_a_thousand_files_open(kind: type[AsyncCaller], tmp_path: Path) -> None:
    """The worker gets its connection under a number that is as high."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
        for _ in range(1100):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        caller = kind(timeout_s=60)
        caller.schedule_async_call(request(functions.append, str(tmp_path / "a"), "done"))
        caller.close()
    assert (tmp_path / "a").read_text() == "done"


def test_a_call_that_has_ended_counts_as_ended_if_its_worker_dies_with_the_next_one_unread(tmp_path: Path) -> None:
    out, pool, answered, go_on = tmp_path / "out", BlockPool(kept=0), threading.Event(), threading.Event()
    worker = WorkerProcess(pool, nice=0, idle=False, log_level=logging.WARNING, orphan_limit_s=1)

    def hand_over(number: int, function: Callable[..., None], *arguments: str) -> Ending:
        block, header_bytes, _ = pack(function, arguments, {}, pool)
        return worker.send(number, block, header_bytes)

    def hold_up() -> None:
        """Holds up the thread that reads answers."""
        answered.set()
        go_on.wait(60)

    hand_over(0, functions.append, str(out), "0").then(hold_up)
    assert answered.wait(60)
    ended = hand_over(1, functions.append, str(out), "1")
    hand_over(2, functions.append, str(out), "2")
    until(lambda: out.read_text() == "012", "the third call, which begins once the second one is answered")
    hand_over(3, functions.wait_for, str(tmp_path / "never"))
    unread = hand_over(4, functions.append, str(out), "4")
    os.kill(worker.process_id, signal.SIGKILL)
    until(lambda: not is_alive(worker.process_id), "the worker to end")
    go_on.set()
    assert ended.wait(60)
    assert ended.error is None
    assert unread.wait(60)
    assert isinstance(unread.error, CallFailed)
    assert "killed by SIGKILL" in str(unread.error)


def test_a_call_is_finished_if_its_trainer_dies_before_it_reads_the_answer_to_the_one_before(tmp_path: Path) -> None:
    """The kernel drops nothing that was handed over, but it says first that an answer was not read."""
    out, pool = tmp_path / "out", BlockPool(kept=0)
    trainer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        worker = worker_process.start_process(theirs)
    options = {"log_level": 30, "nice": 0, "idle": False, "orphan_limit_s": 60, "by_keeper": False}

    def hand_over(number: int, text: str) -> None:
        block, header_bytes, _ = pack(functions.append, (str(out), text), {}, pool)
        socket.send_fds(trainer, [CALL.pack(number, block.bytes, header_bytes)], [block.fd])

    with trainer:
        trainer.send(json.dumps({**options, "trainer": os.getpid()}).encode())
        hand_over(0, "a")
        with selectors.DefaultSelector() as selector:
            selector.register(trainer, selectors.EVENT_READ)
            assert selector.select(60), "the answer to the first call"
        os.kill(worker.pid, signal.SIGSTOP)
        hand_over(1, "b")
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.wait(60) == 0
    assert out.read_text() == "ab"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nice": 20}, "nice: expected 0 to 19, found 20"),
        ({"timeout_s": 0}, "timeout_s: expected seconds above 0, found 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThreadAsyncCaller(**arguments)  # type: ignore[arg-type]


def test_a_block_is_freed_once_however_often_it_is_given_back() -> None:
    block = Block(1)
    fd = block.fd
    block.free()
    with open(os.devnull) as other:  # takes the number of the file descriptor
        assert other.fileno() == fd
        block.free()
        os.fstat(fd)


def test_a_worker_that_dies_at_the_hand_over_frees_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(kept=1)
    worker = WorkerProcess(pool, nice=0, idle=False, log_level=logging.WARNING, orphan_limit_s=1)
    sends = socket.send_fds

    def die_first(*arguments: Any) -> int:
        worker.kill()
        until(lambda: not worker.alive, "the worker to end")
        return sends(*arguments)

    monkeypatch.setattr(socket, "send_fds", die_first)
    block = pool.take(1)
    with pytest.raises(CallFailed):
        worker.send(0, block, 0)
    assert pool.take(1) is not block


def test_a_worker_whose_answers_no_thread_reads_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = worker_process.start_process

    def start_process(connection: socket.socket) -> subprocess.Popen[bytes]:
        started.append(real(connection))
        return started[-1]

    monkeypatch.setattr(worker_process, "start_process", start_process)
    refuse_threads(monkeypatch)
    with pytest.raises(OSError, match="no thread reads the answers of the worker process .*: can't start new thread"):
        WorkerProcess(BlockPool(kept=1), nice=0, idle=False, log_level=logging.WARNING, orphan_limit_s=1)
    (process,) = started
    assert process.returncode is not None


# With JAX loaded, the interpreter's end takes modules apart before it drops what they hold.
_LEFT_OPEN = """
import jax
from gracepoint.async_calls import AsyncRequest, PersistentAsyncCaller

caller = PersistentAsyncCaller()
caller.schedule_async_call(AsyncRequest(print, ("called",), []))
caller.is_current_async_call_done(blocking=True)
"""


def test_a_caller_that_is_left_open_ends_quietly_with_the_interpreter() -> None:
    ended = subprocess.run([sys.executable, "-c", _LEFT_OPEN], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "called\n", "")


def test_a_call_that_does_not_start_in_one_process_counts_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (ThreadAsyncCaller(gang=gang, timeout_s=20) for gang in gangs(2))

    def no_thread(_: AsyncRequest) -> Ending:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(first, "run", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            first.schedule_async_call(request(functions.write, str(tmp_path / "a"), "x"))
    second.schedule_async_call(request(functions.write, str(tmp_path / "b"), "x"))
    for name, caller in (("c", first), ("d", second)):
        caller.schedule_async_call(request(functions.write, str(tmp_path / name), "x"))
    with pytest.raises(AsyncCallFailed, match="can't start new thread"):
        second.is_current_async_call_done(blocking=True)
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(caller.is_current_async_call_done, blocking=True) for caller in (first, second)]
        assert [end.result(timeout=60) for end in ends] == [True, True]
    for caller in (first, second):
        caller.close()
