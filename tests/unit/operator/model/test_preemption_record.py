"""A preemption: its name, and one record from what two replicas know of it, in whichever order they learn of it."""

from __future__ import annotations

import dataclasses
import datetime
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracepoint.wire.messages import Phase
from gracepoint_operator.model.preemption_record import (
    CONDITION_PROGRESSING,
    PreemptionRecord,
    joined_status,
    preemption_name,
)
from gracepoint_operator.resources import (
    Acknowledgements,
    Condition,
    ConditionStatus,
    Laggard,
    Lags,
    PreemptionStatus,
    Replica,
    StageTime,
)
from gracepoint_operator.signals import REPORTED_BY_GANG
from gracepoint_operator.workloads import read_pod
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import NOW
from tests.unit.operator.fakes.scene import Scene


def version(moves: int, deadline_at: float, *, attempted_at: float | None = None) -> PreemptionRecord:
    preemption = PreemptionRecord.of(objects.preemption(deadline_at=deadline_at))
    attempted = None if attempted_at is None else datetime.datetime.fromtimestamp(attempted_at, datetime.UTC)
    change = {"moves": moves, "signal": f"move {moves} to {deadline_at}", "eviction_attempted_at": attempted}
    return dataclasses.replace(preemption, spec=preemption.spec.model_copy(update=change))


def all_orders(*versions: PreemptionRecord) -> list[PreemptionRecord]:
    def joined(order: tuple[PreemptionRecord, ...]) -> PreemptionRecord:
        first, *others = order
        for other in others:
            first = first.joined(other)
        return first

    return [joined(order) for order in itertools.permutations(versions)]


@pytest.mark.parametrize(
    ("versions", "deadline_at"),
    [
        pytest.param((version(0, NOW + 15), version(1, NOW + 900)), NOW + 900, id="put off"),
        pytest.param((version(2, NOW + 900), version(1, NOW + 15)), NOW + 900, id="moved earlier, then put off"),
        pytest.param((version(1, NOW + 900), version(1, NOW + 15)), NOW + 15, id="moved by both at once"),
        pytest.param((version(0, NOW + 3), version(1, NOW + 9), version(2, NOW + 6)), NOW + 6, id="three versions"),
    ],
)
def test_the_version_that_was_moved_more_often_counts_then_the_earlier_deadline(
    versions: tuple[PreemptionRecord, ...], deadline_at: float
) -> None:
    for preemption in all_orders(*versions):
        assert preemption.spec.deadline.timestamp() == deadline_at
        assert preemption.spec.signal.endswith(str(deadline_at))


def test_the_first_attempt_to_evict_is_kept_whichever_version_counts() -> None:
    first, later = version(1, NOW + 60, attempted_at=NOW + 2), version(0, NOW + 70, attempted_at=NOW + 3)
    for preemption in all_orders(first, version(2, NOW + 50), later):
        assert preemption.spec.eviction_attempted_at is not None
        assert preemption.spec.eviction_attempted_at.timestamp() == NOW + 2


def test_of_two_equal_versions_that_in_the_api_counts() -> None:
    ours, theirs = version(1, NOW + 60), version(1, NOW + 60)
    ours = dataclasses.replace(ours, spec=ours.spec.model_copy(update={"pods": ["ours"]}))
    assert ours.joined(theirs).spec.pods == theirs.spec.pods


def of_life(
    attempt: int, *, newest_pod_at: float = NOW - 100, made: bool = True, phase: str = "Noticed"
) -> PreemptionRecord:
    body = objects.preemption(phase=phase)
    body["spec"] |= {"restartAttempt": attempt, "newestPodAt": objects.stamp(newest_pod_at)}
    preemption = PreemptionRecord.of(body)
    return preemption if made else dataclasses.replace(preemption, created_at=None)


