"""Injects the keeper beside the training container: a sidecar that finishes saves after the trainer's death. Pure.

The keeper is an init container with ``restartPolicy: Always``. The kubelet starts it before the training container, and
tells it to end after that, within the pod's grace period. It runs the training container's own image, and sees the same
volumes and credentials, because it writes the same checkpoints. It has the token for the operator, too: it reports that
the trainer does not run. Because it starts first, it also has the newest checkpoint read into the page cache while the
training container starts.
"""

from __future__ import annotations

import copy

from gracepoint.wire import names
from gracepoint.wire.names import Env
from gracepoint_operator.webhooks.training_jobs import Json

#: Name of the container and of the volume with its socket. The name is reserved.
KEEPER = "gracepoint-keeper"

_MEMORY = "512Mi"  # for itself: snapshots are charged to the training container, which touches them first
_CPU = "1"
# The library's module that reads ahead. A keeper of an older library ignores it.
_READS_AHEAD = "gracepoint.session.ahead_in_keeper"
# Variables that only the trainer has. It tells the keeper where the operator is, whose address may change for new pods.
_NOT_ITS = frozenset({Env.OPERATOR_URL, Env.CA_CERTIFICATE, Env.TOKEN_FILE})
# Fields of the training container that are taken over as they are.
_SHARED = ("image", "imagePullPolicy", "envFrom", "securityContext", "workingDir")


def inject_keeper(pod: Json, container: Json) -> None:
    """Adds the keeper to the spec of a pod. Repeating it changes nothing.

    Args:
        pod: The spec of the pod. It is changed.
        container: Its training container, with everything else that is injected.
    """
    mount = {"name": KEEPER, "mountPath": names.KEEPER_DIRECTORY}
    container["volumeMounts"] = [*_others(container.get("volumeMounts"), KEEPER), mount]
    pod["volumes"] = [*_others(pod.get("volumes"), KEEPER), {"name": KEEPER, "emptyDir": {}}]
    keeper = {
        "name": KEEPER,
        **{field: copy.deepcopy(container[field]) for field in _SHARED if field in container},
        "restartPolicy": "Always",
        "command": ["python3", "-m", "gracepoint.async_calls.keeper", names.KEEPER_SOCKET, _READS_AHEAD],
        "env": [copy.deepcopy(v) for v in container.get("env") or [] if v["name"] not in _NOT_ITS],
        "volumeMounts": copy.deepcopy(container["volumeMounts"]),
        "resources": _resources(container),
    }
    pod["initContainers"] = [*_others(pod.get("initContainers"), KEEPER), keeper]


def _resources(container: Json) -> Json:
    """Returns the keeper's resources. A pod that is Guaranteed without it is Guaranteed with it."""
    limits = (container.get("resources") or {}).get("limits") or {}
    own = {"cpu": _CPU, "memory": _MEMORY}
    return {"requests": own, "limits": own if "cpu" in limits else {"memory": _MEMORY}}


def _others(items: list[Json] | None, name: str) -> list[Json]:
    return [item for item in items or [] if item["name"] != name]
