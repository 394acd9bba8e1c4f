"""Signal handlers that raise while a save is begun or waited for, in a loop that goes on (Ctrl-C, a time limit)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from gracepoint import machine
from gracepoint.checkpoint import (
    AsyncCheckpointer,
    CheckpointManager,
    RestoreArgs,
    WriteOptions,
    all_steps,
    async_checkpointer,
    memory,
)
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.options import DEFAULT_OPTIONS
from gracepoint.checkpoint.saving import host_snapshot
from gracepoint.checkpoint.saving.host_snapshot import HostSnapshot
from gracepoint.errors import ForkedChild, SaveFailed
from gracepoint.threads import DaemonThread
from tests.forked import forked
from tests.interrupts import Interrupted, interrupt, leave_unlocked
from tests.leftovers import is_alive
from tests.slow_storage import SlowStorage
from tests.unit.checkpoint.fakes.engine import engine, restore, save
from tests.waiting import until

_PATIENCE_S = 60.0
_LEAVES = 8
#: The values of CPU devices are copied as those of accelerators are: a thread for each device.
DEVICES = WriteOptions(pinned_host_transfer=True, target_chunk_bytes=1 << 12)
WORKER = WriteOptions(writer="worker")


def state(step: int) -> dict[str, Any]:
    """Values that say which step they are of, on several devices."""
    devices = jax.devices("cpu")
    return {
        f"w{number}": jax.device_put(jnp.full((1 << 13,), step, jnp.float32), devices[number % len(devices)])
        for number in range(_LEAVES)
    }


def steps_in(path: Path | str) -> set[float]:
    """The steps that the values of a checkpoint are of."""
    found = async_checkpointer.restore(path, restore_args=RestoreArgs(restore_type=np.ndarray))
    return {float(value) for values in found.values() for value in np.unique(values)}


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStorage]:
    slow = SlowStorage(monkeypatch.setattr)
    yield slow
    slow.bytes_per_s = math.inf


@pytest.fixture
def made() -> Iterator[Callable[..., StepCheckpointer]]:
    engines: list[StepCheckpointer] = []

    def make(root: Path, options: WriteOptions = DEFAULT_OPTIONS) -> StepCheckpointer:
        engines.append(engine(root, options=options, keep_last=1000))
        engines[-1].prepare(state(0))
        return engines[-1]

    yield make
    for each in engines:
        each.abandon("the test is over", timeout_s=_PATIENCE_S)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small values are copied in many pieces by several threads."""
    monkeypatch.setattr(machine, "available_cores", lambda: 8)
    monkeypatch.setattr(memory, "_SMALL_BYTES", 1 << 10)
    monkeypatch.setattr(memory, "_BLOCK_BYTES", 1 << 12)


def test_a_save_whose_wait_was_interrupted_keeps_its_values(
    tmp_path: Path, storage: SlowStorage, made: Callable[..., StepCheckpointer]
) -> None:
    checkpointer = made(tmp_path)
    storage.bytes_per_s = 0.0
    checkpointer.save_in_background(1, state(1), {})
    assert interrupt(lambda: checkpointer.save_in_background(2, state(2), {}), 0.05)
    assert checkpointer.executor.busy
    threading.Timer(0.1, setattr, (storage, "bytes_per_s", math.inf)).start()
    checkpointer.save_in_background(3, state(3), {})
    checkpointer.wait_until_finished()
    assert {step: steps_in(tmp_path / str(step)) for step in all_steps(tmp_path)} == {1: {1.0}, 3: {3.0}}


def test_an_asynchronous_save_whose_wait_was_interrupted_keeps_its_values(tmp_path: Path, storage: SlowStorage) -> None:
    with contextlib.closing(AsyncCheckpointer()) as checkpointer:
        storage.bytes_per_s = 0.0
        checkpointer.save(tmp_path / "a", state(1))
        assert interrupt(checkpointer.wait_until_finished, 0.05)
        threading.Timer(0.1, setattr, (storage, "bytes_per_s", math.inf)).start()
        checkpointer.save(tmp_path / "b", state(2))
        checkpointer.wait_until_finished()
    assert (steps_in(tmp_path / "a"), steps_in(tmp_path / "b")) == ({1.0}, {2.0})


