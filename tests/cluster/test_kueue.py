"""Runs in a queue of Kueue, by its real controller: they wait, give way, run out of time, and end bit for bit.

With fewer processes than they asked for, they use each sample once.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator

import pytest

from demo import install, nodes
from demo.forms import JOB, JOBSET, TRAINJOB, Form
from demo.snapshot import PROCESSES, Json
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from tests.cluster import elastic_run, queues
from tests.cluster.conftest import MARK, NAMESPACE, training_run
from tests.cluster.machine import local
from tests.cluster.queues import QUEUE, QUOTA, in_queue
from tests.testcluster import controllers
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.controllers, pytest.mark.timeout(1500)]

TIME_LIMIT = "kueue.x-k8s.io/max-exec-time-seconds"
WORKLOADS = "workloads.kueue.x-k8s.io"
HOSTNAME = "kubernetes.io/hostname"
#: A scheduling gate of the test's own.
HOLD = "gracepoint.test/hold"
MIDDLE = 20
#: Seconds of the time limit. A slowed run takes longer than that.
LIMIT_S = 75


@pytest.fixture(scope="module")
def queue(request: pytest.FixtureRequest, installed: Cluster) -> Cluster:
    """The cluster with Kueue, a queue, and the Trainer if a test needs it."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    if any(TRAINJOB in params.values() for params in chosen):
        # Before Kueue, which looks for its kinds when it starts.
        controllers.install(local(installed), controllers.TRAINER)
    queues.install(local(installed), NAMESPACE)
    return installed


