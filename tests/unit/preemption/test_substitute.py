"""Who reports the end of a preemption if process 0 does not run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from gracepoint.multihost import InMemoryStore, KeyValueStore
from gracepoint.preemption.substitute import Substitute
from tests.unit.checkpoint.fakes.thread_limit import refuse_threads
from tests.unit.preemption.fakes.stores import Silent, Unreachable
from tests.unit.preemption.fakes.time_left import Left

PODS = tuple(f"pod-{index}" for index in range(5))
EPOCH = 3
#: Time for an answer on a busy machine, and little time, where none comes.
LONG_S, SHORT_S = 30.0, 2.0


def substitutes(store: KeyValueStore, indices: Sequence[int], until_s: float = SHORT_S) -> list[Substitute]:
    return [Substitute(store, index, 5, PODS, Left(until_s), most_s=60.0) for index in indices]


def told_by(processes: Sequence[Substitute], epoch: int = EPOCH) -> list[str]:
    """Has all of them end a preemption. Returns the reasons of those that report."""
    told: list[str] = []
    for process in processes:
        process.report(epoch, told.append)
    for process in processes:
        process.wait(60)
    return told


def test_process_0_reports_itself_if_it_runs() -> None:
    store = InMemoryStore()
    first, *others = substitutes(store, range(5), LONG_S)
    first.opened(EPOCH)
    assert told_by(others) == []
    assert first.reason(EPOCH) == ""
    first.close()


class WithoutAnswer(InMemoryStore):
    """In which nobody waits long for an answer, as none comes. There is much time for what follows."""

    def get(self, key: str, *, timeout_s: float) -> str:
        return super().get(key, timeout_s=min(timeout_s, 0.3))


def test_one_process_reports_if_process_0_does_not_answer() -> None:
    (told,) = told_by(substitutes(WithoutAnswer(), range(1, 5), LONG_S))
    assert told.startswith("process 0 (pod-0) does not answer: it has ended, is stopped, or hangs in code that holds")
    assert told.endswith("reports in its place")


def test_one_process_reports_if_process_0_ended_its_session_before() -> None:
    first, *others = substitutes(WithoutAnswer(), range(5), LONG_S)
    first.opened(EPOCH - 1)
    first.close()
    (told,) = told_by(others)
    assert told.startswith("process 0 (pod-0) does not answer: it has ended,")


def test_a_process_0_that_has_reported_may_have_ended() -> None:
    store = InMemoryStore()
    first, other = substitutes(store, (0, 1), LONG_S)
    first.opened(EPOCH)
    assert told_by([first]) == []
    for thread in answering():
        thread.join(60)
    assert told_by([other]) == []


@pytest.fixture
def silent() -> Iterator[Silent]:
    store = Silent()
    yield store
    store.goes_on.set()


def test_each_process_reports_if_the_store_is_silent_too(silent: Silent) -> None:
    told = told_by(substitutes(silent, (1, 2)))
    assert len(told) == 2
    assert all(each.startswith("process 0 (pod-0) does not answer, nor does the coordination service") for each in told)


def test_each_process_reports_if_the_store_cannot_be_reached() -> None:
    told = told_by(substitutes(Unreachable(), (1, 2)))
    assert len(told) == 2
    assert all("cannot be asked whether it runs (no answer)" in each for each in told)


def test_few_of_many_processes_ask_so_that_the_store_can_answer() -> None:
    store = Unreachable()
    many = [Substitute(store, index, 4096, PODS, Left(SHORT_S), most_s=60.0) for index in range(1, 4096)]
    assert sum(bool(process.reason(EPOCH)) for process in many) == 32


def test_process_0_alone_reports_an_end_before_any_agreement() -> None:
    (process,) = substitutes(InMemoryStore(), (1,))
    assert told_by([process], epoch=-1) == []
    assert process.reason(-1) == ""


def test_the_session_ends_the_answers_of_process_0_and_leaves_no_key() -> None:
    store = InMemoryStore()
    (process,) = substitutes(store, (0,), LONG_S)
    process.opened(EPOCH)
    process.ended(EPOCH)
    process.opened(EPOCH + 1)  # the epoch before was a drill
    process.close()
    process.close()
    for thread in answering():
        thread.join(60)
        assert not thread.is_alive()
    assert store.list("epoch") == {}


@pytest.mark.parametrize("then_s", [-1.0, LONG_S], ids=["the deadline has passed", "the deadline has moved"])
def test_process_0_answers_until_shortly_after_its_deadline(then_s: float) -> None:
    store = InMemoryStore()
    first = Substitute(store, 0, 5, PODS, Left(0.01, then_s), most_s=60.0, late_s=0.01)
    first.opened(EPOCH)
    if then_s < 0:
        for thread in answering():
            thread.join(60)
        assert len(told_by(substitutes(store, (1,)))) == 1
    else:
        assert told_by(substitutes(store, (1,), LONG_S)) == []
    first.close()


def test_a_freeze_begins_without_a_thread_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = substitutes(InMemoryStore(), (0,))
    refuse_threads(monkeypatch)
    first.opened(EPOCH)
    first.close()


def answering() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gracepoint-answers"]
