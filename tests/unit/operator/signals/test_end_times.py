"""Which times an object can name."""

from __future__ import annotations

import pytest

from gracepoint_operator.signals.matching import at, named_time
from gracepoint_operator.signals.rows import Time, TimeFormat


@pytest.mark.parametrize(
    ("value", "is_time"),
    [
        pytest.param("0", True, id="the first second"),
        pytest.param("-0.5", False, id="before it"),
        pytest.param("253000000000", True, id="the last second"),
        pytest.param("253000000000.5", False, id="after it"),
        pytest.param("nan", False, id="no number"),
        pytest.param("inf", False, id="never"),
        pytest.param("soon", False, id="a word"),
    ],
)
def test_times_that_a_date_can_hold_are_read(value: str, is_time: bool) -> None:
    found = named_time(Time(format=TimeFormat.EPOCH_SECONDS), value, {})
    assert found == (float(value) if is_time else None)


NODE = {"status": {"conditions": [{"type": "Ready", "at": "2026-01-01T00:00:00Z"}, "odd", {"at": "x"}], "used": 60}}
READY_AT = 1_767_225_600.0


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("status.used", 60),
        ("status.conditions.Ready.at", "2026-01-01T00:00:00Z"),
        ("status.conditions.Other.at", None),
        ("status.used.more", None),
        ("spec.used", None),
    ],
)
def test_a_value_is_found_at_its_path_or_not_at_all(path: str, found: object) -> None:
    assert at(NODE, path) == found


@pytest.mark.parametrize(
    ("value", "length_s"),
    [("1h30m", 5400.0), ("720h", 2_592_000.0), ("90s", 90.0), ("1.5m", 90.0), ("", None), ("Never", None), ("5", None)],
)
def test_a_duration_counts_from_the_time_that_the_object_names(value: str, length_s: float | None) -> None:
    time = Time(format=TimeFormat.DURATION, since="status.conditions.Ready.at")
    assert named_time(time, value, NODE) == (None if length_s is None else READY_AT + length_s)
    assert named_time(time, value, {}) is None


@pytest.mark.parametrize(("minus", "used_s"), [([], 0), (["status.used"], 60), (["spec.used", "status.used"], 60)])
def test_seconds_that_are_used_up_already_do_not_count(minus: list[str], used_s: float) -> None:
    time = Time(format=TimeFormat.SECONDS, since="status.conditions.Ready.at", minus=minus)
    assert named_time(time, "100", NODE) == READY_AT + 100 - used_s


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ('{"notBefore": 5}', 5.0),
        ('{"Not_Before": "2026-01-01T00:00:00Z"}', READY_AT),
        ('{"event": {"end": 7.5}}', 7.5),
        ('{"event": 3}', None),
        ("[]", None),
    ],
)
def test_the_first_json_field_that_is_there_counts(told: str, found: float | None) -> None:
    assert named_time(Time(format=TimeFormat.JSON, json_fields=["not_before", "event.end"]), told, {}) == found
