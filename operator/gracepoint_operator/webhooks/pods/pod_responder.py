"""Makes the operator a responder of a gang's pods, where the cluster has the API for it (KEP-4563). Pure."""

from __future__ import annotations

import copy

from gracepoint_operator.model.eviction_requests import PRIORITY, RESPONDER
from gracepoint_operator.webhooks.training_jobs import Json

#: The API server accepts as many in a pod.
_MOST = 10


def add_responder(pod: Json) -> Json:
    """Returns the pod with the operator as a responder. Its other responders stay.

    Pods that the scheduler places as a group (``spec.schedulingGroup``) cannot have responders.
    """
    spec = pod.get("spec") or {}
    responders: list[Json] = spec.get("evictionResponders") or []
    known = any(item.get("name") == RESPONDER for item in responders)
    if known or len(responders) >= _MOST or spec.get("schedulingGroup") is not None:
        return pod
    made = copy.deepcopy(pod)
    made["spec"]["evictionResponders"] = [*responders, {"name": RESPONDER, "priority": PRIORITY}]
    return made
