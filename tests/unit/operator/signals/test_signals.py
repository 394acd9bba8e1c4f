"""The disruption catalogue: which objects, as their providers write them, say what, and by when."""

from __future__ import annotations

import dataclasses
import email.utils
import json
from typing import Any

import pytest

from gracepoint.receivers.mailbox import NODE_LOST
from gracepoint.wire.messages import Confidence
from gracepoint_operator import signals
from gracepoint_operator.resources import SignalKind
from gracepoint_operator.signals import BUILT_IN, Cause, On, Row, Signal
from gracepoint_operator.workloads import read_pod
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import NOW, Body, stamp

GRACE_S = 40
NTH = "aws-node-termination-handler"
TERMINATION = "karpenter.sh/nodeclaim-termination-timestamp"
SURE, LIKELY, HINT = Confidence.SURE, Confidence.LIKELY, Confidence.HINT


def seen(on: On, body: Body, pod: Body | None = None, rows: tuple[Row, ...] = BUILT_IN) -> list[Signal]:
    """The signals of one object for a pod."""
    return signals.of_pod(read_pod(pod or objects.pod(grace_s=GRACE_S)), signals.marks(rows, on, body))


def tainted(key: str, effect: str = "NoSchedule", value: str | None = None) -> Body:
    taint = objects.taint(key, effect) | ({} if value is None else {"value": value})
    return objects.node(taints=[taint])


@dataclasses.dataclass(frozen=True)
class Case:
    """A row, an object that it is for, and what follows."""

    row: str
    on: On
    body: Body
    cause: Cause
    confidence: Confidence
    cancelable: bool
    in_s: float  # from NOW, at which the signal begins
    text: str
    pod: Body | None = None


def on_node(
    row: str, body: Body, cause: Cause, confidence: Confidence, cancelable: bool, in_s: float, text: str
) -> Case:
    return Case(row, On.NODE, body, cause, confidence, cancelable, in_s, text)


def by_taint(
    row: str, key: str, cause: Cause, confidence: Confidence, cancelable: bool, in_s: float, effect: str = "NoSchedule"
) -> Case:
    return on_node(row, tainted(key, effect), cause, confidence, cancelable, in_s, f"taint {key}:{effect}")


def aks(event: str) -> Body:
    """node-problem-detector's condition on AKS."""
    message = f"{event} Scheduled: Sun, 01 Mar 2026 12:05:00 GMT"
    condition = objects.condition("VMEventScheduled", reason="VMEventScheduled", message=message)
    return objects.node(conditions=[condition])


def spot_eviction(at: float) -> Body:
    """As AKS's node-problem-detector writes it."""
    date = email.utils.formatdate(at, usegmt=True)
    message = f"Preempt Scheduled: {date}. For more information, see https://example.com. EventId: 1"
    return objects.condition("PreemptionScheduled", reason="SpotEvictionIncoming", message=message)


def evicted_by(reason: str) -> Body:
    return objects.pod(disruption=reason, grace_s=GRACE_S)


