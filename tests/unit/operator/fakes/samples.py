"""JobSets as users write them, and what the webhooks are called with."""

from __future__ import annotations

import copy
from typing import Any

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.resources import CheckpointPolicy, CheckpointPolicySpec
from gracepoint_operator.webhooks import AdmissionSettings, Patched, inject_workload, release_contract

Json = dict[str, Any]

SETTINGS = AdmissionSettings(
    operator_url="https://gracepoint.system.svc:443", ca_certificate="-----BEGIN CERTIFICATE----- 1"
)


def policy_spec(**fields: Any) -> CheckpointPolicySpec:
    return CheckpointPolicySpec.model_validate(
        {"checkpoint": {"directory": "/checkpoints/{namespace}/{jobset}"}, **fields}
    )


def policy(name: str = "default", **fields: Any) -> CheckpointPolicy:
    return CheckpointPolicy.of(
        {
            "apiVersion": "gracepoint.dev/v1beta1",
            "kind": "CheckpointPolicy",
            "metadata": {"name": name, "namespace": "team"},
            "spec": policy_spec(**fields).to_json(),
        }
    )


def replicated_job(name: str = "workers", replicas: int = 2, pods: int = 1, **job: Any) -> Json:
    container: Json = {"name": "train", "image": "train:1", "command": ["python", "train.py"]}
    container["volumeMounts"] = [{"name": "checkpoints", "mountPath": "/checkpoints"}]
    volumes = [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}]
    return {
        "name": name,
        "replicas": replicas,
        "template": {
            "spec": {
                "parallelism": pods,
                "completions": pods,
                "template": {"spec": {"containers": [container], "volumes": volumes}},
                **job,
            }
        },
    }


def jobset(*jobs: Json, **spec: Any) -> Json:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "llm", "namespace": "team", "labels": {LABEL_POLICY: "default"}},
        "spec": {"replicatedJobs": list(jobs or (replicated_job(),)), **spec},
    }


def job_of(body: Json, index: int = 0) -> Json:
    job: Json = body["spec"]["replicatedJobs"][index]["template"]["spec"]
    return job


def pod_of(body: Json, index: int = 0) -> Json:
    pod: Json = job_of(body, index)["template"]["spec"]
    return pod


def environment(container: Json) -> Json:
    """Name to value, or to the field that it comes from."""
    return {
        v["name"]: v["value"] if "value" in v else v["valueFrom"]["fieldRef"]["fieldPath"] for v in container["env"]
    }


#: Has nothing but a folder of checkpoints.
POLICY = policy_spec()


def injected(body: Json, under: CheckpointPolicySpec = POLICY) -> Json:
    """The workload as the webhook makes it: with the release contract, and with what its pods get."""
    result = release_contract(body, under)
    assert isinstance(result, Patched), result
    return inject_workload(result.object, "default", under, SETTINGS)


def by_jobset(body: Json) -> Json:
    """The object as JobSet's own webhook makes it (v0.10, pkg/webhooks/jobset_webhook.go, Default)."""
    made = copy.deepcopy(body)
    spec = made["spec"]
    spec.setdefault("successPolicy", {"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    for job in spec["replicatedJobs"]:
        job["template"]["spec"].setdefault("completionMode", "Indexed")
        job["template"]["spec"]["template"]["spec"].setdefault("restartPolicy", "OnFailure")
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    for i, rule in enumerate((spec.get("failurePolicy") or {}).get("rules") or []):
        rule.setdefault("name", f"failurePolicyRule{i}")
    return made
