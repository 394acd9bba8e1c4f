"""What holds a node and its NodeClaim is taken off after a fault, also after one that was cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from tests.replay.kinds import release_nodes
from tests.testcluster.api import Cluster
from tests.testcluster.api_server import open_api_server, why_not

CLAIMS = "nodeclaims.karpenter.sh"
HELD = {"finalizers": ["karpenter.sh/termination"]}


def test_nodes_and_claims_that_a_fault_has_held_go_when_they_are_deleted_and_others_stay(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    names = {"plural": "nodeclaims", "singular": "nodeclaim", "kind": "NodeClaim", "listKind": "NodeClaimList"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    spec = {"group": "karpenter.sh", "scope": "Cluster", "names": names, "versions": [version]}
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "spec": spec}
    owner = {"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "name": "claim-1", "uid": "1"}
    with open_api_server(tmp_path) as server:
        for name in ("node-1", "node-2", "theirs"):
            held = {"name": name, "ownerReferences": [owner], **HELD}
            server.create({"apiVersion": "v1", "kind": "Node", "metadata": held})
        release_nodes(cast(Cluster, server), "node-2", "gone")  # NodeClaims are not known yet
        server.define(bodies=(crd | {"metadata": {"name": CLAIMS}},))
        for name in ("claim-1", "claim-2"):
            server.create({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "metadata": {"name": name, **HELD}})
        server.kubectl("delete", "node/node-1", f"{CLAIMS}/claim-1", "--wait=false")
        for _ in range(2):
            release_nodes(cast(Cluster, server), "node-1", "node-2")
            assert server.kubectl("get", CLAIMS, "--output=name").stdout == ""
            nodes = json.loads(server.kubectl("get", "nodes", "--output=json").stdout)["items"]
            assert {each["metadata"]["name"]: "finalizers" in each["metadata"] for each in nodes} == {
                "node-2": False,
                "theirs": True,
            }
            assert ["ownerReferences" in each["metadata"] for each in nodes] == [False, True]
