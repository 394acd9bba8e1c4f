"""The API server stores the cause of a Preemption that is corrected when its first signal becomes known late."""

from __future__ import annotations

from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.kube.objects import parse_time
from tests.api_server.gang import Gang, running, told, until
from tests.unit.operator.fakes.objects import node_claim


async def test_record_of_a_reclaimed_spot_node_gets_the_cause_of_its_node_claim(gang: Gang) -> None:
    await gang.make()
    finalizers = {"metadata": {"finalizers": ["karpenter.sh/termination"]}}
    await gang.api.merge(objects.NODES, None, gang.node(0), finalizers)
    async with running(gang) as replica:
        await replica.watch()
        process = await replica.connect(1)
        gang.server.kubectl("delete", "node", gang.node(0), "--wait=false")
        await replica.watch()
        assert (await told(process)).cause == "ScaleDown"

        async def noticed() -> list[JsonObject]:
            return [body for body in await gang.records() if body.get("status", {}).get("phase") == "Noticed"]

        (record,) = await until(noticed, "the record")
        assert record["spec"]["cause"] == "ScaleDown"
        node = await gang.api.get(objects.NODES, None, gang.node(0))
        deleted_at = parse_time(node["metadata"]["deletionTimestamp"])
        claim = node_claim(gang.node(0), deleted_at=deleted_at, labels={"karpenter.sh/capacity-type": "spot"})
        replica.core.feed(objects.NODE_CLAIMS, "MODIFIED", claim)
        assert (await told(process)).cause == "SpotTermination"

        async def corrected() -> bool:
            (stored,) = await gang.records()
            cause, message = stored["spec"]["cause"], stored["status"]["message"]
            return cause == "SpotTermination" and message.startswith("SpotTermination: deletion of the NodeClaim")

        await until(corrected, "the corrected record")
    await gang.api.merge(objects.NODES, None, gang.node(0), {"metadata": {"finalizers": None}})
