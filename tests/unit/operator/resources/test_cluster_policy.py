"""Which namespaces a ClusterCheckpointPolicy is for, and what it is refused for."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy, made_from
from tests.unit.operator.fakes import objects

TEAM = {"team": "research", "tier": "gold"}


def expression(operator: str, *values: str, key: str = "team") -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        pytest.param({}, True, id="empty"),
        pytest.param({"matchLabels": {"team": "research"}}, True, id="label"),
        pytest.param({"matchLabels": {"team": "web"}}, False, id="another value"),
        pytest.param({"matchLabels": {"team": "research", "tier": "bronze"}}, False, id="one of two labels"),
        pytest.param(expression("In", "web", "research"), True, id="In"),
        pytest.param(expression("In", "web"), False, id="In others"),
        pytest.param(expression("NotIn", "web"), True, id="NotIn"),
        pytest.param(expression("NotIn", "web", key="stage"), True, id="NotIn without the label"),
        pytest.param(expression("NotIn", "research"), False, id="NotIn with the value"),
        pytest.param(expression("Exists"), True, id="Exists"),
        pytest.param(expression("Exists", key="stage"), False, id="Exists without the label"),
        pytest.param(expression("DoesNotExist", key="stage"), True, id="DoesNotExist"),
        pytest.param(expression("DoesNotExist"), False, id="DoesNotExist with the label"),
        pytest.param({"matchLabels": {"team": "research"}, **expression("NotIn", "gold", key="tier")}, False, id="all"),
    ],
)
def test_it_is_for_the_namespaces_that_its_selector_matches(selector: dict[str, Any], selected: bool) -> None:
    assert ClusterCheckpointPolicy.of(objects.cluster_policy(selector=selector)).selects(TEAM) is selected


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"namespaceSelector": None}, "namespaceSelector", id="no selector"),
        pytest.param({"namespaceSelector": expression("In")}, "values must be there", id="In without values"),
        pytest.param({"namespaceSelector": expression("Exists", "x")}, "values must be there", id="Exists with values"),
        pytest.param({"limits": {"longestHoldSeconds": 3601}}, "longestHoldSeconds", id="a longer hold than any"),
        pytest.param({"limits": {"longestHoldSeconds": -1}}, "longestHoldSeconds", id="less than nothing"),
        pytest.param({"default": {}}, "checkpoint", id="a default without a directory"),
    ],
)
def test_what_is_wrong_in_it_is_said(change: dict[str, Any], says: str) -> None:
    body = objects.cluster_policy()
    body["spec"] |= change
    with pytest.raises(Unreadable, match=says):
        ClusterCheckpointPolicy.of(body)


def test_its_default_is_a_policy_of_the_namespace_that_goes_with_it() -> None:
    original = ClusterCheckpointPolicy.of(objects.cluster_policy("gold", default={"mode": "Observe"}))
    policy = original.as_policy("team-a")
    assert policy is not None
    assert (policy.namespace, policy.name, policy.spec.mode) == ("team-a", "gold", "Observe")
    assert made_from(policy) == "gold"
    (owner,) = policy.metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("ClusterCheckpointPolicy", "gold", original.uid)
    assert made_from(CheckpointPolicy.of(objects.policy())) == "", "a user's"
    assert ClusterCheckpointPolicy.of(objects.cluster_policy()).as_policy("team-a") is None


def test_limits_shorten_a_hold_and_end_protection_and_lengthen_nothing() -> None:
    policy = CheckpointPolicy.of(
        objects.policy(evictionHold={"boundSeconds": 90}, voluntaryDisruption={"checkpointYoungerThanSeconds": 600})
    )
    assert policy.within(600) is policy
    assert policy.within(60).spec.eviction_hold.bound_seconds == 60
    off = policy.within(0, protection=False).spec
    assert (off.eviction_hold.enabled, off.voluntary_disruption.checkpoint_younger_than_seconds) == (False, 0)
    never = CheckpointPolicy.of(objects.policy(evictionHold={"enabled": False}))
    assert never.within(600).spec.eviction_hold.enabled is False
