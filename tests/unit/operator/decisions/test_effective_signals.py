"""What is decided on signs that are not on the pod itself: since when they count, how far ahead, and when they end."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from gracepoint.wire.messages import Confidence, Phase
from gracepoint_operator.decisions.decide import End, Move, StartPreemption
from gracepoint_operator.decisions.effective_signals import SIGNALS_COME_S, Timed, cause, root_causes
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.model import evictions
from gracepoint_operator.model.preemption_record import PreemptionRecord, preemption_name
from gracepoint_operator.resources import PolicyInForce, PreemptionSpec, PreemptionStatus, SignalKind
from gracepoint_operator.signals import BUILT_IN, REPORTED_BY_GANG, Cause, On, Row
from gracepoint_operator.workloads import JOBSETS, read_pod
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import NOW, Body, stamp
from tests.unit.operator.fakes.scene import Scene

LABEL = "cloud.google.com/scheduled-maintenance-time"
TERMINATION, DISRUPTED = "karpenter.sh/nodeclaim-termination-timestamp", "karpenter.sh/disrupted"


def maintenance(at: float) -> Body:
    return objects.node(labels={LABEL: f"{at:.0f}"})


def claim(node: str = "node-1", *, at: float | None = None, deleted: bool = False) -> Body:
    annotations = {} if at is None else {TERMINATION: stamp(at)}
    return objects.node_claim(node, annotations=annotations, expire_after="Never", deleted_at=NOW if deleted else None)


def evicted() -> Body:
    return objects.workload(conditions=[objects.condition("Evicted", reason="Preempted")])


def limited(seconds: float, *, began_at: float = NOW - 100) -> Body:
    return objects.job() | {"spec": {"activeDeadlineSeconds": seconds}, "status": {"startTime": stamp(began_at)}}


# Of the node.


def test_maintenance_announced_before_the_pod_counts_when_moved() -> None:
    scene = Scene()
    scene.clock.move(-200)  # the pods of the scene are bound at NOW - 99
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.clock.move(200)
    assert scene.decisions() == []
    scene.seen(kinds.NODES, maintenance(NOW + 600))
    assert scene.start().spec.deadline.timestamp() == NOW + 600


def test_maintenance_announced_in_the_second_of_the_binding_counts() -> None:
    scene = Scene()
    scene.clock.move(-99)  # the pods of the scene are bound then
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.clock.move(99)
    assert scene.start().spec.deadline.timestamp() == NOW + 900


def back_on_the_node(scene: Scene, *, on: str = "node-1") -> None:
    """The gang has left for a maintenance in fifteen minutes, and starts again."""
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.recorded(phase="Committed", created_at=NOW, deadline_at=NOW + 900, ended_at=NOW + 3)
    scene.clock.move(60)
    scene.restart(on=on)


def started(scene: Scene) -> list[PreemptionSpec]:
    return [decision.spec for decision in scene.decisions() if isinstance(decision, StartPreemption)]


def test_gang_that_is_put_back_on_the_node_that_it_left_saves_there_and_stays() -> None:
    scene = Scene()
    back_on_the_node(scene)
    (spec,) = started(scene)
    assert (spec.exits, spec.nodes, spec.deadline.timestamp()) == (False, ["node-1"], NOW + 900)
    assert spec.signal.endswith(", on a node that the gang left before")


def test_gang_that_saved_there_is_not_notified_again_before_it_starts_again() -> None:
    scene = Scene()
    back_on_the_node(scene)
    body = objects.preemption(2, phase="Committed", created_at=NOW + 60, deadline_at=NOW + 900, ended_at=NOW + 70)
    body["spec"] |= {"exits": False, "restartAttempt": 1, "newestPodAt": stamp(NOW + 60)}
    scene.seen(kinds.PREEMPTIONS, body)
    scene.clock.move(30)
    assert started(scene) == []
    scene.restart(2, on="node-1")
    (spec,) = started(scene)
    assert (spec.epoch, spec.exits) == (3, False)


@pytest.mark.parametrize("on", [pytest.param("node-1", id="it is over"), pytest.param("node-2", id="another node")])
def test_gang_is_not_notified_of_the_signal_that_it_left_for(on: str) -> None:
    scene = Scene()
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.recorded(phase="Committed", created_at=NOW, deadline_at=NOW + 900, ended_at=NOW + 3)
    scene.clock.move(901 if on == "node-1" else 60)
    scene.restart(on=on)
    assert started(scene) == []


def test_gang_on_the_node_that_it_left_waits_until_all_of_it_runs() -> None:
    scene = Scene()
    back_on_the_node(scene)
    scene.seen(kinds.PODS, objects.pod(1, attempt=1, on="node-1", created_at=NOW + 60, phase="Pending"))
    assert started(scene) == []


def test_gang_on_the_node_that_it_left_leaves_with_what_is_new() -> None:
    scene = Scene()
    back_on_the_node(scene)
    (spec,) = started(scene)
    body = objects.preemption(2, created_at=NOW + 60, deadline_at=NOW + 900)
    body["spec"] |= {"exits": False, "signal": spec.signal, "restartAttempt": 1, "newestPodAt": stamp(NOW + 60)}
    scene.seen(kinds.PREEMPTIONS, body)
    taints = [objects.taint()]
    scene.seen(kinds.NODES, {**maintenance(NOW + 900), "spec": {"taints": taints}})
    end, start = (item for item in scene.decisions() if isinstance(item, End | StartPreemption))
    assert isinstance(end, End)
    assert (end.phase, end.preemption.spec.epoch) == (Phase.RETRACTED, 2)
    assert isinstance(start, StartPreemption)
    assert (start.spec.epoch, start.spec.exits) == (3, True)


def test_signal_over_an_hour_ahead_starts_a_preemption_an_hour_before() -> None:
    scene = Scene()
    scene.seen(kinds.NODES, maintenance(NOW + 7200))
    assert scene.decisions() == []
    scene.clock.move(3601)
    spec = scene.start().spec
    assert (spec.cause, spec.cancelable) == ("Maintenance", True)
    assert spec.deadline.timestamp() == NOW + 7200


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(maintenance(NOW + 86400), id="it was moved to tomorrow"),
        pytest.param(objects.node(), id="it was called off"),
    ],
)
def test_a_maintenance_that_is_not_to_be_soon_is_taken_back(after: Body) -> None:
    scene = Scene()
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.start()
    scene.recorded(deadline_at=NOW + 900, cancelable=True)
    scene.seen(kinds.NODES, after)
    end = scene.end()
    assert end.phase is Phase.RETRACTED


# Of the node's claim, which may come and go by itself.


def test_node_claim_termination_time_is_the_deadline_of_its_pods() -> None:
    scene = Scene()
    assert scene.cache.put(kinds.NODE_CLAIMS, claim(), listed=False) == {objects.JOBSET_UID}
    assert scene.decisions() == []
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 600))
    spec = scene.start().spec
    assert (spec.cause, spec.nodes, spec.deadline.timestamp()) == ("ScaleDown", ["node-1"], NOW + 600)
    scene.taint(key=DISRUPTED)
    assert scene.start().spec.deadline.timestamp() == NOW + 600


def test_karpenters_taint_makes_no_gang_leave_and_may_be_taken_back() -> None:
    scene = Scene()
    scene.taint(key=DISRUPTED)
    assert scene.decisions() == []
    scene.clock.move(3600)
    assert scene.decisions() == []
    scene.seen(kinds.NODES, objects.node())
    assert scene.decisions() == []


def test_a_deleted_node_claim_is_believed_at_once_though_its_pool_waits_for_hours() -> None:
    scene = Scene()
    scene.taint(key=DISRUPTED)
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 8 * 3600, deleted=True))
    spec = scene.start().spec
    assert (spec.cause, spec.nodes, spec.signal) == ("ScaleDown", ["node-1"], "deletion of the NodeClaim")
    assert (spec.confidence, spec.cancelable) == ("sure", False)
    assert spec.deadline.timestamp() == NOW + 120


def test_a_deleted_node_claim_makes_the_deadline_of_another_signal_nearer() -> None:
    scene = Scene()
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.cache.preemptions.put(begun_as(scene.start().spec))
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 8 * 3600, deleted=True))
    moved = scene.move().spec
    assert (moved.deadline.timestamp(), moved.cancelable) == (NOW + 120, False)


def test_the_repair_of_a_node_ends_its_pods_at_once() -> None:
    scene = Scene()
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW, deleted=True))
    assert scene.start().spec.deadline.timestamp() == NOW


def test_a_deleted_node_that_a_finalizer_holds_goes_away() -> None:
    scene = Scene()
    scene.seen(kinds.NODES, objects.node(deleted_at=NOW))
    spec = scene.start().spec
    assert (spec.cause, spec.deadline.timestamp(), spec.cancelable) == ("ScaleDown", NOW + 120, False)


@pytest.mark.parametrize("time_first", [True, False], ids=["the time is seen first", "the deletion is"])
def test_the_deletion_and_the_time_of_a_node_claim_agree_in_both_orders(time_first: bool) -> None:
    scene = Scene()
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 60) if time_first else claim(deleted=True))
    begun = scene.start().spec
    assert begun.deadline.timestamp() == NOW + (60 if time_first else 120)
    scene.cache.preemptions.put(begun_as(begun))
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 60, deleted=True))
    if not time_first:
        moved = scene.move()
        scene.cache.preemptions.put(dataclasses.replace(moved.preemption, spec=moved.spec))
    assert scene.decisions() == []
    (preemption,) = scene.cache.preemptions.records.values()
    assert (preemption.spec.deadline.timestamp(), preemption.spec.cancelable) == (NOW + 60, False)


def reclaimed(scene: Scene, order: Sequence[str]) -> None:
    """EC2 takes a Spot machine back. Karpenter deletes NodeClaim and Node, then evicts. Any may be known first."""
    for brought in order:
        scene.clock.move(1.5)
        match brought:
            case "claim":
                labels = {"karpenter.sh/capacity-type": "spot"}
                scene.seen(kinds.NODE_CLAIMS, objects.node_claim(deleted_at=NOW, labels=labels, expire_after="Never"))
            case "node":
                scene.seen(kinds.NODES, objects.node(deleted_at=NOW + 1, taints=[objects.taint(DISRUPTED)]))
            case "eviction":
                uid = objects.pod()["metadata"]["uid"]
                scene.cache.first_seen.see_attempt(uid, evictions.mark(uid))
        for decision in scene.decisions():
            match decision:
                case StartPreemption():
                    scene.cache.preemptions.put(begun_as(decision.spec))
                case Move():
                    scene.cache.preemptions.put(dataclasses.replace(decision.preemption, spec=decision.spec))


@pytest.mark.parametrize("order", list(itertools.permutations(("claim", "node", "eviction"))), ids="-".join)
def test_a_reclaimed_spot_node_has_one_cause_in_whatever_order_its_end_becomes_known(order: Sequence[str]) -> None:
    scene = Scene()
    reclaimed(scene, order)
    (preemption,) = scene.cache.preemptions.records.values()
    assert (preemption.spec.cause, preemption.spec.nodes) == ("SpotTermination", ["node-1"])
    assert scene.decisions() == []


def test_a_corrected_cause_comes_with_its_signal() -> None:
    scene = Scene()
    reclaimed(scene, ["node", "claim"])
    (preemption,) = scene.cache.preemptions.records.values()
    assert preemption.spec.signal == "deletion of the NodeClaim"
    assert preemption.spec.deadline.timestamp() == NOW + 121.5


@pytest.mark.parametrize("phase", [Phase.FROZEN, Phase.AGREED, Phase.COMMITTED])
def test_the_cause_of_a_gang_that_has_frozen_stays(phase: Phase) -> None:
    scene = Scene()
    reclaimed(scene, ["node"])
    (preemption,) = scene.cache.preemptions.records.values()
    scene.cache.preemptions.put(begun_as(preemption.spec, phase))
    reclaimed(scene, ["claim"])
    (preemption,) = scene.cache.preemptions.records.values()
    assert (preemption.spec.cause, preemption.spec.moves) == ("ScaleDown", 0)


def at(unix_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC)


def told_by_the_gang(scene: Scene, phase: Phase) -> None:
    """The gang reports a SIGTERM that it got at NOW, before anything is seen of why."""
    scene.seen(kinds.NODES, objects.node(conditions=[objects.shutdown()]))
    spec = scene.start().spec
    scene.seen(kinds.NODES, objects.node())
    about = {"cause": Cause.POD_DELETION, "signal": REPORTED_BY_GANG, "observed_at": at(NOW)}
    scene.cache.preemptions.put(begun_as(spec.model_copy(update=about), phase))


@pytest.mark.parametrize("phase", [Phase.NOTICED, Phase.FROZEN, Phase.AGREED])
def test_a_node_that_says_a_moment_later_that_it_shuts_down_is_why_the_gang_got_a_sigterm(phase: Phase) -> None:
    scene = Scene()
    told_by_the_gang(scene, phase)
    assert scene.decisions() == []
    scene.clock.move(1)
    scene.seen(kinds.NODES, objects.node(conditions=[objects.shutdown(NOW + 1)]))
    spec = scene.move().spec
    # Nobody is to be told of what the gang itself has reported.
    assert (spec.cause, spec.signal) == ("NodeShutdown", REPORTED_BY_GANG)
    assert spec.deadline <= at(NOW + 20)


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(objects.node(conditions=[objects.shutdown(NOW + 5)]), id="a shutdown that is later"),
        pytest.param(objects.node(conditions=[objects.shutdown(NOW - 50)]), id="one long before"),
        pytest.param(maintenance(NOW + 900), id="what may still be called off"),
    ],
)
def test_what_a_node_says_beside_it_is_not_why_the_gang_got_a_sigterm(node: Body) -> None:
    scene = Scene()
    told_by_the_gang(scene, Phase.NOTICED)
    scene.clock.move(6)
    scene.seen(kinds.NODES, node)
    assert {item.spec.cause for item in scene.decisions() if isinstance(item, Move)} <= {"PodDeletion"}


def test_a_node_claim_that_is_deleted_later_is_not_the_cause() -> None:
    scene = Scene()
    reclaimed(scene, ["eviction"])
    scene.clock.move(5)
    scene.seen(kinds.NODE_CLAIMS, objects.node_claim(deleted_at=NOW + 5))
    (preemption,) = scene.cache.preemptions.records.values()
    assert preemption.spec.cause == "Drain"
    assert scene.decisions() == []


def test_a_node_claim_that_becomes_known_late_is_not_the_cause_of_another_disruption() -> None:
    scene = Scene()
    scene.clock.move(1)
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.cache.preemptions.put(begun_as(scene.start().spec))
    scene.seen(kinds.NODE_CLAIMS, claim(deleted=True))
    moved = scene.move().spec
    assert (moved.cause, moved.signal) == ("Maintenance", "deletion of the NodeClaim")


def test_the_deletion_of_another_node_is_a_cause_of_its_own() -> None:
    scene = Scene()
    reclaimed(scene, ["node"])
    scene.seen(kinds.NODE_CLAIMS, objects.node_claim("node-2", deleted_at=NOW))
    assert scene.move().spec.signal == "deletion of the node"


def test_a_replica_that_does_not_know_the_node_claim_takes_no_cause_back() -> None:
    scene = Scene()
    reclaimed(scene, ["node"])
    (preemption,) = scene.cache.preemptions.records.values()
    corrected = preemption.spec.model_copy(update={"cause": "SpotTermination", "moves": 1})
    scene.cache.preemptions.put(dataclasses.replace(preemption, spec=corrected))
    assert scene.decisions() == []


@pytest.mark.parametrize(
    ("seconds", "at"),
    [pytest.param(3000, NOW + 2900, id="prolonged"), pytest.param(700, NOW + 600, id="shortened")],
)
def test_the_time_limit_of_a_job_may_be_changed_while_it_runs(seconds: float, at: float) -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, limited(1000))
    begun = scene.start().spec
    assert (begun.deadline.timestamp(), begun.cancelable) == (NOW + 900, True)
    scene.cache.preemptions.put(begun_as(begun))
    scene.seen(kinds.JOBS, limited(seconds))
    assert scene.move().spec.deadline.timestamp() == at


def test_a_time_limit_that_is_removed_is_taken_back() -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, limited(1000))
    scene.cache.preemptions.put(begun_as(scene.start().spec))
    scene.seen(kinds.JOBS, objects.job())
    assert scene.end().phase is Phase.RETRACTED


def test_a_preemption_of_a_pod_that_comes_to_nothing_is_taken_back() -> None:
    scene = Scene()
    scene.seen(kinds.PODS, objects.pod(disruption="PreemptionByScheduler", grace_s=600))
    begun = scene.start().spec
    assert begun.cancelable
    scene.cache.preemptions.put(begun_as(begun))
    scene.seen(kinds.PODS, objects.pod(grace_s=600))  # Kubernetes finds that nobody has deleted it
    assert scene.end().phase is Phase.RETRACTED


@pytest.mark.parametrize(
    ("key", "effect", "why"),
    [
        pytest.param(DISRUPTED, "NoSchedule", "ScaleDown", id="Karpenter"),
        pytest.param("aws-node-termination-handler/rebalance-recommendation", "NoSchedule", "Rebalance", id="EC2"),
        pytest.param("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule", "Drain", id="open to new pods"),
        pytest.param("example.com/other", "NoSchedule", "Drain", id="no sign"),
    ],
)
def test_an_eviction_has_the_cause_that_a_taint_of_its_node_has_announced(key: str, effect: str, why: str) -> None:
    scene = Scene()
    scene.taint(key=key, effect=effect)
    assert scene.decisions() == []
    uid = objects.pod()["metadata"]["uid"]
    scene.cache.first_seen.see_attempt(uid, evictions.mark(uid))
    assert scene.start().spec.cause == why


def telling() -> Scene:
    """With a row of a user that has the time of another one."""
    leaving = {
        "name": "leaving",
        "provider": "us",
        "match": {"taint": {"key": "example.com/leaving"}},
        "cause": "ScaleDown",
        "confidence": "sure",
        "cancelable": False,
        "deadline": {"row": "karpenter-termination-time"},
    }
    return Scene(rows=[Row.model_validate(leaving), *BUILT_IN])


def test_a_row_that_has_the_time_of_another_one_gets_it_when_it_is_seen() -> None:
    scene = telling()
    scene.taint(key="example.com/leaving")
    begun = scene.start().spec
    assert begun.deadline.timestamp() == NOW + 30
    scene.cache.preemptions.put(begun_as(begun))
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 600))
    assert scene.move().spec.deadline.timestamp() == NOW + 600


def test_nearer_signal_without_a_time_stays_though_another_has_one() -> None:
    scene = telling()
    scene.taint(key="example.com/leaving")
    scene.taint("node-2")
    scene.cache.preemptions.put(begun_as(scene.start().spec))
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 600))
    assert scene.decisions() == []


def test_a_time_that_is_learnt_when_the_gang_has_frozen_moves_nothing() -> None:
    scene = telling()
    scene.taint(key="example.com/leaving")
    scene.cache.preemptions.put(begun_as(scene.start().spec, Phase.FROZEN))
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 600))
    assert scene.decisions() == []


def begun_as(spec: PreemptionSpec, phase: Phase = Phase.NOTICED) -> PreemptionRecord:
    name = preemption_name(spec.workload.name, spec.workload.uid, spec.epoch)
    return PreemptionRecord(objects.NAMESPACE, name, NOW, spec, PreemptionStatus(phase=phase))


def test_a_node_claim_of_another_node_or_of_none_yet_says_nothing() -> None:
    scene = Scene()
    scene.seen(kinds.NODE_CLAIMS, claim("node-9", at=NOW + 600))
    homeless = claim(at=NOW + 600)
    del homeless["status"]["nodeName"]
    assert scene.cache.put(kinds.NODE_CLAIMS, homeless, listed=False) == set()
    assert scene.decisions() == []
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 600))
    assert isinstance(scene.start(), StartPreemption)


def test_a_node_claim_that_is_gone_says_nothing_any_more() -> None:
    scene = Scene()
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 600))
    scene.start()
    assert scene.cache.drop("uid-claim-node-1") == {objects.JOBSET_UID}
    assert scene.decisions() == []
    assert scene.cache.uids(kinds.NODE_CLAIMS) == set()


# Of the JobSet's Workload, and time limits.


def test_an_evicted_workload_is_a_signal_to_all_pods_of_its_jobset() -> None:
    scene = Scene()
    assert scene.cache.put(kinds.KUEUE_WORKLOADS, evicted(), listed=False) == {objects.JOBSET_UID}
    spec = scene.start().spec
    assert (spec.cause, spec.signal, len(spec.pods)) == (
        "PriorityPreemption",
        "Workload condition Evicted (Preempted)",
        2,
    )


def test_what_a_suspension_brings_about_is_no_separate_cause() -> None:
    sign = evictions.signal(read_pod(objects.pod()), PolicyInForce(), [], NOW)

    def timed(kind: SignalKind, on: On | None = None) -> Timed:
        return Timed(dataclasses.replace(sign, kind=kind, on=on), NOW)

    deletion, taint = timed(SignalKind.POD_DELETION), timed(SignalKind.NODE_TAINT)
    suspension, queue = timed(SignalKind.SUSPENSION, On.JOB_SET), timed(SignalKind.SUSPENSION, On.WORKLOAD)
    assert root_causes([deletion, taint]) == [deletion, taint]
    assert root_causes([deletion, suspension, taint]) == [suspension, taint]
    assert root_causes([deletion, suspension, taint, queue]) == [queue, taint]


@pytest.mark.parametrize(
    ("change", "tells"),
    [
        pytest.param({}, True, id="node that is drained"),
        pytest.param({"on": On.NODE_CLAIM}, True, id="NodeClaim that ends"),
        pytest.param({"node": "node-9"}, False, id="other node"),
        pytest.param({"cancelable": True}, False, id="taint that may go away"),
        pytest.param({"confidence": Confidence.LIKELY}, False, id="taint that is not sure"),
        pytest.param({"limit": True, "on": On.NODE_CLAIM}, False, id="time limit of a node"),
        pytest.param({"on": On.POD}, False, id="condition of the pod"),
    ],
)
def test_what_takes_the_node_away_shows_the_cause_of_an_eviction(change: dict[str, Any], tells: bool) -> None:
    eviction = Timed(evictions.signal(read_pod(objects.pod()), PolicyInForce(), [], NOW), NOW)
    drained: dict[str, Any] = {"kind": SignalKind.NODE_TAINT, "on": On.NODE, "lead_s": 600.0, "cause": Cause.SCALE_DOWN}
    taint = Timed(dataclasses.replace(eviction.signal, **(drained | change)), NOW)
    assert cause([eviction, taint]) == (Cause.SCALE_DOWN if tells else Cause.DRAIN)
    assert cause([eviction]) == Cause.DRAIN


def test_a_workload_of_something_else_says_nothing() -> None:
    scene = Scene()
    body = evicted()
    body["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "other", "uid": "uid-other"}]
    assert scene.cache.put(kinds.KUEUE_WORKLOADS, body, listed=False) == set()
    assert scene.decisions() == []


def test_a_workload_of_another_namespace_says_nothing_whatever_owner_it_names() -> None:
    scene = Scene()
    body = evicted()
    body["metadata"]["namespace"] = "team-b"
    scene.seen(kinds.KUEUE_WORKLOADS, body)
    assert scene.decisions() == []


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_a_workloads_time_limit_is_less_what_its_earlier_admissions_used(version: str) -> None:
    admitted = objects.condition("Admitted", at=NOW - 50)
    scene = Scene()
    body = objects.workload(conditions=[admitted], limit_s=900, used_s=300, version=version)
    scene.seen(kinds.KUEUE_WORKLOADS, body)
    assert scene.start().spec.deadline.timestamp() == NOW - 50 + 600


def test_workload_seen_before_its_jobset_counts_later() -> None:
    scene = Scene()
    scene.gone(objects.jobset())
    assert scene.cache.put(kinds.KUEUE_WORKLOADS, evicted(), listed=False) == set()
    jobset = objects.jobset()
    jobset["metadata"]["resourceVersion"] = "99"
    scene.seen(JOBSETS, jobset)
    assert scene.start().spec.cause == "PriorityPreemption"


def test_job_time_limit_counts_though_older_than_its_pods() -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, limited(7300))
    assert scene.decisions() == []
    scene.clock.move(3600)
    spec = scene.start().spec
    assert (spec.cause, spec.deadline.timestamp()) == ("TimeLimit", NOW + 7200)
    assert spec.exits is False, "to leave would begin the time anew"
    scene.taint()
    assert scene.start().spec.exits is True


def test_far_limit_at_a_retraction_counts_later() -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, limited(7300))
    scene.recorded(phase="Retracted", cancelable=True, ended_at=NOW)
    scene.clock.move(3600)
    assert scene.start().spec.cause == "TimeLimit"


def test_a_far_limit_does_not_keep_a_preemption_from_being_taken_back() -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, limited(86400))
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.start()
    scene.recorded(deadline_at=NOW + 900, cancelable=True)
    scene.seen(kinds.NODES, objects.node())
    assert isinstance(scene.end(), End)


def test_an_earlier_time_that_another_replica_saw_first_is_waited_for() -> None:
    scene = Scene()
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.recorded(deadline_at=NOW + 900, cancelable=True)
    scene.seen(kinds.PREEMPTIONS, objects.preemption(deadline_at=NOW + 300, cancelable=True, moves=1))
    assert scene.decisions() == []
    scene.clock.move(SIGNALS_COME_S + 0.1)
    assert scene.move().spec.deadline.timestamp() == NOW + 900


def test_a_nearer_deadline_of_another_replica_that_began_at_the_same_time_is_kept() -> None:
    scene = Scene()
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.cache.preemptions.put(begun_as(scene.start().spec))
    scene.seen(kinds.PREEMPTIONS, objects.preemption(cancelable=True, deadline_at=NOW + 30))
    assert scene.decisions() == [], "the signal of that deadline is still to come"


def test_postponed_maintenance_is_reported_when_near_again() -> None:
    scene = Scene()
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.start()
    scene.recorded(deadline_at=NOW + 900, cancelable=True)
    scene.clock.move(10)
    scene.seen(kinds.NODES, maintenance(NOW + 7200))
    assert scene.end().phase is Phase.RETRACTED
    scene.recorded(phase="Retracted", deadline_at=NOW + 900, cancelable=True, ended_at=scene.clock())
    assert scene.decisions() == []
    scene.clock.move(3600)
    assert scene.start().spec.deadline.timestamp() == NOW + 7200


def recorded_limit(scene: Scene, phase: str = "Noticed", ended_at: float | None = None) -> None:
    """The Preemption of a time limit, by which the gang is told to save and to train on."""
    body = objects.preemption(phase=phase, deadline_at=NOW + 2900, exits=False, ended_at=ended_at)
    body["spec"]["cause"] = "TimeLimit"
    scene.seen(kinds.PREEMPTIONS, body)


def test_gang_training_to_its_limit_leaves_with_its_node() -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, limited(3000))
    recorded_limit(scene)
    scene.taint()
    end, start = scene.decisions()
    assert isinstance(end, End)
    assert (end.phase, end.preemption.spec.epoch) == (Phase.RETRACTED, 1)
    assert isinstance(start, StartPreemption)
    assert (start.spec.epoch, start.spec.exits, start.spec.deadline.timestamp()) == (2, True, NOW + 15)


def test_what_has_frozen_for_a_time_limit_is_not_taken_back() -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, limited(3000))
    recorded_limit(scene, "Frozen")
    scene.taint()
    assert scene.move().spec.deadline.timestamp() == NOW + 15


def end_limited_workload(scene: Scene, *, over_at: float, seen_s: float = 40) -> None:
    """Kueue's Workload is seen with its time limit, and so many seconds later Kueue ends it."""
    admitted = objects.condition("Admitted", at=over_at - 900)
    ended = objects.condition("Evicted", reason="DeactivatedDueToMaximumExecutionTimeExceeded", at=NOW)
    scene.clock.move(-seen_s)
    scene.seen(kinds.KUEUE_WORKLOADS, objects.workload(conditions=[admitted], limit_s=900))
    scene.clock.move(seen_s)
    scene.seen(kinds.KUEUE_WORKLOADS, objects.workload(conditions=[admitted, ended], limit_s=900))


