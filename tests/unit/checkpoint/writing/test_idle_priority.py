"""Threads of a save leave the CPU to the training, until the save is urgent or they are starved."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint import machine
from gracepoint.checkpoint.storage.buffers import Buffer, UnsyncedFile
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checkpoint.writing.pool import (
    THREADS,
    Finish,
    IdlePriority,
    PoolSize,
    Starvation,
    WritePool,
    size_beside_training,
)
from gracepoint.deadline import Deadline
from tests.object_stores.servers import Bucket
from tests.waiting import until, until_no_thread

PATIENCE_S, LOOK_S = 10.0, 1.0
_TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("cores", "ready", "starved"),
    [(0.0, 1.0, True), (0.05, 0.6, True), (0.2, 1.0, False), (0.05, 0.4, False), (0.0, 0.0, False)],
    ids=["no core", "a twentieth of a core", "a fifth of a core", "mostly waiting for the disk", "idle"],
)
def test_threads_are_starved_if_they_are_ready_and_do_not_run(cores: float, ready: float, starved: bool) -> None:
    starvation = Starvation(PATIENCE_S)
    found = [
        starvation.look(number * LOOK_S, cores * number * LOOK_S, ready=number % 10 < 10 * ready)
        for number in range(40)
    ]
    assert not any(found[: int(PATIENCE_S / LOOK_S)])  # within the patience
    assert any(found) is starved


def test_only_the_latest_seconds_count() -> None:
    starvation = Starvation(PATIENCE_S)
    assert not any(starvation.look(n * LOOK_S, n * LOOK_S, ready=True) for n in range(100))
    found = [starvation.look((100 + n) * LOOK_S, 100.0, ready=True) for n in range(20)]
    assert found.index(True) == pytest.approx(PATIENCE_S / LOOK_S, abs=1)


class Policies:
    """How the kernel schedules the threads that run calls of a pool."""

    def __init__(self, pool: WritePool, together: int = 1) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._together = threading.Barrier(together, timeout=_TIMEOUT_S)  # so many that do not give way end at once
        self.begun: list[int] = []
        self.ended: list[int] = []

    def act(self, _: Buffer) -> None:
        """Goes on until the thread does not give way."""
        with self._lock:
            self.begun.append(os.sched_getscheduler(0))
        while os.sched_getscheduler(0) == os.SCHED_IDLE:
            self._pool.go_on()
            time.sleep(0.005)
        self._together.wait()
        with self._lock:
            self.ended.append(os.sched_getscheduler(0))


def threads_of_pools() -> list[str]:
    """The names of the threads that write or sync files."""
    names = ("gracepoint: writes", "gracepoint: syncs")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


@contextlib.contextmanager
def pool_at(folder: StoragePath, way: IdlePriority) -> Iterator[WritePool]:
    pool = WritePool([], None, folder, Deadline.after(_TIMEOUT_S, time.monotonic), way)
    pool.begin()
    try:
        yield pool
        pool.wait()
    finally:
        pool.close()
        pool.join()
    assert threads_of_pools() == []


def test_new_threads_take_over_when_a_save_becomes_urgent(tmp_path: Path) -> None:
    urgent, before = threading.Event(), os.sched_getscheduler(0)
    # Beside busy processes, the threads take long to begin. They must not count as starved meanwhile.
    with pool_at(storage_path(tmp_path), IdlePriority(urgent.is_set, patience_s=600.0)) as pool:
        policies = Policies(pool, together=THREADS)
        for _ in range(2 * THREADS):
            pool.add(1, policies.act)
        until(lambda: len(policies.begun) == size_beside_training().writers, "all writers to begin")
        assert set(policies.begun) == {os.SCHED_IDLE}
        assert policies.ended == []
        urgent.set()
    assert policies.ended == [before] * 2 * THREADS
    assert os.sched_getscheduler(0) == before


@pytest.mark.parametrize(("cores", "writers", "syncers"), [(1, 2, 1), (2, 2, 1), (6, 6, 3), (8, 8, 4), (208, 8, 4)])
def test_as_many_threads_as_cores_write_during_the_training(cores: int, writers: int, syncers: int) -> None:
    assert size_beside_training(cores) == PoolSize(writers, syncers)


def test_threads_of_an_urgent_save_do_not_give_way(tmp_path: Path) -> None:
    with pool_at(storage_path(tmp_path), IdlePriority(lambda: True)) as pool:
        policies = Policies(pool)
        pool.add(1, policies.act)
    assert policies.begun == policies.ended == [os.sched_getscheduler(0)]


def test_threads_that_write_objects_do_not_give_way(gs_bucket: Bucket) -> None:
    with pool_at(storage_path(f"{gs_bucket.uri}/run"), IdlePriority(lambda: False)) as pool:
        policies = Policies(pool)
        pool.add(1, policies.act)
    assert policies.begun == policies.ended == [os.sched_getscheduler(0)]


def test_starved_threads_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []  # the threads are not starved before one of them has begun
    monkeypatch.setattr(machine, "cpu_time", lambda threads: (0.0, bool(begun)))
    with pool_at(storage_path(tmp_path), IdlePriority(lambda: False, patience_s=0.1)) as pool:
        policies = Policies(pool)
        begun = policies.begun
        pool.add(1, policies.act)
    assert (len(policies.begun), len(policies.ended)) == (2, 1)


def test_threads_are_replaced_if_it_cannot_be_known_whether_they_are_starved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(threads: list[int]) -> tuple[float, bool]:
        raise ValueError("invalid literal for int() with base 10: '-'")

    monkeypatch.setattr(machine, "cpu_time", unknown)
    with pool_at(storage_path(tmp_path), IdlePriority(lambda: False)) as pool:
        policies = Policies(pool)
        pool.add(1, policies.act)
    assert policies.ended == [os.sched_getscheduler(0)]


@pytest.fixture
def busy_core() -> Iterator[None]:
    """Another process keeps the only core busy that the threads of the test may use."""
    before = os.sched_getaffinity(0)
    core = min(before)
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            os.sched_setaffinity(0, {core})
            yield
        finally:
            os.sched_setaffinity(0, before)
            process.kill()


@pytest.mark.integration
def test_a_save_ends_though_the_training_keeps_all_cores_busy(tmp_path: Path, busy_core: None) -> None:
    """With 3/1024 of the core, the calculation would take minutes."""
    policies: list[int] = []

    def act(_: Buffer) -> None:
        until_s = time.thread_time() + 0.5
        while time.thread_time() < until_s:
            pool.go_on()
        policies.append(os.sched_getscheduler(0))

    with pool_at(storage_path(tmp_path), IdlePriority(lambda: False, patience_s=0.5)) as pool:
        pool.add(1, act)
    assert policies == [os.sched_getscheduler(0)]


def test_threads_that_give_way_continue_if_no_others_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urgent, real, started = threading.Event(), threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(("gracepoint: writes", "gracepoint: syncs")):
            if urgent.is_set():
                raise RuntimeError("can't start new thread")
            started.append(thread.name.split()[1])
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pool_at(storage_path(tmp_path), IdlePriority(urgent.is_set)) as pool:
        urgent.set()
        done: list[int] = []
        pool.add(1, lambda _: done.append(os.sched_getscheduler(0)))
    assert done == [os.SCHED_IDLE]
    assert PoolSize(started.count("writes"), started.count("syncs")) == size_beside_training()


def test_threads_continue_to_sync_if_no_others_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system allows the new writers, and no syncer more."""
    urgent, refused, real = threading.Event(), threading.Event(), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if urgent.is_set() and "syncs" in thread.name:
            refused.set()
            raise RuntimeError("can't start new thread")
        real(thread)

    def write(_: Buffer) -> Finish:
        descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        return Finish(
            UnsyncedFile(str(tmp_path / "file"), descriptor), lambda: synced.append(threading.current_thread())
        )

    monkeypatch.setattr(threading.Thread, "start", start)
    synced: list[threading.Thread] = []
    way = IdlePriority(urgent.is_set)
    with pool_at(storage_path(tmp_path), way) as pool:
        urgent.set()
        assert refused.wait(_TIMEOUT_S)
        until_no_thread("gracepoint: watches writers")
        pool.add(1, write)
        pool.wait()
        assert synced[0].name.startswith("gracepoint: syncs")


def test_a_thread_that_may_not_give_way_writes_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    urgent = threading.Event()
    with pool_at(storage_path(tmp_path), IdlePriority(urgent.is_set)) as pool:
        policies = Policies(pool)
        pool.add(1, policies.act)
        until(lambda: len(policies.ended) == 1, "the call")
        urgent.set()
    assert policies.ended == [os.sched_getscheduler(0)]
