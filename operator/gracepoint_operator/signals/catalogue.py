"""The built-in rows of the disruption catalogue, in the order in which they are tried.

The ``about`` of a row says where its deadline comes from. If a signal names no time, the pod's own grace period is
assumed, because a pod that is deleted or evicted at once gets this time.

``listing`` makes the list in the docs from the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from gracepoint.wire.messages import Confidence
from gracepoint_operator.resources.base import Model
from gracepoint_operator.resources.crds import put_between
from gracepoint_operator.signals.rows import (
    HINT,
    LIKELY,
    SURE,
    Cause,
    ConditionMatch,
    DeadlineRule,
    Match,
    On,
    Row,
    TaintMatch,
    Time,
    TimeFormat,
    ValueMatch,
    after,
    condition,
    field,
    taint,
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
        about="Set as pods begin to be stopped; removed after a new start. Spot nodes get 30 s, of which user pods get "
        "15 s by default, whatever their grace period "
        "(cloud.google.com/kubernetes-engine/docs/concepts/spot-vms).",
    ),
    Row(
        name="gke-maintenance-window-started",
        provider="GKE",
        match=taint("cloud.google.com/maintenance-window-started"),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=False,
        deadline=after(660.0),
        about="Set when a maintenance begins. Pods were stopped 11 to 40 minutes later; 11 are assumed.",
    ),
    Row(
        name="gke-active-maintenance",
        provider="GKE",
        match=Match(label=ValueMatch(key="cloud.google.com/active-node-maintenance")),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=False,
        about="Set when a maintenance begins; removed when it is over. Value ONGOING: pods are being stopped.",
    ),
    Row(
        name="gke-scheduled-maintenance",
        provider="GKE",
        match=Match(label=ValueMatch(key="cloud.google.com/scheduled-maintenance-time")),
        cause=Cause.MAINTENANCE,
        confidence=LIKELY,
        cancelable=True,
        deadline=DeadlineRule(time=Time(format=TimeFormat.EPOCH_SECONDS)),
        about="Set days ahead; may be moved, also to an earlier time "
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
        about="Set minutes to weeks ahead, with the window in which it may start; may be moved, also to an earlier "
        "time.",
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
        about="Set two minutes before EC2 ends the machine; the handler then evicts the pods "
        "(docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html).",
    ),
    Row(
        name="aws-scheduled-maintenance",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/scheduled-maintenance"),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=True,
        about="Set as soon as a stop, retirement or reboot is scheduled; the handler evicts the pods at once. Removed "
        "if EC2 cancels it, and after the reboot.",
    ),
    Row(
        name="aws-asg-termination",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/asg-lifecycle-termination"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        about="An Auto Scaling group ends the instance; the handler evicts the pods at once.",
    ),
    Row(
        name="aws-rebalance",
        provider="AWS Node Termination Handler",
        match=taint(f"{_NTH}/rebalance-recommendation"),
        cause=Cause.REBALANCE,
        confidence=HINT,
        cancelable=True,
        about="An interruption is likelier; EC2 says neither when, nor that it is over. The handler cordons the node, "
        "and may evict the pods (cause: Rebalance).",
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
        about="Set when Karpenter wants to replace or remove the node (drift, consolidation). Removed if the new node "
        "does not come. No pod is evicted before the NodeClaim is deleted.",
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
        "repaired. Pods are gone by then, whatever budgets and do-not-disrupt say. The time may come nearer.",
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
        about="A Spot machine's NodeClaim is deleted, not for a reason of Karpenter's: EC2 takes the machine 120 s "
        "later, whatever terminationGracePeriod and do-not-disrupt say (or somebody deleted it by hand).",
    ),
    Row(
        name="karpenter-deletion",
        provider="Karpenter",
        match=field(On.NODE_CLAIM, "metadata.deletionTimestamp"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        deadline=after(EC2_NOTICE_S),
        about="The node goes away: its replacement is ready, it is empty, too old or defective, or the cloud takes the "
        "machine. Pods without do-not-disrupt are evicted at once. Karpenter does not say when the cloud takes "
        "the machine, so EC2's two minutes count.",
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
        about="The NodeClaim is deleted at this age, whatever annotations and budgets say. The value Never is no "
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
        about="Set just before the pods are evicted; their grace period counts up to --max-graceful-termination-sec, "
        "600 s. Removed if drain or deletion fails, and when the autoscaler restarts.",
    ),
    Row(
        name="autoscaler-candidate",
        provider="cluster-autoscaler",
        match=taint("DeletionCandidateOfClusterAutoscaler"),
        cause=Cause.SCALE_DOWN,
        confidence=HINT,
        cancelable=True,
        about="The node is removed if it is not needed for ten minutes.",
    ),
)

_AKS = (
    _aks_event(
        "Freeze",
        900.0,
        HINT,
        Cause.MAINTENANCE,
        "The machine pauses for some seconds.",
    ),
    _aks_event(
        "Preempt",
        30.0,
        SURE,
        Cause.SPOT_TERMINATION,
        "A Spot machine is taken back within 30 s. Auto-drain evicts the pods.",
    ),
    _aks_event(
        "Terminate",
        300.0,
        SURE,
        Cause.SCALE_DOWN,
        "The machine is deleted 5 to 15 minutes later. Auto-drain evicts the pods if the scale set has notifications.",
    ),
    _aks_event(
        "Redeploy",
        600.0,
        SURE,
        Cause.MAINTENANCE,
        "The machine moves and loses its disks 10 minutes later. Auto-drain evicts the pods.",
    ),
    _aks_event(
        "Reboot",
        900.0,
        SURE,
        Cause.MAINTENANCE,
        "The machine restarts 15 minutes later; nobody evicts the pods. These five conditions are "
        "node-problem-detector's, and False again when the event is over or called off "
        "(learn.microsoft.com/azure/virtual-machines/linux/scheduled-events).",
    ),
    Row(
        name="aks-preemption-scheduled",
        provider="AKS",
        match=condition(On.NODE, "PreemptionScheduled"),
        cause=Cause.SPOT_TERMINATION,
        confidence=SURE,
        cancelable=True,
        deadline=DeadlineRule(time=Time(format=TimeFormat.HTTP_DATE), after_seconds=30.0),
        about="A Spot machine is taken back. Karpenter takes it for a defect, and deletes the NodeClaim and its pods "
        "at once (github.com/Azure/karpenter-provider-azure).",
    ),
    Row(
        name="aks-remediator",
        provider="AKS",
        match=taint("remediator.kubernetes.azure.com/unschedulable"),
        cause=Cause.MAINTENANCE,
        confidence=SURE,
        cancelable=True,
        deadline=after(30.0),
        about="Auto-drain evicts the pods for a scheduled event; a Spot node has 30 s "
        "(learn.microsoft.com/azure/aks/node-auto-drain).",
    ),
)

#: Of the clouds, and of the tools that add and remove nodes.
CLOUD_ROWS: tuple[Row, ...] = (*_GKE, *_AWS, *_KARPENTER, *_AUTOSCALER, *_AKS)


#: Seconds that pods that are not critical get when their kubelet shuts down gracefully.
KUBELET_SHUTDOWN_S = 20.0


def _pod_condition(name: str, reason: str, cause: Cause, about: str) -> Row:
    return Row(
        name=name,
        provider="Kubernetes",
        match=condition(On.POD, "DisruptionTarget", reasons=(reason,) if reason else ()),
        cause=cause,
        confidence=SURE,
        cancelable=True,
        about=about,
    )


_NODES = (
    Row(
        name="node-out-of-service",
        provider="Kubernetes",
        match=taint("node.kubernetes.io/out-of-service", "NoExecute"),
        cause=Cause.NODE_LOST,
        confidence=SURE,
        cancelable=False,
        deadline=after(0.0),
        tolerable=True,
        about="An administrator, or the AWS handler after its drain, says that the machine is gone: pods are deleted "
        "at once.",
    ),
    Row(
        name="node-deleted",
        provider="Kubernetes",
        match=field(On.NODE, "metadata.deletionTimestamp"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        deadline=after(120.0),
        about="A finalizer holds the deleted Node until its machine is given back. Karpenter deletes Node and "
        "NodeClaim together; its 120 s count.",
    ),
    Row(
        name="node-not-ready",
        provider="Kubernetes",
        match=taint("node.kubernetes.io/not-ready", "NoExecute"),
        cause=Cause.NODE_LOST,
        confidence=LIKELY,
        cancelable=True,
        deadline=after(0.0, tolerated=True),
        tolerable=True,
        about="The kubelet says that it is not ready. The pod is deleted after its tolerationSeconds, 300 by default.",
    ),
    Row(
        name="node-unreachable",
        provider="Kubernetes",
        match=taint("node.kubernetes.io/unreachable", "NoExecute"),
        cause=Cause.NODE_LOST,
        confidence=LIKELY,
        cancelable=True,
        deadline=after(0.0, tolerated=True),
        tolerable=True,
        about="The kubelet has not reported for 50 s (40 s before Kubernetes 1.32). The pod is deleted after its "
        "tolerationSeconds, 300 by default.",
    ),
    Row(
        name="node-shutdown",
        provider="kubelet",
        match=condition(On.NODE, "Ready", status="False", message="node is shutting down"),
        cause=Cause.NODE_SHUTDOWN,
        confidence=SURE,
        cancelable=False,
        deadline=DeadlineRule(grace_cap_seconds=KUBELET_SHUTDOWN_S),
        about="Graceful node shutdown. The API does not tell the kubelet's shutdownGracePeriod; the example of "
        "Kubernetes is assumed: 30 s, the last 10 s for critical pods "
        "(kubernetes.io/docs/concepts/cluster-administration/node-shutdown).",
    ),
    Row(
        name="node-cordoned",
        provider="kubectl, drainers",
        match=field(On.NODE, "spec.unschedulable", "true"),
        cause=Cause.DRAIN,
        confidence=HINT,
        cancelable=True,
        about="Often a drain follows; nobody knows when.",
    ),
    Row(
        name="no-execute",
        provider="anyone",
        match=Match(taint=TaintMatch(effect="NoExecute")),
        cause=Cause.NODE_TAINT,
        confidence=SURE,
        cancelable=True,
        deadline=DeadlineRule(tolerated=True),
        tolerable=True,
        about="The pod is deleted when its tolerationSeconds are over, or at once if it has none.",
    ),
)

_DEVICES = (
    Row(
        name="device-taint",
        provider="Kubernetes",
        match=Match(kind=On.DEVICE, taint=TaintMatch(effect="NoExecute")),
        cause=Cause.HARDWARE,
        confidence=SURE,
        cancelable=True,
        deadline=DeadlineRule(tolerated=True),
        tolerable=True,
        about="In a ResourceSlice or a DeviceTaintRule, for the pods that use the device. Watched with the chart's "
        "deviceTaints.enabled.",
    ),
)

_PODS = (
    _pod_condition(
        "pod-preempted",
        "PreemptionByScheduler",
        Cause.PRIORITY_PREEMPTION,
        "Pods of higher priority take its place. As with the reasons below, it is set just before the pod is deleted, "
        "and False after two minutes if that fails.",
    ),
    _pod_condition("pod-taint-manager", "DeletionByTaintManager", Cause.NODE_TAINT, "A NoExecute taint took effect."),
    _pod_condition(
        "pod-device-taint",
        "DeletionByDeviceTaintManager",
        Cause.HARDWARE,
        "A NoExecute taint of a device that the pod uses took effect.",
    ),
    _pod_condition("pod-evicted", "EvictionByEvictionAPI", Cause.DRAIN, "An eviction was let through."),
    _pod_condition(
        "pod-collected",
        "DeletionByPodGC",
        Cause.NODE_LOST,
        "Its node has been gone for 40 s. The pod is removed without a grace period.",
    ),
    Row(
        name="pod-kubelet",
        provider="kubelet",
        match=condition(On.POD, "DisruptionTarget", reasons=("TerminationByKubelet",)),
        cause=Cause.NODE_PRESSURE,
        confidence=SURE,
        cancelable=False,
        deadline=DeadlineRule(grace_cap_seconds=KUBELET_SHUTDOWN_S),
        about="Pressure on the node, a graceful node shutdown, or a critical pod. How much of its grace period the pod "
        "gets is not stated (under a hard threshold, none); that of a node shutdown is assumed.",
    ),
    _pod_condition(
        "pod-disrupted", "", Cause.POD_DELETION, "Any other reason, such as JobSet's ExclusivePlacementViolation."
    ),
    Row(
        name="pod-deleted",
        provider="anyone",
        match=field(On.POD, "metadata.deletionTimestamp"),
        cause=Cause.POD_DELETION,
        confidence=SURE,
        cancelable=False,
        about="Only if its Job and its JobSet are neither deleted, finished nor of an older attempt.",
    ),
)

_JOBS = (
    Row(
        name="kueue-preempted",
        provider="Kueue",
        match=condition(On.WORKLOAD, "Evicted", reasons=("Preempted",)),
        cause=Cause.PRIORITY_PREEMPTION,
        confidence=SURE,
        cancelable=False,
        about="Another workload, which the message names, takes the quota; the job is suspended next.",
    ),
    Row(
        name="kueue-evicted",
        provider="Kueue",
        match=condition(On.WORKLOAD, "Evicted"),
        cause=Cause.SUSPENSION,
        confidence=SURE,
        cancelable=False,
        about="The queue takes the quota back, with the reason (PodsReadyTimeout, Deactivated, NodeFailures, ...).",
    ),
    Row(
        name="jobset-suspended",
        provider="Kueue, users",
        match=field(On.JOB_SET, "spec.suspend", "true"),
        cause=Cause.SUSPENSION,
        confidence=SURE,
        cancelable=False,
        about="Pods are deleted at once. If it is resumed, it begins with new pods.",
    ),
    Row(
        name="job-suspended",
        provider="Kueue, users",
        match=field(On.JOB, "spec.suspend", "true"),
        cause=Cause.SUSPENSION,
        confidence=SURE,
        cancelable=False,
        about="Pods are deleted at once. If it is resumed, it begins with new pods and a new time limit.",
    ),
    Row(
        name="job-time-limit",
        provider="users",
        match=field(On.JOB, "spec.activeDeadlineSeconds"),
        cause=Cause.TIME_LIMIT,
        confidence=SURE,
        cancelable=True,
        deadline=DeadlineRule(time=Time(format=TimeFormat.SECONDS, since="status.startTime")),
        limit=True,
        about="Pods are deleted when the time is over. It may be changed or removed while the Job runs.",
    ),
    Row(
        name="kueue-time-limit",
        provider="Kueue",
        match=field(On.WORKLOAD, "spec.maximumExecutionTimeSeconds"),
        cause=Cause.TIME_LIMIT,
        confidence=SURE,
        cancelable=False,
        deadline=DeadlineRule(
            time=Time(
                format=TimeFormat.SECONDS,
                since="status.conditions.Admitted.lastTransitionTime",
                minus=[  # names in v1beta2 and in v1beta1
                    "status.accumulatedPastExecutionTimeSeconds",
                    "status.accumulatedPastExexcutionTimeSeconds",
                ],
            )
        ),
        limit=True,
        about="The Workload is deactivated when all its admissions together have lasted that long.",
    ),
)

#: Of Kubernetes itself, and of job queues.
CLUSTER_ROWS: tuple[Row, ...] = (*_NODES, *_DEVICES, *_PODS, *_JOBS)


BUILT_IN: tuple[Row, ...] = (*CLOUD_ROWS, *CLUSTER_ROWS)


class UserRowsError(ValueError):
    """Users' rows cannot be used. The message names each wrong field, what was expected and what was found."""


