"""Which times an object can name."""

from __future__ import annotations

import pytest

from gracepoint_operator.signals.rows import Time, TimeFormat
from gracepoint_operator.signals.told_times import told_time


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
    found = told_time(Time(format=TimeFormat.EPOCH_SECONDS), value, {})
    assert found == (float(value) if is_time else None)
