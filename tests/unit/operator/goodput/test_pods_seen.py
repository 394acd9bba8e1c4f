"""What the operator sees of a gang's lives in its pods."""

from __future__ import annotations

import dataclasses

import pytest

from gracepoint_operator.goodput.accounts import GoodputLedger
from gracepoint_operator.goodput.life import Category, Life, PodsObservation
from gracepoint_operator.goodput.pods_seen import LastLook, look
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW, Body
from tests.unit.operator.fakes.scene import Scene

NOW_MS = round(NOW * 1000)
CREATED_MS = NOW_MS - 100_000


def started(body: Body, at: float = NOW - 90, *, ended: float | None = None) -> Body:
    state: Body = {"running": {"startedAt": objects.stamp(at)}}
    if ended is not None:
        state = {"terminated": {"startedAt": objects.stamp(at), "finishedAt": objects.stamp(ended)}}
        body["status"]["phase"] = "Failed"
    body["status"]["containerStatuses"] = [{"state": state}]
    return body


def running(body: Body) -> Body:
    body["status"]["phase"] = "Running"
    return body


def life(attempt: int = 0, created_ms: int = CREATED_MS) -> Life:
    return Life(began_ms=0, attempt=attempt, created_ms=created_ms, bound_ms=created_ms, started_ms=created_ms + 10_000)


def seen(scene: Scene, known_life: Life | None = None, known: LastLook | None = None) -> tuple[PodsObservation, ...]:
    return look(scene.cache.gang(JOBSET_UID), known_life, known, round(scene.clock() * 1000)).observations


def known_pods(attempt: int = 0) -> LastLook:
    return LastLook(attempt, CREATED_MS, frozenset({f"uid-pod-{index}-{attempt}" for index in range(2)}))


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    for index in range(2):
        made.seen(kinds.PODS, started(objects.pod(index)))
    return made


def test_running_pods_are_created_bound_and_started(scene: Scene) -> None:
    (found,) = seen(scene)
    assert found.bound is not None
    assert found.started is not None
    assert [moment.stamp_ms - NOW_MS for moment in (found.created, found.bound, found.started)] == [
        -100_000,
        -99_000,
        -90_000,
    ]
    assert (found.broke_ms, found.gone_ms) == (None, None)


@pytest.mark.parametrize(
    ("seen_after_s", "guess_ms"),
    [
        pytest.param(0.2, 200, id="at once"),
        pytest.param(1.1, 999, id="after the second"),
        pytest.param(30, 500, id="late"),
        pytest.param(-0.5, 0, id="by a clock that is behind"),
    ],
)
def test_a_second_of_the_api_server_is_when_it_is_seen(scene: Scene, seen_after_s: float, guess_ms: int) -> None:
    for index in range(2):
        scene.seen(kinds.PODS, objects.pod(index, created_at=NOW))
    scene.clock.move(seen_after_s)
    (found,) = seen(scene)
    assert found.created.at_ms == NOW_MS + guess_ms


@pytest.mark.parametrize(
    ("seen_after_s", "guess_ms"),
    [
        pytest.param(0.2, 60, id="at once"),
        pytest.param(1.0, 460, id="at the end of the second"),
        pytest.param(1.18, 549, id="after the second"),
        pytest.param(1.98, 949, id="at its next look"),
        pytest.param(30, 500, id="late"),
        pytest.param(-0.5, 0, id="by a clock that is behind"),
    ],
)
def test_a_second_of_the_kubelet_is_guessed_half_way(scene: Scene, seen_after_s: float, guess_ms: int) -> None:
    scene.seen(kinds.PODS, started(objects.pod(0), NOW))
    scene.clock.move(seen_after_s)
    (found,) = seen(scene)
    assert found.started is not None
    assert found.started.at_ms == NOW_MS + guess_ms


