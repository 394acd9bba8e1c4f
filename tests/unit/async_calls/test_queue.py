"""A queue finalizes calls in order, and in all processes at the same question."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from gracepoint import threads
from gracepoint.async_calls import (
    AsyncCallFailed,
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    ThreadAsyncCaller,
)
from gracepoint.async_calls.caller import CallCompletion
from gracepoint.errors import BarrierError, ForkedChild
from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.process_group import ProcessGroup, SingleProcess
from gracepoint.threads import Ending
from tests.forked import forked
from tests.interrupts import interrupt, interrupt_at
from tests.unit.async_calls.fakes import functions
from tests.unit.checkpoint.fakes.engine import in_gang, outcomes_in_gang
from tests.waiting import until


def request(
    function: Callable[..., object] | None, *arguments: object, then: Callable[[], object] | None = None
) -> AsyncRequest:
    return AsyncRequest(function, arguments, [then] if then else [])


def in_threads(gang: ProcessGroup | None = None, **arguments: Any) -> AsyncCallsQueue:
    return AsyncCallsQueue(caller=ThreadAsyncCaller(gang=gang or SingleProcess(), timeout_s=60, **arguments))


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_calls_are_numbered_and_finalized_in_order(persistent: bool, tmp_path: Path) -> None:
    queue, done = AsyncCallsQueue(persistent=persistent), list[str]()
    for n in range(4):
        each = request(functions.write, str(tmp_path / f"{n}"), "x")
        each.add_finalize_fn(functools.partial(done.append, f"{n} first"))
        each.add_finalize_fn(functools.partial(done.append, f"{n} then"))
        assert queue.schedule_async_request(each) == n
        assert queue.get_num_unfinalized_calls() == n + 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2, 3]
    assert done == [f"{n} {which}" for n in range(4) for which in ("first", "then")]
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    queue.close()


def test_a_call_that_has_ended_waits_for_the_one_before_it(tmp_path: Path) -> None:
    queue = in_threads()
    queue.schedule_async_request(request(functions.wait_for, str(tmp_path / "go on")))
    queue.schedule_async_request(request(None))
    assert queue.maybe_finalize_async_calls() == []
    (tmp_path / "go on").touch()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    queue.close()


def test_close_finalizes_what_is_left_and_takes_no_more() -> None:
    queue, done = in_threads(), list[int]()
    queue.schedule_async_request(request(None, then=lambda: done.append(1)))
    queue.close()
    queue.close()
    assert done == [1]
    with pytest.raises(RuntimeError, match="the queue is closed"):
        queue.schedule_async_request(request(None))


@pytest.mark.integration
def test_abort_finalizes_nothing_and_does_not_wait(tmp_path: Path) -> None:
    caller = PersistentAsyncCaller(gang=SingleProcess(), timeout_s=60)
    queue, done = AsyncCallsQueue(caller=caller), list[int]()
    queue.schedule_async_request(request(functions.wait_for, str(tmp_path / "never"), then=lambda: done.append(1)))
    (worker,) = caller.worker_process_ids
    queue.close(abort=True)
    assert done == []
    assert (queue.get_num_unfinalized_calls(), queue.maybe_finalize_async_calls(blocking=True)) == (0, [])
    assert not Path(f"/proc/{worker}").exists()


def test_a_failed_call_is_reported_with_the_finalized_ones() -> None:
    queue, done = in_threads(), list[int]()
    for n in range(3):
        function = functions.fail if n == 1 else None
        queue.schedule_async_request(request(function, "full disk", then=functools.partial(done.append, n)))
    with pytest.raises(AsyncCallFailed, match="(?s)asynchronous call 1 failed.*ValueError: full disk") as failed:
        queue.maybe_finalize_async_calls(blocking=True)
    assert (failed.value.finalized, failed.value.call, done) == ((0, 2), 1, [0, 2])
    assert queue.maybe_finalize_async_calls(blocking=True) == []


def test_the_kind_of_question_may_not_change_while_calls_are_active(tmp_path: Path) -> None:
    queue = in_threads()
    queue.schedule_async_request(request(functions.wait_for, str(tmp_path / "go on")))
    assert queue.maybe_finalize_async_calls(no_dist=True) == []
    with pytest.raises(ValueError, match="no_dist=True, found no_dist=False"):
        queue.maybe_finalize_async_calls()
    (tmp_path / "go on").touch()
    assert queue.maybe_finalize_async_calls(no_dist=True, blocking=True) == [0]
    queue.schedule_async_request(request(None))
    assert queue.maybe_finalize_async_calls() == [1]


@pytest.mark.integration
@pytest.mark.parametrize("blocking", [True, False])
def test_calls_are_finalized_in_order_by_a_process_that_looks_at_itself_only_too(
    tmp_path: Path, blocking: bool
) -> None:
    def train(gang: ProcessGroup) -> tuple[list[int], list[int]]:
        # Calls may overlap, so later ones may end first.
        queue, done = AsyncCallsQueue(caller=TemporalAsyncCaller(gang=gang, timeout_s=60)), list[int]()
        go_on = str(tmp_path / f"go on {gang.process_index}")
        for n in range(3):
            function = functions.wait_for if n == 1 else functions.write
            arguments = (go_on,) if n == 1 else (f"{go_on} {n}", "x")
            queue.schedule_async_request(request(function, *arguments, then=functools.partial(done.append, n)))
        found = list[int]()

        def finalized(count: int) -> bool:
            found.extend(queue.maybe_finalize_async_calls(no_dist=True))
            return len(found) >= count

        until(lambda: finalized(1) and Path(f"{go_on} 2").exists(), "calls 0 and 2 to end")
        assert (found, done) == ([0], [0])  # whatever the other process does
        assert queue.maybe_finalize_async_calls(no_dist=True) == []
        Path(go_on).touch()
        if blocking:
            found += queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        until(lambda: finalized(3), "calls 1 and 2 to end")
        queue.close()
        return found, done

    assert in_gang(2, train) == [([0, 1, 2], [0, 1, 2])] * 2


@pytest.mark.parametrize("arguments", [{"persistent": True}, {"gang": SingleProcess()}])
def test_a_caller_comes_with_all_of_its_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected caller, or persistent and gang; found both"):
        AsyncCallsQueue(caller=ThreadAsyncCaller(gang=SingleProcess()), **arguments)


@pytest.mark.parametrize("count", [2, 4])
def test_all_processes_finalize_the_same_calls_at_the_same_question(count: int) -> None:
    def train(gang: ProcessGroup) -> list[tuple[int, ...]]:
        queue, answers = in_threads(gang), list[tuple[int, ...]]()
        for step in range(400):
            if step % 40 == 0:
                # Calls end at different moments in different processes.
                event = threading.Event()
                queue.schedule_async_request(request(event.wait, 0.002 * gang.process_index * (step % 3)))
            answers.append(tuple(queue.maybe_finalize_async_calls()))
        answers.append(tuple(queue.maybe_finalize_async_calls(blocking=True)))
        queue.close()
        return answers

    answers = in_gang(count, train)
    assert answers == [answers[0]] * count
    assert [call for answer in answers[0] for call in answer] == list(range(10))


def test_a_call_is_finalized_only_when_it_has_ended_in_all_processes(tmp_path: Path) -> None:
    def train(gang: ProcessGroup) -> list[bool]:
        queue, seen = in_threads(gang), list[bool]()
        late = gang.process_index == 1
        waits = request(functions.wait_for, str(tmp_path / "go on")) if late else request(None)
        queue.schedule_async_request(waits._replace(finalize_fns=[lambda: seen.append((tmp_path / "go on").exists())]))
        for _ in range(20):
            assert queue.maybe_finalize_async_calls() == []
        gang.barrier("asked", timeout_s=60)
        (tmp_path / "go on").touch()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        return seen

    assert in_gang(2, train) == [[True], [True]]


def test_a_caller_says_that_a_call_is_done_when_it_has_ended_in_all_processes(tmp_path: Path) -> None:
    def train(gang: ProcessGroup) -> list[bool]:
        caller, late = ThreadAsyncCaller(gang=gang, timeout_s=60), gang.process_index == 1
        caller.schedule_async_call(request(functions.wait_for, str(tmp_path / "go on")) if late else request(None))
        found = [caller.is_current_async_call_done() for _ in range(20)]
        gang.barrier("asked", timeout_s=60)
        (tmp_path / "go on").touch()
        found.append(caller.is_current_async_call_done(blocking=True))
        found.append(caller.is_current_async_call_done())  # there is no other
        return found

    assert in_gang(2, train) == [[False] * 20 + [True] * 2] * 2


def test_a_caller_raises_the_error_of_another_process_once() -> None:
    def train(gang: ProcessGroup) -> str:
        caller = ThreadAsyncCaller(gang=gang, timeout_s=60)
        caller.schedule_async_call(request(functions.fail if gang.process_index == 1 else None, "full disk"))
        with pytest.raises(AsyncCallFailed) as failed:
            caller.is_current_async_call_done(blocking=True)
        assert caller.is_current_async_call_done()
        return failed.value.failures[1]

    assert all("ValueError: full disk" in text for text in in_gang(2, train))


@pytest.mark.parametrize("late", [0, 1])
def test_a_caller_without_other_processes_looks_at_its_own_call(tmp_path: Path, late: int) -> None:
    def train(gang: ProcessGroup) -> bool:
        caller = ThreadAsyncCaller(gang=gang, timeout_s=60)
        waits = request(functions.wait_for, str(tmp_path / "go on"))
        caller.schedule_async_call(waits if gang.process_index == late else request(None))
        found = caller.is_current_async_call_done(no_dist=True)
        gang.barrier("asked", timeout_s=60)
        (tmp_path / "go on").touch()
        return found

    assert in_gang(2, train) == [late != 0, late != 1]


def test_every_process_learns_the_error_of_every_process_that_failed() -> None:
    def train(gang: ProcessGroup) -> None:
        queue = in_threads(gang)
        function = None if gang.process_index == 1 else functions.fail
        queue.schedule_async_request(request(function, f"full disk {gang.process_index}"))
        queue.maybe_finalize_async_calls(blocking=True)

    for outcome in outcomes_in_gang(3, train):
        assert isinstance(outcome, AsyncCallFailed)
        assert sorted(outcome.failures) == [0, 2]
        for process, text in outcome.failures.items():
            assert f"ValueError: full disk {process}" in text
            assert "in fail" in text


def test_a_call_that_one_process_cannot_schedule_fails_in_the_others() -> None:
    def train(gang: ProcessGroup) -> None:
        queue = AsyncCallsQueue(persistent=True, gang=gang)
        queue.schedule_async_request(request((lambda: None) if gang.process_index == 0 else None))
        queue.maybe_finalize_async_calls(blocking=True)

    refused, told = outcomes_in_gang(2, train)
    assert isinstance(refused, TypeError)
    assert isinstance(told, AsyncCallFailed)
    assert "it is a lambda" in told.failures[0]


def test_a_process_that_schedules_fewer_calls_is_named() -> None:
    def train(gang: ProcessGroup) -> None:
        queue = AsyncCallsQueue(caller=ThreadAsyncCaller(gang=gang, timeout_s=1))
        queue.schedule_async_request(request(None))
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        if gang.process_index != 1:
            queue.schedule_async_request(request(time.sleep, 0.5))  # others are waited for after that
            queue.maybe_finalize_async_calls(blocking=True)

    for outcome in outcomes_in_gang(3, train)[::2]:
        assert isinstance(outcome, AsyncCallFailed)
        assert re.search("call 1 did not end in all processes: .*without process 1 of 3", str(outcome)), outcome


def refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Refuses the next start of a thread with this name. Returns the refused ones."""
    real, refused = threading.Thread.start, list[str]()

    def limited(thread: threading.Thread) -> None:
        if thread.name == name and not refused:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return refused


