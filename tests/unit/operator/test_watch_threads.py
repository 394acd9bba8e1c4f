"""The threads that watch."""

from __future__ import annotations

import itertools
import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gracepoint_operator.cache.relister import ALWAYS
from gracepoint_operator.kube import objects
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.watches import Watches

_PATIENCE_S = 60.0


def watches(metrics: Metrics, *kinds: objects.Kind) -> Watches:
    state = SimpleNamespace(expect=lambda kinds: None, asked=lambda thread: None, ended=lambda thread: None)
    state.namespaces, state.places = (), lambda kind: ()
    controller = SimpleNamespace(watched=frozenset(kinds), watches=state)
    return Watches(cast(Any, controller), cast(Any, None), metrics, replica="replica-a")


def test_watches_that_never_started_can_be_closed() -> None:
    watches(Metrics(), *ALWAYS).close(1.0)


def test_an_end_of_kopf_counts_as_an_error_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf also ends without an error when it was cancelled because it hung: the reason tells nothing."""
    begun: queue.Queue[int] = queue.Queue()
    numbers = itertools.count(1)

    def run(*arguments: Any, **_: Any) -> str:
        (ends,) = (argument for argument in arguments if isinstance(argument, threading.Event))
        number = next(numbers)
        begun.put(number)
        if number > 1:  # the first run ends by itself
            ends.wait(_PATIENCE_S)
        return ""

    monkeypatch.setattr("gracepoint_operator.watches.run_kopf", run)
    metrics = Metrics()
    running = watches(metrics, objects.PODS)
    running.start()
    try:
        assert [begun.get(timeout=_PATIENCE_S) for _ in range(2)] == [1, 2]
        running.start_again()
        assert begun.get(timeout=_PATIENCE_S) == 3
    finally:
        running.close(_PATIENCE_S)
    assert metrics.registry.get_sample_value("gracepoint_watch_restarts_total", {"thread": "watch required"}) == 1.0