@pytest.fixture(
    params=[pytest.param(JOBSET, id="JobSet"), pytest.param(JOB, id="Job"), pytest.param(TRAINJOB, id="TrainJob")]
)
def queued(request: pytest.FixtureRequest, queue: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    """A run of each kind, not started."""
    form: Form = request.param
    words = request.node.originalname.split("_")
    run = training_run(queue, images, f"{words[-1]}-{form.created.partition('s.')[0]}", form=form)
    yield run
    run.delete()


def occupant(
    cluster: Cluster, images: install.Images, name: str, seconds: int, *, processors: str = QUOTA["cpu"]
) -> Json:
    """Creates a Job of high priority in the tests' namespace that takes the quota; returns it as stored."""
    name = f"{name}-{MARK}"
    return queues.occupant(cluster, images.trainer, name, seconds, namespace=NAMESPACE, processors=processors)


def kueue_workload(run: TrainingRun) -> Json:
    """Kueue's Workload of a run. Empty if there is none yet."""
    found = json.loads(run.cluster.kubectl("get", WORKLOADS, f"--namespace={NAMESPACE}", "--output=json").stdout)
    for item in found["items"]:
        if any(owner["name"] == run.name for owner in item["metadata"].get("ownerReferences", [])):
            return dict(item)
    return {}


def waits(workload: Json) -> bool:
    """Whether there is no quota for it."""
    conditions = workload.get("status", {}).get("conditions", [])
    return any(item["type"] == "QuotaReserved" and item["status"] == "False" for item in conditions)


def test_a_run_waits_for_quota_and_gives_way_to_a_higher_priority(
    queued: TrainingRun, images: install.Images, undisturbed: TrainingRun
) -> None:
    run, cluster = queued, queued.cluster
    name = run.form.created.partition(".")[0]
    occupant(cluster, images, f"first-{name}", 25)
    run.start(in_queue())
    wait_until("the run to be queued", lambda: waits(kueue_workload(run)), timeout_s=60)
    assert run.look().pods == ()

    run.wait_for_step(MIDDLE, timeout_s=240)
    home = run.wait_for_pods()[0].node
    taker = occupant(cluster, images, f"taker-{name}", 20)
    record = run.wait_for_phase(Phase.COMMITTED, timeout_s=120)
    spec, status = record["spec"], record["status"]
    assert spec["cause"] == "PriorityPreemption"
    assert f"JobUID: {taker['metadata']['uid']}" in spec["signal"], "it says who took the quota"
    assert status["stepsLost"] == 0

    # It is admitted again where there is room, which is not where it was.
    cluster.kubectl("cordon", home)
    try:
        run.wait_for_record("that it trains again", lambda status: "restoredStep" in status, timeout_s=180)
        assert home not in {pod.node for pod in run.wait_for_pods()}
    finally:
        cluster.kubectl("uncordon", home)
    run.wait_for_end(timeout_s=300)
    assert run.compare(undisturbed).differences == ()
    assert run.look().restarts_counted == 0


@pytest.mark.parametrize("queued", [pytest.param(JOBSET, id="JobSet")], indirect=True)
def test_a_run_saves_before_its_time_in_the_queue_is_over(queued: TrainingRun, undisturbed: TrainingRun) -> None:
    run = queued
    run.start(slowed(in_queue(**{TIME_LIMIT: str(LIMIT_S)})))
    wait_until("Kueue to admit it", lambda: transition(kueue_workload(run), "Admitted") is not None, timeout_s=60)
    admitted_at = transition(kueue_workload(run), "Admitted")
    assert admitted_at is not None
    record = run.wait_for_phase(Phase.COMMITTED, timeout_s=240)
    spec, status = record["spec"], record["status"]
    assert (spec["cause"], spec["exits"]) == ("TimeLimit", False)
    assert spec["signal"] == f"Workload spec.maximumExecutionTimeSeconds={LIMIT_S}"
    assert parsed(spec["deadline"]) == admitted_at + datetime.timedelta(seconds=LIMIT_S)

    # Kueue ends it at its time. It has trained on until then, and saves the last step as well.
    over = run.wait_for_phase(Phase.COMMITTED, epoch=1, timeout_s=120)
    evicted_at = transition(kueue_workload(run), "Evicted")
    assert evicted_at is not None
    assert evicted_at >= parsed(spec["deadline"])
    assert status["secondsToSpare"] > 0
    assert over["spec"]["cause"] == "Suspension"
    assert "MaximumExecutionTimeExceeded" in over["spec"]["signal"]
    assert (status["stepsLost"], over["status"]["stepsLost"]) == (0, 0)
    assert over["status"]["step"] > status["step"]
    wait_until("Kueue to give its quota back", lambda: waits(kueue_workload(run)), timeout_s=120, every_s=0.5)
    assert kueue_workload(run)["spec"]["active"] is False

    # A person gives it more time: hours, so that no notice of the new limit comes before the end.
    longer = f"{TIME_LIMIT}={LIMIT_S + 10_000}"
    resource = f"{run.form.created}/{run.name}"
    run.cluster.kubectl("label", resource, f"--namespace={NAMESPACE}", "--overwrite", longer)
    admit_anew(run)
    run.wait_for_record("that it trains again", lambda status: "restoredStep" in status, timeout_s=180)
    run.wait_for_end(timeout_s=300)
    assert run.compare(undisturbed).differences == ()
    assert run.look().restarts_counted == 0


def transition(workload: Json, condition: str) -> datetime.datetime | None:
    """Since when a condition of Kueue's Workload is true. None if it is not."""
    conditions = workload.get("status", {}).get("conditions", [])
    true = (item for item in conditions if (item["type"], item["status"]) == (condition, "True"))
    return next((parsed(item["lastTransitionTime"]) for item in true), None)


def parsed(time: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(time)


def admit_anew(run: TrainingRun) -> None:
    """Lets Kueue admit a run that it has deactivated. It makes another Workload of the job, with the job's time."""
    workload = f"{WORKLOADS}/{kueue_workload(run)['metadata']['name']}"
    run.cluster.kubectl("delete", workload, f"--namespace={NAMESPACE}")

    def admitted() -> bool:
        made = kueue_workload(run)
        return transition(made, "Admitted") is not None and made["spec"]["maximumExecutionTimeSeconds"] > LIMIT_S

    wait_until("Kueue to admit it with its longer time", admitted, timeout_s=60)


def slowed(change: Callable[[Json], None]) -> Callable[[Json], None]:
    """Lets a step take a second, so that the time is over in the middle."""

    def changed(body: Json) -> None:
        change(body)
        (job,) = body["spec"]["replicatedJobs"]
        args = job["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
        args.append("--pace=1.0")

    return changed


def placed_objects() -> list[Json]:
    """A queue whose pods are pinned to nodes, with twice the quota of a run.

    When Kueue 0.15.0 replaces a node, it asks for quota of what it replaces although that has its quota.
    """
    api = "kueue.x-k8s.io/v1beta1"
    quota = {"cpu": "1", "memory": "4Gi"}
    resources = [{"name": name, "nominalQuota": amount} for name, amount in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": "placed", "resources": resources}]}
    return [
        {
            "apiVersion": api,
            "kind": "Topology",
            "metadata": {"name": "hosts"},
            "spec": {"levels": [{"nodeLabel": HOSTNAME}]},
        },
        {
            "apiVersion": api,
            "kind": "ResourceFlavor",
            "metadata": {"name": "placed"},
            "spec": {"topologyName": "hosts", "nodeLabels": {"kubernetes.io/os": "linux"}},
        },
        {
            "apiVersion": api,
            "kind": "ClusterQueue",
            "metadata": {"name": "placed"},
            "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
        },
        {
            "apiVersion": api,
            "kind": "LocalQueue",
            "metadata": {"name": "placed", "namespace": NAMESPACE},
            "spec": {"clusterQueue": "placed"},
        },
    ]


@pytest.fixture(scope="module")
def placement(queue: Cluster) -> None:
    """The queue whose pods are pinned to nodes."""
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": placed_objects()})
    queue.kubectl("apply", "--filename=-", stdin=made)


def in_placed_queue(body: Json) -> None:
    body["metadata"].setdefault("labels", {})[QUEUE] = "placed"


def pinned(template: Json) -> None:
    """Lets Kueue choose the node of each pod. A step takes long enough to be disturbed twice."""
    annotations = template.setdefault("metadata", {}).setdefault("annotations", {})
    annotations["kueue.x-k8s.io/podset-unconstrained-topology"] = "true"
    template["spec"]["containers"][0]["args"].append("--pace=0.4")


def pods_of(run: TrainingRun) -> list[Json]:
    query = ("get", "pods", f"--namespace={NAMESPACE}", f"--selector={run.form.name_label}={run.name}")
    found: list[Json] = json.loads(run.cluster.kubectl(*query, "--output=json").stdout)["items"]
    return found


def condition_of(run: TrainingRun, name: str) -> Json:
    """A condition of Kueue's Workload of a run. Empty if there is none."""
    conditions = kueue_workload(run).get("status", {}).get("conditions", [])
    return next((dict(item) for item in conditions if item["type"] == name), {})


def named_nodes(run: TrainingRun) -> list[str]:
    """The nodes that Kueue is asked to replace."""
    return [item["name"] for item in kueue_workload(run)["status"].get("unhealthyNodes", [])]


@pytest.mark.usefixtures("placement")
def test_pods_that_kueue_pins_to_nodes_return_on_other_nodes_each_time(
    queued: TrainingRun, undisturbed: TrainingRun
) -> None:
    run, cluster = queued, queued.cluster
    run.start(in_placed_queue, pinned)
    for epoch, step in enumerate((5, 30)):
        home = run.wait_for_trainers(step)[0].node
        assert all(HOSTNAME in pod["spec"]["nodeSelector"] for pod in pods_of(run)), "Kueue pins them"
        nodes.taint(cluster, home)
        assert run.wait_for_phase(Phase.COMMITTED, epoch=epoch, timeout_s=120)["status"]["stepsLost"] == 0
        run.wait_for_record("that it trains again", lambda status: "restoredStep" in status, timeout_s=180)
        assert home not in {pod.node for pod in run.wait_for_pods()}
        assert condition_of(run, "Evicted") == {}, "Kueue replaced the node"
        wait_until("the name to be taken out", lambda: named_nodes(run) == [], timeout_s=30)
        nodes.untaint(cluster, home)
    run.wait_for_end(timeout_s=300)
    assert run.compare(undisturbed).differences == ()
    assert run.look().restarts_counted == 0


@pytest.mark.usefixtures("placement")
def test_a_run_whose_node_has_no_replacement_waits_in_the_queue(queued: TrainingRun, undisturbed: TrainingRun) -> None:
    run, cluster = queued, queued.cluster
    home, *others = cluster.nodes
    for node in others:
        cluster.kubectl("cordon", node)
    run.start(in_placed_queue, pinned)
    assert {pod.node for pod in run.wait_for_trainers(10)} == {home}
    nodes.taint(cluster, home)
    assert run.wait_for_phase(Phase.COMMITTED, timeout_s=120)["status"]["stepsLost"] == 0
    wait_until("Kueue to evict it", lambda: waits(kueue_workload(run)), timeout_s=60)
    assert condition_of(run, "Evicted")["reason"] == "NodeFailures"
    wait_until("the pods to go", lambda: {pod.phase for pod in run.look().pods} <= {"Failed"}, timeout_s=60)
    wait_until("the name to be taken out", lambda: named_nodes(run) == [], timeout_s=30)

    for node in others:
        cluster.kubectl("uncordon", node)
    run.wait_for_record("that it trains again", lambda status: "restoredStep" in status, timeout_s=180)
    assert home not in {pod.node for pod in run.wait_for_pods()}
    run.wait_for_end(timeout_s=300)
    assert run.compare(undisturbed).differences == ()
    assert run.look().restarts_counted == 0


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("queued", [pytest.param(JOBSET, id="JobSet"), pytest.param(JOB, id="Job")], indirect=True)
def test_a_run_that_is_pinned_to_a_node_that_goes_before_it_starts_is_placed_anew(
    queued: TrainingRun, undisturbed: TrainingRun
) -> None:
    """Kueue leaves a Workload alone whose node is healthy, and whose pods cannot be bound."""
    run, cluster = queued, queued.cluster

    def held(template: Json) -> None:
        pinned(template)
        template["spec"]["schedulingGates"] = [{"name": HOLD}]

    run.start(in_placed_queue, held)
    home = held_at(run)
    nodes.taint(cluster, home)
    let_go(run)

    def is_evicted() -> bool:
        return "Gracepoint: pods are pinned" in condition_of(run, "Evicted").get("message", "")

    wait_until("the operator to evict it", is_evicted, timeout_s=90)
    assert held_at(run) != home
    let_go(run)
    run.wait_for_end(timeout_s=300)
    assert run.compare(undisturbed).differences == ()
    assert run.look().restarts_counted == 0


def held_pods(run: TrainingRun) -> list[Json]:
    """The pods that Kueue has pinned to nodes, and that the test holds."""
    return [
        pod
        for pod in pods_of(run)
        if pod["spec"].get("schedulingGates") == [{"name": HOLD}] and "deletionTimestamp" not in pod["metadata"]
    ]


def held_at(run: TrainingRun) -> str:
    """The node to which Kueue has pinned all pods, once it has."""
    wait_until("Kueue to pin the pods", lambda: len(held_pods(run)) == PROCESSES, timeout_s=120)
    (node,) = {pod["spec"]["nodeSelector"][HOSTNAME] for pod in held_pods(run)}
    return str(node)


def let_go(run: TrainingRun) -> None:
    patch = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
    for pod in held_pods(run):
        name = pod["metadata"]["name"]
        run.cluster.kubectl("patch", "pod", name, f"--namespace={NAMESPACE}", "--type=json", "--patch", patch)


@pytest.mark.parametrize("queued", [pytest.param(JOB, id="Job")], indirect=True)
def test_partial_admission_is_refused_with_its_reason(queued: TrainingRun) -> None:
    def change(body: Json) -> None:
        in_queue()(body)
        body["metadata"]["annotations"] = {"kueue.x-k8s.io/job-min-parallelism": "1"}

    with pytest.raises(ClusterError, match="expected nothing: the number of processes is written into the pods"):
        queued.start(change)


@pytest.fixture(params=[pytest.param(JOB, id="Job")])
def elastic(request: pytest.FixtureRequest, queue: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    """A run of any size, not started."""
    run = elastic_run.elastic_run(queue, images, "partial", request.param)
    yield run
    run.delete()


def test_a_partly_admitted_job_uses_each_sample_once(elastic: TrainingRun, images: install.Images) -> None:
    run, cluster = elastic, elastic.cluster

    def any_size(body: Json) -> None:
        in_queue()(body)
        body["metadata"]["annotations"] = {
            "kueue.x-k8s.io/job-min-parallelism": "1",
            "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
        }

    run.start(elastic_run.training_elastically(run, any_size))
    elastic_run.wait_for_size(run, 2, 20)
    # Beside this one there is room for one of its two processes.
    taker = occupant(cluster, images, "taker-partial", 3600, processors="300m")["metadata"]
    record = run.wait_for_phase(Phase.COMMITTED, timeout_s=120)
    assert record["spec"]["cause"] == "PriorityPreemption"
    assert f"JobUID: {taker['uid']}" in record["spec"]["signal"], "it says who took the quota"
    elastic_run.wait_for_size(run, 1, 60)

    # Kueue does not give a running job more. When it starts again, it gets what there is.
    cluster.kubectl("delete", f"jobs/{taker['name']}", f"--namespace={NAMESPACE}")
    occupant(cluster, images, "all-partial", 5)
    assert run.wait_for_phase(Phase.COMMITTED, epoch=1, timeout_s=120)["status"]["stepsLost"] == 0
    run.wait_for_end(timeout_s=300)
    assert elastic_run.sizes(run) == [2, 1, 2]
    elastic_run.used_once(run)
    assert run.look().restarts_counted == 0
