"""The policy of a workload whose CheckpointPolicy does not exist any more: the one that it was created with. Pure.

The webhook writes the policy's spec into the workload. So all replicas know it, also after a restart. Workloads that
an older version prepared lack it; then the copy in their newest Preemption counts, if there is one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from gracepoint.wire import names
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.workloads import Workload

#: The copy in a Preemption has only what the operator decides by. The rest is in the pods.
_ELSEWHERE = {"checkpoint": {"directory": "/in-the-pods"}}


def kept_policy(workload: Workload, epochs: Sequence[PreemptionRecord]) -> CheckpointPolicy | None:
    """Returns the policy that a workload was created with. None if that is not known.

    Args:
        workload: The workload.
        epochs: Its Preemptions, oldest first.
    """
    if not workload.injected:
        return None
    made = _read(workload.namespace, workload.policy, workload.created_with) if workload.created_with else None
    if made is None and epochs:
        spec = {**epochs[-1].spec.policy.spec.to_json(), **_ELSEWHERE}
        made = _read(workload.namespace, workload.policy, json.dumps(spec))
    return made


@functools.lru_cache(maxsize=128)  # of texts that tenants may choose
def _read(namespace: str, name: str, spec: str) -> CheckpointPolicy | None:
    """Reads a spec that is kept in an object, where anybody may have written something else."""
    try:
        return CheckpointPolicy.of(
            {
                "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
                "kind": CheckpointPolicy.kind_name,
                "metadata": {"namespace": namespace, "name": name},
                "spec": json.loads(spec),
            }
        )
    except (Unreadable, ValueError, RecursionError):
        return None
