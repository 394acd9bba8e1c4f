"""A Job by itself (batch/v1), with completion mode Indexed, as a workload. Pure.

A Job of a JobSet is no workload: its JobSet is. It is told apart by the label that JobSet sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracepoint.wire import names
from gracepoint_operator.kube.fields import owner_uid, parse_time, read_labels, text
from gracepoint_operator.kube.kinds import JOBS, Kind
from gracepoint_operator.kube.objects import LABEL_JOB_NAME, LABEL_JOB_UID, Membership
from gracepoint_operator.read_errors import reading
from gracepoint_operator.workloads.workload import Workload, created_with, read_job

#: The Jobs that are workloads. They are watched apart from the Jobs that workloads make, as their labels differ.
LONE_JOBS = Kind(JOBS.prefix, JOBS.plural, subset="alone")


class JobType:
    """See ``WorkloadType``."""

    name = "Job"
    kind = LONE_JOBS
    selector = f"{names.LABEL_POLICY},!{names.JOBSET_LABEL_UID}"
    makes_jobs = False

    def read(self, body: Mapping[str, Any]) -> Workload:
        with reading("a Job"):
            meta = body["metadata"]
            job = read_job(body, Membership(text(meta["uid"])))
            pod_template = (body.get("spec") or {}).get("template") or {}
            return Workload(
                kind=self.name,
                namespace=job.namespace,
                name=job.name,
                uid=job.uid,
                policy=read_labels(meta).get(names.LABEL_POLICY, ""),
                restarts=0,  # it replaces its pods one by one, without a number for the attempt
                deleted=job.deleted,
                finished=job.finished,
                injected=names.LABEL_POLICY in read_labels(pod_template.get("metadata") or {}),
                owner_uid=owner_uid(meta),
                created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
                job=job,
                created_with=created_with(meta),
            )

    def membership(self, labels: Mapping[str, str]) -> Membership | None:
        uid = labels.get(LABEL_JOB_UID)
        if not uid or names.LABEL_POLICY not in labels or labels.get(names.JOBSET_LABEL_UID):
            return None
        return Membership(uid)

    def name_in(self, labels: Mapping[str, str]) -> str | None:
        return None if names.JOBSET_LABEL_NAME in labels else labels.get(LABEL_JOB_NAME)

    def may_have_made(self, workload_name: str, pod_name: str) -> bool:
        # <job>-<completion index>-<five random characters>
        return pod_name.startswith(f"{workload_name}-")

    def record_labels(self, name: str, uid: str) -> dict[str, str]:
        # A name longer than a label's value allows is not a name of a Job of which pods can be made.
        return {LABEL_JOB_NAME: name, LABEL_JOB_UID: uid}
