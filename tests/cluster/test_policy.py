"""What the operator says on a policy, and what it refuses at a JobSet's creation."""

from __future__ import annotations

import json

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun
from tests.cluster.conftest import NAMESPACE, POLICY, training_run
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def conditions(cluster: Cluster) -> dict[str, str]:
    found = cluster.kubectl(
        "get", f"checkpointpolicies.gracepoint.dev/{POLICY}", f"--namespace={NAMESPACE}", "--output=json"
    )
    status: Json = json.loads(found.stdout).get("status", {})
    return {condition["type"]: condition["status"] for condition in status.get("conditions", [])}


def test_a_policy_says_whether_a_save_would_fit_the_grace_period(run: TrainingRun) -> None:
    run.start()
    run.wait_for_step(10)
    wait_until(
        "FitsGrace on the policy",
        lambda: conditions(run.cluster).get("FitsGrace") == "True",
        timeout_s=30,
        hint=lambda: str(conditions(run.cluster)),
    )
    assert conditions(run.cluster)["Ready"] == "True"


def test_a_jobset_that_contradicts_the_release_contract_is_refused_with_the_fix(
    installed: Cluster, images: Images
) -> None:
    run = training_run(installed, images, "on-failure")

    def in_place(jobset: Json) -> None:
        pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        pod["restartPolicy"] = "OnFailure"

    with pytest.raises(ClusterError, match="restartPolicy.*OnFailure.*Never"):
        run.start(in_place)


def test_a_jobset_that_names_no_policy_there_is_is_refused(installed: Cluster, images: Images) -> None:
    run = training_run(installed, images, "no-policy", policy="absent")
    with pytest.raises(ClusterError, match="absent"):
        run.start()