UPCOMING = {
    "type": "SCHEDULED",
    "maintenance_status": "PENDING",
    "can_reschedule": True,
    "window_start_time": stamp(NOW + 1800),
    "window_end_time": stamp(NOW + 5400),
}
CAMEL = {"maintenanceStatus": "PENDING", "windowStartTime": stamp(NOW + 1800)}
LIMITED_JOB = objects.job() | {
    "spec": {"activeDeadlineSeconds": 3000},
    "status": {"startTime": stamp(NOW - 600)},
}
ADMITTED = objects.condition("Admitted", reason="Admitted", at=NOW - 300)
CASES = [
    by_taint("gke-impending-termination", objects.GKE_TAINT, Cause.SPOT_TERMINATION, SURE, False, 15),
    by_taint(
        "gke-maintenance-window-started",
        "cloud.google.com/maintenance-window-started",
        Cause.MAINTENANCE,
        SURE,
        False,
        660,
        "PreferNoSchedule",
    ),
    on_node(
        "gke-active-maintenance",
        objects.node(labels={"cloud.google.com/active-node-maintenance": "ONGOING"}),
        Cause.MAINTENANCE,
        SURE,
        False,
        GRACE_S,
        "label cloud.google.com/active-node-maintenance=ONGOING",
    ),
    on_node(
        "gke-scheduled-maintenance",
        objects.node(labels={"cloud.google.com/scheduled-maintenance-time": f"{NOW + 7200:.0f}"}),
        Cause.MAINTENANCE,
        LIKELY,
        True,
        7200,
        f"label cloud.google.com/scheduled-maintenance-time={NOW + 7200:.0f}",
    ),
    *(
        on_node(
            "gke-upcoming-maintenance",
            objects.node(annotations={"node.gke.io/upcoming-maintenance": json.dumps(value)}),
            Cause.MAINTENANCE,
            LIKELY,
            True,
            1800,
            "annotation node.gke.io/upcoming-maintenance=",
        )
        for value in (UPCOMING, CAMEL)
    ),
    by_taint("aws-spot-interruption", f"{NTH}/spot-itn", Cause.SPOT_TERMINATION, SURE, False, 120),
    by_taint("aws-scheduled-maintenance", f"{NTH}/scheduled-maintenance", Cause.MAINTENANCE, SURE, True, GRACE_S),
    by_taint("aws-asg-termination", f"{NTH}/asg-lifecycle-termination", Cause.SCALE_DOWN, SURE, False, GRACE_S),
    by_taint("aws-rebalance", f"{NTH}/rebalance-recommendation", Cause.REBALANCE, HINT, True, GRACE_S),
    by_taint("karpenter-disrupted", "karpenter.sh/disrupted", Cause.SCALE_DOWN, HINT, True, GRACE_S),
    Case(
        "karpenter-interruption",
        On.NODE_CLAIM,
        objects.node_claim(expire_after="Never", deleted_at=NOW, labels={"karpenter.sh/capacity-type": "spot"}),
        Cause.SPOT_TERMINATION,
        SURE,
        False,
        120,
        "deletion of the NodeClaim",
    ),
    *(
        Case(
            "karpenter-deletion",
            On.NODE_CLAIM,
            objects.node_claim(
                expire_after="Never",
                deleted_at=NOW,
                labels={"karpenter.sh/capacity-type": capacity},
                conditions=[objects.condition("DisruptionReason", reason="Drifted")] if drifted else [],
            ),
            Cause.SCALE_DOWN,
            SURE,
            False,
            120,
            "deletion of the NodeClaim",
        )
        for capacity, drifted in (("spot", True), ("on-demand", True), ("on-demand", False))
    ),
    Case(
        "karpenter-deletion",
        On.NODE_CLAIM,
        objects.node_claim(expire_after="Never", deleted_at=NOW),
        Cause.SCALE_DOWN,
        SURE,
        False,
        120,
        "deletion of the NodeClaim",
    ),
    on_node(
        "node-deleted",
        objects.node(deleted_at=NOW),
        Cause.SCALE_DOWN,
        SURE,
        False,
        120,
        "deletion of the node",
    ),
    Case(
        "karpenter-termination-time",
        On.NODE_CLAIM,
        objects.node_claim(annotations={TERMINATION: stamp(NOW + 900)}, expire_after="Never"),
        Cause.SCALE_DOWN,
        SURE,
        False,
        900,
        "annotation karpenter.sh/nodeclaim-termination-timestamp=2026-03-01T12:15:00Z",
    ),
    Case(
        "karpenter-expiry",
        On.NODE_CLAIM,
        objects.node_claim(expire_after="1h30m", created_at=NOW - 3600),
        Cause.SCALE_DOWN,
        SURE,
        False,
        1800,
        "NodeClaim spec.expireAfter=1h30m",
    ),
    by_taint("autoscaler-deletion", "ToBeDeletedByClusterAutoscaler", Cause.SCALE_DOWN, SURE, True, GRACE_S),
    by_taint(
        "autoscaler-candidate",
        "DeletionCandidateOfClusterAutoscaler",
        Cause.SCALE_DOWN,
        HINT,
        True,
        GRACE_S,
        "PreferNoSchedule",
    ),
    *(
        on_node(
            f"aks-{event.lower()}",
            aks(event),
            cause,
            confidence,
            True,
            300,
            "Node condition VMEventScheduled (VMEventScheduled)",
        )
        for event, cause, confidence in (
            ("Freeze", Cause.MAINTENANCE, HINT),
            ("Preempt", Cause.SPOT_TERMINATION, SURE),
            ("Terminate", Cause.SCALE_DOWN, SURE),
            ("Redeploy", Cause.MAINTENANCE, SURE),
            ("Reboot", Cause.MAINTENANCE, SURE),
        )
    ),
    on_node(
        "aks-preemption-scheduled",
        objects.node(conditions=[spot_eviction(NOW + 300)]),
        Cause.SPOT_TERMINATION,
        SURE,
        True,
        300,
        "Node condition PreemptionScheduled (SpotEvictionIncoming)",
    ),
    by_taint("aks-remediator", "remediator.kubernetes.azure.com/unschedulable", Cause.MAINTENANCE, SURE, True, 30),
    by_taint("node-out-of-service", "node.kubernetes.io/out-of-service", Cause.NODE_LOST, SURE, False, 0, "NoExecute"),
    by_taint("node-not-ready", "node.kubernetes.io/not-ready", Cause.NODE_LOST, LIKELY, True, 300, "NoExecute"),
    by_taint("node-unreachable", "node.kubernetes.io/unreachable", Cause.NODE_LOST, LIKELY, True, 300, "NoExecute"),
    on_node(
        "node-shutdown",
        objects.node(conditions=[objects.shutdown()]),
        Cause.NODE_SHUTDOWN,
        SURE,
        False,
        20,  # of a grace period of 40
        "Node condition Ready (False, KubeletNotReady)",
    ),
    on_node(
        "node-cordoned",
        objects.node(unschedulable=True),
        Cause.DRAIN,
        HINT,
        True,
        GRACE_S,
        "Node spec.unschedulable=true",
    ),
    by_taint("no-execute", "example.com/evacuate", Cause.NODE_TAINT, SURE, True, GRACE_S, "NoExecute"),
    *(
        Case(row, On.POD, evicted_by(reason), cause, SURE, True, GRACE_S, f"condition DisruptionTarget ({reason})")
        for row, reason, cause in (
            ("pod-preempted", "PreemptionByScheduler", Cause.PRIORITY_PREEMPTION),
            ("pod-taint-manager", "DeletionByTaintManager", Cause.NODE_TAINT),
            ("pod-device-taint", "DeletionByDeviceTaintManager", Cause.HARDWARE),
            ("pod-evicted", "EvictionByEvictionAPI", Cause.DRAIN),
            ("pod-collected", "DeletionByPodGC", Cause.NODE_LOST),
            ("pod-disrupted", "ExclusivePlacementViolation", Cause.POD_DELETION),
        )
    ),
    Case(
        "pod-kubelet",
        On.POD,
        evicted_by("TerminationByKubelet"),
        Cause.NODE_PRESSURE,
        SURE,
        False,
        20,  # of a grace period of 40
        "condition DisruptionTarget (TerminationByKubelet)",
    ),
    Case(
        "pod-deleted",
        On.POD,
        objects.pod(deleting_at=NOW + 5, grace_s=5),
        Cause.POD_DELETION,
        SURE,
        False,
        5,
        "deletion of the pod",
        pod=objects.pod(deleting_at=NOW + 5, grace_s=5),
    ),
    Case(
        "kueue-preempted",
        On.WORKLOAD,
        objects.workload(
            conditions=[objects.condition("Evicted", reason="Preempted", message="for a workload (UID: 1)")]
        ),
        Cause.PRIORITY_PREEMPTION,
        SURE,
        False,
        GRACE_S,
        "Workload condition Evicted (Preempted): for a workload (UID: 1)",
    ),
    Case(
        "kueue-evicted",
        On.WORKLOAD,
        objects.workload(conditions=[objects.condition("Evicted", reason="InactiveWorkload")]),
        Cause.SUSPENSION,
        SURE,
        False,
        GRACE_S,
        "Workload condition Evicted (InactiveWorkload)",
    ),
    Case(
        "jobset-suspended",
        On.JOB_SET,
        objects.jobset(suspended=True),
        Cause.SUSPENSION,
        SURE,
        False,
        GRACE_S,
        "JobSet spec.suspend=true",
    ),
    Case(
        "job-suspended",
        On.JOB,
        objects.job(suspended=True),
        Cause.SUSPENSION,
        SURE,
        False,
        GRACE_S,
        "Job spec.suspend=true",
    ),
    Case(
        "job-time-limit",
        On.JOB,
        LIMITED_JOB,
        Cause.TIME_LIMIT,
        SURE,
        True,
        2400,
        "Job spec.activeDeadlineSeconds=3000",
    ),
    Case(
        "kueue-time-limit",
        On.WORKLOAD,
        objects.workload(conditions=[ADMITTED], limit_s=1000, used_s=100),
        Cause.TIME_LIMIT,
        SURE,
        False,
        600,
        "Workload spec.maximumExecutionTimeSeconds=1000",
    ),
    Case(
        "device-taint",
        On.DEVICE,
        tainted("example.com/broken", "NoExecute"),  # the taints of one device, as the cache hands them over
        Cause.HARDWARE,
        SURE,
        True,
        GRACE_S,
        "taint example.com/broken:NoExecute",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.row)
def test_what_a_provider_writes_is_the_signal_of_its_row(case: Case) -> None:
    marks = signals.marks(BUILT_IN, case.on, case.body)
    assert [mark.row.name for mark in marks] == [case.row]
    (signal,) = seen(case.on, case.body, case.pod)
    assert signal.deadline_at(NOW) == NOW + case.in_s
    assert (signal.cause, signal.confidence, signal.cancelable) == (case.cause, case.confidence, case.cancelable)
    assert signal.text.startswith(case.text)
    assert signal.node == "node-1"


def test_every_row_has_an_object_that_it_is_tested_with() -> None:
    assert {case.row for case in CASES} == {row.name for row in BUILT_IN}


def test_every_kind_that_is_seen_on_objects_has_a_row() -> None:
    assert {row.kind for row in BUILT_IN} == set(SignalKind) - {SignalKind.EVICTION, SignalKind.REQUEST}


@pytest.mark.parametrize(
    ("on", "body"),
    [
        pytest.param(On.NODE, tainted("nvidia.com/gpu"), id="a taint that evicts nobody"),
        pytest.param(On.NODE, objects.node(), id="a node as any other"),
        pytest.param(
            On.NODE,
            objects.node(conditions=[objects.condition("VMEventScheduled", "False", reason="NoVMEventScheduled")]),
            id="AKS: no event",
        ),
        pytest.param(
            On.NODE,
            objects.node(conditions=[objects.condition("Ready", "False", reason="KubeletNotReady", message="PLEG")]),
            id="a node that is not ready for another reason",
        ),
        pytest.param(
            On.NODE,
            objects.node(
                annotations={
                    "node.gke.io/upcoming-maintenance": json.dumps(UPCOMING | {"maintenance_status": "COMPLETE"})
                }
            ),
            id="GKE: maintenance that is over",
        ),
        pytest.param(On.NODE_CLAIM, objects.node_claim(expire_after="Never"), id="a node that never expires"),
        pytest.param(On.JOB, objects.job(), id="a Job as any other"),
        pytest.param(
            On.JOB, objects.job() | {"spec": {"activeDeadlineSeconds": 9}}, id="a limited Job that has not started"
        ),
        pytest.param(On.JOB_SET, objects.jobset(), id="a JobSet as any other"),
        pytest.param(
            On.WORKLOAD,
            objects.workload(conditions=[objects.condition("Evicted", "False", reason="QuotaReserved")]),
            id="a Workload that was admitted again",
        ),
        pytest.param(On.POD, objects.pod(), id="a pod as any other"),
    ],
)
def test_what_says_nothing_of_an_end_is_no_signal(on: On, body: Body) -> None:
    assert signals.marks(BUILT_IN, on, body) == ()


def test_a_pod_that_has_ended_has_no_signals() -> None:
    pod = objects.pod(phase="Failed", disruption="EvictionByEvictionAPI", deleting_at=NOW)
    assert seen(On.POD, pod, pod) == []


# By when.


@pytest.mark.parametrize(
    ("key", "grace_s", "in_s"),
    [
        pytest.param(objects.GKE_TAINT, 5, 5, id="GKE leaves a short grace period as it is"),
        pytest.param(objects.GKE_TAINT, 600, 15, id="... and cuts a long one"),
        pytest.param("ToBeDeletedByClusterAutoscaler", 3600, 600, id="the autoscaler waits 600 s"),
    ],
)
def test_a_grace_period_is_cut_to_what_the_provider_leaves(key: str, grace_s: int, in_s: float) -> None:
    (signal,) = seen(On.NODE, tainted(key), objects.pod(grace_s=grace_s))
    assert signal.deadline_at(NOW) == NOW + in_s


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("soon", id="no number"),
        pytest.param(f"{NOW - 60:.0f}", id="over"),
        pytest.param("", id="empty"),
    ],
)
def test_past_or_unreadable_time_leaves_the_grace_period(value: str) -> None:
    (signal,) = seen(On.NODE, objects.node(labels={"cloud.google.com/scheduled-maintenance-time": value}))
    assert signal.deadline_at(NOW) == NOW + GRACE_S


