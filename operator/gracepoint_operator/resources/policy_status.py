"""The status of a CheckpointPolicy: what the operator knows of the JobSets that name it. The operator writes it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from gracepoint_operator.resources.base import (
    Conditions,
    Count,
    Model,
    ObjectName,
    OfWorkload,
    Seconds,
    Text,
    Time,
    Uid,
    list_map,
)


class SaveIntervalMode(StrEnum):
    """What says when periodic saves are due."""

    FIXED = "Fixed"
    AUTO = "Auto"


class SecondsByCategory(Model):
    """Seconds, by what they went into. Absent: none."""

    training: Seconds | None = None
    """Steps whose results were kept."""
    saving: Seconds | None = None
    """Training was stopped by a save: a periodic one, one at a preemption, or one of a drill."""
    recomputation: Seconds | None = None
    """Steps whose results were lost, so that they had to be computed again."""
    leaving: Seconds | None = None
    """From the end of training until the last process of the gang has ended."""
    blocked: Seconds | None = None
    """Something was missing or refused, so that not all processes could run: a node, a pod that a kubelet or a quota
    refused, an image or a volume that failed, the end of a pod before."""
    waiting: Seconds | None = None
    """There are no pods: the JobSet is queued or suspended, or its pods are about to be created again."""
    scheduling: Seconds | None = None
    """Pods exist, and some of them are not bound to a node."""
    image: Seconds | None = None
    """All pods are bound, and some containers do not run yet: images, volumes, init containers."""
    join: Seconds | None = None
    """All containers run, and the processes have not all joined: imports, and waiting for each other."""
    restore: Seconds | None = None
    """The processes have joined, and the state is not restored."""
    compile: Seconds | None = None
    """The state is restored, and the first step is not done."""
    unknown: Seconds | None = None
    """Containers run, and no process has said what it does, as with older versions of the library."""


class BlockedSpan(Model):
    """A time in which a gang was blocked."""

    began: Time
    """When it began."""
    ended: Time
    """When it ended."""


class PassedStep(Model):
    """A step that the gang has passed."""

    step: Count
    """Number of the step."""
    trained_seconds: Seconds
    """Seconds for which the gang had trained when it passed the step, in this life."""


class GangLife(Model):
    """One start of a gang, from the creation of its first pod until its last process has ended. A time that is absent
    is not known, or has not come."""

    began: Time
    """When the life before ended. For the first one, when the JobSet was created."""
    attempt: Count
    """Number of the JobSet's restarts before."""
    created: Time
    """When the first pod was created."""
    bound: Time | None = None
    """When the last pod was bound to a node."""
    bound_pods: Count | None = None
    """How many pods were bound then. Absent: not known."""
    started: Time | None = None
    """When the last process was started, as the processes say. Until they do: when the last container was, as
    kubelets write."""
    session: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Session of the process that tells what the gang does."""
    attached: Time | None = None
    """When that process began to join the others. What it tells counts from there."""
    joined: Time | None = None
    """When all processes had joined."""
    restored: Time | None = None
    """When the state was restored."""
    first_step: Count | None = None
    """The step from which it trained: the one that was restored. Absent: 0."""
    trained: Time | None = None
    """When the first step was done."""
    left: Time | None = None
    """When training ended for a preemption, as the gang reported it."""
    stalled: Time | None = None
    """When the last step was passed, if no process has passed one for long."""
    broke: Time | None = None
    """When the first process ended, or when its node was deleted."""
    gone: Time | None = None
    """When the last process had ended."""
    saving_seconds: Seconds | None = None
    """Seconds for which saves stopped the training. Absent: 0."""
    periodic_saves: Count | None = None
    """Number of periodic saves. Absent: 0."""
    periodic_save_seconds: Seconds | None = None
    """Seconds for which periodic saves stopped the training. Absent: 0."""
    saved: Time | None = None
    """When the newest step was passed that is in a committed checkpoint of this life. Absent: none is known."""
    passed: Annotated[list[PassedStep], Field(max_length=8)] | None = None
    """Steps at which the newest saves began, or at which the gang reported."""


class SaveSuggestion(Model):
    """How often to save, by the formula of Young and Daly."""

    save_seconds: Seconds
    """Mean number of seconds for which a periodic save stops the training."""
    seconds_between_disruptions: Seconds
    """Mean number of seconds for which processes run between two disruptions."""
    seconds_between_losses: Seconds
    """The same between two disruptions after which steps have to be computed again. Estimated: if k of n disruptions
    lost steps, the next one does so with the probability (k + 1) / (n + 2)."""
    every_seconds: Seconds
    """Seconds between two periodic saves at which saving and recomputation together take the least time."""


class WorkloadGoodput(OfWorkload):
    """Where the time of one JobSet went."""

    name: ObjectName
    """Name of the JobSet."""
    uid: Uid
    """UID of the JobSet."""
    since: Time
    """When the account begins: with the JobSet, or when an operator that keeps accounts first saw it."""
    until: Time
    """When the account was last written. Since then, all time goes into state."""
    state: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    """What the time went into at that moment. Absent: the JobSet has finished."""
    seconds: SecondsByCategory
    """Where the seconds from since to until went. They add up to all of them. Absent: none."""
    disruptions: Count = 0
    """How often the gang ended while the JobSet went on."""
    losses: Count = 0
    """Number of these disruptions after which steps had to be computed again, as far as that is known."""
    suggestion: SaveSuggestion | None = None
    """How often to save. Absent before the first periodic save, and before the first disruption."""
    settled_seconds: SecondsByCategory | None = None
    """The part of seconds that cannot change any more: of the lives before those in lives. Absent: there were none."""
    settled_losses: Count = 0
    """The part of losses that belongs to settledSeconds."""
    settled_saves: Count = 0
    """Number of periodic saves in settledSeconds."""
    settled_save_seconds: Seconds = 0.0
    """Seconds for which these stopped the training."""
    finished: Time | None = None
    """When the JobSet had finished. Absent: it has not."""
    lives: list[GangLife] = Field(default=[], max_length=2)
    """The current life of the gang, after the one before as long as it is not known how much of it was lost. From these
    and settledSeconds, the rest is computed."""
    blocked: Annotated[list[BlockedSpan], Field(max_length=16)] | None = None
    """When the gang was blocked, in these lives. Absent: never."""
    blocked_since: Time | None = None
    """Since when it is blocked. Absent: it is not."""


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
    send_seconds: Seconds | None = None
    """Seconds from drained until the step is in snapshot servers. Absent if there are none."""
    margin: Seconds
    """The factor by which the sum is multiplied."""
    time: Time
    """When the JobSet reported it."""

    @property
    def storage_s(self) -> float:
        """Seconds that an emergency save to storage would take, with the margin."""
        return (self.drain_seconds + self.save_seconds) * self.margin

    @property
    def needed_s(self) -> float:
        """Seconds until the step would be safe in storage or in snapshot servers, with the margin."""
        if self.send_seconds is None:
            return self.storage_s
        return min(self.storage_s, (self.drain_seconds + self.send_seconds) * self.margin)


class StartWaitStatus(Model):
    """One thing that a JobSet waits for before all its processes run."""

    kind: Annotated[str, Field(min_length=1, max_length=32)]
    """What it is, in one word: Suspended, Deletion, Pods, Gate, Node, Kubelet, Device, Volume, Network, InitContainer,
    Image, Container, Start or Sidecar."""
    what: Annotated[str, Field(min_length=1, max_length=512)]
    """The same in a few words, with the processes that it is about."""
    since: Time
    """Since when it is waited for."""
    message: Text | None = None
    """What the scheduler, the kubelet or a controller said last. Absent: nothing."""
    pod: ObjectName | None = None
    """The pod that it is about, or the first of them. Absent: there is none."""
    node: ObjectName | None = None
    """The node of that pod. Absent: it has none."""


class WorkloadWaits(OfWorkload):
    """What one JobSet waits for before all its processes run."""

    name: ObjectName
    """Name of the JobSet."""
    uid: Uid
    """UID of the JobSet."""
    waits: Annotated[list[StartWaitStatus], Field(max_length=8)]
    """What it waits for, in the order in which starts come past it."""


class WorkloadSnapshots(OfWorkload):
    """What of one JobSet is safe in the memory of nodes, from its newest report."""

    name: ObjectName
    """Name of the JobSet."""
    uid: Uid
    """UID of the JobSet."""
    safe_step: Count | None = None
    """The newest step of which all parts are in snapshot servers. Absent: there is none."""
    copies: Count = 0
    """In how many servers each part of it is."""
    passed: Time | None = None
    """When the training had passed that step: its age counts from there. Absent: there is none."""
    every_seconds: Seconds | None = None
    """Seconds between two snapshots. Absent: not known."""
    skipped: Count = 0
    """How many snapshots were due and not begun, since the JobSet's last start."""
    reason: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    """Why the snapshots are not safe, in one word: SnapshotsLate, FewerSnapshotCopies or
    NoSnapshotServers. Absent: they are."""
    message: Text | None = None
    """The same as a sentence. Absent: they are safe."""
    time: Time
    """When this was known."""


