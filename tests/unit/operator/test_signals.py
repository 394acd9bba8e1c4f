"""The disruption catalogue: which objects say what."""

from __future__ import annotations

import pytest

from gracepoint.wire.messages import Confidence
from gracepoint_operator import signals
from gracepoint_operator.objects import read_node, read_pod
from gracepoint_operator.signals import Cause, Signal
from tests.unit.operator import objects
from tests.unit.operator.objects import Body


def of(node: Body, pod: Body) -> list[Signal]:
    return signals.of_pod(read_pod(pod), read_node(node))


def tainted(key: str, effect: str) -> Body:
    return objects.node(taints=[objects.taint(key, effect)])


@pytest.mark.parametrize(
    ("key", "effect", "cause", "confidence", "cancelable", "lead_s"),
    [
        (objects.GKE_TAINT, "NoSchedule", Cause.SPOT_TERMINATION, "sure", False, 15),
        (
            "cloud.google.com/maintenance-window-started",
            "PreferNoSchedule",
            Cause.MAINTENANCE,
            "sure",
            False,
            720,
        ),
        ("aws-node-termination-handler/spot-itn", "NoSchedule", Cause.SPOT_TERMINATION, "sure", False, 120),
        (
            "aws-node-termination-handler/scheduled-maintenance",
            "NoSchedule",
            Cause.MAINTENANCE,
            "sure",
            True,
            40,
        ),
        (
            "aws-node-termination-handler/asg-lifecycle-termination",
            "NoSchedule",
            Cause.SCALE_DOWN,
            "sure",
            False,
            40,
        ),
        (
            "aws-node-termination-handler/rebalance-recommendation",
            "NoSchedule",
            Cause.REBALANCE,
            "hint",
            True,
            40,
        ),
        ("karpenter.sh/disrupted", "NoSchedule", Cause.SCALE_DOWN, "sure", False, 40),
        ("ToBeDeletedByClusterAutoscaler", "NoSchedule", Cause.SCALE_DOWN, "sure", False, 40),
        ("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule", Cause.SCALE_DOWN, "hint", True, 40),
        (
            "remediator.kubernetes.azure.com/unschedulable",
            "NoSchedule",
            Cause.MAINTENANCE,
            "sure",
            True,
            30,
        ),
        ("node.kubernetes.io/out-of-service", "NoExecute", Cause.NODE_LOST, "sure", False, 0),
        ("node.kubernetes.io/not-ready", "NoExecute", Cause.NODE_LOST, "likely", True, 300),
        ("node.kubernetes.io/unreachable", "NoExecute", Cause.NODE_LOST, "likely", True, 300),
        ("node.kubernetes.io/unschedulable", "NoSchedule", Cause.DRAIN, "hint", True, 40),
        ("example.com/evacuate", "NoExecute", Cause.NODE_TAINT, "sure", True, 40),
    ],
)
def test_a_taint_of_the_catalogue_is_a_signal(
    key: str, effect: str, cause: Cause, confidence: str, cancelable: bool, lead_s: float
) -> None:
    (signal,) = of(tainted(key, effect), objects.pod(grace_s=40))
    assert signal.cause is cause
    assert signal.confidence is Confidence(confidence)
    assert signal.cancelable is cancelable
    assert signal.lead_s == lead_s
    assert signal.node == "node-1"


@pytest.mark.parametrize(
    ("grace_s", "lead_s"), [(5, 5), (600, 15)], ids=["short grace counts", "long grace is cut by GKE"]
)
def test_a_spot_termination_leaves_the_pods_grace_period_but_at_most_15_s(grace_s: int, lead_s: float) -> None:
    (signal,) = of(tainted(objects.GKE_TAINT, "NoSchedule"), objects.pod(grace_s=grace_s))
    assert signal.lead_s == lead_s


def test_the_autoscaler_cuts_a_long_grace_period_to_600_s() -> None:
    (signal,) = of(tainted("ToBeDeletedByClusterAutoscaler", "NoSchedule"), objects.pod(grace_s=3600))
    assert signal.lead_s == 600


@pytest.mark.parametrize("key", ["nvidia.com/gpu", "example.com/dedicated"])
def test_an_unknown_taint_that_evicts_nobody_is_no_signal(key: str) -> None:
    assert of(tainted(key, "NoSchedule"), objects.pod()) == []


def test_a_no_execute_taint_that_is_tolerated_for_good_is_no_signal() -> None:
    pod = objects.pod(tolerations=[{"operator": "Exists"}])
    assert of(tainted("example.com/evacuate", "NoExecute"), pod) == []
    assert of(tainted("node.kubernetes.io/not-ready", "NoExecute"), pod) == []


def test_a_spot_termination_counts_though_the_pod_tolerates_its_taint() -> None:
    pod = objects.pod(tolerations=[{"operator": "Exists"}])
    assert [signal.cause for signal in of(tainted(objects.GKE_TAINT, "NoSchedule"), pod)] == [Cause.SPOT_TERMINATION]


def test_a_no_execute_taint_that_is_tolerated_for_a_while_leaves_that_and_the_grace_period() -> None:
    toleration = {"key": "example.com/evacuate", "operator": "Exists", "tolerationSeconds": 60}
    (signal,) = of(tainted("example.com/evacuate", "NoExecute"), objects.pod(grace_s=30, tolerations=[toleration]))
    assert signal.lead_s == 90


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("PreemptionByScheduler", Cause.PRIORITY_PREEMPTION),
        ("DeletionByTaintManager", Cause.NODE_TAINT),
        ("EvictionByEvictionAPI", Cause.DRAIN),
        ("DeletionByPodGC", Cause.NODE_LOST),
        ("TerminationByKubelet", Cause.NODE_PRESSURE),
        ("ExclusivePlacementViolation", Cause.POD_DELETION),
    ],
)
def test_a_disruption_target_is_a_signal_with_the_cause_of_its_reason(reason: str, cause: Cause) -> None:
    (signal,) = of(objects.node(), objects.pod(disruption=reason))
    assert (signal.cause, signal.confidence, signal.lead_s) == (cause, Confidence.SURE, 30)


def test_a_deletion_leaves_the_grace_period_of_the_deletion() -> None:
    pod = objects.pod(deleting_at=objects.NOW + 5, grace_s=5)
    (signal,) = of(objects.node(), pod)
    assert (signal.cause, signal.lead_s) == (Cause.POD_DELETION, 5)


def test_a_pod_that_has_ended_has_no_signals() -> None:
    pod = objects.pod(phase="Failed", disruption="EvictionByEvictionAPI", deleting_at=objects.NOW)
    assert of(tainted(objects.GKE_TAINT, "NoSchedule"), pod) == []


def test_a_taint_that_is_put_again_with_another_time_is_a_new_mark() -> None:
    first, again = (
        read_node(objects.node(taints=[objects.taint("a", "NoExecute", added_at=at)]))
        for at in (objects.NOW, objects.NOW + 9)
    )
    assert signals.marks_of_node(first).keys() != signals.marks_of_node(again).keys()


@pytest.mark.parametrize(
    ("key", "disrupted"),
    [(objects.GKE_TAINT, True), ("node.kubernetes.io/unschedulable", False), ("nvidia.com/gpu", False)],
)
def test_new_pods_are_kept_off_nodes_that_surely_or_likely_go(key: str, disrupted: bool) -> None:
    assert signals.is_disrupted(read_node(tainted(key, "NoSchedule"))) is disrupted