def test_a_call_that_gets_no_thread_fails_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, done = in_threads(), list[int]()
    refuse(monkeypatch, "gracepoint-async-calls")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        queue.schedule_async_request(request(done.append, 1))
    queue.schedule_async_request(request(done.append, 2, then=lambda: done.append(3)))
    assert len(queue.maybe_finalize_async_calls(blocking=True)) == 1
    queue.close()
    assert done == [2, 3]


def test_a_gang_continues_after_a_call_whose_end_no_thread_awaits(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = threading.Event()

    def train(gang: ProcessGroup) -> tuple[str, list[int]]:
        queue, error = in_threads(gang), ""
        try:
            if gang.process_index == 1:
                assert turn.wait(60)
            try:
                queue.schedule_async_request(request(None))
            finally:
                turn.set()
            queue.maybe_finalize_async_calls(blocking=True)
        except RuntimeError as refused:  # an AsyncCallFailed, too
            error = f"{type(refused).__name__}: {refused}"
        queue.schedule_async_request(request(None))
        return error, queue.maybe_finalize_async_calls(blocking=True)

    refuse(monkeypatch, "gracepoint-async-ends")
    (refused, first), (told, second) = in_gang(2, train)
    assert refused == "NoThread: can't start new thread"
    assert told.startswith("AsyncCallFailed: ")
    assert "can't start new thread" in told
    assert first == second == [1]


def test_sync_says_whether_any_process_has_a_call_left() -> None:
    def ask(gang: ProcessGroup) -> list[bool]:
        caller = ThreadAsyncCaller(gang=gang, timeout_s=60)
        return [caller.sync_all_async_calls(gang.process_index), caller.sync_all_async_calls(0)]

    assert in_gang(2, ask) == [[False, True]] * 2


def test_many_saves_leave_no_keys_in_the_store() -> None:
    store = Counted()

    def train(index: int) -> None:
        queue = in_threads(StoreProcessGroup(store, index, 2))
        for _ in range(200):
            queue.schedule_async_request(request(None))
            queue.maybe_finalize_async_calls()
            queue.maybe_finalize_async_calls(blocking=True)

    with concurrent.futures.ThreadPoolExecutor(2) as processes:
        list(processes.map(train, range(2)))
    assert len(store.keys) < 20


class Counted(InMemoryStore):
    """Notes which keys there are."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        self.keys.add(key)

    def increment(self, key: str, by: int = 1) -> int:
        self.keys.add(key)
        return super().increment(key, by)

    def delete_folder(self, folder: str) -> None:
        super().delete_folder(folder)
        self.keys = {key for key in self.keys if not f"{key}/".startswith(f"{folder}/")}


def test_keys_that_cannot_be_removed_do_not_fail_a_call(caplog: pytest.LogCaptureFixture) -> None:
    class Full(StoreProcessGroup):
        def retire(self, folder: str) -> None:
            raise BarrierError("the store is full")

    store = InMemoryStore()

    def train(index: int) -> list[int]:
        queue = in_threads(Full(store, index, 2))
        found = list[int]()
        for _ in range(3):
            queue.schedule_async_request(request(None))
            found += queue.maybe_finalize_async_calls(blocking=True)
        return found

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, range(2))) == [[0, 1, 2]] * 2


def test_a_meeting_that_breaks_fails_only_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flaky(StoreProcessGroup):
        broken = True

        def gather(self, *arguments: Any, **keywords: Any) -> list[str]:
            if self.broken:
                raise ZeroDivisionError("a defect")
            return super().gather(*arguments, **keywords)

    store = InMemoryStore()
    gang, other = Flaky(store, 0, 2), StoreProcessGroup(store, 1, 2)
    queue = in_threads(gang)
    queue.schedule_async_request(request(None))
    with pytest.raises(AsyncCallFailed, match="a defect"):
        queue.maybe_finalize_async_calls(blocking=True)
    gang.broken = False
    beside = in_threads(other)
    for _ in range(2):
        beside.schedule_async_request(request(None))
    queue.schedule_async_request(request(None))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]


def test_wherever_the_start_of_a_call_is_interrupted_the_next_one_is_finalized() -> None:
    class Two(SingleProcess):
        """This process, and another one that always does the same."""

        process_count = 2

        def gather(
            self, key: str, value: str, *, timeout_s: float, processes: Collection[int] | None = None
        ) -> list[str]:
            return [value, value]

    for number in itertools.count():
        ends = CallCompletion(Two(), "a", timeout_s=30)
        here = Ending()
        here.end()
        reached = interrupt_at(functools.partial(ends.add, 0, here), number, [threads])
        assert ends.add(1, here).wait(30)
        if not reached:
            break
    assert number > 20


def test_a_close_that_was_interrupted_continues(tmp_path: Path) -> None:
    queue, done = in_threads(), list[int]()
    queue.schedule_async_request(
        request(functions.wait_for, str(tmp_path / "go on"), then=functools.partial(done.append, 0))
    )
    assert interrupt(queue.close, 0.05, times=2)
    (tmp_path / "go on").touch()
    queue.close()
    assert done == [0]


@pytest.mark.integration
def test_a_forked_child_finalizes_nothing_of_its_parent(tmp_path: Path) -> None:
    queue, done = in_threads(), list[int]()
    queue.schedule_async_request(request(functions.write, str(tmp_path / "a"), "x", then=lambda: done.append(0)))
    until((tmp_path / "a").exists, "the call to end")

    def schedule() -> None:
        queue.schedule_async_request(request(functions.write, str(tmp_path / "b"), "x"))

    def in_child() -> str:
        queue.close()  # nothing of its own: no word
        said = []
        for call in (schedule, functools.partial(queue.maybe_finalize_async_calls, blocking=True)):
            with pytest.raises(ForkedChild) as raised:
                call()
            said.append(str(raised.value).partition(" belongs to process")[0])
        return f"{done}, {', '.join(said)}"

    assert forked(in_child) == "[], this caller of asynchronous calls, this queue of asynchronous calls"
    assert not (tmp_path / "b").exists()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert done == [0]
    queue.close()


@pytest.mark.integration
def test_a_forked_child_leaves_the_workers_to_its_parent(tmp_path: Path) -> None:
    caller = PersistentAsyncCaller(gang=SingleProcess(), timeout_s=60)
    queue = AsyncCallsQueue(caller=caller)
    queue.schedule_async_request(request(functions.write, str(tmp_path / "a"), "x"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    workers = caller.worker_process_ids

    def in_child() -> str:
        caller.kill()
        caller.close(abort=True)
        return f"{caller.worker_process_ids}"

    assert forked(in_child) == "[]"
    queue.schedule_async_request(request(functions.write, str(tmp_path / "b"), "x"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert caller.worker_process_ids == workers
    queue.close()


@pytest.mark.integration
def test_a_forked_child_keeps_no_connection_by_which_a_worker_sees_that_its_trainer_lives() -> None:
    def sockets() -> set[str]:
        """The sockets that this process has open."""
        found = set()
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        return {name for name in found if name.startswith("socket:")}

    before = sockets()
    caller = PersistentAsyncCaller(gang=SingleProcess(), timeout_s=60)
    caller.start_worker()
    connections = sockets() - before
    assert connections
    assert forked(lambda: str(sockets() & connections)) == "set()"
    caller.close()
