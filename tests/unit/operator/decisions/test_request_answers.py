"""What somebody asks for: requests, drills, and what becomes of them."""

from __future__ import annotations

import pytest

from gracepoint.wire.messages import Mode, Phase
from gracepoint_operator.decisions.decide import Answer, Check, Decision, End, Move, StartPreemption, Wait, decide
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.model.preemption_record import EndReason, RequestRecord
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import RequestPhase
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW, Body
from tests.unit.operator.fakes.scene import Scene


def asked(scene: Scene, **request: object) -> None:
    scene.seen(kinds.REQUESTS, objects.request(created_at=scene.clock(), **request))  # type: ignore[arg-type]


def answered(scene: Scene) -> tuple[str, str]:
    """The phase and message of the one answer that there must be, and nothing else."""
    (answer,) = scene.decisions()
    assert isinstance(answer, Answer), answer
    return str(answer.status.phase), answer.status.message or ""


def test_a_request_starts_a_preemption_that_names_it_and_all_pods() -> None:
    scene = Scene()
    asked(scene, cause="Repair", deadlineSeconds=120)
    spec = scene.start().spec
    assert (spec.cause, spec.signal, spec.mode, spec.cancelable) == ("Repair", "request leave", Mode.ENFORCE, True)
    assert [reference.name for reference in spec.requests] == ["leave"]
    assert spec.pods == ["train-workers-0-0-0xyz", "train-workers-0-1-0xyz"]
    assert spec.deadline.timestamp() == NOW + 120


def test_a_request_may_be_further_ahead_than_any_signal_is_believed() -> None:
    scene = Scene()
    asked(scene, deadline=objects.stamp(NOW + 36_000))
    assert scene.start().spec.deadline.timestamp() == NOW + 36_000


def test_request_is_adopted_by_its_preemption_and_shows_the_outcome() -> None:
    scene = Scene()
    asked(scene)
    scene.recorded(cancelable=True, deadline_at=NOW + 300, requests=["leave"], pods=["train-workers-0-1-0xyz"])
    answers = [item for item in scene.decisions() if isinstance(item, Answer)]
    assert [(item.status.phase, item.status.preemption) for item in answers] == [
        (RequestPhase.ADOPTED, f"train-{JOBSET_UID[:8]}-1")
    ]
    scene.recorded(phase="Committed", ended_at=NOW + 9, requests=["leave"])
    assert answered(scene)[0] == "Committed"


@pytest.mark.parametrize(("before", "after"), [("Expired", 1), ("Evacuated", 1), ("Committed", 0), ("Failed", 0)])
def test_a_request_follows_its_preemption_to_a_later_commit(before: str, after: int) -> None:
    scene = Scene()
    scene.recorded(phase="Committed", ended_at=NOW + 9, requests=["leave"])
    ended = objects.request()
    ended["status"] = {"phase": before, "message": "as it was", "observedGeneration": 1}
    scene.seen(kinds.REQUESTS, ended)
    answers = [item.status.phase for item in scene.decisions() if isinstance(item, Answer)]
    assert answers == [RequestPhase.COMMITTED] * after


def test_a_request_joins_the_preemption_that_is_in_progress() -> None:
    scene = Scene()
    scene.taint("node-1", "ToBeDeletedByClusterAutoscaler")
    scene.recorded(deadline_at=NOW + 30)
    scene.clock.move(1)
    asked(scene, deadlineSeconds=300)
    move = scene.move()
    assert [reference.name for reference in move.spec.requests] == ["leave"]
    assert (move.spec.deadline.timestamp(), move.spec.moves) == (NOW + 30, 1)


@pytest.mark.parametrize("how", ["deleted", "retracted"])
def test_a_request_that_is_taken_back_before_the_freeze_retracts_its_preemption(how: str) -> None:
    scene = Scene()
    asked(scene)
    begun = scene.start()
    scene.recorded(cancelable=True, deadline_at=NOW + 300, requests=["leave"], pods=list(begun.spec.pods))
    if how == "deleted":
        scene.gone(objects.request())
    else:
        asked(scene, retracted=True)
    ends = [item for item in scene.decisions() if isinstance(item, End)]
    assert [end.phase for end in ends] == [Phase.RETRACTED]


@pytest.mark.parametrize(("mode", "phase"), [("Enforce", "Retracted"), ("Drill", "Committed"), ("Drill", "Retracted")])
def test_a_request_that_comes_here_after_its_preemption_has_ended_begins_no_other(mode: str, phase: str) -> None:
    scene = Scene()
    scene.recorded(mode=mode, phase=phase, cancelable=True, ended_at=NOW + 1, requests=["leave"])
    scene.clock.move(2)
    scene.seen(kinds.REQUESTS, objects.request(created_at=NOW - 1, mode=mode))
    assert not any(isinstance(decision, StartPreemption) for decision in scene.decisions())


