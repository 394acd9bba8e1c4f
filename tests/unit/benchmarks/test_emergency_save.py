from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import emergency_save
from benchmarks.emergency_save_process import Measured
from benchmarks.emergency_save_trace import traced, union_s
from benchmarks.emergency_save_writers import EXPRESS, ORBAX_PLAIN, WRITE_LIMIT
from benchmarks.report import Figure

MIB = 1 << 20


def measured(**of_writer: list[float]) -> Measured:
    """Returns what a process measured; writers that are not named took 9 s in each of three turns."""
    names = {"express": EXPRESS, "orbax": ORBAX_PLAIN, "limit": WRITE_LIMIT}
    turns = {name: [9.0] * 3 for name in emergency_save._ALL} | {names[name]: t for name, t in of_writer.items()}
    return Measured(cold_s=turns, warm_s=turns, extra_bytes=dict.fromkeys(turns, 10 * MIB), mine_bytes=MIB)


def named(found: Sequence[Figure], name: str) -> Figure:
    return next(figure for figure in found if figure.name.startswith(name))


def test_a_turn_takes_as_long_as_its_slowest_process() -> None:
    found = emergency_save.figures_of_disk([measured(express=[1.0, 1.0, 5.0]), measured(express=[2.0, 3.0, 1.0])])
    assert named(found, f"disk, cold: {EXPRESS}").value == 3.0


def test_orbax_is_compared_turn_by_turn_and_without_a_goal() -> None:
    process = measured(express=[2.0, 20.0, 2.0], orbax=[3.6, 36.0, 3.6])
    figure = named(emergency_save.figures_of_disk([process]), "disk, cold: Orbax, not compressed / ")
    assert figure.value == pytest.approx(1.8)
    assert figure.met is None


def beside_limit(limit_s: list[float], express_s: list[float]) -> Measured:
    turns = {WRITE_LIMIT: limit_s, EXPRESS: express_s}
    return Measured(cold_s=turns, warm_s=turns, mine_bytes=MIB, parts_s=[{"done-record": s} for s in (1.0, 5.0, 2.0)])


@pytest.mark.parametrize(("limit_s", "met"), [(0.9, True), (0.8, False)])
def test_the_limit_is_what_writing_the_same_bytes_takes(limit_s: float, met: bool) -> None:
    figures = emergency_save.figures_of_limit([beside_limit([limit_s] * 4, [1.0] * 3)])
    assert named(figures, "disk, warm: express writer / writing").met is met


def test_a_turn_is_compared_with_the_limit_before_and_after_it() -> None:
    figures = emergency_save.figures_of_limit([beside_limit([1.0, 3.0, 5.0, 5.0], [2.0, 6.0, 5.0])])
    ratios = [figure.value for figure in figures if "cold: express writer / " in figure.name]
    assert ratios == [1.0, 1.0, 1.5]  # the median, the least and the most


def test_parts_of_a_save_are_those_of_its_slowest_process() -> None:
    other = beside_limit([1.0] * 4, [1.0] * 3)
    other.parts_s = [{"done-record": seconds} for seconds in (3.0, 1.0, 1.0)]
    figures = emergency_save.figures_of_limit([beside_limit([1.0] * 4, [1.0] * 3), other])
    assert named(figures, "trace: done-record").value == 3.0


def test_the_parts_of_a_save_add_up_to_its_time(tmp_path: Path) -> None:
    with traced() as trace:
        descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, b"1", 0)
        os.fsync(descriptor)
        os.close(descriptor)
        folder = os.open(tmp_path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        for stage in ("written", "durable", "committed"):
            trace.on_stage(stage)
    parts = trace.parts()
    of_time = [seconds for part, seconds in parts.items() if not part.startswith("all threads")]
    assert sum(of_time) == pytest.approx(trace.ended_s - trace.began_s)
    assert {len(trace.spans[kind]) for kind in ("writes", "syncs of files", "syncs of folders")} == {1}


def test_time_in_which_several_calls_overlap_counts_once() -> None:
    assert union_s([(5.0, 6.0), (1.0, 3.0), (2.0, 2.5), (2.0, 4.0)]) == 4.0


def test_a_slow_store_that_could_not_be_made_misses_its_goal() -> None:
    (figure,) = emergency_save.figures_of_slow(None)
    assert (figure.value, figure.met) == (None, False)
    assert emergency_save.figures_of_slow([measured()])[-1].met is True


def test_first_save_is_compared_with_the_tenth_in_the_median() -> None:
    starts = [[measured(express=[first, 9.0, 1.0])] for first in (1.0, 1.2, 5.0)]
    assert emergency_save.figure_of_first(starts).value == pytest.approx(1.2)


def test_the_most_memory_that_any_process_took_anywhere_counts() -> None:
    hungry = measured()
    hungry.extra_bytes[EXPRESS] = 65 * MIB
    figure = emergency_save.figure_of_extra_memory([[measured(), hungry], [measured()]])
    assert (figure.value, figure.met) == (65, False)