@pytest.mark.parametrize(
    ("attempt", "created_at", "is_included"),
    [
        pytest.param(0, NOW - 100, True, id="of the attempt"),
        pytest.param(1, NOW - 100, False, id="of a later attempt"),
        pytest.param(0, NOW - 50, False, id="of the attempt, made again after a suspension"),
    ],
)
@pytest.mark.parametrize("made", [True, False], ids=["recorded", "not recorded"])
def test_record_distinguishes_lives_of_a_gang_whenever_it_is_made(
    made: bool, attempt: int, created_at: float, is_included: bool
) -> None:
    pod = read_pod(objects.pod(attempt=attempt, created_at=created_at))
    assert of_life(0, made=made).includes(pod) is is_included


def test_a_record_of_another_life_under_the_same_name_takes_nothing_over() -> None:
    ours, theirs = of_life(0, made=False, phase="Committed"), of_life(3)
    assert ours.joined(theirs) == theirs


def test_eviction_attempt_also_updates_a_stronger_record() -> None:
    def evicted(preemption: PreemptionRecord, pods: list[str]) -> PreemptionRecord:
        return dataclasses.replace(preemption, spec=preemption.spec.model_copy(update={"pods": pods}))

    ours, theirs = version(0, NOW + 60, attempted_at=NOW + 2), version(1, NOW + 50)
    assert evicted(ours, ["evicted"]).joined(theirs).spec.pods == ["evicted"]
    assert ours.joined(evicted(theirs, ["more"])).spec.pods == ours.spec.pods
    both = evicted(version(1, NOW + 50, attempted_at=NOW + 1), ["theirs"])
    assert evicted(ours, ["ours"]).joined(both).spec.pods == ["theirs"], "which has its own attempt"
    neither = evicted(version(0, NOW + 60), ["ours"])
    assert neither.joined(evicted(theirs, ["theirs"])).spec.pods == ["theirs"]


@pytest.mark.parametrize(
    ("created_at", "included"),
    [
        pytest.param(NOW - 1, True, id="before the epoch"),
        pytest.param(NOW, True, id="in the same second"),
        pytest.param(NOW + 1, False, id="after it"),
    ],
)
def test_pod_belongs_to_the_life_ended_by_a_preemption_if_not_younger(created_at: float, included: bool) -> None:
    preemption = PreemptionRecord.of(objects.preemption(created_at=NOW))
    assert preemption.includes(read_pod(objects.pod(created_at=created_at))) is included


SECOND = datetime.timedelta(seconds=1)


@pytest.mark.parametrize(
    ("jobset", "expected"),
    [
        ("train", "train-0b6f1c9e-3"),
        ("a" * 63, "a" * 40 + "-0b6f1c9e-3"),
        ("a" * 39 + "-b", "a" * 39 + "-0b6f1c9e-3"),
    ],
    ids=["short", "trimmed", "trimmed at a hyphen"],
)
def test_a_preemptions_name_is_made_of_jobset_uid_and_number(jobset: str, expected: str) -> None:
    assert preemption_name(jobset, objects.JOBSET_UID, 3) == expected


def test_replica_with_an_earlier_observation_changes_only_mutable_fields() -> None:
    scene = Scene()
    theirs = scene.recorded()
    earlier = {"observed_at": theirs.spec.observed_at - SECOND, "deadline": theirs.spec.deadline - SECOND}
    ours = dataclasses.replace(theirs, spec=theirs.spec.model_copy(update=earlier))

    joined = ours.joined(theirs)

    assert joined.spec.deadline == ours.spec.deadline
    assert joined.spec.observed_at == theirs.spec.observed_at  # the API server refuses any other


