from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from demo.narrator import Narrator
from demo.story import SNAPSHOT_STEPS, Death, Result, broken_promises
from demo.timeline import Stage
from gracepoint_cli.timeline import STAGES

DEATH = Death(node="node-2", unix_s=0.0, step=315, restored_step=280, from_memory=True, silent_s=31.25)
HELD = Result(
    phase="Committed",
    step=40,
    restored_step=40,
    steps_lost=0,
    seconds_to_spare=3.5,
    restarts_counted=0,
    losses_equal=True,
    data_equal=True,
    parameters_equal=True,
    node_lost=True,
    stages=[Stage(name, text, 1.0) for name, text in STAGES.items()],
    death=DEATH,
    problems=[],
)


def test_a_promise_that_held_leaves_no_problem() -> None:
    assert broken_promises(HELD, preemptions=1) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"phase": "Expired"}, "expected the Preemption to end as Committed, found Expired"),
        ({"steps_lost": 3}, "expected 0 steps lost, found 3"),
        ({"steps_lost": None}, "expected 0 steps lost, found None"),
        ({"seconds_to_spare": -0.5}, "expected the commit before the deadline, found -0.5 s to spare"),
        ({"restored_step": 30}, "expected to go on from the saved step 40, found 30"),
        ({"restored_step": None}, "expected to go on from the saved step 40, found None"),
        ({"restarts_counted": 1}, "expected no restart to count towards maxRestarts, found 1"),
    ],
    ids=lambda value: ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_each_broken_promise_is_reported(change: dict[str, object], told: str) -> None:
    assert broken_promises(dataclasses.replace(HELD, **change), preemptions=1) == [told]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"from_memory": False}, "expected to go on from the memory of nodes, found step 280 of storage"),
        (
            {"restored_step": 314 - SNAPSHOT_STEPS},
            f"expected at most {SNAPSHOT_STEPS} steps lost with the node that was switched off, found 41",
        ),
    ],
    ids=["from storage", "more than an interval"],
)
def test_what_a_death_without_notice_may_not_cost_is_reported(change: dict[str, Any], told: str) -> None:
    result = dataclasses.replace(HELD, death=dataclasses.replace(DEATH, **change))
    assert broken_promises(result, preemptions=1) == [told]


def test_a_cluster_whose_nodes_cannot_be_switched_off_breaks_no_promise() -> None:
    result = dataclasses.replace(HELD, death=None)
    assert broken_promises(result, preemptions=1) == []
    assert result.to_json()["death_without_notice"] is None


def test_a_second_preemption_for_the_same_taint_is_announced() -> None:
    assert broken_promises(HELD, preemptions=2) == ["expected one Preemption for one taint, found 2"]


def test_a_gap_in_the_timeline_is_reported() -> None:
    result = dataclasses.replace(HELD, stages=HELD.stages[2:])
    assert broken_promises(result, preemptions=1) == ["the timeline lacks firstAck, noticeSent"]


def test_the_result_as_json_has_what_programs_ask_for() -> None:
    data = HELD.to_json()
    assert data["held"] is True
    assert data["steps_lost"] == 0
    assert data["seconds_to_spare"] == 3.5
    assert data["losses_bitwise_equal"] is True
    assert data["stages"]["committed"] == 1.0
    assert data["death_without_notice"] == {
        "step": 315,
        "restored_step": 280,
        "from_memory": True,
        "steps_lost": 35,
        "snapshot_every_steps": SNAPSHOT_STEPS,
        "seconds_until_training": 31.25,
    }


def test_the_narrator_says_how_much_time_has_passed() -> None:
    lines: list[str] = []
    clock = iter([100.0, 112.34, 112.34])
    say = Narrator(clock=lambda: next(clock), write=lines.append)
    say("first\nsecond")
    assert lines == ["[  12.3 s] first\n           second"]
