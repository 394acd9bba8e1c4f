"""Announces the end of a node the way Google's cloud does, to a fraction of a millisecond known when.

The taint is put by one request on a connection that is open already, since starting kubectl takes longer than
what is measured. Starts no thread.
"""

from __future__ import annotations

import time

import urllib3.exceptions
from kubernetes import client, config

from tests.testcluster.api import Cluster, ClusterError

#: What GKE puts on a spot node that is going away; the kubelet then leaves user pods GRACE_S.
TERMINATION_TAINT = {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}
GRACE_S = 15.0
#: What AWS's handler puts on a node that an Auto Scaling group ends; pods get their own grace period.
SCALE_DOWN_TAINT = {"key": "aws-node-termination-handler/asg-lifecycle-termination", "effect": "NoSchedule"}
#: What an administrator, or a controller, puts on a node whose machine is known to be off.
OUT_OF_SERVICE_TAINT = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
_REQUEST_TIMEOUT_S = 10.0


def taint(cluster: Cluster, node: str, taint: dict[str, str] = TERMINATION_TAINT) -> float:
    """Puts a taint on a node.

    Returns:
        When, in seconds since the epoch by this machine's clock: just before the request.
    """
    return _change_taints(cluster, node, add=[taint], remove_key=taint["key"])


def untaint(cluster: Cluster, node: str, key: str = TERMINATION_TAINT["key"]) -> float:
    """Takes the taints of that key off a node; returns when, as ``taint`` does."""
    return _change_taints(cluster, node, add=[], remove_key=key)


def _change_taints(cluster: Cluster, node: str, *, add: list[dict[str, str]], remove_key: str) -> float:
    try:
        with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
            nodes = client.CoreV1Api(connection)
            spec = nodes.read_node(node, _request_timeout=_REQUEST_TIMEOUT_S).spec
            present = connection.sanitize_for_serialization(spec.taints or [])
            taints = [one for one in present if one["key"] != remove_key] + add
            began_unix_s = time.time()
            nodes.patch_node(node, {"spec": {"taints": taints}}, _request_timeout=_REQUEST_TIMEOUT_S)
    except (client.ApiException, urllib3.exceptions.HTTPError) as error:
        raise ClusterError(f"cannot change the taints of {node}: {error}") from error
    return began_unix_s