def test_a_request_that_is_taken_back_at_once_starts_nothing() -> None:
    scene = Scene()
    asked(scene, retracted=True)
    assert answered(scene)[0] == "Retracted"


@pytest.mark.parametrize("seconds", [200, 400], ids=["earlier", "later"])
def test_a_request_whose_deadline_is_edited_moves_it(seconds: int) -> None:
    scene = Scene()
    asked(scene, deadlineSeconds=300)
    pods = list(scene.start().spec.pods)
    scene.recorded(cancelable=True, deadline_at=NOW + 300, requests=["leave"], pods=pods)
    asked(scene, deadlineSeconds=seconds)
    moves = [item for item in scene.decisions() if isinstance(item, Move)]
    assert [move.spec.deadline.timestamp() for move in moves] == [NOW + seconds]


def test_a_deadline_is_not_put_off_once_the_gang_has_frozen() -> None:
    scene = Scene()
    asked(scene, deadlineSeconds=300)
    pods = list(scene.start().spec.pods)
    scene.recorded(cancelable=True, phase="Frozen", deadline_at=NOW + 300, requests=["leave"], pods=pods)
    asked(scene, deadlineSeconds=400)
    assert not any(isinstance(item, Move) and item.spec.deadline.timestamp() > NOW + 300 for item in scene.decisions())


@pytest.mark.parametrize("retracted", [False, True], ids=["it stands", "it is taken back"])
def test_a_preemption_that_names_a_superseded_request_goes_before(retracted: bool) -> None:
    """A replica that did not see the pods yet superseded it. The other one had told the gang."""
    scene = Scene()
    asked(scene)
    pods = list(scene.start().spec.pods)
    scene.recorded(cancelable=True, deadline_at=NOW + 300, requests=["leave"], pods=pods)
    superseded = objects.request(retracted=retracted)
    superseded["status"] = {"phase": "Superseded", "message": "no pod of the JobSet runs"}
    scene.seen(kinds.REQUESTS, superseded)
    decisions = scene.decisions()
    assert [item.status.phase for item in decisions if isinstance(item, Answer)] == [RequestPhase.ADOPTED]
    ended = [item.phase for item in decisions if isinstance(item, End)]
    assert ended == ([Phase.RETRACTED] if retracted else [])


def test_a_request_that_no_preemption_names_stays_superseded() -> None:
    scene = Scene()
    superseded = objects.request()
    superseded["status"] = {"phase": "Superseded", "message": "no pod of the JobSet runs", "observedGeneration": 1}
    scene.seen(kinds.REQUESTS, superseded)
    assert scene.decisions() == []


def _finished_pod(scene: Scene) -> None:
    scene.seen(kinds.PODS, objects.pod(0, phase="Failed"))


def _restarted(scene: Scene) -> None:
    scene.clock.move(5)
    scene.restart()


def _leaving(scene: Scene) -> None:
    scene.recorded(phase="Committed", ended_at=NOW - 1, created_at=NOW - 9)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(lambda scene: scene.gone(objects.policy()), "CheckpointPolicy", id="no policy"),
        pytest.param(lambda scene: scene.seen(JOBSETS, objects.jobset(finished="Completed")), "no pod", id="finished"),
        pytest.param(_finished_pod, "has ended", id="a pod has ended"),
        pytest.param(_restarted, "started after", id="the job started anew"),
        pytest.param(_leaving, "came first", id="the gang is leaving"),
    ],
)
def test_a_request_of_which_nothing_comes_is_superseded_and_says_why(change: object, why: str) -> None:
    scene = Scene()
    asked(scene)
    change(scene)  # type: ignore[operator]
    answers = [item for item in scene.decisions() if isinstance(item, Answer)]
    assert not any(isinstance(item, StartPreemption) for item in scene.decisions())
    assert [item.status.phase for item in answers] == [RequestPhase.SUPERSEDED]
    assert why in (answers[0].status.message or "")


def test_a_request_for_another_life_of_the_jobset_is_superseded() -> None:
    scene = Scene()
    body = objects.request()
    body["spec"]["jobSet"]["uid"] = "another"
    scene.seen(kinds.REQUESTS, body)
    assert "expected" in answered(scene)[1]


