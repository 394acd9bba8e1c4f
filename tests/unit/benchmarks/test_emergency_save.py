from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import emergency_save
from benchmarks.emergency_save_process import Measured
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


@pytest.mark.parametrize(("express_s", "met"), [(1.0, True), (2.0, False)])
def test_being_ahead_of_orbax_is_judged_turn_by_turn(express_s: float, met: bool) -> None:
    process = measured(express=[express_s, 10 * express_s, express_s], orbax=[3.6, 36.0, 3.6])
    figure = named(emergency_save.figures_of_disk([process]), "disk, cold: Orbax, not compressed / ")
    assert figure.value == pytest.approx(3.6 / express_s)
    assert figure.met is met


@pytest.mark.parametrize(("limit_s", "met"), [(0.9, True), (0.8, False)])
def test_the_limit_is_what_writing_the_same_bytes_takes(limit_s: float, met: bool) -> None:
    process = measured(express=[1.0] * 3, limit=[limit_s] * 3)
    assert named(emergency_save.figures_of_disk([process]), "disk, warm: express writer / writing").met is met


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