@pytest.mark.parametrize("value", ["NONE", "[]", "{}", '{"window_start_time": null}', '"2026"'])
def test_an_annotation_without_the_window_leaves_the_grace_period(value: str) -> None:
    (signal,) = seen(On.NODE, objects.node(annotations={"node.gke.io/upcoming-maintenance": value}))
    assert signal.deadline_at(NOW) == NOW + GRACE_S


def test_a_row_may_have_the_time_that_another_row_names() -> None:
    mine = Row.model_validate(
        {
            "name": "mine",
            "provider": "us",
            "match": {"taint": {"key": "example.com/leaving"}},
            "cause": "ScaleDown",
            "confidence": "sure",
            "cancelable": False,
            "deadline": {"row": "karpenter-termination-time"},
        }
    )
    node = signals.marks([mine], On.NODE, tainted("example.com/leaving"))
    annotation = {TERMINATION: stamp(NOW + 900)}
    claim = signals.marks(BUILT_IN, On.NODE_CLAIM, objects.node_claim(annotations=annotation))
    found = signals.of_pod(read_pod(objects.pod(grace_s=GRACE_S)), [*node, *claim])
    by_cause = {signal.text.partition("=")[0]: signal.deadline_at(NOW) for signal in found}
    assert by_cause["taint example.com/leaving:NoSchedule"] == NOW + 900


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param({"karpenter.sh/capacity-type": "spot"}, id="spot"),
        pytest.param({"karpenter.sh/capacity-type": "reserved"}, id="reserved"),
        pytest.param({}, id="on demand"),
    ],
)
def test_the_deadline_of_a_deleted_node_claim_is_the_clouds_and_not_the_pools(labels: Body) -> None:
    in_hours = {TERMINATION: stamp(NOW + 8 * 3600)}
    body = objects.node_claim(annotations=in_hours, expire_after="Never", deleted_at=NOW, labels=labels)
    found = seen(On.NODE_CLAIM, body, objects.pod(grace_s=3600))
    (near,) = (signal for signal in found if not signal.is_far(NOW, NOW))
    assert near.deadline_at(NOW) == NOW + 120