def test_a_superseded_request_never_acts_later() -> None:
    scene = Scene()
    body = objects.request() | {"status": {"phase": "Superseded", "message": "told by the test"}}
    scene.seen(kinds.REQUESTS, body)
    assert scene.decisions() == []


# Drills.


def test_a_drill_is_reported_as_one() -> None:
    scene = Scene()
    asked(scene, mode="Drill")
    assert scene.start().spec.mode is Mode.DRILL


def test_a_drill_gives_way_to_a_preemption_in_progress() -> None:
    scene = Scene()
    scene.taint()
    scene.recorded()
    scene.clock.move(1)
    asked(scene, mode="Drill")
    phase, message = answered(scene)
    assert (phase, "in progress" in message) == ("Superseded", True)


def test_a_drill_begins_although_there_is_a_request_that_is_none() -> None:
    scene = Scene()
    over = objects.request("over") | {"status": {"phase": "Superseded", "message": "told by the test"}}
    scene.seen(kinds.REQUESTS, over)
    asked(scene, mode="Drill")
    start = scene.start()
    assert start.spec.mode is Mode.DRILL
    assert [reference.name for reference in start.spec.requests] == ["leave"]


def drilling(phase: str = "Noticed") -> Scene:
    """A drill that is under way."""
    scene = Scene()
    asked(scene, mode="Drill")
    pods = list(scene.start().spec.pods)
    scene.recorded(mode="Drill", phase=phase, cancelable=True, deadline_at=NOW + 300, requests=["leave"], pods=pods)
    scene.clock.move(1)
    return scene


def test_a_drill_in_progress_is_left_alone_where_nothing_comes() -> None:
    assert [item for item in drilling().decisions() if not isinstance(item, Answer)] == []


def test_drill_with_a_replaced_pod_ends_when_a_new_one_is_requested() -> None:
    scene = drilling()
    scene.gone(objects.pod(1))
    another = objects.pod(1, created_at=scene.clock())
    another["metadata"] |= {"name": "train-workers-0-1-0abc", "uid": "uid-of-another"}
    scene.seen(kinds.PODS, another)
    assert [item for item in scene.decisions() if not isinstance(item, Answer)] == []
    scene.clock.move(5)
    asked(scene, name="again", mode="Drill")
    (end,) = (item for item in scene.decisions() if not isinstance(item, Answer))
    assert isinstance(end, End)
    assert (end.phase, end.reason) == (Phase.EXPIRED, EndReason.PODS_REPLACED)


@pytest.mark.parametrize("phase", ["Noticed", "Frozen", "Agreed"])
def test_a_disruption_during_a_drill_has_its_own_preemption(phase: str) -> None:
    scene = Scene()
    asked(scene, mode="Drill")
    pods = list(scene.start().spec.pods)
    scene.recorded(mode="Drill", phase=phase, cancelable=True, deadline_at=NOW + 300, requests=["leave"], pods=pods)
    scene.clock.move(1)
    scene.taint()
    decisions = scene.decisions()
    (start,) = (item for item in decisions if isinstance(item, StartPreemption))
    assert (start.spec.epoch, start.spec.mode, start.spec.cause) == (2, Mode.ENFORCE, "SpotTermination")
    ended = [item.phase for item in decisions if isinstance(item, End)]
    assert ended == ([Phase.RETRACTED] if phase == "Noticed" else [])


@pytest.mark.parametrize("held_back", [False, True], ids=["it is still looked at", "it has to wait"])
def test_what_may_become_a_disruption_ends_no_drill_and_lets_none_begin(held_back: bool) -> None:
    def come(scene: Scene) -> list[Decision]:
        scene.clock.move(1)
        if held_back:
            scene.taint(key="node.kubernetes.io/not-ready", effect="NoExecute")
        else:
            scene.seen(kinds.PODS, objects.pod(0, deleting_at=NOW + 30))
        return decide(scene.cache.gang(objects.JOBSET_UID), scene.clock(), lambda spec: held_back)

    scene = Scene()
    asked(scene, mode="Drill")
    expected = Wait if held_back else Check
    assert [type(item) for item in come(scene)] == [expected]
    scene = Scene()
    asked(scene, mode="Drill")
    pods = list(scene.start().spec.pods)
    scene.recorded(mode="Drill", cancelable=True, deadline_at=NOW + 300, requests=["leave"], pods=pods)
    assert [type(item) for item in come(scene) if not isinstance(item, Answer)] == [expected]


def test_request_joins_a_preemption_whose_policy_was_deleted() -> None:
    scene = Scene()
    scene.recorded()
    scene.gone(objects.policy())
    scene.clock.move(1)
    asked(scene)
    assert [item.name for item in scene.move().spec.requests] == ["leave"]