@pytest.mark.parametrize(
    ("phase", "moves", "corrected", "cause"),
    [
        pytest.param("Noticed", 1, True, "ScaleDown", id="corrected while the gang is notified"),
        pytest.param("Frozen", 1, True, "SpotTermination", id="the gang has frozen"),
        pytest.param("Noticed", 0, True, "SpotTermination", id="the other replica knows as much"),
        pytest.param("Noticed", 1, False, "SpotTermination", id="another beginning, and moved for something else"),
    ],
)
def test_a_corrected_cause_is_taken_over_until_the_gang_has_frozen(
    phase: str, moves: int, corrected: bool, cause: str
) -> None:
    theirs = PreemptionRecord.of(objects.preemption(phase=phase))
    spec = theirs.spec.model_copy(update={"cause": "ScaleDown", "moves": moves})

    joined = dataclasses.replace(theirs, spec=spec, corrected=corrected).joined(theirs)

    assert (joined.spec.cause, joined.spec.moves) == (cause, moves)


def test_a_cause_that_the_gang_could_not_know_is_corrected_in_any_phase() -> None:
    stored = PreemptionRecord.of(objects.preemption(phase="Frozen"))
    reported = {"cause": "PodDeletion", "signal": REPORTED_BY_GANG}
    theirs = dataclasses.replace(stored, spec=stored.spec.model_copy(update=reported))
    spec = theirs.spec.model_copy(update={"cause": "NodeShutdown", "moves": 1})

    joined = dataclasses.replace(theirs, spec=spec, corrected=True).joined(theirs)

    assert (joined.spec.cause, joined.spec.signal) == ("NodeShutdown", REPORTED_BY_GANG)


@pytest.mark.parametrize(
    ("made", "newest_pod", "knows"),
    [
        pytest.param(True, True, True, id="an object with both times"),
        pytest.param(True, False, True, id="the time of the object alone"),
        pytest.param(False, True, True, id="the time of its newest pod alone"),
        pytest.param(False, False, False, id="neither"),
    ],
)
def test_a_preemption_knows_its_pods_by_one_of_two_times(made: bool, newest_pod: bool, knows: bool) -> None:
    preemption = PreemptionRecord.of(objects.preemption())
    at = datetime.datetime.fromtimestamp(NOW - 100, datetime.UTC) if newest_pod else None
    spec = preemption.spec.model_copy(update={"newest_pod_at": at})
    found = dataclasses.replace(preemption, spec=spec, created_at=preemption.created_at if made else None)
    assert found.knows_its_pods is knows


def test_a_preemption_that_is_in_progress_has_not_ended() -> None:
    under_way = PreemptionRecord.of(objects.preemption(phase="Noticed"))
    assert (under_way.ended_at, under_way.end_reason) == (None, "")
    over = PreemptionRecord.of(objects.preemption(phase="Committed", ended_at=NOW + 9))
    assert (over.ended_at, over.end_reason) == (NOW + 9, "Committed")
    untold = PreemptionRecord.of(objects.preemption(phase="Committed", deadline_at=NOW + 15))
    assert (untold.ended_at, untold.end_reason) == (NOW + 15, "")


@pytest.mark.parametrize(
    ("after_s", "phase", "restored"),
    [
        pytest.param(60, None, False, id="an API server that was away for a minute"),
        pytest.param(61, None, True, id="no status, long after the deadline"),
        pytest.param(61, "Noticed", False, id="its status is there"),
    ],
)
def test_a_record_that_was_restored_has_ended_with_its_deadline(
    after_s: float, phase: str | None, restored: bool
) -> None:
    body = objects.preemption(phase=phase, created_at=NOW + after_s, deadline_at=NOW)
    record = PreemptionRecord.of(body)
    assert record.is_restored is restored
    assert record.phase.ended is restored
    assert record.ended_at == (NOW if restored else None)


def test_the_end_is_the_condition_of_that_type() -> None:
    body = objects.preemption(phase="Committed", ended_at=NOW + 9)
    (ended,) = body["status"]["conditions"]
    body["status"]["conditions"] = [ended | {"type": "Other", "reason": "Other"}, ended]
    assert PreemptionRecord.of(body).end_reason == "Committed"


