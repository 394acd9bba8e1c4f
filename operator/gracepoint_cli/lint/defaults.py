"""What the API server fills into a Job before it calls webhooks, where that changes what they do. Pure.

A Job that is read from the cluster has these values. A Job of a file does not. The values of a JobSet's Jobs are
filled in after the webhooks, so they do not count.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from gracepoint_cli.lint.findings import Finding, Severity
from gracepoint_operator.webhooks.training_jobs import is_job

Json = dict[str, Any]

#: From k8s.io/kubernetes/pkg/apis/batch/v1 and core/v1 (defaults).
_JOB = {"completionMode": "NonIndexed"}
_POD = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 30}


def is_stored(workload: Json) -> bool:
    """Returns whether the object was read from the API server."""
    return "uid" in (workload.get("metadata") or {})


def filled_in(workload: Json) -> Json:
    """Returns the workload as the API server hands it to webhooks."""
    if not is_job(workload) or is_stored(workload):
        return workload
    made = copy.deepcopy(workload)
    job = made.setdefault("spec", {})
    pod = job.setdefault("template", {}).setdefault("spec", {})
    for part, defaults in ((job, _JOB), (pod, _POD)):
        part |= {name: value for name, value in defaults.items() if part.get(name) is None}
    return made


def findings(workload: Json) -> Iterator[Finding]:
    """Points out a grace period that its user did not choose."""
    if not is_job(workload) or is_stored(workload):
        return
    if workload["spec"]["template"]["spec"].get("terminationGracePeriodSeconds") is None:
        yield Finding(
            Severity.WARNING,
            "default-grace-period",
            "spec.template.spec.terminationGracePeriodSeconds",
            f"found nothing, which means {_POD['terminationGracePeriodSeconds']} s: if no notice comes before SIGTERM, "
            "agreement, save and exit must fit into it. Write how long that takes",
        )