class _File(Model):
    rows: list[Row] = Field(default=[], max_length=256)


def read_user_rows(path: Path) -> tuple[Row, ...]:
    """Returns users' own rows, in the order of the file that the chart mounts.

    Args:
        path: A JSON file, ``{"rows": [...]}``, in the form of the chart's value ``signals``.

    Raises:
        UserRowsError: The file cannot be read, a row is wrong, or a name is used already.
    """
    try:
        text = path.read_text(encoding="utf-8")
        read = _File.model_validate_json(text)
    except OSError as error:
        raise UserRowsError(f"signals: {path} cannot be read: {error}") from error
    except ValidationError as error:
        raise UserRowsError(
            "; ".join(_error_text(item["loc"], item["msg"], item["input"]) for item in error.errors())
        ) from error
    built_in_names = {row.name for row in BUILT_IN}
    counts = Counter(row.name for row in read.rows)
    for index, row in enumerate(read.rows):
        if row.name in built_in_names or counts[row.name] > 1:
            whose = "a built-in row's" if row.name in built_in_names else "another row's too"
            raise UserRowsError(f"signals.rows[{index}].name: expected a unique name, found {row.name!r}, {whose}")
    return tuple(read.rows)


def _error_text(location: tuple[int | str, ...], message: str, value: object) -> str:
    path = "signals" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return f"{path}: {message} (found {str(value)[:80]!r})"


