"""Evictions on a real API server: who waits, for how long, and who never does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import apply_policy
from gracepoint.wire.names import JOBSET_LABEL_NAME
from tests.cluster.conftest import NAMESPACE
from tests.cluster.operator import stopped
from tests.cluster.small import JOBSETS, OURS, SLEEP, container, create, evict, get, jobset, replicated_job
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

POLICY = "eviction"
BOUND_S = 30
BUDGETS = "disruption budget"


@pytest.fixture(scope="module")
def policy(installed: Cluster) -> str:
    def short(spec: Json) -> None:
        spec["evictionHold"] = {"boundSeconds": BOUND_S}

    apply_policy(installed, POLICY, namespace=NAMESPACE, change=short)
    return POLICY


@pytest.fixture(scope="module")
def gang(installed: Cluster, images: Images, policy: str) -> Iterator[str]:
    """A JobSet whose processes listen to nobody, so that nothing is ever saved."""
    body = jobset("held", replicated_job("workers", container("train", images.trainer, SLEEP), pods=2), policy=policy)
    name = create(installed, body)[0]["metadata"]["name"]
    yield name
    installed.kubectl("delete", f"{JOBSETS}/{name}", f"--namespace={NAMESPACE}", "--wait=false")


def running(cluster: Cluster, gang: str) -> list[Json]:
    """Waits for both pods of the gang."""
    pods: list[Json] = []

    def both() -> bool:
        pods[:] = [
            pod
            for pod in get(cluster, "pods", f"--selector={JOBSET_LABEL_NAME}={gang}")["items"]
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        return len(pods) == 2

    wait_until(f"the pods of {gang}", both, timeout_s=60, every_s=0.5, hint=lambda: str(len(pods)))
    return pods


def preemptions(cluster: Cluster, gang: str) -> list[Json]:
    return [
        item for item in get(cluster, "preemptions.gracepoint.dev")["items"] if item["spec"]["jobSet"]["name"] == gang
    ]


def budget(cluster: Cluster, selector: Json) -> str:
    """A PodDisruptionBudget that allows nothing, once Kubernetes knows what it is about."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"generateName": "none-", "namespace": NAMESPACE},
        # Of pods without a Deployment or the like, Kubernetes counts only a budget in this form.
        "spec": {"minAvailable": 9, "selector": {"matchLabels": selector}},
    }
    name: str = create(cluster, body)[0]["metadata"]["name"]

    def counted() -> bool:
        return bool(get(cluster, f"poddisruptionbudgets/{name}").get("status", {}).get("expectedPods"))

    wait_until(f"the budget {name} to count its pods", counted, timeout_s=60, every_s=0.5)
    return name


def test_pod_outside_a_gang_is_evicted_at_once_under_its_own_budget(installed: Cluster, images: Images) -> None:
    labels = {"app": "web"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "web-", "namespace": NAMESPACE, "labels": labels},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container("main", images.trainer, SLEEP)]},
    }
    name = create(installed, body)[0]["metadata"]["name"]
    installed.kubectl(
        "wait", f"pod/{name}", f"--namespace={NAMESPACE}", "--for=condition=Ready", "--timeout=60s", timeout_s=70
    )
    pdb = budget(installed, labels)
    said = evict(installed, name)
    assert BUDGETS in said
    assert OURS not in said
    installed.kubectl("delete", "poddisruptionbudget", pdb, f"--namespace={NAMESPACE}")
    assert evict(installed, name) == ""


def test_eviction_waits_for_the_save_up_to_the_bound(installed: Cluster, gang: str) -> None:
    first, second = (pod["metadata"]["name"] for pod in running(installed, gang))
    node = get(installed, f"pod/{first}")["spec"]["nodeName"]

    # Dry runs: refused by nobody, and told to nobody.
    drain = ("drain", node, "--dry-run=server", "--ignore-daemonsets", "--delete-emptydir-data", "--force")
    installed.kubectl(*drain, f"--pod-selector={JOBSET_LABEL_NAME}={gang}", "--timeout=30s")
    assert evict(installed, first, query="?dryRun=All") == ""
    assert preemptions(installed, gang) == []

    # A budget that allows nothing speaks for itself, and the gang trains on.
    pdb = budget(installed, {JOBSET_LABEL_NAME: gang})
    said = evict(installed, first)
    assert BUDGETS in said
    assert OURS not in said
    assert preemptions(installed, gang) == []
    installed.kubectl("delete", "poddisruptionbudget", pdb, f"--namespace={NAMESPACE}")

    # Now it counts.
    said = evict(installed, first)
    assert OURS in said, said
    assert "TooManyRequests" in said
    wait_until("the Preemption", lambda: bool(preemptions(installed, gang)), timeout_s=10, every_s=0.2)
    (record,) = preemptions(installed, gang)
    assert (record["spec"]["cause"], record["spec"]["signal"]) == ("Drain", "eviction of the pod")
    attempted_at = record["spec"]["evictionAttemptedAt"]

    # The next node is drained while that is under way, and joins it.
    said = evict(installed, second)
    assert OURS in said, said

    def pods() -> list[str]:
        (only,) = preemptions(installed, gang)
        return [*only["spec"]["pods"]]

    wait_until("both pods in one Preemption", lambda: pods() == sorted([first, second]), timeout_s=10, every_s=0.5)

    # Nobody saves, so that the bound is what lets it through. Whichever replica is asked counts from the same moment.
    wait_until("the bound", lambda: evict(installed, first) == "", timeout_s=BOUND_S + 30, every_s=1)
    (record,) = preemptions(installed, gang)
    assert record["spec"]["evictionAttemptedAt"] == attempted_at


def test_an_eviction_continues_while_no_operator_runs(installed: Cluster, gang: str) -> None:
    name = running(installed, gang)[0]["metadata"]["name"]  # without the operator, no pod of a gang is made
    with stopped(installed):
        assert evict(installed, name) == ""
