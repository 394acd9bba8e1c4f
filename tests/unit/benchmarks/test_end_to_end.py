from __future__ import annotations

from benchmarks.end_to_end import figures
from benchmarks.report import Figure
from demo.timeline import Stage


def stages(**seconds: float) -> list[Stage]:
    return [Stage(name, name, value) for name, value in seconds.items()]


def named(found: list[Figure], name: str) -> Figure:
    return next(figure for figure in found if figure.name == name)


def test_figures_are_medians_and_the_worst_of_what_may_not_happen() -> None:
    timelines = [stages(noticeSent=value, durable=1.0) for value in (0.1, 0.2, 0.9)]
    statuses = [
        {"stepsLost": 0, "secondsToSpare": 9.0},
        {"stepsLost": 2, "secondsToSpare": 8.0},
        {"stepsLost": 0, "secondsToSpare": 9.5},
    ]
    found = figures(timelines, statuses)
    assert named(found, "taint -> notice sent to all").value == 0.2
    assert named(found, "steps lost, worst").value == 2
    assert named(found, "steps lost, worst").met is False
    assert named(found, "time to spare, worst").value == 8.0


def test_a_stage_that_is_missing_in_one_repeat_was_not_measured() -> None:
    timelines = [stages(durable=1.0), stages()]
    found = figures(timelines, [{"stepsLost": 0, "secondsToSpare": 9.0}] * 2)
    assert named(found, "taint -> durable").value is None
    assert named(found, "taint -> durable").met is False


def test_what_the_operator_did_not_report_was_not_measured() -> None:
    found = figures([stages()], [{}])
    assert named(found, "steps lost, worst").value is None
