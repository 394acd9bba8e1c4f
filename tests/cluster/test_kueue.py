"""Runs in a queue of Kueue, by its real controller: they wait, give way, run out of time, and end bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from demo import install
from demo.forms import JOB, JOBSET, TRAINJOB, Form
from demo.snapshot import Json
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from tests.cluster.conftest import MARK, NAMESPACE, training_run
from tests.cluster.machine import local
from tests.cluster.small import container, create
from tests.testcluster import controllers
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.controllers, pytest.mark.timeout(1500)]

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
TIME_LIMIT = "kueue.x-k8s.io/max-exec-time-seconds"
WORKLOADS = "workloads.kueue.x-k8s.io"
#: Enough for the two processes of a run, and for nothing beside them.
QUOTA = {"cpu": "500m", "memory": "2Gi"}
MIDDLE = 20


def kueue_objects() -> list[Json]:
    """A queue with the quota, in which a higher priority preempts."""
    api = "kueue.x-k8s.io/v1beta1"
    resources = [{"name": name, "nominalQuota": quota} for name, quota in QUOTA.items()]
    group = {"coveredResources": list(QUOTA), "flavors": [{"name": "any", "resources": resources}]}
    classes = [
        {"apiVersion": api, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
        for name, value in (("low", 1), ("high", 100))
    ]
    return [
        {"apiVersion": api, "kind": "ResourceFlavor", "metadata": {"name": "any"}},
        {
            "apiVersion": api,
            "kind": "ClusterQueue",
            "metadata": {"name": "all"},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [group],
                "preemption": {"withinClusterQueue": "LowerPriority"},
            },
        },
        {
            "apiVersion": api,
            "kind": "LocalQueue",
            "metadata": {"name": "team", "namespace": NAMESPACE},
            "spec": {"clusterQueue": "all"},
        },
        *classes,
    ]


@pytest.fixture(scope="module")
def queue(installed: Cluster) -> Cluster:
    """The cluster with the Trainer, Kueue and a queue."""
    controllers.install(local(installed), controllers.TRAINER)  # Kueue looks for its kinds when it starts
    controllers.install(local(installed), controllers.KUEUE)
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": kueue_objects()})

    def applied() -> bool:
        return installed.kubectl("apply", "--filename=-", stdin=made, check=False).returncode == 0

    wait_until("Kueue's webhooks", applied, timeout_s=120, every_s=2)
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


def in_queue(priority: str = "low", **labels: str) -> Callable[[Json], None]:
    """Puts a workload into the queue before it is created."""

    def change(body: Json) -> None:
        body["metadata"].setdefault("labels", {}).update({QUEUE: "team", PRIORITY: priority, **labels})

    return change


def occupant(cluster: Cluster, images: install.Images, name: str, seconds: int) -> Json:
    """Creates a Job of high priority that takes the whole quota for so long; returns it as stored."""
    one = container("wait", images.trainer, f"import time; time.sleep({seconds})")
    one["resources"] = {"requests": {"cpu": QUOTA["cpu"], "memory": "64Mi"}}
    body: Json = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-{MARK}", "namespace": NAMESPACE},
        "spec": {
            "ttlSecondsAfterFinished": 1,
            "template": {
                "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [one]},
            },
        },
    }
    in_queue("high")(body)
    return create(cluster, body)[0]


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
    run, cluster = queued, queued.cluster
    run.start(slowed(in_queue(**{TIME_LIMIT: "75"})))
    record = run.wait_for_phase(Phase.COMMITTED, timeout_s=240)
    assert record["spec"]["cause"] == "TimeLimit"
    assert record["spec"]["signal"] == "Workload spec.maximumExecutionTimeSeconds=75"

    # Kueue ends it at its time, and somebody lets it go on, as often as it takes.
    def over() -> bool:
        workload = kueue_workload(run)
        if workload and not workload["spec"].get("active", True) and not run.look().running():
            patch = '{"spec":{"active":true}}'
            resource = f"{WORKLOADS}/{workload['metadata']['name']}"
            cluster.kubectl("patch", resource, f"--namespace={NAMESPACE}", "--type=merge", "--patch", patch)
        return run.look().end == "Completed"

    wait_until("the run to complete", over, timeout_s=900, every_s=2)
    assert run.compare(undisturbed).differences == ()


def slowed(change: Callable[[Json], None]) -> Callable[[Json], None]:
    """Lets a step take a second, so that the time is over in the middle."""

    def changed(body: Json) -> None:
        change(body)
        (job,) = body["spec"]["replicatedJobs"]
        args = job["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
        args.append("--pace=1.0")

    return changed


@pytest.mark.parametrize("queued", [pytest.param(JOB, id="Job")], indirect=True)
def test_partial_admission_is_refused_with_its_reason(queued: TrainingRun) -> None:
    def change(body: Json) -> None:
        in_queue()(body)
        body["metadata"]["annotations"] = {"kueue.x-k8s.io/job-min-parallelism": "1"}

    with pytest.raises(ClusterError, match="expected nothing: the number of processes is written into the pods"):
        queued.start(change)
