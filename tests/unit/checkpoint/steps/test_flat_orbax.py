"""A save never changes what Gracepoint did not write in a store that cannot rename."""

from __future__ import annotations

import pytest

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import commit, listing
from gracepoint.errors import SaveFailed
from tests.unit.checkpoint.steps.fakes.small_saves import STEP, write
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore

FINISHED = ("default/_METADATA", "default/w/.zarray", "default/w/0", "_CHECKPOINT_METADATA", "commit_success.txt")
UNFINISHED = ("_CHECKPOINT_METADATA", "default/w/.zarray")
WITHOUT_MARKS = ("default/d/0123", "default/notes")
ORBAX = pytest.mark.parametrize("names", [FINISHED, UNFINISHED, WITHOUT_MARKS], ids=["finished", "not", "no marks"])


def write_orbax(store: FlatStore, names: tuple[str, ...]) -> dict[str, bytes]:
    for name in names:
        FlatPath(store, f"run/{STEP}/{name}").put(b'{"commit_timestamp_nsecs": 1}')
    return {f"run/{STEP}/{name}": store.objects[f"run/{STEP}/{name}"].data for name in names}


def tidy_up_hours_later(store: FlatStore, paths: Layout) -> None:
    store.time_s += 4000
    commit.give_up_old(paths, attempt="next", older_than_s=3600.0)
    commit.of(paths).empty_trash()


def is_unchanged(store: FlatStore, orbax: dict[str, bytes]) -> bool:
    return orbax == {key: found.data for key, found in store.objects.items() if key in orbax}


@ORBAX
def test_a_save_over_a_step_of_orbax_is_refused_and_changes_nothing(names: tuple[str, ...]) -> None:
    store = FlatStore()
    paths = Layout(FlatPath(store, "run"))
    orbax, before = write_orbax(store, names), listing.complete_steps(paths)
    with pytest.raises(SaveFailed, match="delete it, or move it away"):
        commit.of(paths).finalize(write(paths, "a"), replace=True)
    assert is_unchanged(store, orbax)
    tidy_up_hours_later(store, paths)
    assert is_unchanged(store, orbax)
    assert listing.complete_steps(paths) == before


@ORBAX
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "died"])
def test_a_step_that_orbax_writes_during_a_save_stays(names: tuple[str, ...], durable: bool) -> None:
    store = FlatStore()
    paths = Layout(FlatPath(store, "run"))
    temporary = write(paths, "a", durable=durable)
    orbax = write_orbax(store, names)
    if durable:
        with pytest.raises(SaveFailed, match="delete it, or move it away"):
            commit.of(paths).finalize(temporary, replace=True)
    tidy_up_hours_later(store, paths)
    assert is_unchanged(store, orbax)
    if not durable:
        assert listing.complete_steps(paths) == ([STEP] if names == FINISHED else [])
        assert {key for key in store.objects if key.startswith("run/200")} == set(orbax)


@ORBAX
def test_a_staged_save_claims_nothing_where_orbax_has_written(names: tuple[str, ...]) -> None:
    store = FlatStore()
    paths = Layout(FlatPath(store, "run"))
    assert commit.of(paths).finalize(write(paths, "a"), replace=True)
    temporary = write(paths, "b")
    for name in ("_GRACEPOINT", "commit_success.txt", "_CHECKPOINT_METADATA", layout.host_state_file(0), "default/x/0"):
        FlatPath(store, f"run/{STEP}/{name}").delete()
    orbax = write_orbax(store, names)
    with pytest.raises(SaveFailed, match="delete it, or move it away"):
        commit.of(paths).finalize(temporary, replace=True)
    assert is_unchanged(store, orbax)
    assert f"run/{STEP}/{layout.MANIFEST}" not in store.objects


@ORBAX
def test_the_deletion_of_a_step_leaves_what_is_not_gracepoint_s(names: tuple[str, ...]) -> None:
    store = FlatStore()
    paths = Layout(FlatPath(store, "run"))
    assert commit.of(paths).finalize(write(paths, "a"), replace=True)
    FlatPath(store, f"run/{STEP}/commit_success.txt").delete()
    FlatPath(store, f"run/{STEP}/_CHECKPOINT_METADATA").delete()
    orbax = write_orbax(store, names)
    commit.of(paths).discard(paths.step(STEP), paths.trash(STEP, "a", 2))
    commit.of(paths).empty_trash()
    assert {key for key in store.objects if key.startswith("run/")} == set(orbax)


def test_a_durable_save_of_a_step_that_orbax_has_written_does_not_end_a_start() -> None:
    store = FlatStore()
    paths = Layout(FlatPath(store, "run"))
    write(paths, "a")
    write_orbax(store, WITHOUT_MARKS)
    (remark,) = commit.salvage(paths)
    assert "delete it, or move it away" in remark
