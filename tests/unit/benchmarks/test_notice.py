from __future__ import annotations

import pytest

from benchmarks.notice_results import Measured, figures, percentile


def measured(told_s: list[float], missed: int = 0) -> Measured:
    return Measured(
        bare_bytes=100 << 20,
        subscribed_bytes=150 << 20,
        subscribing_cpu_s=2.0,
        connected_s=3.0,
        sent_s=[at_s / 2 for at_s in told_s],
        told_s=told_s,
        acknowledged_s=[at_s + 1 for at_s in told_s],
        cpu_s=[1.0, 3.0, 2.0],
        peak_bytes=160 << 20,
        missed=missed,
    )


def found(count: int, of: Measured, name: str) -> tuple[float | None, bool | None]:
    figure = next(figure for figure in figures(count, of) if figure.name == f"{count} subscribers: {name}")
    return figure.value, figure.met


def test_a_thousand_have_goals_and_fewer_have_none() -> None:
    slow = measured([0.3] * 99 + [2.0])
    assert found(1000, slow, "taint -> told, p50") == (0.3, False)
    assert found(1000, measured([0.2, 0.9]), "taint -> told, p99")[1] is True
    assert found(100, slow, "taint -> told, p50") == (0.3, None)
    assert found(1000, slow, "taint -> acknowledged, p50") == (1.3, None)
    assert found(1000, slow, "taint -> sent, p50") == (0.15, None)


def test_missing_notice_misses_the_goal_whatever_the_others_took() -> None:
    assert found(100, measured([0.1, 0.1], missed=1), "notices or receipts that did not come") == (1, False)
    assert found(100, measured([0.1, 0.1]), "notices or receipts that did not come") == (0, True)


def test_the_operators_cost_is_told() -> None:
    assert found(10, measured([0.1]), "operator's CPU for a notice and its retraction") == (2.0, None)
    assert found(10, measured([0.1]), "operator's memory, most") == (160.0, None)


@pytest.mark.parametrize(("values", "expected"), [([], None), ([7.0], 7.0), ([1.0, 3.0], 2.0)])
def test_the_median_of_few(values: list[float], expected: float | None) -> None:
    assert percentile(values, 50) == expected