# Python says so of an exception that comes while it destroys an object, and drops it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(DEFAULT_OPTIONS, id="threads"),
        pytest.param(DEVICES, id="a thread for each device"),
        pytest.param(WORKER, id="a worker process"),
    ],
)
def test_no_checkpoint_has_values_of_another_step_whenever_signals_raise(
    tmp_path: Path,
    storage: SlowStorage,
    made: Callable[..., StepCheckpointer],
    many_threads: None,
    options: WriteOptions,
) -> None:
    checkpointer = made(tmp_path, options)
    storage.bytes_per_s = 20e6  # a save takes 13 ms
    interrupts = 0
    for step in range(1, 121):
        saving = functools.partial(checkpointer.save_in_background, step, state(step), {})
        interrupts += interrupt(saving, 0.0002 + (step * 0.00037) % 0.02)
    storage.bytes_per_s = math.inf
    last = 1000
    checkpointer.save_in_background(last, state(last), {})
    checkpointer.wait_until_finished()
    found = {step: steps_in(tmp_path / str(step)) for step in all_steps(tmp_path)}
    assert found == {step: {float(step)} for step in found}
    assert last in found
    assert interrupts > 20


@pytest.mark.integration
@pytest.mark.parametrize("options", [DEFAULT_OPTIONS, DEVICES], ids=["copies", "devices"])
def test_a_save_is_whole_after_one_whose_threads_were_interrupted_as_they_started(
    tmp_path: Path,
    made: Callable[..., StepCheckpointer],
    many_threads: None,
    options: WriteOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpointer, wait, interrupts = made(tmp_path, options), threading.Event.wait, 0
    for number in range(8):
        starts = itertools.count()

        def wait_or_leave(event: threading.Event, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread() and next(starts) == number:  # noqa: B023
                return leave_unlocked(event)
            return wait(event, timeout)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Event, "wait", wait_or_leave)
            try:
                checkpointer.save_in_background(2 * number + 1, state(2 * number + 1), {})
            except Interrupted:
                interrupts += 1
        checkpointer.save_in_background(2 * number + 2, state(2 * number + 2), {})
    checkpointer.wait_until_finished()
    found = {step: steps_in(tmp_path / str(step)) for step in all_steps(tmp_path)}
    assert found == {step: {float(step)} for step in found}
    assert {*range(2, 17, 2)} <= {*found}
    assert interrupts > 2


class StuckCopy:
    """Copies in helper threads wait until they may go on. Those of the main thread do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self._real = module.copy
        monkeypatch.setattr(module, "copy", self)

    def __call__(self, values: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            assert self.begun.wait(_PATIENCE_S)
        else:
            self.begun.set()
            self.may_go_on.wait(_PATIENCE_S)
        self._real(values, into)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["copies", "devices"])
def test_copies_of_an_interrupted_save_never_reach_the_next_one(
    tmp_path: Path,
    made: Callable[..., StepCheckpointer],
    many_threads: None,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    module, options = (memory, DEFAULT_OPTIONS) if kind == "copies" else (host_snapshot, DEVICES)
    checkpointer, before = made(tmp_path, options), {*threading.enumerate()}
    with pytest.MonkeyPatch.context() as until_interrupted:
        stuck = StuckCopy(until_interrupted, module)
        assert interrupt(lambda: checkpointer.save_in_background(1, state(1), {}), 0.3, times=2)
    wait = DaemonThread.wait

    def briefly(thread: DaemonThread, timeout_s: float | None = None) -> bool:
        return wait(thread, None if timeout_s is None else min(timeout_s, 0.05))

    with pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(DaemonThread, "wait", briefly)
        checkpointer.save_in_background(2, state(2), {})
    assert "an interrupted save still uses the memory of its snapshot" in caplog.text
    stuck.may_go_on.set()
    names = ("gracepoint: copying", "gracepoint: device")
    until(lambda: not [t for t in {*threading.enumerate()} - before if t.name.startswith(names)], "the copies' end")
    checkpointer.wait_until_finished()
    assert {step: steps_in(tmp_path / str(step)) for step in all_steps(tmp_path)} == {2: {2.0}}


@pytest.mark.integration
def test_an_emergency_save_that_was_interrupted_never_gets_the_values_of_the_next_step(
    tmp_path: Path, made: Callable[..., StepCheckpointer]
) -> None:
    checkpointer = made(tmp_path, WORKER)
    (worker,) = checkpointer.executor.worker_process_ids
    os.kill(worker, signal.SIGSTOP)
    assert interrupt(lambda: save(checkpointer, 1, state(1)), 0.3)
    threading.Timer(0.2, os.kill, (worker, signal.SIGCONT)).start()
    checkpointer.save_in_background(2, state(2), {})
    checkpointer.wait_until_finished()
    checkpointer.close(_PATIENCE_S)
    until(lambda: not is_alive(worker), "the worker to end")
    assert restore(tmp_path, state(0)) is not None  # commits what became durable
    assert {step: steps_in(tmp_path / str(step)) for step in all_steps(tmp_path)} == {2: {2.0}}


@pytest.mark.integration
@pytest.mark.parametrize("options", [DEFAULT_OPTIONS, WORKER], ids=["threads", "worker"])
def test_a_save_whose_snapshot_is_filled_again_fails(
    tmp_path: Path, storage: SlowStorage, made: Callable[..., StepCheckpointer], options: WriteOptions
) -> None:
    checkpointer = made(tmp_path, options)
    workers = checkpointer.executor.worker_process_ids
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    storage.bytes_per_s = 0.0
    checkpointer.save_in_background(1, state(1), {})
    newest = checkpointer.executor.newest
    assert newest is not None
    assert newest.filled is not None
    with pytest.MonkeyPatch.context() as blind:  # as if it were not known who uses the memory
        blind.setattr(HostSnapshot, "is_free", lambda _: True)
        newest.filled.snapshot.fill()
    storage.bytes_per_s = math.inf
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    with pytest.raises(SaveFailed, match="has generation 2, and this save writes generation 1"):
        checkpointer.wait_until_finished()
    assert not all_steps(tmp_path)
    assert not list(tmp_path.glob("1*/done.*"))
    checkpointer.save_in_background(2, state(2), {})
    checkpointer.wait_until_finished()
    assert steps_in(tmp_path / "2") == {2.0}


@pytest.mark.integration
def test_a_forked_child_saves_and_deletes_nothing_of_its_parent(
    tmp_path: Path, storage: SlowStorage, made: Callable[..., StepCheckpointer]
) -> None:
    checkpointer = made(tmp_path)
    storage.bytes_per_s = 0.0
    checkpointer.save_in_background(1, state(1), {})

    def in_child() -> str:
        checkpointer.abandon("the child ends", timeout_s=_PATIENCE_S)
        checkpointer.close(_PATIENCE_S)
        checkpointer.save_in_background(2, {}, {})
        return "saved"

    def check_in_child() -> str:
        checkpointer.executor.check_for_errors()
        return "as if all were well"

    assert "ForkedChild: this checkpointer belongs to process" in forked(in_child)
    assert "ForkedChild: this checkpointer belongs to process" in forked(check_in_child)
    storage.bytes_per_s = math.inf
    checkpointer.wait_until_finished()
    assert {step: steps_in(tmp_path / str(step)) for step in all_steps(tmp_path)} == {1: {1.0}}


def of_steps(root: Path) -> tuple[CheckpointManager, dict[str, Callable[[], object]]]:
    manager = CheckpointManager(root)
    manager.save(1, state(1))
    return manager, {
        "save": lambda: manager.save(2, state(2)),
        "restore": manager.restore,
        "wait_until_finished": manager.wait_until_finished,
    }


def of_paths(root: Path) -> tuple[AsyncCheckpointer, dict[str, Callable[[], object]]]:
    checkpointer = AsyncCheckpointer()
    checkpointer.save(root / "1", state(1))
    return checkpointer, {
        "save": lambda: checkpointer.save(root / "2", state(2)),
        "prepare": lambda: checkpointer.prepare(state(2)),
        "wait_until_finished": checkpointer.wait_until_finished,
    }


@pytest.mark.integration
@pytest.mark.parametrize("make", [of_steps, of_paths], ids=lambda make: make.__name__)
def test_a_forked_child_gets_no_errors_of_its_parents_save(
    tmp_path: Path, storage: SlowStorage, make: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    storage.bytes_per_s = 0.0
    mine, calls = make(tmp_path)

    def in_child() -> str:
        caplog.clear()
        for name, call in calls.items():
            try:
                call()
            except ForkedChild:
                continue
            return f"{name} returned"
        atexit._run_exitfuncs()  # of a child that ends
        with contextlib.suppress(ZeroDivisionError), mine:
            raise ZeroDivisionError
        mine.close()
        return f"log: {caplog.text}"

    assert forked(in_child) == "log: "
    storage.bytes_per_s = math.inf
    mine.wait_until_finished()
    mine.close()
    assert steps_in(tmp_path / "1") == {1.0}