class WorkloadTrouble(OfWorkload):
    """What fails in one JobSet while it trains, from its newest report. It leaves the list when it is over."""

    name: ObjectName
    """Name of the JobSet."""
    uid: Uid
    """UID of the JobSet."""
    trouble: Annotated[str, Field(min_length=1, max_length=32)]
    """What fails, in one word: Saves or Deletions."""
    message: Text
    """What is known of it, in one sentence."""
    time: Time
    """When the JobSet reported it."""


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
    that holds up the others. Absent: no JobSet has stalled. Started: False while a JobSet waits for infrastructure
    before all its processes run; its message says for what. Absent: none has waited for long. SnapshotsSafe: the
    JobSets have snapshots in the memory of nodes, in as many copies as the policy says and not too old. Absent: none
    has reported any. Saving, CleanedUp: False while periodic saves, or deletions of checkpoints, of a JobSet fail.
    Absent: none has failed. Stalled: True while the policy cannot be read."""
    forecasts: Annotated[list[WorkloadForecast], Field(max_length=50, json_schema_extra=list_map("uid"))] | None = None
    """The newest predictions, at most 50. FitsGrace is computed from them."""
    goodput: Annotated[list[WorkloadGoodput], Field(max_length=50, json_schema_extra=list_map("uid"))] | None = None
    """Where the time of each JobSet went; at most 50 JobSets. Those that have finished make room for others."""
    waits: Annotated[list[WorkloadWaits], Field(max_length=50, json_schema_extra=list_map("uid"))] | None = None
    """What JobSets wait for before all their processes run; at most 50 JobSets. Started is computed from these."""
    snapshots: Annotated[list[WorkloadSnapshots], Field(max_length=50, json_schema_extra=list_map("uid"))] | None = None
    """What of JobSets is safe in the memory of nodes; at most 50 JobSets. SnapshotsSafe is computed from these."""
    troubles: (
        Annotated[list[WorkloadTrouble], Field(max_length=50, json_schema_extra=list_map("uid", "trouble"))] | None
    ) = None
    """What fails in JobSets while they train; at most 50 entries. Saving and CleanedUp are computed from these."""
    last_save: LastSave | None = None
    """The newest emergency save. Absent: none was committed yet."""
    replicas: Annotated[list[PolicyReplica], Field(max_length=16, json_schema_extra=list_map("name"))] | None = None
    """One entry for each replica of the operator that pods are connected to. Connected is computed from them."""
