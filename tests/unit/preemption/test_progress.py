"""Stages of a save: seconds since the notice, and their summary over processes."""

from __future__ import annotations

import json

import pytest

from gracepoint.preemption.stages import Stages, summary


def test_stages_are_counted_from_the_notice_in_seconds() -> None:
    now_s = iter([11.0, 12.5])
    stages = Stages(10.0, lambda: next(now_s))
    assert stages.last is None
    stages.mark("frozen")
    stages.mark("agreed")
    assert json.loads(stages.to_json()) == {"frozen": 1.0, "agreed": 2.5}
    assert stages.last == "agreed"


def test_an_unknown_stage_is_an_error() -> None:
    with pytest.raises(ValueError, match="'frozzen'"):
        Stages(0.0, lambda: 0.0).mark("frozzen")


def test_summary_covers_all_processes_and_stages_that_all_reached() -> None:
    found = summary(['{"frozen": 1.0, "written": 2.0}', '{"frozen": 2.0}', '{"frozen": 6.0, "written": 1.0}'])
    assert {k: (t.p50_s, t.max_s) for k, t in found.items()} == {"frozen": (2.0, 6.0)}
