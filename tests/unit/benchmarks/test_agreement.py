from __future__ import annotations

import pytest

from benchmarks.agreement import Measured, figures, percentile


def measured(**values: list[float]) -> Measured:
    usual = Measured(idle_ns=[100.0], jax_idle_ns=[200.0], known_ms=[3.0], stopped_ms=[20.0], jax_stopped_ms=[500.0])
    return Measured(**{**vars(usual), **values})


def found(by_count: dict[int, Measured], name: str) -> tuple[float | None, bool | None]:
    figure = next(figure for figure in figures(by_count, [500.0, 900.0, 700.0]) if figure.name == name)
    return figure.value, figure.met


def test_a_sync_point_costs_its_median_in_a_session_and_alone() -> None:
    by_count = {2: measured(idle_ns=[90.0, 2_000.0, 1_500.0], jax_idle_ns=[1.0, 3.0, 2.0])}
    assert found(by_count, "1 process: idle sync point of a session") == (700.0, True)
    assert found(by_count, "2 processes: idle sync point of the agreement") == (1_500.0, False)
    assert found(by_count, "2 processes: idle sync point, JAX's") == (2.0, None)


def test_only_the_median_of_two_processes_has_a_goal_for_the_notice() -> None:
    by_count = {count: measured(known_ms=[1.0, 6.0, 30.0]) for count in (2, 4)}
    assert found(by_count, "2 processes: notice -> known to all, p50") == (6.0, False)
    assert found(by_count, "2 processes: notice -> known to all, p99")[1] is None
    assert found(by_count, "4 processes: notice -> known to all, p50") == (6.0, None)


def test_all_repeats_count() -> None:
    both = measured(stopped_ms=[1.0, 2.0]) + measured(stopped_ms=[9.0])
    assert found({8: both}, "8 processes: notice -> all stopped, p50") == (2.0, None)
    assert both.jax_stopped_ms == [500.0, 500.0]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([7.0], 99, 7.0), ([3.0, 1.0], 50, 2.0), ([float(n) for n in range(101)], 99, 99.0)],
    ids=["of one value", "between two", "of many"],
)
def test_a_percentile_is_the_value_below_which_so_much_lies(values: list[float], percent: int, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)
