"""A JobSet that restarts in place, by JobSet's own agent: a crash leaves it where it is, and what ends pods moves it.

Only for a JobSet that has this (``conftest``). Kubernetes 1.34 can restart a single container in place, so the agent
starts the training as its child. Newer ones can restart all containers of a pod, so the agent may also be a sidecar.
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from demo import install, nodes, records
from demo.snapshot import Json
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from gracepoint.wire.names import Env
from tests.cluster.conftest import MARK, NAMESPACE, training_run
from tests.cluster.elastic_run import suspend
from tests.cluster.machine import processes_of
from tests.testcluster import features, parts
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.controllers, pytest.mark.timeout(900)]

Form = Callable[[TrainingRun, Json], None]
CRASHED = 10
#: Each of them at a step by which the run has made progress since the one before.
DELETED, SUSPENDED = 10, 40
#: Seconds of a step: there is time to disturb the run twice, also where each command takes seconds.
PACE_S = 0.3
AGENT = "in-place-restart-agent"
SAVED, UNSAVED = 77, 78
#: What the agent may do: note its attempt at its pod, and watch its JobSet.
ROLE = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
    {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get", "list", "watch"]},
]


@pytest.fixture
def run(installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    """A run whose agent may do what it must, not started."""
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": AGENT, "namespace": NAMESPACE}}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": AGENT}
    account = {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}
    items = [
        {**role, "kind": "Role", "rules": ROLE},
        {**role, "kind": "RoleBinding", "roleRef": reference, "subjects": [account]},
    ]
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    installed.kubectl("apply", "--filename=-", stdin=made)
    run = training_run(installed, images, f"in-place-{secrets.token_hex(2)}", pace=PACE_S)
    yield run
    run.delete()


def child(run: TrainingRun, jobset: Json) -> None:
    """Lets the agent start the training. If the training fails without a save, its container restarts."""
    pod, agent = with_agent(run, jobset)
    (container,) = pod["containers"]
    command = shlex.join(["exec", "python", "-u", "train.py", *container.pop("args")])
    container["env"] += [*agent["env"], {"name": "WORKER_COMMAND", "value": command}]
    container |= {
        "command": agent["command"],
        "restartPolicy": "Never",
        "restartPolicyRules": restarted("Restart", unless=[0, SAVED, UNSAVED]),
    }


def sidecar(run: TrainingRun, jobset: Json) -> None:
    """Puts the agent beside the training. If one of the two fails without a save, both restart."""
    pod, agent = with_agent(run, jobset)
    (container,) = pod["containers"]
    container |= {
        "restartPolicy": "Never",
        "restartPolicyRules": restarted("RestartAllContainers", unless=[0, SAVED, UNSAVED]),
    }
    shared = ("image", "imagePullPolicy", "securityContext", "volumeMounts")
    pod["initContainers"] = [
        {
            "name": AGENT,
            **{field: container[field] for field in shared},
            **agent,
            "restartPolicy": "Always",
            # As in JobSet's example. It ends with 143 when the kubelet ends it after the training.
            "restartPolicyRules": restarted("RestartAllContainers", unless=[0]),
            # The training starts when the agents of all pods are there.
            "startupProbe": {
                "httpGet": {"path": "/barrier-is-down", "port": 8081},
                "periodSeconds": 1,
                "failureThreshold": 600,
            },
        }
    ]


def with_agent(run: TrainingRun, jobset: Json) -> tuple[Json, Json]:
    """Lets a JobSet restart in place. Returns the spec of its pods, and the agent's command and variables."""
    tools = run.cluster.shared_dir / f"agent-{MARK}"
    if not tools.exists():
        tools.mkdir(mode=0o755)
        shutil.copy2(parts.program(AGENT, parts.NEWEST_JOBSET), tools)
    jobset["spec"]["failurePolicy"] = {"maxRestarts": 3, "restartStrategy": "InPlaceRestart"}
    pod = run.form.pod_template([jobset])["spec"]
    pod["automountServiceAccountToken"] = True
    places = {"JOBSET_NAME": "metadata.labels['jobset.sigs.k8s.io/jobset-name']", "POD_NAME": "metadata.name"}
    environment = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in places.items()]
    return pod, {"command": [f"/shared/{tools.name}/{AGENT}"], "env": environment}


