"""What is remembered of objects, and what late news cannot undo."""

from __future__ import annotations

import dataclasses

import pytest

from gracepoint.wire.messages import Phase
from gracepoint_operator.decisions import preemption_status
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW, Body
from tests.unit.operator.fakes.scene import Scene


def versioned(body: objects.Body, version: int) -> objects.Body:
    body["metadata"]["resourceVersion"] = str(version)
    return body


@pytest.mark.parametrize("uid", [f"uid-{number}" for number in range(8)])
def test_a_job_whose_deletion_was_missed_is_not_the_gangs(uid: str) -> None:
    """A watch had a gap in which the JobSet restarted. The next list shows that the Job before is gone."""
    scene = Scene()
    before, after = versioned(objects.job(), 10), versioned(objects.job(), 20)
    before["metadata"]["uid"], after["metadata"]["uid"] = f"before-{uid}", f"after-{uid}"
    scene.gone(objects.job())
    for body in (after, before):
        scene.listed(kinds.JOBS, body)
    assert scene.cache.gang(JOBSET_UID).jobs["train-workers-0"].uid == f"after-{uid}"


def test_an_older_version_of_an_object_does_not_undo_a_newer_one() -> None:
    scene = Scene()
    scene.listed(JOBSETS, versioned(objects.jobset(restarts=1), 20))
    scene.seen(JOBSETS, versioned(objects.jobset(restarts=0), 19))
    assert scene.cache.objects.workloads[JOBSET_UID].restarts == 1


def test_late_news_of_a_deleted_object_do_not_bring_it_back() -> None:
    scene = Scene()
    scene.gone(objects.pod(0))
    scene.listed(kinds.PODS, objects.pod(0))
    assert "uid-pod-0-0" not in scene.cache.objects.pods


def test_recreated_node_survives_late_deletion_of_the_old_one() -> None:
    scene = Scene()
    new = objects.node("node-1")
    new["metadata"]["uid"] = "uid-new"
    scene.seen(kinds.NODES, new)
    scene.gone(objects.node("node-1"))
    assert scene.cache.objects.nodes["node-1"].uid == "uid-new"


def test_news_of_a_node_concern_the_jobsets_with_pods_on_it() -> None:
    scene = Scene()
    tainted = objects.node("node-1", taints=[objects.taint(objects.GKE_TAINT, "NoSchedule")])
    assert scene.cache.put(kinds.NODES, tainted, listed=False) == {JOBSET_UID}
    assert (
        scene.cache.put(kinds.NODES, tainted | {"metadata": {**tainted["metadata"], "name": "node-9"}}, listed=False)
        == set()
    )
    scene.gone(objects.pod(0))
    assert scene.cache.put(kinds.NODES, objects.node("node-1"), listed=False) == set()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(kinds.NODES, objects.node("node-1"), id="a kubelet's report"),
        pytest.param(kinds.PODS, objects.pod(0), id="a pod's image was pulled"),
        pytest.param(kinds.JOBS, objects.job(), id="a Job's count of pods"),
        pytest.param(JOBSETS, objects.jobset(), id="a JobSet's count of Jobs"),
        pytest.param(kinds.POLICIES, objects.policy(), id="a policy's status"),
    ],
)
def test_new_version_concerns_nobody_where_nothing_that_counts_has_changed(kind: kinds.Kind, body: Body) -> None:
    scene = Scene()
    later = body | {"metadata": {**body["metadata"], "resourceVersion": "999"}}
    assert scene.cache.put(kind, later, listed=False) == set()
    assert scene.cache.versions.of(body["metadata"]["uid"]) == 999


def test_the_first_sight_of_a_mark_stays_while_it_is_there() -> None:
    scene = Scene()
    scene.taint()
    scene.clock.move(5)
    scene.taint()
    assert set(scene.cache.gang(JOBSET_UID).since.values()) == {NOW}
    scene.seen(kinds.NODES, objects.node("node-1"))
    scene.clock.move(5)
    scene.taint()
    assert set(scene.cache.gang(JOBSET_UID).since.values()) == {NOW + 10}


