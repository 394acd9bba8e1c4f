"""Rows of the clouds and of the tools that add and remove nodes: GKE, AWS, AKS, Karpenter, cluster-autoscaler."""

from __future__ import annotations

from gracepoint.wire.messages import Confidence
from gracepoint_operator.signals.row_helpers import HINT, LIKELY, SURE, after, condition, field, taint
from gracepoint_operator.signals.rows import (
    Cause,
    ConditionMatch,
    DeadlineRule,
    Match,
    On,
    Row,
    Time,
    TimeFormat,
    ValueMatch,
)

_NTH = "aws-node-termination-handler"

#: Seconds that GKE's kubelet gives user pods by default, out of the 30 s of a Spot node.
GKE_SPOT_GRACE_S = 15.0
#: Seconds from EC2's notice to the end of a Spot machine.
EC2_NOTICE_S = 120.0


def _aks_event(event: str, lead_s: float, confidence: Confidence, cause: Cause, about: str) -> Row:
    return Row(
        name=f"aks-{event.lower()}",
        provider="AKS",
        match=condition(On.NODE, "VMEventScheduled", message=event),
        cause=cause,
        confidence=confidence,
        cancelable=True,
        deadline=DeadlineRule(time=Time(format=TimeFormat.HTTP_DATE), after_seconds=lead_s),
        about=about,
    )


_GKE = (
    Row(
        name="gke-impending-termination",
        provider="GKE",
        match=taint("cloud.google.com/impending-node-termination"),
        cause=Cause.SPOT_TERMINATION,
        confidence=SURE,
        cancelable=False,
        deadline=DeadlineRule(grace_cap_seconds=GKE_SPOT_GRACE_S),
        about="Set when Compute Engine ends the machine, as pods begin to be stopped; removed only after the machine "
        "has started again. Spot nodes get 30 s in all, of which the kubelet leaves user pods 15 s by default. A "
        "longer grace period is cut to that (cloud.google.com/kubernetes-engine/docs/concepts/spot-vms, "
        "github.com/GoogleCloudPlatform/k8s-node-termination-handler).",
    ),
    Row(
        name="gke-maintenance-window-started",
        provider="GKE",
        match=taint("cloud.google.com/maintenance-window-started"),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=False,
        deadline=after(660.0),
        about="Set when a maintenance has begun, which can then not be moved any more; removed when the machine is "
        "back. Pods were stopped 11 to 40 minutes later; the 11 minutes count.",
    ),
    Row(
        name="gke-active-maintenance",
        provider="GKE",
        match=Match(label=ValueMatch(key="cloud.google.com/active-node-maintenance")),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=False,
        about="Set when a maintenance has begun, which can then not be moved any more; removed when it is over. With "
        "ONGOING, pods are being stopped; passthrough was seen some seconds before the taint of the window.",
    ),
    Row(
        name="gke-scheduled-maintenance",
        provider="GKE",
        match=Match(label=ValueMatch(key="cloud.google.com/scheduled-maintenance-time")),
        cause=Cause.MAINTENANCE,
        confidence=LIKELY,
        cancelable=True,
        deadline=DeadlineRule(time=Time(format=TimeFormat.EPOCH_SECONDS)),
        about="Set days ahead: the value is when the maintenance starts. It may be moved, to an earlier time as well "
        "(cloud.google.com/kubernetes-engine/docs/how-to/view-maintenance-events).",
    ),
    Row(
        name="gke-upcoming-maintenance",
        provider="GKE",
        match=Match(annotation=ValueMatch(key="node.gke.io/upcoming-maintenance", without="COMPLETE")),
        cause=Cause.MAINTENANCE,
        confidence=LIKELY,
        cancelable=True,
        deadline=DeadlineRule(
            time=Time(
                format=TimeFormat.JSON,
                json_fields=["windowStartTime", "startTimeWindow.earliest"],
            )
        ),
        about="Set minutes to weeks ahead: JSON with the window in which the maintenance may start, whose beginning "
        "counts. It may be moved, to an earlier time as well, until the maintenance begins.",
    ),
)

