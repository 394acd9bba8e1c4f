"""An epoch: its name, and one record from what two replicas know of it, in whichever order they learn of it."""

from __future__ import annotations

import dataclasses
import datetime
import itertools

import pytest

from gracepoint.wire.messages import Phase
from gracepoint_operator.model.preemption import PreemptionRecord, epoch_name, joined_status
from gracepoint_operator.resources import Acknowledgements, PreemptionStatus, StageTime
from gracepoint_operator.workloads import read_pod
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import NOW
from tests.unit.operator.fakes.scene import Scene


def version(moves: int, deadline_at: float, *, attempted_at: float | None = None) -> PreemptionRecord:
    epoch = PreemptionRecord.of(objects.preemption(deadline_at=deadline_at))
    attempted = None if attempted_at is None else datetime.datetime.fromtimestamp(attempted_at, datetime.UTC)
    change = {"moves": moves, "signal": f"move {moves} to {deadline_at}", "eviction_attempted_at": attempted}
    return dataclasses.replace(epoch, spec=epoch.spec.model_copy(update=change))


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
    for epoch in all_orders(*versions):
        assert epoch.spec.deadline.timestamp() == deadline_at
        assert epoch.spec.signal.endswith(str(deadline_at))


def test_the_first_attempt_to_evict_is_kept_whichever_version_counts() -> None:
    for epoch in all_orders(version(1, NOW + 60, attempted_at=NOW + 2), version(2, NOW + 50), version(0, NOW + 70)):
        assert epoch.spec.eviction_attempted_at is not None
        assert epoch.spec.eviction_attempted_at.timestamp() == NOW + 2


def of_life(
    attempt: int, *, newest_pod_at: float = NOW - 100, made: bool = True, phase: str = "Noticed"
) -> PreemptionRecord:
    body = objects.preemption(phase=phase)
    body["spec"] |= {"restartAttempt": attempt, "newestPodAt": objects.stamp(newest_pod_at)}
    epoch = PreemptionRecord.of(body)
    return epoch if made else dataclasses.replace(epoch, created_at=None)


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
    def evicted(epoch: PreemptionRecord, pods: list[str]) -> PreemptionRecord:
        return dataclasses.replace(epoch, spec=epoch.spec.model_copy(update={"pods": pods}))

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
def test_pod_belongs_to_the_life_ended_by_an_epoch_if_not_younger(created_at: float, included: bool) -> None:
    epoch = PreemptionRecord.of(objects.preemption(created_at=NOW))
    assert epoch.includes(read_pod(objects.pod(created_at=created_at))) is included


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
def test_an_epochs_name_is_made_of_jobset_uid_and_number(jobset: str, expected: str) -> None:
    assert epoch_name(jobset, objects.JOBSET_UID, 3) == expected


def test_replica_with_an_earlier_observation_changes_only_mutable_fields() -> None:
    scene = Scene()
    theirs = scene.recorded()
    earlier = {"observed_at": theirs.spec.observed_at - SECOND, "deadline": theirs.spec.deadline - SECOND}
    ours = dataclasses.replace(theirs, spec=theirs.spec.model_copy(update=earlier))

    joined = ours.joined(theirs)

    assert joined.spec.deadline == ours.spec.deadline
    assert joined.spec.observed_at == theirs.spec.observed_at  # the API server refuses any other


@pytest.mark.parametrize(
    ("made", "newest_pod", "knows"),
    [
        pytest.param(True, True, True, id="an object with both times"),
        pytest.param(True, False, True, id="the time of the object alone"),
        pytest.param(False, True, True, id="the time of its newest pod alone"),
        pytest.param(False, False, False, id="neither"),
    ],
)
def test_an_epoch_knows_its_pods_by_one_of_two_times(made: bool, newest_pod: bool, knows: bool) -> None:
    epoch = PreemptionRecord.of(objects.preemption())
    at = datetime.datetime.fromtimestamp(NOW - 100, datetime.UTC) if newest_pod else None
    spec = epoch.spec.model_copy(update={"newest_pod_at": at})
    found = dataclasses.replace(epoch, spec=spec, created_at=epoch.created_at if made else None)
    assert found.knows_its_pods is knows


def test_an_epoch_that_is_under_way_has_not_ended() -> None:
    assert PreemptionRecord.of(objects.preemption(phase="Noticed")).ended_at is None
    assert PreemptionRecord.of(objects.preemption(phase="Committed", ended_at=NOW + 9)).ended_at == NOW + 9


def status(step: int, *first_acks: float, phase: Phase = Phase.FROZEN) -> PreemptionStatus:
    timings = [StageTime(stage="firstAck", seconds=seconds) for seconds in first_acks]
    return PreemptionStatus(phase=phase, step=step, timings=[*timings, StageTime(stage="frozen", seconds=9.0)])


def test_of_two_first_receipts_the_earlier_one_is_kept() -> None:
    for ours, theirs in ((2.0, 1.0), (1.0, 2.0)):
        joined = joined_status(status(7, ours), status(7, theirs))
        assert [(item.stage, item.seconds) for item in joined.timings or ()] == [("firstAck", 1.0), ("frozen", 9.0)]


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