@pytest.mark.parametrize("seen_s", [pytest.param(40, id="known"), pytest.param(0, id="new")])
@pytest.mark.parametrize(
    "over_in_s", [pytest.param(-6, id="over"), pytest.param(0, id="now"), pytest.param(5, id="soon")]
)
def test_an_ended_job_has_its_grace_period_whatever_its_time_limit(over_in_s: float, seen_s: float) -> None:
    scene = Scene()
    recorded_limit(scene, "Committed", ended_at=NOW - 20)
    end_limited_workload(scene, over_at=NOW + over_in_s, seen_s=seen_s)
    spec = scene.start().spec
    assert (spec.cause, spec.deadline.timestamp()) == ("Suspension", NOW + 30)
    assert "Evicted (DeactivatedDueToMaximumExecutionTimeExceeded)" in spec.signal


def test_a_limit_that_is_over_does_not_join_what_came_of_it() -> None:
    scene = Scene()
    body = objects.preemption(deadline_at=NOW + 30)
    body["spec"] |= {"cause": "Suspension", "signal": "JobSet spec.suspend=true"}
    scene.seen(kinds.PREEMPTIONS, body)
    end_limited_workload(scene, over_at=NOW - 1)
    moves = [item.spec.deadline.timestamp() for item in scene.decisions() if isinstance(item, Move)]
    assert [at for at in moves if at != NOW + 30] == []


