"""Which PodDisruptionBudgets stand against an eviction."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint_operator.webhooks.admission import forbid

LABELS = {"app": "llm", "tier": "gpu"}


def budget(selector: dict[str, Any] | None, **status: int) -> dict[str, Any]:
    return {
        "metadata": {"name": "b", "generation": 2},
        "spec": {} if selector is None else {"selector": selector},
        "status": {"observedGeneration": 2, "disruptionsAllowed": 0, **status},
    }


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("selector", "selects"),
    [
        pytest.param({}, True, id="empty: every pod"),
        pytest.param(None, False, id="absent: no pod"),
        pytest.param({"matchLabels": {"app": "llm"}}, True, id="label"),
        pytest.param({"matchLabels": {"app": "llm", "tier": "cpu"}}, False, id="all labels"),
        pytest.param(expression("app", "In", "llm", "web"), True, id="In"),
        pytest.param(expression("team", "In", "llm"), False, id="In, absent label"),
        pytest.param(expression("app", "NotIn", "llm"), False, id="NotIn"),
        pytest.param(expression("team", "NotIn", "llm"), True, id="NotIn, absent label"),
        pytest.param(expression("app", "Exists"), True, id="Exists"),
        pytest.param(expression("team", "Exists"), False, id="Exists, absent label"),
        pytest.param(expression("app", "DoesNotExist"), False, id="DoesNotExist"),
        pytest.param({"matchLabels": {"app": "llm"}, **expression("team", "Exists")}, False, id="both parts"),
    ],
)
def test_a_budget_forbids_what_its_selector_selects(selector: dict[str, Any] | None, selects: bool) -> None:
    assert forbid([budget(selector)], LABELS, ready=True) is selects


def test_a_budget_that_allows_a_disruption_forbids_nothing() -> None:
    assert not forbid([budget({}, disruptionsAllowed=1)], LABELS, ready=True)


def test_a_budget_whose_figures_are_older_than_its_spec_forbids() -> None:
    assert forbid([budget({}, disruptionsAllowed=1, observedGeneration=1)], LABELS, ready=True)


def test_two_budgets_of_one_pod_forbid_as_kubernetes_fails_at_them() -> None:
    assert forbid([budget({}, disruptionsAllowed=1), budget({}, disruptionsAllowed=1)], LABELS, ready=True)


def test_an_operator_that_kubernetes_does_not_know_is_an_error() -> None:
    with pytest.raises(ValueError, match="found 'Like', expected In"):
        forbid([budget(expression("app", "Like"))], LABELS, ready=True)


@pytest.mark.parametrize(
    ("policy", "healthy", "forbidden"),
    [
        pytest.param(None, 2, False, id="enough others are healthy"),
        pytest.param("IfHealthyBudget", 2, False, id="the same by name"),
        pytest.param("IfHealthyBudget", 1, True, id="too few others are healthy"),
        pytest.param("AlwaysAllow", 0, False, id="always"),
    ],
)
def test_unready_pod_counts_for_no_budget_that_may_release_it(
    policy: str | None, healthy: int, forbidden: bool
) -> None:
    one = budget({}, desiredHealthy=2, currentHealthy=healthy)
    if policy is not None:
        one["spec"]["unhealthyPodEvictionPolicy"] = policy
    assert forbid([one], LABELS, ready=False) is forbidden
    assert forbid([one], LABELS, ready=True)


def test_budget_of_zero_healthy_pods_releases_no_unready_pod() -> None:
    assert forbid([budget({}, desiredHealthy=0, currentHealthy=0)], LABELS, ready=False)
