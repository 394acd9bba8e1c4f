"""Rows of the clouds and of the tools that add and remove nodes: GKE, AWS, AKS, Karpenter, cluster-autoscaler."""

from __future__ import annotations

from gracepoint.wire.messages import Confidence
from gracepoint_operator.signals.row_helpers import HINT, LIKELY, SURE, after, condition, field, taint
from gracepoint_operator.signals.rows import Cause, DeadlineRule, Match, On, Row, Time, TimeFormat, ValueMatch

_NTH = "aws-node-termination-handler"

#: Seconds that GKE's kubelet gives user pods by default, out of the 30 s of a Spot node.
GKE_SPOT_GRACE_S = 15.0


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
        about="The machine is being ended. Spot nodes get 30 s in all, of which the kubelet leaves user pods 15 s by "
        "default. A longer grace period is cut to that (cloud.google.com/kubernetes-engine/docs/concepts/spot-vms).",
    ),
    Row(
        name="gke-maintenance-window-started",
        provider="GKE",
        match=taint("cloud.google.com/maintenance-window-started"),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=False,
        deadline=after(720.0),
        about="Nodes with GPUs or TPUs become NotReady 12 to 41 minutes later; the 12 minutes count.",
    ),
    Row(
        name="gke-active-maintenance",
        provider="GKE",
        match=Match(label=ValueMatch(key="cloud.google.com/active-node-maintenance")),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=False,
        about="Maintenance of the host is under way, whatever the value (ONGOING and passthrough were seen).",
    ),
    Row(
        name="gke-scheduled-maintenance",
        provider="GKE",
        match=Match(label=ValueMatch(key="cloud.google.com/scheduled-maintenance-time")),
        cause=Cause.MAINTENANCE,
        confidence=LIKELY,
        cancelable=True,
        deadline=DeadlineRule(time=Time(format=TimeFormat.EPOCH_SECONDS)),
        about="Days ahead: the value is when the maintenance starts, and it may be moved "
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
        about="Minutes to hours ahead: JSON with the window in which the maintenance may start. The beginning of the "
        "window counts.",
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
        deadline=after(120.0),
        about="Two minutes ahead (docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html).",
    ),
    Row(
        name="aws-scheduled-maintenance",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/scheduled-maintenance"),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=True,
        about="The taint tells no time, and the handler drains at once.",
    ),
    Row(
        name="aws-asg-termination",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/asg-lifecycle-termination"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        about="An Auto Scaling group ends the instance; the handler drains at once.",
    ),
    Row(
        name="aws-rebalance",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/rebalance-recommendation"),
        cause=Cause.REBALANCE,
        confidence=HINT,
        cancelable=True,
        about="The risk of an interruption is elevated.",
    ),
)

_KARPENTER = (
    Row(
        name="karpenter-disrupted",
        provider="Karpenter",
        match=taint("karpenter.sh/disrupted"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        deadline=DeadlineRule(row="karpenter-termination-time"),
        about="The node is being drained, until the NodeClaim's termination time if one is set. A pod may be evicted "
        "before that; its eviction is then the earlier signal (karpenter.sh/docs/concepts/disruption).",
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
        deadline=DeadlineRule(time=Time(format=TimeFormat.RFC3339)),
        about="When the NodeClaim's terminationGracePeriod is over: pods are deleted so that they are gone by then, "
        "whatever their disruption budgets and do-not-disrupt say.",
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
        about="The node reaches the age at which it is drained, which is known from its start. The value Never is no "
        "signal.",
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
        about="The node is being drained with the pods' grace period, at most --max-graceful-termination-sec, 600 s. "
        "If the drain fails, the autoscaler takes the taint back.",
    ),
    Row(
        name="autoscaler-candidate",
        provider="cluster-autoscaler",
        match=taint("DeletionCandidateOfClusterAutoscaler"),
        cause=Cause.SCALE_DOWN,
        confidence=HINT,
        cancelable=True,
        about="The node is not needed, and is removed if it stays so.",
    ),
)

_AKS = (
    _aks_event("Freeze", 900.0, HINT, Cause.MAINTENANCE, "The machine pauses for some seconds."),
    _aks_event("Preempt", 30.0, SURE, Cause.SPOT_TERMINATION, "A Spot machine is taken back, 30 s ahead."),
    _aks_event("Terminate", 300.0, SURE, Cause.SCALE_DOWN, "The machine is deleted, 5 to 15 minutes ahead."),
    _aks_event("Redeploy", 600.0, SURE, Cause.MAINTENANCE, "The machine moves and loses its disks, 10 minutes ahead."),
    _aks_event(
        "Reboot",
        900.0,
        SURE,
        Cause.MAINTENANCE,
        "The machine restarts, 15 minutes ahead. The message of node-problem-detector's condition names the event and "
        "its NotBefore, which counts (learn.microsoft.com/azure/virtual-machines/linux/scheduled-events, "
        "learn.microsoft.com/azure/aks/node-problem-detector).",
    ),
    Row(
        name="aks-preemption-scheduled",
        provider="AKS",
        match=condition(On.NODE, "PreemptionScheduled"),
        cause=Cause.SPOT_TERMINATION,
        confidence=SURE,
        cancelable=True,
        deadline=DeadlineRule(time=Time(format=TimeFormat.HTTP_DATE), after_seconds=30.0),
        about="A Spot machine is taken back, at the time in the message of node-problem-detector's condition, or after "
        "30 s (github.com/Azure/karpenter-provider-azure/pull/1829).",
    ),
    Row(
        name="aks-remediator",
        provider="AKS",
        match=taint("remediator.kubernetes.azure.com/unschedulable"),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=True,
        deadline=after(30.0),
        about="Auto-drain acts on a scheduled event; a Spot node has 30 s (learn.microsoft.com/azure/aks/"
        "node-auto-drain).",
    ),
)

ROWS: tuple[Row, ...] = (*_GKE, *_AWS, *_KARPENTER, *_AUTOSCALER, *_AKS)