def test_a_preemption_of_another_schema_is_left_out_with_the_fields_name() -> None:
    scene = Scene()
    body = objects.preemption()
    del body["spec"]["deadline"]
    assert scene.cache.put(kinds.PREEMPTIONS, body, listed=True) == set()
    assert "deadline" in str(scene.cache.unreadable_objects.why(body["metadata"]["uid"]))
    assert scene.cache.preemptions.records == {}


def test_an_old_record_from_the_api_does_not_undo_what_is_known() -> None:
    scene = Scene()
    scene.recorded(phase="Agreed", deadline_at=NOW + 10)
    preemption = scene.recorded(phase="Noticed", deadline_at=NOW + 15)
    assert preemption.phase is Phase.AGREED
    assert preemption.spec.deadline.timestamp() == NOW + 10


def test_of_two_ends_the_one_in_the_api_counts() -> None:
    scene = Scene()
    scene.recorded(phase="Failed", ended_at=NOW + 1)
    assert scene.recorded(phase="Expired", ended_at=NOW + 2).phase is Phase.EXPIRED


@pytest.mark.parametrize("phases", [("Committed", "Expired"), ("Expired", "Committed")])
def test_a_commit_corrects_what_expired_whichever_is_known_first(phases: tuple[str, str]) -> None:
    scene = Scene()
    for ended_at, phase in enumerate(phases, start=1):
        preemption = scene.recorded(phase=phase, ended_at=NOW + ended_at)
    assert preemption.phase is Phase.COMMITTED
    assert preemption.ended_at == NOW + 1 + phases.index("Committed")


def test_a_jobset_that_lost_its_label_and_got_it_again_is_back() -> None:
    scene = Scene()
    scene.cache.drop(JOBSET_UID, 30)  # to a watch by label it looks deleted
    scene.seen(JOBSETS, versioned(objects.jobset(), 29))
    assert JOBSET_UID not in scene.cache.objects.workloads
    scene.seen(JOBSETS, versioned(objects.jobset(), 31))
    assert JOBSET_UID in scene.cache.objects.workloads


def test_recreated_policy_survives_late_deletion_of_the_old_one() -> None:
    scene = Scene()
    new = objects.policy(mode="Observe")
    new["metadata"]["uid"] = "uid-new"
    scene.seen(kinds.POLICIES, new)
    scene.gone(objects.policy())
    found = scene.cache.policies.get((objects.NAMESPACE, "careful"))
    assert found is not None
    assert found.uid == "uid-new"


def test_a_request_made_again_for_another_jobset_is_not_for_the_first() -> None:
    """Both in a watch's gap: the list brings the new request first, and then shows that the old one is gone."""
    scene = Scene()
    old, new = objects.request(), objects.request(jobset="other")
    new["metadata"]["uid"] = "uid-new"
    scene.listed(kinds.REQUESTS, old)
    assert scene.start().spec.signal == "request leave"
    scene.listed(kinds.REQUESTS, new)
    assert scene.cache.drop("uid-leave") == {JOBSET_UID}, "a notice is taken back"
    assert scene.decisions() == []
    scene.gone(new)
    assert scene.cache.gang(JOBSET_UID).requests == ()


def test_a_record_made_again_for_another_jobset_is_not_of_the_first() -> None:
    scene = Scene()
    old, new = objects.preemption(), objects.preemption()
    new["metadata"]["uid"] = "uid-new"
    new["spec"]["jobSet"] = {"name": "train", "uid": f"{JOBSET_UID[:8]}-another"}  # the name has only this part of it
    for body in (old, new):
        scene.listed(kinds.PREEMPTIONS, body)
    scene.gone(old)
    assert scene.cache.gang(JOBSET_UID).preemptions == ()
    scene.gone(new)
    assert scene.cache.gang(JOBSET_UID).preemptions == ()


@pytest.mark.parametrize("kind", ["pod", "job", "preemption"])
def test_object_labelled_with_a_jobset_of_another_namespace_is_ignored(kind: str) -> None:
    scene = Scene()
    if kind == "pod":
        body = objects.pod(7, phase="Failed")
        place = kinds.PODS
    elif kind == "job":
        body, place = objects.job(attempt=7, deleted=True), kinds.JOBS
    else:
        body, place = objects.preemption(7), kinds.PREEMPTIONS
    body["metadata"]["namespace"] = "team-b"
    scene.seen(place, body)
    gang = scene.cache.gang(JOBSET_UID)
    assert len(gang.pods) == 2
    assert not gang.jobs["train-workers-0"].deleted
    assert gang.preemptions == ()
    scene.taint()
    assert scene.start().spec.epoch == 1


