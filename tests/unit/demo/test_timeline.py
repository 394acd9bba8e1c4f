from __future__ import annotations

from typing import Any

from demo.timeline import Stage, table, timeline
from gracepoint_cli.timeline import STAGES

ZERO_UNIX_S = 1_770_000_000.0  # 2026-02-02T02:40:00Z


def preemption(**seconds: float) -> dict[str, Any]:
    timings = [{"stage": stage, "seconds": value} for stage, value in seconds.items()]
    return {"spec": {"observedAt": "2026-02-02T02:40:00.250000Z"}, "status": {"timings": timings}}


def test_all_stages_count_from_the_taint() -> None:
    stages = timeline(preemption(noticeSent=0.01, committed=1.5), zero_unix_s=ZERO_UNIX_S, observed=[])
    assert [(stage.name, round(stage.seconds, 3)) for stage in stages] == [
        ("seen", 0.25),
        ("noticeSent", 0.26),
        ("committed", 1.75),
    ]


def test_what_the_demo_saw_stands_where_it_happened() -> None:
    observed = [Stage("nodeGone", "the node is gone", 1.0)]
    stages = timeline(preemption(frozen=0.1, training=9), zero_unix_s=ZERO_UNIX_S, observed=observed)
    assert [stage.text for stage in stages][-2:] == ["the node is gone", STAGES["training"]]


def test_stages_of_the_same_moment_stand_in_their_usual_order() -> None:
    stages = timeline(preemption(agreed=1.0, frozen=1.0), zero_unix_s=ZERO_UNIX_S, observed=[])
    assert [stage.name for stage in stages] == ["seen", "frozen", "agreed"]


def test_a_stage_of_a_newer_operator_is_shown_by_its_name() -> None:
    stages = timeline(preemption(polished=1.0), zero_unix_s=ZERO_UNIX_S, observed=[])
    assert stages[-1].text == "polished"


def test_the_table_has_a_line_a_stage() -> None:
    stages = timeline(preemption(committed=1.5), zero_unix_s=ZERO_UNIX_S, observed=[])
    assert table(stages).splitlines() == [
        "     0.250 s  taint seen by the operator",
        "     1.750 s  checkpoint committed",
    ]
