"""Everything that matters to one workload, as one value. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from gracepoint_operator.kube.objects import Node, Pod
from gracepoint_operator.model import evictions
from gracepoint_operator.model.preemption_record import PreemptionRecord, RequestRecord
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.signals import Mark
from gracepoint_operator.workloads import Job, Workload


@dataclasses.dataclass(frozen=True)
class GangSnapshot:
    """Everything that matters to one workload, read at one moment.

    Attributes:
        workload_uid: UID of the workload.
        workload: The workload. None if it is not known: it is gone, or has lost the label by which it is watched. In a
            namespace that is being deleted it counts as deleted.
        workload_gone: Whether the API server, when asked, said that the workload does not exist.
        jobs: Its Jobs by name.
        pods: All its pods, including those of older attempts. Pods of other namespaces are left out, since anybody may
            write any label.
        nodes: The nodes of those pods, by name.
        policy: Its CheckpointPolicy. None if there is none.
        preemptions: The records of its Preemptions, oldest first.
        requests: The requests for it, oldest first.
        marks: Possible signals, by the UID of the pod that they concern: on the pod, its node, Job, workload, ...
            Pods without any may be left out.
        since: When each mark was first seen, in seconds since the epoch.
        bound_at: When each pod was first seen bound, by UID. It may have other pods, too.
        checked: UIDs of deleted pods whose Job and workload were read again after the deletion.
        unexplained: Marks of suspensions after which Kueue's Workload was not read yet, which says the reason.
    """

    workload_uid: str
    workload: Workload | None
    workload_gone: bool
    jobs: Mapping[str, Job]
    pods: tuple[Pod, ...]
    nodes: Mapping[str, Node]
    policy: CheckpointPolicy | None
    preemptions: tuple[PreemptionRecord, ...]
    requests: tuple[RequestRecord, ...]
    marks: Mapping[str, Sequence[Mark]]
    since: Mapping[str, float]
    bound_at: Mapping[str, float] = dataclasses.field(compare=False)  # a pod that gets a node is another Pod
    checked: frozenset[str]
    unexplained: frozenset[str] = frozenset()

    @functools.cached_property
    def members(self) -> tuple[Pod, ...]:
        """The pods of the current attempt that the gang needs. Empty if the workload is deleted or finished.

        These are its processes, and those helpers whose end would end or restart the gang. A pod that has ended is
        included, unless its Job has replaced it by another pod.
        """
        return tuple(pod for pod in self._current if not pod.helps or self._ends_gang(pod))

    @functools.cached_property
    def processes(self) -> tuple[Pod, ...]:
        """The members that train: they get notices, and agree."""
        return tuple(pod for pod in self._current if not pod.helps)

    @functools.cached_property
    def has_ended(self) -> bool:
        """True if a process has ended, or a helper has failed without which the gang does not continue."""
        return any(pod.finished and (not pod.helps or self._has_failed(pod)) for pod in self.members)

    @functools.cached_property
    def _current(self) -> tuple[Pod, ...]:
        workload = self.workload
        if workload is None or workload.deleted or workload.finished:
            return ()
        attempt = workload.restarts
        current = tuple(pod for pod in self.pods if pod.membership.restart_attempt == attempt and pod.policy)
        if not any(pod.finished for pod in current):
            return current
        replaced_indices = {(pod.job_name, pod.completion_index) for pod in current if not pod.finished}
        return tuple(
            pod for pod in current if not pod.finished or (pod.job_name, pod.completion_index) not in replaced_indices
        )

    @functools.cached_property
    def suspects(self) -> tuple[Pod, ...]:
        """The members of which anything is known that may be a signal. Nearly always few of them."""
        if self.requests:
            return self.members
        suspect_uids = self.marks.keys() | evictions.attempted(self.since)
        return tuple(pod for pod in self.members if pod.uid in suspect_uids) if suspect_uids else ()

    def job_goes_on(self, pod: Pod) -> bool:
        """True if the Job of this pod exists, has not ended, and was not scaled down below this pod.

        A Job of the same name that was made after this pod's own Job was deleted is another one.
        """
        job = self.jobs.get(pod.job_name)
        if job is None or job.deleted or job.finished or pod.job_uid not in ("", job.uid):
            return False
        return job.completions is None or pod.completion_index < job.completions

    def _ends_gang(self, helper: Pod) -> bool:
        """True if the end of a helper's pod, by a disruption, would end or restart its workload as a whole."""
        job = self.jobs.get(helper.job_name)
        return job is not None and self.workload is not None and self.workload.ends_with(helper.replicated_job, job)

    def _has_failed(self, helper: Pod) -> bool:
        job = self.jobs.get(helper.job_name)
        return job is not None and job.failed

    def is_ordinary_life(self, pod: Pod) -> bool:
        """True if the end of this pod is not a disruption: its workload or Job ended, was deleted or has restarted."""
        return all(pod.uid != member.uid for member in self.members) or not self.job_goes_on(pod)
