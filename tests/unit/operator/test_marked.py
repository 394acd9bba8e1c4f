"""What is decided on signs that are not on the pod itself: since when they count, how far ahead, and when they end."""

from __future__ import annotations

import pytest

from gracepoint.wire.messages import Phase
from gracepoint_operator import kinds
from gracepoint_operator.decide import End, Start
from tests.unit.operator import objects
from tests.unit.operator.objects import NOW, Body, stamp
from tests.unit.operator.scene import Scene

LABEL = "cloud.google.com/scheduled-maintenance-time"
TERMINATION = "karpenter.sh/nodeclaim-termination-timestamp"


def maintenance(at: float) -> Body:
    return objects.node(labels={LABEL: f"{at:.0f}"})


def claim(node: str = "node-1", *, at: float | None = None) -> Body:
    annotations = {} if at is None else {TERMINATION: stamp(at)}
    return objects.node_claim(node, annotations=annotations, expire_after="Never")


def evicted() -> Body:
    return objects.workload(conditions=[objects.condition("Evicted", reason="Preempted")])


# Of the node.


def test_a_maintenance_that_was_announced_before_the_pod_came_counts_when_it_is_moved() -> None:
    scene = Scene()
    scene.clock.move(-200)  # the pods of the scene are bound at NOW - 99
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.clock.move(200)
    assert scene.decisions() == []
    scene.seen(kinds.NODES, maintenance(NOW + 600))
    assert scene.start().spec.deadline.timestamp() == NOW + 600


def test_what_is_more_than_an_hour_ahead_starts_an_epoch_when_it_is_an_hour_away() -> None:
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


def test_a_node_claims_termination_time_is_the_deadline_of_the_pods_on_its_node() -> None:
    scene = Scene()
    assert scene.world.put(kinds.NODE_CLAIMS, claim(), listed=False) == {objects.JOBSET_UID}
    assert scene.decisions() == []
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 600))
    spec = scene.start().spec
    assert (spec.cause, spec.nodes, spec.deadline.timestamp()) == ("ScaleDown", ["node-1"], NOW + 600)
    scene.taint(key="karpenter.sh/disrupted")
    assert scene.start().spec.deadline.timestamp() == NOW + 600, "the taint has the claim's time"


def test_a_node_claim_of_another_node_or_of_none_yet_says_nothing() -> None:
    scene = Scene()
    scene.seen(kinds.NODE_CLAIMS, claim("node-9", at=NOW + 600))
    homeless = claim(at=NOW + 600)
    del homeless["status"]["nodeName"]
    assert scene.world.put(kinds.NODE_CLAIMS, homeless, listed=False) == set()
    assert scene.decisions() == []
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 600))
    assert isinstance(scene.start(), Start)


def test_a_node_claim_that_is_gone_says_nothing_any_more() -> None:
    scene = Scene()
    scene.seen(kinds.NODE_CLAIMS, claim(at=NOW + 600))
    scene.start()
    assert scene.world.drop("uid-claim-node-1") == {objects.JOBSET_UID}
    assert scene.decisions() == []
    assert scene.world.uids(kinds.NODE_CLAIMS) == set()


# Of the JobSet's Workload, and time limits.


def test_an_evicted_workload_is_a_signal_to_all_pods_of_its_jobset() -> None:
    scene = Scene()
    assert scene.world.put(kinds.WORKLOADS, evicted(), listed=False) == {objects.JOBSET_UID}
    spec = scene.start().spec
    assert (spec.cause, spec.signal, len(spec.pods)) == ("Suspension", "Workload condition Evicted (Preempted)", 2)


def test_a_workload_of_something_else_says_nothing() -> None:
    scene = Scene()
    body = evicted()
    body["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "other", "uid": "uid-other"}]
    assert scene.world.put(kinds.WORKLOADS, body, listed=False) == set()
    assert scene.decisions() == []


def test_a_workload_that_came_before_its_jobset_counts_when_the_jobset_is_known() -> None:
    scene = Scene()
    scene.gone(objects.jobset())
    assert scene.world.put(kinds.WORKLOADS, evicted(), listed=False) == set()
    jobset = objects.jobset()
    jobset["metadata"]["resourceVersion"] = "99"
    scene.seen(kinds.JOBSETS, jobset)
    assert scene.start().spec.cause == "Suspension"


def test_a_jobs_time_limit_counts_for_its_pods_though_it_was_there_before_them() -> None:
    scene = Scene()
    limited = objects.job() | {"spec": {"activeDeadlineSeconds": 7300}, "status": {"startTime": stamp(NOW - 100)}}
    scene.seen(kinds.JOBS, limited)
    assert scene.decisions() == []
    scene.clock.move(3600)
    spec = scene.start().spec
    assert (spec.cause, spec.deadline.timestamp()) == ("TimeLimit", NOW + 7200)
    assert spec.exits is False, "to leave would begin the time anew"
    scene.taint()
    assert scene.start().spec.exits is True


def test_a_far_limit_does_not_keep_an_epoch_from_being_taken_back() -> None:
    scene = Scene()
    limited = objects.job() | {"spec": {"activeDeadlineSeconds": 86400}, "status": {"startTime": stamp(NOW - 100)}}
    scene.seen(kinds.JOBS, limited)
    scene.seen(kinds.NODES, maintenance(NOW + 900))
    scene.start()
    scene.recorded(deadline_at=NOW + 900, cancelable=True)
    scene.seen(kinds.NODES, objects.node())
    assert isinstance(scene.end(), End)