@pytest.mark.parametrize(
    ("labels", "conditions", "expected"),
    [
        pytest.param({"karpenter.sh/capacity-type": "spot"}, ["what", None], "karpenter-interruption", id="conditions"),
        pytest.param(None, [], "karpenter-deletion", id="labels"),
        pytest.param(["spot"], [], "karpenter-deletion", id="labels that are a list"),
        pytest.param({"karpenter.sh/capacity-type": 7}, [], "karpenter-deletion", id="a label that is a number"),
    ],
)
def test_a_deletion_counts_though_something_else_cannot_be_read(labels: Any, conditions: Any, expected: str) -> None:
    body = objects.node_claim(expire_after="Never", deleted_at=NOW)
    body["metadata"]["labels"] = labels
    body["status"]["conditions"] = conditions
    assert [mark.row.name for mark in signals.marks(BUILT_IN, On.NODE_CLAIM, body)] == [expected]


def test_a_node_that_karpenter_repairs_ends_at_once() -> None:
    body = objects.node_claim(annotations={TERMINATION: stamp(NOW - 1)}, expire_after="Never", deleted_at=NOW)
    assert min(signal.deadline_at(NOW) for signal in seen(On.NODE_CLAIM, body)) == NOW


@pytest.mark.parametrize(
    ("tolerated_s", "in_s"),
    [
        pytest.param(None, GRACE_S, id="not tolerated"),
        pytest.param(30, 30 + GRACE_S, id="tolerated for a while"),
        pytest.param(3600, 120, id="tolerated for longer than EC2 waits"),
    ],
)
def test_a_taint_that_evicts_leaves_no_more_time_than_the_eviction(tolerated_s: int | None, in_s: float) -> None:
    toleration = {"key": f"{NTH}/spot-itn", "operator": "Exists", "tolerationSeconds": tolerated_s}
    pod = objects.pod(grace_s=GRACE_S, tolerations=[] if tolerated_s is None else [toleration])
    (signal,) = seen(On.NODE, tainted(f"{NTH}/spot-itn", "NoExecute"), pod)
    assert (signal.cause, signal.deadline_at(NOW)) == (Cause.SPOT_TERMINATION, NOW + in_s)