def restarted(action: str, *, unless: list[int]) -> list[Json]:
    return [{"action": action, "exitCodes": {"operator": "NotIn", "values": unless}}]


#: Where the agent can be.
FORMS = [pytest.param(child, id="child")]
if features.restarts_all_containers():
    FORMS.append(pytest.param(sidecar, id="sidecar"))


def pods_of(run: TrainingRun) -> list[Json]:
    query = ("get", "pods", f"--namespace={NAMESPACE}", f"--selector={run.form.name_label}={run.name}")
    found: list[Json] = json.loads(run.cluster.kubectl(*query, "--output=json").stdout)["items"]
    return found


def restarts(run: TrainingRun) -> dict[str, dict[str, int]]:
    """How often each container of each pod was restarted in place, by the pods' UIDs."""
    counts: dict[str, dict[str, int]] = {}
    for pod in pods_of(run):
        status: dict[str, Any] = pod.get("status", {})
        containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
        counts[pod["metadata"]["uid"]] = {container["name"]: container["restartCount"] for container in containers}
    return counts


def trains_again(run: TrainingRun) -> bool:
    return any(step.attempt == 1 and step.step >= CRASHED for step in records.read(run.output))


def trainer_in(run: TrainingRun, pod: str) -> psutil.Process:
    """The process that trains in a pod. The agent may be in its container."""
    return next(each for each in processes_of(run, "train.py") if each.environ().get(Env.POD_NAME) == pod)


@pytest.mark.parametrize("form", FORMS)
def test_a_crash_restarts_in_place_and_a_notice_moves_the_gang(
    form: Form, run: TrainingRun, undisturbed: TrainingRun
) -> None:
    run.start(lambda jobset: form(run, jobset))
    pods = run.wait_for_trainers(CRASHED)
    homes, before = [pod.node for pod in pods], restarts(run)
    assert all(set(counts.values()) == {0} for counts in before.values())
    # Process 0 survives, and with it the service of JAX that ends processes: JobSet has to restart it.
    trainer_in(run, pods[1].name).kill()

    def again() -> bool:
        return restarts(run) == {uid: dict.fromkeys(counts, 1) for uid, counts in before.items()}

    wait_until("all containers to restart in their pods", again, timeout_s=90, hint=lambda: str(restarts(run)))
    # It begins anew, as nothing was saved yet.
    wait_until("the second attempt to train", lambda: trains_again(run), timeout_s=120, every_s=0.5)
    assert [pod.node for pod in run.wait_for_pods()] == homes
    found = run.look()
    assert (found.restarts, found.preemptions) == (0, ())

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


if features.restarts_all_containers():  # otherwise the agent takes the training with it

    def test_a_deleted_pod_and_a_suspension_save_although_there_is_a_sidecar(
        run: TrainingRun, undisturbed: TrainingRun
    ) -> None:
        run.start(lambda jobset: sidecar(run, jobset))
        first = run.wait_for_trainers(DELETED)
        run.cluster.kubectl("delete", "pod", first[1].name, f"--namespace={NAMESPACE}", "--wait=false")
        saved(run, "PodDeletion", epoch=0)
        run.wait_for_record("that it trains again", lambda status: "restoredStep" in status, timeout_s=120)

        second = run.wait_for_trainers(SUSPENDED)
        assert not {pod.name for pod in first} & {pod.name for pod in second}
        suspend(run, True)
        saved(run, "Suspension", epoch=1)
        wait_until("the pods to go", lambda: not alive(run), timeout_s=90, every_s=0.5)
        suspend(run, False)
        run.wait_for_end(timeout_s=300)
        assert run.compare(undisturbed).differences == ()
        assert run.look().restarts_counted == 0
        assert all(set(counts.values()) == {0} for counts in restarts(run).values()), "a save restarted in place"


def alive(run: TrainingRun) -> bool:
    return any(pod.phase in ("Pending", "Running") for pod in run.look().pods)


def saved(run: TrainingRun, cause: str, *, epoch: int) -> None:
    record = run.wait_for_phase(Phase.COMMITTED, epoch=epoch, timeout_s=120)
    assert (record["spec"]["cause"], record["status"]["stepsLost"]) == (cause, 0)
