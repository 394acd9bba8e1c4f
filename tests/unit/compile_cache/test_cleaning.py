"""What is deleted: what nobody used for long, what is too much, and nothing that is not ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracepoint.checkpoint.storage.backend import Entry, Generation
from gracepoint.checkpoint.storage.storage_path import StoragePath, storage_path
from gracepoint.compile_cache.cleaning import UNFINISHED_S, Bounds, clean, plan
from gracepoint.compile_cache.program_file import file_name

NOW_S = 1_000_000_000.0
DAY_S = 86_400.0
OLD, NEW = f"jax-0.9.0-jaxlib-0.9.0-tpu-1x4-{'0' * 16}", f"jax-0.10.2-jaxlib-0.10.2-tpu-1x4-{'1' * 16}"
BOUNDS = Bounds(bytes=1000, unused_s=30 * DAY_S)


def program(folder: str, number: int, *, age_s: float, size: int = 100, part: str = "all") -> Entry:
    return Entry(f"{folder}/{part}/{file_name(f'jit_f-{number}')}", size, Generation("1"), NOW_S - age_s)


def test_programs_that_nobody_used_are_deleted_with_their_folder() -> None:
    entries = [
        program(OLD, 1, age_s=31 * DAY_S),
        program(OLD, 2, age_s=40 * DAY_S, part="process-3"),
        program(NEW, 1, age_s=29 * DAY_S),
        program(NEW, 2, age_s=31 * DAY_S),
    ]
    found = plan(entries, NOW_S, BOUNDS)
    assert set(found.files) == {entries[0].key, entries[1].key, entries[3].key}
    assert found.folders == [OLD]
    assert (found.too_old, found.too_many) == (3, 0)


def test_beyond_the_bound_the_longest_unused_are_deleted() -> None:
    entries = [program(NEW if n % 2 else OLD, n, age_s=n * 60.0, size=300) for n in range(5)]
    found = plan(entries, NOW_S, BOUNDS)
    assert set(found.files) == {entries[3].key, entries[4].key}
    assert found.folders == []
    assert found.too_many == 2


@given(
    st.lists(st.tuples(st.floats(0, 60 * DAY_S), st.integers(0, 900)), max_size=30),
    st.integers(1, 3000),
)
def test_what_is_left_is_within_both_bounds(programs: list[tuple[float, int]], most: int) -> None:
    entries = [program(NEW, n, age_s=age_s, size=size) for n, (age_s, size) in enumerate(programs)]
    bounds = Bounds(bytes=most, unused_s=30 * DAY_S)
    found = plan(entries, NOW_S, bounds)
    left = [entry for entry in entries if entry.key not in found.files]
    assert sum(entry.bytes for entry in left) <= most
    assert all(NOW_S - entry.changed_s <= 30 * DAY_S for entry in left)
    fit = [entry for entry in entries if NOW_S - entry.changed_s <= 30 * DAY_S]
    if sum(entry.bytes for entry in fit) <= most:
        assert left == fit


def test_what_a_dead_writer_left_is_deleted_after_a_day() -> None:
    def unfinished(age_s: float) -> Entry:
        key = f"{NEW}/all/.{file_name('jit_f-1')}.partial-0123456789abcdef"
        return Entry(key, 50, Generation("1"), NOW_S - age_s)

    assert plan([unfinished(UNFINISHED_S + 1)], NOW_S, BOUNDS).files == [unfinished(0).key]
    assert plan([unfinished(60)], NOW_S, BOUNDS).files == []


def test_foreign_files_are_neither_counted_nor_deleted(top: StoragePath) -> None:
    foreign = [top / "notes.txt", top / NEW / "all" / "notes.txt"]
    ours = top / NEW / "all" / file_name("jit_f-1")
    for path in (*foreign, ours):
        path.parent.make_folder()
        path.put(b"x" * 600)
    clean(top, BOUNDS)
    assert all(path.is_value() for path in (*foreign, ours))
    clean(top, Bounds(bytes=500, unused_s=DAY_S))
    assert not ours.is_value()
    assert all(path.is_value() for path in foreign)


def test_an_empty_store_needs_no_cleaning(top: StoragePath) -> None:
    clean(top, BOUNDS)
    assert top.entries() == []


def test_the_folder_of_an_old_version_disappears(tmp_path: Path) -> None:
    for folder, age_s in ((OLD, 40 * DAY_S), (NEW, 0.0)):
        path = tmp_path / folder / "all" / file_name("jit_f-1")
        path.parent.mkdir(parents=True)
        path.write_bytes(b"program")
        changed_s = path.stat().st_mtime - age_s
        os.utime(path, (changed_s, changed_s))
    clean(storage_path(tmp_path), BOUNDS)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [NEW]


@pytest.mark.parametrize("size", [1000, 1001])
def test_the_bound_itself_is_allowed(size: int) -> None:
    assert bool(plan([program(NEW, 1, age_s=0, size=size)], NOW_S, BOUNDS).files) == (size > 1000)