#: What a row that names no time assumes.
GRACE = "the grace period"

PAGE_START, PAGE_END = "<!-- rows: generated from the catalogue -->\n", "<!-- end of rows -->\n"

_TIMES = {
    TimeFormat.EPOCH_SECONDS: "the value, in epoch seconds",
    TimeFormat.RFC3339: "the value",
    TimeFormat.HTTP_DATE: "the date in the message",
    TimeFormat.JSON: "in the JSON: {fields}",
    TimeFormat.SECONDS: "the value in seconds after {since}",
    TimeFormat.DURATION: "the value after {since}",
}


def listing(rows: Iterable[Row] = BUILT_IN) -> str:
    """Returns a Markdown list of the rows."""
    lines = []
    for row in rows:
        last = f"{row.cause}, {row.confidence}, {'retractable' if row.cancelable else 'final'}"
        by_when = _by_when(row)
        lines += [
            f"- **`{row.name}`** ({row.provider}): {_matched(row.match)}{_also(row.match)}{_unless(row)}. {row.about}",
            f"  *{last}{'' if by_when == GRACE else f'; deadline: {by_when}'}.*",
        ]
    return "\n".join(lines) + "\n"


def put_into(page: str) -> str:
    """Returns ``page`` with a new list between its two marks."""
    return put_between(page, PAGE_START, PAGE_END, listing())