def test_an_end_counts_from_when_the_containers_were_first_seen_to_end(scene: Scene) -> None:
    """The kubelet writes the phase of the pod another second later."""
    scene.clock.move(1.0)
    scene.seen(kinds.PODS, started(objects.pod(0), ended=NOW))
    scene.seen(kinds.PODS, running(started(objects.pod(1), ended=NOW)))
    first = look(scene.cache.gang(JOBSET_UID), life(), known_pods(), NOW_MS + 500)
    assert [seen.gone_ms for seen in first.observations] == [None]
    scene.seen(kinds.PODS, started(objects.pod(1), ended=NOW))
    (found,) = look(scene.cache.gang(JOBSET_UID), life(), first.last_look, NOW_MS + 1900).observations
    assert (found.broke_ms, found.gone_ms) == (NOW_MS + 210, NOW_MS + 210)


def test_a_process_on_a_deleted_node_has_ended(scene: Scene) -> None:
    """Its pod stays until the control plane cleans up, and the other process hangs for a while."""
    first = look(scene.cache.gang(JOBSET_UID), life(), known_pods(), NOW_MS)
    scene.gone(objects.node("node-1"))
    after = look(scene.cache.gang(JOBSET_UID), life(), first.last_look, NOW_MS + 100)
    (found,) = after.observations
    assert (found.broke_ms, found.gone_ms) == (NOW_MS + 100, None)
    scene.seen(kinds.PODS, started(objects.pod(1), ended=NOW + 20))
    (found,) = look(scene.cache.gang(JOBSET_UID), life(), after.last_look, NOW_MS + 25_000).observations
    assert found.gone_ms == NOW_MS + 20_500


def test_a_node_that_a_replica_has_never_seen_is_not_lost(scene: Scene) -> None:
    scene.gone(objects.node("node-1"))
    (found,) = look(scene.cache.gang(JOBSET_UID), life(), known_pods(), NOW_MS).observations
    assert (found.broke_ms, found.gone_ms) == (None, None)


def test_a_node_that_stays_unseen_was_lost_before_the_replica_began(scene: Scene) -> None:
    scene.gone(objects.node("node-1"))
    first = look(scene.cache.gang(JOBSET_UID), life(), known_pods(), NOW_MS)
    assert first.again_ms is not None
    assert NOW_MS < first.again_ms < NOW_MS + 60_000
    second = look(scene.cache.gang(JOBSET_UID), life(), first.last_look, first.again_ms)
    (found,) = second.observations
    assert (found.broke_ms, found.gone_ms, second.again_ms) == (NOW_MS, None, None)


def test_nodes_are_not_lost_if_the_replica_sees_none(scene: Scene) -> None:
    for index in range(2):
        scene.gone(objects.node(f"node-{index + 1}"))
    first = look(scene.cache.gang(JOBSET_UID), life(), known_pods(), NOW_MS)
    (found,) = look(scene.cache.gang(JOBSET_UID), life(), first.last_look, NOW_MS + 60_000).observations
    assert (found.broke_ms, found.gone_ms) == (None, None)


def test_a_life_is_broken_when_one_process_ends_and_gone_with_all(scene: Scene) -> None:
    scene.clock.move(20)
    scene.seen(kinds.PODS, started(objects.pod(0), ended=NOW + 1))
    (found,) = seen(scene, life())
    assert (found.broke_ms, found.gone_ms) == (NOW_MS + 1500, None)
    scene.seen(kinds.PODS, started(objects.pod(1), ended=NOW + 4))
    (found,) = seen(scene, life())
    assert (found.broke_ms, found.gone_ms) == (NOW_MS + 1500, NOW_MS + 4500)


def test_a_pod_that_vanishes_has_ended(scene: Scene) -> None:
    scene.gone(objects.pod(0))
    (found,) = seen(scene, life(), known_pods())
    assert (found.broke_ms, found.gone_ms) == (NOW_MS, None)
    scene.gone(objects.pod(1))
    (found,) = seen(scene, life(), known_pods())
    assert (found.broke_ms, found.gone_ms) == (NOW_MS, NOW_MS)


def remade(index: int, created_at: float) -> Body:
    """A pod that the Job has made in the place of one that failed."""
    body = objects.pod(index, created_at=created_at, phase="Pending", on="")
    body["metadata"] |= {"name": f"again-{index}", "uid": f"uid-again-{index}"}
    return body