def test_gang_over_the_exit_limit_stays_for_its_time_limit() -> None:
    scene = Scene(exitBreaker={"savedExits": 1, "withinSeconds": 1800})
    scene.seen(kinds.JOBS, limited(3000))
    scene.recorded(epoch=0, phase="Committed", created_at=NOW - 90, ended_at=NOW - 80, pods=[])
    recorded_limit(scene)
    scene.taint()
    assert scene.move().spec.exits is False


def test_a_time_limit_counts_when_all_pods_of_the_gang_run() -> None:
    scene = Scene()
    pending = objects.pod(1, phase="Pending")
    scene.seen(kinds.PODS, pending)
    scene.seen(kinds.JOBS, limited(3000))
    assert scene.decisions() == [], "an epoch of the first pods would be over when the next ones are made"
    scene.seen(kinds.PODS, objects.pod(1))
    assert scene.start().spec.cause == "TimeLimit"


@pytest.mark.parametrize(
    ("before_s", "counts"), [(7200, False), (3699, False), (3698, True)], ids=["long before", "at the binding", "after"]
)
def test_time_limit_that_ended_before_the_pods_is_ignored(before_s: int, counts: bool) -> None:
    scene = Scene()
    scene.listed(kinds.NODE_CLAIMS, objects.node_claim(expire_after="1h", created_at=NOW - before_s))
    assert bool(scene.decisions()) is counts


