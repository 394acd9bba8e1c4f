"""Karpenter's real controller on a lone API server, with its provider that makes Node objects without machines.

Processes: Karpenter, in a process group of its own, until ``karpenter`` ends. Threads: none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.kube.objects import Kind
from tests.api_server.gang import Body, Gang, until
from tests.api_server.programs import running
from tests.ports import held_ports
from tests.testcluster import parts
from tests.testcluster.api_server import ApiServer

POOLS = Kind("/apis/karpenter.sh/v1", "nodepools")
CLASSES = Kind("/apis/karpenter.kwok.sh/v1alpha1", "kwoknodeclasses")
DISRUPTED = "karpenter.sh/disrupted"
TERMINATION = "karpenter.sh/nodeclaim-termination-timestamp"
_POOL = "training"
_TYPE = "c-4x-amd64-linux"


@contextlib.contextmanager
def karpenter(server: ApiServer, folder: Path) -> Iterator[Path]:
    """Runs Karpenter. Gives its log."""
    environment = {
        "KUBECONFIG": str(server.kubeconfig),
        "SYSTEM_NAMESPACE": "default",
        "DISABLE_LEADER_ELECTION": "true",
        "LOG_LEVEL": "debug",
    }
    with held_ports(2) as (metrics, probes):
        environment |= {"METRICS_PORT": str(metrics), "HEALTH_PROBE_PORT": str(probes)}
        with running("karpenter", folder, [parts.program("kwok")], **environment) as log:
            yield log


class KarpenterGang(Gang):
    """A gang on two nodes that Karpenter has made.

    Attributes:
        grace: The ``terminationGracePeriod`` of the nodes. With one, Karpenter replaces nodes that have drifted,
            whatever the annotations of their pods say. None: there is none.
        capacity: The kind of their machines, ``on-demand`` or ``spot``.
    """

    grace: str | None = "10m"
    capacity: str = "on-demand"
    _nodes: tuple[str, ...] = ()

    def node(self, index: int) -> str:
        return self._nodes[index] if self._nodes else super().node(index)

    def pod_spec(self, index: int) -> Body:
        """Too large for two on a node, so that Karpenter needs another node before it takes one away."""
        spec = super().pod_spec(index)
        (container,) = spec["containers"]
        return spec | {"containers": [container | {"resources": {"requests": {"cpu": "3"}}}]}

    async def make_nodes(self) -> None:
        """Makes a pool and two NodeClaims, and plays the kubelets of the nodes that Karpenter makes for them."""
        await self.api.create(CLASSES, None, _of("KWOKNodeClass", CLASSES, "default", {}))
        pool = await self.api.create(POOLS, None, _of("NodePool", POOLS, _POOL, _pool(self.grace, self.capacity)))
        digest = "karpenter.sh/nodepool-hash"

        async def hashed() -> JsonObject | None:
            stored = await self.api.get(POOLS, None, _POOL)
            return stored if digest in stored["metadata"].get("annotations", {}) else None

        pool = await until(hashed, "the pool's hash")
        for index in (0, 1):
            body = _of("NodeClaim", objects.NODE_CLAIMS, self.claim(index), _claim(self.grace, self.capacity))
            known = pool["metadata"]["annotations"]
            body["metadata"] |= {
                "labels": {"karpenter.sh/nodepool": _POOL},
                "annotations": {name: known[name] for name in (digest, f"{digest}-version")},
            }
            await self.api.create(objects.NODE_CLAIMS, None, body)
        self._nodes = tuple([await self.becomes_ready(self.claim(index)) for index in (0, 1)])

    def claim(self, index: int) -> str:
        return f"{self.name}-{index}"

    async def becomes_ready(self, claim: str) -> str:
        """Plays the kubelet of the node that Karpenter makes for a NodeClaim. Returns the node's name."""

        async def made() -> str:
            found = (await self.api.get(objects.NODE_CLAIMS, None, claim)).get("status", {})
            provider = str(found.get("providerID", "")).removeprefix("kwok://")
            return str((await self.api.get(objects.NODES, None, provider))["metadata"]["name"]) if provider else ""

        name: str = await until(made, f"the node of {claim}")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "played by the test"}
        sizes = {"cpu": "4", "memory": "8Gi", "pods": "110", "ephemeral-storage": "20Gi"}
        status = {"conditions": [ready], "capacity": sizes, "allocatable": sizes}
        await self.api.merge(objects.NODES, None, f"{name}/status", {"status": status})

        async def untainted() -> bool:
            taints = (await self.api.get(objects.NODES, None, name))["spec"].get("taints") or []
            kept = [taint for taint in taints if not taint["key"].startswith("node.kubernetes.io/")]
            if kept != taints:  # as the controller of nodes does once they are ready
                await self.api.merge(objects.NODES, None, name, {"spec": {"taints": kept or None}})
            return not kept

        await until(untainted, f"the node of {claim} to be registered")

        async def initialized() -> bool:
            found = (await self.api.get(objects.NODE_CLAIMS, None, claim)).get("status", {}).get("conditions", [])
            return any(item["type"] == "Initialized" and item["status"] == "True" for item in found)

        await until(initialized, f"{claim} to be initialized")
        return name

    async def disrupted(self, index: int) -> bool:
        """Whether Karpenter has begun to disrupt a node."""
        node = await self.api.get(objects.NODES, None, self.node(index))
        return any(taint["key"] == DISRUPTED for taint in node["spec"].get("taints") or ())

    async def drift(self, purpose: str = "something-else") -> None:
        """Changes the pool, so that its nodes are to be replaced; ``training``: as it was."""
        labels = {"template": {"metadata": {"labels": {"purpose": purpose}}}}
        await self.api.merge(POOLS, None, _POOL, {"spec": labels})

    async def replacements(self) -> list[JsonObject]:
        """The NodeClaims that Karpenter has made in the place of the gang's own."""
        own = {self.claim(index) for index in (0, 1)}
        claims = (await self.api.list(objects.NODE_CLAIMS)).items
        return [
            claim
            for claim in claims
            if claim["metadata"]["name"] not in own and "deletionTimestamp" not in claim["metadata"]
        ]

    async def delete_claim(self, name: str) -> None:
        """Whatever Karpenter writes into it meanwhile."""
        await asyncio.to_thread(self.server.kubectl, "delete", objects.NODE_CLAIMS.plural, name, "--wait=false")

    async def protect(self) -> None:
        """Asks Karpenter to evict none of the pods, as a user would in their template."""
        annotations = {"karpenter.sh/do-not-disrupt": "true"}
        for index in (0, 1):
            await self.api.merge(objects.PODS, self.name, self.pod(index), {"metadata": {"annotations": annotations}})

    async def clean(self) -> None:
        """Removes the pods, and the nodes through Karpenter, so that the next test begins without any."""
        self.server.kubectl("delete", "pods", "--all", f"--namespace={self.name}", "--force", "--wait=false")
        for kind in (POOLS, objects.NODE_CLAIMS):
            self.server.kubectl("delete", kind.plural, "--all", "--wait=false")

        async def gone() -> bool:
            return not (await self.api.list(objects.NODE_CLAIMS)).items

        await until(gone, "the NodeClaims to go", within_s=60)
        with contextlib.suppress(client.NotFound):
            await self.api.delete(CLASSES, await self.api.get(CLASSES, None, "default"))

        async def unused() -> bool:
            return not (await self.api.list(CLASSES)).items

        await until(unused, "the class of the nodes to go, which Karpenter holds while it knows of any")


def _of(title: str, kind: Kind, name: str, spec: Body) -> Body:
    return {"apiVersion": kind.api_version, "kind": title, "metadata": {"name": name}, "spec": spec}


def _machine(grace: str | None, capacity: str) -> Body:
    return {
        "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
        "requirements": [
            {"key": "karpenter.sh/capacity-type", "operator": "In", "values": [capacity]},
            {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": [_TYPE]},
        ],
        "expireAfter": "Never",
        **({} if grace is None else {"terminationGracePeriod": grace}),
    }


def _pool(grace: str | None, capacity: str) -> Body:
    return {
        "template": {"metadata": {"labels": {"purpose": "training"}}, "spec": _machine(grace, capacity)},
        "disruption": {
            "consolidationPolicy": "WhenEmptyOrUnderutilized",
            "consolidateAfter": "Never",
            "budgets": [{"nodes": "1"}],
        },
    }


def _claim(grace: str | None, capacity: str) -> Body:
    return {**_machine(grace, capacity), "resources": {"requests": {"cpu": "1", "memory": "1Gi", "pods": "10"}}}
