"""The timeline of a Preemption, as text and as a picture."""

from __future__ import annotations

import dataclasses
import json
import re
from xml.etree import ElementTree

import pytest

from gracepoint_cli import timeline, timeline_picture
from gracepoint_cli.timeline import (
    GANG,
    OPERATOR,
    STAGES,
    Loss,
    SpanKind,
    Timeline,
    TimelineMoment,
    time_of,
    timeline_of,
)
from gracepoint_operator.resources import preemption as preemption_resource
from tests.unit.cli.fakes.samples import pod, preemption


def text_of(made: Timeline, width: int = 100) -> list[str]:
    return [line.plain for line in timeline.text_lines(made, width, colours=False)]


def test_the_gang_does_one_thing_after_the_other() -> None:
    spans = [span for span in timeline_of(preemption()).spans if span.lane == GANG]
    assert [span.kind for span in spans] == [
        SpanKind.TRAINING, SpanKind.FREEZE, SpanKind.DRAIN, SpanKind.SAVE, SpanKind.SAVE, SpanKind.COMMIT,
        SpanKind.EXIT, SpanKind.WAIT, SpanKind.PODS, SpanKind.PODS, SpanKind.IMPORTS, SpanKind.JOIN, SpanKind.RESTORE,
        SpanKind.COMPILE, SpanKind.TRAINING,
    ]  # fmt: skip
    assert [span.start_s for span in spans[1:]] == [span.end_s for span in spans[:-1]]


def test_signal_notice_and_deadline_are_at_their_times() -> None:
    made = timeline_of(preemption())
    assert [(moment.lane, moment.at_s) for moment in made.moments] == [("node gke-spot-7", 0.0), (OPERATOR, 0.01)]
    assert made.deadline_s == 15.0
    assert made.facts[:3] == ("Committed in mode Enforce", "step 93 saved", "0 steps lost")


AWAITED = "node for process 1, since 2026-03-01T12:00:03Z; last: 0/12 nodes are available"


def started(status: str, said: str) -> dict[str, str]:
    at = "2026-03-01T12:05:00Z"
    return {"type": "Started", "status": status, "reason": "x", "message": f"{said}{AWAITED}", "lastTransitionTime": at}


def test_a_restart_that_waited_shows_for_how_long_and_for_what() -> None:
    condition = started("True", "what the restart waited for is there: ")
    (span,) = (span for span in timeline_of(preemption(conditions=[condition])).spans if span.kind is SpanKind.WAIT)
    assert (span.start_s, span.end_s, span.text) == (2.5, 3.5, f"waits for: {AWAITED}")


def test_a_restart_that_waits_still_shows_that_up_to_now() -> None:
    left = {"noticeSent": 0.01, "committed": 3.0, "exited": 4.0}
    body = preemption(left, conditions=[started("False", "the restart waits for: ")])
    made = timeline_of(body, now=time_of("2026-03-01T12:10:00.250000Z"))
    (span,) = (span for span in made.spans if span.kind is SpanKind.WAIT)
    assert (span.start_s, span.end_s, span.text) == (4.0, 600.0, f"waits for: {AWAITED}")
    assert any(f"waits for: {AWAITED}" in line for line in text_of(made, 200))


def test_stages_that_were_not_reached_are_left_out() -> None:
    made = timeline_of(preemption({"noticeSent": 0.01, "committed": 3.0}))
    assert [(span.kind, span.end_s) for span in made.spans] == [(SpanKind.COMMIT, 3.0)]


def test_a_step_that_goes_to_snapshot_servers_has_a_span() -> None:
    made = timeline_of(preemption({"drained": 0.2, "evacuated": 1.5, "exited": 2.0}))
    spans = [(span.kind, span.start_s, span.end_s, span.text) for span in made.spans][-2:]
    assert spans == [
        (SpanKind.SAVE, 0.2, 1.5, "sends the shards to snapshot servers"),
        (SpanKind.EXIT, 1.5, 2.0, "leaves"),
    ]


def test_a_stage_that_seems_to_end_before_it_began_takes_no_time() -> None:
    made = timeline_of(preemption({"noticeSent": 0.2, "frozen": 0.1}))
    assert [(span.start_s, span.end_s) for span in made.spans] == [(0.2, 0.2)]


def test_a_preemption_that_was_just_made_has_a_timeline() -> None:
    made = timeline_of(preemption({}) | {"status": {}})
    assert made.facts == ("Noticed in mode Enforce",)
    assert "deadline" in "\n".join(text_of(made))


def test_attempts_of_a_job_by_itself_are_its_replacements() -> None:
    later = "2026-03-01T12:00:04Z"
    pods = [pod(index, attempt, started=later, numbered=False) for attempt in (1, 0) for index in (1, 0)]
    made = timeline_of(preemption(), pods)
    assert made.lanes[3:] == tuple(f"pod llm-workers-0-{index}-{attempt}" for attempt in (0, 1) for index in (0, 1))
    runs = {span.lane[-1]: span.text for span in made.spans if span.kind is SpanKind.TRAINING and "runs" in span.text}
    assert {at: text.split()[1] for at, text in runs.items()} == {"0": "0", "1": "1"}


