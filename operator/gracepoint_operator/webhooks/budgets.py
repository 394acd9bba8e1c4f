"""PodDisruptionBudgets, as far as an eviction meets them. Pure.

The API server asks the webhooks first and the budgets afterwards. So an attempt that a budget is going to refuse
reaches us all the same, and must not make a gang leave whose owner has said that it may not be disturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def forbid(budgets: Iterable[Mapping[str, Any]], labels: Mapping[str, str], *, ready: bool) -> bool:
    """Whether the API server is going to refuse to evict a running pod.

    Args:
        budgets: All PodDisruptionBudgets (policy/v1) of the pod's namespace.
        labels: The pod's.
        ready: Its condition Ready. One that is not counts for no budget, which may let it go for that
            (``spec.unhealthyPodEvictionPolicy``).
    """
    about_it = [budget for budget in budgets if _selects((budget.get("spec") or {}).get("selector"), labels)]
    if len(about_it) > 1:
        return True  # the eviction subresource knows only one budget for a pod, and fails at two
    return any(not (_allows(budget) or (not ready and _lets_unready_go(budget))) for budget in about_it)


def _allows(budget: Mapping[str, Any]) -> bool:
    status = budget.get("status") or {}
    # Kubernetes doesn't let a pod go by figures that are older than the budget's spec.
    is_current = int(status.get("observedGeneration") or 0) >= int(budget["metadata"].get("generation") or 0)
    return is_current and int(status.get("disruptionsAllowed") or 0) > 0


def _lets_unready_go(budget: Mapping[str, Any]) -> bool:
    """As the eviction subresource: AlwaysAllow, or enough others are healthy (IfHealthyBudget, the default)."""
    if budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    status = budget.get("status") or {}
    desired = int(status.get("desiredHealthy") or 0)
    return int(status.get("currentHealthy") or 0) >= desired > 0


def _selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """As metav1.LabelSelectorAsSelector: an empty selector means every pod, none at all means no pod."""
    if selector is None:
        return False
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _meets(expression, labels) for expression in selector.get("matchExpressions") or ()
    )


def _meets(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return key in labels and labels[key] in values
        case "NotIn":
            return key not in labels or labels[key] not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case other:
            raise ValueError(f"matchExpressions.operator: found {other!r}, expected In, NotIn, Exists or DoesNotExist")