def test_records_are_compared_without_the_number_of_changes() -> None:
    preemption = PreemptionRecord.of(objects.preemption())
    assert dataclasses.replace(preemption, generation=9) == preemption
    assert (
        PreemptionRecord(preemption.namespace, preemption.name, None, preemption.spec, preemption.status).generation
        == 0
    )


@pytest.mark.parametrize(
    ("mode", "policy_mode", "exits", "phase", "expected"),
    [
        pytest.param("Enforce", "Enforce", True, "Committed", (False, True, True), id="a gang that has left"),
        pytest.param("Enforce", "Enforce", True, "Promoted", (False, True, True), id="one with an older step"),
        pytest.param("Enforce", "Enforce", True, "Noticed", (False, True, False), id="one that is still there"),
        pytest.param("Enforce", "Enforce", False, "Committed", (False, False, False), id="one that trains on"),
        pytest.param("Observe", "Observe", True, "Committed", (False, False, True), id="one that is told nothing"),
        pytest.param("Drill", "Enforce", True, "Committed", (True, False, False), id="a drill on request"),
        pytest.param("Drill", "Drill", True, "Committed", (False, False, False), id="a drill by the policy"),
        pytest.param("Enforce", "Drill", True, "Retracted", (False, True, False), id="one that was let go on"),
    ],
)
def test_mode_and_phase_say_whether_a_gang_leaves(
    mode: str, policy_mode: str, exits: bool, phase: str, expected: tuple[bool, bool, bool]
) -> None:
    body = objects.preemption(phase=phase, mode=mode, exits=exits)
    body["spec"]["policy"] = {"name": "careful", "spec": {"mode": policy_mode}}
    preemption = PreemptionRecord.of(body)
    assert (preemption.is_rehearsal, preemption.asks_to_leave, preemption.leaves) == expected


def with_status(status: PreemptionStatus) -> PreemptionRecord:
    return dataclasses.replace(PreemptionRecord.of(objects.preemption()), status=status)


@pytest.mark.parametrize("detail", ["timings", "replicas"])
def test_summary_lacks_details_and_joins_with_the_record_to_all(detail: str) -> None:
    details = {"timings": [StageTime(stage="frozen", seconds=9.0)], "replicas": [Replica(name="a")]}
    whole = with_status(PreemptionStatus(phase=Phase.FROZEN, step=7).model_copy(update={detail: details[detail]}))
    summary = whole.summary()
    assert (summary.status.timings, summary.status.replicas) == (None, None)
    assert (summary.status.step, summary.phase) == (7, Phase.FROZEN)
    assert summary.joined(whole) == whole


def test_record_without_details_is_its_own_summary() -> None:
    preemption = with_status(PreemptionStatus(phase=Phase.FROZEN, step=7))
    assert preemption.summary() is preemption


DETAILS = {
    "message": "frozen",
    "acknowledgements": Acknowledgements(received=1, expected=2),
    "timings": [StageTime(stage="frozen", seconds=9.0)],
    "choice_reason": "there is time",
    "replicas": [Replica(name="a")],
}


@pytest.mark.parametrize("other", [None, *DETAILS])
def test_two_records_have_the_same_details_if_all_are_equal(other: str | None) -> None:
    detailed = PreemptionStatus(phase=Phase.FROZEN, step=7).model_copy(update=DETAILS)
    changed = {"step": 8} if other is None else {other: None}
    preemption, compared = with_status(detailed), with_status(detailed.model_copy(update=changed))
    assert preemption.same_details(compared) == (other is None)


@pytest.mark.parametrize(
    ("phase", "open_for_it"),
    [
        pytest.param(None, True, id="no phase"),
        pytest.param(Phase.FROZEN, True, id="under way"),
        pytest.param(Phase.EXPIRED, True, id="expired"),
        pytest.param(Phase.RETRACTED, True, id="retracted"),
        pytest.param(Phase.COMMITTED, False, id="committed"),
        pytest.param(Phase.FAILED, False, id="failed"),
    ],
)
def test_a_commit_counts_unless_the_gang_reported_an_end(phase: Phase | None, open_for_it: bool) -> None:
    assert with_status(PreemptionStatus(phase=phase)).may_be_committed == open_for_it


