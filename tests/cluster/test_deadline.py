"""What is chosen when there is too little time, as the cluster shows it to people."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from demo import install, nodes
from demo.snapshot import PROCESSES, Json
from gracepoint.deadline import Choice
from gracepoint.wire.messages import Phase
from gracepoint.wire.names import GROUP
from tests import slow_storage
from tests.cluster import slow_trainer
from tests.cluster.conftest import ENVIRONMENT, MARK, NAMESPACE, training_policy, training_run
from tests.cluster.machine import end_at_once
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

POLICY = "slow-storage"
SAVED_STEP = 30
GRACE_S = 30
#: What earlier starts have learnt of the storage, by its file: an emergency takes twice the grace period, and a save in
#: the background, which had begun before, a part of it. The state has about a megabyte.
LEARNT = {"streamed": [1e6 / (2 * GRACE_S)], "snapshot": [1e6 / 5]}


def fits_grace(cluster: Cluster) -> str:
    """What the policy says of the time that there is."""
    path = '{.status.conditions[?(@.type=="FitsGrace")].status}'
    resource = f"checkpointpolicies.{GROUP}/{POLICY}"
    return cluster.kubectl("get", resource, f"--namespace={NAMESPACE}", f"--output=jsonpath={path}").stdout


def test_running_save_is_promoted_when_the_current_step_does_not_fit(
    installed: Cluster, images: install.Images
) -> None:
    def periodic(spec: Json) -> None:
        spec["checkpoint"]["everySteps"] = SAVED_STEP

    training_policy(installed, POLICY, periodic)
    environment = {**ENVIRONMENT, "STUCK_STEP": str(SAVED_STEP)}
    # Slow enough to be told before the next save is due, which would have to wait for this one.
    run = training_run(installed, images, "promoted", POLICY, steps=10_000, pace=0.4, environment=environment)
    tools = installed.shared_dir / f"slow-{MARK}"
    tools.mkdir(mode=0o755)
    for module in (slow_trainer, slow_storage):
        shutil.copy(str(module.__file__), tools)

    def on_slow_storage(jobset: Json) -> None:
        pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        pod["terminationGracePeriodSeconds"] = GRACE_S
        (container,) = pod["containers"]
        container["command"] = ["python", "-u", f"/shared/{tools.name}/{Path(str(slow_trainer.__file__)).name}"]
        learnt = run.checkpoints / ".gracepoint-throughput"
        learnt.write_text(json.dumps({"version": 1, "processes": PROCESSES, "bytes_per_s": LEARNT}))
        learnt.chmod(0o666)

    try:
        run.start(on_slow_storage)
        node = run.wait_for_trainers(SAVED_STEP + 2)[0].node
        nodes.taint(installed, node, nodes.SCALE_DOWN_TAINT)  # the pod's own grace period
        status = run.wait_for_phase(Phase.PROMOTED)["status"]
        assert (status["choice"], status["step"]) == (Choice.PROMOTE, SAVED_STEP)
        assert status["stepsLost"] > 0
        assert f"the save of step {SAVED_STEP}, in progress, needs another" in status["choiceReason"]
        assert "s are left" in status["choiceReason"]
        assert f"step {SAVED_STEP}" in status["message"]
        record = run.wait_for_record("that it was restored", lambda status: status.get("restoredStep") is not None)
        assert record["status"]["restoredStep"] == SAVED_STEP
        wait_until("the policy to say so beforehand", lambda: fits_grace(installed) == "False", timeout_s=30)
        snapshot = run.look()
        assert (snapshot.restarts, snapshot.restarts_counted) == (1, 0)
    finally:
        end_at_once(run)
