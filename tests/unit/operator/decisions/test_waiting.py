"""What a gang waits for, for each way in which a pod can be kept from running its program; and what is no wait."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from gracepoint_operator.decisions import waiting
from gracepoint_operator.decisions.waiting import EventSaid, StartWait, WaitKind
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import LONGEST_SAID
from gracepoint_operator.workloads import JOBSETS, LONE_JOBS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW, Body
from tests.unit.operator.fakes.scene import Scene

NO_NODES = "0/12 nodes are available: 12 Insufficient nvidia.com/gpu. preemption: 0/12 nodes are available."
SAVED = 77
_versions = itertools.count(1000)


def waits(scene: Scene, uid: str = JOBSET_UID) -> tuple[StartWait, ...]:
    return waiting.waits(scene.cache.gang(uid), scene.clock())


def the_wait(scene: Scene) -> StartWait:
    (wait,) = waits(scene)
    return wait


def pending(**status: Any) -> Body:
    """A pod that a kubelet is about to run. ``status``: what is written over."""
    made = objects.pod(1, phase="Pending", created_at=NOW - 60)
    made["status"] |= status
    return made


def unscheduled(message: str = NO_NODES, reason: str = "Unschedulable", index: int = 1) -> Body:
    made = objects.pod(index, on="", phase="Pending", created_at=NOW - 720)
    made["status"]["conditions"] = [objects.condition("PodScheduled", "False", reason=reason, message=message)]
    return made


def refused(reason: str, message: str, *, life: int = 0, created_at: float = NOW - 60) -> Body:
    """As a kubelet writes a pod that it does not admit (``rejectPod``)."""
    made = objects.pod(1, phase="Failed", created_at=created_at)
    made["metadata"] |= {"name": f"train-workers-0-1-{life}", "uid": f"uid-refused-{life}"}
    made["status"] |= {"reason": reason, "message": f"Pod was rejected: {message}"}
    return made


def refused_at(body: Body, at: float) -> Body:
    """With the time that the API server notes beside what the kubelet has written."""
    fields: Body = {"f:status": {"f:message": {}, "f:phase": {}, "f:reason": {}}}
    by_kubelet = {"manager": "kubelet", "subresource": "status", "time": objects.stamp(at), "fieldsV1": fields}
    by_job = {"manager": "kube-controller-manager", "time": objects.stamp(at + 1), "fieldsV1": {"f:metadata": {}}}
    body["metadata"]["managedFields"] = [by_kubelet, by_job]
    return body


def container(name: str = "trainer", **state: Body) -> Body:
    return {"name": name, "state": state, "lastState": {}, "restartCount": 0, "ready": False, "started": False}


def waits_with(reason: str, message: str = "") -> Body:
    return container(waiting={"reason": reason, "message": message})


def ended(exit_code: int) -> Body:
    return {"exitCode": exit_code, "reason": "Error", "startedAt": "2026-03-01T11:00:00Z"}


def replaced(scene: Scene, body: Body) -> Scene:
    """The scene with another pod in the place of process 1."""
    scene.gone(objects.pod(1))
    body["metadata"]["resourceVersion"] = str(next(_versions))
    scene.seen(kinds.PODS, body)
    return scene


def test_a_gang_that_runs_waits_for_nothing() -> None:
    assert waits(Scene()) == ()


def test_a_pod_without_a_node_is_named_with_the_schedulers_message() -> None:
    wait = the_wait(replaced(Scene(), unscheduled()))
    assert (wait.kind, wait.what, wait.since) == (WaitKind.NODE, "node for process 1", NOW - 720)
    assert wait.in_words(NOW) == f"node for process 1, since 12 min; last: {NO_NODES}"


def test_a_scheduling_gate_is_named() -> None:
    wait = the_wait(
        replaced(Scene(), unscheduled("Scheduling is blocked due to non-empty scheduling gates", "SchedulingGated"))
    )
    assert (wait.kind, wait.what) == (WaitKind.GATE, "scheduling gates of process 1")
    assert "non-empty scheduling gates" in wait.message


@pytest.mark.parametrize(
    ("reason", "message", "kind"),
    [
        ("OutOfcpu", "Node didn't have enough resource: cpu, requested: 4000", WaitKind.KUBELET),
        ("OutOfpods", "Node didn't have enough resource: pods", WaitKind.KUBELET),
        ("OutOfnvidia.com/gpu", "Node didn't have enough resource: nvidia.com/gpu", WaitKind.DEVICE),
        (
            "UnexpectedAdmissionError",
            "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 1, "
            "Available: 0, which is unexpected",
            WaitKind.DEVICE,
        ),
        ("UnexpectedAdmissionError", "Update plugin resources failed due to a checkpoint", WaitKind.KUBELET),
        ("NodeAffinity", "Predicate NodeAffinity failed: node(s) didn't match", WaitKind.KUBELET),
        ("TopologyAffinityError", "Resources cannot be allocated with Topology locality", WaitKind.KUBELET),
        ("InvalidNodeInfo", "Kubelet cannot get node info.", WaitKind.KUBELET),
        ("NodeShutdown", "Pod was rejected as the node is shutting down.", WaitKind.KUBELET),
        ("Evicted", "The node had condition: [DiskPressure].", WaitKind.KUBELET),
        ("Preempting", "Preempted in order to admit critical pod", WaitKind.KUBELET),
    ],
)
def test_a_pod_that_a_kubelet_refuses_is_named_with_its_node(reason: str, message: str, kind: WaitKind) -> None:
    wait = the_wait(replaced(Scene(), refused(reason, message)))
    assert (wait.kind, wait.node) == (kind, "node-2")
    assert wait.what.endswith("process 1 on node-2")
    assert reason in wait.message
    assert message[:40] in wait.message


def test_a_pod_of_a_node_that_is_gone_has_run_although_nobody_said_that_it_ended() -> None:
    """The garbage collector fails it, with the states as the kubelet wrote them last."""
    made = refused("", "")
    made["status"]["containerStatuses"] = [container(running={"startedAt": "2026-03-01T11:00:00Z"})]
    assert waits(replaced(Scene(), made)) == ()


def test_refusals_of_one_process_again_and_again_are_one_wait_since_the_first() -> None:
    scene = replaced(Scene(), refused("OutOfcpu", "cpu", life=0, created_at=NOW - 300))
    scene.seen(kinds.PODS, refused("OutOfcpu", "cpu", life=1, created_at=NOW - 100))
    fresh = objects.pod(1, on="", phase="Pending", created_at=NOW - 2)
    fresh["metadata"] |= {"name": "train-workers-0-1-2", "uid": "uid-refused-2"}
    scene.seen(kinds.PODS, fresh)
    wait = the_wait(scene)
    assert (wait.kind, wait.since) == (WaitKind.KUBELET, NOW - 300)


@pytest.mark.parametrize(
    "reason",
    ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"],
)
def test_an_image_that_cannot_be_pulled_is_named(reason: str) -> None:
    status = [waits_with(reason, 'Back-off pulling image "registry/trainer:1"')]
    wait = the_wait(replaced(Scene(), pending(containerStatuses=status)))
    assert (wait.kind, wait.what, wait.since) == (WaitKind.IMAGE, "the image of process 1", NOW - 59)
    assert wait.message == f'container trainer: {reason}: Back-off pulling image "registry/trainer:1"'


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "CreateContainerError", "PreStartHookError"])
def test_a_container_that_cannot_be_created_is_named(reason: str) -> None:
    status = [waits_with(reason, 'secret "token" not found')]
    wait = the_wait(replaced(Scene(), pending(containerStatuses=status)))
    assert (wait.kind, wait.message) == (WaitKind.CONTAINER, f'container trainer: {reason}: secret "token" not found')


@pytest.mark.parametrize(
    ("event", "kind", "what"),
    [
        (
            EventSaid("FailedMount", "MountVolume.SetUp failed for volume data", NOW),
            WaitKind.VOLUME,
            "a volume of process 1",
        ),
        (EventSaid("FailedAttachVolume", "Multi-Attach error", NOW), WaitKind.VOLUME, "a volume of process 1"),
        (
            EventSaid("FailedCreatePodSandBox", "failed to set up the network", NOW),
            WaitKind.NETWORK,
            "the network of process 1",
        ),
        (
            EventSaid("FailedPrepareDynamicResources", "driver not found", NOW),
            WaitKind.DEVICE,
            "a device for process 1",
        ),
        (EventSaid("Pulling", 'Pulling image "trainer:1"', NOW), WaitKind.START, "the start of process 1"),
    ],
)
def test_events_say_what_a_container_that_is_being_created_waits_for(
    event: EventSaid, kind: WaitKind, what: str
) -> None:
    wait = the_wait(replaced(Scene(), pending(containerStatuses=[waits_with("ContainerCreating")])))
    assert (wait.kind, wait.ask) == (WaitKind.START, ("uid-pod-1-0",))
    older = EventSaid("FailedMount", "long ago", NOW - 1000)
    explained = waiting.explained(wait, [event, older, EventSaid("Scheduled", "assigned", NOW + 1)])
    assert (explained.kind, explained.what, explained.message) == (kind, what, event.message)


def test_an_event_about_a_failure_that_is_over_does_not_count() -> None:
    wait = the_wait(replaced(Scene(), pending(containerStatuses=[waits_with("ContainerCreating")])))
    events = [EventSaid("FailedMount", "no such volume", NOW - 50), EventSaid("Pulling", "Pulling image", NOW - 5)]
    assert waiting.explained(wait, events).kind is WaitKind.START


def test_an_init_container_that_runs_is_named_and_no_event_is_asked_for() -> None:
    status = {
        "initContainerStatuses": [container("fetch", running={"startedAt": "2026-03-01T11:59:00Z"})],
        "containerStatuses": [waits_with("PodInitializing")],
    }
    wait = the_wait(replaced(Scene(), pending(**status)))
    assert (wait.kind, wait.what, wait.ask) == (WaitKind.INIT_CONTAINER, "an init container of process 1", ())
    assert wait.message == "container fetch has not ended"


def test_the_image_of_an_init_container_is_an_image() -> None:
    status = {"initContainerStatuses": [waits_with("ErrImagePull", "not found")]}
    assert the_wait(replaced(Scene(), pending(**status))).kind is WaitKind.IMAGE


def test_a_sidecar_that_was_started_is_not_waited_for() -> None:
    body = pending(
        initContainerStatuses=[container("keeper", running={}) | {"started": True}],
        containerStatuses=[waits_with("ErrImagePull", "no such tag")],
    )
    body["spec"]["initContainers"] = [{"name": "keeper", "restartPolicy": "Always"}]
    assert the_wait(replaced(Scene(), body)).message == "container trainer: ErrImagePull: no such tag"


@pytest.mark.parametrize("exit_code", [0, SAVED])
def test_a_sidecar_that_outlives_the_saved_exit_is_named(exit_code: int) -> None:
    status = [
        container(terminated=ended(exit_code)),
        container("logger", running={"startedAt": "2026-03-01T11:00:00Z"}),
    ]
    body = objects.pod(1)
    body["status"]["containerStatuses"] = status
    wait = the_wait(replaced(Scene(afterSave={"savedExitCode": SAVED}), body))
    assert (wait.kind, wait.pod) == (WaitKind.SIDECAR, "train-workers-0-1-0xyz")
    assert wait.message == f"container logger runs on after the others ended with exit code {exit_code}"


@pytest.mark.parametrize("exit_code", [SAVED, 78, 79])
def test_a_process_that_has_left_waits_for_another_pod(exit_code: int) -> None:
    """Its Job makes pods anew with growing pauses."""
    state = ended(exit_code) | {"finishedAt": "2026-03-01T11:59:00Z", "message": "a peer did not come"}
    body = pending(containerStatuses=[container(terminated=state)], phase="Failed")
    wait = the_wait(replaced(Scene(), body))
    assert (wait.kind, wait.what, wait.since) == (WaitKind.PODS, "another pod for process 1", NOW - 60)
    assert wait.message == f"the last one has left with exit code {exit_code}: a peer did not come"
    assert wait.ask == ("uid-job-0",)


def test_a_pod_that_stays_terminating_is_named_with_its_node() -> None:
    scene = Scene()
    scene.seen(kinds.PODS, objects.pod(1, deleting_at=NOW - 20))
    scene.seen(
        kinds.NODES, objects.node("node-2", taints=[objects.taint("node.kubernetes.io/unreachable", "NoExecute")])
    )
    wait = the_wait(scene)
    assert (wait.kind, wait.pod, wait.node, wait.since) == (
        WaitKind.DELETION,
        "train-workers-0-1-0xyz",
        "node-2",
        NOW - 20,
    )
    assert wait.what == "the end of the pod train-workers-0-1-0xyz on the node node-2"
    assert "node.kubernetes.io/unreachable" in wait.message
    scene.gone(objects.node("node-2"))
    assert the_wait(scene).message == "its node is gone"


def test_a_pod_in_its_grace_period_is_not_waited_for() -> None:
    scene = Scene()
    scene.seen(kinds.PODS, objects.pod(1, deleting_at=NOW + 5))
    scene.seen(kinds.JOBS, objects.job(deleted=True))
    assert waits(scene) == ()


def test_pods_that_are_not_made_are_named_with_what_the_jobs_event_says() -> None:
    scene = Scene()
    scene.gone(objects.pod(1))
    wait = the_wait(scene)
    assert (wait.kind, wait.what, wait.since) == (WaitKind.PODS, "pods of the Job train-workers-0: 1 of 2 exist", None)
    assert wait.ask == ("uid-job-0",)
    message = 'Error creating: pods "train-workers-0-1-x" is forbidden: exceeded quota: gpus'
    events = [EventSaid("SuccessfulCreate", "Created pod", NOW), EventSaid("FailedCreate", message, NOW - 1)]
    assert waiting.explained(wait, events).message == message


def test_jobs_that_are_not_made_are_named() -> None:
    scene = Scene()
    scene.gone(objects.job())
    (wait,) = waits(scene)
    assert (wait.what, wait.ask) == ("Jobs: 0 of 1 exist", (JOBSET_UID,))


def test_a_suspension_is_named_with_what_kueue_says_and_nothing_else_is() -> None:
    scene = Scene()
    scene.seen(JOBSETS, objects.jobset(suspended=True))
    scene.gone(objects.pod(1))
    wait = the_wait(scene)
    assert (wait.kind, wait.what) == (WaitKind.SUSPENDED, "the admission of the JobSet: it is suspended")
    events = [EventSaid("QuotaReserved", "couldn't assign flavors: insufficient quota for cpu", 0.0)]
    assert "insufficient quota" in waiting.explained(wait, events).message


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"containerStatuses": [container(terminated=ended(1))], "phase": "Failed"}, id="an exception"),
        pytest.param(
            {"containerStatuses": [container(terminated=ended(137) | {"reason": "OOMKilled"})], "phase": "Failed"},
            id="out of memory",
        ),
        pytest.param({"containerStatuses": [container(terminated=ended(139))], "phase": "Failed"}, id="a segfault"),
        pytest.param(
            {"containerStatuses": [container(terminated=ended(128) | {"reason": "StartError"})], "phase": "Failed"},
            id="no such command",
        ),
        pytest.param(
            {"containerStatuses": [waits_with("CrashLoopBackOff") | {"restartCount": 2}], "phase": "Running"},
            id="a crash loop",
        ),
        pytest.param(
            {
                "containerStatuses": [
                    container(terminated=ended(1)),
                    container("logger", running={"startedAt": "2026-03-01T11:00:00Z"}),
                ],
                "phase": "Running",
            },
            id="an exception beside a sidecar",
        ),
        pytest.param(
            {
                "initContainerStatuses": [container("fetch", terminated=ended(2))],
                "containerStatuses": [waits_with("PodInitializing")],
            },
            id="an init container that fails",
        ),
    ],
)
def test_the_error_of_a_program_is_never_a_wait(status: Body) -> None:
    assert waits(replaced(Scene(), pending(**status))) == ()


def test_a_thousand_processes_are_one_wait() -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, objects.job(completions=1000))
    for index in range(2, 1000):
        scene.seen(kinds.PODS, unscheduled(index=index))
    assert the_wait(scene).what == "node for processes 2-999"


def test_several_kinds_are_named_in_the_order_of_a_start() -> None:
    scene = replaced(Scene(), pending(containerStatuses=[waits_with("ErrImagePull")]))
    scene.seen(kinds.JOBS, objects.job(completions=4))
    scene.seen(kinds.PODS, unscheduled(index=2))
    assert [wait.kind for wait in waits(scene)] == [WaitKind.PODS, WaitKind.NODE, WaitKind.IMAGE]


def test_processes_of_several_replicated_jobs_are_named_by_their_jobs() -> None:
    scene = Scene()
    other = objects.pod(0, on="", phase="Pending", created_at=NOW - 60)
    other["metadata"] |= {"name": "train-actors-0-0-x", "uid": "uid-actor"}
    other["metadata"]["labels"] |= {
        "jobset.sigs.k8s.io/replicatedjob-name": "actors",
        "batch.kubernetes.io/job-name": "train-actors-0",
    }
    scene.seen(kinds.PODS, other)
    assert the_wait(scene).what == "node for train-actors-0-0"


def test_a_job_by_itself_waits_too() -> None:
    scene = Scene()
    scene.seen(LONE_JOBS, objects.lone_job())
    scene.seen(kinds.PODS, objects.lone_pod(0, phase="Pending", on=""))
    found = waits(scene, objects.LONE_JOB_UID)
    assert [(wait.kind, wait.what) for wait in found] == [
        (WaitKind.PODS, "pods of the Job alone: 1 of 2 exist"),
        (WaitKind.NODE, "node for process 0"),
    ]


@pytest.mark.parametrize("fields", [{"finished": "Completed"}, {"deleted": True}])
def test_what_has_finished_or_is_deleted_waits_for_nothing(fields: Body) -> None:
    scene = replaced(Scene(), unscheduled())
    scene.seen(JOBSETS, objects.jobset(**fields))
    assert waits(scene) == ()


def test_only_what_lasts_is_named() -> None:
    wait = the_wait(replaced(Scene(), unscheduled()))
    assert wait.since is not None
    assert waiting.lasting([wait], wait.since + waiting.NAMED_AFTER_S - 1) == ()
    assert waiting.lasting([wait], wait.since + waiting.NAMED_AFTER_S) == (wait,)
    assert waiting.lasting([dataclasses.replace(wait, since=None)], NOW) == (), "it was not dated yet"


def test_of_what_pods_are_reported_little_is_kept_and_once() -> None:
    scene = Scene()
    scene.seen(kinds.JOBS, objects.job(completions=20))
    for index in range(2, 20):
        scene.seen(kinds.PODS, unscheduled("x" * 5000, index=index))
    held = [pod.holdup for pod in scene.cache.objects.pods.values() if pod.holdup is not None]
    assert len({id(item) for item in held}) == 1
    assert {len(item.message) for item in held} == {LONGEST_SAID}


@pytest.mark.parametrize(
    "later", [{"dependsOn": [{"name": "workers", "status": "Complete"}]}, {}], ids=["depends", "order"]
)
def test_jobs_that_follow_others_are_not_waited_for(later: Body) -> None:
    scene = Scene()
    body = objects.jobset()
    body["metadata"]["resourceVersion"] = str(next(_versions))
    body["spec"]["replicatedJobs"].append({"name": "evaluation", "template": {"spec": {"template": {}}}} | later)
    if not later:
        body["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    scene.seen(JOBSETS, body)
    assert waits(scene) == ()


def test_a_sidecar_that_has_ended_beside_the_training_is_no_wait() -> None:
    body = objects.pod(1)
    url = {"name": "GRACEPOINT_OPERATOR_URL", "value": "https://operator"}
    body["spec"]["containers"] = [{"name": "trainer", "env": [url]}, {"name": "warm-up"}]
    body["status"]["containerStatuses"] = [
        container(running={"startedAt": "2026-03-01T11:00:00Z"}),
        container("warm-up", terminated=ended(0)),
    ]
    assert waits(replaced(Scene(), body)) == ()


def test_a_program_that_fails_after_refusals_is_no_wait() -> None:
    scene = replaced(Scene(), refused("OutOfcpu", "cpu", life=0, created_at=NOW - 300))
    crashed = refused("", "", life=1, created_at=NOW - 100)
    state = ended(1) | {"finishedAt": "2026-03-01T11:59:58Z"}
    crashed["status"] = {"phase": "Failed", "containerStatuses": [container(terminated=state)]}
    scene.seen(kinds.PODS, crashed)
    assert waits(scene) == ()


def test_a_pod_that_ran_and_is_refused_after_a_reboot_is_refused_since_then() -> None:
    """The kubelet drops what the status said of its containers."""
    wait = the_wait(replaced(Scene(), refused_at(refused("NodeAffinity", "affinity", created_at=NOW - 3600), NOW - 2)))
    assert (wait.kind, wait.since) == (WaitKind.KUBELET, NOW - 2)


def test_a_refusal_is_over_once_another_pod_of_the_process_ran() -> None:
    scene = replaced(Scene(), refused_at(refused("NodeAffinity", "affinity", created_at=NOW - 3600), NOW - 300))
    left = refused("", "", life=1, created_at=NOW - 200)
    state = ended(SAVED) | {"finishedAt": objects.stamp(NOW - 2)}
    left["status"] = {"phase": "Failed", "containerStatuses": [container(terminated=state)]}
    scene.seen(kinds.PODS, left)
    assert [wait.kind for wait in waits(scene) if wait.kind is WaitKind.KUBELET] == []


def test_a_refusal_at_the_start_is_over_if_the_next_pod_ran_until_a_reboot() -> None:
    scene = replaced(Scene(), refused_at(refused("OutOfcpu", "cpu", created_at=NOW - 3700), NOW - 3699))
    scene.seen(kinds.PODS, refused_at(refused("NodeAffinity", "affinity", life=1, created_at=NOW - 3600), NOW - 20))
    (wait,) = (wait for wait in waits(scene) if wait.kind is WaitKind.KUBELET)
    assert wait.since == NOW - 20
