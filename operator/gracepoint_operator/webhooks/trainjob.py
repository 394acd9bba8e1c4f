"""A TrainJob of the Kubeflow Trainer: its label goes on to the JobSet that the Trainer makes of it. Pure."""

from __future__ import annotations

import copy

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.webhooks.training_jobs import Json


def label_handed_on(trainjob: Json) -> Json:
    """Returns the TrainJob with the policy's label among those that the Trainer copies to the JobSet.

    Raises:
        AttributeError, LookupError, TypeError: It is not of TrainJob's schema.
    """
    made = copy.deepcopy(trainjob)
    name = ((made.get("metadata") or {}).get("labels") or {}).get(LABEL_POLICY)
    if name is not None:
        labels = made["spec"].setdefault("labels", {})
        labels.setdefault(LABEL_POLICY, name)
    return made