@pytest.mark.parametrize("key", [f"{NTH}/rebalance-recommendation", "karpenter.sh/disrupted"])
def test_a_hints_taint_that_evicts_is_more_than_a_hint(key: str) -> None:
    (signal,) = seen(On.NODE, tainted(key, "NoExecute"))
    assert (signal.cause, signal.confidence, signal.deadline_at(NOW)) == (Cause.NODE_TAINT, SURE, NOW + GRACE_S)


def test_what_is_more_than_an_hour_ahead_is_far() -> None:
    node = objects.node(labels={"cloud.google.com/scheduled-maintenance-time": f"{NOW + 7200:.0f}"})
    (signal,) = seen(On.NODE, node)
    assert signal.is_far(NOW, NOW)
    assert not signal.is_far(NOW, NOW + 3601)


# Tolerations.


def test_a_no_execute_taint_that_is_tolerated_for_good_is_no_signal() -> None:
    pod = objects.pod(tolerations=[{"operator": "Exists"}])
    assert seen(On.NODE, tainted("example.com/evacuate", "NoExecute"), pod) == []
    assert seen(On.NODE, tainted("node.kubernetes.io/not-ready", "NoExecute"), pod) == []


def test_a_spot_termination_counts_though_the_pod_tolerates_its_taint() -> None:
    pod = objects.pod(tolerations=[{"operator": "Exists"}])
    assert [signal.cause for signal in seen(On.NODE, tainted(objects.GKE_TAINT), pod)] == [Cause.SPOT_TERMINATION]


