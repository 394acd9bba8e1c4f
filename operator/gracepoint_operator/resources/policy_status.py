"""The status of a CheckpointPolicy: what the operator knows of the JobSets that name it. The operator writes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gracepoint_operator.resources.base import (
    Conditions,
    Count,
    Model,
    ObjectName,
    OfWorkload,
    Seconds,
    Time,
    Uid,
    list_map,
)
from gracepoint_operator.resources.goodput import WorkloadGoodput


class PolicyWorkloads(Model):
    """The JobSets that name the policy."""

    count: Count = 0
    """Number of these JobSets."""
    names: list[ObjectName] = Field(default=[], max_length=50)
    """Names of these JobSets, sorted; at most 50."""


class LastSave(Model):
    """The newest emergency save of any of the policy's JobSets."""

    preemption: ObjectName
    """Name of its Preemption."""
    workload: ObjectName
    """Name of the JobSet."""
    step: Count
    """The training step that was saved."""
    time: Time
    """When the checkpoint was committed."""


class WorkloadForecast(OfWorkload):
    """How long an emergency save of one JobSet is predicted to take, from its newest report."""

    name: ObjectName
    """Name of the JobSet."""
    uid: Uid
    """UID of the JobSet."""
    drain_seconds: Seconds
    """Seconds until the steps in flight are done."""
    save_seconds: Seconds
    """Seconds from drained to committed, measured at its last save."""
    margin: Seconds
    """The factor by which the sum is multiplied."""
    time: Time
    """When the JobSet reported it."""

    @property
    def needed_s(self) -> float:
        """Seconds that an emergency save would take, with the margin."""
        return (self.drain_seconds + self.save_seconds) * self.margin


class WorkloadConnections(Model):
    """How many pods of one JobSet are connected to one replica."""

    uid: Uid
    """UID of the JobSet."""
    connected: Count
    """Number of its pods that are connected to this replica."""
    replicated_jobs: Annotated[list[ObjectName], Field(max_length=64)] | None = None
    """Names of its replicatedJobs of which pods are connected to this replica. Absent if only one of them trains."""


class PolicyReplica(Model):
    """What one operator replica knows alone. Only that replica writes the entry."""

    name: ObjectName
    """The replica's pod name."""
    time: Time
    """When the replica wrote the entry, which it does if the numbers change. The entry counts as long as the replica
    renews its Lease in the operator's namespace."""
    workloads: list[WorkloadConnections] = Field(default=[], max_length=1000)
    """The JobSets of which pods are connected to this replica, sorted by UID; at most 1000."""


class CheckpointPolicyStatus(Model):
    """Written by the operator."""

    observed_generation: Count | None = None
    """The generation of the policy from which the rest of the status was computed. Absent: the operator has not seen
    the policy."""
    workloads: PolicyWorkloads | None = None
    """The JobSets that name the policy by label."""
    conditions: Conditions | None = None
    """Ready: the policy can be used. FitsGrace: an emergency save is predicted to fit into the grace period of the
    pods, from the newest reports of the JobSets; Unknown until one has reported. Injected: the webhook changed every
    JobSet when it was created, so that its pods can get notices. Recorded: the API server accepts the Preemptions;
    False with its message if a quota or an admission policy refuses them, and gangs get notices all the same.
    Connected: every running pod of the JobSets is connected to the operator; False if a pod has not been connected for
    three minutes. Progressing: False while the processes of a JobSet make no progress; its message names the process
    that holds up the others. Absent: no JobSet has stalled. Stalled: True while the policy cannot be read."""
    forecasts: Annotated[list[WorkloadForecast], Field(max_length=50, json_schema_extra=list_map("uid"))] | None = None
    """The newest predictions, at most 50. FitsGrace is computed from them."""
    goodput: Annotated[list[WorkloadGoodput], Field(max_length=50, json_schema_extra=list_map("uid"))] | None = None
    """Where the time of each JobSet went; at most 50 JobSets. Those that have finished make room for others."""
    last_save: LastSave | None = None
    """The newest emergency save. Absent: none was committed yet."""
    replicas: Annotated[list[PolicyReplica], Field(max_length=16, json_schema_extra=list_map("name"))] | None = None
    """One entry for each replica of the operator that pods are connected to. Connected is computed from them."""
