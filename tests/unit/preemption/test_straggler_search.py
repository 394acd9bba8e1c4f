"""Who holds up the others when the time of a preemption is over: asked in a fraction of a second."""

from __future__ import annotations

import threading

import pytest

from gracepoint.multihost import InMemoryStore, KeyValueStore, StoreProcessGroup
from gracepoint.multihost.stalls import StallBoard
from gracepoint.preemption import stall_watch as module
from gracepoint.preemption.stall_detector import Activity
from gracepoint.preemption.stall_watch import StragglerSearch
from gracepoint.preemption.substitute import Substitute
from tests.unit.preemption.fakes.stores import Silent, Unreachable
from tests.unit.preemption.fakes.time_left import Left

# Threads that wait for real seconds.
pytestmark = pytest.mark.integration

PODS = ("pod-0", "pod-1", "pod-2")


def search(
    store: KeyValueStore,
    index: int,
    sync_point: int = 7,
    host: int = 0,
    *,
    patient: bool = False,
    most_s: float = 1.5,
) -> StragglerSearch:
    """``patient``: the answer may take long, so that a busy machine does not matter."""
    order, reached = (sync_point,), f"sync point {sync_point}"
    training = Activity("training", "training", (), order, reached, threading.get_ident())
    board = StallBoard(store, StoreProcessGroup(store, index, 3), host, PODS)
    limits = {"answer_s": 20.0, "others_s": 1.0} if patient else {}
    return StragglerSearch(board, lambda: [training], substitute(store, index, most_s), **limits)


def substitute(store: KeyValueStore, index: int, most_s: float = 1.5) -> Substitute:
    return Substitute(store, index, 3, PODS, Left(30.0), most_s)


class Counting(InMemoryStore):
    """Counts who reads what all have said."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = 0

    def list(self, folder: str) -> dict[str, str]:
        self.lists += 1
        return super().list(folder)


def test_process_0_names_a_process_that_says_nothing_by_its_pod() -> None:
    store = Counting()
    primary = substitute(store, 0, most_s=60.0)
    primary.opened(0)
    answers = [search(store, index, patient=True, most_s=60.0).ask(0, 20.0) for index in (0, 2)]
    first, other = (answer() for answer in answers)
    assert first.startswith("process 1 (pod-1) did not say so as well")
    assert other == ""
    assert store.lists == 1, "process 0 alone reads what all have said"
    primary.close()


def test_one_process_names_a_process_0_that_does_not_run() -> None:
    store = Counting()
    answers = [search(store, index, patient=True).ask(0, 20.0) for index in (1, 2)]
    (found,) = [words for answer in answers if (words := answer())]
    assert found.startswith("process 0 (pod-0) did not say so as well")
    assert store.lists == 1


def test_a_process_that_is_behind_is_named_with_its_stack() -> None:
    store = InMemoryStore()
    answers = [
        search(store, index, sync_point, patient=True).ask(0, 20.0) for index, sync_point in enumerate((7, 7, 6))
    ]
    why = answers[0]()
    assert why.startswith("process 2 (pod-2) is at sync point 6, others at sync point 7; it is at: File")


def test_process_0_is_named_if_its_store_cannot_be_reached() -> None:
    found = search(Unreachable(), 1).ask(0, 20.0)()
    assert found.startswith("process 0 (pod-0), which hosts the coordination service, cannot be reached")


def test_process_0_is_named_if_its_store_is_silent() -> None:
    store = Silent()
    found = search(store, 1).ask(0)()
    assert found == "process 0 (pod-0), which hosts the coordination service, does not answer"
    store.goes_on.set()


def test_process_0_names_another_process_that_hosts_the_store() -> None:
    store = Silent()
    found = search(store, 0, host=2).ask(0)()
    assert found == "process 2 (pod-2), which hosts the coordination service, does not answer"
    store.goes_on.set()


def test_process_0_does_not_suspect_itself_if_its_store_is_slow() -> None:
    store = Silent()
    assert search(store, 0).ask(0)() == ""
    store.goes_on.set()


def test_a_near_deadline_leaves_less_time_for_the_answer() -> None:
    store = Silent()
    assert search(store, 1, patient=True).ask(0, most_s=0.1)().endswith("does not answer")  # else it takes minutes
    assert not store.goes_on.is_set()
    store.goes_on.set()


def test_source_files_on_a_file_system_that_hangs_delay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, was_read = threading.Event(), threading.Event()

    def stack_of(thread_id: int | None) -> str:
        hangs.wait(20)
        was_read.set()
        return ""

    monkeypatch.setattr(module, "stack_of", stack_of)
    assert search(InMemoryStore(), 0).ask(0)() == ""
    assert not was_read.is_set()
    hangs.set()


def fails() -> list[Activity]:
    raise ValueError("an error of this library")


def test_an_error_while_it_is_found_out_keeps_no_report_back() -> None:
    store = InMemoryStore()
    board = StallBoard(store, StoreProcessGroup(store, 0, 3), 0, PODS)
    assert StragglerSearch(board, fails, substitute(store, 0)).ask(0)() == ""
