"""The release contract on a real API server: with JobSet's own webhooks beside ours, and Kubernetes' rules for Jobs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest

from demo.snapshot import Json
from gracepoint.wire.names import JOBSET_LABEL_UID, TOKEN_DIRECTORY
from tests.cluster.conftest import NAMESPACE, POLICY
from tests.cluster.small import SLEEP, container, create, jobset, replicated_job
from tests.testcluster.api import Cluster, ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


def job(body: Json) -> Json:
    found: Json = body["spec"]["replicatedJobs"][0]["template"]["spec"]
    return found


def pod(body: Json) -> Json:
    found: Json = job(body)["template"]["spec"]
    return found


def bare(body: Json) -> None:
    """A JobSet with as little in it as JobSet takes."""
    del job(body)["parallelism"], job(body)["completions"]
    del pod(body)["terminationGracePeriodSeconds"]


def own_failure_policies(body: Json) -> None:
    body["spec"]["failurePolicy"] = {
        "maxRestarts": 9,
        "restartStrategy": "BlockingRecreate",
        "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]}],
    }
    job(body)["podFailurePolicy"] = {
        "rules": [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}},
            {"action": "Count", "onExitCodes": {"operator": "NotIn", "values": [1]}},
        ]
    }
    job(body)["podReplacementPolicy"] = "Failed"


def everything_said(body: Json) -> None:
    job(body).update(backoffLimit=0, completionMode="Indexed")
    pod(body).update(restartPolicy="Never", terminationGracePeriodSeconds=600)
    body["spec"]["network"] = {"enableDNSHostnames": True, "subdomain": "mine"}


def on_the_hosts_network(body: Json) -> None:
    pod(body)["hostNetwork"] = True


def with_a_native_sidecar(body: Json) -> None:
    pod(body)["initContainers"] = [container("mesh", "i", SLEEP, restartPolicy="Always")]


def with_own_volumes(body: Json) -> None:
    pod(body)["volumes"] = [{"name": "data", "emptyDir": {}}]
    pod(body)["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]


def suspended(body: Json) -> None:
    body["spec"]["suspend"] = True


def several(body: Json) -> None:
    body["spec"]["replicatedJobs"].append(replicated_job("second", container("train", "i", SLEEP)))
    body["spec"]["replicatedJobs"][1]["dependsOn"] = [{"name": "workers", "status": "Ready"}]


@pytest.mark.parametrize(
    "change",
    [
        bare,
        own_failure_policies,
        everything_said,
        on_the_hosts_network,
        with_a_native_sidecar,
        with_own_volumes,
        suspended,
        several,
    ],
)
def test_what_is_taken_is_valid_for_all_and_done_with_after_once(
    change: Callable[[Json], None], installed: Cluster
) -> None:
    body = jobset("taken", replicated_job("workers", container("train", "i", SLEEP), pods=2), policy=POLICY)
    change(body)
    once, said = create(installed, body, "--dry-run=server")
    assert not warnings_in(said)
    # As exported by one cluster and applied to another.
    exported = {key: once[key] for key in ("apiVersion", "kind", "spec")}
    kept = {key: once["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}
    again, said = create(installed, {**exported, "metadata": kept}, "--dry-run=server")
    assert not warnings_in(said)
    assert again["spec"] == once["spec"]
    assert again["metadata"]["annotations"] == once["metadata"]["annotations"]
    for part in once["spec"]["replicatedJobs"]:
        # JobSet takes templates that Kubernetes refuses when the Job is made, long after.
        made = {"apiVersion": "batch/v1", "kind": "Job", **copy.deepcopy(part["template"])}
        # As JobSet makes it. A Job without labels would get those of its pods, and be taken for one by itself.
        made["metadata"] = {"name": "trial", "namespace": NAMESPACE, "labels": {JOBSET_LABEL_UID: "trial"}}
        create(installed, made, "--dry-run=server")


def warnings_in(said: str) -> list[str]:
    """The warnings of a creation, without those that these jobs deserve."""
    expected = ("found no volume at", "are taken for processes", "found Count")
    return [line for line in said.splitlines() if "Warning" in line and not any(part in line for part in expected)]


def waits_for_the_end(body: Json) -> None:
    several(body)
    body["spec"]["replicatedJobs"][1]["dependsOn"][0]["status"] = "Complete"


def by_the_nodes_resolver(body: Json) -> None:
    pod(body).update(hostNetwork=True, dnsPolicy="ClusterFirst")


def over_the_token(body: Json) -> None:
    with_own_volumes(body)
    pod(body)["containers"][0]["volumeMounts"][0]["mountPath"] = TOKEN_DIRECTORY


def disruptions_ignored(body: Json) -> None:
    job(body)["podFailurePolicy"] = {"rules": [{"action": "Ignore", "onPodConditions": DISRUPTED}]}


def pods_one_after_another(body: Json) -> None:
    job(body).update(parallelism=1, completions=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (waits_for_the_end, "replicatedJobs[1].dependsOn[0].status: found Complete"),
        (by_the_nodes_resolver, "dnsPolicy: found ClusterFirst"),
        (over_the_token, f"mountPath: found {TOKEN_DIRECTORY}"),
        (disruptions_ignored, "podFailurePolicy.rules[0].action: found Ignore for DisruptionTarget"),
        (pods_one_after_another, "parallelism: found 1, expected 4"),
    ],
)
def test_what_contradicts_is_refused_at_once_with_the_field_and_the_fix(
    change: Callable[[Json], None], words: str, installed: Cluster
) -> None:
    body = jobset("refused", replicated_job("workers", container("train", "i", SLEEP), pods=2), policy=POLICY)
    change(body)
    done = installed.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(body), check=False)
    assert words in done.stderr
    assert ", expected " in done.stderr


def test_unreadable_jobset_is_refused_by_name(installed: Cluster) -> None:
    body = jobset("shape", replicated_job("workers", container("train", "i", SLEEP)), policy=POLICY)
    body["spec"]["replicatedJobs"] = "many"
    with pytest.raises(ClusterError, match=r"JobSet"):
        create(installed, body, "--dry-run=server", "--validate=false")
