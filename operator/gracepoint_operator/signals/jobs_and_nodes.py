"""Rows of Kubernetes itself and of job queues: nodes, devices, pods, Jobs, JobSet, Kueue."""

from __future__ import annotations

from gracepoint_operator.signals.row_helpers import HINT, LIKELY, SURE, after, condition, field, taint
from gracepoint_operator.signals.rows import Cause, DeadlineRule, Match, On, Row, TaintMatch, Time, TimeFormat

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
        "at once, and removed without a grace period if the node is not ready.",
    ),
    Row(
        name="node-deleted",
        provider="Kubernetes",
        match=field(On.NODE, "metadata.deletionTimestamp"),
        cause=Cause.SCALE_DOWN,
        confidence=SURE,
        cancelable=False,
        deadline=after(120.0),
        about="The Node is deleted, and a finalizer holds it until its machine is given back. Nothing brings it back. "
        "Karpenter deletes the Node with its NodeClaim, and the NodeClaim with its Node; its 120 s count. A Node "
        "without a finalizer is gone at once, and Kubernetes then deletes its pods.",
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
        about="Set when the kubelet says that it is not ready; removed when it is ready again. The pod is deleted "
        "after the seconds for which it tolerates the taint, 300 by default.",
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
        about="Set when the kubelet has not reported for 50 s (40 s before Kubernetes 1.32); removed when it reports "
        "again. The pod is deleted after the seconds for which it tolerates the taint, 300 by default.",
    ),
    Row(
        name="node-shutdown",
        provider="kubelet",
        match=condition(On.NODE, "Ready", status="False", message="node is shutting down"),
        cause=Cause.NODE_SHUTDOWN,
        confidence=SURE,
        cancelable=False,
        deadline=DeadlineRule(grace_cap_seconds=KUBELET_SHUTDOWN_S),
        about="Graceful node shutdown: the kubelet writes it as it begins to end the pods, which it does to the end "
        "even if the shutdown is called off (pkg/kubelet/nodeshutdown). They get their grace period, at most the "
        "kubelet's shutdownGracePeriod, which the API does not tell. The example of Kubernetes is assumed: 30 s, of "
        "which the last 10 s are for critical pods (kubernetes.io/docs/concepts/cluster-administration/node-shutdown).",
    ),
    Row(
        name="node-cordoned",
        provider="kubectl, drainers",
        match=field(On.NODE, "spec.unschedulable", "true"),
        cause=Cause.DRAIN,
        confidence=HINT,
        cancelable=True,
        about="Often a drain follows. Nobody knows when, nor whether; kubectl uncordon takes it back.",
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
        about="The pod is deleted when its tolerationSeconds are over, or at once if it has none. It then has its "
        "grace period. If the taint is removed before, the pod stays "
        "(kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration).",
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
        about="The driver writes it into a ResourceSlice, or an administrator into a DeviceTaintRule. The pods that "
        "use the device are deleted when the tolerationSeconds of their claim are over, or at once if it has none. "
        "They then have their grace period. If the taint is removed before, they stay. Watched with the chart's "
        "deviceTaints.enabled "
        "(kubernetes.io/docs/concepts/resource-management/dynamic-resource-allocation/device-taints).",
    ),
)

_PODS = (
    _pod_condition(
        "pod-preempted",
        "PreemptionByScheduler",
        Cause.PRIORITY_PREEMPTION,
        "A pod or a group of pods of higher priority takes its place. As the reasons below, it is set a moment before "
        "the pod is deleted. If that fails, Kubernetes sets the condition to False after two minutes "
        "(pkg/controller/disruption).",
    ),
    _pod_condition("pod-taint-manager", "DeletionByTaintManager", Cause.NODE_TAINT, "A NoExecute taint took effect."),
    _pod_condition(
        "pod-device-taint",
        "DeletionByDeviceTaintManager",
        Cause.HARDWARE,
        "A NoExecute taint of a device that the pod uses took effect (dynamic resource allocation).",
    ),
    _pod_condition("pod-evicted", "EvictionByEvictionAPI", Cause.DRAIN, "An eviction was let through."),
    _pod_condition(
        "pod-collected",
        "DeletionByPodGC",
        Cause.NODE_LOST,
        "Its node has been gone for 40 s. The pod is marked as failed in the same request, and removed without a grace "
        "period.",
    ),
    Row(
        name="pod-kubelet",
        provider="kubelet",
        match=condition(On.POD, "DisruptionTarget", reasons=("TerminationByKubelet",)),
        cause=Cause.NODE_PRESSURE,
        confidence=SURE,
        cancelable=False,
        deadline=DeadlineRule(grace_cap_seconds=KUBELET_SHUTDOWN_S),
        about="Pressure on the node, a graceful node shutdown, or a critical pod that needs the place. The kubelet "
        "writes it as it ends the pod, and Kubernetes never sets it to False. How much of its grace period it leaves "
        "the pod is not told: under a hard threshold none, else what the kubelet's configuration allows; the time of "
        "a node shutdown is assumed.",
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
        about="Nothing brings the pod back. Only if its Job and its JobSet are neither deleted, finished nor of an "
        "older attempt.",
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
        about="Another workload takes the quota; the condition's message names it. The workload is suspended next, "
        "and the condition stays True until it has stopped and is admitted again (pkg/controller/jobframework of "
        "Kueue).",
    ),
    Row(
        name="kueue-evicted",
        provider="Kueue",
        match=condition(On.WORKLOAD, "Evicted"),
        cause=Cause.SUSPENSION,
        confidence=SURE,
        cancelable=False,
        about="The queue takes the quota back, with the reason (PodsReadyTimeout, Deactivated, NodeFailures, ...); "
        "the JobSet or Job is suspended next, whatever happens to the reason.",
    ),
    Row(
        name="jobset-suspended",
        provider="Kueue, users",
        match=field(On.JOB_SET, "spec.suspend", "true"),
        cause=Cause.SUSPENSION,
        confidence=SURE,
        cancelable=False,
        about="JobSet suspends its Jobs, which delete their pods at once. If it is resumed, it begins with new pods.",
    ),
    Row(
        name="job-suspended",
        provider="Kueue, users",
        match=field(On.JOB, "spec.suspend", "true"),
        cause=Cause.SUSPENSION,
        confidence=SURE,
        cancelable=False,
        about="The Job deletes its pods at once. If it is resumed, it begins with new pods, and its time limit anew.",
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
        about="The Job's pods are deleted when its time is over. The time is known from the start, and somebody may "
        "change or remove it while the Job runs.",
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
        about="The Workload is deactivated when all its admissions together have lasted that long. Kueue lets nobody "
        "change it while the Workload is admitted.",
    ),
)

ROWS: tuple[Row, ...] = (*_NODES, *_DEVICES, *_PODS, *_JOBS)
