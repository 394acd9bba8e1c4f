"""What in a pod template stands against leaving, being reached, and the token."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint.wire import names
from gracepoint.wire.names import Env
from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks import ContractViolation, release_contract
from tests.unit.operator.fakes.samples import (
    POLICY,
    Json,
    by_jobset,
    environment,
    injected,
    job_of,
    jobset,
    pod_of,
    policy_spec,
    replicated_job,
)


def refusal(body: Json, policy: CheckpointPolicySpec = POLICY) -> str:
    result = release_contract(body, policy)
    assert isinstance(result, ContractViolation)
    return result.message


def with_pod(**fields: Any) -> Json:
    body = jobset()
    pod_of(body).update(fields)
    return body


def with_container(**fields: Any) -> Json:
    body = jobset()
    pod_of(body)["containers"][0].update(fields)
    return body


def rule(operator: str, *codes: int) -> Json:
    return {"action": "Restart", "exitCodes": {"operator": operator, "values": list(codes)}}


def test_on_the_hosts_network_a_pod_is_given_the_clusters_names() -> None:
    body = injected(with_pod(hostNetwork=True))
    assert pod_of(body)["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "dnsPolicy" not in pod_of(injected(jobset()))


@pytest.mark.parametrize("dns", ["ClusterFirstWithHostNet", "None"])
def test_resolver_is_kept_on_the_host_network(dns: str) -> None:
    assert pod_of(injected(with_pod(hostNetwork=True, dnsPolicy=dns)))["dnsPolicy"] == dns


@pytest.mark.parametrize("dns", ["ClusterFirst", "Default"])
def test_on_the_hosts_network_the_nodes_own_resolver_is_refused(dns: str) -> None:
    message = refusal(with_pod(hostNetwork=True, dnsPolicy=dns))
    assert message.startswith(f"spec.replicatedJobs[0].template.spec.template.spec.dnsPolicy: found {dns}")
    assert "expected ClusterFirstWithHostNet" in message
    assert pod_of(injected(with_pod(dnsPolicy=dns)))["dnsPolicy"] == dns, "which is right on a network of its own"


def test_a_native_sidecar_and_init_containers_are_left_as_they_are() -> None:
    init = [
        {"name": "fetch", "image": "f", "env": [{"name": Env.DIRECTORY, "value": "/theirs"}]},
        {"name": "mesh", "image": "m", "restartPolicy": "Always"},
    ]
    body = injected(with_pod(initContainers=init))
    assert pod_of(body)["initContainers"] == init
    assert environment(pod_of(body)["containers"][0])[Env.DIRECTORY].startswith("/checkpoints/")
    rules = job_of(body)["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["containerName"] == "train", "how the sidecar ends says nothing"


def test_a_native_sidecar_cannot_be_the_container_that_trains() -> None:
    body = with_pod(initContainers=[{"name": "mesh", "image": "m", "restartPolicy": "Always"}])
    assert "found ['train'], expected the container 'mesh'" in refusal(
        body, policy_spec(training={"container": "mesh"})
    )


@pytest.mark.parametrize("restart", ["Always", "OnFailure"])
def test_a_container_that_is_restarted_in_place_by_itself_is_refused(restart: str) -> None:
    message = refusal(with_container(restartPolicy=restart))
    path = "spec.replicatedJobs[0].template.spec.template.spec.containers[train].restartPolicy"
    assert message.startswith(f"{path}: found {restart}, expected Never or nothing")


@pytest.mark.parametrize(
    ("rules", "refused"),
    [
        pytest.param([rule("In", 42)], False, id="another code"),
        pytest.param([rule("In", 42, 78)], True, id="one of ours"),
        pytest.param([rule("NotIn", 77, 78)], False, id="all but ours"),
        pytest.param([rule("NotIn", 77)], True, id="all but one of ours"),
        pytest.param([rule("NotIn", 1)], True, id="all but another"),
    ],
)
def test_rules_that_restart_the_container_in_place_must_not_match_our_codes(rules: list[Json], refused: bool) -> None:
    body = with_container(restartPolicy="Never", restartPolicyRules=rules)
    if refused:
        assert "containers[train].restartPolicyRules[0]: found Restart for exit codes" in refusal(body)
    else:
        assert pod_of(injected(body))["containers"][0]["restartPolicyRules"] == rules


def test_another_container_may_restart_as_it_likes() -> None:
    body = jobset()
    pod_of(body)["containers"].append({"name": "logs", "image": "l", "restartPolicy": "Always"})
    assert pod_of(injected(body))["containers"][1] == {"name": "logs", "image": "l", "restartPolicy": "Always"}


def test_the_name_of_the_tokens_volume_is_taken() -> None:
    message = refusal(with_pod(volumes=[{"name": "gracepoint-token", "emptyDir": {}}]))
    assert "template.spec.volumes[0].name: found gracepoint-token, expected another name" in message


def test_a_token_that_an_older_version_injected_is_renewed() -> None:
    once = injected(jobset())
    token = pod_of(once)["volumes"][-1]["projected"]["sources"][0]["serviceAccountToken"]
    token["expirationSeconds"] = 600
    assert pod_of(injected(once)) == pod_of(injected(jobset()))


@pytest.mark.parametrize("path", [names.TOKEN_DIRECTORY, f"{names.TOKEN_DIRECTORY}/"])
def test_where_the_token_is_mounted_nothing_else_can_be(path: str) -> None:
    """Kubernetes would refuse each pod, long after the JobSet was taken."""
    message = refusal(with_container(volumeMounts=[{"name": "mine", "mountPath": path}]))
    assert f"containers[train].volumeMounts[0].mountPath: found {names.TOKEN_DIRECTORY}, expected another" in message


def test_a_member_of_the_gang_that_waits_for_anothers_end_is_refused() -> None:
    body = jobset(replicated_job("first"), replicated_job("second"))
    body["spec"]["replicatedJobs"][1]["dependsOn"] = [{"name": "first", "status": "Complete"}]
    message = refusal(body)
    assert message.startswith("spec.replicatedJobs[1].dependsOn[0].status: found Complete, of first")
    assert "Set it to Ready" in message
    alone = policy_spec(training={"replicatedJobs": ["second"]})
    second = injected(body, alone)["spec"]["replicatedJobs"][1]
    assert second["dependsOn"], "preparing something first is no gang's matter"
    body["spec"]["replicatedJobs"][1]["dependsOn"][0]["status"] = "Ready"
    injected(body)


def test_more_rules_than_kubernetes_allows_are_refused_at_admission() -> None:
    rules = [{"action": "Count", "onExitCodes": {"operator": "In", "values": [n]}} for n in range(1, 20)]
    injected(jobset(replicated_job(podFailurePolicy={"rules": rules[:16]})))
    message = refusal(jobset(replicated_job(podFailurePolicy={"rules": rules})))
    assert "podFailurePolicy.rules: found 19 rules, expected at most 16 besides ours" in message


def test_a_suspended_jobset_is_completed_like_any_other_and_stays_suspended() -> None:
    """Kueue's way: completed at creation, and Kueue may still add to the template before it resumes the JobSet."""
    body = injected(jobset(suspend=True))
    assert body["spec"]["suspend"] is True
    resumed = by_jobset(body)
    resumed["spec"]["suspend"] = False
    pod_of(resumed)["nodeSelector"] = {"pool": "tpu"}
    assert injected(resumed) == resumed


def test_jobset_with_generated_name_is_completed_from_pod_fields() -> None:
    body = jobset()
    del body["metadata"]["name"]
    body["metadata"]["generateName"] = "llm-"
    env = environment(pod_of(injected(body))["containers"][0])
    assert env[Env.JOBSET_NAME] == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
    assert env[Env.DIRECTORY] == f"/checkpoints/$({Env.NAMESPACE})/$({Env.JOBSET_NAME})"
    assert env[Env.SUBDOMAIN] == f"$({Env.JOBSET_NAME})"


def test_a_grace_period_of_null_is_none() -> None:
    assert pod_of(injected(with_pod(terminationGracePeriodSeconds=None)))["terminationGracePeriodSeconds"] == 120
