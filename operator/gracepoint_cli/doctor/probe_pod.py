"""A pod like those of a job, which checks the channel and the storage from where the job runs. Pure.

It has the image, the volumes, the service account and the variables of the job's pods, and none of their labels, so
that neither a controller nor the operator takes it for one of the gang. It asks for no accelerator. It writes its
result as the container's termination message, which is read from its status.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gracepoint.wire.names import Env
from gracepoint_cli.doctor.checks import CheckResult, CheckState
from gracepoint_operator.resources import Training
from gracepoint_operator.webhooks.training_jobs import Problems, gang

Json = dict[str, Any]

_LIVES_S = 120
_NO_CONTAINER = "it has no container that ended"
#: The result if the pod was ended in the middle of a check.
_LATE = (
    f"was not done after {_LIVES_S} s. The next check waits for something that does not answer: the storage, its "
    "metadata server, or the start of the container"
)
_MESSAGE = "/dev/termination-log"
#: Fields of the pod that decide where it may run and what it may reach.
_POD_FIELDS = (
    "affinity",
    "dnsConfig",
    "dnsPolicy",
    "hostNetwork",
    "imagePullSecrets",
    "nodeSelector",
    "runtimeClassName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "volumes",
)
_CONTAINER_FIELDS = ("image", "imagePullPolicy", "envFrom", "securityContext", "volumeMounts")
_KIND_OF_WORKLOAD = "app.kubernetes.io/component"


def probe_pod(workload: Json, training: Training) -> Json:
    """Returns the pod for a stored JobSet or Job.

    Raises:
        ValueError: No pods of the workload form a gang under its policy. The message says why.
    """
    problems = Problems()
    members = gang(json.loads(json.dumps(workload)), training, problems)
    if not members:
        raise ValueError("; ".join(problems))
    meta, member = workload["metadata"], members[0]
    pod, container = member.template["spec"], member.container
    known = {Env.JOBSET_NAME: meta["name"], Env.JOBSET_UID: meta.get("uid", "")}
    environment = []
    for variable in container.get("env") or ():
        if variable["name"] in known:
            variable = {"name": variable["name"], "value": known[variable["name"]]}
        elif "metadata.labels" in json.dumps(variable.get("valueFrom") or {}):
            variable = {"name": variable["name"], "value": "0"}
        environment.append(variable)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{meta['name'][:40]}-doctor-",
            "namespace": meta["namespace"],
            "labels": {"app.kubernetes.io/part-of": "gracepoint", _KIND_OF_WORKLOAD: "doctor"},
        },
        "spec": {
            **{name: pod[name] for name in _POD_FIELDS if name in pod},
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIVES_S,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": pod.get("automountServiceAccountToken", True),
            "containers": [
                {
                    **{name: container[name] for name in _CONTAINER_FIELDS if name in container},
                    "name": "doctor",
                    "command": ["python3", "-m", "gracepoint", "check", f"--json={_MESSAGE}"],
                    "env": [*environment, {"name": "JAX_PLATFORMS", "value": "cpu"}],
                    "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
                }
            ],
        },
    }


def ended(pod: Json) -> bool:
    """Returns whether the pod has come to its end."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def waits_for(pod: Json) -> str:
    """Returns what a pod that does not run waits for. Empty if it does not say."""
    status = pod.get("status") or {}
    for item in status.get("containerStatuses") or ():
        if waiting := (item.get("state") or {}).get("waiting"):
            return f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip()
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") != "True":
            return str(condition.get("message") or "a node")
    return ""


def results(pod: Json) -> Sequence[CheckResult]:
    """Returns what the pod has found."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    late = f"the pod {name} {_LATE}" if status.get("reason") == "DeadlineExceeded" else ""
    for item in status.get("containerStatuses") or ():
        terminated = (item.get("state") or {}).get("terminated") or {}
        try:
            found = [
                CheckResult(f"pod: {check['name']}", CheckState(check["state"]), str(check["message"]))
                for check in json.loads(terminated.get("message") or "")
            ]
        except (ValueError, KeyError, TypeError):
            text = late or (
                f"the pod {name} ended with exit code {terminated.get('exitCode')} and no result. The image needs "
                "python3 and this version of the library (python3 -m gracepoint check)"
            )
            return [CheckResult("pod", CheckState.FAILED, text)]
        return [*found, *([CheckResult("pod", CheckState.FAILED, late)] if late else [])]
    return [CheckResult("pod", CheckState.FAILED, late or f"the pod {name}: {status.get('message') or _NO_CONTAINER}")]
