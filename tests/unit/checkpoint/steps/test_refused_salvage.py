"""A start that cannot commit a durable save says so, and does not delete the save."""

from __future__ import annotations

import errno

import pytest

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import commit, listing
from gracepoint.deadline import Deadline
from tests.unit.checkpoint.steps.fakes.small_saves import STEP, write
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore


def durable() -> tuple[FlatStore, Layout]:
    store = FlatStore()
    paths = Layout(FlatPath(store, "run"))
    write(paths, "a")

    def refused(operation: str, key: str) -> None:
        if operation == "create" and key.endswith(layout.MANIFEST):
            raise PermissionError(errno.EACCES, "403 Forbidden", key)

    store.before = refused
    return store, paths


def look(store: FlatStore, paths: Layout, *, holds_lease: bool) -> listing.Listing:
    deadline = Deadline.after(60.0, lambda: store.time_s)
    return listing.list_steps(paths, attempt="b", deadline=deadline, sleep=store.sleep, holds_lease=holds_lease)


def test_a_refused_write_does_not_send_a_start_back() -> None:
    with pytest.raises(PermissionError, match="403"):
        look(*durable(), holds_lease=True)


def test_a_start_that_may_only_read_leaves_the_save() -> None:
    found = look(*durable(), holds_lease=False)
    assert found.steps == ()
    assert any("is not salvaged" in remark for remark in found.remarks)


def test_a_save_whose_processes_have_all_finished_is_never_given_up() -> None:
    store, paths = durable()
    store.time_s += 10_000
    commit.give_up_old(paths, attempt="b", older_than_s=3600.0)
    commit.of(paths).empty_trash()
    store.before = lambda operation, key: None
    assert look(store, paths, holds_lease=True).steps == (STEP,)


def test_a_finished_save_gives_way_to_another_save_s_step() -> None:
    store, paths = durable()
    store.before = lambda operation, key: None
    commit_of_another = write(paths, "b")
    assert commit.of(paths).finalize(commit_of_another, replace=True)
    store.time_s += 10_000
    commit.give_up_old(paths, attempt="c", older_than_s=3600.0)
    commit.of(paths).empty_trash()
    assert list(paths.temporaries()) == []
    assert listing.complete_steps(paths) == [STEP]
