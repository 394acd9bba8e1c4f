"""What ends pods without being a disruption starts no preemption; what carries no label is left alone."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator, Sequence

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.names import ENV_PREFIX, GROUP, JOBSET_LABEL_NAME
from tests.cluster import operator
from tests.cluster.asking import call_off, schedule
from tests.cluster.conftest import NAMESPACE, POLICY, training_run
from tests.cluster.machine import end_at_once, trainer_process
from tests.cluster.small import JOBSETS, container, create, get, jobset, replicated_job
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

FAILURE = 99
FAILS_WHEN_TOLD = f"""
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *about: os._exit({FAILURE}))
time.sleep(3600)
"""


def test_success_starts_no_preemption(undisturbed: TrainingRun) -> None:
    snapshot = undisturbed.look()
    assert (snapshot.end, snapshot.restarts, snapshot.preemptions) == ("Completed", 0, ())


def test_cleaning_up_after_its_time_starts_no_preemption(installed: Cluster, images: Images) -> None:
    workers = replicated_job("workers", container("train", images.trainer, "pass"), pods=2)
    body = jobset("brief", workers, policy=POLICY, ttlSecondsAfterFinished=1)
    name = create(installed, body)[0]["metadata"]["name"]
    query = ("get", f"{JOBSETS}/{name}", f"--namespace={NAMESPACE}", "--ignore-not-found", "--output=name")
    wait_until(f"{name} to be cleaned up", lambda: not installed.kubectl(*query).stdout, timeout_s=120, every_s=1)
    wait_until("its pods to go", lambda: not pods(installed, name), timeout_s=60, every_s=0.5)
    assert recorded(installed, name) == []


def test_deleting_the_jobset_starts_no_preemption(run: TrainingRun) -> None:
    run.start()
    run.wait_for_step(5)
    run.delete()
    assert run.look().preemptions == ()


def test_a_restart_after_a_failure_starts_no_preemption_and_counts(run: TrainingRun) -> None:
    def impatient(jobset: Json) -> None:
        # The survivor fails at once, as its collectives do, and then waits in JAX's own shutdown for its dead peer.
        jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = (
            10
        )

    run.start(impatient)
    pods = run.wait_for_trainers(5)
    # The failure: out of memory, say. The rest of the gang is ended by JobSet, with SIGTERM, to start again.
    trainer_process(run, pods[1].name).kill()
    wait_until(f"{run.name} to be restarted", lambda: bool(run.look().restarts), timeout_s=60, every_s=1)
    run.wait_for_pods()
    snapshot = run.look()
    assert (snapshot.restarts, snapshot.restarts_counted, snapshot.preemptions) == (1, 1, ())
    end_at_once(run)


def test_a_jobset_without_the_label_is_left_alone(installed: Cluster, images: Images) -> None:
    run = training_run(installed, images, "no-label", policy=None)
    manifest = run.manifest()
    run.start()
    try:
        wait_until("a pod of no-label", lambda: bool(run.look().pods), timeout_s=60, every_s=1)
        pods = installed.kubectl(
            *("get", "pods", f"--namespace={NAMESPACE}", f"--selector=jobset.sigs.k8s.io/jobset-name={run.name}"),
            "--output=json",
        )
        for pod in json.loads(pods.stdout)["items"]:
            names = [entry["name"] for entry in pod["spec"]["containers"][0]["env"]]
            assert [name for name in names if name.startswith(ENV_PREFIX)] == []
            assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["shared"]
            assert not [key for key in pod["metadata"].get("labels", {}) if key.startswith(GROUP)]
        jobset = run.look().workload or {}
        assert "failurePolicy" not in jobset["spec"] or "failurePolicy" in manifest["spec"]
    finally:
        run.delete()


@pytest.fixture
def observed(request: pytest.FixtureRequest, installed: Cluster, images: Images) -> Iterator[str]:
    """The name of a small gang that is only observed: nobody is told, so that it goes on whatever is seen."""

    def observe(spec: Json) -> None:
        spec["mode"] = "Observe"

    apply_policy(installed, "observe", namespace=NAMESPACE, change=observe)
    name = "observed-" + str(request.node.originalname.partition("_")[2][:12].strip("_").replace("_", "-"))
    workers = replicated_job("workers", container("train", images.trainer, FAILS_WHEN_TOLD), pods=2)
    # A failure that its Job mends by itself, with another pod.
    mended = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [FAILURE]}}
    workers["template"]["spec"]["podFailurePolicy"] = {"rules": [mended]}
    stored = create(installed, jobset(name, workers, policy="observe"))[0]["metadata"]["name"]
    yield stored
    installed.kubectl("delete", f"{JOBSETS}/{stored}", f"--namespace={NAMESPACE}", "--wait=false")


@pytest.fixture
def maintained(installed: Cluster) -> Iterator[Cluster]:
    """The cluster, with a maintenance ahead of every node."""
    schedule(installed, 3000)
    yield installed
    call_off(installed)


def pods(cluster: Cluster, gang: str) -> list[Json]:
    found: list[Json] = get(cluster, "pods", f"--selector={JOBSET_LABEL_NAME}={gang}")["items"]
    return found


def running(cluster: Cluster, gang: str) -> list[str]:
    """Names of the pods that run, by their place in the gang."""
    alive = [item for item in pods(cluster, gang) if "deletionTimestamp" not in item["metadata"]]
    return sorted(item["metadata"]["name"] for item in alive if item["status"].get("phase") == "Running")


def both(cluster: Cluster, gang: str, but: Sequence[str] = ()) -> list[str]:
    """Waits until two pods run, none of which is one of these; returns their names."""
    names: list[str] = []

    def run() -> bool:
        names[:] = running(cluster, gang)
        return len(names) == 2 and not {*names} & {*but}

    wait_until(f"the pods of {gang} to run", run, timeout_s=60, every_s=0.5, hint=lambda: str(names))
    return names


def began_at(spec: Json) -> float:
    """When what a Preemption is about was seen, in seconds since the epoch; signals that join it don't change that."""
    return datetime.datetime.fromisoformat(spec["observedAt"]).timestamp()


