"""A Job by itself: how it and its pods are read, and what is decided about it."""

from __future__ import annotations

import pytest

from gracepoint.wire import names
from gracepoint.wire.messages import Phase
from gracepoint_operator import workloads
from gracepoint_operator.decisions.decide import Answer, Check, End, StartPreemption, decide
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import Membership
from gracepoint_operator.model.preemption_record import EndReason, PreemptionRecord
from gracepoint_operator.workloads import JOBSETS, LONE_JOBS, membership_of
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import LONE_JOB_UID, Body
from tests.unit.operator.fakes.scene import Scene

JOB_UID = "batch.kubernetes.io/controller-uid"


class LoneScene(Scene):
    """A Job of two pods beside the JobSet's gang, on the same nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.listed(LONE_JOBS, objects.lone_job())
        for index in (0, 1):
            self.listed(kinds.PODS, objects.lone_pod(index))

    def decided(self) -> list[object]:
        return list(decide(self.cache.gang(LONE_JOB_UID), self.clock()))

    def begun(self) -> StartPreemption:
        (decision,) = self.decided()
        assert isinstance(decision, StartPreemption), decision
        return decision

    def record(self, start: StartPreemption, phase: str, **body: object) -> PreemptionRecord:
        spec = start.spec.to_json()
        stored = {
            "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
            "kind": "Preemption",
            "metadata": {
                "name": start.name,
                "namespace": start.namespace,
                "uid": f"uid-{start.name}",
                "creationTimestamp": objects.stamp(self.clock()),
            },
            "spec": spec,
            "status": {"phase": phase, "acknowledgements": {"expected": 2, "received": 2}, **body},
        }
        self.seen(kinds.PREEMPTIONS, stored)
        return self.cache.preemptions.records[start.namespace, start.name]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        pytest.param({JOB_UID: "u", names.LABEL_POLICY: "p"}, Membership("u", 0), id="under Gracepoint"),
        pytest.param({JOB_UID: "u"}, Membership(), id="without the policy's label"),
        pytest.param(
            {JOB_UID: "u", names.LABEL_POLICY: "p", names.JOBSET_LABEL_UID: "s"}, Membership("s", 0), id="of a JobSet"
        ),
    ],
)
def test_a_pod_belongs_to_its_job_unless_a_jobset_made_it(labels: dict[str, str], expected: Membership) -> None:
    assert membership_of(labels) == expected


@pytest.mark.parametrize(
    ("body", "finished", "injected"),
    [
        pytest.param(objects.lone_job(), False, True, id="runs"),
        pytest.param(objects.lone_job(condition="Complete"), True, True, id="complete"),
        pytest.param(objects.lone_job(condition="FailureTarget"), True, True, id="about to fail"),
        pytest.param(objects.lone_job(injected=False), False, False, id="older than its policy"),
    ],
)
def test_a_job_is_read_as_a_workload(body: Body, finished: bool, injected: bool) -> None:
    read = workloads.BY_NAME["Job"].read(body)
    assert (read.kind, read.name, read.uid, read.policy) == ("Job", "alone", LONE_JOB_UID, "careful")
    assert (read.finished, read.injected, read.restarts) == (finished, injected, 0)


def test_a_taint_starts_a_preemption_of_the_job() -> None:
    scene = LoneScene()
    scene.taint()
    start = scene.begun()
    assert start.spec.to_json()["jobSet"] == {"kind": "Job", "name": "alone", "uid": LONE_JOB_UID}
    assert (start.name, start.expected) == (f"alone-{LONE_JOB_UID[:8]}-1", 2)
    assert start.spec.pods == ["alone-0-0xyz"]
    assert "kind" not in scene.start().spec.to_json()["jobSet"], "as in the records of before"


def test_suspending_the_job_starts_a_preemption_of_it_alone() -> None:
    scene = LoneScene()
    scene.seen(LONE_JOBS, objects.lone_job(suspended=True))
    spec = scene.begun().spec
    assert (spec.cause, spec.signal) == ("Suspension", "Job spec.suspend=true")
    assert scene.decisions() == []


def test_pods_that_replace_the_saved_ones_are_another_life() -> None:
    scene = LoneScene()
    scene.taint()
    scene.record(scene.begun(), "Committed", conditions=[{**objects.condition("Ended", reason="Committed")}])
    for index in (0, 1):
        scene.seen(kinds.PODS, objects.lone_pod(index, phase="Failed"))
    scene.clock.move(20)
    for index in (0, 1):
        scene.seen(kinds.PODS, objects.lone_pod(index, life=1, on="node-2", created_at=scene.clock()))
    stages = [getattr(item, "stage", item) for item in scene.decided()]
    assert stages == ["exited", "podsBack"], "and no epoch, as the taint was answered"
    scene.taint("node-2")
    starts = [item for item in scene.decided() if isinstance(item, StartPreemption)]
    assert [start.spec.epoch for start in starts] == [2]
    assert starts[0].spec.pods == ["alone-0-1xyz", "alone-1-1xyz"]


def test_a_deleted_pod_is_looked_at_first() -> None:
    scene = LoneScene()
    scene.seen(kinds.PODS, objects.lone_pod(0, deleting_at=objects.NOW + 30))
    (decision,) = scene.decided()
    assert isinstance(decision, Check)
    assert (decision.workload.kind, decision.workload.name) == ("Job", "alone")
    scene.cache.mark_checked(decision.pod_uids)
    assert scene.begun().spec.cause == "PodDeletion"


def test_the_end_of_the_job_is_no_disruption() -> None:
    scene = LoneScene()
    scene.taint()
    scene.record(scene.begun(), "Noticed")
    scene.seen(LONE_JOBS, objects.lone_job(condition="Complete"))
    (ending,) = scene.decided()
    assert isinstance(ending, End)
    assert (ending.phase, ending.reason, ending.message) == (
        Phase.RETRACTED,
        EndReason.WORKLOAD_FINISHED,
        "the Job finished",
    )


@pytest.mark.parametrize(
    ("reference", "asked"),
    [
        pytest.param({"kind": "Job", "name": "alone"}, True, id="its kind and name"),
        pytest.param({"name": "alone"}, False, id="a JobSet of its name"),
    ],
)
def test_a_request_names_the_kind_of_the_workload(reference: Body, asked: bool) -> None:
    scene = LoneScene()
    body = objects.request()
    body["spec"]["jobSet"] = reference
    scene.seen(kinds.REQUESTS, body)
    assert any(isinstance(item, StartPreemption) for item in scene.decided()) is asked
    assert len(scene.cache.homeless_requests()) == (0 if asked else 1)
    assert not any(isinstance(item, Answer) for item in scene.decided())


def test_kueues_workload_of_a_trainjob_is_that_of_its_jobset() -> None:
    scene = Scene()
    owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "train", "uid": "uid-trainjob"}
    body = objects.workload()
    body["metadata"]["ownerReferences"] = [owner]
    scene.seen(kinds.KUEUE_WORKLOADS, body)
    jobset = objects.jobset()
    jobset["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    scene.seen(JOBSETS, jobset)
    message = "Preempted to accommodate a workload (UID: 12, JobUID: 34) due to prioritization in the ClusterQueue"
    body["status"]["conditions"] = [objects.condition("Evicted", reason="Preempted", message=message)]
    scene.seen(kinds.KUEUE_WORKLOADS, body)
    spec = scene.start().spec
    assert (spec.cause, spec.signal) == ("PriorityPreemption", f"Workload condition Evicted (Preempted): {message}")


def test_kueues_workload_of_a_job_is_its_own() -> None:
    scene = LoneScene()
    body = objects.workload(conditions=[objects.condition("Evicted", reason="PodsReadyTimeout")])
    body["metadata"]["ownerReferences"] = [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "alone", "uid": LONE_JOB_UID}
    ]
    scene.seen(kinds.KUEUE_WORKLOADS, body)
    assert scene.begun().spec.cause == "Suspension"
