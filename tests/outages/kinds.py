"""The kinds that the operator watches, as an API server without controllers has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.testcluster.api_server import ApiServer

_CRDS = Path(__file__).parents[2] / "crds"
_OTHERS = (
    ("jobset.x-k8s.io", "v1alpha2", "JobSet", "Namespaced"),
    ("karpenter.sh", "v1", "NodeClaim", "Cluster"),
    ("kueue.x-k8s.io", "v1beta2", "Workload", "Namespaced"),
)


def install(server: ApiServer) -> None:
    """Defines every kind that the operator watches."""
    server.define(_CRDS, bodies=tuple(_definition(*other) for other in _OTHERS))


def node_claims() -> dict[str, Any]:
    """The CRD of Karpenter's kind."""
    return _definition(*_OTHERS[1])


def node(name: str, *taints: Mapping[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"taints": list(taints)}}


def _definition(group: str, version: str, kind: str, scope: str) -> dict[str, Any]:
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Groups of the Kubernetes project are protected by this.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}},
            ],
        },
    }