def _matched(match: Match) -> str:
    if (taint := match.taint) is not None:
        value, effect = f"={taint.value}" if taint.value else "", f":{taint.effect}" if taint.effect else ""
        if match.kind is On.DEVICE:
            return f"{'taint' if taint.key else 'any taint'} `{taint.key or ''}{value}{effect}` of a device"
        return f"taint `{taint.key}{value}{effect}`" if taint.key else f"any other taint `{value}{effect}`"
    on = f"{match.kind}: "
    for name, value_match in (("label", match.label), ("annotation", match.annotation)):
        if value_match is not None:
            but = f', without "{value_match.without}"' if value_match.without else ""
            return f"{on}{name} `{value_match.key}{_values(value_match.values)}`{but}"
    if (condition := match.condition) is not None:
        details = [f"reason {' or '.join(condition.reasons)}"] if condition.reasons else []
        details += [f'message with "{condition.message}"'] if condition.message else []
        return f"{on}condition `{condition.type}={condition.status}`{', ' if details else ''}{', '.join(details)}"
    assert match.field is not None
    return f"{on}`{match.field.path}{_values(match.field.values)}`"


def _also(match: Match) -> str:
    label, condition = match.with_label, match.unless_condition
    with_it = "" if label is None else f", with label `{label.key}{_values(label.values)}`"
    return with_it + ("" if condition is None else f", unless condition `{condition.type}={condition.status}`")


