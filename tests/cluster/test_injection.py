"""What pods find in themselves, and what people see of it, on JobSets as queues and meshes make them."""

from __future__ import annotations

import json

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import apply_policy
from gracepoint.wire.names import LABEL_POLICY, Env
from tests.cluster.conftest import NAMESPACE
from tests.cluster.small import JOBSETS, SLEEP, container, create, get, jobset, replicated_job
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

POLICY = "injection"
#: Leaves in its first life as after a save; in its second it tells what it finds.
_TELL = f"""
import json, os, socket, sys, time, urllib.parse
env = {{k: v for k, v in os.environ.items() if k.startswith("GRACEPOINT_")}}
if env["{Env.RESTART_ATTEMPT}"] == "0":
    sys.exit(77)
def address(host):
    for _ in range(60):
        try:
            return socket.gethostbyname(host)
        except OSError:
            time.sleep(0.5)
    sys.exit(f"cannot resolve {{host}}")
found = [address(urllib.parse.urlsplit(env["{Env.OPERATOR_URL}"]).hostname)]
if env["{Env.REPLICATED_JOB}"] == env["{Env.COORDINATOR_JOB}"]:  # its own name: it has to be there
    name, job = env["{Env.JOBSET_NAME}"], env["{Env.COORDINATOR_JOB}"]
    found.append(address(f"{{name}}-{{job}}-0-0.{{env['{Env.SUBDOMAIN}']}}"))
print(json.dumps({{"env": env, "found": found, "token": len(open(env["{Env.TOKEN_FILE}"]).read())}}))
"""


@pytest.fixture(scope="module")
def policy(installed: Cluster) -> str:
    def only_what_trains(spec: Json) -> None:
        spec["training"] = {"replicatedJobs": ["leader", "workers"], "container": "train"}

    apply_policy(installed, POLICY, namespace=NAMESPACE, change=only_what_trains)
    return POLICY


def test_queued_jobset_exits_uncounted_and_its_pods_are_complete(
    installed: Cluster, images: Images, policy: str
) -> None:
    """Made suspended under a generated name, with a job on the host's network, native sidecars, and one that does not
    train; then completed and resumed by another controller, as Kueue does."""
    train = container("train", images.trainer, _TELL, env=[{"name": Env.POD_UID, "value": "forged"}])
    mesh = container("mesh", images.trainer, SLEEP, restartPolicy="Always")
    body = jobset(
        "queued-",
        replicated_job("leader", train, hostNetwork=True),
        replicated_job("workers", train, pods=2, initContainers=[mesh]),
        replicated_job("board", container("main", images.trainer, SLEEP)),
        policy=policy,
        suspend=True,
        successPolicy={"operator": "All", "targetReplicatedJobs": ["leader", "workers"]},
    )
    made, said = create(installed, body)
    name = made["metadata"]["name"]
    try:
        assert f"Gracepoint sets {Env.POD_UID} by itself" in said
        told = json.loads(made["metadata"]["annotations"]["gracepoint.dev/injected"])
        assert told["policy"] == policy
        assert "spec.replicatedJobs[leader].template.spec.template.spec.dnsPolicy" in told["fields"]
        # What does not train is marked as a helper, and nothing else.
        assert [field for field in told["fields"] if "board" in field] == [
            "spec.replicatedJobs[board].template.spec.template.metadata"
        ]

        path = "/spec/replicatedJobs/{}/template/spec/template/spec/nodeSelector"
        resume: list[Json] = [
            *({"op": "add", "path": path.format(i), "value": {"kubernetes.io/os": "linux"}} for i in range(3)),
            {"op": "replace", "path": "/spec/suspend", "value": False},
        ]
        resource = f"{JOBSETS}/{name}"
        installed.kubectl("patch", resource, f"--namespace={NAMESPACE}", "--type=json", f"--patch={json.dumps(resume)}")
        status: Json = {}

        def over() -> bool:
            status.update(get(installed, resource).get("status", {}))
            return bool(status.get("terminalState"))

        wait_until(f"the end of {name}", over, timeout_s=120, every_s=1, hint=lambda: str(status))
        assert status["terminalState"] == "Completed", status
        assert (status["restarts"], status.get("restartsCountTowardsMax", 0)) == (1, 0)
        _everybody_found_all(installed, name)
    finally:
        installed.kubectl("delete", f"{JOBSETS}/{name}", f"--namespace={NAMESPACE}", "--wait=false")


def _everybody_found_all(cluster: Cluster, name: str) -> None:
    trainers = f"jobset.sigs.k8s.io/jobset-name={name},{LABEL_POLICY},gracepoint.dev/role!=helper"
    pods = get(cluster, "pods", f"--selector={trainers}")["items"]
    lives = {}
    for pod in pods:
        query = ("logs", pod["metadata"]["name"], "--container=train", f"--namespace={NAMESPACE}")
        said = json.loads(cluster.kubectl(*query).stdout)
        env = said["env"]
        assert env[Env.POD_UID] == pod["metadata"]["uid"], "what was forged"
        assert env[Env.JOBSET_NAME] == name
        assert env[Env.DIRECTORY].endswith(f"/{NAMESPACE}/{name}")
        assert env[Env.RESTART_ATTEMPT] == "1"
        assert said["token"] > 0
        assert json.loads(pod["metadata"]["annotations"]["gracepoint.dev/injected"])["container"] == "train"
        lives[env[Env.REPLICATED_JOB], env[Env.PROCESS_OFFSET], env[Env.PROCESS_COUNT]] = len(said["found"])
    assert len(pods) == 3
    assert lives == {("leader", "0", "3"): 2, ("workers", "1", "3"): 1}


def test_a_jobset_that_was_there_before_its_policy_is_named_on_it(
    installed: Cluster, images: Images, policy: str
) -> None:
    body = jobset(
        "early", replicated_job("workers", container("train", images.trainer, SLEEP)), policy=None, suspend=True
    )
    made, _ = create(installed, body)
    name = made["metadata"]["name"]
    try:
        installed.kubectl("label", f"{JOBSETS}/{name}", f"--namespace={NAMESPACE}", f"{LABEL_POLICY}={policy}")
        condition: Json = {}

        def told() -> bool:
            status = get(installed, f"checkpointpolicies.gracepoint.dev/{policy}").get("status", {})
            condition.update({c["type"]: c for c in status.get("conditions", [])}.get("Injected", {}))
            return condition.get("status") == "False"

        wait_until("Injected=False on the policy", told, timeout_s=30, every_s=0.5, hint=lambda: str(condition))
        assert condition["reason"] == "CreatedBeforePolicy"
        assert name in condition["message"]
    finally:
        installed.kubectl("delete", f"{JOBSETS}/{name}", f"--namespace={NAMESPACE}", "--wait=false")
