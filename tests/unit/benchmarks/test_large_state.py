"""The benchmark of large states goes through plan, commit, listing and reading, and tells each figure."""

from __future__ import annotations

from pathlib import Path

from benchmarks.large_state import figures_of_gang, figures_of_restore
from benchmarks.large_state_gang import measure
from benchmarks.large_state_restore import Memory


def test_a_gang_that_is_not_there_is_measured_from_plan_to_read(tmp_path: Path) -> None:
    times = measure(tmp_path, 16, 4)
    assert times.chunks > 4096
    assert times.own_chunks * 16 >= times.chunks - 16
    assert 0 < times.manifest_bytes < times.parts_bytes
    told = {figure.name: figure for figure in figures_of_gang(times, 16)}
    assert all(figure.value is not None and figure.value > 0 for figure in told.values())
    assert [figure.goal for figure in told.values() if figure.goal] == [1.0, 0.05, 1.0]


def test_the_memory_of_a_restore_is_told_by_the_state_s_size() -> None:
    first, *_ = figures_of_restore(Memory(100, 104, 130, 200))
    assert (first.value, first.goal, first.met) == (1.04, 1.1, True)