def test_a_gang_of_which_nothing_has_changed_is_not_computed_again() -> None:
    scene = Scene()
    gang = scene.cache.gang(JOBSET_UID)
    assert scene.cache.gang(JOBSET_UID) is gang
    scene.seen(kinds.PODS, objects.pod(0))
    assert scene.cache.gang(JOBSET_UID) is gang


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (kinds.PODS, objects.pod(0, phase="Failed")),
        (kinds.NODES, objects.node("node-1", taints=[objects.taint(objects.GKE_TAINT, "NoSchedule")])),
        (kinds.JOBS, objects.job(condition="Complete")),
        (JOBSETS, objects.jobset(restarts=1)),
        (kinds.POLICIES, objects.policy(mode="Observe")),
        (kinds.PREEMPTIONS, objects.preemption()),
    ],
    ids=["pod", "node", "Job", "JobSet", "policy", "Preemption"],
)
def test_whatever_changes_of_a_gang_is_in_the_next_snapshot(kind: kinds.Kind, body: Body) -> None:
    scene = Scene()
    gang = scene.cache.gang(JOBSET_UID)
    scene.seen(kind, body)
    assert scene.cache.gang(JOBSET_UID) != gang


def test_leaving_nodes_are_known_until_they_stay_or_are_gone() -> None:
    scene = Scene()
    scene.taint("node-1")
    scene.taint("node-2")
    scene.taint("node-3", "node.kubernetes.io/unschedulable")  # a hint only
    assert scene.cache.objects.disrupted_nodes == {"node-1", "node-2"}
    scene.seen(kinds.NODES, objects.node("node-1"))
    scene.gone(objects.node("node-2"))
    assert scene.cache.objects.disrupted_nodes == set()


def test_jobsets_are_disrupted_while_their_preemption_runs() -> None:
    scene = Scene()
    for phase, disrupted in (("Noticed", {JOBSET_UID}), ("Committed", set())):
        scene.recorded(phase=phase)
        assert scene.cache.preemptions.disrupted_workload_uids() == disrupted
    scene.recorded(epoch=2)
    scene.gone(objects.preemption(2))
    assert scene.cache.preemptions.disrupted_workload_uids() == set()


def test_an_older_record_is_kept_whole_until_the_api_server_has_it() -> None:
    scene = Scene()
    for number in (1, 2):
        scene.recorded(epoch=number, phase="Expired")
    store = scene.cache.preemptions
    older, newer = store.of_workload(JOBSET_UID)
    assert older.status.message is None
    told = older.status.model_copy(update={"message": "it is saved", "phase": Phase.COMMITTED})
    changed = dataclasses.replace(older, status=preemption_status.with_stage(told, "restored", NOW, NOW + 3))
    store.put(changed)
    store.put(newer)
    assert store.records[older.key].status.message == "it is saved"
    store.join(changed)
    store.join(newer)
    assert store.records[older.key].status.message is None


def test_latest_preemptions_are_of_known_jobsets_young_or_not_made_yet() -> None:
    scene = Scene()
    scene.recorded(epoch=1, created_at=NOW - 60)
    scene.recorded(epoch=2, created_at=NOW - 59)
    elsewhere = objects.preemption(3)
    elsewhere["metadata"]["namespace"] = "team-b"
    scene.seen(kinds.PREEMPTIONS, elsewhere)
    assert [preemption.spec.epoch for preemption in scene.cache.latest_preemptions(60)] == [2]
    begun = dataclasses.replace(scene.cache.latest_preemptions(60)[0], name="begun", created_at=None)
    scene.cache.preemptions.put(begun)
    scene.clock.move(60)
    assert scene.cache.latest_preemptions(60) == [begun]
    scene.cache.preemptions.put(dataclasses.replace(begun, created_at=NOW + 60))
    assert len(scene.cache.latest_preemptions(60)) == 1