_AWS = (
    Row(
        name="aws-spot-interruption",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/spot-itn"),
        cause=Cause.SPOT_TERMINATION,
        confidence=SURE,
        cancelable=False,
        deadline=after(EC2_NOTICE_S),
        about="Set on EC2's notice, which EC2 does not take back; the handler then evicts the pods. EC2 ends the "
        "machine two minutes after its notice "
        "(docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html).",
    ),
    Row(
        name="aws-scheduled-maintenance",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/scheduled-maintenance"),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=True,
        about="Set for events that stop, retire or reboot the machine, as soon as they are scheduled; the taint tells "
        "no time, and the handler evicts the pods at once. Removed if EC2 cancels the event, and after the reboot.",
    ),
    Row(
        name="aws-asg-termination",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/asg-lifecycle-termination"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        about="Set when an Auto Scaling group ends the instance, which it does not take back; the handler evicts the "
        "pods at once.",
    ),
    Row(
        name="aws-rebalance",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/rebalance-recommendation"),
        cause=Cause.REBALANCE,
        confidence=HINT,
        cancelable=True,
        about="The risk of an interruption is elevated; EC2 says neither when nor that it is over. The handler "
        "cordons the node. It evicts the pods too if it reads a queue, or is told to; the cause of these evictions is "
        "Rebalance.",
    ),
)