def test_tolerated_no_execute_taint_leaves_toleration_and_grace_period() -> None:
    toleration = {"key": "example.com/evacuate", "operator": "Exists", "tolerationSeconds": 60}
    pod = objects.pod(grace_s=30, tolerations=[toleration])
    (signal,) = seen(On.NODE, tainted("example.com/evacuate", "NoExecute"), pod)
    assert signal.lead_s == 90


# Since when.


def marks_of(body: Body, on: On = On.NODE) -> list[tuple[str, float | None]]:
    return [(mark.id, mark.since_at) for mark in signals.marks(BUILT_IN, on, body)]


def maintenance(at: float) -> Body:
    return objects.node(labels={"cloud.google.com/scheduled-maintenance-time": f"{at:.0f}"})


@pytest.mark.parametrize(
    ("first", "again"),
    [
        pytest.param(
            objects.node(taints=[objects.taint("a", "NoExecute", added_at=NOW)]),
            objects.node(taints=[objects.taint("a", "NoExecute", added_at=NOW + 9)]),
            id="a taint with another time",
        ),
        pytest.param(maintenance(NOW + 600), maintenance(NOW + 900), id="a maintenance that was moved"),
        pytest.param(
            objects.node(conditions=[objects.shutdown()]),
            objects.node(conditions=[objects.shutdown(NOW + 9)]),
            id="a condition that came again",
        ),
        pytest.param(aks("Freeze"), aks("Preempt"), id="another event"),
    ],
)
def test_what_comes_again_is_a_new_mark(first: Body, again: Body) -> None:
    assert {mark for mark, _ in marks_of(first)}.isdisjoint(mark for mark, _ in marks_of(again))