def test_a_figure_that_only_one_status_has_is_kept() -> None:
    behind, ahead = PreemptionStatus(phase=Phase.NOTICED, step=7), PreemptionStatus(phase=Phase.FROZEN)
    for ours, theirs in ((behind, ahead), (ahead, behind)):
        joined = joined_status(ours, theirs)
        assert (joined.phase, joined.step) == (Phase.FROZEN, 7)


def test_time_of_a_stage_is_reported_if_it_was_reached() -> None:
    preemption = with_status(status(7, 1.0))
    assert [preemption.timing(stage) for stage in ("firstAck", "frozen", "written")] == [1.0, 9.0, None]
    assert with_status(PreemptionStatus()).timing("frozen") is None


@pytest.mark.parametrize(
    ("ours", "theirs", "joined"),
    [
        pytest.param(None, Phase.NOTICED, Phase.NOTICED, id="ours has none"),
        pytest.param(Phase.NOTICED, None, Phase.NOTICED, id="theirs has none"),
        pytest.param(Phase.FROZEN, Phase.NOTICED, Phase.FROZEN, id="forward"),
        pytest.param(Phase.NOTICED, Phase.FROZEN, Phase.FROZEN, id="never back"),
        pytest.param(Phase.COMMITTED, Phase.FAILED, Phase.FAILED, id="an end stays"),
        pytest.param(Phase.FAILED, Phase.EXPIRED, Phase.EXPIRED, id="an end without a save stays"),
        pytest.param(Phase.COMMITTED, Phase.EXPIRED, Phase.COMMITTED, id="saved after the deadline"),
        pytest.param(Phase.PROMOTED, Phase.RETRACTED, Phase.PROMOTED, id="an older step after the retraction"),
    ],
)
def test_phase_of_two_statuses_moves_forward_alone(ours: Phase | None, theirs: Phase | None, joined: Phase) -> None:
    found = joined_status(PreemptionStatus(phase=ours, step=1), PreemptionStatus(phase=theirs, step=2))
    assert found.phase is joined
    assert found.step == (1 if found.phase is ours else 2)


def status(step: int, *first_acks: float, phase: Phase = Phase.FROZEN) -> PreemptionStatus:
    timings = [StageTime(stage="firstAck", seconds=seconds) for seconds in first_acks]
    return PreemptionStatus(phase=phase, step=step, timings=[*timings, StageTime(stage="frozen", seconds=9.0)])


def test_of_two_first_receipts_the_earlier_one_is_kept() -> None:
    for ours, theirs in ((2.0, 1.0), (1.0, 2.0)):
        joined = joined_status(status(7, ours), status(7, theirs))
        assert [(item.stage, item.seconds) for item in joined.timings or ()] == [("firstAck", 1.0), ("frozen", 9.0)]


def frozen(second: int, p50: float, most: float) -> StageTime:
    at = datetime.datetime.fromtimestamp(NOW + second, datetime.UTC)
    return StageTime(stage="frozen", seconds=1.0 + most, p50_seconds=p50, max_seconds=most, time=at)


@pytest.mark.parametrize("of_all", [(0.2, 0.9), (0.1, 0.4)], ids=["another is slower", "the others are faster"])
def test_figures_over_all_processes_replace_those_of_the_one_that_reported_first(of_all: tuple[float, float]) -> None:
    early = PreemptionStatus(phase=Phase.FROZEN, timings=[frozen(0, 0.4, 0.4)])
    late = PreemptionStatus(phase=Phase.COMMITTED, timings=[frozen(5, *of_all)])
    for ours, theirs in ((late, early), (early, late)):
        assert joined_status(ours, theirs).timings == [frozen(0, *of_all)], "it was learned of as early as before"


