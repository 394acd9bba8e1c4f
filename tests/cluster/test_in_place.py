"""A JobSet that restarts in place, by JobSet's own agent: a crash leaves it where it is, and a notice makes it leave.

Only for a JobSet that has this (``conftest``). The nodes' Kubernetes, 1.34, can restart a single container in place, so
the agent starts the training as its child.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator

import pytest

from demo import install, nodes, records
from demo.snapshot import Json
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from tests.cluster.conftest import MARK, NAMESPACE, training_run
from tests.cluster.machine import processes_of
from tests.testcluster import parts
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.controllers, pytest.mark.timeout(900)]

CRASHED = 10
AGENT = "in-place-restart-agent"
SAVED, UNSAVED = 77, 78
#: What the agent may do: note its attempt at its pod, and watch its JobSet.
ROLE = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
    {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get", "list", "watch"]},
]


@pytest.fixture
def run(installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    """A run that restarts in place, not started."""
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": AGENT, "namespace": NAMESPACE}}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": AGENT}
    account = {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}
    items = [
        {**role, "kind": "Role", "rules": ROLE},
        {**role, "kind": "RoleBinding", "roleRef": reference, "subjects": [account]},
    ]
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    installed.kubectl("apply", "--filename=-", stdin=made)
    run = training_run(installed, images, "in-place")
    yield run
    run.delete()


def with_agent(run: TrainingRun, jobset: Json) -> None:
    """Lets JobSet's agent start the training, and restart it in place if it fails without a save."""
    tools = run.cluster.shared_dir / f"agent-{MARK}"
    tools.mkdir(mode=0o755)
    shutil.copy2(parts.program(AGENT, parts.NEWEST_JOBSET), tools)
    jobset["spec"]["failurePolicy"] = {"maxRestarts": 3, "restartStrategy": "InPlaceRestart"}
    pod = run.form.pod_template([jobset])["spec"]
    pod["automountServiceAccountToken"] = True
    (container,) = pod["containers"]
    places = {"JOBSET_NAME": "metadata.labels['jobset.sigs.k8s.io/jobset-name']", "POD_NAME": "metadata.name"}
    container["env"] += [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in places.items()),
        {"name": "WORKER_COMMAND", "value": shlex.join(["exec", "python", "-u", "train.py", *container.pop("args")])},
    ]
    container |= {
        "command": [f"/shared/{tools.name}/{AGENT}"],
        "restartPolicy": "Never",
        "restartPolicyRules": [
            {"action": "Restart", "exitCodes": {"operator": "NotIn", "values": [0, SAVED, UNSAVED]}},
        ],
    }


def restarts(run: TrainingRun) -> dict[str, int]:
    """How often the trainer of each pod was restarted in place, by the pods' UIDs."""
    query = ("get", "pods", f"--namespace={NAMESPACE}", f"--selector={run.form.name_label}={run.name}")
    pods = json.loads(run.cluster.kubectl(*query, "--output=json").stdout)["items"]
    return {
        pod["metadata"]["uid"]: status["restartCount"]
        for pod in pods
        for status in pod.get("status", {}).get("containerStatuses", [])
    }


def trains_again(run: TrainingRun) -> bool:
    return any(step.attempt == 1 and step.step >= CRASHED for step in records.read(run.output))


def test_a_crash_restarts_in_place_and_a_notice_moves_the_gang(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start(lambda jobset: with_agent(run, jobset))
    homes = [pod.node for pod in run.wait_for_trainers(CRASHED)]
    before = restarts(run)
    assert set(before.values()) == {0}
    processes_of(run, "train.py")[0].kill()

    def restarted() -> bool:
        return restarts(run) == dict.fromkeys(before, 1)

    wait_until("both trainers to restart in their pods", restarted, timeout_s=90, hint=lambda: str(restarts(run)))
    # It begins anew, as nothing was saved yet.
    wait_until("the second attempt to train", lambda: trains_again(run), timeout_s=120, every_s=0.5)
    assert [pod.node for pod in run.wait_for_pods()] == homes
    assert run.look().restarts == 0

    nodes.taint(run.cluster, homes[0])
    assert run.wait_for_phase(Phase.COMMITTED)["status"]["stepsLost"] == 0
    run.wait_for_record("that it trains again", lambda status: "restoredStep" in status, timeout_s=120)
    assert homes[0] not in {pod.node for pod in run.wait_for_pods()}
    assert not set(restarts(run)) & set(before), "the pods are those of before"
    nodes.untaint(run.cluster, homes[0])
    run.wait_for_end(timeout_s=300)
    assert (run.look().restarts, run.look().restarts_counted) == (1, 0)
    # A trainer that is killed does not write down its last steps. Everything that was written down is equal.
    differences = run.compare(undisturbed, most=run.steps * 2).differences
    assert [found for found in differences if not found.endswith("was not recorded")] == []
