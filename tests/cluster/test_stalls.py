"""A trainer that is stopped is named where a user looks, and the gang starts again if the policy says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
import pytest

from demo import install
from demo.snapshot import Json
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.names import GROUP, Env
from tests.cluster.conftest import NAMESPACE, training_run
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

POLICY = "stalls"
MIDDLE, EVERY = 20, 10
#: Longer than the pods of a start come one after the other.
LIMIT_S = 15.0
#: In which a stall is told at the latest, beside what a busy machine takes.
TOLD_S = 30.0


@pytest.fixture
def run(installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    def change(spec: Json) -> None:
        spec["stalls"] = {"afterSeconds": LIMIT_S, "action": "Restart"}
        spec["checkpoint"]["everySteps"] = EVERY

    apply_policy(installed, POLICY, namespace=NAMESPACE, change=change)
    made = training_run(installed, images, POLICY, POLICY)
    yield made
    made.delete()


def test_a_stopped_trainer_is_named_and_the_gang_restarts(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    stopped = run.wait_for_trainers(MIDDLE)[1]
    trainer_of(stopped.name).suspend()
    said: list[str] = []

    def told() -> bool:
        status, message = progressing(run)
        said.extend([message] if status == "False" else [])
        return bool(said)

    wait_until("the policy to say so", told, timeout_s=LIMIT_S + TOLD_S, every_s=0.2)
    assert f"process 1 ({stopped.name})" in said[0]
    assert "in training after step" in said[0]
    query = ("get", "events", f"--namespace={NAMESPACE}", "--field-selector=reason=TrainingStalled", "--output=name")
    wait_until("the Event", lambda: bool(run.cluster.kubectl(*query).stdout), timeout_s=30)
    run.wait_for_end()  # the kubelet kills the stopped process when its grace period is over
    assert progressing(run)[0] == "True"
    snapshot = run.look()
    assert (snapshot.restarts, snapshot.restarts_counted) == (1, 0)
    # The stopped process did not write down its last steps. Everything that was written down is equal.
    differences = run.compare(undisturbed, most=2 * run.steps).differences
    assert [found for found in differences if not found.endswith("was not recorded")] == []


def progressing(run: TrainingRun) -> tuple[str, str]:
    """Status and message of the policy's condition."""
    policies = run.cluster.listed(f"checkpointpolicies.{GROUP}", namespace=NAMESPACE)
    (policy,) = [each for each in policies if each["metadata"]["name"] == POLICY]
    conditions = policy.get("status", {}).get("conditions", [])
    found = [each for each in conditions if each["type"] == "Progressing"]
    return (found[0]["status"], found[0]["message"]) if found else ("", "")


def trainer_of(pod: str) -> psutil.Process:
    """The training process of a pod, on this machine."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(Env.POD_NAME) == pod and "train.py" in " ".join(process.cmdline()):
                return process
    raise AssertionError(f"no training process of {pod} on this machine")