def _values(values: list[str]) -> str:
    return f"={'/'.join(values)}" if values else ""


def _unless(row: Row) -> str:
    if not row.tolerable:
        return ""
    tolerating = "pod's ResourceClaim" if row.match.kind is On.DEVICE else "pod"
    return f", unless the {tolerating} tolerates it for good"


def _by_when(row: Row) -> str:
    rule = row.deadline
    plain = "no signal" if row.limit else _assumed(rule)
    if rule.row:
        return f"the time of `{rule.row}`, else {plain}"
    if rule.time is None:
        return plain
    fields = " or ".join(f"`{field}`" for field in rule.time.json_fields)
    named = _TIMES[rule.time.format].format(fields=fields, since=f"`{rule.time.since}`")
    if rule.time.minus:
        named += f", less {' or '.join(f'`{field}`' for field in rule.time.minus)}"
    return f"{named}; else {plain}"


def _assumed(rule: DeadlineRule) -> str:
    """Describes the deadline if the object names no time."""
    if rule.after_seconds is None:
        plain = GRACE if rule.grace_cap_seconds is None else f"{GRACE}, {rule.grace_cap_seconds:g} s at most"
    else:
        plain = f"{rule.after_seconds:g} s" if rule.after_seconds else "at once"
    if rule.tolerated:
        plain = "tolerationSeconds" if rule.after_seconds == 0 else f"tolerationSeconds and {plain}"
    return plain
