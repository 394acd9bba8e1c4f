from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import end_to_end_objects, end_to_end_traces
from benchmarks.end_to_end import Repeat, figures
from benchmarks.report import Figure
from demo.timeline import Stage

SAVED: dict[str, Any] = {"stepsLost": 0, "secondsToSpare": 9.0}


def stages(**seconds: float) -> list[Stage]:
    return [Stage(name, name, value) for name, value in seconds.items()]


def named(found: list[Figure], name: str) -> Figure:
    return next(figure for figure in found if figure.name == name)


def test_figures_are_medians_and_the_worst_of_what_may_not_happen() -> None:
    statuses = [SAVED, {"stepsLost": 2, "secondsToSpare": 8.0}, {"stepsLost": 0, "secondsToSpare": 9.5}]
    measured = [
        Repeat(stages=stages(noticeSent=sent, committed=1.0, training=again), status=status, compiled=compiled)
        for sent, again, compiled, status in zip((0.1, 0.2, 0.9), (7.0, 8.0, 20.0), (0, 3, 0), statuses, strict=True)
    ]
    found = figures(measured, [2.0, 9.0, 2.5])
    assert named(found, "taint -> notice sent to all").value == 0.2
    assert named(found, "commit -> training again").value == 7.0
    assert named(found, "commit -> training again, without the time of a bare pod").value == 4.5
    assert named(found, "programs compiled, worst").value == 3
    assert named(found, "programs compiled, worst").met is False
    assert named(found, "steps lost, worst").value == 2
    assert named(found, "steps lost, worst").met is False
    assert named(found, "time to spare, worst").value == 8.0


def test_a_stage_that_is_missing_in_one_repeat_was_not_measured() -> None:
    measured = [Repeat(stages=stages(durable=1.0), status=SAVED), Repeat(stages=stages(), status=SAVED)]
    found = figures(measured, [2.0])
    assert named(found, "taint -> durable").value is None
    assert named(found, "taint -> durable").met is False
    assert named(found, "commit -> training again, without the time of a bare pod").met is False


def test_what_the_operator_did_not_report_was_not_measured() -> None:
    found = figures([Repeat(stages=stages(), status={})], [2.0])
    assert named(found, "steps lost, worst").value is None


def trace(folder: Path, process: int, attempt: int, **ends: float) -> None:
    """Writes the trace of a process. Each event began 0.5 s before its end."""
    words = {"start": None, "left": "the process ends with code 77", "attach": "before attach: Python, imports"}
    words |= {"met": "meeting of the processes", "open": "opening of the session", "read": "restore"}
    words |= {"trains": "trains"}
    events = [
        {"name": words[key], "ph": "X", "ts": (end - 0.5) * 1e6, "dur": 0.5e6, "pid": process}
        for key, end in ends.items()
    ]
    told = {"restart_attempt": attempt, "programs_compiled": process}
    (folder / f"{process}.{attempt}.trace.json").write_text(json.dumps({"otherData": told, "traceEvents": events}))


def test_parts_end_with_the_last_process_and_make_up_the_whole(tmp_path: Path) -> None:
    for process, late in ((1, 0.0), (0, 0.25)):
        trace(tmp_path, process, 0, trains=50.0, left=101.0 + late)
        trace(tmp_path, process, 1, attach=103.0 - late, met=104.0, open=104.5, read=105.0 + late, trains=107.0)
    lives = end_to_end_traces.read(tmp_path)
    assert [(life.attempt, life.process, life.compiled) for life in lives] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 1),
    ]
    parts = end_to_end_traces.parts(lives[:2], lives[2:], 100.0)
    assert list(parts.values()) == [1.25, 1.25, 0.5, 1.0, 0.5, 0.75, 1.75]
    assert sum(value for value in parts.values() if value is not None) == 107.0 - 100.0


def test_a_part_that_a_process_did_not_tell_was_not_measured(tmp_path: Path) -> None:
    trace(tmp_path, 0, 0, left=101.0)
    trace(tmp_path, 0, 1, attach=103.0, trains=107.0)
    before, after = end_to_end_traces.read(tmp_path)
    parts = end_to_end_traces.parts([before], [after], 100.0)
    assert parts["-> restored"] is None
    assert parts["-> first step done"] == 4.0


def pod(uid: str, **status: str) -> dict[str, Any]:
    return {"metadata": {"uid": uid}, "spec": {"nodeName": status.pop("node", "")}, "status": status}


@pytest.mark.parametrize(
    ("kind", "changed", "heard"),
    [
        ("ADDED", pod("a"), ["pod created"]),
        ("MODIFIED", pod("a", node="n"), ["pod created", "pod scheduled"]),
        ("MODIFIED", pod("a", phase="Failed"), ["pod created", "pod ended"]),
        ("DELETED", pod("a", phase="Running"), ["pod created", "pod ended"]),
    ],
    ids=["created", "scheduled", "failed", "deleted"],
)
def test_a_change_of_a_pod_says_how_far_it_is(kind: str, changed: dict[str, Any], heard: list[str]) -> None:
    assert list(end_to_end_objects.heard_of_pod(kind, changed)) == heard


def test_a_deleted_job_has_failed_and_is_gone() -> None:
    failed = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    assert list(end_to_end_objects.heard_of_job("MODIFIED", failed)) == ["job created", "job failed"]
    assert list(end_to_end_objects.heard_of_job("MODIFIED", {})) == ["job created"]
    assert list(end_to_end_objects.heard_of_job("DELETED", {})) == ["job created", "job failed", "job gone"]


def test_the_return_of_the_pods_is_told_by_who_works() -> None:
    heard = {
        (0, "pod ended"): {"a": 11.0, "b": 12.5},
        (0, "job failed"): {"j": 12.0},  # while a pod was still there
        (0, "job gone"): {"j": 13.0},
        (1, "pod created"): {"c": 13.25, "d": 13.5},
        (1, "pod scheduled"): {"c": 13.5, "d": 14.0},
    }
    parts = end_to_end_objects.parts(heard, 1, 10.0, 15.0)
    assert list(parts.values()) == [2.5, 0.0, 0.5, 0.5, 0.5, 1.0]
    del heard[0, "job gone"]
    parts = end_to_end_objects.parts(heard, 1, 10.0, 15.0)
    assert list(parts.values()) == [2.5, 0.0, None, 1.0, 0.5, 1.0]
