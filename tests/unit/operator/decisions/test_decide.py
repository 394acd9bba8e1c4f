"""What is decided from which state of the cluster, on a clock that stands still."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gracepoint.wire import names
from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator.decisions.decide import EXPIRE_AFTER_S, Check, End, StartPreemption
from gracepoint_operator.decisions.effective_signals import SIGNALS_COME_S
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.model.preemption_record import EndReason
from gracepoint_operator.workloads import JOBSETS, WorkloadIdentity
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW
from tests.unit.operator.fakes.scene import Scene


def test_a_quiet_gang_is_left_alone() -> None:
    assert Scene().decisions() == []


def test_a_taint_starts_a_preemption_for_the_whole_gang() -> None:
    scene = Scene()
    scene.taint()
    start = scene.start()
    assert start.name == f"train-{JOBSET_UID[:8]}-1"
    assert start.expected == 2
    assert start.spec.cause == "SpotTermination"
    assert start.spec.signal == f"taint {objects.GKE_TAINT}:NoSchedule"
    assert start.spec.nodes == ["node-1"]
    assert start.spec.pods == ["train-workers-0-0-0xyz"]
    assert start.spec.observed_at.timestamp() == NOW
    assert start.spec.deadline.timestamp() == NOW + 15
    assert (start.spec.confidence, start.spec.cancelable) == (Confidence.SURE, False)
    assert start.spec.mode is Mode.ENFORCE


def test_the_same_state_gives_the_same_decision_again() -> None:
    scene = Scene()
    scene.taint()
    first = scene.start()
    scene.clock.move(3)
    assert scene.start() == first


def test_of_several_signals_the_earliest_deadline_wins_and_all_nodes_are_named() -> None:
    scene = Scene()
    scene.taint("node-1", "ToBeDeletedByClusterAutoscaler")
    scene.clock.move(1)
    scene.taint("node-2", objects.GKE_TAINT)
    spec = scene.start().spec
    assert spec.cause == "SpotTermination"
    assert spec.nodes == ["node-1", "node-2"]
    assert spec.deadline.timestamp() == NOW + 16
    assert spec.observed_at.timestamp() == NOW


def test_the_autoscalers_taint_that_is_taken_back_retracts_its_preemption() -> None:
    scene = Scene()
    scene.taint("node-1", "ToBeDeletedByClusterAutoscaler")
    begun = scene.start().spec
    scene.recorded(cancelable=begun.cancelable, deadline_at=NOW + 30, pods=list(begun.pods))
    scene.clock.move(2)
    scene.seen(kinds.NODES, objects.node("node-1"))
    ending = scene.end()
    assert (ending.phase, ending.reason) == (Phase.RETRACTED, EndReason.SIGNAL_WENT_AWAY)


@pytest.mark.parametrize(
    "key", ["aws-node-termination-handler/rebalance-recommendation", "node.kubernetes.io/unschedulable"]
)
def test_a_hint_alone_notifies_nobody(key: str) -> None:
    scene = Scene()
    scene.taint(key=key)
    assert scene.decisions() == []


def test_a_kind_of_signal_that_the_policy_leaves_out_does_not_count() -> None:
    scene = Scene(signals=["DisruptionTarget"])
    scene.taint()
    assert scene.decisions() == []
    scene.seen(kinds.PODS, objects.pod(disruption="EvictionByEvictionAPI"))
    assert scene.start().spec.cause == "Drain"


def test_a_pod_without_the_policys_label_is_no_member() -> None:
    scene = Scene()
    scene.seen(kinds.PODS, objects.pod(0, labelled=False))
    scene.taint("node-1")
    assert scene.decisions() == []


def test_without_its_policy_nothing_is_decided() -> None:
    scene = Scene()
    scene.gone(objects.policy())
    scene.taint()
    assert scene.decisions() == []


def test_in_mode_observe_the_preemption_is_recorded_as_such() -> None:
    scene = Scene(mode="Observe")
    scene.taint()
    assert scene.start().spec.mode is Mode.OBSERVE


# Ordinary life is not a disruption.


@pytest.mark.parametrize(
    ("jobset", "job"),
    [
        pytest.param(objects.jobset(restarts=1), objects.job(), id="the JobSet restarted, pods are old"),
        pytest.param(objects.jobset(finished="Completed"), objects.job(), id="the JobSet succeeded"),
        pytest.param(objects.jobset(finished="Failed"), objects.job(), id="the JobSet failed"),
        pytest.param(objects.jobset(deleted=True), objects.job(), id="the JobSet is being deleted"),
        pytest.param(objects.jobset(), objects.job(deleted=True), id="the Job is being deleted"),
        pytest.param(objects.jobset(), objects.job(condition="Complete"), id="the Job succeeded"),
        pytest.param(objects.jobset(), objects.job(condition="Failed"), id="the Job failed"),
        pytest.param(objects.jobset(), objects.job(condition="FailureTarget"), id="the Job is about to fail"),
        pytest.param(objects.jobset(), objects.job(condition="SuccessCriteriaMet"), id="... or to succeed"),
    ],
)
@pytest.mark.parametrize("disruption", ["", "EvictionByEvictionAPI"], ids=["deleted", "evicted"])
def test_pods_that_end_in_ordinary_life_start_no_preemption(
    jobset: objects.Body, job: objects.Body, disruption: str
) -> None:
    scene = Scene()
    scene.seen(JOBSETS, jobset)
    scene.seen(kinds.JOBS, job)
    for index in (0, 1):
        scene.seen(kinds.PODS, objects.pod(index, deleting_at=NOW + 30, disruption=disruption))
    assert scene.decisions() == []


@pytest.mark.parametrize(
    ("jobset", "job"),
    [
        pytest.param(objects.jobset(suspended=True), objects.job(), id="the JobSet"),
        pytest.param(objects.jobset(), objects.job(suspended=True), id="its Job"),
    ],
)
def test_suspending_a_job_is_a_disruption_with_its_own_cause(jobset: objects.Body, job: objects.Body) -> None:
    scene = Scene()
    scene.seen(JOBSETS, jobset)
    scene.seen(kinds.JOBS, job)
    assert scene.start().spec.cause == "Suspension"
    for index in (0, 1):
        scene.seen(kinds.PODS, objects.pod(index, deleting_at=NOW + 30))
    assert scene.start().spec.cause == "Suspension"


def test_the_deletion_of_jobset_and_job_starts_no_preemption_whatever_is_left() -> None:
    scene = Scene()
    scene.gone(objects.jobset())
    scene.seen(kinds.PODS, objects.pod(deleting_at=NOW + 30))
    assert scene.decisions() == []
    scene = Scene()
    scene.gone(objects.job())
    scene.seen(kinds.PODS, objects.pod(deleting_at=NOW + 30))
    assert scene.decisions() == []


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_later_ends_of_pods_are_clean_up(phase: str) -> None:
    scene = Scene()
    scene.seen(kinds.PODS, objects.pod(0, phase=phase))
    scene.seen(kinds.PODS, objects.pod(1, deleting_at=NOW + 30))
    assert scene.decisions() == []


def test_a_deleted_pod_is_believed_only_after_a_fresh_look() -> None:
    scene = Scene()
    deleted = objects.pod(0, deleting_at=NOW + 30)
    scene.seen(kinds.PODS, deleted)
    check = scene.check()
    assert (check.workload.name, check.jobs, check.pod_uids) == ("train", ("train-workers-0",), ("uid-pod-0-0",))
    scene.cache.mark_checked(check.pod_uids)
    spec = scene.start().spec
    assert (spec.cause, spec.deadline.timestamp()) == ("PodDeletion", NOW + 30)


def test_a_fresh_look_that_shows_a_restart_ends_the_suspicion() -> None:
    scene = Scene()
    scene.seen(kinds.PODS, objects.pod(0, deleting_at=NOW + 30))
    check = scene.check()
    scene.listed(JOBSETS, objects.jobset(restarts=1))
    scene.cache.mark_checked(check.pod_uids)
    assert scene.decisions() == []


def test_an_eviction_needs_no_fresh_look() -> None:
    scene = Scene()
    scene.seen(kinds.PODS, objects.pod(0, disruption="EvictionByEvictionAPI", deleting_at=NOW + 30))
    assert scene.start().spec.cause == "Drain"


# Signals that are older than the pod.


def test_old_node_signal_does_not_disrupt_the_restarted_job() -> None:
    scene = Scene()
    scene.taint("node-1")
    scene.recorded(phase="Committed", created_at=NOW, ended_at=NOW + 3)
    scene.clock.move(20)  # its deadline is over by then
    scene.restart(on="node-1")
    assert not any(isinstance(decision, StartPreemption | Check | End) for decision in scene.decisions())


def test_api_times_show_which_signal_was_first_after_an_operator_restart() -> None:
    taints = [objects.taint()]
    scene = Scene()
    scene.listed(kinds.NODES, objects.node("node-1", taints=taints, written_at=NOW - 200))
    assert scene.decisions() == []  # pods were bound 99 s ago
    scene = Scene()
    scene.listed(kinds.NODES, objects.node("node-1", taints=taints, written_at=NOW - 5))
    assert scene.start().spec.deadline.timestamp() == NOW + 10


def test_taint_with_a_new_time_counts_though_an_older_one_existed() -> None:
    scene = Scene()
    old = objects.taint("example.com/evacuate", "NoExecute", added_at=NOW - 200)
    scene.listed(kinds.NODES, objects.node("node-1", taints=[old]))
    assert scene.decisions() == []
    new = objects.taint("example.com/evacuate", "NoExecute", added_at=NOW)
    scene.seen(kinds.NODES, objects.node("node-1", taints=[new]))
    assert scene.start().spec.cause == "NodeTaint"


def test_signal_on_a_node_without_gang_pods_is_ignored() -> None:
    scene = Scene()
    scene.taint("node-9")
    assert scene.decisions() == []


# Preemptions under way.


def test_during_a_preemption_the_same_signal_decides_nothing() -> None:
    scene = Scene()
    scene.taint()
    scene.recorded(deadline_at=NOW + 15)
    assert scene.decisions() == []


def test_an_earlier_deadline_joins_the_preemption_and_moves_it() -> None:
    scene = Scene()
    scene.recorded(deadline_at=NOW + 300, pods=["train-workers-0-1-0xyz"])
    scene.taint("node-1")
    move = scene.move()
    assert move.spec.deadline.timestamp() == NOW + 15
    assert move.spec.pods == ["train-workers-0-0-0xyz", "train-workers-0-1-0xyz"]
    assert move.spec.epoch == 1


def test_nodes_drained_in_turn_are_one_preemption_with_one_deadline() -> None:
    scene = Scene()
    scene.taint("node-1")
    scene.recorded(deadline_at=NOW + 15)
    scene.clock.move(5)
    scene.taint("node-2")
    spec = scene.move().spec
    assert (spec.nodes, spec.deadline.timestamp()) == (["node-1", "node-2"], NOW + 15)
    assert spec.pods == ["train-workers-0-0-0xyz", "train-workers-0-1-0xyz"]


def test_a_deadline_that_differs_by_less_than_replicas_do_moves_nothing() -> None:
    scene = Scene()
    scene.taint("node-1")
    scene.recorded(deadline_at=NOW + 15.9)
    assert scene.decisions() == []


def test_a_preemption_is_retracted_when_its_signal_went_away() -> None:
    scene = Scene()
    scene.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
    assert scene.start().spec.cancelable
    scene.recorded(cancelable=True, deadline_at=NOW + 300)
    assert scene.decisions() == []
    scene.seen(kinds.NODES, objects.node("node-1"))
    end = scene.end()
    assert end.phase is Phase.RETRACTED
    assert "went away" in end.message


def test_a_signal_that_another_replica_saw_first_is_waited_for() -> None:
    scene = Scene()
    scene.seen(kinds.PREEMPTIONS, objects.preemption(cancelable=True, deadline_at=NOW + 300))
    assert scene.decisions() == []
    scene.clock.move(1)
    scene.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
    assert scene.decisions() == [], "it is the signal of that preemption"
    scene.clock.move(SIGNALS_COME_S)
    scene.seen(kinds.NODES, objects.node("node-1"))
    assert scene.end().reason is EndReason.SIGNAL_WENT_AWAY


def test_a_preemption_of_another_replica_whose_signal_never_comes_is_retracted() -> None:
    scene = Scene()
    scene.seen(kinds.PREEMPTIONS, objects.preemption(cancelable=True, deadline_at=NOW + 300))
    scene.clock.move(SIGNALS_COME_S)
    assert scene.decisions() == []
    scene.clock.move(0.1)
    assert scene.end().reason is EndReason.SIGNAL_WENT_AWAY


def test_a_signal_by_which_another_replica_moved_the_preemption_is_waited_for() -> None:
    scene = Scene()
    scene.recorded(cancelable=True, deadline_at=NOW + 300)
    scene.seen(kinds.PREEMPTIONS, objects.preemption(cancelable=True, deadline_at=NOW + 200, moves=1))
    assert scene.decisions() == []
    scene.clock.move(SIGNALS_COME_S + 0.1)
    assert scene.end().reason is EndReason.SIGNAL_WENT_AWAY


@pytest.mark.parametrize("phase", ["Frozen", "Agreed", "Written", "Durable"])
def test_a_preemption_that_has_frozen_is_not_retracted(phase: str) -> None:
    scene = Scene()
    scene.recorded(cancelable=True, phase=phase)
    assert scene.decisions() == []


def test_irrevocable_signal_is_not_retracted_when_it_vanishes() -> None:
    scene = Scene()
    scene.recorded(cancelable=False)
    assert scene.decisions() == []


@pytest.mark.parametrize("what", ["node", "pod", "deleted pod", "ended pod"])
def test_a_signal_that_vanishes_with_the_pod_or_node_is_no_reprieve(what: str) -> None:
    scene = Scene()
    scene.recorded(cancelable=True)
    if what == "node":
        scene.gone(objects.node("node-1"))
    elif what == "pod":
        scene.gone(objects.pod(0))
    elif what == "deleted pod":
        scene.seen(kinds.PODS, objects.pod(0, deleting_at=NOW + 300))
    else:
        scene.seen(kinds.PODS, objects.pod(0, phase="Failed"))
    assert not any(isinstance(decision, End) for decision in scene.decisions())


@pytest.mark.parametrize(
    ("jobset", "reason"),
    [
        pytest.param(objects.jobset(deleted=True), EndReason.WORKLOAD_DELETED, id="deleted"),
        pytest.param(objects.jobset(finished="Completed"), EndReason.WORKLOAD_FINISHED, id="finished"),
    ],
)
def test_a_preemption_is_retracted_when_the_jobset_ends_before_the_freeze(
    jobset: objects.Body, reason: EndReason
) -> None:
    scene = Scene()
    scene.recorded()
    scene.seen(JOBSETS, jobset)
    end = scene.end()
    assert (end.phase, end.reason) == (Phase.RETRACTED, reason)


def test_missing_jobset_is_looked_up_before_it_counts_as_deleted() -> None:
    scene = Scene()
    scene.recorded()
    scene.gone(objects.jobset())
    assert scene.check().workload == WorkloadIdentity("JobSet", objects.NAMESPACE, "train", JOBSET_UID)
    scene.cache.preemptions.mark_gone(JOBSET_UID)
    end = scene.end()
    assert (end.phase, end.reason) == (Phase.RETRACTED, EndReason.WORKLOAD_DELETED)


def test_frozen_preemption_is_left_to_the_gang_whatever_its_jobset_does() -> None:
    scene = Scene()
    scene.recorded(phase="Frozen")
    scene.gone(objects.jobset())
    assert scene.decisions() == []


# In mid-flight the policy is what it was when the preemption began.


def unlabelled(scene: Scene) -> None:
    """As a watch by the label and then a fresh look show it."""
    body = objects.jobset()
    body["metadata"]["resourceVersion"] = "7"
    scene.cache.drop(JOBSET_UID, 7)
    del body["metadata"]["labels"][names.LABEL_POLICY]
    scene.cache.put(JOBSETS, body, listed=True, fresh=True)


def edited(scene: Scene) -> None:
    scene.seen(kinds.POLICIES, objects.policy(signals=[], mode="Observe"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(unlabelled, id="the JobSet lost its label"),
        pytest.param(lambda scene: scene.gone(objects.policy()), id="the policy was deleted"),
        pytest.param(edited, id="the policy was edited"),
    ],
)
def test_what_becomes_of_the_policy_changes_nothing_in_mid_flight(change: Callable[[Scene], None]) -> None:
    scene = Scene()
    scene.recorded(deadline_at=NOW + 300)
    change(scene)
    assert scene.decisions() == []
    scene.taint()
    assert scene.move().spec.deadline.timestamp() == NOW + 15, "a nearer signal joins as ever"
    scene.clock.move(300 + EXPIRE_AFTER_S + 1)
    scene.seen(kinds.NODES, objects.node("node-1"))
    assert scene.end().phase is Phase.EXPIRED


@pytest.mark.parametrize("change", [unlabelled, edited])
def test_what_became_of_the_policy_counts_for_the_next_disruption(change: Callable[[Scene], None]) -> None:
    scene = Scene()
    change(scene)
    scene.taint()
    assert scene.decisions() == []


def test_preemption_without_an_outcome_expires_after_its_deadline() -> None:
    scene = Scene()
    scene.recorded(phase="Agreed", deadline_at=NOW + 15)
    scene.clock.move(15 + EXPIRE_AFTER_S)
    assert scene.decisions() == []
    scene.clock.move(0.5)
    assert scene.end().phase is Phase.EXPIRED


def test_an_observed_preemption_expires_and_says_that_nobody_was_notified() -> None:
    scene = Scene()
    scene.recorded(mode="Observe")
    scene.clock.move(100)
    end = scene.end()
    assert (end.phase, "nobody was notified" in end.message) == (Phase.EXPIRED, True)


# After a preemption.


@pytest.mark.parametrize("phase", ["Committed", "Promoted", "Failed"])
def test_a_gang_that_is_leaving_is_not_notified_again(phase: str) -> None:
    scene = Scene()
    scene.recorded(phase=phase, ended_at=NOW + 2)
    scene.clock.move(3)
    scene.taint("node-2")
    scene.seen(kinds.PODS, objects.pod(0, disruption="EvictionByEvictionAPI", deleting_at=NOW + 33))
    assert scene.decisions() == []


@pytest.mark.parametrize("phase", ["Retracted", "Expired"])
def test_only_a_newer_signal_starts_a_preemption_while_the_gang_trains_on(
    phase: str,
) -> None:
    scene = Scene()
    scene.taint("node-1")
    scene.clock.move(50)
    scene.recorded(phase=phase, created_at=NOW, ended_at=NOW + 46)
    assert scene.decisions() == []
    scene.taint("node-2")
    start = scene.start()
    assert start.name.endswith("-2")
    assert start.spec.nodes == ["node-2"]


def test_the_next_life_of_the_job_can_be_disrupted_again() -> None:
    scene = Scene()
    scene.recorded(phase="Committed", ended_at=NOW + 2)
    scene.clock.move(10)
    scene.restart(on="node-2")
    scene.clock.move(1)
    scene.taint("node-2")
    (start,) = (item for item in scene.decisions() if isinstance(item, StartPreemption))
    assert start.spec.epoch == 2


def test_pods_replaced_within_an_attempt_are_another_life() -> None:
    scene = Scene()
    scene.taint("node-1")
    scene.recorded(phase="Committed", ended_at=NOW + 2)
    scene.clock.move(20)
    for index in (0, 1):
        scene.gone(objects.pod(index))
        replaced = objects.pod(index, on="node-1", created_at=scene.clock())
        replaced["metadata"]["uid"] += "-again"
        scene.seen(kinds.PODS, replaced)
    assert not any(
        isinstance(item, StartPreemption | End) for item in scene.decisions()
    )  # the taint was there before them
    scene.clock.move(1)
    scene.taint("node-1", "aws-node-termination-handler/spot-itn")
    (start,) = (item for item in scene.decisions() if isinstance(item, StartPreemption))
    assert start.spec.epoch == 2


def test_pod_replacing_a_failed_one_belongs_to_the_gang() -> None:
    scene = Scene()
    scene.seen(kinds.PODS, objects.pod(0, phase="Failed"))  # which stays there
    scene.clock.move(5)
    replaced = objects.pod(0, created_at=scene.clock())
    replaced["metadata"]["uid"] += "-again"
    replaced["metadata"]["name"] += "-again"
    scene.seen(kinds.PODS, replaced)
    scene.clock.move(5)
    scene.taint("node-1")
    start = scene.start()
    assert (start.spec.epoch, start.spec.pods, start.expected) == (1, [replaced["metadata"]["name"]], 2)


def test_pods_of_a_recreated_job_are_not_disrupted() -> None:
    scene = Scene()
    scene.gone(objects.job())
    again = objects.job()
    again["metadata"]["uid"] += "-again"
    scene.seen(kinds.JOBS, again)
    scene.seen(kinds.PODS, objects.pod(deleting_at=NOW + 30))
    assert scene.decisions() == []


def test_a_new_life_in_danger_ends_a_preemption_that_nobody_ended() -> None:
    scene = Scene()
    scene.recorded(phase="Agreed")
    scene.clock.move(10)
    scene.restart(on="node-2")
    scene.clock.move(1)
    scene.taint("node-2")
    end, start = (item for item in scene.decisions() if isinstance(item, StartPreemption | End))
    assert isinstance(end, End)
    assert end.phase is Phase.EXPIRED
    assert isinstance(start, StartPreemption)
    assert start.spec.epoch == 2


def test_a_preemption_of_another_jobset_of_the_same_name_does_not_count() -> None:
    scene = Scene()
    scene.recorded(phase="Committed", ended_at=NOW)
    other = "11111111-51f4-4f0c-9a57-3c1de3f6a002"
    scene.gone(objects.jobset())
    scene.seen(JOBSETS, objects.jobset(uid=other))
    assert scene.cache.gang(other).preemptions == ()


def test_the_cluster_shows_when_pods_left_and_when_they_are_back() -> None:
    scene = Scene()
    scene.recorded(phase="Committed", ended_at=NOW + 2)
    assert scene.reached() == []
    scene.clock.move(5)
    scene.seen(kinds.PODS, objects.pod(0, phase="Failed"))
    assert scene.reached() == []
    scene.seen(kinds.PODS, objects.pod(1, phase="Failed"))
    assert scene.reached() == ["exited"]
    scene.clock.move(2)
    scene.restart()
    assert scene.reached() == ["exited", "podsBack"]


def test_a_pod_whose_attempt_is_no_number_is_of_no_attempt() -> None:
    scene = Scene()
    odd = objects.pod(5, on="node-1")
    odd["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] = "first"
    scene.seen(kinds.PODS, odd)
    scene.taint()
    assert scene.start().expected == 2


def test_large_gang_is_decided_within_the_notice_time() -> None:
    scene = Scene()
    scene.listed(kinds.JOBS, objects.job(completions=600))
    for index in range(2, 600):
        scene.listed(kinds.NODES, objects.node(f"node-{index + 1}"))
        scene.listed(kinds.PODS, objects.pod(index))
    scene.taint("node-599")
    begun_at = time.process_time()
    start = scene.start()
    elapsed_s = time.process_time() - begun_at
    assert start.expected == 600
    assert elapsed_s < 0.1  # it takes 5 ms, and 500 where every pod is compared with every other


def test_joining_signals_name_no_more_pods_than_the_record_can_hold() -> None:
    scene = Scene()
    names = [f"p-{i:05}" for i in range(4096)]
    scene.recorded(deadline_at=NOW + 300, pods=names)
    scene.taint("node-1")
    assert len(scene.move().spec.pods) == 4096