@pytest.mark.parametrize(
    ("failed", "lives"),
    [pytest.param([0, 1], 2, id="all pods"), pytest.param([0], 1, id="one, which is made anew beside the other")],
)
def test_a_life_nobody_saw_end_is_no_part_of_the_next(scene: Scene, failed: list[int], lives: int) -> None:
    """No replica ran while the pods of a Job failed before they had started, and others were made."""
    for index in failed:
        scene.seen(kinds.PODS, started(objects.pod(index), ended=NOW - 20))
        scene.seen(kinds.PODS, remade(index, NOW - 10))
    waiting = dataclasses.replace(life(), bound_ms=None, started_ms=None)
    ledger = GoodputLedger(since_ms=0, lives=(waiting,))
    for observation in seen(scene, waiting):
        ledger = ledger.with_pods(observation)
    assert ledger.disruptions + 1 == lives
    assert ledger.current is not None
    assert ledger.current.created_ms == (NOW_MS - 9_500 if lives == 2 else CREATED_MS)
    assert ledger.current.began_ms == (NOW_MS - 19_500 if lives == 2 else 0)


def again(index: int, created_at: float, started_at: float | None = None) -> Body:
    """As ``remade``, with a node at once."""
    body = objects.pod(index, created_at=created_at, phase="Pending")
    body["metadata"] |= {"name": f"again-{index}", "uid": f"uid-again-{index}"}
    return body if started_at is None else running(started(body, started_at))


def refused(index: int, created_at: float, at: float) -> Body:
    """A pod that its kubelet refused."""
    body = objects.pod(index, created_at=created_at, phase="Failed")
    body["status"]["reason"] = "NodeAffinity"
    fields: Body = {"f:status": {"f:phase": {}, "f:reason": {}}}
    body["metadata"]["managedFields"] = [{"manager": "kubelet", "time": objects.stamp(at), "fieldsV1": fields}]
    return body


class Account:
    """The account that one replica keeps of what it sees in a scene.

    Args:
        scene: The scene.
        ledger: What was known before.
        known: The pods of the life that is known.
    """

    def __init__(self, scene: Scene, ledger: GoodputLedger, known: LastLook | None = None) -> None:
        self.scene, self.ledger, self._known = scene, ledger, known

    def see(self, at_s: float, *bodies: Body, gone: Body | None = None) -> None:
        """Looks ``at_s`` seconds after ``NOW``, when these pods have changed and one is gone."""
        self.scene.clock.at = NOW + at_s
        for body in bodies:
            self.scene.seen(kinds.PODS, body)
        if gone is not None:
            self.scene.gone(gone)
        gang, before = self.scene.cache.gang(JOBSET_UID), self.ledger.trained_before
        found = look(gang, self.ledger.current, self._known, round(self.scene.clock() * 1000), before=before)
        self._known = found.last_look
        for observation in found.observations:
            self.ledger = self.ledger.with_pods(observation)

    @property
    def current(self) -> Life:
        assert self.ledger.current is not None
        return self.ledger.current


