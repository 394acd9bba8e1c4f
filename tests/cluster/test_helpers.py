"""A pod that does not train, and without which its JobSet restarts: the gang saves before it goes."""

from __future__ import annotations

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import apply_policy
from gracepoint.wire.messages import Phase
from gracepoint.wire.names import JOBSET_LABEL_NAME, JOBSET_LABEL_REPLICATED_JOB
from tests.cluster.asking import ended, fresh, names
from tests.cluster.conftest import NAMESPACE, training_run
from tests.cluster.machine import end_at_once
from tests.cluster.small import OURS, SLEEP, container, evict, get, replicated_job
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

POLICY = "helped"


def test_drain_of_a_helper_waits_for_the_save_and_its_restart_does_not_count(
    installed: Cluster, images: Images
) -> None:
    def names_trainers(spec: Json) -> None:
        spec["training"] = {"replicatedJobs": ["workers"]}

    def with_helper(jobset: Json) -> None:
        helper = replicated_job("data", container("data", images.trainer, SLEEP))
        helper["template"]["spec"]["backoffLimit"] = 0
        jobset["spec"]["replicatedJobs"].append(helper)

    apply_policy(installed, POLICY, namespace=NAMESPACE, change=names_trainers)
    run = training_run(installed, images, "helped", POLICY, steps=100_000)
    run.start(with_helper)
    try:
        run.wait_for_step(5)
        selector = f"--selector={JOBSET_LABEL_NAME}={run.name},{JOBSET_LABEL_REPLICATED_JOB}=data"
        (pod,) = get(installed, "pods", selector)["items"]
        helper = pod["metadata"]["name"]
        known = names(run)
        assert OURS in evict(installed, helper)
        record = fresh(run, known)
        assert (record["spec"]["cause"], record["spec"]["pods"]) == ("Drain", [helper])
        record = ended(run, record["metadata"]["name"], Phase.COMMITTED)
        status = record["status"]
        assert status["stepsLost"] == 0
        assert status["acknowledgements"]["expected"] == 2, "the helper is no process"
        run.wait_for_step(status["step"] + 1)
        found = get(installed, f"jobset/{run.name}")["status"]
        assert (found["restarts"], found.get("restartsCountTowardsMax", 0)) == (1, 0)

        def started_again() -> bool:
            uids = {item["metadata"]["uid"] for item in get(installed, "pods", selector)["items"]}
            return len(uids) == 1 and pod["metadata"]["uid"] not in uids

        # JobSet makes each Job anew once its old one is gone, so the trainers may be faster.
        wait_until("the helper to start again", started_again, timeout_s=60, every_s=0.5)
    finally:
        end_at_once(run)
