"""The annotations by which pods are protected from autoscalers, and who has set them. Pure.

Users may set these annotations themselves. So the operator notes in an annotation of its own which ones it has set, and
changes no others.
"""

from __future__ import annotations

from collections.abc import Mapping

from gracepoint.wire.names import GROUP

#: What Karpenter and the cluster autoscaler look for before they remove a node for reasons of their own.
PROTECTING = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
#: Its value lists those that the operator has set, separated by commas.
SET_BY_US = f"{GROUP}/protected-by"
#: All that is read of a pod's annotations.
READ = (*PROTECTING, SET_BY_US)


def changes(present: Mapping[str, str], *, protect: bool) -> dict[str, str | None]:
    """Returns the annotations that have to change. A value of None removes the annotation. Empty if nothing has to.

    Args:
        present: Those of ``READ`` that the pod has.
        protect: Whether the pod is to be protected.
    """
    ours = {key for key in present.get(SET_BY_US, "").split(",") if key in PROTECTING}
    if not protect:
        return dict.fromkeys([*sorted(ours & present.keys()), SET_BY_US]) if SET_BY_US in present else {}
    missing = {key: value for key, value in PROTECTING.items() if key not in present}
    if not missing:
        return {}
    return {**missing, SET_BY_US: ",".join(sorted(ours | missing.keys()))}