def test_a_node_claim_that_outlives_its_node_is_no_obstacle() -> None:
    scene = Scene()
    scene.seen(kinds.NODE_CLAIMS, objects.node_claim())
    scene.gone(objects.node())
    assert scene.decisions() == []
    scene.taint("node-2")
    assert scene.start().spec.nodes == ["node-2"]


@pytest.mark.parametrize("grace_s", [7200, 10**15])
def test_a_long_grace_period_keeps_no_signal_back(grace_s: int) -> None:
    scene = Scene()
    scene.seen(kinds.PODS, objects.pod(grace_s=grace_s))
    scene.taint(key="aws-node-termination-handler/asg-lifecycle-termination")
    assert scene.start().spec.cause == "ScaleDown"


def test_what_a_pod_tolerates_for_hours_is_far() -> None:
    scene = Scene()
    patient = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 7200}
    scene.seen(kinds.PODS, objects.pod(tolerations=[patient]))
    scene.taint(key="node.kubernetes.io/unreachable", effect="NoExecute")
    assert scene.decisions() == []


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
def test_attempt_to_evict_a_pod_counts_while_the_pod_runs(phase: str) -> None:
    scene = Scene()
    pod = objects.pod(phase=phase)
    scene.seen(kinds.PODS, pod)
    uid = pod["metadata"]["uid"]
    scene.cache.first_seen.see_attempt(uid, evictions.mark(uid))
    if phase == "Running":
        assert scene.start().spec.signal == "eviction of the pod"
    else:
        assert scene.decisions() == []


def test_a_request_for_a_time_beyond_all_dates_is_one_like_others() -> None:
    scene = Scene()
    scene.seen(kinds.REQUESTS, objects.request(deadlineSeconds=1e13))
    assert scene.start().spec.deadline.year == 9999


def test_a_deletion_at_a_time_before_all_dates_is_one_like_others() -> None:
    scene = Scene()
    body = objects.pod(disruption="EvictionByEvictionAPI", deleting_at=objects.NOW)
    body["metadata"]["deletionGracePeriodSeconds"] = -(10**18)
    scene.seen(kinds.PODS, body)
    assert scene.start().spec.deadline.year == 1970


@pytest.mark.parametrize("reason", ["x" * 1000, "xxx\ud800"], ids=["longer than a record takes", "no Unicode"])
def test_a_gang_is_notified_of_a_condition_whatever_its_reason_is(reason: str) -> None:
    scene = Scene()
    message = "Preempt Scheduled: Sun, 01 Mar 2026 12:05:00 GMT"
    condition = objects.condition("VMEventScheduled", reason=reason, message=message)
    scene.seen(kinds.NODES, objects.node(conditions=[condition]))
    assert scene.start().spec.signal.startswith("Node condition VMEventScheduled (xxx")
