from __future__ import annotations

from collections.abc import Sequence

from benchmarks.checkpoint import figures_of_large, figures_of_small
from benchmarks.checkpoint_engines import GRACEPOINT, NAMES, ORBAX_PLAIN
from benchmarks.checkpoint_process import Measured
from benchmarks.report import Figure


def measured(gracepoint: Sequence[float], orbax: float = 9.0) -> Measured:
    """Returns what a process measured that took as long for all it did with an engine."""
    turns = {name: list(gracepoint) if name == GRACEPOINT else [orbax] * len(gracepoint) for name in NAMES}
    return Measured(
        prepare_s=dict.fromkeys(NAMES, 1.0),
        blocked_s=turns,
        committed_s=turns,
        restore_s=turns,
        extra_bytes=dict.fromkeys(NAMES, 100),
        memcpy_s=[1.0] * len(gracepoint),
        memcpy_bytes=100,
        read_s=[1.0] * len(gracepoint),
        read_bytes=100,
    )


def named(found: Sequence[Figure], name: str) -> Figure:
    return next(figure for figure in found if figure.name == name)


def test_figure_is_the_median_over_turns_of_the_slowest_process() -> None:
    found = figures_of_large([measured([1.0, 1.0, 5.0]), measured([1.1, 1.15, 1.0])])
    assert named(found, f"save blocks training, {GRACEPOINT}").value == 1.15
    assert named(found, "save blocks training / memcpy").value == 1.15
    assert named(found, "save blocks training / memcpy").met is True


def test_slow_first_save_misses_its_goal() -> None:
    found = figures_of_large([measured([1.2, 1.0, 1.0])])
    assert named(found, "first save / later ones").value == 1.2
    assert named(found, "first save / later ones").met is False


def test_ahead_of_orbax_means_ahead_of_the_way_that_is_faster() -> None:
    process = measured([2.0, 2.0], orbax=3.0)
    assert named(figures_of_small([process], 7), "7 leaves: restore, cold / the better of Orbax").met is True
    process.restore_s[ORBAX_PLAIN] = [1.0, 1.0]
    assert named(figures_of_small([process], 7), "7 leaves: restore, cold / the better of Orbax").met is False
