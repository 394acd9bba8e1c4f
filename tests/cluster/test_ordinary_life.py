"""What ends pods without being a disruption starts no epoch; what carries no label is left alone."""

from __future__ import annotations

import json

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun
from gracepoint.wire.names import ENV_PREFIX, GROUP
from tests.cluster.conftest import NAMESPACE, training_run
from tests.cluster.machine import end_at_once, trainer_process
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
