"""JobSet (jobset.sigs.k8s.io, api/jobset/v1alpha2) as a workload. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gracepoint.wire import names
from gracepoint_operator.kube.fields import (
    label_number,
    optional_number,
    owner_uid,
    parse_time,
    read_labels,
    text,
    true_conditions,
)
from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.kube.objects import Membership
from gracepoint_operator.read_errors import reading
from gracepoint_operator.workloads.pod_ends import failure_rules, restarts_in_place
from gracepoint_operator.workloads.workload import Workload, created_with

JOBSETS = Kind("/apis/jobset.x-k8s.io/v1alpha2", "jobsets")

_FINISHED = {"Completed", "Failed"}


class JobSetType:
    """See ``WorkloadType``."""

    name = "JobSet"
    kind = JOBSETS
    selector = names.LABEL_POLICY
    makes_jobs = True

    def read(self, body: Mapping[str, Any]) -> Workload:
        with reading("a JobSet"):
            meta, status = body["metadata"], body.get("status") or {}
            spec = body.get("spec") or {}
            replicated_jobs = spec.get("replicatedJobs")
            return Workload(
                kind=self.name,
                namespace=text(meta["namespace"]),
                name=text(meta["name"]),
                uid=text(meta["uid"]),
                policy=read_labels(meta).get(names.LABEL_POLICY, ""),
                restarts=int(optional_number(status.get("restarts"), 0)),
                deleted="deletionTimestamp" in meta,
                finished=bool(_FINISHED & true_conditions(status).keys()) or bool(status.get("terminalState")),
                injected=any(names.LABEL_POLICY in labels for labels in _pod_labels(replicated_jobs)),
                owner_uid=owner_uid(meta),
                created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
                failure_rules=failure_rules(spec),
                created_with=created_with(meta),
                in_place=restarts_in_place(spec),
            )

    def membership(self, labels: Mapping[str, str]) -> Membership | None:
        uid = labels.get(names.JOBSET_LABEL_UID)
        if not uid:
            return None
        return Membership(
            uid,
            label_number(labels.get(names.JOBSET_LABEL_RESTART_ATTEMPT, "0"), -1),
            labels.get(names.JOBSET_LABEL_REPLICATED_JOB, ""),
        )

    def name_in(self, labels: Mapping[str, str]) -> str | None:
        return labels.get(names.JOBSET_LABEL_NAME)

    def may_have_made(self, workload_name: str, pod_name: str) -> bool:
        # JobSet begins the names of its Jobs with its own name, and a Job those of its pods.
        return pod_name.startswith(f"{workload_name}-")

    def record_labels(self, name: str, uid: str) -> dict[str, str]:
        return {names.JOBSET_LABEL_NAME: name, names.JOBSET_LABEL_UID: uid}


def _pod_labels(replicated_jobs: Any) -> Iterator[Mapping[str, str]]:
    """The labels of the pods that each replicated Job makes."""
    for item in replicated_jobs or ():
        pod_template = item["template"]["spec"]["template"]
        yield read_labels(pod_template.get("metadata") or {})
