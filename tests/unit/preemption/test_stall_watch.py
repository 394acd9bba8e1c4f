"""The watch for stalls: real threads, and limits of a fraction of a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from gracepoint.multihost import InMemoryStore, KeyValueStore, StoreProcessGroup, StoreUnavailable
from gracepoint.multihost.stalls import StallBoard
from gracepoint.multihost.store import Pods
from gracepoint.preemption import stall_watch
from gracepoint.preemption.stall_detector import Activity, is_compiling, look_every_s
from gracepoint.preemption.stall_watch import StallReports, StallWatch
from gracepoint.preemption.trainer_watch import SharedHeartbeat
from gracepoint.settings import Settings

LIMIT_S = 0.3
PATIENCE_S = 60.0


class Watched:
    """A process that is watched, and what was said of it."""

    def __init__(
        self,
        store: KeyValueStore,
        index: int = 0,
        count: int = 1,
        pods: Pods = ("pod-0", "pod-1", "pod-2"),
        heartbeat: SharedHeartbeat | None = None,
        **options: float,
    ) -> None:
        self.step = 0
        self.stalls = threading.Event()
        self.is_over = threading.Event()
        self.at_limit = threading.Event()
        self.suspects: list[int] = []
        self.why = self.stack = ""
        self.watch = StallWatch(
            LIMIT_S,
            self._activities,
            StallBoard(store, StoreProcessGroup(store, index, count), 0, pods),
            cast(StallReports, self),
            heartbeat,
            clock=time.monotonic,
            **options,
        )

    def _activities(self) -> list[Activity]:
        order, reached = (self.step,), f"sync point {self.step}"
        return [Activity("training", "training", order, order, reached, threading.main_thread().ident)]

    def stalled(self, stalled: Any, suspicion: Any) -> None:
        self.suspects, self.why, self.stack = suspicion.processes, suspicion.why, suspicion.stack
        self.stalls.set()

    def over(self, part: str) -> None:
        self.is_over.set()

    def limit(self, why: str) -> None:
        self.at_limit.set()


@pytest.fixture
def watched() -> Iterator[list[Watched]]:
    made: list[Watched] = []
    yield made
    for each in made:
        each.watch.stop()


def test_a_stall_is_logged_with_its_stack_and_reported(
    watched: list[Watched], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        watched.append(Watched(InMemoryStore(), others_s=LIMIT_S))
        assert watched[0].stalls.wait(PATIENCE_S)
    assert "stage=training" in caplog.text
    assert "test_a_stall_is_logged_with_its_stack_and_reported" in caplog.text
    assert watched[0].suspects == [0]
    assert "test_a_stall_is_logged" in watched[0].stack
    assert watched[0].at_limit.wait(PATIENCE_S)


def test_progress_after_a_stall_is_reported(watched: list[Watched]) -> None:
    watched.append(Watched(InMemoryStore(), others_s=LIMIT_S))
    assert watched[0].stalls.wait(PATIENCE_S)
    watched[0].step += 1
    assert watched[0].is_over.wait(PATIENCE_S)


def test_one_of_those_that_wait_reports_the_silent_one(watched: list[Watched]) -> None:
    store = InMemoryStore()
    watched.extend(Watched(store, index, 3, others_s=LIMIT_S) for index in (0, 2))
    assert all(each.at_limit.wait(PATIENCE_S) for each in watched)
    told = [each for each in watched if each.stalls.is_set()]
    assert [each.suspects for each in told] == [[1]]
    assert [each.stack for each in told] == [""]  # the one of process 1 is not known, and no other is meant


def test_a_stall_is_reported_within_30_s_though_the_store_is_silent(
    watched: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []

    def without_answer(function: Any, name: str, timeout_s: float) -> Any:
        waits_s.append(timeout_s)
        raise TimeoutError

    monkeypatch.setattr(stall_watch, "ask_in_thread", without_answer)
    watched.append(Watched(InMemoryStore(), 1, 2))
    assert watched[0].stalls.wait(PATIENCE_S)
    assert watched[0].suspects == [0]
    assert look_every_s(Settings().stall_after_s) + waits_s[0] < 30


class Unreachable(InMemoryStore):
    """The store of a process 0 that does not answer."""

    def set(self, key: str, value: str) -> None:
        raise StoreUnavailable("setting: no answer")


def test_process_0_is_suspected_if_its_store_does_not_answer(watched: list[Watched]) -> None:
    watched.append(Watched(Unreachable(), 1, 2, others_s=LIMIT_S))
    assert watched[0].stalls.wait(PATIENCE_S)
    assert watched[0].suspects == [0]
    assert "process 0 (pod-0), which hosts the coordination service, cannot be reached" in watched[0].why


class SlowToLook(Watched):
    """Its thread hangs in a look until ``goes_on`` is set."""

    def __init__(self, heartbeat: SharedHeartbeat) -> None:
        self.looks, self.goes_on = threading.Event(), threading.Event()
        super().__init__(InMemoryStore(), heartbeat=heartbeat, others_s=LIMIT_S)

    def _activities(self) -> list[Activity]:
        self.looks.set()
        self.goes_on.wait(PATIENCE_S)
        return super()._activities()


def test_a_look_that_outlasts_the_end_leaves_no_heartbeat() -> None:
    heartbeat = SharedHeartbeat()
    before = set(threading.enumerate())
    slow = SlowToLook(heartbeat)
    (thread,) = set(threading.enumerate()) - before
    assert slow.looks.wait(PATIENCE_S)
    slow.watch.stop()
    slow.goes_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert heartbeat.beats == 0, "else the worker would say that the process does not run"


def test_a_compilation_is_recognised_by_the_stack() -> None:
    import jax

    seen: list[bool] = []
    thread_id = threading.get_ident()

    def listener(event: str, **_: Any) -> None:
        if "compile" in event:
            seen.append(is_compiling(thread_id))

    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: listener(event))
    assert not is_compiling(thread_id)
    jax.jit(lambda x: x * 3.25 + 1)(1.5).block_until_ready()
    assert any(seen)
