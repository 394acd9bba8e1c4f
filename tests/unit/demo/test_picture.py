"""The demo's picture: what the operator recorded, and what the runs wrote down."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import picture
from demo.records import Step
from demo.timeline import Stage
from gracepoint_cli.timeline import Timeline
from tests.unit.cli.fakes.samples import preemption

pytestmark = pytest.mark.integration

SEEN_UNIX_S = 1_772_366_400.25  # 2026-03-01T12:00:00.25Z


def steps(first: int, last: int, *, attempt: int, begin_s: float, process: int = 0) -> list[Step]:
    return [
        Step(
            process=process,
            attempt=attempt,
            step=step,
            loss=(5.0 - step / 50).hex(),
            batch="x",
            unix_s=SEEN_UNIX_S + begin_s + (step - first) / 10,
        )
        for step in range(first, last + 1)
    ]


@pytest.fixture
def made() -> Timeline:
    disturbed = steps(1, 93, attempt=0, begin_s=-9.2) + steps(94, 120, attempt=1, begin_s=9.0)
    disturbed += steps(1, 93, attempt=0, begin_s=-9.2, process=1)
    return picture.timeline(
        preemption(),
        zero_unix_s=SEEN_UNIX_S - 0.02,
        observed=[Stage("nodeGone", "the node is gone", 15.2), Stage("firstStep", "first step after it is done", 9.1)],
        undisturbed=steps(1, 120, attempt=0, begin_s=-100),
        disturbed=disturbed,
        disturbance="preempted at step 93",
    )


def test_each_process_trains_until_the_save_and_again_after_it(made: Timeline) -> None:
    assert made.lanes[-2:] == ("process 0", "process 1")
    spans = [
        (span.lane, round(span.start_s, 2), round(span.end_s, 2)) for span in made.spans if "process " in span.lane
    ]
    assert spans == [("process 0", -3.0, 0.0), ("process 0", 9.0, 11.6), ("process 1", -3.0, 0.0)]


def test_the_node_goes_after_the_deadline(made: Timeline) -> None:
    assert made.deadline_s == 15.0
    assert round(made.moments[-1].at_s, 2) == 15.18
    assert made.moments[-1].lane == made.lanes[0]


def test_both_runs_are_drawn_over_each_other(made: Timeline, tmp_path: Path) -> None:
    assert {loss.run: loss.value for loss in made.losses if loss.step == 100} == {
        "undisturbed": 3.0,
        "preempted at step 93": 3.0,
    }
    picture.write(made, tmp_path, "timeline")
    assert "preempted at step 93" in (tmp_path / "timeline.svg").read_text()
    assert "preempted at step 93" in (tmp_path / "timeline.html").read_text()


def test_a_node_that_is_switched_off_is_drawn_with_the_snapshot_and_what_was_lost(tmp_path: Path) -> None:
    disturbed = steps(1, 93, attempt=1, begin_s=-9.4) + steps(81, 120, attempt=2, begin_s=9.0)
    drawn = picture.timeline(
        preemption(),
        zero_unix_s=SEEN_UNIX_S - 0.2,
        observed=[Stage("nodeGone", "switched off", 0.0), Stage("snapshot", "snapshot of step 80", -1.3)],
        undisturbed=steps(1, 120, attempt=0, begin_s=-100),
        disturbed=disturbed,
        disturbance="a node was switched off at step 93",
    )
    made = picture.without_notice(drawn, lost=13, interval=40, restored_step=80, source="storage")
    assert {(moment.text, round(moment.at_s, 2)) for moment in made.moments} >= {
        ("switched off", -0.2),
        ("snapshot of step 80", -1.5),
    }
    assert made.facts == (
        "13 steps trained again, of 40 between two snapshots",
        "continued from step 80 in storage",
    )
    picture.write(made, tmp_path, "without-notice")
    assert "a node was switched off at step 93" in (tmp_path / "without-notice.svg").read_text()