def recorded(cluster: Cluster, gang: str) -> list[Json]:
    found = get(cluster, f"preemptions.{GROUP}")["items"]
    specs = [item["spec"] for item in found if item["spec"]["jobSet"]["name"] == gang]
    return sorted(specs, key=lambda spec: int(spec["epoch"]))


def test_earlier_signals_and_scaling_down_start_no_preemption(maintained: Cluster, observed: str) -> None:
    both(maintained, observed)
    smaller = json.dumps({"spec": {"parallelism": 1, "completions": 1}})
    maintained.kubectl("patch", "job", f"{observed}-workers-0", f"--namespace={NAMESPACE}", "--patch", smaller)
    wait_until("one pod to go", lambda: len(running(maintained, observed)) == 1, timeout_s=60, every_s=0.5)
    # What comes next is seen after all that: a maintenance that is moved is a new signal.
    moved_at = time.time()
    schedule(maintained, 1500)
    wait_until("the record of it", lambda: bool(recorded(maintained, observed)), timeout_s=60, every_s=0.5)
    (spec,) = recorded(maintained, observed)
    assert began_at(spec) > moved_at - 2
    assert (spec["epoch"], spec["cause"], spec["pods"]) == (1, "Maintenance", running(maintained, observed))


def test_repair_deletion_and_operator_death_start_no_preemption(maintained: Cluster, observed: str) -> None:
    # The Job mends a failure by itself, with a pod that is of the same attempt.
    first, second = both(maintained, observed)
    fail = ("python", "-c", "import os, signal; os.kill(1, signal.SIGUSR1)")
    # It may take along the command that causes it, before that can say so.
    maintained.kubectl("exec", first, f"--namespace={NAMESPACE}", "--", *fail, check=False)
    third, same = both(maintained, observed, but=[first])
    assert same == second

    # JobSet makes a Job that was deleted again.
    maintained.kubectl("delete", "job", f"{observed}-workers-0", f"--namespace={NAMESPACE}", "--wait=false")
    latest = both(maintained, observed, but=[second, third])

    # A replica that starts finds the maintenance, which was there before all of these pods; though its owner has
    # written something else of the nodes since, which is all that the API server tells of when.
    maintained.kubectl("label", "nodes", "--all", "--overwrite", "example.com/pool=another")
    operator.restart_abruptly(maintained)
    operator.ready(maintained)
    maintained.kubectl("label", "nodes", "--all", "example.com/pool-")
    moved_at = time.time()
    schedule(maintained, 1500)
    wait_until("the record of what is new", lambda: bool(recorded(maintained, observed)), timeout_s=60, every_s=0.5)
    (spec,) = recorded(maintained, observed)
    assert began_at(spec) > moved_at - 2
    assert (spec["epoch"], spec["cause"], spec["pods"]) == (1, "Maintenance", latest)


def test_suspension_is_recorded_and_returning_pods_can_be_disrupted_again(maintained: Cluster, observed: str) -> None:
    def suspend(value: bool) -> None:
        patch = json.dumps({"spec": {"suspend": value}})
        resource = f"{JOBSETS}/{observed}"
        maintained.kubectl("patch", resource, f"--namespace={NAMESPACE}", "--type=merge", "--patch", patch)

    both(maintained, observed)
    suspend(True)
    wait_until("the pods to go", lambda: not pods(maintained, observed), timeout_s=60, every_s=0.5)
    wait_until("the record of it", lambda: bool(recorded(maintained, observed)), timeout_s=60, every_s=0.5)
    assert [spec["cause"] for spec in recorded(maintained, observed)] == ["Suspension"]

    # Their attempt is the same one: only the preemption's number tells the two apart.
    suspend(False)
    names = both(maintained, observed)
    schedule(maintained, 1500)
    wait_until("the second record", lambda: len(recorded(maintained, observed)) == 2, timeout_s=60, every_s=0.5)
    spec = recorded(maintained, observed)[1]
    assert (spec["epoch"], spec["cause"], spec["pods"]) == (2, "Maintenance", names)