@pytest.mark.parametrize(("phase", "step"), [(Phase.FROZEN, 8), (Phase.NOTICED, 7)], ids=["as far", "not as far"])
def test_figures_are_those_of_the_status_that_is_further_on(phase: Phase, step: int) -> None:
    """Of two that are as far, those that were written first."""
    assert joined_status(status(7), status(8, phase=phase)).step == step


@pytest.mark.parametrize(("ours", "theirs"), [((3, 4), (2, 8)), ((2, 8), (3, 4))])
def test_receipts_never_become_fewer(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    def received(count: int, expected: int) -> PreemptionStatus:
        return PreemptionStatus(acknowledgements=Acknowledgements(received=count, expected=expected))

    assert joined_status(received(*ours), received(*theirs)).acknowledgements == Acknowledgements(
        received=3, expected=8
    )


def test_receipts_of_one_status_alone_are_kept_and_those_written_first() -> None:
    first = Acknowledgements(expected=2, received=1, laggards=[Laggard(pod="a", lags=Lags.NOT_CONNECTED)])
    second = Acknowledgements(expected=2, received=1, laggards=[Laggard(pod="b", lags=Lags.NOT_CONNECTED)])
    with_first, with_second, without = (PreemptionStatus(acknowledgements=item) for item in (first, second, None))
    assert joined_status(with_first, without).acknowledgements == first
    assert joined_status(without, with_first).acknowledgements == first
    assert joined_status(with_second, with_first).acknowledgements == first
    assert joined_status(without, without).timings is None


def condition(kind: str, state: ConditionStatus, second: int, message: str) -> Condition:
    at = datetime.datetime.fromtimestamp(NOW + second, datetime.UTC)
    return Condition(type=kind, status=state, reason="R", message=message, last_transition_time=at)


#: What a replica may know of one preemption: its fixed condition, and what a gang said of its progress.
_KNOWN = st.builds(
    lambda exits, said, stages, reported: PreemptionStatus(
        phase=Phase.NOTICED,
        conditions=[*exits, *(condition(CONDITION_PROGRESSING, *item) for item in said)] or None,
        timings=[*(StageTime(stage=stage, seconds=0.0) for stage in stages), *(frozen(*item) for item in reported)]
        or None,
    ),
    st.sampled_from([[], [condition("Exits", ConditionStatus.FALSE, 0, "stays")]]),
    st.lists(st.tuples(st.sampled_from(ConditionStatus), st.integers(0, 2), st.sampled_from(["a", "b"])), max_size=1),
    st.permutations(["noticeSent", "lastAck", "podsBack"]).flatmap(
        lambda all_: st.integers(0, 3).map(lambda n: all_[:n])
    ),
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.1, 0.2]), st.sampled_from([0.2, 0.3])), max_size=1),
)


def contents(status: PreemptionStatus) -> dict[str, Condition]:
    return {item.type: item for item in status.conditions or ()}


@given(_KNOWN, _KNOWN, _KNOWN)
def test_conditions_are_joined_in_any_order(
    one: PreemptionStatus, two: PreemptionStatus, three: PreemptionStatus
) -> None:
    joined = joined_status
    assert joined(one, one).changes_since(one) == {}
    assert contents(joined(one, two)) == contents(joined(two, one))
    assert contents(joined(joined(one, two), three)) == contents(joined(one, joined(two, three)))


@given(st.lists(_KNOWN, min_size=2, max_size=3), _KNOWN)
def test_replicas_agree_on_a_record_and_stop_writing(known: list[PreemptionStatus], record: PreemptionStatus) -> None:
    writes = 0
    for _ in range(3):
        for number, own in enumerate(known):
            joined = joined_status(own, record)
            writes += bool(joined.changes_since(record))
            record = known[number] = joined
    assert writes <= len(known)
