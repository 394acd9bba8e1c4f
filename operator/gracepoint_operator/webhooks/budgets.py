"""Whether PodDisruptionBudgets forbid an eviction. Pure.

The API server calls the webhooks before it checks the budgets. So the webhook also sees an attempt that a budget is
going to refuse. Such an attempt must not make a gang leave, because its owner has said that it may not be disrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gracepoint_operator.resources.label_selector import selects


def forbid(budgets: Iterable[Mapping[str, Any]], labels: Mapping[str, str], *, ready: bool) -> bool:
    """Returns whether the API server is going to refuse to evict a running pod.

    Args:
        budgets: All PodDisruptionBudgets (policy/v1) of the pod's namespace.
        labels: The pod's labels.
        ready: Whether the pod's condition Ready is True. A pod that is not ready does not count as healthy, so a budget
            may allow its eviction (``spec.unhealthyPodEvictionPolicy``).
    """
    about_it = [budget for budget in budgets if selects((budget.get("spec") or {}).get("selector"), labels)]
    if len(about_it) > 1:
        return True  # the eviction subresource supports only one budget for a pod, and fails if there are two
    return any(not (_allows(budget) or (not ready and _lets_unready_go(budget))) for budget in about_it)


def _allows(budget: Mapping[str, Any]) -> bool:
    status = budget.get("status") or {}
    # Kubernetes does not allow an eviction if the budget's status is older than its spec.
    is_current = int(status.get("observedGeneration") or 0) >= int(budget["metadata"].get("generation") or 0)
    return is_current and int(status.get("disruptionsAllowed") or 0) > 0


def _lets_unready_go(budget: Mapping[str, Any]) -> bool:
    """Returns whether the budget allows the eviction of a pod that is not ready, as the eviction subresource decides.

    It does with AlwaysAllow, or if enough other pods are healthy (IfHealthyBudget, the default).
    """
    if budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    status = budget.get("status") or {}
    desired = int(status.get("desiredHealthy") or 0)
    return int(status.get("currentHealthy") or 0) >= desired > 0
