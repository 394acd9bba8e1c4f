"""What is known of the watches: their ages, and the threads that hang."""

from __future__ import annotations

import logging

import pytest

from gracepoint_operator.cache.watch_state import HANGS_AFTER_S, WatchState
from gracepoint_operator.kube import objects
from gracepoint_operator.metrics import Metrics
from tests.unit.operator.fakes.objects import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watches(clock: Clock) -> WatchState:
    return WatchState(Metrics(), clock)


def test_the_age_of_a_watch_counts_from_the_last_answer_or_event(watches: WatchState, clock: Clock) -> None:
    watches.answered(objects.NODES, listed=True)
    clock.move(20)
    assert watches.ages() == {objects.NODES: 20}
    watches.seen(objects.NODES)
    clock.move(5)
    watches.failed(objects.NODES, "refused", optional=False)
    assert watches.ages() == {objects.NODES: 5}


def test_a_thread_hangs_when_it_has_sent_no_request_for_long(watches: WatchState, clock: Clock) -> None:
    watches.asked("watch nodes")
    watches.asked("watch pods")
    clock.move(HANGS_AFTER_S)
    assert watches.hanging() == []
    watches.asked("watch pods")
    clock.move(1)
    assert watches.hanging() == ["watch nodes"]
    watches.ended("watch nodes")
    assert watches.hanging() == []


def test_a_failure_is_in_the_log_once_it_lasts_and_once(
    watches: WatchState, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):  # as while the API server begins to serve a kind
        watches.failed(objects.NODES, "HTTP 429 Too Many Requests", optional=False)
        clock.move(1)
        watches.answered(objects.NODES)
    assert caplog.messages == []
    for _ in range(10):
        watches.failed(objects.NODES, "HTTP 403 Forbidden", optional=False)
        clock.move(1)
    watches.answered(objects.NODES)
    assert caplog.messages == ["a kind fails, and is tried again", "watched again"]


def test_a_kind_that_every_cluster_needs_is_missed_once_and_greeted(
    watches: WatchState, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        watches.absent(objects.JOBS, optional=False)
        watches.absent(objects.NODE_CLAIMS, optional=True)
    watches.answered(objects.JOBS, listed=True)
    watches.answered(objects.NODE_CLAIMS, listed=True)
    assert caplog.messages == [
        "the cluster lacks a kind, which is watched once it is installed",
        "a kind is installed now, and watched",
    ]


def test_each_watched_namespace_has_its_own_age_and_failures(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watches = WatchState(Metrics(), clock, ["a", "b"])
    assert (watches.places(objects.PODS), watches.places(objects.NODES)) == (("a", "b"), ("",))
    gaps = []
    watches.on_gap = lambda kind, any_event: gaps.append(any_event)
    for namespace in ("a", "b"):
        watches.answered(objects.PODS, namespace, listed=True)
    for _ in range(10):
        watches.failed(objects.PODS, "HTTP 403 Forbidden", "b", optional=False)
        clock.move(1)
        watches.answered(objects.PODS, "a")
        watches.seen(objects.PODS, "a")
    assert watches.ages() == {objects.PODS: 10}
    assert gaps == [True, True], "the other one has missed nothing"
    watches.left(objects.PODS, "b")
    assert watches.ages() == {objects.PODS: 0}
    assert caplog.messages == ["a kind fails, and is tried again"]