_KARPENTER = (
    Row(
        name="karpenter-disrupted",
        provider="Karpenter",
        match=taint("karpenter.sh/disrupted"),
        cause=Cause.SCALE_DOWN,
        confidence=HINT,
        cancelable=True,
        about="Set when Karpenter wants to replace or remove the node (drift, consolidation), before the new node is "
        "there. Removed if the new node does not come: at once if it cannot be launched, else after ten minutes to an "
        "hour. No pod is evicted before the NodeClaim is deleted, which is the fact (pkg/controllers/disruption of "
        "Karpenter).",
    ),
    Row(
        name="karpenter-termination-time",
        provider="Karpenter",
        match=Match(
            kind=On.NODE_CLAIM,
            annotation=ValueMatch(key="karpenter.sh/nodeclaim-termination-timestamp"),
        ),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        deadline=DeadlineRule(time=Time(format=TimeFormat.RFC3339), after_seconds=0.0),
        about="Set when a NodeClaim with a terminationGracePeriod is deleted, and to the present when a node is "
        "repaired. Pods are deleted so that they are gone by then, whatever their disruption budgets and "
        "do-not-disrupt say. The time may come nearer, and is never removed (pkg/controllers/nodeclaim/lifecycle, "
        "node/health).",
    ),
    Row(
        name="karpenter-interruption",
        provider="Karpenter",
        match=field(
            On.NODE_CLAIM,
            "metadata.deletionTimestamp",
            with_label=ValueMatch(key="karpenter.sh/capacity-type", values=["spot"]),
            unless_condition=ConditionMatch(type="DisruptionReason"),
        ),
        cause=Cause.SPOT_TERMINATION,
        confidence=SURE,
        cancelable=False,
        deadline=after(EC2_NOTICE_S),
        about="Karpenter deletes the NodeClaim of a Spot machine, and not for a reason of its own: EC2 has said that "
        "it takes the machine back, and does so 120 s later, whatever the terminationGracePeriod and do-not-disrupt "
        "say. (Or somebody has deleted it by hand.) The Events SpotInterrupted and TerminatingOnInterruption are not "
        "read: they come after the deletion or not at all, and tell no time (pkg/controllers/interruption of "
        "karpenter-provider-aws).",
    ),
    Row(
        name="karpenter-deletion",
        provider="Karpenter",
        match=field(On.NODE_CLAIM, "metadata.deletionTimestamp"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        deadline=after(EC2_NOTICE_S),
        about="The node goes away: its replacement is ready, it is empty, too old or defective, or the cloud takes "
        "the machine (the end of a Capacity Block, an instance that EC2 retires or stops). Nothing brings it back. "
        "Pods are evicted at once, but not those with do-not-disrupt. If the cloud takes the machine, Karpenter does "
        "not write by when. So the two minutes of EC2's notices count, even if the terminationGracePeriod is hours "
        "(pkg/controllers/nodeclaim/lifecycle of Karpenter).",
    ),
    Row(
        name="karpenter-expiry",
        provider="Karpenter",
        match=field(On.NODE_CLAIM, "spec.expireAfter"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        deadline=DeadlineRule(time=Time(format=TimeFormat.DURATION, since="metadata.creationTimestamp")),
        limit=True,
        about="The NodeClaim is deleted at this age, which is known from its start and cannot be changed, whatever "
        "its pods' annotations and budgets say. The value Never is no signal.",
    ),
)

_AUTOSCALER = (
    Row(
        name="autoscaler-deletion",
        provider="cluster-autoscaler",
        match=taint("ToBeDeletedByClusterAutoscaler"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=True,
        deadline=DeadlineRule(grace_cap_seconds=600.0),
        about="Set just before the pods are evicted with their grace period, at most --max-graceful-termination-sec, "
        "600 s. Removed if a pod can no longer be moved, if the drain or the deletion fails, and when the autoscaler "
        "restarts (core/scaledown/actuation).",
    ),
    Row(
        name="autoscaler-candidate",
        provider="cluster-autoscaler",
        match=taint("DeletionCandidateOfClusterAutoscaler"),
        cause=Cause.SCALE_DOWN,
        confidence=HINT,
        cancelable=True,
        about="The node is not needed, and is removed if it stays so for ten minutes. Removed if it is needed again.",
    ),
)

_AKS = (
    _aks_event(
        "Freeze",
        900.0,
        HINT,
        Cause.MAINTENANCE,
        "The machine pauses for some seconds. Pods are evicted only if they ask for it by a label.",
    ),
    _aks_event(
        "Preempt",
        30.0,
        SURE,
        Cause.SPOT_TERMINATION,
        "A Spot machine is taken back, 30 s ahead at most. Auto-drain evicts the pods.",
    ),
    _aks_event(
        "Terminate",
        300.0,
        SURE,
        Cause.SCALE_DOWN,
        "The machine is deleted, 5 to 15 minutes ahead. Auto-drain evicts the pods if the scale set has notifications.",
    ),
    _aks_event(
        "Redeploy",
        600.0,
        SURE,
        Cause.MAINTENANCE,
        "The machine moves and loses its disks, 10 minutes ahead. Auto-drain evicts the pods.",
    ),
    _aks_event(
        "Reboot",
        900.0,
        SURE,
        Cause.MAINTENANCE,
        "The machine restarts, 15 minutes ahead; nobody evicts the pods. As for all events, the message of "
        "node-problem-detector's condition names the event and its NotBefore, which counts, and the condition is "
        "False again when the event is over or called off (learn.microsoft.com/azure/virtual-machines/linux/"
        "scheduled-events, learn.microsoft.com/azure/aks/node-problem-detector).",
    ),
    Row(
        name="aks-preemption-scheduled",
        provider="AKS",
        match=condition(On.NODE, "PreemptionScheduled"),
        cause=Cause.SPOT_TERMINATION,
        confidence=SURE,
        cancelable=True,
        deadline=DeadlineRule(time=Time(format=TimeFormat.HTTP_DATE), after_seconds=30.0),
        about="A Spot machine is taken back, at the time in the message of node-problem-detector's condition, or "
        "after 30 s. Karpenter takes it for a defect, and deletes the NodeClaim and its pods at once (RepairPolicies "
        "and pull request 1829 of github.com/Azure/karpenter-provider-azure).",
    ),
    Row(
        name="aks-remediator",
        provider="AKS",
        match=taint("remediator.kubernetes.azure.com/unschedulable"),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=True,
        deadline=after(30.0),
        about="Auto-drain evicts the pods for a scheduled event, as best it can; a Spot node has 30 s. Its source is "
        "not public (learn.microsoft.com/azure/aks/node-auto-drain).",
    ),
)

ROWS: tuple[Row, ...] = (*_GKE, *_AWS, *_KARPENTER, *_AUTOSCALER, *_AKS)