def test_gang_trains_on_after_a_drill_and_the_request_starts_no_second() -> None:
    scene = Scene()
    asked(scene, mode="Drill")
    scene.clock.move(20)
    scene.recorded(mode="Drill", phase="Committed", ended_at=NOW + 15, requests=["leave"])
    assert answered(scene)[0] == "Committed"
    scene.taint()
    assert any(isinstance(item, StartPreemption) and item.spec.epoch == 2 for item in scene.decisions())


def test_under_a_policy_of_mode_observe_nothing_is_rehearsed() -> None:
    scene = Scene(mode="Observe")
    asked(scene, mode="Drill")
    assert "Observe" in answered(scene)[1]


def test_drill_mode_rehearses_every_signal_until_a_pod_is_ended() -> None:
    scene = Scene(mode="Drill")
    scene.taint()
    assert scene.start().spec.mode is Mode.DRILL
    scene = Scene(mode="Drill")
    scene.seen(kinds.PODS, objects.pod(0, disruption="EvictionByEvictionAPI", deleting_at=NOW + 30))
    assert scene.start().spec.mode is Mode.ENFORCE


def test_a_drill_of_the_policy_gives_way_when_a_pod_is_ended() -> None:
    scene = Scene(mode="Drill")
    scene.taint()
    drill = objects.preemption(mode="Drill")
    drill["spec"]["policy"]["spec"]["mode"] = "Drill"
    scene.seen(kinds.PREEMPTIONS, drill)
    scene.seen(kinds.PODS, objects.pod(0, disruption="EvictionByEvictionAPI", deleting_at=NOW + 30))
    end, start = scene.decisions()
    assert isinstance(end, End)
    assert isinstance(start, StartPreemption)
    assert (end.phase, start.spec.mode, start.spec.epoch) == (Phase.RETRACTED, Mode.ENFORCE, 2)


# The exit breaker.


def left(scene: Scene, times: int, *, every_s: float = 60.0) -> None:
    for number in range(1, times + 1):
        at = NOW - 1000 + number * every_s
        scene.recorded(epoch=number, phase="Committed", created_at=at - 5, ended_at=at, pods=[])


def started(scene: Scene) -> StartPreemption:
    (start,) = (item for item in scene.decisions() if isinstance(item, StartPreemption))
    return start


@pytest.mark.parametrize(("times", "exits"), [(1, True), (2, False)])
def test_a_gang_that_has_left_too_often_saves_and_trains_on(times: int, exits: bool) -> None:
    scene = Scene(exitBreaker={"savedExits": 2, "withinSeconds": 1800})
    left(scene, times)
    scene.taint()
    assert started(scene).spec.exits is exits


def test_exits_that_are_long_ago_do_not_count() -> None:
    scene = Scene(exitBreaker={"savedExits": 2, "withinSeconds": 60})
    left(scene, 3)
    scene.taint()
    assert started(scene).spec.exits


def test_gang_over_the_exit_limit_leaves_when_its_pods_are_ended() -> None:
    scene = Scene(exitBreaker={"savedExits": 2, "withinSeconds": 1800})
    left(scene, 2)
    scene.seen(kinds.PODS, objects.pod(0, disruption="EvictionByEvictionAPI", deleting_at=NOW + 30))
    assert started(scene).spec.exits


def test_a_gang_that_stayed_is_notified_again_of_newer_signals_only() -> None:
    scene = Scene()
    scene.taint("node-1")
    scene.clock.move(20)
    scene.recorded(phase="Committed", exits=False, ended_at=NOW + 9)
    assert scene.decisions() == []
    scene.taint("node-2")
    assert scene.start().spec.epoch == 2


# Ordinary life.


def test_a_pod_that_a_job_was_scaled_down_by_is_no_disruption() -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, objects.job(completions=1))
    scene.seen(kinds.PODS, objects.pod(1, deleting_at=NOW + 30))
    assert scene.decisions() == []


# What is no request.


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"deadlineSeconds": 5, "deadline": objects.stamp(NOW)}, id="two deadlines"),
        pytest.param({"deadlineSeconds": 5, "nodes": ["node-1"]}, id="a field of records"),
        pytest.param({"deadlineSeconds": 5, "mode": "Observe"}, id="a mode of records"),
    ],
)
def test_a_request_that_says_what_none_can_is_refused(spec: Body) -> None:
    with pytest.raises(Unreadable):
        RequestRecord.of(objects.request(**spec))
