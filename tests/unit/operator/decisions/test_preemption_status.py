"""What a Preemption's status and Events say of what has happened."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import Any

import pytest
from pydantic import ValidationError

from gracepoint.wire.messages import Phase, Resumption, SavedFor, Spent
from gracepoint_operator.decisions import preemption_status
from gracepoint_operator.decisions.preemption_status import Note
from gracepoint_operator.model.preemption_record import EndReason, PreemptionRecord, joined_status
from gracepoint_operator.resources import Acknowledgements, PreemptionStatus, Replica
from gracepoint_operator.signals import KNOWN_TO_GANG
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW
from tests.unit.operator.fakes.replica import report

NAME = f"train-{JOBSET_UID[:8]}-1"
PODS = ("train-workers-0-0-0xyz", "train-workers-0-1-0xyz")


def preemption(state: dict[str, Any] | None = None, *, phase: str | None = "Noticed", **spec: Any) -> PreemptionRecord:
    body = objects.preemption(phase=phase)
    body["spec"] |= spec
    body["status"] |= state or {}
    return PreemptionRecord.of(body)


def at(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(NOW + seconds, datetime.UTC)


def stages(of: PreemptionStatus) -> dict[str, float]:
    return {timing.stage: timing.seconds for timing in of.timings or ()}


# Events.

SIGNAL = "SpotTermination: taint cloud.google.com/impending-node-termination:NoSchedule on node-1, 15 s ahead"


@pytest.mark.parametrize(
    ("phase", "state", "expected"),
    [
        pytest.param(
            Phase.NOTICED, {}, Note("PreemptionNoticed", f"{NAME}: {SIGNAL}; the gang is notified"), id="noticed"
        ),
        pytest.param(
            Phase.AGREED,
            {"ordinal": 41},
            Note("SaveAgreed", f"{NAME}: all processes save at their sync point 41"),
            id="agreed",
        ),
        pytest.param(
            Phase.COMMITTED,
            {"step": 40, "stepsLost": 0, "secondsToSpare": 9.46},
            Note("CheckpointCommitted", f"{NAME}: step 40 is saved, 0 steps lost, 9.5 s to spare"),
            id="committed",
        ),
        pytest.param(
            Phase.EVACUATED,
            {"step": 40, "stepsLost": 0},
            Note("StepEvacuated", f"{NAME}: step 40 is in the memory of snapshot servers, 0 steps lost"),
            id="evacuated",
        ),
        pytest.param(
            Phase.PROMOTED, {"step": 30}, Note("SnapshotPromoted", f"{NAME}: step 30 is saved"), id="promoted"
        ),
        pytest.param(
            Phase.RETRACTED,
            {"message": "the signal went away"},
            Note("PreemptionRetracted", f"{NAME}: the signal went away"),
            id="retracted",
        ),
        pytest.param(
            Phase.FAILED,
            {"message": "disk full"},
            Note("PreemptionFailed", f"{NAME}: disk full", warning=True),
            id="failed",
        ),
        pytest.param(
            Phase.EXPIRED, {}, Note("PreemptionExpired", f"{NAME}: Expired", warning=True), id="expired, without a word"
        ),
        pytest.param(Phase.FROZEN, {}, None, id="frozen is no news"),
        pytest.param(Phase.WRITTEN, {}, None, id="nor is written"),
    ],
)
def test_the_event_of_a_phase_says_what_has_happened(
    phase: Phase, state: dict[str, Any], expected: Note | None
) -> None:
    assert preemption_status.note_of_phase(preemption(state, phase=str(phase)), phase) == expected


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        pytest.param({"mode": "Observe"}, f"{SIGNAL}; observed only", id="observed"),
        pytest.param({"mode": "Drill"}, f"{SIGNAL}; a drill: the gang saves and trains on", id="a drill"),
        pytest.param({"exits": False}, f"{SIGNAL}; the gang saves and trains on", id="told to train on"),
        pytest.param({"nodes": []}, f"{SIGNAL.replace(' on node-1', '')}; the gang is notified", id="on no node"),
        pytest.param(
            {"nodes": [f"n{i}" for i in range(7)]},
            f"{SIGNAL.replace('node-1', 'n0, n1, n2, n3, n4')}; the gang is notified",
            id="on many nodes",
        ),
    ],
)
def test_notice_event_says_the_cause_and_the_request(spec: dict[str, Any], said: str) -> None:
    note = preemption_status.note_of_phase(preemption(**spec), Phase.NOTICED)
    assert note is not None
    assert note.message == f"{NAME}: {said}"


@pytest.mark.parametrize(
    ("cause", "reason", "warning", "said"),
    [
        pytest.param("SpotTermination", "ExitBreakerOpen", True, "it has saved and left", id="the exit breaker"),
        pytest.param("TimeLimit", "TimeLimit", False, "its time is limited", id="a time limit"),
    ],
)
def test_event_of_a_training_gang_has_the_reason_or_the_limit(
    cause: str, reason: str, warning: bool, said: str
) -> None:
    note = preemption_status.note_of_breaker(preemption(cause=cause, exits=False))
    assert (note.reason, note.warning) == (reason, warning)
    assert said in note.message


def test_the_event_of_a_moved_deadline_counts_from_the_first_signal() -> None:
    note = preemption_status.note_of_move(preemption(deadline=objects.stamp(NOW + 45)))
    assert note.message.startswith(f"{NAME}: the deadline is now 45 s after the first signal: taint ")
    assert not note.warning


def test_the_event_of_a_resumption_names_the_step() -> None:
    note = preemption_status.note_of_resumption(preemption({"restoredStep": 40}, phase="Committed"))
    assert note == Note("Resumed", f"{NAME}: training continues from step 40")


@pytest.mark.parametrize("signal", ["taint example.com/gone:NoExecute", *sorted(KNOWN_TO_GANG)])
@pytest.mark.parametrize("mode", ["Enforce", "Drill", "Observe"])
def test_gang_is_notified_unless_observed_or_already_informed(mode: str, signal: str) -> None:
    expected = mode != "Observe" and signal not in KNOWN_TO_GANG
    assert preemption_status.is_announced(preemption(mode=mode, signal=signal)) is expected


# From the notice to the end.


@pytest.mark.parametrize("exits", [True, False])
def test_new_preemption_expects_acks_of_every_pod_and_says_if_training_continues(exits: bool) -> None:
    spec = preemption(exits=exits).spec
    made = preemption_status.noticed(3, spec)
    assert (made.phase, made.acknowledgements) == (Phase.NOTICED, Acknowledgements(expected=3, received=0))
    assert [(item.type, item.status, item.reason) for item in made.conditions or ()] == (
        [] if exits else [("Exits", "False", "ExitBreakerOpen")]
    )


def test_an_end_that_the_operator_makes_is_reported_once() -> None:
    ended = preemption_status.ended(
        preemption().status, Phase.EXPIRED, EndReason.DEADLINE_PASSED, "nobody said", NOW + 50
    )
    (condition,) = ended.conditions or []
    assert (ended.phase, ended.message) == (Phase.EXPIRED, "nobody said")
    assert (condition.type, condition.reason, condition.last_transition_time) == ("Ended", "DeadlinePassed", at(50))
    assert preemption_status.ended(ended, Phase.RETRACTED, EndReason.GAVE_WAY, "later", NOW + 60) == ended


def test_report_is_recorded_with_figures_and_times_after_the_signal() -> None:
    found = preemption_status.reported(preemption(), report(Phase.COMMITTED), notice_s=0.5, now=NOW + 7)
    assert (found.phase, found.ordinal, found.step, found.bytes) == (Phase.COMMITTED, 41, 40, 1024)
    assert (found.processes, found.steps_lost, found.seconds_to_spare) == (2, 0, 9.5)
    frozen, agreed = found.timings or []
    assert (frozen.stage, frozen.seconds, frozen.p50_seconds, frozen.max_seconds) == ("frozen", 0.7, 0.1, 0.2)
    assert (agreed.stage, agreed.seconds, agreed.time) == ("agreed", 0.8, at(7))
    (ended,) = found.conditions or []
    assert (ended.reason, ended.message) == ("Committed", "told by the test: Committed")


def test_a_report_that_is_no_end_ends_nothing() -> None:
    assert not preemption_status.reported(preemption(), report(Phase.AGREED), 0.5, NOW).conditions


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (Phase.FROZEN, "every process is held at its next sync point"),
        (Phase.AGREED, "all processes save at their sync point 41"),
        (Phase.DRAINED, "all processes have reached step 40, and their devices are idle"),
        (Phase.WRITTEN, "every process has written its part of step 40"),
        (Phase.DURABLE, "all parts of step 40 are on stable storage"),
        (Phase.COMMITTED, "step 40 is saved, 0 steps lost, 9.5 s to spare"),
        (Phase.FAILED, "Failed"),
    ],
)
def test_a_report_without_a_message_gets_one(phase: Phase, said: str) -> None:
    without = dataclasses.replace(report(phase), message="")
    assert preemption_status.reported(preemption(), without, 0.5, NOW).message == said


def test_texts_of_a_report_are_cut_to_what_the_resource_takes() -> None:
    long = dataclasses.replace(report(Phase.COMMITTED), message="m" * 2000, choice="c" * 40, choice_reason="r" * 2000)
    found = preemption_status.reported(preemption(), long, 0.5, NOW)
    assert (found.message, found.choice, found.choice_reason) == ("m" * 1024, "c" * 32, "r" * 1024)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        pytest.param("Enforce", "step 1 is committed", id="a time limit"),
        pytest.param("Drill", "drill: step 1 is committed", id="a drill"),
    ],
)
def test_only_a_drill_is_called_one(mode: str, said: str) -> None:
    stays = dataclasses.replace(report(Phase.COMMITTED), message="drill: step 1 is committed")
    found = preemption_status.reported(preemption(mode=mode, exits=False), stays, 0.5, NOW)
    (ended,) = found.conditions or []
    assert (found.message, ended.message) == (said, said)


@pytest.mark.parametrize("choice", [None, ""])
def test_a_report_of_no_choice_says_none(choice: str | None) -> None:
    found = preemption_status.reported(
        preemption(), dataclasses.replace(report(Phase.COMMITTED), choice=choice), 0.5, NOW
    )
    assert (found.choice, found.choice_reason) == (None, None)
    chosen = dataclasses.replace(report(Phase.COMMITTED), choice="SaveNow", choice_reason="it fits")
    found = preemption_status.reported(preemption(), chosen, 0.5, NOW)
    assert (found.choice, found.choice_reason) == ("SaveNow", "it fits")


@pytest.mark.parametrize(
    ("participants", "processes"), [([0, 1, 2], 3), ([], 2)], ids=["those that took part", "else all"]
)
def test_a_report_counts_the_processes(participants: list[int], processes: int) -> None:
    of = dataclasses.replace(report(Phase.COMMITTED), participants=participants)
    assert preemption_status.reported(preemption(), of, 0.5, NOW).processes == processes


def test_seconds_to_spare_are_reported_in_milliseconds_when_known() -> None:
    of = dataclasses.replace(report(Phase.COMMITTED), seconds_to_spare=1.23456)
    assert preemption_status.reported(preemption(), of, 0.5, NOW).seconds_to_spare == 1.235
    assert (
        preemption_status.reported(
            preemption(), dataclasses.replace(of, seconds_to_spare=None), 0.5, NOW
        ).seconds_to_spare
        is None
    )


@pytest.mark.parametrize(("after_s", "told"), [(2.5, 2.5), (0.12345678, 0.1235), (0.25, 0.25), (-0.3, 0.0)], ids=str)
def test_stage_is_reported_in_seconds_after_the_signal(after_s: float, told: float) -> None:
    found = preemption_status.with_stage(PreemptionStatus(), "exited", 1000.0, 1000.0 + after_s)
    assert stages(found) == {"exited": told}
    assert preemption_status.with_stage(found, "exited", 1000.0, 1009.0) == found


def resumption(step: int | None = 40, *, training: bool = False, age_s: float = 2.0) -> Resumption:
    return Resumption(
        pod_uid="uid-pod-0-1",
        session="s-1",
        workload_uid=JOBSET_UID,
        restart_attempt=1,
        restored_step=step,
        training=training,
        age_s=age_s,
    )


@pytest.mark.parametrize(("training", "stage"), [(False, "restored"), (True, "training")])
@pytest.mark.parametrize(("age_s", "seconds"), [(2.0, 28.0), (0.5, 29.5), (0.0, 30.0), (-4.0, 30.0)])
def test_a_resumption_counts_from_when_it_happened(training: bool, stage: str, age_s: float, seconds: float) -> None:
    found = preemption_status.resumed(
        preemption(phase="Committed"), resumption(training=training, age_s=age_s), NOW + 30
    )
    assert stages(found) == {stage: seconds}


def told_as_of_the_start(**spent: Any) -> dict[str, float]:
    """The stages that a resumption brings 30 s after the signal. It was sent 20 s after attach."""
    said = dataclasses.replace(resumption(training=True, age_s=0.0), spent=Spent(now_s=20.0, **spent))
    return stages(preemption_status.resumed(preemption(phase="Committed"), said, NOW + 30))


def test_a_resumption_reports_where_the_time_of_the_start_went() -> None:
    found = told_as_of_the_start(joined_s=2.0, restored_s=3.0, age_s=1.5, compiled_s=2.5, trained_s=20.0)
    assert found == {"started": 8.5, "attaching": 10.0, "joined": 12.0, "compiled": 12.5, "training": 30.0}


@pytest.mark.parametrize(
    ("spent", "expected"),
    [
        pytest.param({"joined_s": 2.0}, {"joined": 12.0}, id="an older library"),
        pytest.param({"joined_s": math.nan, "age_s": 99.0}, {"started": 0.0}, id="before the signal"),
        pytest.param({"joined_s": 2.0, "compiled_s": 1e9}, {"joined": 12.0, "compiled": 30.0}, id="in the future"),
    ],
)
def test_times_of_a_start_that_cannot_be_are_not_recorded(spent: dict[str, float], expected: dict[str, float]) -> None:
    assert told_as_of_the_start(**spent) == expected | {"attaching": 10.0, "training": 30.0}


@pytest.mark.parametrize(
    ("before", "said", "after"), [(None, 40, 40), (None, None, None), (30, 40, 30), (30, None, 30)]
)
def test_the_first_to_say_which_step_was_restored_counts(
    before: int | None, said: int | None, after: int | None
) -> None:
    known = preemption({} if before is None else {"restoredStep": before}, phase="Committed")
    assert preemption_status.resumed(known, resumption(said), NOW + 30).restored_step == after


# What the next start restores.


def note(name: str = NAME, attempt: int = 0) -> SavedFor:
    return SavedFor(preemption=name, session="s-0", restart_attempt=attempt, spent=Spent(now_s=9.0, joined_s=1.0))


@pytest.mark.parametrize(
    ("phase", "saved_for", "expected"),
    [
        pytest.param("Noticed", note(), True, id="nothing was reported"),
        pytest.param("Durable", note(), True, id="all but the commit was reported"),
        pytest.param("Expired", note(), True, id="the operator gave up"),
        pytest.param("Retracted", note(), True, id="the signal went away"),
        pytest.param("Evacuated", note(), True, id="that it is in snapshot servers was reported"),
        pytest.param("Committed", note(), False, id="it was reported"),
        pytest.param("Promoted", note(), False, id="an older one was reported"),
        pytest.param("Failed", note(), False, id="a failure was reported"),
        pytest.param("Expired", note("train-2"), False, id="saved for another preemption"),
        pytest.param("Expired", note(attempt=1), False, id="saved by another start of the same name"),
        pytest.param("Expired", None, False, id="no note, and no step is known"),
    ],
)
def test_a_note_proves_the_commit_of_the_preemption_that_it_names(
    phase: str, saved_for: SavedFor | None, expected: bool
) -> None:
    said = dataclasses.replace(resumption(40), saved_for=saved_for)
    assert preemption_status.proves_commit(preemption(phase=phase, restartAttempt=0), said) is expected


@pytest.mark.parametrize(
    ("step", "restored", "attempt", "expected"),
    [
        pytest.param(40, 40, 1, True, id="the step that was being saved"),
        pytest.param(40, 40, 0, True, id="under the same number, after a suspension"),
        pytest.param(40, 40, 2, False, id="two starts later"),
        pytest.param(40, 30, 1, False, id="an older step"),
        pytest.param(40, None, 1, False, id="nothing was restored"),
        pytest.param(None, 40, 1, False, id="no step was reported"),
        pytest.param(None, None, 1, False, id="neither"),
    ],
)
def test_without_a_note_the_next_start_proves_the_reported_step(
    step: int | None, restored: int | None, attempt: int, expected: bool
) -> None:
    known = preemption({} if step is None else {"step": step}, phase="Drained", restartAttempt=0)
    said = dataclasses.replace(resumption(restored), restart_attempt=attempt)
    assert preemption_status.proves_commit(known, said) is expected
    unknown = preemption({} if step is None else {"step": step}, phase="Drained", restartAttempt=None)
    assert preemption_status.proves_commit(unknown, said) is (step is not None and step == restored)


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        pytest.param({"choice": "Promote"}, "Durable", id="an older snapshot was being committed"),
        pytest.param({"restoredStep": 30}, "Expired", id="an earlier start had restored another step"),
        pytest.param({}, "Retracted", id="the gang trained on"),
    ],
)
def test_a_reported_step_alone_proves_no_commit(state: dict[str, Any], phase: str) -> None:
    known = preemption({"step": 40, **state}, phase=phase, restartAttempt=0)
    assert not preemption_status.proves_commit(known, resumption(40))


@pytest.mark.parametrize(
    ("saved", "disrupted", "state", "expected"),
    [
        pytest.param({}, "s-0", {}, True, id="the start that was to leave has left with it"),
        pytest.param({}, "s-1", {}, False, id="another start, or another workload, has left with it"),
        pytest.param({}, "", {}, False, id="nothing is known of the start that was to leave"),
        pytest.param({"left_s": None}, "s-0", {}, False, id="it trained on after the save"),
        pytest.param({}, "s-0", {"step": 41}, False, id="another step was being saved"),
        pytest.param({}, "s-0", {"restoredStep": 30}, False, id="an earlier start had restored another step"),
        pytest.param({}, "s-0", {"choice": "Promote"}, False, id="an older snapshot was being committed"),
    ],
)
def test_what_a_start_saved_and_left_with_proves_the_commit_that_it_did_not_hear_of(
    saved: dict[str, Any], disrupted: str, state: dict[str, Any], expected: bool
) -> None:
    spent = Spent(now_s=9.0, **{"joined_s": 1.0, "left_s": 9.0, **saved})
    said = dataclasses.replace(resumption(40), saved_for=dataclasses.replace(note(""), spent=spent))
    for phase in ("Noticed", "Expired"):
        for attempt in (0, None):  # a Job has no numbers
            known = preemption(state, phase=phase, restartAttempt=attempt)
            assert preemption_status.proves_commit(known, said, disrupted) is expected


@pytest.mark.parametrize(
    ("spec", "saved_for"),
    [
        pytest.param({"phase": "Retracted"}, note(""), id="the signal went away"),
        pytest.param({"phase": "Committed"}, note(""), id="it was reported"),
        pytest.param({"phase": "Failed"}, note(""), id="a failure was reported"),
        pytest.param({"phase": "Expired", "exits": False}, note(""), id="the gang was to train on"),
        pytest.param({"phase": "Expired", "mode": "Observe"}, note(""), id="nobody was asked to leave"),
        pytest.param({"phase": "Expired"}, note("train-2"), id="saved for another preemption"),
        pytest.param({"phase": "Expired"}, None, id="a periodic save, or a promoted snapshot"),
    ],
)
def test_what_a_start_left_with_proves_only_a_preemption_that_asked_for_it(
    spec: dict[str, Any], saved_for: SavedFor | None
) -> None:
    if saved_for is not None:
        saved_for = dataclasses.replace(saved_for, spent=Spent(now_s=9.0, joined_s=1.0, left_s=9.0))
    said = dataclasses.replace(resumption(40), saved_for=saved_for)
    assert not preemption_status.proves_commit(preemption(restartAttempt=0, **spec), said, "s-0")


def test_a_step_from_the_memory_of_nodes_proves_no_commit_and_is_said() -> None:
    known = preemption({"step": 40}, phase="Expired", restartAttempt=0)
    said = dataclasses.replace(resumption(40), from_memory=True)
    assert not preemption_status.proves_commit(known, said)
    after = preemption_status.resumed(known, said, NOW + 60)
    assert (after.restored_step, after.restored_from_memory) == (40, True)
    assert preemption_status.resumed(known, resumption(40), NOW + 60).restored_from_memory is None
    note = preemption_status.note_of_resumption(
        preemption({"restoredStep": 40, "restoredFromMemory": True}, phase="Expired")
    )
    assert note.message == f"{NAME}: training continues from step 40, which the memory of nodes had"


@pytest.mark.parametrize(
    ("state", "spent", "expected"),
    [
        pytest.param({}, Spent(now_s=9.0, joined_s=1.0, first_step=40, saved_s=5.0), True, id="it has saved"),
        pytest.param({}, Spent(now_s=9.0, joined_s=1.0, first_step=40), False, id="it has saved nothing yet"),
        pytest.param(
            {}, Spent(now_s=9.0, joined_s=1.0, first_step=30, saved_s=5.0), False, id="it began at another step"
        ),
        pytest.param({}, None, False, id="it says nothing"),
        pytest.param(
            {"restoredStep": 30}, Spent(now_s=9.0, joined_s=1.0, first_step=40, saved_s=5.0), False, id="a later start"
        ),
        pytest.param(
            {"phase": "Expired"}, Spent(now_s=9.0, joined_s=1.0, first_step=40, saved_s=5.0), False, id="not evacuated"
        ),
    ],
)
def test_an_evacuated_step_is_committed_once_the_start_that_restored_it_has_saved(
    state: dict[str, Any], spent: Spent | None, expected: bool
) -> None:
    status = {"step": 40, "restoredStep": 40, **state}
    known = preemption(status, phase=status.pop("phase", "Evacuated"))
    assert preemption_status.is_saved_since(known, spent) is expected
    if expected:
        after = preemption_status.saved_since(known.status)
        assert (after.phase, after.step) == (Phase.COMMITTED, 40)
        assert joined_status(known.status, after) == after


@pytest.mark.parametrize(
    ("state", "first_step", "step", "expected"),
    [
        pytest.param({}, 40, 70, True, id="a later step"),
        pytest.param({}, 40, 40, True, id="itself"),
        pytest.param({}, 40, 30, False, id="an earlier step"),
        pytest.param({}, 40, None, False, id="no step is said"),
        pytest.param({}, 20, 70, False, id="by a later start, from an older step"),
        pytest.param({}, None, 70, False, id="where it began is not said"),
        pytest.param({"restoredStep": 30}, 40, 70, False, id="it was not restored"),
        pytest.param({"step": None, "restoredStep": None}, None, 70, False, id="which step is not known"),
        pytest.param({"phase": "Expired"}, 40, 70, False, id="not evacuated"),
    ],
)
def test_an_evacuated_step_is_committed_once_the_next_preemption_has_saved(
    state: dict[str, Any], first_step: int | None, step: int | None, expected: bool
) -> None:
    status = {"step": 40, "restoredStep": 40, **state}
    known = preemption(status, phase=status.pop("phase", "Evacuated"))
    spent = None if first_step is None else Spent(now_s=9.0, joined_s=1.0, first_step=first_step)
    said = dataclasses.replace(report(Phase.COMMITTED), step=step, spent=spent)
    assert preemption_status.is_saved_by(known, said) is expected


def test_an_evacuated_step_that_was_not_restored_is_said_to_be_lost() -> None:
    note = preemption_status.note_of_resumption(preemption({"step": 40, "restoredStep": 30}, phase="Evacuated"))
    assert note.warning
    assert note.message.endswith("continues from step 30; no snapshot server has step 40 any more")


def test_a_proven_commit_says_that_no_report_had_arrived() -> None:
    found = preemption_status.proven_committed(preemption({"ordinal": 41}, phase="Expired"), resumption(40), NOW + 60)
    assert (found.phase, found.step, found.steps_lost, found.ordinal) == (Phase.COMMITTED, 40, 0, 41)
    assert found.message == (
        "step 40 is saved, 0 steps lost: the next start has restored it. No report of the commit had arrived"
    )
    (end,) = (item for item in found.conditions or () if item.type == "Ended")
    assert (end.reason, end.message, end.last_transition_time) == ("NextStartRestored", found.message, at(60))


# Receipts.


def entry(name: str = "replica-a", told: int = 0, heard: int = 0, **fields: Any) -> Replica:
    return Replica(name=name, told=told, acknowledged=heard, **fields)


def test_a_replica_without_an_entry_writes_its_own_and_leaves_the_others() -> None:
    own = entry(told=2, heard=1)
    assert preemption_status.own_entry(PreemptionStatus(), own) == own
    assert preemption_status.own_entry(PreemptionStatus(replicas=[entry("replica-b", told=9, heard=9)]), own) == own


def test_a_replica_that_was_started_again_never_says_less_than_before() -> None:
    before = entry(told=3, heard=2, told_pods=["p-0", "p-1"], acknowledged_pods=["p-0"], told_at=at(5))
    after = entry(told=1, heard=1, told_pods=["p-2"], acknowledged_pods=["p-1", "p-2"], told_at=at(3))
    found = preemption_status.own_entry(PreemptionStatus(replicas=[entry("replica-b"), before]), after)
    assert (found.name, found.told, found.acknowledged) == ("replica-a", 3, 3)
    assert (found.told_pods, found.acknowledged_pods) == (["p-[0-2]"], ["p-[0-2]"])
    assert (found.told_at, found.acknowledged_at) == (at(5), None)


@pytest.mark.parametrize(
    ("before", "own", "expected"),
    [
        pytest.param(entry(told=5, heard=4), entry(told=1, heard=1), (5, 4), id="more before"),
        pytest.param(entry(told=1, heard=1), entry(told=5, heard=4), (5, 4), id="more now"),
        pytest.param(
            entry(told_pods=["p-[0-5]"], acknowledged_pods=["p-[0-2]"]), entry(), (6, 3), id="more by their names"
        ),
    ],
)
def test_the_largest_count_is_kept(before: Replica, own: Replica, expected: tuple[int, int]) -> None:
    found = preemption_status.own_entry(PreemptionStatus(replicas=[before]), own)
    assert (found.told, found.acknowledged) == expected


@pytest.mark.parametrize(("one", "other"), [(None, 3.0), (3.0, None), (1.0, 3.0), (3.0, 1.0)])
def test_the_later_time_is_kept(one: float | None, other: float | None) -> None:
    before, own = (entry(acknowledged_at=None if s is None else at(s)) for s in (one, other))
    assert preemption_status.own_entry(PreemptionStatus(replicas=[before]), own).acknowledged_at == at(3.0)


def acknowledged(*entries: Replica, expected: int | None = 2, received: int = 0) -> PreemptionStatus:
    before = None if expected is None else Acknowledgements(expected=expected, received=received)
    return preemption_status.acknowledged(
        PreemptionStatus(acknowledgements=before, replicas=list(entries) or None), PODS, NOW
    )


def counts(of: PreemptionStatus) -> tuple[int, int]:
    assert of.acknowledgements is not None
    return of.acknowledgements.expected, of.acknowledgements.received


def test_where_nobody_has_written_anything_nothing_is_counted() -> None:
    for expected, after in ((None, (0, 0)), (2, (2, 0))):
        found = acknowledged(expected=expected)
        assert counts(found) == after
        assert stages(found) == {}


def test_the_receipts_of_both_replicas_are_counted_once_a_process() -> None:
    one = entry("replica-a", 1, 1, told_pods=["train-workers-0-0"], acknowledged_pods=["train-workers-0-0"])
    two = entry("replica-b", 2, 2, told_pods=["train-workers-0-[0-1]"], acknowledged_pods=["train-workers-0-[0-1]"])
    assert counts(acknowledged(one, two)) == (2, 2)
    found = acknowledged(one)
    assert counts(found) == (2, 1)
    assert found.acknowledgements is not None
    assert [(item.pod, item.lags) for item in found.acknowledgements.laggards] == [(PODS[1], "NotConnected")]


@pytest.mark.parametrize(
    ("entries", "received", "expected"),
    [
        pytest.param([entry(heard=1)], 2, (2, 2), id="never less than before"),
        pytest.param([entry(heard=1), entry("replica-b", heard=2)], 0, (2, 2), id="the largest entry"),
        pytest.param([entry(heard=3)], 0, (3, 3), id="more than were expected"),
    ],
)
def test_receipts_never_become_fewer(entries: list[Replica], received: int, expected: tuple[int, int]) -> None:
    assert counts(acknowledged(*entries, received=received)) == expected


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([entry(told=2, told_at=at(4))], {"noticeSent": 4.0}, id="all were told by one"),
        pytest.param([entry(told=1, told_at=at(4))], {}, id="not all were told"),
        pytest.param([entry(told=2)], {}, id="nobody knows when"),
        pytest.param(
            [entry(told=1, told_at=at(4)), entry("replica-b", told=2, told_at=at(3))],
            {"noticeSent": 4.0},
            id="the later time counts",
        ),
        pytest.param(
            [
                entry(told=1, told_at=at(1), told_pods=["train-workers-0-0"]),
                entry("replica-b", told=1, told_at=at(3), told_pods=["train-workers-0-1"]),
            ],
            {"noticeSent": 3.0},
            id="each told one",
        ),
        pytest.param([entry(told=2, told_at=at(4)), entry("replica-b")], {"noticeSent": 4.0}, id="one told nobody"),
        pytest.param(
            [entry(told=2, told_at=at(1), heard=2, acknowledged_at=at(6)), entry("replica-b", acknowledged_at=at(5))],
            {"noticeSent": 1.0, "lastAck": 6.0},
            id="all have acknowledged",
        ),
        pytest.param([entry(heard=1, acknowledged_at=at(6))], {}, id="not all have acknowledged"),
        pytest.param([entry(heard=2)], {}, id="nobody knows when the last did"),
    ],
)
def test_a_stage_is_reached_when_all_were_notified_or_have_acknowledged(
    entries: list[Replica], expected: dict[str, float]
) -> None:
    assert stages(acknowledged(*entries)) == expected


@pytest.mark.parametrize("step", [2**63, -1], ids=["more than 64 bits", "negative"])
def test_a_restored_step_that_no_record_takes_is_refused(step: int) -> None:
    with pytest.raises(ValidationError):
        preemption_status.resumed(preemption(phase="Committed"), resumption(step), NOW + 30)