def test_the_same_announcement_in_other_words_is_the_same_mark() -> None:
    values = [json.dumps(UPCOMING), json.dumps(UPCOMING | {"can_reschedule": False})]
    first, again = (objects.node(annotations={"node.gke.io/upcoming-maintenance": value}) for value in values)
    assert marks_of(first) == marks_of(again)


def owned(body: Body, path: list[str], at: float) -> Body:
    fields: Any = {}
    for part in reversed(path):
        fields = {f"f:{part}": fields}
    body["metadata"]["managedFields"] = [{"manager": "x", "time": stamp(at), "fieldsV1": fields}]
    return body


@pytest.mark.parametrize(
    ("on", "body", "since_at"),
    [
        pytest.param(
            On.NODE,
            objects.node(taints=[objects.taint("a", "NoExecute", added_at=NOW - 5)], written_at=NOW - 1),
            NOW - 5,
            id="a taint that tells it",
        ),
        pytest.param(
            On.NODE,
            objects.node(taints=[objects.taint()], written_at=NOW - 7),
            NOW - 7,
            id="a taint that does not: by its owner's last write",
        ),
        pytest.param(
            On.NODE,
            owned(
                maintenance(NOW + 600),
                ["metadata", "labels", "cloud.google.com/scheduled-maintenance-time"],
                NOW - 9,
            ),
            NOW - 9,
            id="a label: the same",
        ),
        pytest.param(On.NODE, maintenance(NOW + 600), None, id="a label of no known owner"),
        pytest.param(On.NODE, objects.node(conditions=[objects.shutdown()]), NOW, id="a condition: its transition"),
        pytest.param(
            On.POD, objects.pod(deleting_at=NOW + 20, grace_s=30), NOW - 10, id="a deletion, without the grace period"
        ),
        pytest.param(
            On.JOB_SET, owned(objects.jobset(suspended=True), ["spec", "suspend"], NOW - 3), NOW - 3, id="a field"
        ),
    ],
)
def test_a_mark_says_since_when_as_far_as_the_api_says(on: On, body: Body, since_at: float | None) -> None:
    ((_, found_at),) = marks_of(body, on)
    assert found_at == since_at


@pytest.mark.parametrize(
    ("metadata", "since_at"),
    [
        pytest.param({"deletionGracePeriodSeconds": 30}, NOW - 10, id="with a grace period"),
        pytest.param({"deletionGracePeriodSeconds": 0}, NOW + 20, id="at once"),
        pytest.param({"deletionGracePeriodSeconds": None}, NOW + 20, id="without one"),
        pytest.param({"deletionTimestamp": ""}, None, id="without a time"),
    ],
)
def test_a_deletion_begins_before_its_grace_period_and_says_so_exactly(metadata: Body, since_at: float | None) -> None:
    body = objects.pod(deleting_at=NOW + 20)
    body["metadata"] |= metadata
    (mark,) = signals.marks(BUILT_IN, On.POD, body)
    assert (mark.text, mark.since_at, mark.is_exact) == ("deletion of the pod", since_at, since_at is not None)