def of_own_job(body: Body, index: int) -> Body:
    body["metadata"]["labels"] |= {
        "batch.kubernetes.io/job-name": f"train-workers-{index}",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    return body


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_life_whose_processes_come_one_by_one_starts_with_the_last_of_them(jobs: int) -> None:
    """Process 0 died with its machine, and its Job made it again; process 1 took two minutes to leave."""

    def of_job(body: Body, index: int) -> Body:
        return body if jobs == 1 else of_own_job(body, index)

    trained = dataclasses.replace(life(), joined_ms=CREATED_MS + 12_000, trained_ms=CREATED_MS + 13_000)
    account = Account(Scene(), GoodputLedger(since_ms=0, lives=(trained,)), known_pods())
    if jobs == 2:
        for index in range(2):
            job = objects.job(completions=1)
            job["metadata"] |= {"name": f"train-workers-{index}", "uid": f"uid-job-{index}"}
            account.scene.seen(kinds.JOBS, job)
    for index in range(2):
        account.scene.seen(kinds.PODS, of_job(running(started(objects.pod(index))), index))
    account.see(10, gone=objects.pod(0))
    account.see(40, of_job(again(0, NOW + 40), 0))
    account.see(42, of_job(again(0, NOW + 40, NOW + 41), 0))
    assert account.ledger.state() is Category.SCHEDULING
    account.see(160, gone=objects.pod(1))
    account.see(170, of_job(again(1, NOW + 170), 1))
    account.see(172, of_job(again(1, NOW + 170, NOW + 171), 1))
    before, current = account.ledger.lives
    assert (before.broke_ms, before.gone_ms) == (NOW_MS + 10_000, NOW_MS + 40_000)
    assert (current.began_ms, current.created_ms, current.bound_pods) == (NOW_MS + 40_000, NOW_MS + 40_000, 2)
    assert current.started_ms is not None
    assert NOW_MS + 171_000 <= current.started_ms < NOW_MS + 172_000
    assert (current.broke_ms, current.gone_ms, account.ledger.disruptions) == (None, None, 1)
    account.see(272, gone=again(0, NOW + 40))
    assert account.current.broke_ms == NOW_MS + 272_000


def test_containers_that_are_started_again_in_their_pod_are_no_part_of_the_life_before() -> None:
    trained = dataclasses.replace(life(), joined_ms=CREATED_MS + 12_000, trained_ms=CREATED_MS + 13_000)
    account = Account(Scene(), GoodputLedger(since_ms=0, lives=(trained,)), known_pods())
    account.scene.seen(kinds.PODS, running(started(objects.pod(0))))
    account.see(10, gone=objects.pod(1))
    account.see(15, running(started(objects.pod(0), NOW + 13)))
    account.see(40, again(1, NOW + 40))
    account.see(42, again(1, NOW + 40, NOW + 41))
    assert account.current.created_ms == NOW_MS + 40_000
    assert account.current.started_ms is not None
    account.see(100, gone=objects.pod(0))
    assert account.current.broke_ms == NOW_MS + 100_000


def test_a_process_that_waits_for_one_that_was_refused_and_made_again_starts_with_it() -> None:
    """It does not leave: nothing has trained yet."""
    account = Account(Scene(), GoodputLedger(since_ms=NOW_MS - 1000))
    account.see(0, objects.pod(0, created_at=NOW, phase="Pending"), objects.pod(1, created_at=NOW, phase="Pending"))
    account.see(2, running(started(objects.pod(0, created_at=NOW), NOW + 1)))
    account.see(2.5, refused(1, NOW, NOW + 2))
    assert account.current.started_ms is None
    account.see(8, again(1, NOW + 8))
    account.see(10, again(1, NOW + 8, NOW + 9))
    account.see(11)
    current = account.current
    assert current.started_ms is not None
    assert (current.created_ms // 1000, current.bound_pods) == (NOW_MS // 1000, 2)
    assert (current.broke_ms, current.gone_ms, account.ledger.disruptions) == (None, None, 0)


def test_processes_that_wait_stay_when_another_is_made_again_before_they_have_trained(scene: Scene) -> None:
    account = Account(scene, GoodputLedger(since_ms=0, lives=(life(),)), known_pods())
    account.scene.seen(kinds.PODS, running(started(objects.pod(0))))
    account.see(1, refused(1, NOW - 100, NOW))
    account.see(11, again(1, NOW + 11))
    account.see(13, again(1, NOW + 11, NOW + 12))
    assert account.current.started_ms is not None
    account.see(60, gone=objects.pod(0))
    assert account.current.broke_ms == NOW_MS + 60_000


@pytest.mark.parametrize("ends", [0, 1])
def test_a_pod_that_was_made_again_before_its_life_started_is_no_later_life(ends: int) -> None:
    """It was refused at the start, and its Job keeps the refused one. Much later a process ends."""
    begun = dataclasses.replace(life(created_ms=NOW_MS), started_ms=NOW_MS + 12_000, joined_ms=NOW_MS + 20_000)
    ledger = GoodputLedger(since_ms=NOW_MS, lives=(dataclasses.replace(begun, trained_ms=NOW_MS + 30_000),))
    account = Account(Scene(), ledger)
    account.scene.seen(kinds.PODS, again(1, NOW + 8, NOW + 12))
    account.see(3600, running(started(objects.pod(0, created_at=NOW), NOW + 1)), refused(1, NOW, NOW + 2))
    assert (account.current.broke_ms, len(account.ledger.lives)) == (None, 1)
    account.see(7200, gone=objects.pod(0) if ends == 0 else again(1, NOW + 8))
    assert (account.current.broke_ms, len(account.ledger.lives)) == (NOW_MS + 7_200_000, 1)


def test_a_pod_that_is_refused_in_the_second_in_which_all_were_made_ends_no_life() -> None:
    account = Account(Scene(), GoodputLedger(since_ms=NOW_MS))
    account.see(0.2, objects.pod(0, created_at=NOW, phase="Pending"), objects.pod(1, created_at=NOW, phase="Pending"))
    account.see(0.9, refused(1, NOW, NOW))
    assert (account.current.gone_ms, account.ledger.disruptions) == (None, 0)


def test_a_process_that_has_left_late_with_its_pod_kept_ends_no_later_life(scene: Scene) -> None:
    """The Job keeps the pod of the life before, which ended within the present one."""
    scene.seen(kinds.PODS, started(objects.pod(1), ended=NOW + 30))
    scene.seen(kinds.PODS, again(0, NOW, NOW + 2))
    scene.seen(kinds.PODS, again(1, NOW + 32, NOW + 33))
    scene.gone(objects.pod(0))
    scene.clock.move(40)
    current = dataclasses.replace(life(created_ms=NOW_MS), started_ms=NOW_MS + 33_500)
    (found,) = seen(scene, current)
    assert (found.broke_ms, found.gone_ms, found.pods) == (None, None, 2)


def test_pods_that_are_seen_in_another_order_than_they_were_created_are_one_life(scene: Scene) -> None:
    """Two that were made at once may have the seconds before and after a tick."""
    for index, second in enumerate((NOW, NOW - 1)):
        scene.seen(kinds.PODS, running(started(objects.pod(index, created_at=second), NOW + 5)))
    scene.clock.move(10)
    (found,) = seen(scene, dataclasses.replace(life(created_ms=NOW_MS), bound_ms=None, started_ms=None))
    assert found.pods == 2
    assert found.started is not None


def test_pods_of_the_next_attempt_are_a_new_life(scene: Scene) -> None:
    scene.seen(JOBSETS, objects.jobset(restarts=1))
    scene.seen(kinds.PODS, objects.pod(0, attempt=1, created_at=NOW, phase="Pending", on=""))
    old, new = seen(scene, life(), known_pods())
    assert (old.attempt, old.gone_ms) == (0, None)
    assert (new.attempt, new.created.stamp_ms, new.bound) == (1, NOW_MS, None)


def test_an_account_ahead_of_the_pods_ends_no_life(scene: Scene) -> None:
    ahead = life(attempt=1, created_ms=NOW_MS)
    gang = scene.cache.gang(JOBSET_UID)
    first = look(gang, ahead, known_pods(), NOW_MS)
    assert first.observations == ()
    assert first.again_ms == NOW_MS + 10_000
    assert look(gang, ahead, first.last_look, NOW_MS + 9000).observations == ()
    (found,) = look(gang, ahead, first.last_look, NOW_MS + 10_000).observations
    assert (found.attempt, found.gone_ms) == (1, NOW_MS)


def test_a_missed_end_is_seen_when_the_next_life_begins() -> None:
    scene = Scene()
    for index in range(2):
        scene.gone(objects.pod(index))
    first = look(scene.cache.gang(JOBSET_UID), life(), None, NOW_MS)
    scene.seen(kinds.PODS, objects.pod(0, attempt=1, created_at=NOW + 5, phase="Pending", on=""))
    old, new = look(scene.cache.gang(JOBSET_UID), life(), first.last_look, NOW_MS + 5100).observations
    assert (old.gone_ms, new.created.at_ms) == (NOW_MS, NOW_MS + 5100)


def test_a_replica_that_begins_after_the_end_sees_it_at_last() -> None:
    scene = Scene()
    for index in range(2):
        scene.gone(objects.pod(index))
    first = look(scene.cache.gang(JOBSET_UID), life(), None, NOW_MS)
    (found,) = look(scene.cache.gang(JOBSET_UID), life(), first.last_look, NOW_MS + 15_000).observations
    assert GoodputLedger(since_ms=0, lives=(life(),)).with_pods(found).lives[0].gone_ms == NOW_MS
