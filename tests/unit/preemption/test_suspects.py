"""Who holds up the others when the time of a preemption is over: asked in a fraction of a second."""

from __future__ import annotations

import threading

from gracepoint.multihost import InMemoryStore, KeyValueStore, StoreGang, StoreUnavailable
from gracepoint.multihost.stalls import StallBoard
from gracepoint.preemption.stall_detector import Activity
from gracepoint.preemption.suspects import Suspects

PODS = ("pod-0", "pod-1", "pod-2")


def suspects(store: KeyValueStore, index: int, sync_point: int = 7) -> Suspects:
    order, reached = (sync_point,), f"sync point {sync_point}"
    training = Activity("training", "training", (), order, reached, threading.get_ident())
    return Suspects(StallBoard(store, StoreGang(store, index, 3)), lambda: [training], PODS)


def test_a_process_that_says_nothing_is_named_by_its_pod() -> None:
    store = InMemoryStore()
    answers = [suspects(store, index).ask(0) for index in (0, 2)]
    for found in [answer() for answer in answers]:
        assert found.why.startswith("process 1 (pod-1) did not say so as well")
        assert found.host_answers


def test_a_process_that_is_behind_is_named_with_its_stack() -> None:
    store = InMemoryStore()
    answers = [suspects(store, index, sync_point).ask(0) for index, sync_point in enumerate((7, 7, 6))]
    why = answers[0]().why
    assert why.startswith("process 2 (pod-2) is at sync point 6, others at sync point 7; it is at: File")


class Unreachable(InMemoryStore):
    """The store of a process 0 that has ended."""

    def delete_folder(self, folder: str) -> None:
        raise StoreUnavailable("no answer")


class Silent(InMemoryStore):
    """The store of a process 0 that is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def delete_folder(self, folder: str) -> None:
        self.goes_on.wait(60)


def test_process_0_is_named_if_its_store_cannot_be_reached() -> None:
    found = suspects(Unreachable(), 1).ask(0)()
    assert found.why.startswith("process 0 (pod-0), which hosts the coordination service, cannot be reached")
    assert not found.host_answers


def test_process_0_is_named_if_its_store_is_silent() -> None:
    store = Silent()
    found = suspects(store, 1).ask(0)()
    assert found.why == "process 0 (pod-0), which hosts the coordination service, does not answer"
    assert not found.host_answers
    store.goes_on.set()
