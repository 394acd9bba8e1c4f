"""The deletion of trash beside the saves: what it does not reach is said."""

from __future__ import annotations

import collections
import errno
import functools
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gracepoint import threads
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import commit, retention
from gracepoint.checkpoint.steps.retention import Retention, StepCleaner
from gracepoint.checkpoint.storage import undeleted
from gracepoint.deadline import Deadline
from tests.interrupts import Interrupted, interrupt_at
from tests.unit.checkpoint.fakes.thread_limit import refuse_threads
from tests.unit.checkpoint.steps.fakes.small_saves import STEP, write
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore
from tests.waiting import until_no_thread


@pytest.fixture
def store() -> FlatStore:
    return FlatStore()


@pytest.fixture
def cleaner(store: FlatStore) -> StepCleaner:
    """Tidies a directory of one step, which retention has just condemned."""
    return condemned(store)


def condemned(store: FlatStore) -> StepCleaner:
    paths = Layout(FlatPath(store, "run"))
    assert commit.of(paths).finalize(write(paths, "a"), replace=True)
    commit.of(paths).discard(paths.step(STEP), paths.trash(STEP, "a", 2))
    return StepCleaner(paths, Retention(), "b")


@pytest.fixture
def told() -> Iterator[list[list[str]]]:
    """What is reported of deletions that fail."""
    reports: list[list[str]] = []
    undeleted.end()
    undeleted.listen(reports.append)
    yield reports
    undeleted.end()


def refuses_deletions(operation: str, key: str) -> None:
    if operation == "delete":
        raise OSError(errno.EIO, "the store is ill")


def test_an_error_of_a_deletion_is_logged(
    store: FlatStore, cleaner: StepCleaner, caplog: pytest.LogCaptureFixture
) -> None:
    store.before = refuses_deletions
    cleaner.tidy(None, ordinal=2)
    cleaner.finish(Deadline.after(30, time.monotonic))
    assert f"{STEP}.gracepoint-trash.a.2 cannot be deleted: [Errno 5] the store is ill" in caplog.text


def test_a_deletion_that_failed_is_tried_again_by_the_next_sweep(
    store: FlatStore, cleaner: StepCleaner, told: list[list[str]]
) -> None:
    store.before = refuses_deletions
    cleaner.tidy(None, ordinal=2)
    until_no_thread("deletion of trash")
    store.before = lambda operation, key: None
    store.time_s += 1000  # the claim of the deletion that failed is free again
    cleaner.tidy(None, ordinal=3)
    cleaner.finish(Deadline.after(30, time.monotonic))
    assert not store.objects
    assert [len(stays) for stays in told] == [1, 0]
    assert "the store is ill" in told[0][0]


def test_trash_that_is_not_deleted_in_time_is_logged(
    store: FlatStore, cleaner: StepCleaner, caplog: pytest.LogCaptureFixture
) -> None:
    ends = threading.Event()
    store.before = lambda operation, key: None if operation != "delete" else _wait(ends)
    cleaner.tidy(None, ordinal=2)
    cleaner.finish(Deadline.after(0.05, time.monotonic))
    assert "trash in flat:run is left to the next start: deletion of trash did not end within" in caplog.text
    ends.set()
    cleaner.finish(Deadline.after(30, time.monotonic))
    assert not store.objects


def test_a_deletion_that_another_process_makes_is_logged(
    store: FlatStore, cleaner: StepCleaner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store.before = refuses_deletions
    cleaner.tidy(None, ordinal=2)
    until_no_thread("deletion of trash")
    store.before = lambda operation, key: None
    cleaner.finish(Deadline.after(30, time.monotonic))
    assert f"goes on to delete flat:run/{STEP}" in caplog.text


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


def test_what_becomes_due_as_the_sweeper_ends_is_done(cleaner: StepCleaner, monkeypatch: pytest.MonkeyPatch) -> None:
    later, done, is_later = list[threading.Thread](), list[object](), threading.Event()
    monkeypatch.setattr(retention, "apply", lambda *args, newest_good, **options: done.append(newest_good))

    class Due(collections.deque[Any]):
        def __bool__(self) -> bool:
            """The last look of the sweeper. Another thread makes something due before the sweeper has ended."""
            found = len(self) > 0
            if not later:
                later.append(threading.Thread(target=cleaner.tidy, args=(STEP,), kwargs={"ordinal": 3}, daemon=True))
                later[0].start()
                while not self:
                    time.sleep(0.001)
                is_later.set()
            return found

    cleaner._due = Due()
    cleaner.tidy(None, ordinal=2)
    _wait(is_later)
    later[0].join(30)  # only one thread at a time may wait for the sweeper
    until_no_thread("deletion of trash")
    assert done == [STEP]


def test_a_restore_leaves_nothing_if_no_thread_can_tidy(
    store: FlatStore, cleaner: StepCleaner, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[object]()
    monkeypatch.setattr(retention, "apply", lambda *args, newest_good, **options: done.append(newest_good))
    monkeypatch.setattr(retention, "unmark_damaged", lambda paths, step: done.append(f"mark of {step}"))

    assert not FlatPath.renames
    refuse_threads(monkeypatch)
    cleaner.after_restore({}, STEP, ordinal=2, tidies=True, give_up_old=False)
    assert done == [f"mark of {STEP}", STEP]


def test_wherever_the_start_of_the_sweeper_is_interrupted_the_next_one_deletes() -> None:
    for number in itertools.count():
        store = FlatStore()
        cleaner = condemned(store)
        tidy = functools.partial(cleaner.tidy, None, ordinal=2)
        reached = interrupt_at(tidy, number, [threads])
        cleaner.tidy(None, ordinal=3)
        cleaner.finish(Deadline.after(30, time.monotonic))
        assert not store.objects, f"bytecode {number}"
        if not reached:
            break
    assert number > 50


LOCK = threading.RLock


class InterruptedLock:
    """A lock as ``threading.RLock``. A signal handler raises as soon as it was taken for the first time."""

    def __init__(self) -> None:
        self._lock = LOCK()
        self._interrupts = True

    def acquire(self, timeout: float) -> bool:
        taken = self._lock.acquire(timeout=timeout)
        if self._interrupts:
            self._interrupts = False
            raise Interrupted
        return taken

    def release(self) -> None:
        self._lock.release()


def test_an_interruption_just_as_the_cleaning_begins_ends_no_later_cleaning(
    store: FlatStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading, "RLock", InterruptedLock)
        cleaner = condemned(store)
    with pytest.raises(Interrupted):
        cleaner.settle(1.0)
    another = threading.Thread(target=lambda: cleaner.settle(1.0))
    another.start()
    another.join(30)
    assert not caplog.records
    cleaner.tidy(None, ordinal=2)
    cleaner.finish(Deadline.after(30, time.monotonic))
    assert not store.objects
