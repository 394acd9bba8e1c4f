"""What is said when ``attach`` makes no progress: real threads, and limits of a fraction of a second."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gracepoint
from gracepoint.errors import BarrierError
from gracepoint.multihost import InMemoryStore, StoreProcessGroup, StoreUnavailable
from gracepoint.preemption.stall_watch import AttachWatch
from gracepoint.settings import Settings
from gracepoint.wire.names import STALLED_EXIT_CODE
from tests.unit.multihost.fakes.gangs import gangs
from tests.waiting import until

# Threads that wait for real seconds.
pytestmark = pytest.mark.integration

LIMIT_S = 0.3
PATIENCE_S = 60.0
KEY = "members"


class Operator:
    """Keeps what it is told, in place of a connection."""

    def __init__(self) -> None:
        self.sender = self
        self.messages: list[Any] = []
        self.told = threading.Event()
        self.over = threading.Event()

    def send(self, message: Any, **_: Any) -> None:
        self.messages.append(message)
        (self.over if message.over else self.told).set()

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


def watch(operator: Operator, action: str = "report", **options: Any) -> AttachWatch:
    settings = Settings(stall_after_s=LIMIT_S, stall_action=action)
    return AttachWatch(settings, operator=lambda: operator, slow_s=LIMIT_S / 2, **options)  # type: ignore[arg-type,return-value]


@pytest.fixture
def come() -> Iterator[Callable[[StoreProcessGroup], None]]:
    """Has a process come to the barrier, in a thread that waits there until the end of the test."""
    waiting: list[tuple[StoreProcessGroup, threading.Thread]] = []

    def wait(gang: StoreProcessGroup) -> None:
        with contextlib.suppress(BarrierError):
            gang.barrier(KEY, timeout_s=PATIENCE_S)

    def begin(gang: StoreProcessGroup) -> None:
        thread = threading.Thread(target=wait, args=(gang,))
        thread.start()
        waiting.append((gang, thread))
        until(gang.awaited, "the process to wait")

    yield begin
    for gang, thread in waiting:
        gang.cancel(KEY, "the test has ended")
        thread.join(PATIENCE_S)


def test_the_processes_that_do_not_come_are_named(
    come: Callable[[StoreProcessGroup], None], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = gangs(3)
    come(second)
    come(third)
    operator = Operator()
    with caplog.at_level(logging.WARNING), watch(operator) as watching:
        watching.met(second, ["pod-0", "pod-1", "pod-2"])
        with watching.at("meeting of the processes"):
            assert operator.told.wait(PATIENCE_S)
            first.barrier(KEY, timeout_s=PATIENCE_S)
        assert operator.over.wait(PATIENCE_S)
    assert "attach waits stage=meeting of the processes" in caplog.text
    assert "test_the_processes_that_do_not_come_are_named" in caplog.text  # the stack of this thread
    (told, over) = operator.messages
    assert (told.stage, told.suspects, told.over) == ("meeting of the processes", [0], False)
    assert told.message == "this process waits for process 0 (pod-0)"
    assert over.over


def test_one_of_those_that_wait_notifies_the_operator(come: Callable[[StoreProcessGroup], None]) -> None:
    _, second, third = gangs(3)
    come(second)
    come(third)
    telling, silent = Operator(), Operator()
    with watch(telling) as a, watch(silent) as b:
        a.met(second)
        b.met(third)
        with a.at("meeting"), b.at("meeting"):
            assert telling.told.wait(PATIENCE_S)
            assert not silent.told.wait(2 * LIMIT_S)


def test_a_process_before_the_meeting_is_awaited_where_others_start_the_backend() -> None:
    first, second = gangs(2)
    with second.waiting.expecting("backend"):
        assert second.awaited() == [0]
        with first.waiting.expecting("backend"):
            assert second.awaited() == []
    assert second.awaited() == []


def test_process_0_is_suspected_if_the_store_does_not_answer() -> None:
    class Gone(InMemoryStore):
        def list(self, folder: str) -> dict[str, str]:
            raise StoreUnavailable("no answer")

    operator = Operator()
    gang = StoreProcessGroup(Gone(), 1, 2)
    come_key = gang.waiting.at("b", lambda: list(map(int, Gone().list("b"))))
    with watch(operator) as watching, come_key, watching.at("meeting"):
        watching.met(gang)
        assert operator.told.wait(PATIENCE_S)
    assert operator.messages[0].suspects == [0]
    assert "does not answer" in operator.messages[0].message


def test_a_stage_that_continues_in_time_is_not_reported() -> None:
    operator = Operator()
    settings = Settings(stall_after_s=2.0)
    with AttachWatch(settings, operator=lambda: operator, slow_s=2.0) as watching:  # type: ignore[arg-type,return-value]
        for number in range(25):  # longer than the limit, all together
            with watching.at(f"stage {number}"):
                time.sleep(0.1)
    assert operator.messages == []


def test_the_process_exits_if_the_policy_says_so() -> None:
    codes: list[int] = []
    left = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    with watch(Operator(), "restart", leave=leave) as watching, watching.at("claim of the directory"):
        assert left.wait(PATIENCE_S)
    assert codes == [STALLED_EXIT_CODE]


def test_a_stuck_handler_of_the_log_keeps_no_process_from_its_exit() -> None:
    handler, left = logging.StreamHandler(io.StringIO()), threading.Event()
    held = handler.lock
    assert held is not None
    with held, watch(Operator(), "restart", leave=lambda code: left.set()) as watching, watching.at("meeting"):
        assert left.wait(PATIENCE_S)


def test_a_process_exits_though_the_question_of_whom_it_waits_for_fails() -> None:
    class Broken(InMemoryStore):
        def list(self, folder: str) -> dict[str, str]:
            raise ValueError("what nobody expects")

    left, gang = threading.Event(), StoreProcessGroup(Broken(), 1, 2)
    come_key = gang.waiting.at("b", lambda: list(map(int, Broken().list("b"))))
    with watch(Operator(), "restart", leave=lambda code: left.set()) as watching, come_key, watching.at("meeting"):
        watching.met(gang)
        assert left.wait(PATIENCE_S)


def test_an_attach_that_failed_is_not_reported_to_continue() -> None:
    operator = Operator()

    def meet() -> None:
        with watch(operator) as watching, watching.at("meeting"):
            assert operator.told.wait(PATIENCE_S)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        meet()
    assert [message.over for message in operator.messages] == [False]


def test_nothing_is_watched_without_a_limit() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with AttachWatch(Settings(stall_after_s=0)) as watching, watching.at("meeting"):
        assert {thread.name for thread in threading.enumerate()} == before


def test_the_threads_that_stay_are_those_that_the_decision_explains(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "decisions" / "0028-eight-threads.md").read_text()
    explained = set(re.findall(r"^\| `(gracepoint-[\w-]+)` \|", page, re.MULTILINE))
    before = set(threading.enumerate())
    with gracepoint.attach(tmp_path):
        staying = {thread.name for thread in set(threading.enumerate()) - before}
    assert staying == explained - {"gracepoint-subscription", "gracepoint-sender"}  # there is no operator here


def test_a_wait_for_what_is_not_there_is_said_and_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    operator, codes = Operator(), list[int]()
    with watch(operator, "restart", leave=codes.append) as watching:
        with watching.at("waiting for the other processes", may_last=True):
            until(lambda: "attach waits stage=waiting for the other processes" in caplog.text, "the log to say so")
            assert not operator.told.wait(2 * LIMIT_S)
        with watching.at("meeting of the processes"):
            assert operator.told.wait(PATIENCE_S)
            until(lambda: codes, "the exit")
    assert [message.stage for message in operator.messages if not message.over] == ["meeting of the processes"]


def test_attempts_at_storage_that_is_away_are_progress() -> None:
    operator = Operator()
    with watch(operator) as watching, watching.at("claim of the directory"):
        assert operator.told.wait(PATIENCE_S)
        watching.goes_on()
        assert operator.over.wait(PATIENCE_S)