def test_each_pod_has_a_lane_cut_to_the_time_of_the_preemption() -> None:
    pods = [
        pod(1, 1, started="2026-03-01T12:00:04Z"),
        pod(0, started="2026-03-01T11:59:30Z", ended="2026-03-01T12:00:02Z"),
    ]
    made = timeline_of(preemption(), pods)
    assert made.lanes[3:] == ("pod llm-workers-0-0-0", "pod llm-workers-0-1-1")
    spans = [(s.kind, round(s.start_s, 2), round(s.end_s, 2)) for s in made.spans if s.lane.startswith("pod")]
    assert spans == [(SpanKind.TRAINING, -0.9, 1.75), (SpanKind.PODS, 2.75, 3.75), (SpanKind.TRAINING, 3.75, 9.9)]


def test_every_stage_of_the_operator_is_in_words() -> None:
    assert STAGES.keys() == set(preemption_resource.STAGES)


def test_text_has_a_line_a_lane_of_the_width() -> None:
    lines = text_of(timeline_of(preemption()), 80)
    lanes = [line for line in lines if line.startswith(("node gke", "       operator", "  all processes"))]
    assert len(lanes) == 3
    assert all(len(line) <= 80 for line in lanes)
    assert all(line[-4:].count("|") == 1 for line in lanes)  # the deadline
    assert any("checkpoint" in line and "0.090 s" in line for line in lines)


def test_letters_and_signs_of_the_text_are_explained() -> None:
    lines = text_of(timeline_of(preemption()), 80)
    (legend,) = [line for line in lines if "f freeze and agree" in line]
    assert legend.startswith("= training")
    assert legend.endswith("! event   | deadline")


def test_long_names_leave_room_for_the_lanes_in_a_narrow_terminal() -> None:
    made = timeline_of(preemption(), [pod(0, started="2026-03-01T11:59:30Z")])
    long = "pod " + "long-" * 9 + "0-abcde"
    renamed = dataclasses.replace(
        made, moments=(*made.moments, TimelineMoment(long, 1.0, "here")), lanes=(*made.lanes, long)
    )
    (lane,) = [line for line in text_of(renamed, 60) if "0-abcde  " in line]
    assert len(lane) <= 60
    assert "…" in lane


@pytest.fixture
def everything() -> Timeline:
    made = timeline_of(preemption(), [pod(0, started="2026-03-01T11:59:30Z")])
    gone = TimelineMoment("node gke-spot-7", 15.2, "the node is gone")
    losses = [Loss(run, step, 5.0 - step / 10) for run in ("undisturbed", "preempted") for step in range(20)]
    return dataclasses.replace(made, moments=(*made.moments, gone), losses=tuple(losses))


@pytest.mark.integration
def test_the_picture_has_lanes_save_and_losses(everything: Timeline) -> None:
    svg = timeline_picture.svg(everything)
    words = "".join(ElementTree.fromstring(svg).itertext())
    for word in ("node gke-spot-7", "operator", "all processes", "deadline", "the node is gone", "writes the shards",
                 "training step", "undisturbed", "commit", "drain", "14.5 s to spare"):  # fmt: skip
        assert word in words, word


@pytest.mark.integration
def test_the_page_loads_nothing_and_fits_a_phone(everything: Timeline) -> None:
    made = timeline_picture.page(everything)
    # Of the page's own elements. The library's code has addresses in it.
    markup = re.sub(r"<script.*?</script>", "", made, flags=re.S)
    assert not re.search(r"(src|href)=|@import|url\(", markup)
    assert 'name="viewport"' in made
    specs = json.loads(re.findall(r"const specs = (.*);\n", made)[-1])
    assert [spec["width"] for spec in specs] == ["container"] * 3


@pytest.mark.integration
def test_the_page_has_in_words_what_the_charts_have_no_room_for(everything: Timeline) -> None:
    made = re.sub(r"<script.*?</script>", "", timeline_picture.page(everything), flags=re.S)
    for event in everything.events:
        assert f"<td>{event.lane}</td><td>{event.text}</td>" in made
    for kind in {span.kind for span in everything.spans}:
        assert f"</i>{kind}</li>" in made


@pytest.mark.integration
def test_words_of_the_cluster_do_not_become_markup(everything: Timeline) -> None:
    words = TimelineMoment(OPERATOR, 1.0, "</script><script>alert(1)</script>")
    made = dataclasses.replace(everything, moments=(*everything.moments, words))
    assert "<script>alert" not in timeline_picture.page(made)


def test_a_drill_without_losses_has_no_chart_of_them() -> None:
    charts = timeline_picture.charts_of(timeline_of(preemption({"noticeSent": 0.0, "frozen": 0.1, "committed": 0.3})))
    assert len(charts) == 2
