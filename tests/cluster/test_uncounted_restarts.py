"""Real pods that do not train, for reasons that are not their programs', and what JobSet counts of it."""

from __future__ import annotations

import pytest

from demo.install import OPERATOR_NAMESPACE, ROOT, Images, wait_for_webhooks
from demo.snapshot import Json
from demo.training import apply_policy
from gracepoint.wire.names import DEFAULT_SAVED_EXIT_CODE, JOBSET_LABEL_NAME, JOBSET_LABEL_REPLICATED_JOB, Env
from tests.cluster.conftest import NAMESPACE, POLICY
from tests.cluster.small import JOBSETS, SLEEP, container, create, get, jobset, replicated_job
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

#: Leaves once, as after a save. JobSet's attempt is in the environment.
LEAVES = f"""
import os, sys, time
time.sleep(3)
if os.environ["{Env.RESTART_ATTEMPT}"] == "0":
    sys.exit({DEFAULT_SAVED_EXIT_CODE})
time.sleep(3600)
"""


def restarts(cluster: Cluster, name: str) -> tuple[int, int]:
    """All restarts of a JobSet, and those that count."""
    status = get(cluster, f"{JOBSETS}/{name}").get("status", {})
    return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)


def pods(cluster: Cluster, name: str, replicated: str) -> list[Json]:
    selector = f"--selector={JOBSET_LABEL_NAME}={name},{JOBSET_LABEL_REPLICATED_JOB}={replicated}"
    found: list[Json] = get(cluster, "pods", selector)["items"]
    return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def delete(cluster: Cluster, name: str) -> None:
    cluster.kubectl("delete", f"{JOBSETS}/{name}", f"--namespace={NAMESPACE}", "--wait=false")


def test_a_pod_that_its_kubelet_refuses_is_made_again_and_the_others_wait(installed: Cluster, images: Images) -> None:
    """More than its node has: nobody schedules it, as it names the node itself."""
    node = next(item["metadata"]["name"] for item in get(installed, "nodes")["items"])
    greedy = container("train", images.trainer, SLEEP, resources={"requests": {"cpu": "1000", "memory": "32Mi"}})
    body = jobset(
        "refused",
        replicated_job("waiting", container("train", images.trainer, SLEEP)),
        replicated_job("greedy", greedy, nodeName=node),
        policy=POLICY,
    )
    name = create(installed, body)[0]["metadata"]["name"]
    try:
        wait_until("the first pod to run", lambda: bool(pods(installed, name, "waiting")), timeout_s=60, every_s=0.5)
        (waiting,) = pods(installed, name, "waiting")
        seen: dict[str, Json] = {}

        def twice_refused() -> bool:
            seen.update({pod["metadata"]["uid"]: pod for pod in pods(installed, name, "greedy")})
            return sum(pod["status"].get("reason") == "OutOfcpu" for pod in seen.values()) >= 2

        wait_until("the kubelet to refuse two pods", twice_refused, timeout_s=120, every_s=0.5)
        (still,) = pods(installed, name, "waiting")
        assert still["metadata"]["uid"] == waiting["metadata"]["uid"]
        assert restarts(installed, name) == (0, 0)
    finally:
        delete(installed, name)


def test_pods_that_an_ordinary_sidecar_keeps_running_are_ended_with_consent(installed: Cluster, images: Images) -> None:
    installed.helm(
        *("upgrade", "gracepoint", str(ROOT / "charts" / "gracepoint"), f"--namespace={OPERATOR_NAMESPACE}"),
        *("--reuse-values", "--set=podDeletion.enabled=true", "--wait", "--timeout=120s"),
        timeout_s=150,
    )
    wait_for_webhooks(installed)

    def ends_sidecars(spec: Json) -> None:
        spec["sidecars"] = {"endWithTraining": True}

    apply_policy(installed, "sidecars", namespace=NAMESPACE, change=ends_sidecars)
    workers = replicated_job("workers", container("train", images.trainer, LEAVES), pods=2)
    workers["template"]["spec"]["template"]["spec"]["containers"].append(container("proxy", images.trainer, SLEEP))
    name = create(installed, jobset("sidecar", workers, policy="sidecars"))[0]["metadata"]["name"]
    try:

        def came_back() -> bool:
            phases = [pod["status"].get("phase") for pod in pods(installed, name, "workers")]
            return restarts(installed, name)[0] == 1 and phases == ["Running", "Running"]

        wait_until("the gang to come back", came_back, timeout_s=120, every_s=0.5)
        assert restarts(installed, name) == (1, 0)
    finally:
        delete(installed, name)