@pytest.mark.parametrize(
    ("length", "said"), [(64, "x" * 64), (65, "x" * 61 + "...")], ids=["as long as is said", "longer"]
)
def test_a_long_value_is_said_in_part(length: int, said: str) -> None:
    row = Row.model_validate(
        {
            "name": "mine",
            "provider": "us",
            "cause": "Maintenance",
            "confidence": "sure",
            "cancelable": True,
            "match": {"label": {"key": "k"}},
        }
    )
    (mark,) = signals.marks([row], On.NODE, objects.node(labels={"k": "x" * length}))
    assert mark.text == f"label k={said}"
    assert (mark.since_at, mark.is_exact) == (None, False)


def test_a_label_was_set_by_the_last_write_of_its_owners() -> None:
    node = maintenance(NOW + 600)
    path = ["metadata", "labels", "cloud.google.com/scheduled-maintenance-time"]
    entries = [owned(node, path, NOW - at)["metadata"]["managedFields"][0] for at in (9, 5, 7)]
    others = owned(node, ["metadata", "labels", "another"], NOW - 1)["metadata"]["managedFields"]
    node["metadata"]["managedFields"] = [
        *entries,
        *others,
        entries[0] | {"time": None},
        {"manager": "of no fields", "fieldsV1": None},
        {"manager": "of no labels", "fieldsV1": {"f:metadata": None}},
    ]
    (mark,) = signals.marks(BUILT_IN, On.NODE, node)
    assert (mark.since_at, mark.is_exact) == (NOW - 5, False)


@pytest.mark.parametrize(
    ("node", "exact"),
    [
        pytest.param(objects.node(taints=[objects.taint(added_at=NOW - 5)]), True, id="a taint that tells it"),
        pytest.param(objects.node(taints=[objects.taint()], written_at=NOW - 7), False, id="a taint that does not"),
        pytest.param(objects.node(conditions=[objects.shutdown()]), True, id="a condition"),
    ],
)
def test_a_mark_says_whether_its_beginning_is_known(node: Body, exact: bool) -> None:
    (mark,) = signals.marks(BUILT_IN, On.NODE, node)
    assert mark.is_exact is exact


def test_parts_that_cannot_be_read_are_named_and_the_others_count() -> None:
    key = "node.gke.io/upcoming-maintenance"
    node = objects.node(annotations={key: "NONE"}, taints=[objects.taint() | {"timeAdded": "yesterday"}])
    unreadable_parts: dict[str, None] = {}
    (mark,) = signals.marks(BUILT_IN, On.NODE, node, unreadable_parts)
    assert (mark.text, mark.until_at) == (f"annotation {key}=NONE", None)
    annotation, taint = sorted(unreadable_parts)
    assert annotation.startswith(f"annotation/{key}: ")
    assert taint.startswith("spec.taints[0]: ")


def test_signal_outside_the_pod_may_be_older_than_the_pod() -> None:
    def lasting(on: On, body: Body) -> list[bool]:
        return [signal.lasting for signal in seen(on, body)]

    assert lasting(On.NODE, tainted(objects.GKE_TAINT)) == [True]
    assert lasting(On.NODE, maintenance(NOW + 600)) == [True]
    assert lasting(On.WORKLOAD, objects.workload(conditions=[objects.condition("Evicted")])) == [True]
    assert lasting(On.POD, evicted_by("PreemptionByScheduler")) == [False]
    assert lasting(On.JOB, LIMITED_JOB) == [False]  # known from the start, and an end all the same


# Where new pods do not go.


@pytest.mark.parametrize(
    ("node", "goes"),
    [
        pytest.param(tainted(objects.GKE_TAINT), True, id="termination"),
        pytest.param(maintenance(NOW + 600), True, id="maintenance"),
        pytest.param(objects.node(unschedulable=True), False, id="a hint"),
        pytest.param(tainted("nvidia.com/gpu"), False, id="a taint of another meaning"),
        pytest.param(tainted("example.com/dedicated", "NoExecute"), False, id="a taint that keeps others off"),
    ],
)
def test_new_pods_are_kept_off_nodes_that_surely_or_likely_go(node: Body, goes: bool) -> None:
    assert any(map(signals.marks_node, signals.marks(BUILT_IN, On.NODE, node))) is goes


def test_a_pod_knows_a_lost_node_by_the_word_of_the_catalogue() -> None:
    assert Cause.NODE_LOST == NODE_LOST
