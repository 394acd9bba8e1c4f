"""What ends pods without being a disruption starts no epoch; what carries no label is left alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.names import ENV_PREFIX, GROUP, JOBSET_LABEL_NAME
from tests.cluster.conftest import NAMESPACE, training_run
from tests.cluster.machine import end_at_once, trainer_process
from tests.cluster.small import JOBSETS, SLEEP, container, create, get, jobset, replicated_job
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_success_starts_no_epoch(undisturbed: TrainingRun) -> None:
    snapshot = undisturbed.look()
    assert (snapshot.end, snapshot.restarts, snapshot.preemptions) == ("Completed", 0, ())


def test_cleaning_up_after_its_time_starts_no_epoch(run: TrainingRun) -> None:
    def soon(jobset: Json) -> None:
        jobset["spec"]["ttlSecondsAfterFinished"] = 1
        args = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
        args.append("--steps=3")

    run.start(soon)
    wait_until(f"{run.name} to be cleaned up", lambda: run.look().jobset is None, timeout_s=120, every_s=1)
    assert run.look().preemptions == ()


def test_deleting_the_jobset_starts_no_epoch(run: TrainingRun) -> None:
    run.start()
    run.wait_for_step(5)
    run.delete()
    assert run.look().preemptions == ()


def test_a_restart_after_a_failure_starts_no_epoch_and_counts(run: TrainingRun) -> None:
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
        jobset = run.look().jobset or {}
        assert "failurePolicy" not in jobset["spec"] or "failurePolicy" in manifest["spec"]
    finally:
        run.delete()


MAINTENANCE = "cloud.google.com/scheduled-maintenance-time"


@pytest.fixture
def observed(request: pytest.FixtureRequest, installed: Cluster, images: Images) -> Iterator[str]:
    """The name of a small gang that is only observed: nobody is told, so that it goes on whatever is seen."""

    def observe(spec: Json) -> None:
        spec["mode"] = "Observe"

    apply_policy(installed, "observe", namespace=NAMESPACE, change=observe)
    name = "observed-" + str(request.node.originalname.partition("_")[2][:12].strip("_").replace("_", "-"))
    workers = replicated_job("workers", container("train", images.trainer, SLEEP), pods=2)
    stored = create(installed, jobset(name, workers, policy="observe"))[0]["metadata"]["name"]
    yield stored
    installed.kubectl("delete", f"{JOBSETS}/{stored}", f"--namespace={NAMESPACE}", "--wait=false")


@pytest.fixture
def maintained(installed: Cluster) -> Iterator[Cluster]:
    """The cluster, with a maintenance ahead of every node."""
    schedule(installed, 3000)
    yield installed
    installed.kubectl("label", "nodes", "--all", f"{MAINTENANCE}-")


def schedule(cluster: Cluster, in_s: float) -> None:
    cluster.kubectl("label", "nodes", "--all", "--overwrite", f"{MAINTENANCE}={time.time() + in_s:.0f}")


def running(cluster: Cluster, gang: str) -> list[str]:
    pods = get(cluster, "pods", f"--selector={JOBSET_LABEL_NAME}={gang}")["items"]
    alive = [item for item in pods if "deletionTimestamp" not in item["metadata"]]
    return [item["metadata"]["name"] for item in alive if item["status"].get("phase") == "Running"]


def recorded(cluster: Cluster, gang: str) -> list[Json]:
    found = get(cluster, f"preemptions.{GROUP}")["items"]
    return [item["spec"] for item in found if item["spec"]["jobSet"]["name"] == gang]


def test_neither_a_signal_that_was_there_before_the_pods_nor_scaling_down_starts_an_epoch(
    maintained: Cluster, observed: str
) -> None:
    wait_until("the gang to run", lambda: len(running(maintained, observed)) == 2, timeout_s=60, every_s=0.5)
    smaller = json.dumps({"spec": {"parallelism": 1, "completions": 1}})
    maintained.kubectl("patch", "job", f"{observed}-workers-0", f"--namespace={NAMESPACE}", "--patch", smaller)
    wait_until("one pod to go", lambda: len(running(maintained, observed)) == 1, timeout_s=60, every_s=0.5)
    # What comes next is seen after all that: a maintenance that is moved is a new signal.
    schedule(maintained, 1500)
    wait_until("the record of it", lambda: bool(recorded(maintained, observed)), timeout_s=60, every_s=0.5)
    (spec,) = recorded(maintained, observed)
    assert (spec["epoch"], spec["cause"], spec["pods"]) == (1, "Maintenance", running(maintained, observed))


def test_suspending_is_recorded_as_that_and_not_as_the_deletion_of_pods(installed: Cluster, observed: str) -> None:
    wait_until("the gang to run", lambda: len(running(installed, observed)) == 2, timeout_s=60, every_s=0.5)
    suspended = json.dumps({"spec": {"suspend": True}})
    resource = f"{JOBSETS}/{observed}"
    installed.kubectl("patch", resource, f"--namespace={NAMESPACE}", "--type=merge", "--patch", suspended)
    pods = ("pods", f"--selector={JOBSET_LABEL_NAME}={observed}")
    wait_until("the pods to go", lambda: not get(installed, *pods)["items"], timeout_s=60, every_s=0.5)
    wait_until("the record of it", lambda: bool(recorded(installed, observed)), timeout_s=60, every_s=0.5)
    assert [spec["cause"] for spec in recorded(installed, observed)] == ["Suspension"]
